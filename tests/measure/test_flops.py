"""Interposed FLOPs: right on operators whose count is known, and equal to the analytic ledger on every family."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from thinning import draws
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)  # fmt: skip

from quicksilver.measure import attention_pairs, count_by_operator, count_executed
from quicksilver.measure.flop_counter import FORMULAS, aten
from quicksilver.runtime import LayerView, RuntimeModule, TokenPolicy, TokenState, apply

torch.set_num_threads(1)
SHAPE = {"vocab_size": 53, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
ROTARY = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "max_position_embeddings": 64, **SHAPE,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=32, n_head=4, n_positions=64, **SHAPE)),
    "llama-gqa": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **ROTARY)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**ROTARY)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(num_key_value_heads=2, head_dim=8, **ROTARY)),
}


def tiny(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


@dataclass
class HaltAtRandom(TokenPolicy):
    """Halts each token after a layer drawn from its slot; every second one asks for its entropy first."""

    seed: int = 0
    missing_kv: str = "drop"
    resume_layers: int = 0

    @property
    def copies_kv(self) -> bool:
        return self.missing_kv == "copy"

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        draw = (view.slots * 2654435761 + self.seed * 40503 + view.slots * view.slots * 97) % 7
        candidates = tokens.active & (draw <= view.layer)
        asked = candidates & (view.slots % 2 == 0)
        candidates[asked.clone()] = view.logit_entropy_nats(asked) > 0
        tokens.halt(candidates, missing_kv=self.missing_kv, resume_layers=self.resume_layers)


# -- known counts ----------------------------------------------------------------------------------------------------------------


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
    model, ids = tiny("llama-gqa"), torch.arange(1, 13).view(2, 6)
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


# -- against the analytic ledger -------------------------------------------------------------------------------------------------


def assert_ledgers_agree(model: PreTrainedModel, modules: list[RuntimeModule], execution: str, call: Callable[[], object]) -> int:
    with torch.no_grad(), apply(model, modules, execution=execution) as run:
        counted = count_executed(call)
        executed = run.flops.executed
    assert counted > 0
    assert executed == pytest.approx(counted, rel=0.01)
    return counted


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dense_count_is_the_analytic_one(family: str, attention: str) -> None:
    model = tiny(family)
    model.set_attn_implementation(attention)
    ids = torch.randint(0, 53, (2, 20))
    counted = assert_ledgers_agree(model, [], "compact", lambda: model(ids, use_cache=False))
    with torch.no_grad():
        assert counted == count_executed(lambda: model(ids, use_cache=False))  # and the runtime added nothing

    def cached() -> None:
        past = model(ids[:, :12], use_cache=True).past_key_values
        past = model(ids[:, 12:19], use_cache=True, past_key_values=past).past_key_values
        model(ids[:, 19:], use_cache=True, past_key_values=past)

    assert_ledgers_agree(model, [], "compact", cached)


@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=draws(12), deadline=None, phases=[Phase.reuse, Phase.generate]
)  # examples are small as drawn; shrinking takes minutes
@given(
    batch=st.integers(1, 3), tokens=st.integers(2, 20), prompt=st.integers(1, 20), seed=st.integers(0, 99),
    missing_kv=st.sampled_from(["drop", "project", "copy", "zero"]), resume_layers=st.integers(0, 1),
    execution=st.sampled_from(["compact", "masked", "decide"]), padded=st.booleans(),
)  # fmt: skip
def test_count_under_random_halting_is_the_analytic_one(
    family: str,
    batch: int,
    tokens: int,
    prompt: int,
    seed: int,
    missing_kv: str,
    resume_layers: int,
    execution: str,
    padded: bool,
) -> None:
    model = tiny(family)
    ids = torch.randint(0, 53, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, : tokens // 3] = 0
    prompt = min(prompt, tokens)
    halting: list[RuntimeModule] = [HaltAtRandom(seed, missing_kv, resume_layers)]

    def call() -> None:
        past = model(ids[:, :prompt], attention_mask=mask[:, :prompt], use_cache=True).past_key_values
        if prompt < tokens:
            model(ids[:, prompt:], attention_mask=mask, use_cache=True, past_key_values=past)

    assert_ledgers_agree(model, halting, execution, call)


def test_halting_lowers_the_count_when_it_is_executed_and_only_then() -> None:
    model = tiny("gpt2")
    ids = torch.randint(0, 53, (2, 40))
    counts = {}
    for execution in ("compact", "masked", "decide"):
        counts[execution] = assert_ledgers_agree(model, [HaltAtRandom()], execution, lambda: model(ids, use_cache=False))
    dense = assert_ledgers_agree(model, [], "compact", lambda: model(ids, use_cache=False))
    assert counts["compact"] < dense <= counts["decide"] <= counts["masked"]
