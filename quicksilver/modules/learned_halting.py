"""Learned halting: a token stops where a trained gate says so (Ye et al., arXiv 2303.05078)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quicksilver.modules.fitted import EMBEDDED, MODELS_FOLDER, FittedFile, translator_files, translator_for
from quicksilver.modules.halting import HaltingPolicy
from quicksilver.runtime import Architecture, ConfigError, LayerView, TokenState
from quicksilver.runtime.errors import UnavailableError
from quicksilver.runtime.options import Count, check_number
from quicksilver.runtime.pass_state import MissingKV

PLACE_FEATURES = 2


@dataclass(frozen=True)
class TrainedGates(FittedFile):
    """Gates as a file holds them.

    Attributes:
        layers: after which a token may halt, 0-based, ascending.
        weight: (K, D) float32. bias: (K,) float32. place: (K, 2) float32, of `place_features`; None: they do not read it.
        n_layers: of the model. weights_digest: `model_digest` of the model; empty: of any with these layers and this width.
        missing_kv: what later layers saw of halted tokens in training; predicts: layers where their K/V were predicted.
        provenance: how they were trained.

    Raises:
        ConfigError: weights that do not fit each other, or are not finite; a decision that saves nothing.
    """

    layers: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor
    n_layers: int
    weights_digest: str = ""
    missing_kv: MissingKV = "drop"
    predicts: tuple[int, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)
    place: torch.Tensor | None = None

    kind = "set of gates"
    format = "quicksilver-halting-gates-1"
    folder = "learned_halting"
    remedy = "train gates for this model: python scripts/train_halting.py language --model MODEL"

    def __post_init__(self) -> None:
        n = len(self.layers)
        self.check_tensors({"weight": (n, *self.weight.shape[1:2]), "bias": (n,), "place": (n, PLACE_FEATURES)})
        layers = list(self.layers)
        if not layers or layers != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < self.n_layers - 1:
            found = f"Gates after layers {layers} of {self.n_layers}"
            raise ConfigError(f"{found}: give layers in ascending order, from 0 to {self.n_layers - 2}.")
        if unknown := sorted(set(self.predicts) - set(self.layers)):
            raise ConfigError(f"predicts={list(self.predicts)}: no gate stands after layer {unknown[0]}; there are {layers}.")

    def model_facts(self) -> dict[str, object]:
        return {"n_layers": self.n_layers, "width": self.weight.shape[1]}

    def logits(self, layer: int, hidden: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """w · LN(h) + v · place + b: hidden (..., D), place (...) in the prompt, 0 to 1 -> (...) float32."""
        index, device = self.layers.index(layer), hidden.device
        of_place = None if self.place is None else self.place[index].to(device)
        return gate_logits(hidden, self.weight[index].to(device), self.bias[index].to(device), place, of_place)


@dataclass(kw_only=True)
class LearnedHalting(HaltingPolicy):
    """A token halts after a decision layer where its gate p = σ(w · LN(h) + b) is below the threshold. Deterministic.

    Causal, but for gates that read a token's place in the prompt, for which the prompt's end must be known. How gates are trained, and what of
    it the paper says: docs/learned-halting.md.

    Args:
        gates: the name of gates that ship with the model, such as `predict`; the path of a file of gates; or gates.
        threshold: p below which a token halts: ½, the paper's, or one number for each decision layer; 0: no token.
        missing_kv: None: what the gates were trained with, layer by layer.

    Raises:
        ConfigError: a threshold outside 0 to 1; by `bind`, gates of another model, and with `predict` gates where no translator ships.
    """

    gates: TrainedGates | Path | str = "predict"
    threshold: float | Sequence[float] = 0.5
    protect_first: Count = 4
    protect_last: Count | None = 32
    window: tuple[float, float] = field(default=(0.0, 1.0), init=False)
    missing_kv: MissingKV | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        each = list(self.threshold) if isinstance(self.threshold, Sequence) else [self.threshold]
        if not each:
            raise ConfigError("threshold=[] names no threshold: give a number, or one for each decision layer.")
        self._thresholds = [check_number("threshold", value, 0.0, 1.0) for value in each]
        self._gates = self.gates if isinstance(self.gates, TrainedGates) else None
        self._cut: dict[int, float] = {}  # of the logit, by the layer of a gate
        self._seen = self.missing_kv
        if self.missing_kv is None:
            self.missing_kv = "drop" if self._gates is None else self._gates.missing_kv
        super().__post_init__()

    @property
    def chooses_causally(self) -> bool:  # type: ignore[override]
        if self._gates is not None:
            return self._gates.place is None
        # Before there is a model: what any gates of that name would do.
        return all(TrainedGates.load(path).place is None for path in _files(str(self.gates)) if path.is_file())

    def bind(self, architecture: Architecture) -> None:
        found = self._gates = self._found(architecture)
        found.check(architecture)
        if self._seen is None:
            self.missing_kv = found.missing_kv
        if len(self._thresholds) not in (1, len(found.layers)):
            given = f"threshold has {len(self._thresholds)} numbers"
            raise ConfigError(f"{given}, and there are {len(found.layers)} gates: give one or as many.")
        predicts = found.predicts if self._seen is None else ()
        each = self._thresholds * (len(found.layers) if len(self._thresholds) == 1 else 1)
        cuts = torch.tensor(each, dtype=torch.float64).logit().tolist()  # at 0 no token halts, at 1 every token
        self._cut = dict(zip(found.layers, cuts, strict=True))
        super().bind(architecture)
        self._translators |= {layer: translator_for(architecture, EMBEDDED, layer + 1) for layer in predicts}
        # A predicted token goes on to a layer that is not predicted.
        last, last_predicted = self.last_layer, min(self.last_layer, architecture.n_layers - 3)
        if beyond := [layer for layer in found.layers if layer > (last_predicted if layer in predicts else last)]:
            with_them = f"with resume_layers={self.resume_layers}"
            raise ConfigError(f"Gates after layers {beyond} save nothing {with_them}: resume fewer layers.")

    def _found(self, architecture: Architecture) -> TrainedGates:
        if isinstance(self.gates, TrainedGates):
            return self.gates
        source = str(self.gates)
        if _files(source) == [Path(source)]:
            return TrainedGates.load(source)
        own = TrainedGates.of_model(architecture, f"gates={source!r}")
        if source not in own:
            raise ConfigError(f"gates={source!r}: there are {', '.join(own)}; or {TrainedGates.remedy}.")
        return own[source]

    def missing_kv_at(self, layer: int) -> str:
        return "predict" if layer in self._translators else super().missing_kv_at(layer)

    def required_layers(self) -> frozenset[int]:
        return frozenset(self._cut)

    def acts_at(self, layer: int) -> bool:
        return layer in self._cut

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        assert self._gates is not None
        rows, columns, width = view.after.shape
        view.add_signal_flops(2 * rows * columns * (width + (0 if self._gates.place is None else PLACE_FEATURES)))
        logits = self._gates.logits(view.layer, view.after, view.slots / view.n_tokens)
        return eligible & (logits < self._cut[view.layer])


def _files(source: str, model_folder: Path | None = None) -> list[Path]:
    """The file that is meant; of a name, the model's own or all that ship under it."""
    if "/" in source or source.endswith(TrainedGates.suffix):
        return [Path(source)]
    own = [] if model_folder is None else list((model_folder / TrainedGates.folder).glob(f"{source}{TrainedGates.suffix}"))
    return own or TrainedGates.shipped(source)


