"""Train the gates of learned halting on a frozen language model: KL to the dense model after a prompt, at a budget (docs/learned-halting.md).

Gates alone are trained, by Adam, through the equivalent forward: prompt and continuation in one pass, in which tokens of the prompt halt and
tokens after it do not. The loss is KL(dense ‖ halted) of the continuation plus λ Σ p / N over the prompt's tokens and all gates. Two things
follow the share of the prompt's executed FLOPs that shall be saved: λ, slowly, and one number on the biases of the gates that drop, at every step.
λ alone overshot: gates answer it ten steps late. At the end that number is chosen once more, on text of the other half, for each of three: the
gates at the start, at the end, and their mean over the second half of the steps. The one with least KL on that text is kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from quicksilver.files import write_atomically
from quicksilver.fitting.equivalent import equivalent_forward
from quicksilver.fitting.schedules import continuation_log_probs, kl_nats
from quicksilver.modules.fitted import model_digest
from quicksilver.modules.learned_halting import PLACE_FEATURES, LearnedHalting, TrainedGates, place_features
from quicksilver.modules.translators import EMBEDDED, BoundTranslator, translator_for
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.ledger import LayerWork, head_flops
from quicksilver.runtime.reading import parse_json
from quicksilver.runtime.run import apply

# -- gates -------------------------------------------------------------------------------------------------------------------------


OPEN = 1.0  # b before training: p = 0.73, nobody halts


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
        normed = nn.functional.layer_norm(hidden.float(), hidden.shape[-1:])
        found = normed @ self.weight[index].float() + self.bias[index].float()
        if self.place is None or self.prompt_tokens is None:
            return found
        place = torch.arange(hidden.shape[-2], device=hidden.device) / self.prompt_tokens
        return found + place_features(place) @ self.place[index].float()

    def gate(self, layer: int, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor | None:
        """g (B, N) after `layer`, for `equivalent_forward`; None where no decision is taken."""
        if layer == 0:
            self.scores, self.kept = {}, {}
        if layer not in self.layers:
            return None
        p = self.logits(layer, hidden.detach() if self.reads_only else hidden).sigmoid()
        self.scores[layer], self.kept[layer] = p, kept.detach()
        return straight_through(p).to(hidden.dtype)

    def trained(self, architecture: Architecture, **about: Any) -> TrainedGates:
        """What a training leaves, for the model that it was trained on."""
        parts: dict[str, Any] = {name: part.detach().float().cpu().clone() for name, part in self.named_parameters()}
        return TrainedGates(
            self.layers, n_layers=architecture.n_layers, weights_digest=model_digest(architecture.model), **parts, **about
        )

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


Steps = Callable[[range], Iterable[int]]
KEPT_EVERY = 10  # steps
FEW_FASTER = 5.0  # than the rate of w, whose D numbers act together
ALL_PREDICTED = -1.0  # b of a gate that predicts, before training: p = 0.27
Parts = dict[str, torch.Tensor]  # of gates, by name


@dataclass(frozen=True)
class GateRecipe:
    """What decides the gates of one training.

    Args:
        layers: after which a token may halt; predicts: those of them where the K/V of later layers are predicted, the last ones.
        saves_pct: of the prompt's executed FLOPs.
        steps: of Adam, `batch_size` windows each; ten of them rising, then half a cosine.
        start: spread of a gate's logits before training.
        start_from: who halts before training: the `oldest` tokens are dropped and all that are left are predicted, which is the rule of
            docs/predicted-kv.md; or `random` directions of the state say whom to drop.
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
            raise ConfigError(
                f"steps={self.steps}, batch_size={self.batch_size}, learning_rate={self.learning_rate}: all must be positive."
            )
        if not 0 < self.saves_pct < 100:
            raise ConfigError(f"saves_pct={self.saves_pct} must lie between 0 and 100.")
        behind = self.layers[len(self.layers) - len(self.predicts) :]
        if tuple(self.predicts) != behind:
            raise ConfigError(
                f"predicts={list(self.predicts)} of layers={list(self.layers)}: tokens are dropped first and predicted later, so give the "
                f"last of the layers, such as {list(self.layers[-1:])}."
            )


