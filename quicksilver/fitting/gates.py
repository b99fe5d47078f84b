"""Train the gates of learned halting on a frozen language model: KL to the dense model after a prompt, at a budget (docs/learned-halting.md).

Adam trains the gates alone, through the equivalent forward: in one pass tokens of the prompt halt and those after it do not. The loss is
KL(dense ‖ halted) of what follows plus λ Σ p / N over the prompt and all gates. λ follows the budget slowly; a number on the biases of the gates
that drop follows it at every step (λ alone overshot: gates answer it ten steps late). `choose` sets that number anew, on other text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from quicksilver.fitting.equivalent import equivalent_forward
from quicksilver.fitting.schedules import KLToDense, drawn_order, kl_nats, layers_work, work_saved_pct
from quicksilver.fitting.training import Steps, TrainingFile, descend, warm_cosine
from quicksilver.modules.fitted import EMBEDDED, model_digest, translator_for
from quicksilver.modules.learned_halting import PLACE_FEATURES, LearnedHalting, TrainedGates, gate_logits
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.ledger import LayerWork
from quicksilver.runtime.run import apply

# -- gates -------------------------------------------------------------------------------------------------------------------------
OPEN = 1.0  # b before training: p = 0.73, no token halts
Parts = dict[str, torch.Tensor]  # of gates, by name


class HaltingGates(nn.Module):
    """One gate for each decision layer.

    Args:
        width: D of the model.
        layers: after which a token may halt, 0-based, ascending.
        reads_only: the scores' derivative goes to w and b and not on into the states that they are read from. A model that is trained with
            its gates then learns from its task alone, under the halting that they decide.
        prompt_tokens: length of the prompts, whose `place_features` are added to what the gates read; None: states alone.

    Attributes:
        weight: (K, D). bias: (K,). place: (K, 2), or None.
        scores: p (B, N) by layer of the newest forward. kept: m (B, N) by layer, that entered the gate, without gradient.

    Raises:
        ConfigError: no layer, or layers out of order.
    """

    def __init__(self, width: int, layers: Sequence[int], *, reads_only: bool = False, prompt_tokens: int | None = None) -> None:
        super().__init__()
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0:
            raise ConfigError(f"layers={list(layers)}: give decision layers in ascending order, such as [0, 1, 2].")
        self.layers, self.reads_only, self.prompt_tokens = tuple(layers), reads_only, prompt_tokens
        self.weight = nn.Parameter(torch.zeros(len(layers), width))
        self.bias = nn.Parameter(torch.full((len(layers),), OPEN))
        self.place = None if prompt_tokens is None else nn.Parameter(torch.zeros(len(layers), PLACE_FEATURES))
        self.scores: dict[int, torch.Tensor] = {}
        self.kept: dict[int, torch.Tensor] = {}

    def logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """w · LN(h) + v · place + b: hidden (..., N, D) -> (..., N) float32; LN without gain or bias, which w and b would swallow."""
        index = self.layers.index(layer)
        place = torch.arange(hidden.shape[-2], device=hidden.device) / (self.prompt_tokens or 1)
        of_place = None if self.place is None else self.place[index]
        return gate_logits(hidden, self.weight[index], self.bias[index], place, of_place)

    def gate(self, layer: int, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor | None:
        """g (B, N) after `layer`, for `equivalent_forward`; None where no decision is taken."""
        if layer == 0:
            self.scores, self.kept = {}, {}
        if layer not in self.layers:
            return None
        p = self.logits(layer, hidden.detach() if self.reads_only else hidden).sigmoid()
        self.scores[layer], self.kept[layer] = p, kept.detach()
        return straight_through(p).to(hidden.dtype)

    def trained(self, architecture: Architecture, parts: Parts | None = None, **about: Any) -> TrainedGates:
        """What a training leaves, for the model that it was trained on; parts: other weights than the present ones."""
        own = {name: part.detach().float().cpu().clone() for name, part in (parts or self.state_dict()).items()}
        facts: Any = {"n_layers": architecture.n_layers, "weights_digest": model_digest(architecture.model), **own}
        return TrainedGates(self.layers, **facts, **about)

    def sparsity(self, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Σ w_i p_i / Σ w_i of the newest forward over all tokens and gates, a halted token's p counting as 0; weights (B, N), None: 1.

        Every token of every layer costs the same. With a mean over the tokens that are left, the last gate halts the last few that a task
        needs: there each of them weighs most.
        """
        paid = total = torch.zeros(())
        for layer, p in self.scores.items():
            w = torch.ones_like(p) if weights is None else weights
            paid, total = paid + (self.kept[layer] * w * p).sum(), total + w.sum()
        return paid / total.clamp(min=1e-6)


