"""The machine and the libraries of a run, as its record says them."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from quicksilver.records.description import EnvironmentEntry


def environment(other_runs: Sequence[str] = ()) -> EnvironmentEntry:
    """The machine and the libraries, for the record.

    Args:
        other_runs: made on this machine meanwhile.
    """
    import psutil
    import torch
    import transformers

    from quicksilver.runtime.quantized.choosing import processor

    return EnvironmentEntry(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        platform=platform.platform(),
        cpu=processor(),
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
        load_average=os.getloadavg()[0],
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        other_runs=list(other_runs),
        job=_job(),
    )


def _job() -> str | None:
    """`slurm 17_3 on node5, 4 of 64 cores`; the whole node is said to be one."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    cores = os.environ.get("SLURM_CPUS_ON_NODE", "")
    whole = cores.isdecimal() and int(cores) >= (os.cpu_count() or 1)
    share = "the whole node" if whole else f"{cores or '?'} of {os.cpu_count()} cores"
    return f"slurm {job} on {os.environ.get('SLURMD_NODENAME', platform.node())}, {share}"