@dataclass
class TrainedGatesRun:
    """What a training leaves.

    Attributes:
        gates: at the end.
        candidates: `start`, `averaged` (mean over the second half of the steps) and `end`.
        curve: one entry a step: kl_nats, saved_pct, strength, left_after_LAYER.
    """

    gates: HaltingGates
    candidates: dict[str, TrainedGates] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class ChosenGates:
    """The candidate with least KL on text that was not trained on, each at the budget.

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
    n, protected = recipe.prompt_tokens, recipe.protect_first + recipe.protect_last
    mask = [torch.ones(1, n)] * (recipe.layers[0] + 1)
    left = torch.zeros(1, n)
    left[:, :protected] = 1.0
    mask += [left] * (architecture.n_layers - len(mask))
    first_predicts = recipe.layers[0] in recipe.predicts
    return saved_pct(architecture, mask, {recipe.layers[0]: 1 - left} if first_predicts else {})


def saved_pct(architecture: Architecture, kept: Sequence[torch.Tensor], predicted: Mapping[int, torch.Tensor]) -> float:
    """Percent of a prompt's executed FLOPs that is saved, output head included; mean over rows. The gates' own (2 D a token) are left out.

    Args:
        kept: m (B, P) entering each layer, 1 or 0.
        predicted: by the layer of a gate that predicts: (B, P), 1 where a token halts there.
    """
    rows, n = kept[0].shape
    head, total, ours = head_flops(architecture, 1).executed, 0, 0
    for row in range(rows):
        stopped = 0
        for layer, m in enumerate(kept):
            active = int(m[row].sum())
            newly = int(predicted[layer - 1][row].sum()) if layer - 1 in predicted else 0
            stopped += newly
            later = 2 * architecture.kv_params_per_layer * newly * (architecture.n_layers - 1 - layer)
            ours += LayerWork(1, active, active + stopped if stopped else None, newly, later).flops(architecture)
            total += LayerWork(1, n, None).flops(architecture)
        ours, total = ours + head, total + head
    return 100 * (1 - ours / total)


def train_gates(
    architecture: Architecture, ids: torch.Tensor, recipe: GateRecipe, *, checkpoint: Path | None = None, progress: Steps = iter
) -> TrainedGatesRun:
    """Gates after `recipe`; the model is left as it is.

    Args:
        ids: (W, N) long, windows of calibration text, longer than the prompt.
        checkpoint: where the state is kept every few steps and found again after a kill.

    Raises:
        ConfigError: windows no longer than the prompt, a budget that cannot be met, no translator for a gate that predicts, a checkpoint
            of something else.
        QuickSilverError: a loss that is not finite; the last good state stays.
    """
    if ids.ndim != 2 or ids.shape[1] <= recipe.prompt_tokens + 1 or not len(ids):
        raise ConfigError(
            f"Windows of shape {tuple(ids.shape)}: give at least one, longer than {recipe.prompt_tokens + 1} tokens."
        )
    gates = HaltingGates(architecture.width, recipe.layers, prompt_tokens=recipe.prompt_tokens)
    gates.trained(architecture, predicts=tuple(recipe.predicts))  # refuses layers that save nothing
    if recipe.saves_pct >= (most := most_saved_pct(architecture, recipe)):
        raise ConfigError(
            f"saves_pct={recipe.saves_pct:g} cannot be met: with a first gate after layer {recipe.layers[0]} at most {most:.3g}% is saved. "
            "Ask less, or give an earlier gate."
        )
    predicting = {layer: translator_for(architecture, EMBEDDED, layer + 1) for layer in recipe.predicts}
    trainer = _Trainer(architecture, ids, recipe, gates, predicting)
    sizes = [len(ids), int(ids.sum())]
    state = TrainingFile(checkpoint, {"recipe": asdict(recipe), "width": architecture.width, "windows": sizes})
    first = trainer.resume(state.load())
    if not first:
        # From near the budget: what is learned is whom to halt, not how many.
        start, _ = _nearest(architecture, trainer.now(), ids[:2], recipe, 9)
        gates.bias.data.copy_(start.bias)
        trainer.begin()
    was = {name: p.requires_grad for name, p in architecture.model.named_parameters()}
    architecture.model.requires_grad_(False)
    try:
        for step in progress(range(first, recipe.steps)):
            trainer.step(step, checkpoint)
            if (step + 1) % KEPT_EVERY == 0 or step == recipe.steps - 1:
                state.save(step=step + 1, **trainer.state())
    finally:
        for name, p in architecture.model.named_parameters():
            p.requires_grad_(was[name])
    candidates = {"start": trainer.made(trainer.start), "averaged": trainer.made(trainer.averaged), "end": trainer.now()}
    return TrainedGatesRun(gates, candidates, trainer.curve)


class _Trainer:
    """One step after the other."""

    def __init__(
        self,
        architecture: Architecture,
        ids: torch.Tensor,
        recipe: GateRecipe,
        gates: HaltingGates,
        predicting: Mapping[int, BoundTranslator],
    ) -> None:
        self.arch, self.ids, self.recipe, self.gates, self.predicting = architecture, ids, recipe, gates, predicting
        self.strength = recipe.strength
        self.curve: list[dict[str, float]] = []
        generator = torch.Generator().manual_seed(recipe.seed)
        passes = -(-recipe.steps * recipe.batch_size // len(ids))
        self.order = torch.cat([torch.randperm(len(ids), generator=generator) for _ in range(passes)])
        drops = torch.tensor([layer not in recipe.predicts for layer in recipe.layers])
        self.steered = _steered(recipe)
        assert gates.place is not None
        with torch.no_grad():
            # Never alike for all tokens of a gate that drops: these would halt together.
            if recipe.start_from == "oldest":
                gates.place[drops, 0] = recipe.start * 3**0.5  # the slope is spread evenly over −1 to 1
            else:
                drawn = torch.randn(gates.weight.shape, generator=generator) * recipe.start / architecture.width**0.5
                gates.weight[drops] = drawn[drops]
            gates.bias[~drops] = ALL_PREDICTED
        self.start: Parts = {}
        self.averaged: Parts = {}
        few: dict[str, Any] = {"params": [gates.bias, gates.place], "scale": FEW_FASTER}
        self.optimiser = torch.optim.Adam([{"params": [gates.weight], "scale": 1.0}, few], betas=(0.9, 0.98))
        n = ids.shape[1]
        self.may_halt = torch.zeros(1, n)
        self.may_halt[:, recipe.protect_first : recipe.prompt_tokens - recipe.protect_last] = 1.0
        self._dense: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """What stands now is the start."""
        self.start = {name: part.clone() for name, part in self.gates.state_dict().items()}
        self.averaged = {name: torch.zeros_like(part) for name, part in self.start.items()}

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
        self.start, self.averaged, self.strength, self.curve = (
            found[name] for name in ("start", "averaged", "strength", "curve")
        )
        return int(found["step"])

    def made(self, parts: Parts) -> TrainedGates:
        """Gates of these weights."""
        of = HaltingGates(self.arch.width, self.recipe.layers, prompt_tokens=self.recipe.prompt_tokens)
        of.load_state_dict(parts)
        return of.trained(self.arch, predicts=tuple(self.recipe.predicts))

    def now(self) -> TrainedGates:
        return self.made(self.gates.state_dict())

    def step(self, number: int, checkpoint: Path | None) -> None:
        recipe = self.recipe
        chosen = self.order[number * recipe.batch_size : (number + 1) * recipe.batch_size]
        rate = recipe.learning_rate * min(1.0, (number + 1) / 10) * 0.5 * (1 + math.cos(math.pi * number / recipe.steps))
        for group in self.optimiser.param_groups:
            group["lr"] = rate * group["scale"]
        dense, batch = self._dense_log_probs(chosen), self.ids[chosen]
        decisions: dict[int, torch.Tensor] = {}

        def gate(layer: int, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor | None:
            g = self.gates.gate(layer, hidden, kept)
            if g is not None:
                g = torch.where(self.may_halt.bool(), g, torch.ones_like(g))
                decisions[layer] = (kept * (1 - g)).detach()
            return g

        with torch.enable_grad(), equivalent_forward(self.arch.model, gate, translators=self.predicting) as mask:
            kl = kl_nats(dense, self._log_probs(batch)).mean()
            loss = kl + self.strength * self.gates.sparsity(self.may_halt.expand(len(batch), -1))
        if not bool(torch.isfinite(loss)):
            raise QuickSilverError(
                f"The loss of step {number} is not finite: give a smaller learning rate than {recipe.learning_rate:g}. "
                + ("" if checkpoint is None or not checkpoint.is_file() else f"The last good state is {checkpoint}.")
            )
        prompt = slice(0, recipe.prompt_tokens)
        kept = [torch.ones(len(batch), recipe.prompt_tokens) if m is None else m.detach()[:, prompt] for m in mask.kept]
        saved = saved_pct(self.arch, kept, {layer: decisions[layer][:, prompt] for layer in recipe.predicts})
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.strength = max(0.0, self.strength + recipe.reaction * (recipe.saves_pct - saved) / recipe.saves_pct)
        self.gates.bias.data += self.steered * recipe.shift * (saved - recipe.saves_pct) / 100
        second_half = recipe.steps - recipe.steps // 2
        if number >= recipe.steps // 2:
            for name, part in self.gates.state_dict().items():
                self.averaged[name] += part / second_half
        left = {f"left_after_{layer}": float((m * self.may_halt[:, prompt]).sum() / (self.may_halt.sum() * len(m)))
                for layer, m in zip(recipe.layers, (kept[layer + 1] for layer in recipe.layers), strict=True)}  # fmt: skip
        self.curve.append({"step": number, "kl_nats": float(kl.detach()), "saved_pct": saved, "strength": self.strength, **left})

    def _log_probs(self, batch: torch.Tensor) -> torch.Tensor:
        """Of the continuation: (B, N) -> (B, N − P, V)."""
        following = batch.shape[1] - self.recipe.prompt_tokens
        logits = self.arch.model(batch.to(self.arch.model.device), use_cache=False, logits_to_keep=following + 1).logits
        return logits[:, :-1].float().log_softmax(-1)

    def _dense_log_probs(self, chosen: torch.Tensor) -> torch.Tensor:
        missing = [int(i) for i in chosen if int(i) not in self._dense]
        if missing:
            with torch.no_grad():
                for i, said in zip(missing, self._log_probs(self.ids[missing]).half(), strict=True):
                    self._dense[i] = said
        return torch.stack([self._dense[int(i)] for i in chosen]).float()


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
        """The state, tuples as lists; None: there is none yet.

        Raises:
            ConfigError: a file of another training, or one that cannot be read.
        """
        if self.path is None or not self.path.is_file():
            return None
        found = read_training(self.path)
        for name, own in self.of.items():
            if found.get(name) != own:
                raise ConfigError(
                    f"{self.path} is the checkpoint of another training: its {name} is {found.get(name)}, and this one's {own}. "
                    "Remove it, or give another place."
                )
        return found


def read_training(path: Path) -> dict[str, Any]:
    """What a `TrainingFile` holds: what it is of, and the state.

    Raises:
        ConfigError: it is not there or cannot be read.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            content = parse_json((file.metadata() or {})["content"])
            return dict(_with_tensors(content, {name: file.get_tensor(name) for name in file.keys()}))  # noqa: SIM118  (not a dict)
    except FileNotFoundError:
        raise ConfigError(f"There is no checkpoint {path}: train it first, python scripts/train_halting.py.") from None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{path} cannot be read ({reason}): remove it and train again, python scripts/train_halting.py."
        ) from error


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


