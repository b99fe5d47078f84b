"""Nulls and oracles: the same budget on other tokens, chance at its rate, and a replay that is the run."""

import math

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from looking import LAYERS, Pass
from thinning import draws

from quicksilver.modules import ExponentialDecay, Halting, RandomHalting, Replay, StaticDepth, perfect_exit, shuffled  # fmt: skip
from quicksilver.runtime import MISSING_KV, PassTrace, Trace

FIELDS = ("halt_layer", "halted_kv", "resume_layer", "kv_layer")


@given(st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=draws(6))
def test_random_halting_halts_at_its_rate(rate: float, seed: int) -> None:
    ids = torch.randint(0, 1000, (4, 500), generator=torch.Generator().manual_seed(seed))
    one = Pass([500] * 4, ids=ids)
    one.run(RandomHalting(rate=rate, seed=seed, window=(0.0, 1.0), resume_layers=0))
    for layer in range(4):
        expected = 2000 * (1 - (1 - rate) ** (layer + 1))
        assert abs(int(one.halted(layer).sum()) - expected) <= 5 * math.sqrt(2000) / 2


@given(st.floats(0, 0.94), st.integers(2, 40))
def test_static_depth_stops_everything_at_one_layer(depth: float, n_layers: int) -> None:
    control = StaticDepth(depth=depth)
    layer = max(0, math.floor(depth * n_layers + 0.5) - 1)
    assert control.causal
    if layer > n_layers - 2:
        return
    one = Pass([3, 5], n_layers=n_layers)
    one.run(control)
    assert (one.state.halt_layer[one.state.valid] == layer).all()


@given(st.floats(0, 0.4), st.lists(st.integers(1, 200), min_size=1, max_size=3))
def test_exponential_decay_keeps_n_exp_of_minus_alpha_l(alpha: float, lengths: list[int]) -> None:
    one = Pass(lengths)
    decay = ExponentialDecay(alpha=alpha, protect_last=0)
    assert not decay.causal
    one.run(decay)
    for layer in range(LAYERS):
        for row, n in enumerate(lengths):
            assert int(one.state.active(layer)[row].sum()) == pytest.approx(n * math.exp(-alpha * layer), abs=0.5 + 1e-9)


def test_uneven_decay_is_uneven_and_right_on_average() -> None:
    ids = torch.randint(0, 1000, (16, 256), generator=torch.Generator().manual_seed(0))
    one = Pass([256] * 16, ids=ids)
    decay = ExponentialDecay(alpha=0.1, even=False)
    assert decay.causal
    one.run(decay)
    counts = one.state.active(9).sum(1)
    expected = 256 * math.exp(-0.9)
    assert float(counts.float().mean()) == pytest.approx(expected, abs=3 * math.sqrt(expected / 16))
    assert counts.unique().numel() > 4


def test_a_trace_of_something_else_is_refused() -> None:
    batch = tiny.Batch((tuple(range(1, 13)),))
    trace = tiny.forward(tiny.load("gpt2"), batch, [Halting(rule="capacity", resume_layers=0)]).trace
    with tiny.refused(r"Pass 1 .*\[12\] tokens.*given \[9\].*same batches"):
        tiny.forward(tiny.load("gpt2"), tiny.Batch((tuple(range(9)),)), [Replay(trace)])
    with tiny.refused(r"1 passes and this would be number 2.*same batches"):
        tiny.forward(tiny.load("gpt2"), batch, [Replay(trace, first_pass=1)])


