"""Attention in blocks of queries: what the fused kernel computes, and its work counted."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import draws

from quicksilver.measure.flop_counter import count_by_operator, count_executed
from quicksilver.modules.block_attention import BlockAttention
from quicksilver.runtime import ConfigError, Run, apply

SDPA = [family for family in tiny.FAMILIES if family not in tiny.EAGER_ONLY]


@pytest.mark.parametrize("family", tiny.thinned(SDPA))
@given(data=st.data(), block=st.integers(1, 20))
@settings(max_examples=draws(6))
def test_halted_runs_are_the_same_in_blocks_and_their_work_is_what_is_counted(
    family: str, data: st.DataObject, block: int
) -> None:
    model = tiny.load(family)
    batch = data.draw(tiny.batches())
    modules = data.draw(tiny.policies())
    plain = tiny.forward(model, batch, modules)
    for execution in ("compact", "masked"):
        runs: list[Run] = []
        found = []

        def run(execution: str = execution, runs: list[Run] = runs, found: list[torch.Tensor] = found) -> None:
            outcome = tiny.forward(model, batch, [*modules, BlockAttention(block=block)], execution=execution)
            runs.append(outcome.run)
            found.append(outcome.logits)

        counted = count_executed(run)
        tiny.assert_close(found[0], plain.logits, atol=1e-4)
        assert runs[0].flops.executed == pytest.approx(counted, rel=0.01)


def test_no_prompt_is_left_to_the_fused_kernel_and_one_token_is() -> None:
    model = tiny.load("llama")
    batch = tiny.Batch((tuple(range(1, 25)),))

    def fused(modules: list, chunks: list[int]) -> int:
        found = count_by_operator(lambda: tiny.forward(model, batch, modules, chunks=chunks))
        return sum(n for name, n in found.items() if "scaled_dot_product" in name)

    assert fused([BlockAttention()], [24]) == 0 < fused([], [24])
    assert fused([BlockAttention()], [20, 1, 1, 1, 1]) > 0
    assert fused([tiny.Hashed(0.5, missing_kv="drop"), BlockAttention()], [24]) == 0


def test_another_attention_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="attn_implementation='eager': leave that out"),
        apply(tiny.load("gpt2", "eager"), [BlockAttention()]),
    ):
        pass
