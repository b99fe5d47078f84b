"""Kernels of linear layers: none is used before it was compared with float64 on this processor, the fastest is chosen, and other machines."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import tiny
import torch
from tiny import EVEN
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quicksilver.baselines.number_formats import Int8Dynamic
from quicksilver.measure import memory
from quicksilver.measure.flop_counter import count_executed
from quicksilver.modules import Halting, kernels
from quicksilver.modules.kernels import FastestLinear
from quicksilver.records import lease
from quicksilver.runtime import RuntimeModule, architecture_of
from quicksilver.runtime.architecture import linears_of
from quicksilver.runtime.errors import KernelError
from quicksilver.runtime.quantized import proving
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
from quicksilver.runtime.quantized.linear import INT_MM, int_mm_fault, kernel_for
from quicksilver.runtime.quantized.proving import INTEGER, wrong

# -- the fastest is chosen, and none that is slower than the layer as it is --------------------------------------------------------
pytestmark = pytest.mark.processor
ALL = KERNELS | {kernel.name: kernel for kernel in DYNAMIC_INT8}


class Clock:
    """Stands still but when one of its kernels is run."""

    def __init__(self) -> None:
        self.now_s, self.prepared = 0.0, list[tuple[str, int]]()

    def __call__(self) -> float:
        return self.now_s

    def kernel(self, name: str, seconds: Mapping[int, float]) -> LinearKernel:
        """Takes so many seconds, by number of rows; `prepared` notes for which layers."""

        def prepare(linear: nn.Module) -> Product:
            def product(x: torch.Tensor) -> torch.Tensor:
                self.now_s += seconds[len(x)]
                return x @ weight_of(linear).T

            self.prepared.append((name, id(linear)))
            return product

        return LinearKernel(name, prepare, lambda weight, rows: None if rows in seconds else "not for so many rows", bound=None)

    def choose(self, linears: list[nn.Module], budget_s: float = 1.0, **seconds: Mapping[int, float]) -> Choices:
        """Among kernels of these times, the plain layer's first."""
        there = {name: self.kernel(name, each) for name, each in seconds.items()}
        return choose(linears, kernels=there, clock=self, budget_s=budget_s)


def by_rows(choices: Choices, linear: nn.Module) -> dict[int, str]:
    return {rows: choices.of(Kind.of(weight_of(linear), rows)) for rows in ROWS}


def test_each_kind_of_product_gets_its_own_fastest_kernel_and_none_that_gains_less_than_the_margin() -> None:
    clock = Clock()
    linear = nn.Linear(8, 16)
    float_s = {1: 1e-3, 16: 1e-3, 256: 1e-3}
    found = clock.choose([linear], float=float_s, one={1: 5e-4, 16: 2e-3, 256: 2e-3}, many={16: 0.99e-3, 256: 2.5e-4})
    assert by_rows(found, linear) == {1: "one", 16: "float", 256: "many"}
    assert found.speedup[str(Kind.of(linear.weight, 300))] == pytest.approx(4)
    assert "many: 256 x 8 x 16 float32 (4.0x)" in found.line()
    assert set(clock.choose([linear], float=float_s, other=dict.fromkeys(ROWS, 2e-3)).by_kind.values()) == {"float"}


def test_every_kind_is_measured_and_the_rounds_beyond_the_least_keep_to_the_budget() -> None:
    clock = Clock()
    linears = [nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)]
    fast, slow = dict.fromkeys(ROWS, 0.05), dict.fromkeys(ROWS, 0.1)
    found = clock.choose(linears, 1.0, float=slow, fast=fast)
    assert len(found.by_kind) == 9
    assert set(found.by_kind.values()) == {"fast"}
    # Warming up and three rounds of nine kinds are more than the budget here: nothing is added.
    assert clock.now_s == pytest.approx(9 * 4 * 0.15)
    quick = Clock()
    fast, slow = dict.fromkeys(ROWS, 0.0005), dict.fromkeys(ROWS, 0.001)
    quick.choose(linears, 0.135, float=slow, fast=fast)
    assert 0.135 <= quick.now_s <= 0.135 + 9 * 2 * 0.0015 + 1e-9


