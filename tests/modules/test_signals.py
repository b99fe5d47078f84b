"""Signals: what each score is, whom it is asked about, and that chance is the same chance everywhere."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from looking import Pass

from quicksilver.modules.signals import (
    Drift,
    Entropy,
    Position,
    Signal,
    UpdateNorm,
    lowest,
    make_signal,
    signal_names,
)  # fmt: skip

SHAPES = st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 2), st.integers(0, 999))


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


def test_a_zero_state_has_a_drift_and_no_nan() -> None:
    view, tokens = Pass([3]).look(0, torch.zeros(1, 3, 4), torch.zeros(1, 3, 4))
    for kind in ("relative", "l2", "cosine"):
        assert Drift(kind)(view, tokens).isfinite().all()
    view, tokens = Pass([3, 1]).look(0)
    moved = (view.after - view.before).norm(dim=-1)
    for score, value in ((Drift("l2"), moved), (UpdateNorm(), moved / math.sqrt(8))):
        assert torch.equal(score(view, tokens).isposinf(), view.slots < 0)
        torch.testing.assert_close(score(view, tokens)[view.slots >= 0], value[view.slots >= 0])


def test_latent_entropy_is_of_the_softmax_over_the_state() -> None:
    view, tokens = Pass([4]).look(1)
    scores = Entropy("latent")(view, tokens)
    for column in range(4):
        assert float(scores[0, column]) == pytest.approx(entropy(view.after[0, column].softmax(-1).tolist()), rel=1e-4)


def test_histogram_entropy_counts_bins_of_the_standardised_state() -> None:
    spread = torch.linspace(-1, 1, 64)
    spike = torch.zeros(64)
    spike[5] = 1.0
    states = torch.stack([spread, 100 * spread + 7, spike])[None]
    view, tokens = Pass([3]).look(1, states, states)
    even, scaled, peaked = Entropy("histogram", bins=16)(view, tokens)[0].tolist()
    assert even == pytest.approx(scaled, abs=1e-5)  # normed: scale and offset do not count
    assert peaked == pytest.approx(entropy([63 / 64, 1 / 64]), rel=1e-4)
    assert peaked < even <= math.log(16)


@given(SHAPES, st.integers(-2, 12))
def test_lowest_takes_exactly_k_and_the_lowest(shape: tuple, k: int) -> None:
    lengths, extra, seed = shape
    one = Pass(lengths, extra=extra)
    torch.manual_seed(seed)
    scores = torch.randint(0, 4, one.shape).float()  # ties on purpose
    scores[torch.rand(one.shape) < 0.2] = math.nan
    eligible = one.state.valid & (torch.rand(one.shape) < 0.7)
    chosen = lowest(scores, eligible, torch.full((len(lengths), 1), k))
    assert not (chosen & ~eligible).any()
    for row in range(len(lengths)):
        assert chosen[row].sum() == min(max(k, 0), int(eligible[row].sum()))
        order = [(scores[row, c].nan_to_num(math.inf).item(), c) for c in eligible[row].nonzero().flatten().tolist()]
        assert chosen[row].nonzero().flatten().tolist() == sorted(c for _, c in sorted(order)[: max(k, 0)])


@dataclass(frozen=True)
class Third(Signal):
    """A signal of somebody else."""

    weight: float = 1.0
    name: ClassVar[str] = "third-of-slot"

    def score(self, view: object, tokens: object, where: torch.Tensor) -> torch.Tensor:
        return self.weight * view.slots.float() / 3


def test_signals_are_found_by_name_wherever_they_are_written() -> None:
    assert isinstance(make_signal("third-of-slot"), Third)
    assert make_signal({"name": "third-of-slot", "weight": 2.0}) == Third(2.0)
    assert make_signal("drift", kind="l2", of="latent") == Drift("l2")
    assert make_signal({"name": "drift", "kind": "cosine"}, kind="l2") == Drift("cosine")
    assert make_signal(Position()) == Position()
    assert {"drift", "update_norm", "entropy", "attention", "position", "random"} <= set(signal_names())
    for name, cls in signal_names().items():
        assert cls.causal != (name in ("attention", "context"))
        assert cls.needs_attention == (name == "attention")
