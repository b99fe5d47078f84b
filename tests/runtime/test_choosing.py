"""The kernel of a product is the one that a clock found fastest, and never one that is slower than the layer as it is."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quicksilver.measure.flop_counter import count_executed
from quicksilver.runtime.quantized.kernels import (
    DYNAMIC_INT8,
    KERNELS,
    ROWS,
    Choices,
    Kind,
    LinearKernel,
    Product,
    choose,
    rows_class,
    weight_of,
)

pytestmark = pytest.mark.processor
ALL = KERNELS | {kernel.name: kernel for kernel in DYNAMIC_INT8}


class Clock:
    """Stands still but when a kernel is run."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Fake(LinearKernel):
    """Takes so many seconds, by number of rows."""

    def __init__(self, name: str, clock: Clock, seconds: Mapping[int, float]) -> None:
        self.name, self.clock, self.seconds = name, clock, seconds

    bound = None

    def lacks(self, weight: torch.Tensor, rows: int) -> str | None:
        return None if rows in self.seconds else "not for so many rows"

    def prepare(self, linear: nn.Module) -> Product:
        def product(x: torch.Tensor) -> torch.Tensor:
            self.clock.now_s += self.seconds[len(x)]
            return x @ weight_of(linear).T

        return product


def kernels(clock: Clock, **seconds: Mapping[int, float]) -> dict[str, LinearKernel]:
    return {name: Fake(name, clock, each) for name, each in seconds.items()}


def by_rows(choices: Choices, linear: nn.Module) -> dict[int, str]:
    return {rows: choices.of(Kind.of(weight_of(linear), rows)) for rows in ROWS}


def test_each_kind_of_product_gets_its_own_fastest_kernel_and_none_that_gains_less_than_the_margin() -> None:
    clock = Clock()
    linear = nn.Linear(8, 16)
    float_s = {1: 1e-3, 16: 1e-3, 256: 1e-3}
    there = kernels(clock, float=float_s, one={1: 5e-4, 16: 2e-3, 256: 2e-3}, many={16: 0.99e-3, 256: 2.5e-4})
    found = choose([linear], kernels=there, clock=clock)
    assert by_rows(found, linear) == {1: "one", 16: "float", 256: "many"}
    assert found.speedup[str(Kind.of(linear.weight, 300))] == pytest.approx(4)
    assert "many: 256 x 8 x 16 float32 (4.0x)" in found.line()
    slower = kernels(clock, float=float_s, other=dict.fromkeys(ROWS, 2e-3))
    assert set(choose([linear], kernels=slower, clock=clock).by_kind.values()) == {"float"}


def test_every_kind_is_measured_and_the_rounds_beyond_the_least_keep_to_the_budget() -> None:
    clock = Clock()
    linears = [nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)]
    fast, slow = dict.fromkeys(ROWS, 0.05), dict.fromkeys(ROWS, 0.1)
    found = choose(linears, kernels=kernels(clock, float=slow, fast=fast), budget_s=1.0, clock=clock)
    assert len(found.by_kind) == 9
    assert set(found.by_kind.values()) == {"fast"}
    # Warming up and three rounds of nine kinds are more than the budget here: nothing is added.
    assert clock.now_s == pytest.approx(9 * 4 * 0.15)
    quick = Clock()
    fast, slow = dict.fromkeys(ROWS, 0.0005), dict.fromkeys(ROWS, 0.001)
    choose(linears, kernels=kernels(quick, float=slow, fast=fast), budget_s=0.135, clock=quick)
    assert 0.135 <= quick.now_s <= 0.135 + 9 * 2 * 0.0015 + 1e-9


def test_weights_are_prepared_once_for_all_numbers_of_rows() -> None:
    clock = Clock()
    each = {name: Fake(name, clock, dict.fromkeys(ROWS, 1e-3)) for name in ("float", "other")}
    prepared: list[tuple[str, int]] = []
    for name, fake in each.items():
        prepare = fake.prepare
        fake.prepare = lambda linear, name=name, prepare=prepare: prepared.append((name, id(linear))) or prepare(linear)  # type: ignore[method-assign]
    linears = [nn.Linear(8, 8) for _ in range(10)]
    choose(linears, kernels=each, clock=clock)
    # One layer for many rows, and eight that one row goes round, so that weights come from memory.
    assert sorted(prepared) == sorted((name, id(linear)) for name in each for linear in linears[:8])


def test_what_is_chosen_has_a_digest_and_how_long_it_took_has_none() -> None:
    one = Choices({"a": "int_mm"}, {"a": 2.0})
    assert one.digest == Choices({"a": "int_mm"}, {"a": 3.0}).digest
    assert one.digest != Choices({"a": "float"}, {"a": 1.0}).digest
    assert [rows_class(rows) for rows in (1, 2, 64, 65, 4096)] == [1, 16, 16, 256, 256]
    assert Choices({}, {}).of(Kind(1, 8, 8, "float32")) == "float"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_every_kernel_is_the_layer_but_for_rounding_and_its_operations_are_counted(
    name: str, conv: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    kernel = ALL[name]
    linear = (Conv1D(96, 64) if conv else nn.Linear(64, 96)).to(dtype)
    with torch.no_grad():
        linear.weight.normal_()
        linear.bias.normal_()
    refusals = {rows: kernel.refusal(weight_of(linear), rows) for rows in (1, 40)}
    offered = [rows for rows, refusal in refusals.items() if refusal is None]
    if not offered:
        pytest.skip(refusals[1])
    for rows in offered:
        x = torch.randn(rows, 64).to(dtype)
        with torch.no_grad():
            product = kernel.prepare(linear)
            exact, found = linear(x), product(x)
            assert found.dtype == dtype
            error = float((found - exact).float().norm() / exact.float().norm())
            assert error < (0.02 if name != "float" else 1e-9), (name, rows)
            assert (error > 0) == (name != "float")
            width = 64 + 2 * (name == "qnnpack")  # and the two columns that set its scale
            assert count_executed(lambda x=x, product=product: product(x)) == 2 * rows * width * 96


def test_a_product_whose_scale_is_that_of_all_rows_is_offered_for_one_row_alone() -> None:
    weight = torch.randn(8, 8)
    assert not KERNELS["fbgemm"].fits(weight, 2)
    for name, kernel in ALL.items():
        if name == "fbgemm" or not kernel.fits(weight, 16):
            continue
        linear = nn.Linear(8, 8)
        x = torch.randn(16, 8)
        with torch.no_grad():
            alone, together = kernel.prepare(linear)(x[:4]), kernel.prepare(linear)(torch.cat([x[:4], 100 * x[4:]]))[:4]
        torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-5)
