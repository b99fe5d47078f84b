"""The machine of a run: what its record says of it, and which kernels are fastest there for a model.

Kernels round differently, so what was chosen must be known before a record is looked for. It is measured when a run is planned, the first time
that a model meets a machine (processor, torch, number of threads), kept in the results folder, and part of a run's identity.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from quicksilver.records.description import EnvironmentEntry
from quicksilver.records.store import Store, read_object

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quicksilver.runs.config import RunConfig
    from quicksilver.runtime.quantized.kernels import Choices

_KEPT = "cache/kernels.json"


def environment(other_runs: Sequence[str] = ()) -> EnvironmentEntry:
    """The machine and the libraries, for the record.

    Args:
        other_runs: made on this machine meanwhile.
    """
    import psutil
    import torch
    import transformers

    from quicksilver.runtime.quantized.kernels import processor

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
        job=job(),
    )


def job() -> str | None:
    """`slurm 17_3 on node5, 4 of 64 cores`; the whole node is said to be one."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    cores = os.environ.get("SLURM_CPUS_ON_NODE", "")
    whole = cores.isdecimal() and int(cores) >= (os.cpu_count() or 1)
    share = "the whole node" if whole else f"{cores or '?'} of {os.cpu_count()} cores"
    return f"slurm {job} on {os.environ.get('SLURMD_NODENAME', platform.node())}, {share}"


def kernel_choices(config: RunConfig, weights_digest: str, load: Callable[[], PreTrainedModel]) -> Choices:
    """The choices for the linear layers of a model; a new measurement says in one line what it chose.

    Args:
        load: gives the model; called where nothing is kept, or a kernel that this version has not.
    """
    import torch

    from quicksilver.measure.measurement import Mistyped, decoded, encoded
    from quicksilver.runtime.architecture import architecture_of
    from quicksilver.runtime.quantized.kernels import KERNELS, Choices, choose, linears_of, machine

    threads = torch.get_num_threads()
    try:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        store, where = Store(config.results_dir), machine()
        key = f"{weights_digest} {config.model.dtype} {config.model.device_map}"
        kept = read_object(store.root / _KEPT)
        here = kept[where] if isinstance(kept.get(where), dict) else {}
        with suppress(Mistyped):
            choices = decoded(Choices, here.get(key))
            if set(choices.by_kind.values()) <= set(KERNELS):
                return choices
        found = choose(linears_of(architecture_of(load()).layers))
        print(f"Kernels for {config.model.name} on {where}: {found.line()}", file=sys.stderr, flush=True)
        store.write_cache(_KEPT, kept | {where: here | {key: encoded(found)}})
        return found
    finally:
        torch.set_num_threads(threads)
