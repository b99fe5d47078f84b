"""`quicksilver calibrate`: measures once, names its file, and speaks the grammar of every other command."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from quicksilver.cli import main as console
from quicksilver.modules.calibration import SIGNALS, Calibration
from quicksilver.modules.halting import Halting
from quicksilver.runtime.architecture import architecture_of


def test_it_measures_once(tmp_path: Path, data_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a small dog. It had a red ball and it liked to play all day. " * 20)
    words = ["calibrate", "model=stories260k", f"data.root={data_root}", f"text={text}", "dataset.calibration_windows=3"]
    words += ["protocol.window_tokens=64", f"output={tmp_path / 'out'}", f"results_dir={tmp_path / 'results'}", "kv=true"]
    assert console.main(words) == 0
    printed = capsys.readouterr().out
    assert "measured: 3 windows of 64 tokens" in printed
    path = printed.splitlines()[-1].removeprefix("calibration=")
    calibration = Calibration.load(path)
    assert set(calibration.percentiles) == {s.key for s in SIGNALS} | {"attention-max-16-halted"}
    assert calibration.provenance["source"]["text"] == str(text)
    model = tiny.load(tiny.STORIES)
    Halting(tau_drift="p25", tau_entropy="p25", calibration=path, resume_layers=0).bind(architecture_of(model))
    row = next(line for line in printed.splitlines() if line.split()[0] == "1")
    assert float(row.split()[1]) == pytest.approx(calibration.thresholds("drift-relative", 25)[1], abs=1e-4)
    assert console.main(words) == 0
    again = capsys.readouterr().out
    assert "found: 3 windows" in again
    assert again.splitlines()[-1] == f"calibration={path}"
