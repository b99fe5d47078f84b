"""The machine and the libraries of a run, as its record says them."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from quicksilver.harness.description import EnvironmentEntry


def environment() -> EnvironmentEntry:
    """The machine and the libraries, for the record."""
    import psutil
    import torch
    import transformers

    return EnvironmentEntry(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        platform=platform.platform(),
        cpu=_cpu_name(),
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
        load_average=os.getloadavg()[0],
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    )


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
