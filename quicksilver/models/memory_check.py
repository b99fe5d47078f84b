"""Whether a model has room on this machine: asked before anything is loaded."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from quicksilver.runtime.errors import ConfigError


def check_room(weights_bytes: int, name: str, folder: Path | None = None) -> None:
    """Refuse a model that this machine does not hold: in memory as a whole, or with `folder`, on the disk that takes what memory
    and GPUs do not. Raises ConfigError: says how large it is, what there is, and what to do."""
    needs = f"model={name}: its weights are {gibibytes(weights_bytes)}"
    memory = host_memory_bytes() if folder is None else memory_bytes()
    has = f"this machine has {gibibytes(memory)} of memory"
    if folder is None and weights_bytes > memory:
        remedy = "model.device_map=auto leaves on disk what does not fit, model.dtype=bfloat16 halves float32."
        raise ConfigError(f"{needs} and {has}. {remedy}")
    if folder is not None and weights_bytes > memory + (disk := disk_bytes(folder)):
        remedy = "Take a smaller model, model.dtype=bfloat16, or a larger machine."
        raise ConfigError(f"{needs}; {has} and {gibibytes(disk)} free on disk. {remedy}")


def host_memory_bytes() -> int:
    """Of the machine, without its GPUs, or what a cgroup (a container, a job) gives of it."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _cgroups())])


def free_memory_bytes() -> int:
    """Of it, what can be had without taking it from others."""
    return min([int(psutil.virtual_memory().available), *(max(0, limit - taken) for limit, taken in _cgroups())])


_CGROUPS, _OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _cgroups() -> list[tuple[int, int]]:
    """Limit and what is taken of it, in bytes, of every cgroup around this process that has a limit. Cached files, which give way, take nothing."""
    found = []
    with suppress(OSError, ValueError):  # no Linux
        for line in _OF_PROCESS.read_text(encoding="utf-8").splitlines():
            _, kinds, place = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            root = _CGROUPS / "memory" if kinds else _CGROUPS
            limit, taken = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
            cached = "total_inactive_file " if kinds else "inactive_file "
            below = root / place.strip("/")
            for folder in (below, *below.parents[: len(below.parts) - len(root.parts)]):
                with suppress(OSError, ValueError):  # `max`: no limit; or a folder that only the host sees
                    stat = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
                    files = sum(int(entry.removeprefix(cached)) for entry in stat if entry.startswith(cached))
                    found.append((int((folder / limit).read_text()), int((folder / taken).read_text()) - files))
    return found


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
    return element_bytes * sum(math.prod(head.get_shape()) for found in heads(folder) for head in found.values())


def heads(folder: Path) -> Iterator[dict[str, Any]]:
    """By name the tensors in each safetensors file of a folder, which are not read: their shape and type can be asked for."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  not a dict


def gibibytes(count: float) -> str:
    """`1.5 GiB`, `12 MiB`."""
    return f"{count / 2**30:.3g} GiB" if count >= 2**29 else f"{count / 2**20:.3g} MiB"
