"""What is measured and fitted on calibration text: `calibrate` measures once; `fit` and `schedule` cut the windows they are asked for."""

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
import yaml
from saying import unsaid

from quicksilver.fitting.fit import fit_text
from quicksilver.modules.calibration import SIGNALS, Calibration
from quicksilver.modules.fitted import Translator
from quicksilver.modules.halting import Halting
from quicksilver.runtime.architecture import architecture_of


def test_it_measures_once(tmp_path: Path, data_root: Path, prints) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a small dog. It had a red ball and it liked to play all day. " * 20)
    words = ["calibrate", "model=stories260k", f"data.root={data_root}", f"text={text}", "dataset.calibration_windows=3"]
    words += ["protocol.window_tokens=64", f"output={tmp_path / 'out'}", f"results_dir={tmp_path / 'results'}", "kv=true"]
    printed = prints(*words).out
    assert "measured: 3 windows of 64 tokens" in printed
    path = printed.splitlines()[-1].removeprefix("calibration=")
    calibration = Calibration.load(path)
    assert set(calibration.percentiles) == {s.key for s in SIGNALS} | {"attention-max-16-halted"}
    assert calibration.provenance["source"]["text"] == str(text)
    model = tiny.load(tiny.STORIES)
    Halting(tau_drift="p25", tau_entropy="p25", calibration=path, resume_layers=0).bind(architecture_of(model))
    row = next(line for line in printed.splitlines() if line.split()[0] == "1")
    assert float(row.split()[1]) == pytest.approx(calibration.thresholds("drift-relative", 25)[1], abs=1e-4)
    again = prints(*words).out
    assert "found: 3 windows" in again
    assert again.splitlines()[-1] == f"calibration={path}"


def test_maps_and_schedules_are_of_the_windows_that_are_asked_for(
    tmp_path: Path, prints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUICKSILVER_DATA", raising=False)  # or paragraphs are compared with every text that is there
    monkeypatch.setattr(
        "quicksilver.cli.commands.search.choices", lambda *_: ["own", "python-docs", "wikitext103-tagged"]
    )  # of 28
    (tmp_path / "dataset").mkdir()
    (tmp_path / "own.txt").write_text("".join(f"Line {i} says that {i * i} is the square of {i}.\n\n" for i in range(400)))
    files = {"test": __file__, "calibration": str(tmp_path / "own.txt")}
    described = {"name": "own", "reader": "text", "form": "raw", "files": files}
    (tmp_path / "dataset" / "own.yaml").write_text(yaml.safe_dump(described))
    shared = ["--config-dir", str(tmp_path), "text=[python-docs,own]", "protocol.window_tokens=64", "protocol.prompt_tokens=48"]
    results = tmp_path / "my results"
    shared += [f"results_dir={results}"]
    printed = prints("fit", *shared, "layers=[9]", "windows=32", "distill=1", "threads=1").out
    assert ", 1 thread" in (results / "translators" / "far-gpt2.cost.json").read_text()
    path = results / "translators" / "far-gpt2.layer9.safetensors"
    assert Translator.load(path).provenance["text"]["window_tokens"] == 64
    assert "\nown: 16 windows" in printed
    assert {shared[-1], "save=0.4", shared[2], f"translators=[{path}]"} < {*shlex.split(printed.splitlines()[-1])}
    printed = prints("schedule", *shared, f"translators=[{path}]", "save=0.3", "windows=2").out
    found = yaml.safe_load((results / "translators" / "far-gpt2.schedules.yaml").read_text())["schedules"][30]
    assert found["saved_pct"] >= 30
    assert round(48 * found["schedule"]["drop_share"], 3) % 1 == 0  # whole tokens of a prompt of 48
    assert {"protocol.prompt_tokens=48", shared[-1], "modules=[predicted_kv]"} < {*shlex.split(printed.splitlines()[-1])}
    # Windows of the choice are cut from those that the maps were not fitted on; longer ones would have some of the fitted text.
    longer = [word.replace("tokens=64", "tokens=96") for word in shared]
    said = prints("schedule", *longer, f"translators=[{path}]", "save=0.3", code=2).err
    assert unsaid(said, "protocol.window_tokens=96", "every other window of 64 tokens", "Give at most 64.") == []
    other = tmp_path / "other.safetensors"
    fitted = Translator.load(path)
    text = fitted.provenance["text"] | {"window_tokens": 32}
    replace(fitted, provenance=fitted.provenance | {"text": text}).save(other, torch.float16)
    said = prints("schedule", *shared, f"translators=[{path},{other}]", "save=0.3", code=2).err
    assert unsaid(said, f"{other} on windows of 32 tokens", "one protocol.window_tokens.") == []


@pytest.mark.parametrize("window_tokens", [8, 16, 32])
def test_no_text_is_fitted_on_and_chosen_on_whatever_the_windows(window_tokens: int) -> None:
    text = SimpleNamespace(text="\n\n".join(f"paragraph {i}" for i in range(400)), source="made here", digest="0")

    def numbered(content: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [*range(len(content))]}

    half = partial(fit_text, {"made": text}, {}, numbered, windows=None)
    fitted, chosen = (half(half=which, window_tokens=n, halves_of=32) for which, n in (("fit", 32), ("choose", window_tokens)))
    assert chosen.ids.shape[1] == window_tokens
    assert chosen.ids.numel() > 0.9 * fitted.ids.numel()
    assert not set(fitted.ids.flatten().tolist()) & set(chosen.ids.flatten().tolist())