def decided(seed: int, rows: int, n: int, padding: list[int], first_column: int) -> PassTrace:
    """Any decisions at all."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, high, (rows, n), generator=generator).to(dtype)

    valid = torch.arange(n) >= torch.tensor([padding[row % len(padding)] for row in range(rows)])[:, None]
    return PassTrace(
        n_layers=6, first_column=first_column, valid=valid, halt_layer=draw(6, torch.int16), halted_kv=draw(4, torch.uint8),
        resume_layer=draw(7, torch.int16), kv_layer=draw(6, torch.int16), fused_layer=torch.full((rows, n), 5, dtype=torch.int16),
    )  # fmt: skip


@given(
    st.integers(0, 99), st.integers(1, 3), st.integers(1, 30), st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.sampled_from([0, 2, 40]), st.integers(0, 5), st.integers(0, 3), st.integers(0, 2**40), st.sampled_from([1, 1, 3, 10]),
)  # fmt: skip
def test_shuffling_moves_whole_decisions_within_a_row_and_never_the_protected(
    seed, rows, n, padding, first_column, first, last, shuffle_seed, parts
):
    before = decided(seed, rows, n, padding, first_column)
    (after,) = shuffled(Trace(6, [before]), shuffle_seed, first, last, parts).passes
    is_prompt = first_column == 0 and n > 1
    for row in range(rows):
        real = before.valid[row].nonzero().flatten().tolist()
        old = [tuple(int(getattr(before, f)[row, c]) for f in FIELDS) for c in real]
        new = [tuple(int(getattr(after, f)[row, c]) for f in FIELDS) for c in real]
        for part in range(parts):  # exactly the same budget, in every layer and part
            own = [nth for nth in range(len(real)) if nth * parts // len(real) == part]
            assert sorted(old[nth] for nth in own) == sorted(new[nth] for nth in own)
        for nth, (x, y) in enumerate(zip(old, new, strict=True)):
            if first_column + nth < first or (is_prompt and nth >= len(real) - last):
                assert x == y
    for layer in range(6):
        assert torch.equal(before.active(layer).sum(1), after.active(layer).sum(1))
        assert torch.equal(before.kv_present(layer).sum(1), after.kv_present(layer).sum(1))
    assert torch.equal(before.valid, after.valid)
    again = shuffled(Trace(6, [before]), shuffle_seed, first, last, parts).passes[0]
    assert all(torch.equal(getattr(after, f), getattr(again, f)) for f in FIELDS)


@settings(max_examples=draws(8))
@given(tiny.batches(low=3), st.sampled_from(["gpt2", "llama"]))
def test_perfect_exit_is_the_earliest_layer_that_already_says_it(batch: tiny.Batch, family: str) -> None:
    model = tiny.load(family)
    inputs = batch.inputs()
    mask = inputs.get("attention_mask")
    with torch.no_grad():
        dense = model(**{k: v for k, v in inputs.items() if k != "position_ids"}, output_hidden_states=True, use_cache=False)
        norm = model.transformer.ln_f if family == "gpt2" else model.model.norm
        says = [model.lm_head(norm(states)).argmax(-1) for states in dense.hidden_states[1:-1]] + [dense.logits.argmax(-1)]
    (one,) = perfect_exit(model, inputs["input_ids"], mask, missing_kv="drop").passes
    for row, column in one.valid.nonzero().tolist():
        agrees = [int(said[row, column]) == int(says[-1][row, column]) for said in says]
        assert int(one.halt_layer[row, column]) == agrees.index(True)
    assert (one.halt_layer[~one.valid] == tiny.LAYERS - 1).all()
    assert (one.halted_kv == MISSING_KV.index("drop")).all()


def test_perfect_exit_is_replayed_in_the_passes_it_was_cut_for() -> None:
    batch = tiny.Batch((tuple(range(1, 17)), tuple(range(31, 47))))
    trace = perfect_exit(tiny.load("gpt2"), batch.ids, pass_tokens=[10, 6])
    assert [p.first_column for p in trace.passes] == [0, 10]
    outcome = tiny.forward(tiny.load("gpt2"), batch, [Replay(trace)], chunks=[10, 6])
    tiny.assert_same_decisions(tiny.decisions(batch, outcome.trace), tiny.decisions(batch, trace))
    assert trace.active_counts()[-1] < trace.active_counts()[0]
    for options, says in (
        ({"pass_tokens": [10, 7]}, r"\[10, 7\] add up to 17.*16 columns"),
        ({"missing_kv": "keep"}, "missing_kv='keep'"),
    ):
        with tiny.refused(says):
            perfect_exit(tiny.load("gpt2"), batch.ids, **options)
