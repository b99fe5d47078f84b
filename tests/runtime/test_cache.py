"""A layer in which every column is an entry writes no facts down until somebody asks; asking, or not, changes nothing."""

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer

from quicksilver.modules import Halting, StagedHalting
from quicksilver.runtime import Run, apply
from quicksilver.runtime.cache import CacheLayer
from quicksilver.runtime.cache.layer import Kind
from quicksilver.runtime.plan import Planner
from quicksilver.runtime.run import Execution

HEADS, HEAD_DIM = 2, 4
KINDS = ("ragged", "packed", "masked")
Step = tuple[str, int]


def steps() -> st.SearchStrategy[list[Step]]:
    grow = st.tuples(st.just("update"), st.integers(1, 4))
    others = st.tuples(st.sampled_from(["crop", "swap", "repeat", "reset", "look"]), st.integers(1, 3))
    return st.lists(grow | others, min_size=1, max_size=12)


def new_states(rows: int, n: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, HEADS, n, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


def look(layer: CacheLayer) -> None:
    """What a module may ask of a layer, and what a ledger asks."""
    assert layer.entries is not None
    assert layer.real_seen is not None
    assert layer.slots is not None
    rows = layer.real_seen.shape[0]
    assert torch.equal(layer.slots, torch.arange(layer.seen).expand(rows, -1))
    assert layer.lengths.tolist() == layer.real_seen[:, 0].tolist() == [layer.seen] * rows
    assert layer.is_entry.all()


@given(kind=st.sampled_from(KINDS), steps=steps(), curious=st.booleans())
@settings(max_examples=60)
def test_a_plain_layer_is_a_dynamic_one(kind: Kind, steps: list[Step], curious: bool) -> None:
    layer, plain, rows = CacheLayer(kind), DynamicLayer(), 2
    for number, (step, n) in enumerate(steps):
        if step == "update":
            keys, values = new_states(rows, n, number), new_states(rows, n, 100 + number)
            both = layer.update(keys, values), plain.update(keys, values)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(*both, strict=True))
        elif not layer.seen:
            continue
        elif step == "crop":
            n = min(n, layer.seen)
            layer.crop(-n)
            plain.keys, plain.values = (part[:, :, : layer.seen] for part in (plain.keys, plain.values))
        elif step == "swap":
            order = torch.arange(rows).flip(0)
            layer.reorder_cache(order)
            plain.keys, plain.values = plain.keys[order], plain.values[order]
        elif step == "repeat" and rows < 8:
            layer.batch_repeat_interleave(2)
            plain.keys, plain.values = (part.repeat_interleave(2, dim=0) for part in (plain.keys, plain.values))
            rows *= 2
        elif step == "reset":
            layer.reset()
            plain, rows = DynamicLayer(), 2
        if layer.seen:
            assert layer.is_complete
            assert layer.get_seq_length() == layer.seen == plain.keys.shape[2]
            assert torch.as_tensor(layer.length).expand(rows).tolist() == [layer.seen] * rows
            assert torch.equal(layer.keys, plain.keys)
            assert layer.billed_bytes() == layer.resident_bytes() == plain.keys.nbytes + plain.values.nbytes
            if curious or step == "look":
                look(layer)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
def test_a_token_after_a_thinned_prompt_goes_behind_what_is_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is planned or masked for it; logits, ledgers and facts are those of the long way, cropping and beams included."""
    model, ids = tiny.load(name), torch.arange(2, 34).view(2, 16)
    module = Halting(rule="capacity", signal="random", schedule="one_shot", window=(0.2, 0.8), missing_kv="drop", resume_layers=0)
    behind: list[int] = []
    append = CacheLayer.append
    monkeypatch.setattr(CacheLayer, "append", lambda self, k, v: behind.append(k.shape[2]) or append(self, k, v))

    def decoded(execution: Execution) -> tuple[list[torch.Tensor], Run, list[torch.Tensor]]:
        with torch.no_grad(), apply(model, [module], execution=execution) as run:
            cache = model(ids, use_cache=True).past_key_values
            behind.clear()
            logits = [model(ids[:, :1] + i, past_key_values=cache, use_cache=True).logits for i in range(3)]
            cache.crop(-2)
            cache.reorder_cache(torch.tensor([1, 0]))
            logits += [model(ids[:, :1] + i, past_key_values=cache, use_cache=True).logits for i in range(2)]
            found = [layer.slots[layer.is_entry] for layer in cache.layers]
            return logits, run, found

    compact, run, slots = decoded("compact")
    assert behind == [1] * 5 * run.arch.n_layers
    assert run.kv_bytes.billed == run.kv_bytes.resident
    masked, reference, expected = decoded("masked")
    for mine, theirs in zip(compact, masked, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert run.flops.nominal == reference.flops.nominal
    assert [part.tolist() for part in slots] == [part.tolist() for part in expected]


EVEN = torch.arange(1, 25).view(2, 12)
DROP = {"before": 2, "share": 0.4, "signal": "position", "missing_kv": "drop"}


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
def test_a_step_in_which_nobody_acts_is_the_one_that_is_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes straight to its layers."""
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
    assert few == layers  # all of the prompt