def straight_through(p: torch.Tensor) -> torch.Tensor:
    """1[p ≥ ½] in value, p in derivative."""
    # In this order: (1 + p) − p need not be 1.
    return (p >= 0.5).to(p.dtype) + (p - p.detach())


# -- their training ----------------------------------------------------------------------------------------------------------------
FEW_FASTER = 5.0  # than the rate of w, whose D numbers act together
ALL_PREDICTED = -1.0  # b of a gate that predicts, before training: p = 0.27


@dataclass(frozen=True)
class GateRecipe:
    """What decides the gates of one training.

    Args:
        layers: after which a token may halt; predicts: those of them where the K/V of later layers are predicted, the last ones.
        saves_pct: of the prompt's executed FLOPs.
        steps: of Adam, `batch_size` windows each; ten of them rising, then half a cosine.
        start: spread of a gate's logits before training.
        start_from: which tokens halt before training: the `oldest` tokens are dropped and all that are left are predicted, which is the rule of
            docs/predicted-kv.md; or `random` directions of the state say which to drop.
        strength, reaction: λ at the start, and how fast it follows the budget.
        shift: added to the biases of gates that drop after a step that saved the whole prompt too much, and in proportion.
        protect_first, protect_last: tokens of the prompt that never halt.

    Raises:
        ConfigError: a number out of range, a gate that drops behind one that predicts.
    """

    layers: tuple[int, ...]
    predicts: tuple[int, ...] = ()
    saves_pct: float = 40.0
    steps: int = 80
    batch_size: int = 4
    learning_rate: float = 0.001
    start: float = 0.5
    start_from: Literal["oldest", "random"] = "oldest"
    strength: float = 0.05
    reaction: float = 0.05
    shift: float = 0.5
    prompt_tokens: int = 448
    protect_first: int = 4
    protect_last: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or not self.learning_rate > 0:
            given = f"steps={self.steps}, batch_size={self.batch_size}, learning_rate={self.learning_rate}"
            raise ConfigError(f"{given}: give positive ones.")
        if not 0 < self.saves_pct < 100:
            raise ConfigError(f"saves_pct={self.saves_pct} must lie between 0 and 100.")
        behind = self.layers[len(self.layers) - len(self.predicts) :]
        if self.predicts != behind:
            given = f"predicts={list(self.predicts)} of layers={list(self.layers)}"
            last = f"so give the last of the layers, such as {list(self.layers[-1:])}"
            raise ConfigError(f"{given}: tokens are dropped first and predicted later, {last}.")

    @property
    def drops(self) -> torch.Tensor:
        """Which gates drop: (K,) bool."""
        return torch.tensor([layer not in self.predicts for layer in self.layers])

    @property
    def steered(self) -> torch.Tensor:
        """The gates whose biases meet the budget: those that drop, or all where none does: (K,) float32, 1 or 0."""
        return (self.drops | ~self.drops.any()).float()

    def halting(self, gates: TrainedGates) -> LearnedHalting:
        """The module that halts by such gates."""
        return LearnedHalting(gates=gates, protect_first=self.protect_first, protect_last=self.protect_last)


@dataclass
class TrainedGatesRun:
    """What a training leaves.

    Attributes:
        candidates: `start`, `averaged` (mean over the second half of the steps) and `end`.
        curve: one entry a step: kl_nats, saved_pct, strength, left_after_LAYER.
    """

    candidates: dict[str, TrainedGates]
    curve: list[dict[str, float]]


@dataclass(frozen=True)
class ChosenGates:
    """The candidate with least KL on other windows than it was trained on, each at the budget.

    Attributes:
        name: of the candidate. saved_pct, kl_nats: of it, mean over windows.
        shift: added to the biases of the gates that drop. compared: KL of every candidate, nats a token.
    """

    name: str
    gates: TrainedGates
    saved_pct: float
    kl_nats: float
    shift: float
    compared: dict[str, float]


def most_saved_pct(architecture: Architecture, recipe: GateRecipe) -> float:
    """Percent of the prompt's executed FLOPs that is saved where all tokens that may halt do so at the first gate."""
    first, left = recipe.layers[0], torch.zeros(1, recipe.prompt_tokens)
    left[:, : recipe.protect_first + recipe.protect_last] = 1.0
    mask = [torch.ones_like(left)] * (first + 1) + [left] * (architecture.n_layers - first - 1)
    return saved_pct(architecture, mask, {first: 1 - left} if first in recipe.predicts else {})


