"""The one training loop, resumable: a kill at any moment loses little and breaks nothing."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

_META = "meta.json"
_WEIGHTS = re.compile(r"(model|optim\d+)\.safetensors")
SAVED_SECONDS = 180
History = list[dict[str, Any]]


def is_hidden_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    """A matrix of a layer, whose optimiser or decay differs from those of embeddings, norms and biases."""
    return parameter.ndim == 2 and ("layers." in name or ".h." in name)


def run(
    model: torch.nn.Module, optims: Sequence[torch.optim.Optimizer], folder: Path, check: Callable[[dict[str, Any], Path], None], *,
    recipe: Any, name: str, steps: int, lr_scale: Callable[[int], float], losses: Callable[[int], Iterable[tuple[torch.Tensor, float]]],
    note: Callable[[int, float, History], None], save_every: int, minutes: float = math.inf,
) -> tuple[int, History, float]:  # fmt: skip
    """Go on from the state in `folder` to step `steps`, or until `minutes` are over; returns the step, the history and the seconds of all runs.

    Args:
        check: see `TrainingState.load`. recipe: a dataclass, kept with the state.
        lr_scale: share of each group's peak learning rate at a step.
        losses: of a step, each with its share of the step's loss; a pure function of the step, so that a resume needs no more state.
        note: given the number of steps done, the loss and the history, to which it adds.

    Raises:
        SystemExit: a gradient that is not finite; the last good state stays.
    """
    state = TrainingState(folder)
    meta = state.load(model, optims, check) or {"step": 0, "history": []}
    step, history = meta["step"], meta["history"]
    peaks = [(group, group["lr"]) for optim in optims for group in optim.param_groups]
    began = saved = time.monotonic()
    bar = tqdm(total=steps, initial=step, desc=name, unit="step", mininterval=5, file=sys.stderr)
    while step < steps:
        scale = lr_scale(step)
        for group, peak in peaks:
            group["lr"] = peak * scale
        loss_nats = 0.0
        for loss, share in losses(step):
            (loss * share).backward()
            loss_nats += loss.item() * share
        if not bool(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()):
            raise SystemExit(
                f"{name}, step {step}: the gradient is not finite (loss {loss_nats}). The last good state is kept in {folder / 'latest'}; "
                "try a lower learning rate."
            )
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=True)
        step += 1
        bar.update()
        bar.set_postfix(loss=f"{loss_nats:.3f}", lr=f"{scale:.2f}", refresh=False)
        note(step, loss_nats, history)
        now = time.monotonic()
        over = step == steps or now - began > 60 * minutes
        if over or step % save_every == 0 or now - saved > SAVED_SECONDS:
            saved, seconds = now, meta.get("seconds", 0.0) + now - began
            state.save(
                {"step": step, "seconds": seconds, "recipe": dataclasses.asdict(recipe), "history": history}, model, optims
            )
        if over:
            break
    bar.close()
    return step, history, meta.get("seconds", 0.0) + time.monotonic() - began


def check_recipe(recipe: Any, meta: dict[str, Any], source: Path, free: Collection[str] = ()) -> None:
    """Refuse the state of another recipe (a dataclass); fields that it lacks have their defaults, and those in `free` may differ.

    Raises:
        SystemExit: names what differs.
    """
    defaults = {one.name: one.default for one in dataclasses.fields(recipe) if one.default is not dataclasses.MISSING}
    theirs, ours = json.loads(json.dumps([defaults | meta["recipe"], dataclasses.asdict(recipe)]))
    wrong = [name for name in theirs | ours if theirs.get(name) != ours.get(name) and name not in free]
    if wrong:
        lines = "\n".join(f"  {name}: checkpoint {theirs.get(name)}, now {ours.get(name)}" for name in wrong)
        raise SystemExit(
            f"{source} was made by another configuration:\n{lines}\nGive the same values, or another --work. Nothing was changed."
        )


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
            tensors = {f"{k}.{n}": t.contiguous() for k, s in state.items() for n, t in s.items() if t is not None}
            save_file(tensors, new / f"optim{i}.safetensors")
        (new / _META).write_text(json.dumps(meta))
        if latest.exists():  # else `old` is the last good one, after a kill between the renames
            _remove(old)
            os.rename(latest, old)
        os.rename(new, latest)
        _remove(old)

    def load(
        self, model: torch.nn.Module, optims: Sequence[torch.optim.Optimizer], check: Callable[[dict[str, Any], Path], None]
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


def draw_curves(path: Path, title: str, plots: Sequence[tuple[str, str, dict[str, tuple[list[float], list[float]]]]]) -> None:
    """A picture of curves side by side; plots: label of x, label of y, and by name the curve's x and y."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(plots), figsize=(5 * len(plots), 3.6), layout="constrained", squeeze=False)
    for plot, (across, up, curves) in zip(axes[0], plots, strict=True):
        for name, (x, y) in curves.items():
            plot.plot(x, y, marker="." if len(x) < 100 else "", lw=0.8, label=name)
        plot.set(xlabel=across, ylabel=up)
        plot.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
