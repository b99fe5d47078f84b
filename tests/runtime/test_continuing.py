"""A step after the prompt in which no module acts goes straight to its layers: the same numbers and ledgers, and nothing is planned."""

from __future__ import annotations

import pytest
import tiny
import torch

from quicksilver.modules import StagedHalting
from quicksilver.runtime import apply
from quicksilver.runtime.planner import Planner
from quicksilver.runtime.run import Run

EVEN = torch.arange(1, 25).view(2, 12)
DROP = {"before": 2, "share": 0.4, "signal": "position", "missing_kv": "drop"}


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
def test_a_step_in_which_nobody_acts_is_the_one_that_is_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.load(name)
    planned: list[int] = []
    plan = Planner.plan
    monkeypatch.setattr(
        Planner, "plan", lambda self, call, *args, **options: planned.append(call.layer) or plan(self, call, *args, **options)
    )
    found = []
    for quick in (True, False):
        planned.clear()
        if not quick:
            monkeypatch.setattr(Run, "_nobody_acts_in", lambda self, current: False)
        with apply(model, [StagedHalting(stages=[DROP], protect_last=2, protect_first=0, missing_kv="project")]) as run:
            cache = model(EVEN, use_cache=True).past_key_values
            logits = [model(EVEN[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(3)]
        found.append((torch.stack(logits), run.flops, run.kv_bytes, len(planned)))
    (quick_logits, *quick_ledgers, few), (logits_, *ledgers, all_) = found
    assert torch.equal(quick_logits, logits_)
    assert quick_ledgers == ledgers
    layers = len(model.base_model.layers if hasattr(model.base_model, "layers") else model.base_model.h)
    assert all_ == 4 * layers
    assert few == layers + 3 * 2  # in the prompt all; then those two that have all entries and are the model's own
