"""One loop of descent for whatever is trained here, and its state on disk: a training that was killed goes on where it was."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from quicksilver.files import write_atomically
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.reading import parse_json

Steps = Callable[[range], Iterable[int]]  # wraps the numbers of the steps, as tqdm does


def warm_cosine(step: int, steps: int, rising: int) -> float:
    """Share of the learning rate at `step`: up over `rising` steps, then down by half a cosine, so that the last steps are quiet."""
    return min(1.0, (step + 1) / rising) * 0.5 * (1 + math.cos(math.pi * step / steps))


def matrices_and_rest(
    model: torch.nn.Module, hidden: Callable[[str], bool] = lambda name: "layers." in name or ".h." in name
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """What is trained: matrices of `hidden` names, whose optimiser or decay differs, and the rest: embeddings, norms and biases."""
    parts: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts[parameter.ndim == 2 and hidden(name)].append(parameter)
    return parts[True], parts[False]


class NotFiniteError(QuickSilverError):
    """The loss or the gradient of a step is not finite; the step was not taken, and the last good state stays on disk."""

    def __init__(self, step: int, loss: float, said: str) -> None:
        super().__init__(said)
        self.step, self.loss = step, loss


def descend(
    steps: range,
    loss_of: Callable[[int], torch.Tensor | Iterable[torch.Tensor]],
    optimisers: Sequence[torch.optim.Optimizer],
    rate: Callable[[int], float],
    *,
    after: Callable[[int, float], None] = lambda step, loss: None,
    clip: Iterable[torch.nn.Parameter] = (),
    most_norm: float = 5.0,
    file: TrainingFile | None = None,
    state: Callable[[], Mapping[str, Any]] = dict,
    every: int = 10,
    every_s: float = math.inf,
    limit_s: float = math.inf,
    progress: Steps = iter,
) -> int:
    """Step down the loss; a group of parameters has `scale` times the rate, where it has one. Returns the number of steps done.

    Args:
        steps: numbers of the steps that are left.
        loss_of: of a step, or the parts whose sum it is. Each part is differentiated before the next is asked for.
        after: called with the number and the loss of a step that is done.
        clip: parameters whose gradient's norm is cut at `most_norm`.
        file: where `state` is kept every `every` steps, after `every_s` seconds and at the end, beside the number of steps done.
        limit_s: no step begins after so many seconds.

    Raises:
        NotFiniteError: a loss, or the norm of `clip`, that is not finite; the last good state stays.
    """
    clipped, done = list(clip), steps.start
    began = saved = time.monotonic()
    for step in progress(steps):
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate(step) * group.get("scale", 1.0)
        loss, found = 0.0, loss_of(step)
        for part in [found] if isinstance(found, torch.Tensor) else found:
            part.backward()
            loss += part.item()
        norm = float(torch.nn.utils.clip_grad_norm_(clipped, most_norm)) if clipped else 0.0
        if not math.isfinite(loss + norm):
            kept = f" The last good state is {file.path}." if file is not None and file.path and file.path.is_file() else ""
            said = f"The loss of step {step} is not finite: give a smaller learning rate ({rate(step):.3g}).{kept}"
            raise NotFiniteError(step, loss, said)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        done = step + 1
        after(step, loss)
        now = time.monotonic()
        over = done == steps.stop or now - began > limit_s
        if file is not None and (over or done % every == 0 or now - saved > every_s):
            saved = now
            file.save(step=done, **state())
        if over:
            break
    return done


class TrainingFile:
    """The state of a training on disk, in one safetensors file; what is no tensor is JSON in its header.

    Args:
        path: None: nothing is kept.
        of: what the training is of, as JSON has it.
    """

    def __init__(self, path: Path | None, of: Mapping[str, Any]) -> None:
        self.path = path
        self.of: dict[str, Any] = json.loads(json.dumps(of))  # as it comes back from the file

    def save(self, **state: Any) -> None:
        """Replace what is there by the state: nested mappings and lists of tensors and of what JSON has."""
        if self.path is not None:
            tensors: dict[str, torch.Tensor] = {}
            content = _without_tensors({**self.of, **state}, "", tensors)
            write_atomically(self.path, save(tensors, {"content": json.dumps(content)}))

    def load(self) -> dict[str, Any] | None:
        """The state, tuples as lists; None: there is none yet. Raises ConfigError: a file of another training, or a torn one."""
        if self.path is None or not self.path.is_file():
            return None
        found = read_training(self.path)
        for name, own in self.of.items():
            if found.get(name) != own:
                other = f"its {name} is {found.get(name)}, and this one's {own}"
                raise ConfigError(
                    f"{self.path} is the checkpoint of another training: {other}. Remove it, or give another place."
                )
        return found


def read_training(path: Path) -> dict[str, Any]:
    """What a `TrainingFile` holds: what it is of, and the state. Raises ConfigError: it is not there or cannot be read."""
    try:
        with safe_open(str(path), framework="pt") as file:
            content = parse_json((file.metadata() or {})["content"])
            return dict(_with_tensors(content, {name: file.get_tensor(name) for name in file.keys()}))  # noqa: SIM118  (not a dict)
    except FileNotFoundError:
        raise ConfigError(f"There is no checkpoint {path}: train it first, python scripts/train_halting.py.") from None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{path} cannot be read ({reason}): remove it and train again: scripts/train_halting.py.") from error


def _without_tensors(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The value as JSON has it; its tensors are put into `tensors`, by their place. Keys of a mapping may be integers, as an optimiser's are."""
    if isinstance(value, torch.Tensor):
        tensors[place] = value.detach().clone().contiguous()
        return {"tensor": place}
    if isinstance(value, Mapping):
        return {"items": [[key, _without_tensors(one, f"{place}/{key}", tensors)] for key, one in value.items()]}
    if isinstance(value, list | tuple):
        return [_without_tensors(one, f"{place}/{i}", tensors) for i, one in enumerate(value)]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `_without_tensors`; tuples come back as lists."""
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return {key: _with_tensors(one, tensors) for key, one in value["items"]}
    return [_with_tensors(one, tensors) for one in value] if isinstance(value, list) else value
