"""Staged halting: each stage halts exactly its tokens, of the row's own length, and says what later layers see of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from looking import LAYERS, Pass, architecture

from quicksilver.modules import Calibration, Stage, StagedHalting
from quicksilver.runtime import MISSING_KV, ConfigError, TokenState

ROWS = st.lists(st.integers(1, 14), min_size=1, max_size=3)
SIGNALS = ("position", "drift", "random", "attention", {"name": "entropy", "of": "latent"})


@st.composite
def stages(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Stages by shares, the last of them sometimes the rest."""
    layers = sorted(draw(st.sets(st.integers(1, LAYERS - 1), min_size=1, max_size=3)))
    shares = [draw(st.floats(0, 1 / len(layers))) for _ in layers]
    made: list[dict[str, Any]] = [
        {
            "before": layer,
            "share": share,
            "signal": draw(st.sampled_from(SIGNALS)),
            "missing_kv": draw(st.sampled_from(MISSING_KV[:4])),
        }
        for layer, share in zip(layers, shares, strict=True)
    ]
    for stage in made:
        stage |= {"protect_first": draw(st.integers(0, 2)), "protect_last": draw(st.integers(0, 2))}
    if draw(st.booleans()):
        del made[-1]["share"], made[-1]["signal"]
        made[-1]["rest"] = True
    return made


def ids_like(lengths: list[int], extra: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 50, (len(lengths), max(lengths) + extra), generator=torch.Generator().manual_seed(seed))


@given(ROWS, st.integers(0, 2), stages())
def test_each_stage_halts_exactly_its_tokens(lengths: list[int], extra: int, given_stages: list[dict[str, Any]]) -> None:
    one = Pass(lengths, extra=extra, ids=ids_like(lengths, extra, 0))
    one.run(StagedHalting(stages=given_stages, protect_first=0, protect_last=None, missing_kv="project"))
    for row, n in enumerate(lengths):
        halted = 0
        for i, stage in enumerate(given_stages):
            first, last = (max(later[end] for later in given_stages[i:]) for end in ("protect_first", "protect_last"))
            free = max(0, n - halted - first - last)
            halted += free if "rest" in stage else min(free, math.floor(stage["share"] * n + 0.5))
            real = one.state.valid[row]
            now = (one.state.halt_layer[row] == stage["before"] - 1) & real
            assert int((one.state.halt_layer[row][real] < stage["before"]).sum()) == halted, (stage, n)
            assert not now[real.nonzero()[:first]].any()
            assert not now[real.nonzero()[n - last :]].any()
            assert (one.state.halted_kv[row][now] == MISSING_KV.index(stage["missing_kv"])).all()


def test_the_oldest_tokens_are_dropped_and_nearly_all_others_stop_later() -> None:
    one = Pass([20])
    halting = StagedHalting(
        stages=[{"before": 3, "count": 6, "signal": "position", "missing_kv": "drop"}, {"before": 0.7, "rest": True, "missing_kv": "copy"}],
        protect_first=2, protect_last=3,missing_kv="project"
    )  # fmt: skip
    one.run(halting)
    depth = one.state.halt_layer[0].tolist()
    assert depth == [LAYERS - 1] * 2 + [2] * 6 + [round(0.7 * LAYERS) - 1] * 9 + [LAYERS - 1] * 3
    assert not halting.causal
    assert halting.copies_kv
    assert halting.describe() == "6 oldest dropped @3, rest but 2+3 copied @0.7"


def test_one_line_for_a_table() -> None:
    drop = Stage(before=3, count=96, signal="position", missing_kv="drop")
    predict = Stage(before=10, rest=True, missing_kv="predict", translator="embedded")
    assert StagedHalting(stages=[drop, predict], protect_first=4, protect_last=32, missing_kv="project").describe() == (
        "96 oldest dropped @3, rest but 4+32 predicted @10"
    )
    by_signal = [
        {"before": 2, "share": 0.205, "signal": {"name": "attention", "last_queries": 8}, "missing_kv": "zero"},
        {"before": 0.5, "below": "p25", "signal": "drift"},
    ]
    assert (
        StagedHalting(stages=by_signal, protect_first=0, protect_last=None, missing_kv="project").describe()
        == "20.5% least attended zeroed @2, drift < p25 projected @0.5"
    )


def test_a_threshold_is_the_layer_s_own_and_causal() -> None:
    calibration = Calibration(LAYERS, (0, 100), {"drift-relative": [[0.0, float(layer)] for layer in range(LAYERS)]})
    halting = StagedHalting(
        stages=[{"before": 5, "below": "p25", "signal": "drift"}], protect_first=0, protect_last=None, missing_kv="project"
    )
    assert halting.causal
    assert [signal.key for signal in halting.calibration_signals()] == ["drift-relative"]
    halting.calibration = calibration
    assert not halting.calibration_signals()
    after = torch.ones(1, 3, 8)
    before = after * (1 - torch.tensor([0.9, 1.1, 0.99]))[None, :, None]
    one = Pass([3])
    halting.bind(architecture())
    halting.decide(*one.look(4, before, after))  # a quarter of 4
    assert one.halted(4)[0].tolist() == [True, False, True]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_prompt_is_counted_on_the_host(family: str, padded: bool) -> None:
    drop = {"before": 1, "count": 4, "signal": "position", "missing_kv": "drop"}
    counted: list[int | None] = []

    class Noting(StagedHalting):
        def decide(self, view: Any, tokens: TokenState) -> None:
            super().decide(view, tokens)
            counted.append(tokens.n_left)

    noting = Noting(stages=[drop, {"before": 4, "rest": True, "missing_kv": "project"}], protect_first=1, protect_last=3)
    row = tuple(range(1, 17))
    for execution in ("compact", "masked"):
        tiny.forward(tiny.load(family), tiny.Batch((row, row[3:] if padded else row)), [noting], execution=execution)
    assert counted == ([None] * 4 if padded else [12, 4] * 2)


def one(**options: Any) -> list[dict[str, Any]]:
    return [{"before": 3, "count": 2, "signal": "position", **options}]


def test_a_number_larger_than_the_prompt_is_refused() -> None:
    halting = StagedHalting(
        stages=[*one(count=9), {"before": 6, "count": 8, "signal": "drift"}],
        protect_first=2,
        protect_last=1,
        missing_kv="project",
    )
    halting.bind(architecture())
    with pytest.raises(
        ConfigError, match=r"stages\[0\]: count=9 is more than a prompt of 10 tokens has left: 0 .* Give at most 7"
    ):
        halting.decide(*Pass([14, 10]).look(2))
    row = Pass([14])
    halting.decide(*row.look(2))
    with pytest.raises(ConfigError, match=r"stages\[1\]: count=8 .* prompt of 14 .*: 9 have halted before and 2\+1 .* at most 2"):
        halting.decide(*row.look(5))
