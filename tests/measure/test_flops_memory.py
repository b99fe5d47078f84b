"""Interposed FLOPs are right on operators whose count is known (on whole models: tests/runtime/test_any_run.py), and a peak of memory is seen."""

import gc
from functools import partial
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Does, load
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from quicksilver.data.windows import Windows
from quicksilver.measure import Bench, attention_pairs, count_by_operator, count_executed, memory, peak_memory
from quicksilver.measure.flop_counter import FORMULAS, aten
from quicksilver.measure.latency import Latency
from quicksilver.measure.memory import MemoryResult, peak_tensor_bytes
from quicksilver.measure.perplexity import Protocol
from quicksilver.records.record import load_record
from quicksilver.runs.config import compose
from quicksilver.runs.run import ensure
from quicksilver.runtime import LayerView, TokenState, apply

MIB = 1 << 20
HALF, FULL = 4 * 2 * 4 * 8 * 55, 4 * 2 * 4 * 8 * 100  # operations of ten queries and keys, causal and not


@settings(deadline=None)
@given(queries=st.integers(1, 30), keys=st.integers(1, 30), causal=st.booleans())
def test_attention_pairs_are_those_of_the_mask(queries: int, keys: int, causal: bool) -> None:
    mask = torch.ones(queries, keys)
    assert attention_pairs(queries, keys, causal) == int((mask.tril() if causal else mask).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_counts_the_pairs_it_visits(dtype: torch.dtype) -> None:
    """torch's own counter gives 0 for this operator on a CPU."""
    q, kv, few = (torch.randn(2, heads, 10, 8, dtype=dtype) for heads in (4, 4, 2))
    counted = lambda kv, **options: count_executed(lambda: F.scaled_dot_product_attention(q, kv, kv, **options))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert counted(kv) == FULL
            assert counted(kv, is_causal=True) == HALF
            # A mask hides pairs, and the kernel visits them all the same.
            assert counted(kv, attn_mask=torch.ones(10, 10).bool()) == FULL
    with torch.no_grad():  # grouped queries: heads are those of the queries
        assert counted(few, is_causal=True, enable_gqa=True) == HALF


def test_the_formulas_of_gpu_attention_read_causality_where_each_operator_keeps_it() -> None:
    q = torch.Size((2, 4, 10, 8))
    assert FORMULAS[aten._scaled_dot_product_flash_attention](q, q, q, 0.0, True) == HALF
    assert FORMULAS[aten._scaled_dot_product_flash_attention](q, q, q, is_causal=True) == HALF
    assert FORMULAS[aten._scaled_dot_product_flash_attention](q, q, q, 0.0, False, True) == FULL
    for operator in (aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention):
        assert FORMULAS[operator](q, q, q, None, True, 0.0, True) == HALF
        assert FORMULAS[operator](q, q, q, None, True, 0.0) == FULL
    assert FORMULAS[aten._scaled_dot_product_fused_attention_overrideable](q, q, q, None, 0.0, True) == HALF


def test_it_counts_what_torchs_own_counter_counts_and_products_with_vectors() -> None:
    model, ids = load("llama"), torch.arange(1, 13).view(2, 6)
    for guard in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        torchs = FlopCounterMode(display=False, custom_mapping=FORMULAS)
        with guard():
            with torchs:
                model(ids)
            found = count_by_operator(lambda: model(ids))
        assert found == {str(operator): flops for operator, flops in torchs.get_flop_counts()["Global"].items()}
        assert sum(found.values()) > 0
    matrix, vector = torch.randn(3, 5), torch.randn(5)
    assert count_by_operator(lambda: matrix @ vector) == {"aten.mv": 30}
    assert count_by_operator(lambda: vector @ vector) == {"aten.dot": 10}
    assert count_by_operator(lambda: torch.addmv(torch.randn(3), matrix, vector)) == {"aten.addmv": 30}
    assert count_executed(lambda: matrix + 1) == 0


@pytest.mark.parametrize("method", ["kernel", "sampling"])
def test_a_peak_that_is_gone_afterwards_is_seen(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if method == "sampling":
        monkeypatch.setattr(memory, "_reset_high_water_mark", lambda: False)
    elif not memory._reset_high_water_mark():
        pytest.skip("this system keeps no high-water mark that can be reset")

    def allocate() -> None:
        for _ in range(20):  # long enough for a sampler that looks every 2 ms
            np.ones(64 * MIB, dtype=np.uint8)

    result = peak_memory(allocate)
    assert (result.method, result.device_bytes, result.bytes) == (method, None, result.process_bytes)
    assert result.process_bytes - result.before_bytes > 48 * MIB
    again = peak_memory(lambda: None)
    assert again.process_bytes - again.before_bytes < 16 * MIB  # the earlier peak does not linger


def test_a_peak_of_tensors_is_exact_and_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    empty = partial(torch.empty, dtype=torch.uint8)
    kept = [empty(MIB)]

    def two_at_a_time() -> None:
        kept.clear()  # older than the measurement: its end is no allocation
        first = empty(3 * MIB)
        second = empty(5 * MIB)
        del first
        empty(MIB)
        kept.append(second)

    def in_a_cycle() -> None:
        cycle: list[object] = [empty(MIB)]
        cycle.append(cycle)

    assert peak_tensor_bytes(two_at_a_time) == 8 * MIB
    assert peak_tensor_bytes(lambda: None) == 0
    kept.clear()
    assert peak_tensor_bytes(in_a_cycle) == MIB  # waits for the collector: its end is not the next call's
    assert peak_tensor_bytes(lambda: (gc.collect(), two_at_a_time())) == 8 * MIB
    kept.clear()
    assert capfd.readouterr().err == ""


def test_the_dense_side_of_memory_is_the_same_whether_another_run_weighed_it_before(words) -> None:
    """Two runs take the number of the dense run just before them; a later one finds that record and weighs the dense model itself."""
    words = [*words, "protocol=continuation", "measure.memory.enabled=true"]
    *two, later = (compose([*words, f"modules=[{name}]"]) for name in ("random_halting", "halting_attention", "static_depth"))
    records = ensure(two) + ensure([later])
    dense = load_record(records[0].path.parent / records[0].dense_fingerprint).measured("memory", MemoryResult)
    assert dense.peak_tensor_bytes == dense.dense_peak_tensor_bytes
    assert dense.kv_bytes_by_layer.resident == dense.kv_bytes_by_layer.dense
    assert sum(dense.kv_bytes_by_layer.dense) > 0
    for record in records:
        found = record.measured("memory", MemoryResult)
        assert found.dense_peak_tensor_bytes == dense.peak_tensor_bytes
        assert found.kv_bytes_by_layer.dense == dense.kv_bytes_by_layer.dense


@pytest.mark.parametrize("counts_itself", [False, True])
def test_what_a_decision_of_ones_own_computes_is_counted_once_and_operators_agree(counts_itself: bool) -> None:
    def work(view: LayerView, tokens: TokenState) -> None:
        """Two products, by its own hand and by the output head; it counts none, or its own as well."""
        view.after @ torch.ones(view.after.shape[-1], 96)
        if counts_itself:
            view.add_signal_flops(2 * 96 * view.after.numel())
        view.logits(tokens.active)
        tokens.halt(tokens.active & (view.slots % 2 == 0), missing_kv="drop")

    model, ids = tiny.build("gpt2"), tiny.ids(2, 24)
    with torch.no_grad(), apply(model, [Does(work)]) as run:
        interposed = count_executed(lambda: model(ids))
        assert run.flops.signals > 0
        assert run.flops.executed == pytest.approx(interposed, rel=0.01)
        run.reset()
        run.count_decisions(False)
        model(ids)
    assert (run.flops.executed < 0.99 * interposed) == (not counts_itself)


def test_no_product_is_counted_while_a_clock_runs() -> None:
    counting: list[bool] = []

    def look(*_: Any) -> None:
        counting.append(bool(_get_current_dispatch_mode_stack()))

    windows = Windows(tiny.ids(2, 24), 2, 48, None, "made here")
    Latency().run(Bench(tiny.build("gpt2"), windows, Protocol("continuation", 24, 20, 2), [Does(look)]))
    assert counting
    assert not any(counting)


def test_a_decision_that_returns_something_is_refused() -> None:
    returns = type("Returns", (Does,), {"decide": lambda self, view, tokens: tokens.active})
    with tiny.refused(r"call tokens\.halt"):
        tiny.forward(tiny.load("gpt2"), tiny.EVEN, [returns()])
