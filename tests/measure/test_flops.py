"""Interposed FLOPs: right on operators whose count is known. On whole models: tests/runtime/test_any_run.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import tiny
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from quicksilver.measure import attention_pairs, count_by_operator, count_executed
from quicksilver.measure.flop_counter import FORMULAS, aten


@settings(deadline=None)
@given(queries=st.integers(1, 30), keys=st.integers(1, 30), causal=st.booleans())
def test_attention_pairs_are_those_of_the_mask(queries: int, keys: int, causal: bool) -> None:
    mask = torch.ones(queries, keys)
    assert attention_pairs(queries, keys, causal) == int((mask.tril() if causal else mask).sum())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_counts_the_pairs_it_visits(grad: bool, dtype: torch.dtype) -> None:
    """torch's own counter gives 0 for this operator on a CPU."""
    q = torch.randn(2, 4, 10, 8, dtype=dtype)
    kv = torch.randn(2, 4, 10, 8, dtype=dtype)
    with torch.set_grad_enabled(grad):
        assert count_executed(lambda: F.scaled_dot_product_attention(q, kv, kv)) == 4 * 2 * 4 * 8 * 100
        assert count_executed(lambda: F.scaled_dot_product_attention(q, kv, kv, is_causal=True)) == 4 * 2 * 4 * 8 * 55
        masked = count_executed(lambda: F.scaled_dot_product_attention(q, kv, kv, attn_mask=torch.ones(10, 10, dtype=torch.bool)))
    assert masked == 4 * 2 * 4 * 8 * 100  # a mask hides pairs, the kernel visits them all the same
    few = torch.randn(2, 2, 10, 8, dtype=dtype)
    with torch.no_grad():  # grouped queries: heads are those of the queries
        grouped = count_executed(lambda: F.scaled_dot_product_attention(q, few, few, is_causal=True, enable_gqa=True))
    assert grouped == 4 * 2 * 4 * 8 * 55


def test_the_formulas_of_gpu_attention_read_causality_where_each_operator_keeps_it() -> None:
    q = torch.Size((2, 4, 10, 8))
    half, full = 4 * 2 * 4 * 8 * 55, 4 * 2 * 4 * 8 * 100
    assert FORMULAS[aten._scaled_dot_product_flash_attention](q, q, q, 0.0, True) == half
    assert FORMULAS[aten._scaled_dot_product_flash_attention](q, q, q, is_causal=True) == half
    assert FORMULAS[aten._scaled_dot_product_flash_attention](q, q, q, 0.0, False, True) == full
    for operator in (aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention):
        assert FORMULAS[operator](q, q, q, None, True, 0.0, True) == half
        assert FORMULAS[operator](q, q, q, None, True, 0.0) == full
    assert FORMULAS[aten._scaled_dot_product_fused_attention_overrideable](q, q, q, None, 0.0, True) == half


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_it_counts_what_torchs_own_counter_counts(guard: Callable[[], AbstractContextManager[None]]) -> None:
    model, ids = tiny.load("llama"), torch.arange(1, 13).view(2, 6)
    torchs = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    with guard():
        with torchs:
            model(ids)
        found = count_by_operator(lambda: model(ids))
    assert found == {str(operator): flops for operator, flops in torchs.get_flop_counts()["Global"].items()}
    assert sum(found.values()) > 0


def test_products_with_vectors_count_too() -> None:
    matrix, vector = torch.randn(3, 5), torch.randn(5)
    assert count_by_operator(lambda: matrix @ vector) == {"aten.mv": 30}
    assert count_by_operator(lambda: vector @ vector) == {"aten.dot": 10}
    assert count_by_operator(lambda: torch.addmv(torch.randn(3), matrix, vector)) == {"aten.addmv": 30}
    assert count_executed(lambda: matrix + 1) == 0
