"""A fitted lens: what the model would predict from a state in the middle, by a linear map for each layer (tuned lens, arXiv 2303.08112).

The logit lens reads a middle state as if it were the last one, which an untuned model's early states are not. Here the head is given

    [1, LN₀(h_ℓ)] · W_ℓ

LN₀ a norm without gain, W_ℓ from ridge regression of the head's own input on calibration text (`quicksilver fit lens=true`). The paper fits
by KL with SGD; least squares has one solution and needs one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quicksilver.modules.fitted import FittedFile
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.runtime.architecture import Architecture

TUNED_LENS = "tuned_lens"  # as an entropy in a config, and the folder beside a model


@dataclass(frozen=True)
class Lens(FittedFile):
    """The maps of one model.

    Attributes:
        weight: (L-1, 1 + D, D) float32, of the states after each layer but the last: constant first, then the normalised state.
        weights_digest: `model_digest` of the model.
        provenance: text and its digest, tokens, ridge.

    Raises:
        ConfigError: a weight that is not of this shape or not finite.
    """

    weight: torch.Tensor
    weights_digest: str
    provenance: dict[str, Any] = field(default_factory=dict)

    kind = "lens"
    format = "quicksilver-lens-1"
    folder = TUNED_LENS
    remedy = "fit one: quicksilver fit lens=true model=MODEL, and put it into tuned_lens/ beside the model"

    def __post_init__(self) -> None:
        if self.weight.ndim != 3:
            raise ConfigError(f"A lens has shape {tuple(self.weight.shape)} where (layers, 1 + D, D) is needed: {self.remedy}.")
        layers, _, width = self.weight.shape
        self.check_tensors({"weight": (layers, width + 1, width)})

    def model_facts(self) -> dict[str, object]:
        return {"n_layers": len(self.weight) + 1, "width": self.weight.shape[2]}

    def head_input(self, architecture: Architecture, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """What the output head is given for states after `layer`, hidden (K, D) -> (K, D); 2·D² operations each."""
        weight = self.weight[layer].to(hidden.device)
        return torch.addmm(weight[0], architecture.normalised_input(layer, hidden), weight[1:]).to(hidden.dtype)


def lens_for(architecture: Architecture) -> Lens:
    """The lens that ships with this model.

    Raises:
        ConfigError: none does.
    """
    own = list(Lens.of_model(architecture).values())
    if not own:
        raise Lens.none_ships("entropy=tuned_lens", architecture)
    return own[0]


def files_behind(entry: Mapping[str, Any], model_folder: Path) -> list[Path]:
    """The files that decide what a module with these arguments reads by a lens; none where it asks for none, or the model has none."""
    asked = TUNED_LENS in (entry.get("entropy"), entry.get("source"))
    return sorted((model_folder / TUNED_LENS).glob("*.safetensors")) if asked else []
