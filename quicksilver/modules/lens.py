"""A fitted lens: what the model would predict from a state in the middle, by a linear map for each layer (tuned lens, arXiv 2303.08112).

The logit lens reads a middle state as if it were the last one, which an untuned model's early states are not. Here the head is given

    [1, LN₀(h_ℓ)] · W_ℓ

LN₀ a norm without gain, W_ℓ from ridge regression of the head's own input on calibration text (`quicksilver fit lens=true`). The paper fits
by KL with SGD; least squares has one solution and needs one pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from quicksilver.files import write_atomically
from quicksilver.modules.thresholds import model_digest
from quicksilver.modules.translators import MODELS_FOLDER
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.runtime.architecture import Architecture

FORMAT = "quicksilver-lens-1"
TUNED_LENS = "tuned_lens"  # as an entropy in a config, and the folder beside a model
REMEDY = "fit one: quicksilver fit lens=true model=MODEL, and put it into tuned_lens/ beside the model"


@dataclass(frozen=True)
class Lens:
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

    def __post_init__(self) -> None:
        shape = tuple(self.weight.shape)
        if len(shape) != 3 or shape[1] != shape[2] + 1:
            raise ConfigError(f"A lens has shape {shape} where (layers, 1 + D, D) is needed: {REMEDY}.")
        if not bool(torch.isfinite(self.weight).all()):
            raise ConfigError(f"A lens has weights that are not finite: {REMEDY}.")

    def head_input(self, architecture: Architecture, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """What the output head is given for states after `layer`, hidden (K, D) -> (K, D); 2·D² operations each."""
        weight = self.weight[layer].to(hidden.device)
        return torch.addmm(weight[0], architecture.normalised_input(layer, hidden), weight[1:]).to(hidden.dtype)

    def save(self, path: Path | str, dtype: torch.dtype = torch.float32) -> None:
        """Write atomically, as safetensors; the weight in `dtype` (what is read again is float32)."""
        facts = {"format": FORMAT, "weights_digest": self.weights_digest, "provenance": self.provenance}
        write_atomically(
            path, save({"weight": self.weight.to(dtype).contiguous()}, {"quicksilver": json.dumps(facts, sort_keys=True)})
        )

    @classmethod
    def load(cls, path: Path | str) -> Lens:
        """Raises ConfigError: a file that is missing, damaged, or no lens."""
        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {})["quicksilver"])
                if facts["format"] != FORMAT:
                    raise ConfigError(f"{path} has format {facts['format']!r}, and this version reads {FORMAT!r}: {REMEDY}.")
                return cls(file.get_tensor("weight").float(), facts["weights_digest"], facts["provenance"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no readable lens ({error}): {REMEDY}.") from error


def lens_for(architecture: Architecture) -> Lens:
    """The lens that ships with this model.

    Raises:
        ConfigError: none does.
    """
    digest = model_digest(architecture.model)
    for path in shipped():
        lens = Lens.load(path)
        if lens.weights_digest == digest:
            return lens
    there = ", ".join(sorted({path.parents[1].name for path in shipped()})) or "no model"
    raise ConfigError(f"entropy=tuned_lens: a lens ships with {there}, none with this model (digest {digest[:12]}…): {REMEDY}.")


def shipped() -> list[Path]:
    """The lenses beside the embedded models."""
    return sorted(MODELS_FOLDER.glob(f"*/{TUNED_LENS}/*.safetensors"))


def files_behind(entry: Mapping[str, Any], model_folder: Path) -> list[Path]:
    """The files that decide what a module with these arguments reads by a lens; none where it asks for none, or the model has none."""
    asked = TUNED_LENS in (entry.get("entropy"), entry.get("source"))
    return sorted((model_folder / TUNED_LENS).glob("*.safetensors")) if asked else []