def gate_files(entry: Mapping[str, Any], model_folder: Path) -> list[Path]:
    """The files that decide what a module with these arguments halts, and what later layers see of it; none where it has no
    gates.

    Raises:
        UnavailableError: a model that ships with the package, and without such gates.
        ConfigError: a file that cannot be read as gates.
    """
    source = entry.get("gates")
    if not isinstance(source, str | Path):
        return []
    paths = _files(str(source), model_folder)
    named = paths not in ([], [Path(source)])
    if named and model_folder.parent == MODELS_FOLDER and not any(path.is_relative_to(model_folder) for path in paths):
        missing, remedy = f"gates={str(source)!r}: none ship with {model_folder.name}.", TrainedGates.remedy
        raise UnavailableError(missing, f"{remedy[:1].upper()}{remedy[1:]}.")
    if entry.get("missing_kv") is None and any(TrainedGates.load(path).predicts for path in paths):
        paths += translator_files({"missing_kv": "predict"}, model_folder)
    return paths


def gate_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, place: torch.Tensor, of_place: torch.Tensor | None
) -> torch.Tensor:
    """w · LN(h) + v · place + b: hidden (..., D) -> (...) float32; LN without gain or bias, which w and b would swallow."""
    found = torch.nn.functional.layer_norm(hidden.float(), hidden.shape[-1:]) @ weight.float() + bias.float()
    return found if of_place is None else found + place_features(place) @ of_place.float()


def place_features(place: torch.Tensor) -> torch.Tensor:
    """Of places (...) in a prompt, 0 its first token and 1 behind its last: (..., 2) float32, a slope and a hill, either in −1 to 1."""
    slope = 2 * place.float() - 1
    return torch.stack([slope, 1 - 2 * slope.square()], dim=-1)
