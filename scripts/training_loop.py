"""What the trainings of whole models share: the resumable loop (`quicksilver.fitting.training.descend`), its state, and curves."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from quicksilver.fitting.training import NotFiniteError, TrainingFile, descend

STATE = "state.safetensors"
SAVED_SECONDS = 180
History = list[dict[str, Any]]


def falling(planned: Callable[[int], float], falls: Sequence[tuple[int, int]], step: int) -> float:
    """The planned share of the learning rate at `step`; between the steps of a fall it goes straight to 0."""
    for first, last in falls:
        if first <= step < last:
            return planned(first) * (last - step) / (last - first)
    return planned(step)


def run(
    model: torch.nn.Module, optims: Sequence[torch.optim.Optimizer], folder: Path, recipe: Any, *, name: str, steps: int,
    lr_scale: Callable[[int], float], loss_of: Callable[[int], torch.Tensor | Iterable[torch.Tensor]],
    note: Callable[[int, float, History], None], save_every: int, minutes: float = math.inf,
) -> tuple[int, History, float]:  # fmt: skip
    """Go on from the state in `folder` to step `steps`, or until `minutes` are over; returns the step, the history and the seconds of all runs.

    Args:
        recipe: a dataclass, kept with the state; see `check_recipe`.
        lr_scale: share of each group's peak learning rate at a step.
        loss_of: a step's loss, or the parts of it; a pure function of the step, so that a resume needs no more state.
        note: given the number of steps done, the loss and the history, to which it adds.
    """
    first, history, before = restore(folder, model, optims, recipe)
    for group in (group for optim in optims for group in optim.param_groups):
        group["scale"] = group["lr"]
    began = time.monotonic()
    seconds = lambda: before + time.monotonic() - began
    left, how = range(first, steps), {"total": steps, "initial": first, "mininterval": 5, "file": sys.stderr}

    def after(step: int, loss_nats: float) -> None:
        bar.set_postfix(loss=f"{loss_nats:.3f}", lr=f"{lr_scale(step):.2f}", refresh=False)
        note(step + 1, loss_nats, history)

    with tqdm(left, desc=name, unit="step", **how) as bar:
        try:
            done = descend(
                left, loss_of, optims, lr_scale, after=after, clip=model.parameters(), most_norm=1.0, file=state_file(folder, recipe),
                state=lambda: state_of(model, optims, history, seconds()), every=save_every, every_s=SAVED_SECONDS,
                limit_s=60 * minutes, progress=lambda _: bar,
            )  # fmt: skip
        except NotFiniteError as error:
            broken = f"{name}, step {error.step}: the gradient is not finite (loss {error.loss})"
            raise SystemExit(f"{broken}. The last good state is kept in {folder}; try a lower learning rate.") from error
    return done, history, seconds()


def check_recipe(recipe: Any, meta: Mapping[str, Any], source: Path) -> None:
    """Refuse the state of another recipe; fields that it lacks have their defaults, those in `recipe.may_differ(meta)` may differ."""
    defaults = {one.name: one.default for one in dataclasses.fields(recipe) if one.default is not dataclasses.MISSING}
    theirs, ours = json.loads(json.dumps([defaults | meta["recipe"], dataclasses.asdict(recipe)]))
    free = recipe.may_differ(meta)
    wrong = [name for name in theirs | ours if theirs.get(name) != ours.get(name) and name not in free]
    if wrong:
        lines = "\n".join(f"  {name}: checkpoint {theirs.get(name)}, now {ours.get(name)}" for name in wrong)
        remedy = "Give the same values, or another --work. Nothing was changed."
        raise SystemExit(f"{source} was made by another configuration:\n{lines}\n{remedy}")


def load_state(folder: Path) -> dict[str, Any] | None:
    """The last save of a run: step, seconds, recipe, history, and the tensors of `model` and `optims`; None: there is none."""
    return TrainingFile(folder / STATE, {}).load()


def restore(
    folder: Path, model: torch.nn.Module, optims: Sequence[torch.optim.Optimizer], recipe: Any
) -> tuple[int, History, float]:
    """Put the last state into model and optimisers, unless `check_recipe` refuses it; returns its step, history and seconds."""
    state = load_state(folder)
    if state is None:
        return 0, [], 0.0
    check_recipe(recipe, state, folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state["model"][name])
    for optim, moments in zip(optims, state["optims"], strict=True):
        optim.load_state_dict({"state": dict(moments), "param_groups": optim.state_dict()["param_groups"]})
    return state["step"], state["history"], state["seconds"]


def state_file(folder: Path, recipe: Any) -> TrainingFile:
    """Where the state of a run is kept; each save replaces the last one by one rename."""
    return TrainingFile(folder / STATE, {"recipe": dataclasses.asdict(recipe)})


def state_of(model: torch.nn.Module, optims: Sequence[torch.optim.Optimizer], history: History, seconds: float) -> dict[str, Any]:
    """What `restore` puts back, beside the step."""
    moments = [optim.state_dict()["state"] for optim in optims]
    return {"seconds": seconds, "history": history, "model": dict(model.named_parameters()), "optims": moments}


def add_options(
    parser: argparse.ArgumentParser, recipe: Any, names: Iterable[str], said: Mapping[str, str] | None = None
) -> None:
    """An option for each of these fields of a recipe, a dataclass or an object of one, with its default and type; said: the help of some."""
    for name in names:
        default, about = getattr(recipe, name), (said or {}).get(name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=about)


def filled(template: str, **facts: Any) -> str:
    """The text of a template of this folder. Raises UndefinedError: a fact that it names is missing."""
    import jinja2

    how: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(loader=folder, undefined=jinja2.StrictUndefined, **how).get_template(template).render(facts)


def draw_curves(path: Path, title: str, plots: Sequence[tuple[str, str, dict[str, tuple[list[float], list[float]]]]]) -> None:
    """A picture of curves side by side; plots: label of x, label of y, and by name the curve's x and y."""
    from quicksilver.report.figure import panels

    figure, axes = panels(1, len(plots), size=(5 * len(plots), 3.6))
    for plot, (across, up, curves) in zip(axes[0], plots, strict=True):
        for name, (x, y) in curves.items():
            plot.plot(x, y, marker="." if len(x) < 100 else "", lw=0.8, label=name)
        plot.set(xlabel=across, ylabel=up)
        plot.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110, metadata={"Software": None})
