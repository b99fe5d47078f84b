"""No kernel of small numbers is used before it was compared with float64 on this processor, and proofs of another are not believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from torch import nn

from quicksilver.baselines.int8_dynamic import Int8Dynamic
from quicksilver.measure.flop_counter import count_executed
from quicksilver.modules.fastest_linear import FastestLinear
from quicksilver.runtime.errors import ConfigError, KernelError
from quicksilver.runtime.quantized import proving
from quicksilver.runtime.quantized.kernels import DYNAMIC_INT8, KERNELS, choose, weight_of
from quicksilver.runtime.quantized.linear import INT_MM, int_mm_fault, kernel_for
from quicksilver.runtime.quantized.proving import INTEGER, wrong

pytestmark = pytest.mark.processor
EVEN = tiny.Batch((tuple(range(1, 25)), tuple(range(30, 54))))


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).int()


def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As oneDNN has it without VNNI: inputs moved up to be unsigned, products added two by two in 16 bits."""
    pairs = ((a.short() + 128)[:, :, None] * b.int()).unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1)
    return (pairs.sum(1) - 128 * b.int().sum(0)).int()


def missing(*_: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing is known of this processor; the cache file."""
    monkeypatch.setattr(proving, "_PROVED", {})
    monkeypatch.setenv("QUICKSILVER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels.json"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "_PROVED", {})


@pytest.mark.parametrize("broken", [saturating, missing])
def test_a_product_that_saturates_or_is_missing_is_neither_offered_nor_timed(
    broken, unproved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = nn.Linear(64, 64)
    x = torch.randn(8, 64)
    monkeypatch.setattr(torch, "_int_mm", broken)
    assert int_mm_fault("cpu") is not None
    assert kernel_for("cpu", 64, 64) != INT_MM
    assert not KERNELS["int_mm"].fits(linear.weight, 8)
    assert "int_mm" not in choose([linear], budget_s=0.0).by_kind.values()
    with pytest.raises(
        KernelError, match=r"product='int_mm': int_mm (has an error|fails).* on .*Give product=auto, or one of float"
    ):
        tiny.forward(tiny.load("gpt2"), EVEN, [FastestLinear(product="int_mm")])
    # The peer takes the next that is exact here, and says so.
    module = Int8Dynamic()
    dense, moved = (tiny.forward(tiny.load("gpt2"), EVEN, modules).logits for modules in ([], [module]))
    assert float((moved - dense).norm() / dense.norm()) < 0.1
    assert module.kernel.startswith(("fbgemm_reduced on cpu (", "qnnpack on cpu ("))
    with torch.no_grad():
        next_best = next(kernel for kernel in DYNAMIC_INT8[1:] if kernel.fits(linear.weight, 8))
        torch.testing.assert_close(next_best.prepare(linear)(x), linear(x), rtol=0, atol=0.1)


def test_where_no_integer_product_is_exact_the_peer_is_refused_in_one_line(
    unproved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_int_mm", saturating)
    monkeypatch.setattr(torch.backends.quantized.__class__, "supported_engines", ["none"])
    with pytest.raises(KernelError) as refused:
        tiny.forward(tiny.load("gpt2"), EVEN, [Int8Dynamic()])
    message = str(refused.value)
    assert "\n" not in message
    assert "int_mm has an error" in message
    assert "qnnpack needs the engine qnnpack; this torch has none" in message
    assert "modules=[adaptive_quantization_uniform8]" in message


def test_an_error_that_random_numbers_do_not_show_is_found(unproved: Path) -> None:
    drawn = [torch.randint(-60, 60, (8, 64), dtype=torch.int8) for _ in range(2)]
    assert torch.equal(saturating(drawn[0], drawn[1].T), exact(drawn[0], drawn[1].T))
    assert "worst codes" in str(wrong("fake", "cpu", lambda x, w: saturating(x, w.T), INTEGER))
    assert wrong("other", "cpu", lambda x, w: exact(x, w.T), INTEGER) is None
    assert wrong("nan", "cpu", lambda x, w: exact(x, w.T) * float("nan"), INTEGER) is not None


def test_proofs_are_kept_by_processor_and_those_of_another_or_damaged_are_made_again(
    unproved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def ask() -> str | None:
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            asked.append(1)
            return exact(x, w.T)

        before = len(asked)
        found = wrong("fake", "cpu", product, INTEGER)
        assert wrong("fake", "cpu", product, INTEGER) == found
        tried.append(len(asked) > before)
        forget(monkeypatch)
        return found

    tried: list[bool] = []
    assert ask() is None
    assert ask() is None
    assert tried == [True, False]
    kept = json.loads(unproved.read_text())
    (where,) = kept["kernels"]
    assert where == proving.processor_key("cpu")
    assert torch.__version__ in where
    assert torch.backends.cpu.get_cpu_capability() in where
    # What another processor proved says nothing of this one, and stays.
    unproved.write_text(json.dumps({"version": proving.VERSION, "kernels": {"another processor": {"fake on cpu": "overflows"}}}))
    assert ask() is None
    assert set(json.loads(unproved.read_text())["kernels"]) == {"another processor", where}
    strange = [json.dumps({"version": proving.VERSION, "kernels": {where: of}}) for of in (3, {"fake on cpu": 3})]
    for text in ("", "{", "[]", '{"version": 1}', '{"version": 0, "kernels": {}}', *strange):
        unproved.write_text(text)
        assert ask() is None
    assert all(tried[2:])
    monkeypatch.setenv("QUICKSILVER_CACHE", str(unproved))  # a file where the folder should be
    assert ask() is None


def test_a_proof_is_in_no_ledger(unproved: Path) -> None:
    linear = nn.Linear(64, 96)
    counted = [count_executed(lambda: KERNELS["weight_only"].fits(weight_of(linear), 1)) for _ in range(2)]
    assert counted == [0, 0]


def test_an_unknown_kernel_is_one_line() -> None:
    with pytest.raises(ConfigError, match="product='int9'") as refused:
        FastestLinear(product="int9")
    assert "\n" not in str(refused.value)
    assert "qlinear" in str(refused.value)
