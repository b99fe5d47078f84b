"""Linear layers by the kernels that were chosen for them, and nothing of it left behind."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import nn

from quicksilver.modules import Halting
from quicksilver.modules.fastest_linear import FastestLinear
from quicksilver.runtime import ConfigError, apply
from quicksilver.runtime.quantized.kernels import KERNELS, Choices, Kind, linears_of, weight_of

pytestmark = pytest.mark.processor
EVEN = tiny.Batch((tuple(range(1, 25)), tuple(range(30, 54))))


def choices(model: object, name: str, rows: int) -> Choices:
    with apply(model, []) as run:  # type: ignore[arg-type]
        kinds = {str(Kind.of(weight_of(linear), rows)) for linear in linears_of(run.arch.layers)}
    return Choices(dict.fromkeys(kinds, name), {})


def chosen(found: Choices) -> FastestLinear:
    module = FastestLinear()
    module.choices = found
    return module


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_products_are_computed_as_chosen_and_the_model_is_as_before(family: str) -> None:
    model = tiny.load(family)
    dense = tiny.forward(model, EVEN, []).logits
    as_it_is = chosen(Choices({}, {}))
    assert torch.equal(tiny.forward(model, EVEN, [as_it_is]).logits, dense)
    assert "float for 16 x" in as_it_is.kernel
    by_rows = chosen(choices(model, "weight_only", 48))
    moved = float((tiny.forward(model, EVEN, [by_rows]).logits - dense).norm() / dense.norm())
    assert 1e-5 < moved < 0.05
    assert "weight_only for 16 x" in by_rows.kernel
    one_row = chosen(choices(model, "weight_only", 1))
    assert torch.equal(tiny.forward(model, EVEN, [one_row]).logits, dense)  # no product here has one row
    assert torch.equal(tiny.forward(model, EVEN, []).logits, dense)


def test_a_named_kernel_computes_what_it_can_and_is_refused_where_it_can_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.load("gpt2")
    dense = tiny.forward(model, EVEN, []).logits
    assert torch.equal(tiny.forward(model, EVEN, [FastestLinear(product="fbgemm")]).logits, dense)  # for one row alone
    assert not torch.equal(tiny.forward(model, EVEN, [FastestLinear(product="bfloat16")]).logits, dense)
    assert not FastestLinear(product="bfloat16").measures
    with pytest.raises(ConfigError, match="product='int9'"):
        FastestLinear(product="int9")
    monkeypatch.setattr(type(KERNELS["qlinear"]), "lacks", lambda *_: "qlinear needs a newer torch")
    with pytest.raises(
        ConfigError, match=r"product='qlinear': qlinear needs a newer torch\. Give product=auto, or one of float, "
    ):
        tiny.forward(model, EVEN, [FastestLinear(product="qlinear")])


def test_it_measures_by_itself_once_and_goes_with_halting(monkeypatch: pytest.MonkeyPatch) -> None:
    from quicksilver.modules import fastest_linear

    asked: list[int] = []

    def fake(linears: list[nn.Module]) -> Choices:
        asked.append(len(linears))
        return choices(tiny.load("llama"), "bfloat16", 16)

    monkeypatch.setattr(fastest_linear, "choose", fake)
    monkeypatch.setattr(fastest_linear, "_MEASURED", {})
    model = tiny.load("llama")
    modules = [FastestLinear(), Halting(halted_share=0.5, missing_kv="project", rule="capacity", resume_layers=0)]
    outcomes = [tiny.forward(model, EVEN, modules, execution=execution) for execution in ("compact", "masked")]
    assert len(asked) == 1
    assert float((outcomes[0].logits - outcomes[1].logits).norm() / outcomes[1].logits.norm()) < 0.02
