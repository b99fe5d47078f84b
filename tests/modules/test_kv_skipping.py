"""KV skipping: who loses its K/V, who keeps it, and that it stays lost."""

from __future__ import annotations

import math

import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from looking import LAYERS, Pass, architecture

from quicksilver.modules import KVSkipping

BATCH = tiny.Batch((tuple(range(1, 21)), tuple(range(30, 44))))


def ask(
    skipping: KVSkipping, one: Pass, layer: int, halted: list[list[bool]] | None = None, **seen: torch.Tensor
) -> torch.Tensor:
    """What `skipping` does after `layer`, once `halted` have: (B, N) bool, who has no K/V in the next layer."""
    skipping.bind(architecture(one.n_layers))
    view, tokens = one.look(layer, **seen)
    if halted is not None:
        tokens.halt(torch.tensor(halted), missing_kv="project")
    if skipping.acts_at(layer):
        skipping.decide(view, tokens)
    return one.state.valid & ~one.state.kv_present(layer + 1)


@given(st.data())
def test_halted_tokens_leave_nothing_unless_they_are_kept(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 10))
    flags = st.lists(st.booleans(), min_size=n, max_size=n)
    halted, keep_id, keep_slot = (torch.tensor(data.draw(flags)) for _ in range(3))
    first, last = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    skipping = KVSkipping(protect_first=first, protect_last=last, keep_ids=[1], keep_mask=keep_slot)
    skipped = ask(skipping, Pass([n], ids=keep_id.long()[None]), 4, [halted.tolist()])
    slots = torch.arange(n)
    assert skipped[0].tolist() == (halted & ~keep_id & ~keep_slot & (slots >= first) & (slots < n - last)).tolist()
    assert skipping.causal == (last == 0)


def test_before_the_minimum_depth_nothing_is_skipped() -> None:
    """Fraction 0.5 of 10 layers: after the fifth (index 4) at the earliest."""
    for layer in range(LAYERS - 2):
        skipped = ask(KVSkipping(min_depth=0.5, protect_first=0), Pass([3]), layer, [[True] * 3])
        assert bool(skipped.all()) == (layer >= 4)


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(0, 2), st.floats(0, 1), st.integers(0, 3), st.integers(1, 4)
)
def test_a_share_of_the_least_attended(lengths: list[int], extra: int, share: float, sinks: int, queries: int) -> None:
    one = Pass(lengths, extra=extra)
    attention = torch.rand(one.shape, generator=torch.Generator().manual_seed(sum(lengths)))
    skipping = KVSkipping(criterion="attention", skipped_share=share, last_queries=queries, protect_first=sinks, min_depth=0.3)
    assert not skipping.causal
    skipped = ask(skipping, one, 2, attention=attention)
    for row, n in enumerate(lengths):
        free = one.state.valid[row] & (one.slots[row] >= sinks) & (one.slots[row] < n - queries)
        k = min(math.floor(share * n + 0.5), int(free.sum()))
        assert int(skipped[row].sum()) == k
        assert set(attention[row][skipped[row]].tolist()) == set(sorted(attention[row][free].tolist())[:k])
    assert [skipping.wants_attention(layer) for layer in range(5)] == [False, False, True, False, False]
    assert int((one.state.halt_layer < LAYERS - 1).sum()) == 0  # they go on


@given(st.floats(0, 1), st.floats(0, 1))
def test_tau_kv_skips_what_is_below_it(a: float, b: float) -> None:
    attention = torch.rand(2, 9, generator=torch.Generator().manual_seed(7))
    low, high = (
        ask(KVSkipping(criterion="attention", tau_kv=tau, last_queries=1, protect_first=0), Pass([9, 9]), 1, attention=attention)
        for tau in sorted((a, b))
    )
    assert not (low & ~high).any()
    assert torch.equal(high[:, :-1], (attention < max(a, b))[:, :-1])
    assert not high[:, -1].any()


def test_halted_and_attention_needs_both() -> None:
    """C.4: K/V are written if the token is active or some head attends to it enough."""
    attention = torch.tensor([[0.01, 0.9, 0.01, 0.9, 0.01]])
    halted = [[True, True, False, False, True]]
    skipping = KVSkipping(criterion="halted_and_attention", tau_kv=0.5, last_queries=1, protect_first=0)
    assert not skipping.causal
    assert ask(skipping, Pass([5]), 3, halted, attention=attention).tolist() == [[True, False, False, False, False]]


def test_skipped_tokens_stay_skipped() -> None:
    """Asked again in every layer, a token without K/V gets no attention and is below tau: that must change nothing."""
    skipping = KVSkipping(criterion="attention", tau_kv=0.25, last_queries=3, protect_first=1)
    outcome = tiny.forward(tiny.load("gpt2"), BATCH, [skipping])
    (one,) = outcome.trace.passes
    counts = [int(one.kv_present(layer).sum()) for layer in range(tiny.LAYERS)]
    assert counts[0] > counts[1]
    assert counts == sorted(counts, reverse=True)