def at_budget(
    architecture: Architecture, gates: TrainedGates, ids: torch.Tensor, recipe: GateRecipe, *, tries: int = 7
) -> tuple[TrainedGates, float]:
    """The gates with one number added to the biases of those that drop, so that prompts of `ids` (W, N) save `recipe.saves_pct`, and what they
    save.

    Raises:
        ConfigError: no such number between −6 and 6 comes within 2% of the budget.
    """
    best = _nearest(architecture, gates, ids, recipe, tries)
    if abs(best[1] - recipe.saves_pct) > 2:
        raise ConfigError(
            f"These gates save {best[1]:.1f}% at the nearest, not {recipe.saves_pct:g}%: train for more steps, or for another budget."
        )
    return best


def choose(
    architecture: Architecture, candidates: Mapping[str, TrainedGates], ids: torch.Tensor, recipe: GateRecipe, *, tries: int = 7
) -> ChosenGates:
    """The candidate with least KL to the dense model on ids (W, N), each at the budget; a third of the windows says what that takes.

    Raises:
        ConfigError: the budget is met by none.
    """
    found: dict[str, tuple[TrainedGates, float, float]] = {}
    refused: list[ConfigError] = []
    for name, gates in candidates.items():
        try:
            made, saved = at_budget(architecture, gates, ids[::3], recipe, tries=tries)
        except ConfigError as error:
            refused.append(error)
            continue
        found[name] = made, saved, float(kl_of(architecture, made, ids, recipe).mean())
    if not found:
        raise refused[-1]
    best = min(found, key=lambda name: found[name][2])
    gates, saved, kl = found[best]
    steered = int(_steered(recipe).argmax())
    shift = float((gates.bias - candidates[best].bias)[steered])
    return ChosenGates(best, gates, saved, kl, shift, {name: one[2] for name, one in found.items()})


