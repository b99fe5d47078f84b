"""Train the detector: dense, under a written policy, or together with gates that learn which tokens to halt."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from quicksilver.fitting.equivalent import KeepMask, equivalent_forward
from quicksilver.fitting.gates import HaltingGates
from quicksilver.fitting.training import Steps, TrainingFile, descend, matrices_and_rest, read_training, warm_cosine
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import RuntimeModule
from quicksilver.runtime.run import apply

from .model import Batch, PillarDetector, Shape, detector
from .scenes import CLASSES

N_CLASSES = len(CLASSES)
MUON_FASTER, GATES_FASTER = 7.0, 3.0  # than AdamW's rate
Policy = Callable[[int], list[RuntimeModule]]


@dataclass(frozen=True)
class Recipe:
    """What decides the weights of one training.

    Args:
        steps: of Adam, `batch_size` scenes each; the learning rate rises over a twentieth of them and falls by half a cosine.
        tokens: share of token-layers that shall be left; None: no gates are trained.
        box_weight: w of a pillar that a labelled box touches in the sparsity loss, where all others have 1 (Ye et al.); 1: uniform.
        base_rate: of the learning rate, what the detector's own weights have beside gates; 0: they stay as they are.
        seed: of the order of scenes.
        imitates: weight of the distance to the outputs of a teacher; 0: none teaches.
    """

    steps: int
    batch_size: int = 8
    learning_rate: float = 3e-3
    tokens: float | None = None
    box_weight: float = 1.0
    base_rate: float = 1.0
    seed: int = 0
    imitates: float = 0.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be positive.")
        if not 0 < self.box_weight <= 1:
            raise ConfigError(f"box_weight={self.box_weight} must lie above 0 and at 1 or below.")
        if not 0 <= self.base_rate <= 1 or (self.tokens is None and not self.base_rate):
            raise ConfigError(f"base_rate={self.base_rate} must lie between 0 and 1, and above 0 where no gates are trained.")
        if not 0 <= self.imitates < math.inf:
            raise ConfigError(f"imitates={self.imitates} must be 0 or a positive number.")

    def rate(self, step: int) -> float:
        """Learning rate at `step`."""
        return self.learning_rate * warm_cosine(step, self.steps, max(1, self.steps // 20))


def detection_loss(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Focal loss of the heat and L1 of the box, of outputs (B, N, C + 6), as CenterPoint has them (arXiv 2006.11275): a scalar."""
    logits, heat = outputs[..., :N_CLASSES], batch.heat
    log_p, log_not = F.logsigmoid(logits), F.logsigmoid(-logits)
    p = log_p.exp()
    centre = heat >= 1
    focal = torch.where(centre, (1 - p) ** 2 * log_p, (1 - heat) ** 4 * p**2 * log_not)
    return -focal.sum() / centre.sum().clamp(min=1) + _box_loss(outputs, batch.regression, batch)


def imitation_loss(outputs: torch.Tensor, taught: torch.Tensor, batch: Batch) -> torch.Tensor:
    """How far outputs (B, N, C + 6) are from a teacher's: a scalar.

    Cross entropy of the heat with the teacher's for its target, less the teacher's own entropy, weighted and divided as the focal loss is (a
    pillar by how far the two probabilities are apart, squared; a scene by its centres), and L1 of the box where a label's is taken.
    """
    logits, target = outputs[..., :N_CLASSES], taught[..., :N_CLASSES].sigmoid()
    entropy = F.binary_cross_entropy(target, target, reduction="none")
    excess = F.binary_cross_entropy_with_logits(logits, target, reduction="none") - entropy
    apart = (logits.sigmoid() - target).detach().abs()
    return (apart * excess).sum() / (batch.heat >= 1).sum().clamp(min=1) + _box_loss(outputs, taught[..., N_CLASSES:], batch)


