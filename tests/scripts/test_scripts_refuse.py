"""What cannot be done is refused in one line, and what was there stays."""

import shutil
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import context_use
import measure_rounding
import model_card
import pytest
import ship_calibrations

from quicksilver.models.loading import EMBEDDED
from quicksilver.runtime import ConfigError

BEFORE = "processor,format,kernels,records,nats,work\nanother,float32,,1,0.0330,1e-07\nhere,float32,,1,0.5,0\n"


def refused(script: Any, monkeypatch: pytest.MonkeyPatch, *words: object) -> str:
    """What a script says instead of doing what these words ask."""
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, words)])
    with pytest.raises((SystemExit, ConfigError)) as caught:
        script.main()
    return str(caught.value)


def test_a_model_without_weights_or_text_has_no_card_and_no_context(tmp_path, monkeypatch):
    shutil.copytree(EMBEDDED / "ladder-gpt2-1m", tmp_path / "bare", ignore=lambda *_: ["model.safetensors"])
    monkeypatch.setattr(context_use.corpus, "read_text", lambda path: "text")
    assert "bare has no *.safetensors" in refused(context_use, monkeypatch, tmp_path / "bare")
    assert "bare has no *.safetensors" in refused(model_card, monkeypatch, "bare", "--folder", tmp_path)
    assert "--windows 0: give" in refused(context_use, monkeypatch, tmp_path / "bare", "--windows", 0)
    monkeypatch.undo()
    for script, words in ((context_use, [tmp_path / "bare"]), (model_card, ["bare", "--folder", tmp_path])):
        assert "is missing. Point --data-root" in refused(script, monkeypatch, *words, "--data-root", tmp_path / "none")


def test_only_models_with_weights_are_calibrated(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="there is no such model"):
        ship_calibrations.main(["nosuch"])
    for file in ("bare/config.json", "whole/model.safetensors"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    monkeypatch.setattr(ship_calibrations, "EMBEDDED", tmp_path)
    with pytest.raises(ConfigError, match="model=whole: there is no such model"):
        ship_calibrations.main([])


def test_a_notebook_that_is_not_there_is_named(tmp_path, monkeypatch):
    pytest.importorskip("nbclient")
    import run_notebooks

    assert "there is no nosuch.ipynb. Give" in refused(run_notebooks, monkeypatch, "--check", "nosuch.ipynb")


def test_rounding_replaces_the_rows_of_this_processor_alone(tmp_path, monkeypatch):
    output = tmp_path / "rounding.csv"
    output.write_text(BEFORE)
    assert "there is no folder" in refused(measure_rounding, monkeypatch, "--output", tmp_path / "none" / "a.csv")
    monkeypatch.setattr(measure_rounding, "jobs_of", lambda *_: [])
    assert "can be scored here" in refused(measure_rounding, monkeypatch, "--output", output)
    assert output.read_text() == BEFORE
    job = SimpleNamespace(name="a row", config=SimpleNamespace(measure=None, threads=1), record=None)
    doubles = {
        "jobs_of": [job], "processor_key": "here", "plan": MagicMock(), "build_measurements": {}, "store_of": None, "format_of": "float32",
        "of_repository": SimpleNamespace(fingerprint="f"), "torch_threads": nullcontext(), "compare": (0.0123, 0.0),
        "bench_of": (SimpleNamespace(modules=()), None),
    }  # fmt: skip
    for name, found in doubles.items():
        monkeypatch.setattr(measure_rounding, name, lambda *_, found=found: found)
    assert measure_rounding.main() == 0
    assert output.read_text() == BEFORE.replace("here,float32,,1,0.5,0", "here,float32,,1,0.012,0")
