"""Halting: exactly k by capacity, the paper's two thresholds, overrides in their order, only at the depth it was given; who then loses its K/V."""

import math
from typing import Any

import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from looking import LAYERS, Pass, architecture

from quicksilver.modules import PRESETS, Halting, KVSkipping

ROWS = st.lists(st.integers(1, 12), min_size=1, max_size=3)
WINDOWS = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted).filter(lambda w: w[0] * LAYERS < LAYERS - 1)


def capacity(**options: Any) -> Halting:
    """The k of lowest score, to the end."""
    return Halting(**{"rule": "capacity", "resume_layers": 0} | options)


def by_drift(tau_drift: Any, **options: Any) -> Halting:
    """Those whose drift is below the threshold, to the end."""
    return Halting(**{"tau_drift": tau_drift, "tau_entropy": None, "resume_layers": 0} | options)


@given(
    ROWS, st.integers(0, 2), st.sampled_from(["one_shot", "gradual", "exponential"]), st.floats(0, 1), st.floats(0, 0.5), WINDOWS,
    st.sampled_from(["drift", "update_norm", "attention", "position", "random", {"name": "entropy", "of": "latent"}]),
)  # fmt: skip
def test_capacity_halts_exactly_k_of_each_row(lengths, extra, schedule, share, alpha, window, signal):
    one = Pass(lengths, extra=extra, ids=tiny.ids(len(lengths), max(lengths) + extra))
    options = {"signal": signal, "schedule": schedule, "halted_share": share, "alpha": alpha, "window": window}
    one.run(capacity(**options, protect_first=1, protect_last=1))
    first, last = (min(LAYERS - 2, max(0, math.floor(end * LAYERS + 0.5) - 1)) for end in window)
    for layer in range(LAYERS - 1):
        steps = min(layer, last) - first + 1
        if steps <= 0:
            part = 0.0
        elif schedule == "one_shot":
            part = share
        elif schedule == "gradual":
            part = share * steps / (last - first + 1)
        else:
            part = 1 - math.exp(-alpha * steps)
        for row, n in enumerate(lengths):
            k = math.floor(part * n + 0.5)
            assert int(one.halted(layer)[row].sum()) == min(k, max(0, n - 2)), (layer, row)


def test_capacity_halts_the_lowest_scores() -> None:
    attention = torch.tensor([[0.9, 0.1, 0.8, 0.2, 0.3, 0.7, 0.05, 0.05]])
    one = Pass([8])
    halting = capacity(signal={"name": "attention", "last_queries": 2}, schedule="one_shot", halted_share=0.5, window=(0.0, 0.5))
    one.ask(halting, 0, attention=attention)
    assert [halting.wants_attention(layer) for layer in range(3)] == [True, False, False]
    assert one.halted(0)[0].tolist() == [False, True, False, True, True, True, False, False]


def test_layers_that_are_not_asked_are_made_up_for() -> None:
    """`decision_layers`: the next layer that is asked halts what the schedule has reached by then."""
    everywhere, sometimes, by_position = Pass([10]), Pass([10]), capacity(signal="position", halted_share=0.8, window=(0.1, 0.9))
    everywhere.run(by_position)
    sometimes.run(by_position, layers=[2, 5, 8])
    for layer in (2, 5, 8):
        assert torch.equal(everywhere.halted(layer), sometimes.halted(layer))
    assert sometimes.halted(4).sum() < everywhere.halted(4).sum()


