"""Every key of a run, and public calls, × values of the wrong kind: an error of one line, or a value that may stand there."""

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import thinning
import tiny
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from saying import refused_in_a_line

from quicksilver.measure.perplexity import Protocol
from quicksilver.modules import Halting, Replay, Schedule
from quicksilver.runs.choices import files_stamp
from quicksilver.runs.config import compose, composed, quoted, run_config
from quicksilver.runs.parts import build_modules
from quicksilver.runtime import QuickSilverError, Trace, apply
from quicksilver.runtime.errors import ConfigError

MODULES = ("halting_attention", "kv_skipping", "token_fusion", "adaptive_quantization")
WRONG: list[Any] = ["no", "ü", "0.2", "p101", math.nan, -1, -0.5, True, 10**20, ["x"], {"a": 1}, [[]]]
TEXTS = {
    "name", "path", "revision", "adapter", "test", "calibration", "id", "config", "text_field", "project", "root", "results_dir",
    "country_iso_code",
}  # fmt: skip


def base() -> DictConfig:
    words = (f"modules=[{','.join(MODULES)}]", "model=reference-gpt2", "protocol=continuation")
    return composed(quoted(words), (), files_stamp(()))


def leaves(node: Any, key: str = "") -> list[str]:
    if not OmegaConf.is_dict(node):
        return [key]
    return [leaf for name in node for leaf in leaves(node._get_node(name), f"{key}.{name}" if key else str(name))]


def refusal(config: DictConfig, key: str, value: Any) -> str | None:
    """What is said of the value; None: it is accepted."""
    changed = config.copy()
    try:
        OmegaConf.update(changed, key, value, merge=False)
        run = run_config(changed, (f"{key}={value}",))
        Protocol(**dataclasses.asdict(run.protocol))
        build_modules(run.modules)
    except ConfigError as error:
        return str(error)
    except OmegaConfBaseException as error:
        return str(error).splitlines()[0]  # composing explains it (`explain`); here it was set past Hydra
    return None


def test_no_wrong_value_of_any_key_gets_through() -> None:
    config = base()
    keys = [key for key in leaves(config) if not key.startswith("hydra") and ".enabled" not in key and "_target_" not in key]
    assert len(keys) > 130
    tried = [(key, value) for key in keys for value in WRONG]
    if not thinning.whole:
        tried = random.Random(0).sample(tried, 150)
    found = []
    for key, value in tried:
        said, last = refusal(config, key, value), key.split(".")[-1]
        if said is None:
            section = OmegaConf.select(config, key.rpartition(".")[0]) if "." in key else None
            idle = section is not None and section.get("enabled") is False
            if not (idle or (isinstance(value, bool | int | float | str) and last in TEXTS) or fits(config, key, value)):
                found.append(f"{key}={value!r} is accepted")
        elif "\n" in said:
            found.append(f"{key}={value!r}: {said}")
    assert not found


def fits(config: DictConfig, key: str, value: Any) -> bool:
    """Whether the value is of the kind that stands there: a flag for a flag, a number within its range for a number."""
    before = OmegaConf.select(config, key)
    if key.endswith("_ids"):  # a name of a set of tokens stands for their ids, once there is a tokenizer
        return value == ["x"]
    if key.endswith("tau_attention"):
        return value in (-1, -0.5)
    if key.startswith("measure.") and isinstance(before, bool) and value == "no":
        return True  # OmegaConf reads it as false
    return key == "measure.name" or (type(before) is type(value) and isinstance(value, bool | str))


@pytest.mark.parametrize("value", ["", " "])
@pytest.mark.parametrize("key", ["results_dir", "model.path", "dataset.files.test", "data.root"])
def test_an_empty_place_is_refused_or_means_none(key: str, value: str) -> None:
    said = refusal(base(), key, value)
    assert said is None or key in said


# --- public calls ---------------------------------------------------------------------------------------------------------------
WRONG_ARGUMENTS: list[Any] = ["0.2", "abc", None, float("nan"), -1, True, {}, object()]
CALLS: dict[str, Callable[[Any], object]] = {
    "from_preset of a share": lambda value: Halting.from_preset(tiny.load("gpt2"), save=value),
    "from_preset of a length": lambda value: Halting.from_preset(tiny.load("gpt2"), save=0.2, prompt_tokens=value),
    "from_preset of a model": lambda value: Halting.from_preset(value, save=0.2),
    "a model": lambda value: apply(value, []),
    "an execution": lambda value: apply(tiny.load("gpt2"), [], execution=value),
    "a trace": Replay,
    "a file": Trace.load,
    "a schedule": lambda value: Schedule(value, 0.1, 3),
    "a protocol": Protocol,
    "a length": lambda value: Protocol("all", window_tokens=value),
    "overrides": compose,
    "an override": lambda value: compose([value]),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_of_the_wrong_kind_is_refused_in_one_line(call: str) -> None:
    for value in WRONG_ARGUMENTS:
        with refused_in_a_line(kind=QuickSilverError):
            CALLS[call](value)
