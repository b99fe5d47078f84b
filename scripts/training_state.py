"""The state of a training run on disk: weights, optimisers, step and history, so that a kill at any moment loses little and breaks nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_META = "meta.json"
_WEIGHTS = re.compile(r"(model|optim\d+)\.safetensors")


class TrainingState:
    """`latest/` in a run's folder, safetensors and json. Written beside, then renamed; a kill between the renames leaves `old/`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def save(self, meta: dict[str, Any], model: torch.nn.Module, optims: Sequence[torch.optim.Optimizer]) -> None:
        """Replace what is there; meta: what `load` gives back, with `step` and `recipe`."""
        new, old, latest = self.folder / "new", self.folder / "old", self.folder / "latest"
        _remove(new)
        new.mkdir(parents=True)
        save_file({n: p.detach().contiguous() for n, p in model.named_parameters()}, new / "model.safetensors")
        for i, optim in enumerate(optims):
            state = optim.state_dict()["state"]
            save_file(
                {f"{k}.{n}": t.contiguous() for k, s in state.items() for n, t in s.items() if t is not None},
                new / f"optim{i}.safetensors",
            )
        (new / _META).write_text(json.dumps(meta))
        if latest.exists():  # else `old` is the last good one, after a kill between the renames
            _remove(old)
            os.rename(latest, old)
        os.rename(new, latest)
        _remove(old)

    def load(
        self,
        model: torch.nn.Module,
        optims: Sequence[torch.optim.Optimizer],
        check: Callable[[dict[str, Any], Path], None],
    ) -> dict[str, Any] | None:
        """Put the last state into model and optimisers; returns its meta, None where there is none.

        Args:
            check: given meta and where it was read, before anything is changed; raises where the state is another recipe's.
        """
        source = next((p for p in (self.folder / "latest", self.folder / "old") if (p / _META).is_file()), None)
        if source is None:
            return None
        meta: dict[str, Any] = json.loads((source / _META).read_text())
        check(meta, source)
        weights = load_file(source / "model.safetensors")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        for i, optim in enumerate(optims):
            state: dict[int, dict[str, Any]] = {}
            for key, tensor in load_file(source / f"optim{i}.safetensors").items():
                index, name = key.split(".")
                state.setdefault(int(index), {})[name] = tensor
            optim.load_state_dict({"state": state, "param_groups": optim.state_dict()["param_groups"]})
        return meta


def _remove(folder: Path) -> None:
    if folder.exists():
        others = [path for path in folder.iterdir() if path.name != _META and not _WEIGHTS.fullmatch(path.name)]
        if others or folder.is_symlink():
            raise FileExistsError(f"{others[0] if others else folder} was not written by this training: move it away.")
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