def drifting(drifts: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """States (1, N, 8) with these relative drifts."""
    after = torch.ones(1, len(drifts), 8)
    return after * (1 - torch.tensor(drifts))[None, :, None], after


def halted_by(halting: Halting, one: Pass, layer: int, **seen: torch.Tensor) -> list[bool]:
    one.ask(halting, layer, **seen)
    return one.halted(layer)[0].tolist()


def test_a_token_halts_below_both_thresholds_and_the_head_is_asked_after_the_drift() -> None:
    head = torch.zeros(8, 4)
    head[:, 0] = torch.tensor([3.0, 0, 0, 0, 0, 0, 0, 0])
    sure, unsure = torch.zeros(8), torch.zeros(8)
    sure[0] = 1.0
    after = torch.stack([unsure + 1 - sure, sure, sure * 2, sure, unsure + 1 - sure])[None]  # logits 0, 3, 6, 3, 0 against 0
    before = after * (1 - torch.tensor([0.05, 0.2, 0.05, 0.3, 0.04]))[None, :, None]
    one = Pass([5], logits=head)
    both = Halting(tau_drift=0.1, tau_entropy=1.0, resume_layers=0)
    assert halted_by(both, one, 3, before=before, after=after) == [False, False, True, False, False]
    assert one.asked_logits == 3  # tokens 0, 2, 4
    drift_only = Pass([5], logits=head)
    assert halted_by(by_drift(0.1), drift_only, 3, before=before, after=after) == [True, False, True, False, True]
    assert drift_only.asked_logits == 0
    entropy_only = Halting(tau_entropy=1.0, tau_drift=None, resume_layers=0)
    in_bits = Halting(tau_entropy=1.0 / math.log(2), unit="bits", tau_drift=None, resume_layers=0)
    for halting in (entropy_only, in_bits):
        assert halted_by(halting, Pass([5], logits=head), 3, before=before, after=after) == [False, True, True, True, False]
    before, after = drifting([0.05, math.nan])  # what is no number is below nothing
    assert halted_by(by_drift(10.0), Pass([2]), 3, before=before, after=after) == [True, False]


@given(st.data(), st.sampled_from(["threshold", "capacity"]))
def test_full_processing_beats_forced_halting_beats_the_rule(data: st.DataObject, rule: str) -> None:
    n = data.draw(st.integers(1, 10))
    flags = st.lists(st.booleans(), min_size=n, max_size=n)
    full_id, full_slot, forced_id, forced_slot, by_rule = (torch.tensor(data.draw(flags)) for _ in range(5))
    first, last = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    ids = (full_id + 2 * forced_id)[None]  # 3 is in both lists
    overrides: dict[str, Any] = {
        "full_ids": [1, 3], "forced_ids": [2, 3], "full_mask": full_slot, "forced_mask": forced_slot[None],
    }  # fmt: skip
    share = float(by_rule.float().mean())
    options: dict[str, Any] = {"rule": rule, "window": (0.3, 0.3), "signal": "drift", "halted_share": share}
    halting = by_drift(0.5, protect_first=first, protect_last=last, **overrides, **options)
    before, after = drifting([0.1 if b else 0.9 for b in by_rule])
    halted = torch.tensor(halted_by(halting, Pass([n], ids=ids), 2, before=before, after=after))
    slots = torch.arange(n)
    full = full_id | full_slot | (slots < first) | (slots >= n - last)
    forced = (forced_id | forced_slot) & ~full
    assert not (halted & full).any()
    assert (halted | ~forced).all()
    if rule == "threshold":
        assert torch.equal(halted, ~full & (forced | by_rule))
    else:  # forced ones count towards the share
        wanted = max(int(by_rule.sum()), int(forced.sum()))
        assert int(halted.sum()) == min(wanted, int((~full).sum()))


def test_masks_follow_the_sequence_not_the_padding() -> None:
    forced = torch.tensor([[True, False, False], [False, True, False]])
    one = Pass([2, 5], extra=1)
    one.run(by_drift(0.0, forced_mask=forced))
    assert one.halted(5).tolist() == [[False] * 4 + [True, False], [False, False, True, False, False, False]]


def test_the_last_token_of_a_prompt_stays_and_elsewhere_none_is_last() -> None:
    for halting in (capacity(halted_share=1.0), by_drift(1e9, protect_last=1)):
        prompt = Pass([4, 7])
        prompt.run(halting)
        assert prompt.halted(8).sum(1).tolist() == [3, 6]
        assert not prompt.halted(8)[:, -1].any()
    decoded = Pass([1, 1], first_slot=9, is_prompt=False)
    decoded.run(by_drift(1e9, protect_last=1, lookahead=True))
    assert decoded.halted(8).all()


@given(WINDOWS, st.integers(0, 3), st.integers(3, 40))
def test_nothing_halts_outside_the_window_or_in_vain(window: list[float], resume: int, n_layers: int) -> None:
    halting = by_drift(1e9, window=window, resume_layers=resume)
    first, last = (max(0, math.floor(f * n_layers + 0.5) - 1) for f in window)
    useful = [layer for layer in range(first, last + 1) if layer + 1 < n_layers - resume]
    if not useful:
        with tiny.refused(r"Nothing would ever halt.*resume fewer"):
            halting.bind(architecture(n_layers))
        return
    halting.bind(architecture(n_layers))
    assert [layer for layer in range(n_layers) if halting.acts_at(layer)] == useful


def test_presets_are_the_paper_as_printed() -> None:
    b2, g2, fig9 = (Halting(preset=name, tau_drift=7.0, window=(0.4, 0.5)) for name in ("paper-b2", "paper-g2", "paper-fig9"))
    assert (b2.tau_drift, b2.tau_entropy, b2.unit, b2.drift) == (0.045, 1.15, "bits", "l2")
    assert (g2.tau_drift, g2.tau_entropy, g2.unit, g2.window) == (1e-3, 1.15, "nats", (0.2, 0.8))
    assert (fig9.tau_drift, fig9.tau_entropy) == (1.0, None)
    default = capacity()
    default.bind(architecture(30))
    assert [layer + 1 for layer in range(30) if default.acts_at(layer)] == list(range(6, 25))
    b2.bind(architecture(30))
    assert min(layer + 1 for layer in range(30) if b2.acts_at(layer)) == 5  # B.5
    names = {"rule", "drift", "unit", "tau_drift", "tau_entropy", "window", "resume_layers"}
    assert all(set(preset) == names for preset in PRESETS.values())


# -- KV skipping: who loses its K/V, who keeps it, and that it stays lost ----------------------------------------------------------
BATCH = tiny.Batch((tuple(range(1, 21)), tuple(range(30, 44))))


def skipped_by(skipping: KVSkipping, one: Pass, layer: int, halted: list | None = None, **seen: torch.Tensor) -> torch.Tensor:
    """(B, N) bool: who has no K/V in the layer after `layer`, once `halted` have."""
    one.ask(skipping, layer, halted, **seen)
    return one.state.valid & ~one.state.kv_present(layer + 1)


@given(st.data())
def test_halted_tokens_leave_nothing_unless_they_are_kept(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 10))
    flags = st.lists(st.booleans(), min_size=n, max_size=n)
    halted, keep_id, keep_slot = (torch.tensor(data.draw(flags)) for _ in range(3))
    first, last = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    skipping = KVSkipping(protect_first=first, protect_last=last, keep_ids=[1], keep_mask=keep_slot)
    skipped = skipped_by(skipping, Pass([n], ids=keep_id.long()[None]), 4, [halted.tolist()])
    slots = torch.arange(n)
    assert skipped[0].tolist() == (halted & ~keep_id & ~keep_slot & (slots >= first) & (slots < n - last)).tolist()
    assert skipping.causal == (last == 0)


