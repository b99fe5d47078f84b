"""Whether a model has room on this machine: asked before anything is loaded."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import psutil

from quicksilver.runtime.errors import ConfigError


def check_room(weights_bytes: int, name: str, folder: Path | str = ".") -> None:
    """Refuse a model that neither memory nor disk holds.

    Args:
        folder: on the disk that would take what memory does not.

    Raises:
        ConfigError: says how large it is, and what there is.
    """
    memory, disk = memory_bytes(), disk_bytes(Path(folder))
    if weights_bytes > memory + disk:
        raise ConfigError(
            f"model={name}: its weights are {gibibytes(weights_bytes)}; this machine has {gibibytes(memory)} of memory and "
            f"{gibibytes(disk)} free on disk. Take a smaller model, model.dtype=bfloat16, or a larger machine."
        )


def check_memory(weights_bytes: int, name: str) -> None:
    """Refuse a model that is to lie in the machine's memory as a whole and does not fit.

    Raises:
        ConfigError: says how large it is, and how to leave some of it on disk.
    """
    if weights_bytes > host_memory_bytes():
        raise ConfigError(
            f"model={name}: its weights are {gibibytes(weights_bytes)} and this machine has {gibibytes(host_memory_bytes())} of memory. "
            "model.device_map=auto leaves on disk what does not fit, model.dtype=bfloat16 halves float32."
        )


def host_memory_bytes() -> int:
    """Of the machine, without its GPUs."""
    return int(psutil.virtual_memory().total)


def free_memory_bytes() -> int:
    """Of it, what can be had without taking it from others."""
    return int(psutil.virtual_memory().available)


def memory_bytes() -> int:
    """Of the machine and its GPUs."""
    import torch

    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return host_memory_bytes() + sum(torch.cuda.get_device_properties(i).total_memory for i in devices)


def disk_bytes(folder: Path) -> int:
    """Free on the disk of a folder, which need not be there yet."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    return shutil.disk_usage(there).free


def weights_bytes(folder: Path, element_bytes: int) -> int:
    """Of the weights in a folder, from the heads of its safetensors files, once they have elements of that size."""
    from safetensors import safe_open

    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  not a dict
    return count * element_bytes


def gibibytes(count: float) -> str:
    """`1.5 GiB`, `12 MiB`."""
    return f"{count / 2**30:.3g} GiB" if count >= 2**29 else f"{count / 2**20:.3g} MiB"
