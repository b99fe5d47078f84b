"""One set of defaults, in Python and on the command line; and what needs no thresholds of one's own."""

import dataclasses
import re
import warnings
from typing import Any

import pytest
import tiny
import torch
from omegaconf import OmegaConf

from quicksilver.models.loading import EMBEDDED, load, locate
from quicksilver.models.spec import ModelConfig
from quicksilver.modules import PRESETS, Halting
from quicksilver.modules.calibration import shipped_calibration
from quicksilver.modules.fitted import model_digest
from quicksilver.modules.halting import HaltsEverything
from quicksilver.records.identity import canonical
from quicksilver.runs.choices import choices, config_dir
from quicksilver.runs.config import compose
from quicksilver.runs.parts import build_modules, module_class, module_entry
from quicksilver.runtime import apply

DERIVED = ("full_mask", "forced_mask", "keep_mask", "protected_mask", "exempt_mask")  # tensors, which no yaml holds


def own(name: str) -> dict[str, Any]:
    """What a yaml of conf/modules says itself."""
    content = OmegaConf.to_container(OmegaConf.load(config_dir() / "modules" / f"{name}.yaml"))
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


BASES = [name for name in choices("modules") if "_target_" in own(name)]


@pytest.mark.parametrize("name", BASES)
def test_the_yaml_of_a_class_gives_its_defaults_and_says_nothing_itself(name: str) -> None:
    key, entry = module_entry(name)
    cls: Any = module_class(key, entry)
    assert set(own(name)) == {"_target_"}
    defaults = {option.name: option.default for option in dataclasses.fields(cls) if option.init and option.name not in DERIVED}
    assert {option: value for option, value in entry.items() if option != "_target_"} == canonical(defaults)
    (composed,) = build_modules(compose([f"modules=[{name}]"]).modules)
    ours = cls()
    words = {option for option in defaults if option.endswith("_ids") and defaults[option]}  # have ids with a tokenizer only
    for option in set(defaults) - words:
        assert canonical(getattr(composed, option)) == canonical(getattr(ours, option)), option


def test_every_base_is_among_them() -> None:
    presets = set(choices("modules")) - set(BASES)
    assert presets
    for name in presets:
        (parent,) = (one.removesuffix("@_here_") for one in own(name)["defaults"] if one != "_self_")
        assert parent in BASES
        changed = set(own(name)) - {"defaults"}
        assert changed <= set(module_entry(parent)[1])


@pytest.mark.parametrize("preset", PRESETS)
def test_the_papers_constants_are_the_same_by_either_name(preset: str) -> None:
    entry = module_entry(f"halting_{preset.replace('-', '_')}")[1]
    halting = Halting(preset=preset)
    assert all(canonical(getattr(halting, key)) == canonical(entry[key]) for key in PRESETS[preset])
    assert {key for key, value in module_entry("halting")[1].items() if value != entry[key]} <= set(PRESETS[preset])


# What was fine-tuned for tasks calibrates on their training rows; the ladder compares shares of tokens, which need no percentiles.
NAMES = sorted(folder.name for folder in EMBEDDED.glob("*/") if not re.search("-tasks$|^ladder-|-seed", folder.name))


def executed(model, ids: torch.Tensor, modules: list[Halting]) -> int:
    with torch.no_grad(), apply(model, modules) as run:
        model(ids, use_cache=True, logits_to_keep=1)
        return run.flops.executed


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_has_percentiles_without_a_file(name):
    config = ModelConfig(name=name, path=f"embedded:{name}")
    loaded = load(config, locate(config))
    known = shipped_calibration(model_digest(loaded.model))
    assert known.n_layers == loaded.model.config.num_hidden_layers
    ids = torch.randint(1, 6000, (1, 40), generator=torch.Generator().manual_seed(0))
    dense = executed(loaded.model, ids, [])
    halved = executed(loaded.model, ids, [Halting(tau_drift="p50", tau_entropy=None, resume_layers=0)])
    assert 0 < halved < dense
    presets = ([Halting.from_preset(loaded.model, save=0.3, prompt_tokens=80)], [])
    run, dense = (executed(loaded.model, ids.repeat(1, 2), modules) for modules in presets)
    assert 1 - run / dense == pytest.approx(0.3, abs=0.02)


def test_a_share_that_cannot_be_saved_says_what_can():
    with tiny.refused(r"save=0\.99: halting saves at most 0\.\d\d"):
        Halting.from_preset(tiny.load("llama"), save=0.99, prompt_tokens=24)


def test_a_threshold_above_everything_warns_once_and_one_of_the_model_does_not():
    model = tiny.load("llama")

    def warned(tau_drift: Any, tokens: int = 24) -> int:
        module = Halting(tau_drift=tau_drift, tau_entropy=None, resume_layers=0)
        with warnings.catch_warnings(record=True) as caught, torch.no_grad(), apply(model, [module]):
            warnings.simplefilter("always")
            model(tiny.ids(1, tokens))
            model(tiny.ids(1, tokens))
        return sum(issubclass(one.category, HaltsEverything) for one in caught)

    assert warned(1e6) == 1
    assert warned(1e6, tokens=4) == 0  # so few may all halt by chance
    assert warned(1e-9) == 0
    assert warned([1e6] * tiny.LAYERS) == 0  # somebody chose each
