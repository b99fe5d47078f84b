"""Whether a kernel computes on this processor what it says: a comparison with float64 at the codes that overflow first.

Without VNNI instructions oneDNN and fbgemm add pairs of 8-bit products in 16 bits. Such a sum saturates, and nothing is reported.
So a kernel of small numbers is tried once before anything is computed or timed with it, and the result is kept by processor.
"""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from quicksilver.runtime.reading import read_json

CodesProduct = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # codes (R, K) and (N, K) int8 -> (R, N)
INTEGER = 1e-6  # an integer product may differ by float32 rounding of its result alone
VERSION = 1  # of the comparison: results of another one are not believed
CACHE = "QUICKSILVER_CACHE"  # environment variable: folder of the cache file
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
FAILS = "fails: "
_FEATURES = ("avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "neon", "sve", "i8mm", "bf16")
_SHAPES = ((1, 64), (32, 64), (96, 4096), (1, 4096))  # rows, width; 64 channels
_PROVED: dict[tuple[str, str], str | None] = {}  # in this process, by processor and kernel


def wrong(
    kernel: str,
    device: str,
    product: CodesProduct,
    bound: float,
    codes: tuple[int, int] = (-128, 127),
    most_rows: int | None = None,
) -> str | None:
    """What is wrong with a kernel here, in a clause; None: its error is below `bound` at the worst codes.

    Args:
        kernel: its name, with all that decides how it computes (dtype).
        device: `cpu` or `cuda`.
        bound: of ‖error‖ / ‖|x|·|w|ᵀ‖, as the number format has it.
        codes: least and greatest code of inputs that the kernel takes; most_rows: of a call.
    """
    where, name = processor_key(device), f"{kernel} on {device}"
    if (where, name) not in _PROVED:
        kept = _read(cache_file()).get(where, {})
        if name in kept:
            found = kept[name]
        else:
            with _disable_current_modes():  # what counts operations shall not count these
                found = _fault(product, device, bound, codes, most_rows)
            if found is None or not found.startswith(FAILS):  # too little memory, say, is of today
                _keep(where, name, found)
        _PROVED[where, name] = found
    return _PROVED[where, name]


@torch.no_grad()
def _fault(product: CodesProduct, device: str, bound: float, codes: tuple[int, int], most_rows: int | None) -> str | None:
    worst, at = 0.0, ""
    for rows, width in _SHAPES:
        if most_rows is not None and rows > most_rows:
            continue
        for kind, x, weight in _worst_codes(rows, width, *codes):
            try:
                found = product(x.to(device), weight.to(device)).double().cpu()
            except RuntimeError as failure:
                return f"{FAILS}{str(failure).partition(chr(10))[0][:120] or type(failure).__name__}"
            x, weight = x.double(), weight.double()
            apart = float((found - x @ weight.T).norm() / (x.abs() @ weight.abs().T).norm())
            if math.isnan(apart) or apart > worst:
                worst, at = math.inf if math.isnan(apart) else apart, f"{kind}, width {width}"
    return None if worst <= bound else f"has an error of {worst:.2g} at the worst codes ({at}), and its format leaves {bound:.1g}"


@functools.cache
def _worst_codes(rows: int, width: int, least: int, greatest: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Kind, codes x (rows, width) and weight (64, width), int8."""
    generator = torch.Generator().manual_seed(width)

    def signs(*shape: int) -> torch.Tensor:
        return 2 * torch.randint(0, 2, shape, generator=generator) - 1

    ones, channels = torch.ones(rows, width, dtype=torch.long), torch.ones(64, width, dtype=torch.long)
    halves = torch.where(torch.arange(width) < width // 2, 1, -1)
    drawn = torch.randint(least, greatest + 1, (rows, width), generator=generator)
    weights = torch.randint(-127, 128, (64, width), generator=generator)
    drawn[:, 0], weights[:, 0] = greatest, 127  # so that coding by the greatest value changes no code
    cases = {
        f"all {greatest}": (greatest * ones, 127 * channels),
        f"{least} by 127": (least * ones, 127 * channels),
        "mixed signs": (greatest * signs(rows, width), 127 * signs(64, width)),
        "pairs of one sign": (greatest * ones, 127 * signs(64, width // 2).repeat_interleave(2, 1)),
        "sums that cancel": (greatest * ones - torch.arange(width) % 7, 127 * channels * halves),
        "random codes": (drawn, weights),
    }
    return [(kind, x.to(torch.int8), weight.to(torch.int8)) for kind, (x, weight) in cases.items()]


# -- which processor -------------------------------------------------------------------------------------------------------------


@functools.cache
def processor() -> str:
    """What the system calls its processor: `AMD EPYC`, `Apple M2`; on ARM under Linux the numbers of implementer and part."""
    if sys.platform == "darwin":
        try:
            asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        except OSError:  # a PATH without /usr/sbin, as cron's
            return platform.machine()
        return asked.stdout.strip() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    if "model name" in facts:
        return facts["model name"]
    part = [f"{key.removeprefix('CPU ')} {facts[key]}" for key in ("CPU implementer", "CPU part") if key in facts]
    return " ".join([platform.processor() or platform.machine(), *part])


@functools.cache
def instruction_set() -> str:
    """What torch's kernels may use here: `AVX512, avx512_vnni`, or `AVX2, oneDNN at most AVX2`."""
    found = torch.backends.cpu.get_cpu_capability()
    limits = [f"{name} {os.environ[name]}" for name in LIMITS if os.environ.get(name)]
    has: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return ", ".join([found, *(limits or [name for name in _FEATURES if has.get(name) is True])])


@functools.cache
def processor_key(device: str) -> str:
    """What a proof holds for: processor and instructions, or GPU; torch."""
    cpu = f"{processor()}, {instruction_set()}"
    return f"{torch.cuda.get_device_name() if device == 'cuda' else cpu}, torch {torch.__version__}"


# -- the cache -------------------------------------------------------------------------------------------------------------------


def cache_file() -> Path:
    """Where proofs are kept: in $QUICKSILVER_CACHE, else in the user's cache folder."""
    folder = os.environ.get(CACHE) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quicksilver"
    return Path(folder) / "kernels.json"


def _read(file: Path) -> dict[str, dict[str, str | None]]:
    """Results by processor and kernel; a damaged file, or one of another version, is as none."""
    try:
        content = read_json(file)
        if content["version"] != VERSION:
            return {}
        return {
            where: {kernel: fault for kernel, fault in found.items() if fault is None or isinstance(fault, str)}
            for where, found in content["kernels"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _keep(where: str, kernel: str, fault: str | None) -> None:
    """Written whole and renamed; where nothing can be written, every process proves for itself."""
    file = cache_file()
    found = _read(file)
    found.setdefault(where, {})[kernel] = fault
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({"version": VERSION, "kernels": found}, indent=1, sort_keys=True), encoding="utf-8")
        draft.replace(file)
    except OSError:
        return