def _box_loss(outputs: torch.Tensor, wanted: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Half the mean L1 distance to the boxes `wanted` (B, N, 6) of the pillars near a labelled one."""
    apart = (outputs[..., N_CLASSES:] - wanted).abs().sum(-1)
    return 0.5 * (apart * batch.near).sum() / batch.near.sum().clamp(min=1)


@dataclass
class Trained:
    """What a training leaves.

    Attributes:
        curve: one entry every few steps: step, loss, tokens (share of token-layers), kept_in_box, strength.
        step: steps done.
    """

    model: PillarDetector
    gates: HaltingGates | None
    curve: list[dict[str, float]]
    step: int


def train(
    model: PillarDetector,
    data: Batch,
    recipe: Recipe,
    *,
    gates: HaltingGates | None = None,
    policy: Policy | None = None,
    teacher: PillarDetector | None = None,
    checkpoint: Path | None = None,
    every: int = 50,
    progress: Steps = iter,
) -> Trained:
    """`model` after `recipe`, trained in place.

    Args:
        gates: trained with it, by the equivalent forward; needs `recipe.tokens`.
        policy: from the step's number to modules that halt while the detector is trained.
        teacher: whose outputs on the same scenes are imitated, beside the labels; needs gates and `recipe.imitates`.
        checkpoint: where the state is kept every `every` steps and found again after a kill.
    """
    if (gates is None) != (recipe.tokens is None):
        raise ConfigError("Gates are trained for a share of tokens: give gates and recipe.tokens, or neither.")
    if (teacher is None) != (recipe.imitates == 0) or (teacher is not None and gates is None):
        raise ConfigError("A detector that halts imitates a teacher: give gates, teacher and recipe.imitates, or no teacher.")
    control = None if gates is None else SparsityController(gates, recipe.tokens or 0.0, model.config.num_hidden_layers)
    optimisers = _optimisers(model, gates, recipe.base_rate)
    of = {"recipe": asdict(recipe), "shape": asdict(model.shape), "gates": None if gates is None else list(gates.layers)}
    kept = TrainingFile(checkpoint, of)
    parts: list[Any] = [model, *optimisers, *([] if gates is None else [gates])]
    first, curve = _resumed(kept.load(), parts, control)
    weights, per_pass = torch.where(data.in_box, recipe.box_weight, 1.0), max(1, len(data) // recipe.batch_size)
    entry: dict[str, float] = {}

    def loss_of(step: int) -> torch.Tensor:
        # A pass over all scenes in an order of its own, then the next.
        generator = torch.Generator().manual_seed(recipe.seed * 7919 + step // per_pass)
        place = step % per_pass * recipe.batch_size
        chosen = torch.randperm(len(data), generator=generator)[place : place + recipe.batch_size]
        batch = data.take(chosen)
        entry.clear()
        modules = [] if policy is None else policy(step)
        halting: AbstractContextManager[Any] = nullcontext()
        if gates is not None:
            halting = equivalent_forward(model, gates.gate)
        elif modules:
            model.eval()  # there is no dropout; `apply` asks for it
            halting = apply(model, modules)
        with halting as mask:
            outputs = model(batch.features)
        loss = detection_loss(outputs, batch)
        if teacher is not None:
            with torch.no_grad():
                taught = teacher(batch.features)
            loss = loss + recipe.imitates * imitation_loss(outputs, taught, batch)
        if gates is not None and control is not None:
            entry["task"] = float(loss.detach())
            loss = loss + control.strength * gates.sparsity(weights[chosen])
            inside, m = batch.in_box, mask.current
            in_box = 1.0 if m is None else float((m.detach() * inside).sum() / inside.sum().clamp(min=1))
            entry.update(tokens=control.update(mask), kept_in_box=in_box, strength=control.strength)
        return loss

    def after(step: int, loss: float) -> None:
        if step % 10 == 0 or step == recipe.steps - 1:
            curve.append({"step": step, **entry, "loss": loss})

    def state() -> dict[str, Any]:
        strength = None if control is None else control.strength
        return {"curve": curve, "strength": strength, "parts": [part.state_dict() for part in parts]}

    model.train()
    model.requires_grad_(recipe.base_rate > 0)
    try:
        descend(
            range(first, recipe.steps), loss_of, optimisers, recipe.rate,
            after=after, clip=model.parameters(), file=kept, state=state, every=every, progress=progress,
        )  # fmt: skip
    finally:
        model.requires_grad_(True)
        model.eval()
    return Trained(model, gates, curve, recipe.steps)


def _resumed(found: dict[str, Any] | None, parts: list[Any], control: SparsityController | None) -> tuple[int, list[Any]]:
    """Put a state back into the parts; the step to go on from, and the curve so far."""
    if found is None:
        return 0, []
    for part, state in zip(parts, found["parts"], strict=True):
        part.load_state_dict(state)
    if control is not None:
        control.strength = found["strength"]
    return found["step"], found["curve"]


class SparsityController:
    """λ of the sparsity loss, raised while more tokens are left than wanted and lowered while fewer are.

    Args:
        tokens: share of token-layers that shall be left, all layers counted.
        n_layers: of the model.
    """

    def __init__(self, gates: HaltingGates, tokens: float, n_layers: int) -> None:
        (first, *_), last, least = gates.layers, n_layers - 1, (gates.layers[0] + 1) / n_layers
        if (decision := gates.layers[-1]) >= last:
            why = f"A decision after layer {decision} saves nothing: the model's last layer is {last}"
            raise ConfigError(f"{why}. Give layers below {last}.")
        if not least < tokens < 1:
            why = f"with a first decision after layer {first} of {n_layers} layers at least {least:.3g} of all token-layers are computed"
            raise ConfigError(f"tokens={tokens:g} cannot be met: {why}, so give a share between {least:.3g} and 1.")
        self.tokens, self.strength = tokens, 0.1

    def update(self, mask: KeepMask) -> float:
        """Follow one forward; returns the share of token-layers that it left."""
        shares = [1.0 if kept is None else float(kept.detach().mean()) for kept in mask.kept]
        left = sum(shares) / len(shares)
        self.strength = max(0.0, self.strength + 0.04 * (left - self.tokens) / self.tokens)
        return left


def _optimisers(model: PillarDetector, gates: HaltingGates | None, base_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices, as in train_reference.py, AdamW for the rest; `scale` is a group's share of the recipe's rate."""
    own = {"params": [] if gates is None else list(gates.parameters()), "scale": GATES_FASTER, "weight_decay": 0.0}
    if not base_rate:
        return [torch.optim.AdamW([own], lr=1.0, weight_decay=0.0, betas=(0.9, 0.98))]
    matrices, rest = matrices_and_rest(model, lambda name: not name.startswith(("head", "place", "embed.0")))
    hidden = {"params": matrices, "scale": MUON_FASTER * base_rate}
    others = [{"params": rest, "scale": base_rate}, *([] if gates is None else [own])]
    return [
        torch.optim.Muon([hidden], lr=1.0, weight_decay=0.0, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=1.0, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def trained(path: Path, shape: Shape) -> Trained:
    """The detector, and its gates if it has any, that a finished training left."""
    found = read_training(path)
    for name, own in asdict(shape).items():
        if found["shape"][name] != own:
            raise ConfigError(f"{path} has {name}={found['shape'][name]}, and this one has {own}: train one of this shape.")
    model = detector(shape, 0)
    model.load_state_dict(found["parts"][0])
    gates = None
    if found["gates"] is not None:
        gates = HaltingGates(shape.width, found["gates"])
        gates.load_state_dict(found["parts"][-1])
    return Trained(model, gates, found["curve"], found["step"])
