"""`precision=fastest` measures the plain formats once for a machine, and writes what it chose into the config."""

import json
import shutil
from pathlib import Path

import pytest

from quicksilver.models.loading import EMBEDDED, load, locate
from quicksilver.runs import ensure, precision
from quicksilver.runs.config import compose
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.quantized.kernels import machine

BF16 = {"float32 sdpa": 10.0, "float32 eager": 12.0, "bfloat16 sdpa": 6.0, "int8 sdpa": 8.0}


@pytest.fixture
def times(monkeypatch) -> list[dict[str, float]]:
    """What the next measurements find, the last one for ever."""
    found = [BF16]
    monkeypatch.setattr(precision, "measured", lambda loaded, prompt: found.pop(0) if len(found) > 1 else found[0])
    monkeypatch.setattr(precision, "_said", set())
    return found


def test_the_choice_is_measured_once_printed_and_named_by_the_record(words, tmp_path: Path, times, capsys) -> None:
    words = [*words, "dataset.windows=2", "measure.audit.enabled=false"]
    times.insert(0, BF16)
    times[1] = {**BF16, "bfloat16 sdpa": 99.0}  # would be found by a second measurement
    first, again = compose([*words, "precision=fastest"]), compose([*words, "precision=fastest"])
    said = capsys.readouterr().err
    assert said.count("precision=fastest: bfloat16 sdpa for tiny. 2 prompts take: bfloat16 sdpa 6.0 ms, int8 sdpa 8.0 ms") == 1
    assert first == again == compose([*words, "model.dtype=bfloat16"])
    (record,) = ensure([first])
    assert record.model.dtype == "bfloat16"
    kept = tmp_path / "results" / "cache" / "precision.json"
    (by_model,) = json.loads(kept.read_text()).values()
    assert list(by_model.values()) == [BF16]
    for damaged in ("{", json.dumps({machine(): {key: {"float32 sdpa": "fast"} for key in by_model}})):
        kept.write_text(damaged)
        assert compose([*words, "precision=fastest"]).model.dtype == "float32"  # measured anew


@pytest.mark.parametrize(("found", "dtype", "attention", "modules"), [
    ({"float32 sdpa": 10.0, "bfloat16 sdpa": 9.7}, "float32", "sdpa", []),  # too little
    ({"float32 sdpa": 10.0, "float32 eager": 8.0}, "float32", "eager", []),
    ({"float32 sdpa": 10.0, "int8 sdpa": 7.0}, "float32", "sdpa", ["int8_dynamic"]),
])  # fmt: skip
def test_what_is_chosen_stands_in_the_config(words, times, found, dtype, attention, modules) -> None:
    times[:] = [found]
    config = compose([*words, "precision=fastest"])
    assert (config.model.dtype, config.model.attn_implementation, list(config.modules)) == (dtype, attention, modules)


@pytest.mark.parametrize(("more", "says"), [
    (["precision=quick"], "precision=quick"),
    (["modules=[bfloat16]"], r"modules\.bfloat16 fixes the number format \(bfloat16\)"),
    (["modules=[adaptive_quantization]"], r"modules\.adaptive_quantization fixes the number format \(integer\)"),
    (["modules=[block_attention]"], r"modules\.block_attention fixes the attention"),
    (["model.parallel=tensor", "measure=ranks"], r"one process measures, and model\.parallel=tensor"),
])  # fmt: skip
def test_what_fixes_the_format_already_is_refused(words, times, more, says) -> None:
    with pytest.raises(ConfigError, match=says):
        compose([*words, "precision=fastest", *more])


def test_a_quantised_checkpoint_is_refused(words, times, tmp_path: Path) -> None:
    folder = tmp_path / "quantised"
    fitted = shutil.ignore_patterns("predicted_kv", "learned_halting", "tuned_lens")
    shutil.copytree(EMBEDDED / "reference-gpt2", folder, ignore=fitted)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match=r"the checkpoint of model=tiny is quantised already\. Leave precision=fastest out"):
        compose([*words, f"model.path={folder}", "precision=fastest"])


def test_every_candidate_that_runs_here_is_timed(words) -> None:
    config = compose(words)
    found = precision.measured(load(config.model, locate(config.model, None)), 24)
    assert {"float32 sdpa", "float32 eager", "bfloat16 sdpa", "bfloat16 eager"} <= set(found)
    assert all(ms > 0 for ms in found.values())
