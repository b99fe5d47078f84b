"""ARM and macOS, as far as another machine can play them: names of processors, engines that are missing, no /proc."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from torch import nn

from quicksilver.baselines.int8_dynamic import Int8Dynamic
from quicksilver.measure import memory
from quicksilver.modules.fastest_linear import FastestLinear
from quicksilver.modules.quantization import AdaptiveQuantization
from quicksilver.records import lease
from quicksilver.runtime.errors import KernelError
from quicksilver.runtime.quantized import proving
from quicksilver.runtime.quantized.kernels import DYNAMIC_INT8, KERNELS, choose

pytestmark = pytest.mark.processor
EVEN = tiny.Batch((tuple(range(1, 25)), tuple(range(30, 54))))
X86 = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n\nprocessor\t: 1\nmodel name\t: Some CPU @ 2 GHz\n"
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\nprocessor\t: 1\nCPU part\t: 0xd0c\n"


def elsewhere(text: str) -> Path:
    """A path of a system without /proc and /sys."""
    return Path("/nowhere" + text)


@pytest.mark.parametrize(
    ("cpuinfo", "named"), [(X86, "Some CPU @ 2 GHz"), (ARM, "aarch64 implementer 0x41 part 0xd0c"), (None, "aarch64")]
)
def test_a_processor_has_the_name_that_linux_gives_it(cpuinfo, named, tmp_path, monkeypatch):
    monkeypatch.setattr(proving.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(proving.platform, "processor", lambda: "")
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    monkeypatch.setattr(proving, "Path", lambda _: file)
    monkeypatch.setattr(sys, "platform", "linux")
    assert proving.processor.__wrapped__() == named


@pytest.mark.parametrize(("answer", "named"), [("Apple M2 Pro\n", "Apple M2 Pro"), ("", "arm64")])
def test_a_processor_has_the_name_that_macos_gives_it(answer, named, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(proving.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 0, answer, ""))
    assert proving.processor.__wrapped__() == named


def test_a_mac_whose_path_lacks_sysctl_is_named_by_its_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(proving.platform, "machine", lambda: "arm64")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert proving.processor.__wrapped__() == "arm64"


@pytest.fixture
def without_x86(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch as it is on an ARM Mac: QNNPACK is the only engine, and there is no oneDNN."""
    if "qnnpack" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch was built without QNNPACK")
    monkeypatch.setattr(torch.backends.quantized.__class__, "supported_engines", ["qnnpack", "none"])
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(proving, "_PROVED", {})
    monkeypatch.setenv("QUICKSILVER_CACHE", str(tmp_path))


@pytest.mark.usefixtures("without_x86")
def test_what_needs_x86_says_what_is_missing_and_the_peer_takes_qnnpack():
    weight = torch.randn(64, 64)
    refusals = {kernel.name: kernel.refusal(weight, 1) for kernel in (*KERNELS.values(), *DYNAMIC_INT8)}
    assert refusals["fbgemm"] == "fbgemm needs the engine x86; this torch has qnnpack, none"
    assert refusals["fbgemm_reduced"] == "fbgemm_reduced needs the engine x86; this torch has qnnpack, none"
    assert refusals["qlinear"] == "qlinear needs oneDNN, which this torch was built without"
    assert "built without oneDNN" in str(refusals["int_mm"])
    assert refusals["float"] is None
    with pytest.raises(KernelError, match="product='qlinear': qlinear needs oneDNN.*Give product=auto, or one of float"):
        tiny.forward(tiny.load("llama"), EVEN, [FastestLinear(product="qlinear")])
    module = Int8Dynamic()
    dense, coded = (tiny.forward(tiny.load("llama"), EVEN, modules).logits for modules in ([], [module]))
    assert float((coded - dense).norm() / dense.norm()) < 0.1
    assert module.kernel.startswith("qnnpack on cpu (")


@pytest.mark.usefixtures("without_x86")
def test_without_integer_products_codes_are_multiplied_as_floats_and_the_kernel_says_so():
    module = AdaptiveQuantization(bits=8, execution="int8")
    with pytest.warns(UserWarning, match="cpu has no exact int8 matrix product"):
        tiny.forward(tiny.load("gpt2"), EVEN, [module])
    assert module.kernel.startswith("float products of the codes on cpu (")
    assert set(choose([nn.Linear(64, 64)], budget_s=0.0).by_kind.values()) <= {"float", "bfloat16", "weight_only"}


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