def test_weights_are_prepared_once_for_all_numbers_of_rows() -> None:
    clock, seconds, linears = Clock(), dict.fromkeys(ROWS, 1e-3), [nn.Linear(8, 8) for _ in range(10)]
    clock.choose(linears, float=seconds, other=seconds)
    # One layer for many rows, and eight that one row goes round, so that weights come from memory.
    assert sorted(clock.prepared) == sorted((name, id(linear)) for name in ("float", "other") for linear in linears[:8])


def test_what_is_chosen_has_a_digest_and_how_long_it_took_has_none() -> None:
    one = Choices({"a": "int_mm"}, {"a": 2.0})
    assert one.digest == Choices({"a": "int_mm"}, {"a": 3.0}).digest
    assert one.digest != Choices({"a": "float"}, {"a": 1.0}).digest
    assert [rows_class(rows) for rows in (1, 2, 64, 65, 4096)] == [1, 16, 16, 256, 256]
    assert Choices({}, {}).of(Kind(1, 8, 8, "float32")) == "float"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_every_kernel_is_the_layer_but_for_rounding_and_its_operations_are_counted(name: str, conv: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    kernel = ALL[name]
    linear = (Conv1D(96, 64) if conv else nn.Linear(64, 96)).to(dtype)
    linear.weight.normal_()
    linear.bias.normal_()
    refusals = {rows: kernel.refusal(weight_of(linear), rows) for rows in (1, 40)}
    offered = [rows for rows, refusal in refusals.items() if refusal is None]
    if not offered:
        pytest.skip(refusals[1])
    for rows in offered:
        x = torch.randn(rows, 64).to(dtype)
        product = kernel.prepare(linear)
        exact, found = linear(x), product(x)
        assert found.dtype == dtype
        error = float((found - exact).float().norm() / exact.float().norm())
        assert (0 < error < 0.02) if name != "float" else (error == 0), (name, rows)
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
        alone, together = kernel.prepare(linear)(x[:4]), kernel.prepare(linear)(torch.cat([x[:4], 100 * x[4:]]))[:4]
        torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-5)


# -- compared with float64, and proofs of another processor are not believed -------------------------------------------------------
def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).int()


