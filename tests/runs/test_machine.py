"""What is measured once for a machine and kept: plain formats, of which `precision=fastest` writes one into the config, and kernels, which are
printed, in the record, and part of what a record is of."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from quicksilver.models.loading import load, locate
from quicksilver.runs import context, ensure
from quicksilver.runs.config import compose
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.quantized import kernels
from quicksilver.runtime.quantized.kernels import Choices, Kind, weight_of

BF16 = {"float32 sdpa": 10.0, "float32 eager": 12.0, "bfloat16 sdpa": 6.0, "int8 sdpa": 8.0}


@pytest.fixture
def times(monkeypatch) -> list[dict[str, float]]:
    """What the next measurements find, the last one for ever."""
    found = [BF16]
    monkeypatch.setattr(context, "format_times_ms", lambda loaded, prompt: found.pop(0) if len(found) > 1 else found[0])
    monkeypatch.setattr(context, "_said", set())
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
    for damaged in ("{", json.dumps({kernels.machine(): {key: {"float32 sdpa": "fast"} for key in by_model}})):
        kept.write_text(damaged)
        assert compose([*words, "precision=fastest"]).model.dtype == "float32"  # measured anew


@pytest.mark.parametrize(("found", "dtype", "attention", "modules"), [
    ({"float32 sdpa": 10.0, "bfloat16 sdpa": 9.7}, "float32", "sdpa", []),  # too little
    ({"float32 sdpa": 10.0, "float32 eager": 8.0}, "float32", "eager", []),
    ({"float32 sdpa": 10.0, "bfloat16 blocks": 5.0, "bfloat16 sdpa": 6.0, "int8 blocks": 4.8}, "bfloat16", "blocks", []),  # int8 rounds more
    ({"float32 sdpa": 10.0, "int8 sdpa": 7.0}, "float32", "sdpa", ["int8_dynamic"]),
])  # fmt: skip
def test_what_is_chosen_stands_in_the_config(words, times, found, dtype, attention, modules, capsys) -> None:
    times[:] = [found]
    config = compose([*words, "precision=fastest"])
    assert ("Time saved is against dense in float32" in capsys.readouterr().err) == (modules == ["int8_dynamic"])
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
    folder = shutil.copytree(compose(words).model.path, tmp_path / "quantised")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match=r"the checkpoint of model=tiny is quantised already\. Leave precision=fastest out"):
        compose([*words, f"model.path={folder}", "precision=fastest"])


def test_every_candidate_that_runs_here_is_timed(words) -> None:
    config = compose(words)
    found = context.format_times_ms(load(config.model, locate(config.model, None)).model, 24)
    assert {f"{dtype} {attention}" for dtype in ("float32", "bfloat16") for attention in ("sdpa", "eager", "blocks")} <= set(
        found
    )
    assert all(ms > 0 for ms in found.values())


# --- kernels ----------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def fastest(monkeypatch) -> SimpleNamespace:
    """Counts measurements, which find the kernel that it is told."""
    found = SimpleNamespace(name="weight_only", measured=0)

    def choose(linears) -> Choices:
        found.measured += 1
        kinds = {str(Kind.of(weight_of(linear), rows)) for linear in linears for rows in kernels.ROWS}
        return Choices(dict.fromkeys(sorted(kinds), found.name), dict.fromkeys(kinds, 2.0))

    monkeypatch.setattr(kernels, "choose", choose)
    return found


def test_a_choice_is_kept_printed_in_the_record_and_part_of_its_identity(words, tmp_path: Path, fastest, capsys) -> None:
    words = [*words, "dataset.windows=2", "measure.audit.enabled=false"]
    config = compose([*words, "modules=[fastest_linear]"])
    capsys.readouterr()
    first = context.RunContext().fingerprint(config)
    said = capsys.readouterr().err
    assert said.startswith("Kernels for tiny on ")
    assert "weight_only: " in said
    assert said.count("\n") == 1
    (record,) = ensure([config])
    assert record.fingerprint == first
    assert "weight_only for 16 x 16 x 48 float32" in record.kernels["fastest_linear"]
    assert "kernels.fastest_linear" in record.identity.digests
    assert fastest.measured == 1  # read again from the results folder
    kept = tmp_path / "results" / "cache" / "kernels.json"
    with context.torch_threads(config.threads):
        assert list(json.loads(kept.read_text())) == [kernels.machine()]
    # Another machine that finds another kernel has another record; one that finds the same has the same.
    fastest.name = "bfloat16"
    kept.write_text("{}")
    assert context.RunContext().fingerprint(config) != first
    fastest.name = "weight_only"
    kept.write_text('{"damaged": [')
    assert context.RunContext().fingerprint(config) == first
    assert fastest.measured == 3
    named = compose([*words, "modules=[fastest_linear]", "modules.fastest_linear.product=bfloat16"])
    assert not any(name.startswith("kernels") for name in context.RunContext().identity(named).digests)
    assert fastest.measured == 3
    shapes = ((16, 48), (16, 16), (16, 64), (64, 16))  # of the layers of the model
    kinds = {str(Kind(rows, *shape, "float32")) for rows in kernels.ROWS for shape in shapes}
    assert set(context.RunContext().kernel_choices(config).by_kind) == kinds