def saved_pct(architecture: Architecture, kept: Sequence[torch.Tensor], predicted: Mapping[int, torch.Tensor]) -> float:
    """Percent of a prompt's executed FLOPs that is saved, output head included; mean over rows. The gates' own (2 D a token) are left out.

    Args:
        kept: m (B, P) entering each layer, 1 or 0.
        predicted: by the layer of a gate that predicts: (B, P), 1 where a token halts there.
    """
    rows, n = kept[0].shape
    work: list[LayerWork] = []
    for row in range(rows):
        active = [int(m[row].sum()) for m in kept]
        work += layers_work(architecture, active, {layer + 1: int(stopped[row].sum()) for layer, stopped in predicted.items()})
    return work_saved_pct(architecture, work, n, rows)


def train_gates(
    architecture: Architecture, ids: torch.Tensor, recipe: GateRecipe, *, checkpoint: Path | None = None, progress: Steps = iter
) -> TrainedGatesRun:
    """Gates after `recipe`; the model is left as it is.

    Args:
        ids: (W, N) long, windows of calibration text, longer than the prompt.
        checkpoint: where the state is kept every few steps and found again after a kill.

    Raises:
        ConfigError: windows no longer than the prompt, a budget that cannot be met, no translator, a checkpoint of something else.
        QuickSilverError: a loss that is not finite; the last good state stays.
    """
    if ids.ndim != 2 or ids.shape[1] <= recipe.prompt_tokens + 1 or not len(ids):
        raise ConfigError(f"Windows of shape {tuple(ids.shape)}: give some, longer than {recipe.prompt_tokens + 1} tokens.")
    trainer = _Trainer(architecture, ids, recipe)
    if recipe.saves_pct >= (most := most_saved_pct(architecture, recipe)):
        why = f"with a first gate after layer {recipe.layers[0]} at most {most:.3g}% is saved"
        raise ConfigError(f"saves_pct={recipe.saves_pct:g} cannot be met: {why}.")
    sizes = [len(ids), int(ids.sum())]
    file = TrainingFile(checkpoint, {"recipe": asdict(recipe), "width": architecture.width, "windows": sizes})
    gates, first = trainer.gates, trainer.resume(file.load())
    if not first:
        # From near the budget: what is learned is which to halt, not how many.
        start, _ = _nearest(architecture, trainer.made(gates.state_dict()), ids[:2], recipe, 9)
        gates.bias.data.copy_(start.bias)
        trainer.start = {name: part.clone() for name, part in gates.state_dict().items()}
        trainer.averaged = {name: torch.zeros_like(part) for name, part in trainer.start.items()}
    was = {name: p.requires_grad for name, p in architecture.model.named_parameters()}
    architecture.model.requires_grad_(False)
    try:
        descend(
            range(first, recipe.steps), trainer.loss_of, [trainer.optimiser],
            lambda step: recipe.learning_rate * warm_cosine(step, recipe.steps, 10),
            after=trainer.follow, file=file, state=trainer.state, progress=progress,
        )  # fmt: skip
    finally:
        for name, p in architecture.model.named_parameters():
            p.requires_grad_(was[name])
    last = {"start": trainer.start, "averaged": trainer.averaged, "end": gates.state_dict()}
    return TrainedGatesRun({name: trainer.made(parts) for name, parts in last.items()}, trainer.curve)