def _steered(recipe: GateRecipe) -> torch.Tensor:
    """The gates whose biases meet the budget: those that drop, or all where none does: (K,) float32, 1 or 0."""
    drops = torch.tensor([float(layer not in recipe.predicts) for layer in recipe.layers])
    return drops if bool(drops.any()) else torch.ones_like(drops)


@torch.no_grad()
def kl_of(architecture: Architecture, gates: TrainedGates, ids: torch.Tensor, recipe: GateRecipe) -> torch.Tensor:
    """KL(dense ‖ halted) in nats of each token after the prompts of ids (W, N), as the runtime halts: (W,)."""
    halting = LearnedHalting(gates=gates, protect_first=recipe.protect_first, protect_last=recipe.protect_last)
    found = []
    for row in ids.split(1):
        dense = continuation_log_probs(architecture.model, row, recipe.prompt_tokens)
        with apply(architecture.model, [halting]):
            found.append(kl_nats(dense, continuation_log_probs(architecture.model, row, recipe.prompt_tokens)))
    return torch.cat(found)


@torch.no_grad()
def _nearest(
    architecture: Architecture, gates: TrainedGates, ids: torch.Tensor, recipe: GateRecipe, tries: int
) -> tuple[TrainedGates, float]:
    dense = _executed(architecture, [], ids, recipe)
    low, high = -6.0, 6.0  # added to logits: the more, the fewer halt
    best: tuple[TrainedGates, float] | None = None
    for _ in range(tries):
        middle = (low + high) / 2
        tried = replace(gates, bias=gates.bias + middle * _steered(recipe))
        halting = LearnedHalting(gates=tried, protect_first=recipe.protect_first, protect_last=recipe.protect_last)
        saved = 100 * (1 - _executed(architecture, [halting], ids, recipe) / dense)
        if best is None or abs(saved - recipe.saves_pct) < abs(best[1] - recipe.saves_pct):
            best = tried, saved
        low, high = (low, middle) if saved < recipe.saves_pct else (middle, high)
    assert best is not None
    return best


