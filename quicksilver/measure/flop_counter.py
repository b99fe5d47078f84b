"""Executed floating-point operations, counted by interposition: every operator that runs reports its shapes.

This is the check on the analytic ledgers of `quicksilver.runtime.ledger` (docs/design.md §5): both must agree within 1%.
One multiply-accumulate is two operations. Matrix products and attention are counted; elementwise work (norms,
activations, drift) is not: it is below 1% of a layer and no ledger has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten

# Operators behind `scaled_dot_product_attention`. torch 2.13 has no formula for the CPU one (it counts 0) and its
# formulas for the others charge a causal call for the half it skips. The math path needs no entry: it runs as bmm.
_FUSED = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable")


def attention_pairs(queries: int, keys: int, causal: bool) -> int:
    """Query-key pairs that an attention kernel visits in one head. A causal one lets query i see keys 0..i: torch aligns the
    triangle at the top left."""
    if not causal:
        return queries * keys
    square = min(queries, keys)
    return square * (square + 1) // 2 + (queries - square) * keys


def _attention_formula(operator: Any) -> Callable[..., int]:
    # Where `is_causal` stands differs between the operators, and callers pass it by position or by name: ask the schema.
    position = [argument.name for argument in operator.default._schema.arguments].index("is_causal")

    def flops(query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        rest = (query, key, value, *args)
        causal = bool(rest[position]) if len(rest) > position else bool(kwargs.get("is_causal", False))
        batch, heads, queries, head_dim = query
        return 2 * batch * heads * attention_pairs(queries, key[-2], causal) * (head_dim + value[-1])

    return flops


_PACKED = ("onednn.qlinear_pointwise", "quantized.linear_dynamic", "quantized.linear_with_input_q_dq_qweight_dq_output_fp32")
# Of shapes. torch itself counts products of two matrices of floats only. A product of integers is as many operations as one of floats.
FORMULAS: dict[Any, Callable[..., int]] = {
    **{operator: _attention_formula(operator) for operator in (getattr(aten, f"_scaled_dot_product_{name}") for name in _FUSED)},
    aten.mv: lambda matrix, *_, **__: 2 * matrix[0] * matrix[1],
    aten.addmv: lambda bias, matrix, *_, **__: 2 * matrix[0] * matrix[1],
    aten.dot: lambda a, *_, **__: 2 * a[0],
    aten._int_mm: lambda a, b, *_, **__: 2 * a[0] * a[1] * b[1],
    aten._weight_int8pack_mm: lambda a, weight, *_, **__: 2 * a[0] * a[1] * weight[0],
}
for _path in _PACKED:
    with suppress(AttributeError):  # a torch without oneDNN (macOS) may lack one
        # Weights packed for a library have no shape that can be asked for: their channels are those of the result.
        FORMULAS[attrgetter(_path)(torch.ops)] = lambda a, *_, out_shape, **__: 2 * a[0] * a[1] * out_shape[-1]


class _Counting(TorchDispatchMode):
    """Adds up the operators that run, by torch's formulas.

    torch's own mode also counts for every submodule, and asks of every call whether the operator is made of others: on a small model that
    takes six forward passes. Here an operator is asked once.
    """

    whole: ClassVar[set[Any]] = set()  # operators that are not made of others

    def __init__(self) -> None:
        super().__init__()
        self.formulas = FlopCounterMode(display=False, custom_mapping=FORMULAS).flop_registry  # torch's, and those above
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.whole:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
            self.whole.add(func)
        out = func(*args, **kwargs)
        formula = self.formulas.get(func.overloadpacket)
        if formula is not None:
            self.flops[str(func.overloadpacket)] += int(formula(*args, **kwargs, out_val=out))
        return out


def count_by_operator(fn: Callable[[], object]) -> dict[str, int]:
    """Run `fn` once and return the floating-point operations it executed, by operator name (`aten.mm` …)."""
    with _Counting() as counting:
        fn()
    return dict(counting.flops)


def count_executed(fn: Callable[[], object]) -> int:
    """Run `fn` once, such as `lambda: model(input_ids)` inside `quicksilver.apply`, and return the floating-point operations it
    executed (2 per multiply-accumulate). Causal attention of N queries over N keys counts N(N+1)/2 pairs, any other N·K pairs,
    masked or not: the kernel visits them."""
    return sum(count_by_operator(fn).values())