def test_before_the_minimum_depth_nothing_is_skipped() -> None:
    """Fraction 0.5 of 10 layers: after the fifth (index 4) at the earliest."""
    for layer in range(LAYERS - 2):
        skipped = skipped_by(KVSkipping(min_depth=0.5, protect_first=0), Pass([3]), layer, [[True] * 3])
        assert bool(skipped.all()) == (layer >= 4)


@given(ROWS, st.integers(0, 2), st.floats(0, 1), st.integers(0, 3), st.integers(1, 4))
def test_a_share_of_the_least_attended(lengths: list[int], extra: int, share: float, sinks: int, queries: int) -> None:
    one = Pass(lengths, extra=extra)
    attention = torch.rand(one.shape, generator=torch.Generator().manual_seed(sum(lengths)))
    skipping = KVSkipping(criterion="attention", skipped_share=share, last_queries=queries, protect_first=sinks, min_depth=0.3)
    assert not skipping.causal
    skipped = skipped_by(skipping, one, 2, attention=attention)
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
        skipped_by(
            KVSkipping(criterion="attention", tau_kv=tau, last_queries=1, protect_first=0), Pass([9, 9]), 1, attention=attention
        )
        for tau in sorted((a, b))
    )
    assert not (low & ~high).any()
    assert torch.equal(high[:, :-1], (attention < max(a, b))[:, :-1])
    assert not high[:, -1].any()


def test_skipped_tokens_stay_skipped() -> None:
    """Asked again in every layer, a token without K/V gets no attention and is below tau: that must change nothing."""
    skipping = KVSkipping(criterion="attention", tau_kv=0.25, last_queries=3, protect_first=1)
    outcome = tiny.forward(tiny.load("gpt2"), BATCH, [skipping])
    (one,) = outcome.trace.passes
    counts = [int(one.kv_present(layer).sum()) for layer in range(tiny.LAYERS)]
    assert counts[0] > counts[1]
    assert counts == sorted(counts, reverse=True)