def _executed(architecture: Architecture, modules: list[LearnedHalting], ids: torch.Tensor, recipe: GateRecipe) -> int:
    with apply(architecture.model, modules) as run:
        for row in ids[:, : recipe.prompt_tokens].to(architecture.model.device):
            architecture.model(row[None], use_cache=True, logits_to_keep=1)
        return run.flops.executed


def card(folder: Path, model: str) -> str:
    """What the gates in a folder are, for people: Markdown, from what the files say of themselves.

    Raises:
        ConfigError: a file that holds no gates, or gates that this module did not train.
    """
    lines = [
        f"# Gates of learned halting for {model}",
        "",
        "Which tokens of a prompt may stop after which layer (docs/learned-halting.md). Trained on the frozen model by",
        "`python scripts/train_halting.py language`, on one half of the calibrating parts of the texts. KL: to the dense model, nats a token of the 64 after a",
        "prompt of 448, on windows of the other half, with the number on the biases of gates that drop that makes the prompt save what was asked.",
        "At the start: the rule that training began with, the oldest tokens first, at the same budget on the same windows.",
        "",
        "| file | gates after layers | predicted from | texts | windows | steps × batch | seed | saved % | KL | KL at the start | kept |",
        "|---|---|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    commands = []
    for path in sorted(folder.glob("*.safetensors")):
        if path.name.startswith("."):
            continue
        gates = TrainedGates.load(path)
        try:
            said = gates.provenance
            recipe, datasets = said["recipe"], said["datasets"]
            windows = sum(one["windows"] for one in said["text"]["texts"].values())
            saved, kl, start, kept = (
                said[name]
                for name in ("saved_pct_on_the_other_half", "kl_nats_on_the_other_half", "kl_nats_at_the_start", "kept")
            )
        except (KeyError, TypeError):
            raise ConfigError(f"{path} does not say how its gates were trained: {TrainedGates.remedy}.") from None
        lines.append(
            f"| {path.name} | {', '.join(map(str, gates.layers))} | {', '.join(map(str, gates.predicts)) or 'none: dropped'} | {', '.join(datasets)} "
            f"| {windows} | {recipe['steps']} × {recipe['batch_size']} | {recipe['seed']} "
            f"| {saved:.1f} | {kl:.4f} | {start:.4f} | {kept} |"
        )
        predict = f" --predict {' '.join(map(str, gates.predicts))}" if gates.predicts else ""
        commands.append(
            f"python scripts/train_halting.py language --model {model} --name {path.stem} --gates {' '.join(map(str, gates.layers))}{predict} "
            f"--text {' '.join(datasets)} --windows {windows} --saves {recipe['saves_pct']:g} --steps {recipe['steps']} --batch-size {recipe['batch_size']} "
            f"--learning-rate {recipe['learning_rate']:g} --start-from {recipe['start_from']} --seed {recipe['seed']}"
        )
    return "\n".join([*lines, "", "To make them again:", "", "```", *commands, "```", ""])
