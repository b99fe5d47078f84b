"""What fitting took is said and kept, with the machine."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from quicksilver.fitting.fit import FitCost, priced


def test_the_price_of_a_fit_has_its_time_its_memory_and_its_machine(tmp_path: Path) -> None:
    megabytes = 64

    def fit() -> str:
        torch.ones(megabytes, 2**18).sum()  # float32
        return "a map"

    found, cost = priced(fit, model="tiny", layers=[3, 4], distill_steps=70, tokens=2048)
    assert found == "a map"
    assert cost.seconds >= 0
    assert cost.peak_bytes > megabytes * 2**20
    assert torch.__version__ in cost.machine
    cost.save(tmp_path / "tiny.cost.json")
    assert FitCost(**json.loads((tmp_path / "tiny.cost.json").read_text())) == cost
    said = FitCost("tiny", [3, 4], 70, 122880, 40.04, 61.0, 812_000_000, "A Processor, torch 2, 2 threads").line()
    assert said == (
        "tiny: 2 maps on 122,880 tokens, 70 steps of distillation each: 40.0 s (61.0 s of processor time), peak memory 0.81 GB; "
        "A Processor, torch 2, 2 threads"
    )
