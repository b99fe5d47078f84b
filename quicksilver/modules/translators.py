"""K and V of later layers from the state a token stopped with: a fitted linear map instead of the layers in between.

Layer ℓ makes K and V of every token as it always does. For a token that stops before ℓ, each later layer j gets

    [k_j ; v_j] = [1, LN₀(h_ℓ)] · W_j

LN₀ the norm on the way into layer ℓ without its gain, k_j before its rotation, W_j from ridge regression on calibration text
(`quicksilver.fitting`). One product for all later layers, 4·D·d_kv operations a token and layer: what a K/V projection costs.
SwiftKV (arXiv 2410.03960) projects the state itself and retrains the projections; here the weights stay frozen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quicksilver.modules.fitted import MODELS_FOLDER, FittedFile, ModelShape
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.translation import PredictedKV

if TYPE_CHECKING:
    from quicksilver.runtime.architecture import Architecture

EMBEDDED = "embedded"


@dataclass(frozen=True)
class Translator(FittedFile):
    """One fitted map of one model.

    Attributes:
        source_layer: ℓ, the layer that the tokens do not go through any more; K and V of ℓ+1 … L−1 are predicted.
        weight: (1 + D, L−1−ℓ, 2, H_kv, head_dim) float32: constant first, then the normalised state; K, then V.
        shape: of the model.
        weights_digest: `model_digest` of the model.
        provenance: fit text and its digest, tokens, ridge, what was left out of the text, control (if it is one).

    Raises:
        ConfigError: a weight of another shape than the model's, or one that is not finite.
    """

    source_layer: int
    weight: torch.Tensor
    shape: ModelShape
    weights_digest: str
    provenance: dict[str, Any] = field(default_factory=dict)

    kind = "translator"
    format = "quicksilver-translator-1"
    folder = "predicted_kv"  # with schedules beside them
    remedy = "fit one for this model: quicksilver fit model=MODEL"

    def __post_init__(self) -> None:
        shape = self.shape
        if not 0 <= self.source_layer < shape.n_layers - 1:
            raise ConfigError(
                f"A translator from layer {self.source_layer} has no later layer to predict for: the model has layers 0 to "
                f"{shape.n_layers - 1}, so give a source layer from 0 to {shape.n_layers - 2}."
            )
        self.check_tensors({"weight": (1 + shape.width, self.n_predicted, 2, shape.n_kv_heads, shape.head_dim)})

    def model_facts(self) -> dict[str, object]:
        return asdict(self.shape)

    @property
    def n_predicted(self) -> int:
        """Layers after the source layer."""
        return self.shape.n_layers - 1 - self.source_layer

    @property
    def flops_per_token(self) -> int:
        """Of one token, for all later layers: 4·D·d_kv each."""
        return 4 * self.shape.width * self.shape.n_kv_heads * self.shape.head_dim * self.n_predicted

    @cached_property
    def digest(self) -> str:
        """sha256 over what it predicts with: part of a run's identity."""
        whole = hashlib.sha256(f"{self.format} {self.source_layer} {self.shape} {self.weights_digest}".encode())
        whole.update(self.weight.contiguous().numpy().tobytes())
        return whole.hexdigest()

    def bound(self, architecture: Architecture) -> BoundTranslator:
        """As the runtime asks for it. Raises ConfigError where it is of another model (`check`)."""
        self.check(architecture)
        return BoundTranslator(self, architecture)


@dataclass(frozen=True)
class BoundTranslator:
    """A translator and the model it is of: `quicksilver.runtime.translation.KVTranslator`."""

    translator: Translator
    architecture: Architecture

    @property
    def source_layer(self) -> int:
        return self.translator.source_layer

    @property
    def flops_per_token(self) -> int:
        return self.translator.flops_per_token

    def translate(self, hidden: torch.Tensor) -> PredictedKV:
        """K before its rotation, and V, of all later layers: hidden (B, M, D). One product for all."""
        own = self.translator
        normed = self.architecture.normalised_input(own.source_layer, hidden).to(hidden.dtype)
        weight = own.weight[:, :, :, self.architecture.ranks.own(own.shape.n_kv_heads)].to(hidden)
        flat = torch.addmm(weight[0].flatten(), normed.flatten(0, 1), weight[1:].flatten(1))
        parts = flat.view(*hidden.shape[:2], *weight.shape[1:]).permute(2, 3, 0, 4, 1, 5)
        return PredictedKV(own.source_layer + 1, parts[:, 0], parts[:, 1])


def files_behind(entry: Mapping[str, Any], model_folder: Path) -> list[Path]:
    """The files that decide what a module with these arguments predicts; none where it predicts nothing."""
    if entry.get("missing_kv") != "predict":
        return []
    source = entry.get("translator", EMBEDDED)
    if str(source) != EMBEDDED:
        return [Path(source)]
    own = sorted((model_folder / Translator.folder).glob("*")) or sorted(MODELS_FOLDER.glob(f"*/{Translator.folder}/*"))
    return [path for path in own if path.is_file()]


def translator_for(architecture: Architecture, source: str | Path | BoundTranslator, source_layer: int) -> BoundTranslator:
    """The translator that a configuration names, for tokens that stop before `source_layer`, checked against the model.

    Args:
        source: `embedded`, one that ships with the model; the path of one; or one that is bound already.

    Raises:
        ConfigError: none ships with this model, or none from that layer; a file that is none, or one of another model or layer.
    """
    if isinstance(source, BoundTranslator) or str(source) != EMBEDDED:
        bound = source if isinstance(source, BoundTranslator) else Translator.load(source).bound(architecture)
        found = bound.translator
        if found.source_layer != source_layer:
            raise ConfigError(
                f"The translator predicts for tokens that stop before layer {found.source_layer}, and these stop before layer {source_layer}: "
                f"stop them there, or {Translator.remedy} layers=[{source_layer}]."
            )
        return bound
    own = {found.source_layer: found for found in Translator.of_model(architecture).values()}
    if not own:
        raise Translator.none_ships("translator='embedded'", architecture)
    if source_layer not in own:
        layers = " and ".join(map(str, sorted(own)))
        raise ConfigError(
            f"translator='embedded': for this model one from layer {layers} ships, none from layer {source_layer}: stop tokens there, or "
            f"{Translator.remedy} layers=[{source_layer}]."
        )
    return own[source_layer].bound(architecture)
