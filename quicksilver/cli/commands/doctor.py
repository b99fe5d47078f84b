"""What this machine has, and what each missing thing costs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quicksilver import __version__
from quicksilver.cli.arguments import ResultsFolder, key
from quicksilver.data.spec import MADE_HERE
from quicksilver.runs.choices import choices
from quicksilver.runs.parts import yaml_of
from quicksilver.runtime.errors import installing

# What `requirements.lock` pins: the results and the whole suite were made with these. The runtime alone also ran on the older pair.
RUN_WITH = {"torch": "2.13.0", "transformers": "5.23.0"}
RUNTIME_RAN_WITH = {"torch": "2.11", "transformers": "5.17"}
# Extra of the package -> what does not work without it.
COSTS = {
    "sweep": "hydra/launcher=joblib",
    "slurm": "hydra/launcher=submitit_slurm and submitit_local",
    "ray": "hydra/launcher=ray",
    "optuna": "hydra/sweeper=optuna",
    "tasks": "evaluate= of a task",
    "lm-eval": "quicksilver lm_eval",
    "tracking": "tracker=wandb",
    "plots": "figures",
    "report": "quicksilver report",
    "linguistics": "tagging a text by perceptron (tables 2, 8, 9, 12 and 13)",
    "peers": "torchao rows of the quantization benchmark",
}
_GB = 1e9


@dataclass
class Doctor(ResultsFolder):
    """
    quicksilver doctor
    quicksilver doctor data.root=/folder results_dir=/folder

    Nothing is downloaded. The integer kernels are compared with float64, which takes a second the first time.
    """

    root: str | None = key(
        "/folder", "local texts and models; default: $QUICKSILVER_DATA", name="data.root",
        factory=lambda: os.environ.get("QUICKSILVER_DATA"),
    )  # fmt: skip

    def main(self) -> int:
        root = Path(self.root).expanduser() if self.root else None
        topics = {"versions": _versions(), "machine": _machine(), "kernels": _kernels()}
        topics |= {"disk": _disk(Path(self.results_dir).expanduser()), "data": _data(root), "packages": _packages()}
        for topic, lines in topics.items():
            for number, line in enumerate(lines):
                print(f"{topic if number == 0 else '':<10}{line}")
        return 0


def _versions() -> Iterator[str]:
    yield f"quicksilver {__version__}, Python {platform.python_version()}, {platform.platform()}"
    for name, version in RUN_WITH.items():
        found = importlib.metadata.version(name)
        same = found.partition("+")[0] == version
        yield f"{name} {found}" + ("" if same else f": the results were made with {version}; `make environment` installs it")
    older = ", ".join(f"{name} {version}" for name, version in RUNTIME_RAN_WITH.items())
    yield f"quicksilver.runtime alone also ran with {older}"


def _machine() -> Iterator[str]:
    import psutil
    import torch

    from quicksilver.runtime.quantized.proving import instruction_set, processor

    memory = psutil.virtual_memory()
    yield f"{processor()} ({platform.machine()}), {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    yield f"instructions: {instruction_set()}"
    yield f"memory: {memory.available / _GB:.1f} of {memory.total / _GB:.1f} GB available"
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield "GPU: " + (", ".join(devices) or "none that torch can use. Times are the CPU's; gpt2-large takes hours a table")


def _kernels() -> Iterator[str]:
    import torch

    from quicksilver.runtime.quantized.kernels import DYNAMIC_INT8, KERNELS

    for kernel in dict.fromkeys([*KERNELS.values(), *DYNAMIC_INT8]):
        if kernel.bound is None:
            continue  # the layer itself
        refused = kernel.refusal(torch.zeros(64, 64), 1)
        yield f"{kernel.name}: " + ("agrees with float64 within its format" if refused is None else f"not offered: {refused}")


def _disk(results: Path) -> Iterator[str]:
    from huggingface_hub import constants

    from quicksilver.runtime.quantized.proving import cache_file

    folders = {"results": results.resolve(), "hub cache": Path(constants.HF_HUB_CACHE), "kernel cache": cache_file().parent}
    for what, folder in folders.items():
        there = next(place for place in (folder, *folder.parents) if place.exists())
        writable = "" if os.access(there, os.W_OK) else ", NOT writable: give another folder"
        yield f"{what}: {folder}, {shutil.disk_usage(there).free / _GB:.1f} GB free{writable}"


def _data(root: Path | None) -> Iterator[str]:
    if root is None:
        yield "data.root is not set: texts come from the hub, or from the package (data.root=/folder, or QUICKSILVER_DATA)"
    elif not root.is_dir():
        yield f"data.root={root} is no folder: give another one"
    else:
        yield f"data.root: {root}"
    places: dict[str, list[str]] = {"at hand": [], "from the hub": [], "needs a file": []}
    for name in choices("dataset"):
        content = yaml_of("dataset", name)
        files = list(_files(content))
        local = root is not None and len(files) > 0 and all((root / file).exists() for file in files)
        if local or content["reader"] in MADE_HERE:
            places["at hand"].append(name)
        else:
            places["from the hub" if (content.get("hub") or {}).get("id") else "needs a file"].append(name)
    yield from (f"{place}: {', '.join(names)}" for place, names in places.items() if names)


def _files(content: dict[str, Any]) -> Iterator[str]:
    """Every file that a dataset's yaml names."""
    for part, value in content.items():
        if part == "files":
            yield from (value if isinstance(value, list) else [file for file in value.values() if file])
        elif isinstance(value, dict):
            yield from _files(value)


def _packages() -> Iterator[str]:
    from packaging.requirements import Requirement

    missing: dict[str, list[str]] = {}
    for requirement in map(Requirement, importlib.metadata.requires("quicksilver-lm") or ()):
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker or ""))
        try:
            importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if extra is not None and extra[1] in COSTS:
                missing.setdefault(extra[1], []).append(requirement.name)
    if not missing:
        yield "all optional packages are installed"
    for name, names in missing.items():
        yield f"missing {', '.join(names)}: no {COSTS[name]}. {'' if name == 'ray' else f'{sys.executable} -m '}{installing(name)}"