def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As oneDNN has it without VNNI: inputs moved up to be unsigned, products added two by two in 16 bits."""
    even, odd = b[::2].int(), b[1::2].int()
    pairs = ((row[::2, None] * even).add_(row[1::2, None] * odd).clamp_(-(2**15), 2**15 - 1) for row in a.int() + 128)
    return (torch.stack([one.sum(0) for one in pairs]) - 128 * b.int().sum(0)).int()


def missing(*_: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


def moved(model: PreTrainedModel, *modules: RuntimeModule) -> float:
    """How far the logits are from the dense model's, over their norm."""
    dense, found = (tiny.forward(model, EVEN, each).logits for each in ((), modules))
    return float((found - dense).norm() / dense.norm())


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing is known of this processor; the cache file."""
    monkeypatch.setattr(proving, "_PROVED", {})
    monkeypatch.setenv("QUICKSILVER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels.json"


@pytest.mark.parametrize("broken", [saturating, missing])
def test_a_product_that_saturates_or_is_missing_is_neither_offered_nor_timed(broken, unproved, monkeypatch):
    linear = nn.Linear(64, 64)
    x = torch.randn(8, 64)
    monkeypatch.setattr(torch, "_int_mm", broken)
    assert int_mm_fault("cpu") is not None
    assert kernel_for("cpu", 64, 64) != INT_MM
    assert not KERNELS["int_mm"].fits(linear.weight, 8)
    assert "int_mm" not in choose([linear], budget_s=0.0).by_kind.values()
    with tiny.refused(r"product='int_mm': int_mm (has an error|fails).* on .*Give product=auto", KernelError):
        tiny.forward(tiny.load("gpt2"), EVEN, [FastestLinear(product="int_mm")])
    # The peer takes the next that is exact here, and says so.
    module = Int8Dynamic()
    assert moved(tiny.load("gpt2"), module) < 0.1
    assert module.kernel.startswith(("fbgemm_reduced on cpu (", "qnnpack on cpu ("))
    next_best = next(kernel for kernel in DYNAMIC_INT8[1:] if kernel.fits(linear.weight, 8))
    torch.testing.assert_close(next_best.prepare(linear)(x), linear(x), rtol=0, atol=0.1)


def test_where_no_integer_product_is_exact_the_peer_is_refused_in_one_line(unproved: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "_int_mm", saturating)
    monkeypatch.setattr(torch.backends.quantized.__class__, "supported_engines", ["none"])
    says = (
        "int_mm has an error",
        "qnnpack needs the engine qnnpack; this torch has none",
        r"modules=\[adaptive_quantization_uniform8\]",
    )
    with tiny.refused("".join(f"(?=.*{one})" for one in says), KernelError):
        tiny.forward(tiny.load("gpt2"), EVEN, [Int8Dynamic()])


def test_an_error_that_random_numbers_do_not_show_is_found(unproved: Path) -> None:
    drawn = [torch.randint(-60, 60, (8, 64), dtype=torch.int8) for _ in range(2)]
    assert torch.equal(saturating(drawn[0], drawn[1].T), exact(drawn[0], drawn[1].T))
    assert "worst codes" in str(wrong("fake", "cpu", lambda x, w: saturating(x, w.T), INTEGER))
    assert wrong("other", "cpu", lambda x, w: exact(x, w.T), INTEGER) is None
    assert wrong("nan", "cpu", lambda x, w: exact(x, w.T) * float("nan"), INTEGER) is not None


def test_proofs_are_kept_by_processor_and_those_of_another_or_damaged_are_made_again(unproved, monkeypatch):
    asked: list[int] = []

    def ask() -> str | None:
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            asked.append(1)
            return exact(x, w.T)

        before = len(asked)
        found = wrong("fake", "cpu", product, INTEGER)
        assert wrong("fake", "cpu", product, INTEGER) == found
        tried.append(len(asked) > before)
        monkeypatch.setattr(proving, "_PROVED", {})  # forgotten
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


# -- ARM and macOS, as far as another machine can play them ------------------------------------------------------------------------
X86 = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n\nprocessor\t: 1\nmodel name\t: Some CPU @ 2 GHz\n"
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\nprocessor\t: 1\nCPU part\t: 0xd0c\n"


def elsewhere(text: str) -> Path:
    """A path of a system without /proc and /sys."""
    return Path("/nowhere" + text)


PROCESSORS = [
    ("linux", X86, "Some CPU @ 2 GHz"), ("linux", ARM, "aarch64 implementer 0x41 part 0xd0c"), ("linux", None, "aarch64"),
    ("darwin", "Apple M2 Pro\n", "Apple M2 Pro"), ("darwin", "", "aarch64"), ("darwin", None, "aarch64"),  # without sysctl
]  # fmt: skip


@pytest.mark.parametrize(("system", "answer", "named"), PROCESSORS)
def test_a_processor_has_the_name_that_its_system_gives_it(system, answer, named, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(proving.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(proving.platform, "processor", lambda: "")
    monkeypatch.setattr(proving, "Path", lambda _: tmp_path / "cpuinfo")
    if answer is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        (tmp_path / "cpuinfo").write_text(answer)
        monkeypatch.setattr(subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 0, answer, ""))
    assert proving.processor.__wrapped__() == named


@pytest.fixture
def without_x86(monkeypatch: pytest.MonkeyPatch, unproved: Path) -> None:
    """torch as it is on an ARM Mac: QNNPACK is the only engine, and there is no oneDNN."""
    if "qnnpack" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch was built without QNNPACK")
    monkeypatch.setattr(torch.backends.quantized.__class__, "supported_engines", ["qnnpack", "none"])
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)


@pytest.mark.usefixtures("without_x86")
def test_what_needs_x86_says_what_is_missing_and_the_peer_takes_qnnpack():
    weight = torch.randn(64, 64)
    refusals = {kernel.name: kernel.refusal(weight, 1) for kernel in (*KERNELS.values(), *DYNAMIC_INT8)}
    assert refusals["fbgemm"] == "fbgemm needs the engine x86; this torch has qnnpack, none"
    assert refusals["fbgemm_reduced"] == "fbgemm_reduced needs the engine x86; this torch has qnnpack, none"
    assert refusals["qlinear"] == "qlinear needs oneDNN, which this torch was built without"
    assert "built without oneDNN" in str(refusals["int_mm"])
    assert refusals["float"] is None
    with tiny.refused("product='qlinear': qlinear needs oneDNN.*Give product=auto, or one of float", KernelError):
        tiny.forward(tiny.load("llama"), EVEN, [FastestLinear(product="qlinear")])
    module = Int8Dynamic()
    assert moved(tiny.load("llama"), module) < 0.1
    assert module.kernel.startswith("qnnpack on cpu (")


def test_a_lease_is_held_and_found_dead_without_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "Path", elsewhere)
    monkeypatch.setattr(os, "readlink", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
    path = tmp_path / "it.lock"
    held = lease.take(path)
    assert held is not None
    assert lease.take(path) is None
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    path.write_text(path.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {gone.pid}'))
    assert lease.take(path) is not None


def test_a_peak_of_memory_is_sampled_without_proc(monkeypatch):
    monkeypatch.setattr(memory, "_CLEAR_REFS", elsewhere("/proc/self/clear_refs"))
    monkeypatch.setattr(sys, "platform", "darwin")
    found = memory.peak_memory(lambda: torch.ones(2**24).sum())
    assert found.method == "sampling"
    assert found.bytes > 0


# -- linear layers by the kernels that were chosen for them -------------------------------------------------------------------------
def choices(model: PreTrainedModel, name: str, rows: int) -> Choices:
    kinds = {str(Kind.of(weight_of(linear), rows)) for linear in linears_of(architecture_of(model).layers)}
    return Choices(dict.fromkeys(kinds, name), {})


def chosen(found: Choices) -> FastestLinear:
    module = FastestLinear()
    module.choices = found
    return module


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_products_are_computed_as_chosen_and_the_model_is_as_before(family: str) -> None:
    model = tiny.load(family)
    as_it_is, by_rows = chosen(Choices({}, {})), chosen(choices(model, "weight_only", 48))
    with tiny.left_untouched(model):
        assert moved(model, as_it_is) == 0
        assert "float for 16 x" in as_it_is.kernel
        assert 1e-5 < moved(model, by_rows) < 0.05
        assert "weight_only for 16 x" in by_rows.kernel
        assert moved(model, chosen(choices(model, "weight_only", 1))) == 0  # no product here has one row


def test_a_named_kernel_computes_what_it_can() -> None:
    model = tiny.load("gpt2")
    assert moved(model, FastestLinear(product="fbgemm")) == 0  # for one row alone
    assert moved(model, FastestLinear(product="bfloat16")) > 0
    assert not FastestLinear(product="bfloat16").measures
    with tiny.refused("product='int9'"):
        FastestLinear(product="int9")


def test_it_measures_by_itself_once_and_goes_with_halting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fake(linears: list[nn.Module]) -> Choices:
        asked.append(len(linears))
        return choices(tiny.load("llama"), "bfloat16", 16)

    monkeypatch.setattr(kernels, "choose", fake)
    monkeypatch.setattr(kernels, "_MEASURED", {})
    model = tiny.load("llama")
    modules = [FastestLinear(), Halting(halted_share=0.5, missing_kv="project", rule="capacity", resume_layers=0)]
    outcomes = [tiny.forward(model, EVEN, modules, execution=execution) for execution in ("compact", "masked")]
    assert len(asked) == 1
    assert float((outcomes[0].logits - outcomes[1].logits).norm() / outcomes[1].logits.norm()) < 0.02