class _Trainer:
    """The loss of a step, and what follows it."""

    def __init__(self, architecture: Architecture, ids: torch.Tensor, recipe: GateRecipe) -> None:
        self.arch, self.ids, self.recipe = architecture, ids, recipe
        gates = self.gates = HaltingGates(architecture.width, recipe.layers, prompt_tokens=recipe.prompt_tokens)
        self.made(gates.state_dict())  # refuses layers that save nothing
        self.predicting = {layer: translator_for(architecture, EMBEDDED, layer + 1) for layer in recipe.predicts}
        self.strength = recipe.strength
        self.curve: list[dict[str, float]] = []
        generator = torch.Generator().manual_seed(recipe.seed)
        self.order = drawn_order(len(ids), recipe.steps * recipe.batch_size, generator)
        assert gates.place is not None
        with torch.no_grad():
            # Never alike for all tokens of a gate that drops: these would halt together.
            if recipe.start_from == "oldest":
                gates.place[recipe.drops, 0] = recipe.start * 3**0.5  # the slope is spread evenly over −1 to 1
            else:
                drawn = torch.randn(gates.weight.shape, generator=generator) * recipe.start / architecture.width**0.5
                gates.weight[recipe.drops] = drawn[recipe.drops]
            gates.bias[~recipe.drops] = ALL_PREDICTED
        self.start: Parts = {}
        self.averaged: Parts = {}
        few: dict[str, Any] = {"params": [gates.bias, gates.place], "scale": FEW_FASTER}
        self.optimiser = torch.optim.Adam([{"params": [gates.weight]}, few], betas=(0.9, 0.98))
        self.may_halt = torch.zeros(1, ids.shape[1])
        self.may_halt[:, recipe.protect_first : recipe.prompt_tokens - recipe.protect_last] = 1.0
        self._dense: dict[int, torch.Tensor] = {}

    def state(self) -> dict[str, Any]:
        """What a resumed training needs."""
        parts = {"gates": self.gates.state_dict(), "start": self.start, "averaged": self.averaged}
        return parts | {"optimiser": self.optimiser.state_dict(), "strength": self.strength, "curve": self.curve}

    def resume(self, found: Mapping[str, Any] | None) -> int:
        """Take up a state of `state`; returns the step to go on from."""
        if found is None:
            return 0
        self.gates.load_state_dict(found["gates"])
        self.optimiser.load_state_dict(found["optimiser"])
        for name in ("start", "averaged", "strength", "curve"):
            setattr(self, name, found[name])
        return int(found["step"])

    def made(self, parts: Parts) -> TrainedGates:
        """Gates of these weights."""
        return self.gates.trained(self.arch, parts, predicts=self.recipe.predicts)

    def loss_of(self, step: int) -> torch.Tensor:
        recipe, prompt = self.recipe, slice(0, self.recipe.prompt_tokens)
        chosen = self.order[step * recipe.batch_size : (step + 1) * recipe.batch_size]
        dense, batch = self._dense_log_probs(chosen), self.ids[chosen]
        stopped: dict[int, torch.Tensor] = {}

        def gate(layer: int, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor | None:
            g = self.gates.gate(layer, hidden, kept)
            if g is not None:
                g = torch.where(self.may_halt.bool(), g, torch.ones_like(g))
                stopped[layer] = (kept * (1 - g)).detach()[:, prompt]
            return g

        with torch.enable_grad(), equivalent_forward(self.arch.model, gate, translators=self.predicting) as mask:
            kl = kl_nats(dense, self._log_probs(batch)).mean()
            loss = kl + self.strength * self.gates.sparsity(self.may_halt.expand(len(batch), -1))
        kept = [torch.ones(len(batch), recipe.prompt_tokens) if m is None else m.detach()[:, prompt] for m in mask.kept]
        saved = saved_pct(self.arch, kept, {layer: stopped[layer] for layer in recipe.predicts})
        may_halt = self.may_halt[:, prompt]
        left = {
            f"left_after_{layer}": float((kept[layer + 1] * may_halt).sum() / (may_halt.sum() * len(batch)))
            for layer in recipe.layers
        }
        self._entry = {"step": step, "kl_nats": float(kl.detach()), "saved_pct": saved, **left}
        return loss

    def follow(self, step: int, loss: float) -> None:
        """After a step: λ and the biases follow the budget, and the mean of the second half grows."""
        recipe, missed = self.recipe, self._entry["saved_pct"] - self.recipe.saves_pct
        self.strength = max(0.0, self.strength - recipe.reaction * missed / recipe.saves_pct)
        self.gates.bias.data += recipe.steered * recipe.shift * missed / 100
        if step >= recipe.steps // 2:
            for name, part in self.gates.state_dict().items():
                self.averaged[name] += part / (recipe.steps - recipe.steps // 2)
        self.curve.append(self._entry | {"strength": self.strength})

    def _log_probs(self, batch: torch.Tensor) -> torch.Tensor:
        """Of the continuation: (B, N) -> (B, N − P, V)."""
        following = batch.shape[1] - self.recipe.prompt_tokens
        logits = self.arch.model(batch.to(self.arch.model.device), use_cache=False, logits_to_keep=following + 1).logits
        return logits[:, :-1].float().log_softmax(-1)

    def _dense_log_probs(self, chosen: torch.Tensor) -> torch.Tensor:
        missing = [int(i) for i in chosen if int(i) not in self._dense]
        if missing:
            with torch.no_grad():
                self._dense |= dict(zip(missing, self._log_probs(self.ids[missing]).half(), strict=True))
        return torch.stack([self._dense[int(i)] for i in chosen]).float()


# -- at the budget, on other text ----------------------------------------------------------------------------------------------------
def choose(
    architecture: Architecture, candidates: Mapping[str, TrainedGates], ids: torch.Tensor, recipe: GateRecipe
) -> ChosenGates:
    """The candidate with least KL to the dense model on ids (W, N), each with one number added to the biases of the gates that drop.

    A third of the windows says which number meets the budget. Raises ConfigError: with no candidate one between −6 and 6 comes within 2% of it.
    """
    found: dict[str, tuple[TrainedGates, float, float]] = {}
    judge, saved = KLToDense(architecture, ids, recipe.prompt_tokens, 1, torch.float32), 0.0
    for name, gates in candidates.items():
        made, saved = _nearest(architecture, gates, ids[::3], recipe, 7)
        if abs(saved - recipe.saves_pct) <= 2:
            found[name] = made, saved, float(judge.of(recipe.halting(made)).mean())
    if not found:
        raise ConfigError(f"These gates save {saved:.1f}% at the nearest, not {recipe.saves_pct:g}%: train for more steps.")
    best = min(found, key=lambda name: found[name][2])
    gates, saved, kl = found[best]
    shift = float((gates.bias - candidates[best].bias)[int(recipe.steered.argmax())])
    return ChosenGates(best, gates, saved, kl, shift, {name: one[2] for name, one in found.items()})


@torch.no_grad()
def _nearest(
    architecture: Architecture, gates: TrainedGates, ids: torch.Tensor, recipe: GateRecipe, tries: int
) -> tuple[TrainedGates, float]:
    def executed(modules: list[LearnedHalting]) -> int:
        with apply(architecture.model, modules) as run:
            for row in ids[:, : recipe.prompt_tokens].to(architecture.model.device):
                architecture.model(row[None], use_cache=True, logits_to_keep=1)
            return run.flops.executed

    dense = executed([])
    low, high = -6.0, 6.0  # added to logits: the more, the fewer halt
    found: list[tuple[TrainedGates, float]] = []
    for _ in range(tries):
        middle = (low + high) / 2
        tried = replace(gates, bias=gates.bias + middle * recipe.steered)
        found.append((tried, 100 * (1 - executed([recipe.halting(tried)]) / dense)))
        low, high = (low, middle) if found[-1][1] < recipe.saves_pct else (middle, high)
    return min(found, key=lambda one: abs(one[1] - recipe.saves_pct))


_CARD = """\
# Gates of learned halting for {model}

Which tokens of a prompt may stop after which layer (docs/learned-halting.md). Trained on the frozen model by
`python scripts/train_halting.py language`, on one half of the calibrating parts of the texts. KL is to the dense model, in nats a
token, over the 64 tokens after a prompt of 448. Its windows are of the other half. The halves of far-copy and far-recall
share passages. A number is added to the gates' biases, so that the prompt saves what was asked.
At the start: the rule that training began with, at the same budget on the same windows. It takes the oldest tokens first.

| file | gates after layers | predicted from | texts | windows | steps × batch | seed | saved % | KL | KL at the start | kept |
|---|---|---|---|--:|--:|--:|--:|--:|--:|---|
{rows}

To make them again:

```
{commands}
```
"""


def card(folder: Path, model: str) -> str:
    """What the gates in a folder are, for people: Markdown, from what the files say of themselves. Raises ConfigError: a file
    that holds no gates, or gates that this module did not train."""
    rows, commands = [], []
    for path in sorted(folder.glob("[!.]*.safetensors")):
        gates = TrainedGates.load(path)
        layers, predicts = (" ".join(map(str, one)) for one in (gates.layers, gates.predicts))
        try:
            said = gates.provenance
            recipe, texts = said["recipe"], said["datasets"]
            windows = sum(one["windows"] for one in said["text"]["texts"].values())
            rows.append(
                f"| {path.name} | {layers.replace(' ', ', ')} | {predicts.replace(' ', ', ') or 'none: dropped'} | {', '.join(texts)} "
                f"| {windows} | {recipe['steps']} × {recipe['batch_size']} | {recipe['seed']} | {said['saved_pct_on_the_other_half']:.1f} "
                f"| {said['kl_nats_on_the_other_half']:.4f} | {said['kl_nats_at_the_start']:.4f} | {said['kept']} |"
            )
        except (KeyError, TypeError):
            raise ConfigError(f"{path} does not say how its gates were trained: {TrainedGates.remedy}.") from None
        commands.append(
            f"python scripts/train_halting.py language --model {model} --name {path.stem} --gates {layers}{predicts and f' --predict {predicts}'} "
            f"--text {' '.join(texts)} --windows {windows} --saves {recipe['saves_pct']:g} --steps {recipe['steps']} --batch-size {recipe['batch_size']} "
            f"--learning-rate {recipe['learning_rate']:g} --start-from {recipe['start_from']} --seed {recipe['seed']}"
        )
    return _CARD.format(model=model, rows="\n".join(rows), commands="\n".join(commands))
