"""The benchmark runs and says what it found; how fast anything is, no test asserts."""

from __future__ import annotations

import json
from pathlib import Path

import benchmark
import pytest
import torch

torch.set_num_threads(1)
SHAPE = {"batch": 2, "sequence": 12, "layers": 3, "decay-layers": 4, "width": 16, "heads": 2, "vocabulary": 31, "new-tokens": 3}
TINY = [f"--{name}={value}" for name, value in SHAPE.items()] + ["--repeats=3", "--warmup=1", "--shapes=tiny"]


@pytest.mark.slow
def test_every_section_is_measured_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "deeper" / "benchmark.json"
    assert benchmark.main(["runtime", *TINY, "--dtypes", "float32", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    content = json.loads(output.read_text())
    findings = content["findings"]
    assert {f["section"] for f in findings} == set(benchmark.SECTIONS)
    assert content["options"]["width"] == 16
    assert content["environment"]["threads"] == torch.get_num_threads()
    for finding in findings:
        assert finding["low"] <= finding["value"] <= finding["high"]
        assert finding["section"] in printed
        bound = float(finding["target"].split()[-1])
        holds = finding["value"] >= bound if finding["target"].startswith("at least") else finding["value"] <= bound
        assert finding["reached"] == holds
    (identical,) = [f for f in findings if "bit-identical" in f["what"]]
    assert identical["value"] == 1.0
    decay = [f["details"] for f in findings if f["section"] == "decay"]
    assert len(decay) == 2
    for details in decay:
        assert 0 < details["executed_flops_saved"] < 1
        assert details["alpha"] == pytest.approx(0.63)  # the curve of 36 layers, over 4
    for finding in findings:
        for samples in finding["details"].get("samples_ms", {}).values():
            assert len(samples) == 3


def test_sections_and_types_can_be_chosen(tmp_path: Path) -> None:
    output = tmp_path / "benchmark.json"
    benchmark.main(["runtime", *TINY, "--only", "none", "--dtypes", "bfloat16", "--output", str(output)])
    findings = json.loads(output.read_text())["findings"]
    assert {(f["section"], f["dtype"]) for f in findings} == {("none", "bfloat16")}
