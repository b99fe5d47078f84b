"""Linear maps in the place of MLPs: for most tokens of a prompt, the MLP of some layers is one fitted matrix (docs/predicted-kv.md).

All tokens keep their attention, and so whatever a later token looks up stays where it was. Of a layer's products an MLP is two thirds, its map a
twenty-fourth (GPT-2). After Liu et al. 2024 (arXiv 2405.12250: transformers are nearly linear from layer to layer), but by layer and by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from quicksilver.modules.checks import by_place
from quicksilver.modules.fitted import EMBEDDED, FittedFile, ModelShape
from quicksilver.runtime import Architecture, ConfigError, LayerView, TokenPolicy, TokenState
from quicksilver.runtime.options import Count
from quicksilver.runtime.translation import MLPMap


@dataclass(frozen=True)
class MLPMaps(FittedFile):
    """What stands in for the MLPs of some layers: `MLP(x) ≈ [1, x] · W`, x what the MLP is given, W by ridge regression on calibration text.

    Attributes:
        layers: ascending.
        weight: (len(layers), 1 + D, D) float32, constant first.
        shape: of the model.
        provenance: fit text and its digest, tokens, ridge.

    Raises:
        ConfigError: layers out of order or that the model lacks, a weight of another shape or not finite.
    """

    layers: tuple[int, ...]
    weight: torch.Tensor
    shape: ModelShape
    weights_digest: str
    provenance: dict[str, Any] = field(default_factory=dict)

    kind = "file of MLP maps"
    format = "quicksilver-mlp-maps-1"
    folder = "linear_mlp"
    remedy = "fit them for this model: quicksilver fit model=MODEL mlp=[1,2,3]"

    def __post_init__(self) -> None:
        if list(self.layers) != sorted(set(self.layers)) or not set(self.layers) <= set(range(self.shape.n_layers)):
            raise ConfigError(f"layers={list(self.layers)} must ascend, from 0 to {self.shape.n_layers - 1}.")
        self.check_tensors({"weight": (len(self.layers), 1 + self.shape.width, self.shape.width)})

    def model_facts(self) -> dict[str, object]:
        return {"n_layers": self.shape.n_layers, "width": self.shape.width, "model_type": self.shape.model_type}

    def of_layers(self, layers: Sequence[int], like: torch.Tensor) -> dict[int, LinearMap]:
        """The maps of these layers, in the dtype and on the device of `like`; raises ConfigError for one that there is not."""
        if missing := sorted(set(layers) - set(self.layers)):
            there = ", ".join(map(str, self.layers))
            raise ConfigError(f"layers={list(layers)}: no map stands in for the MLP of layer {missing[0]}. There are: {there}.")
        return {layer: LinearMap(self.weight[self.layers.index(layer)].to(like)) for layer in layers}


@dataclass(frozen=True)
class LinearMap:
    """One of the maps: `quicksilver.runtime.translation.MLPMap`. weight: (1 + D, D), constant first."""

    weight: torch.Tensor

    @property
    def flops_per_token(self) -> int:
        return 2 * self.weight.shape[1] ** 2

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(states)
        return torch.addmm(weight[0], states.flatten(0, -2), weight[1:]).view_as(states)


def mlp_map_files(entry: Mapping[str, Any], model_folder: Path) -> list[Path]:
    """The file of maps that a module with these arguments reads; none where it names none, or none ships with the model."""
    if (source := entry.get("maps")) is None:
        return []
    if str(source) != EMBEDDED:
        return [Path(source)]
    return sorted((model_folder / MLPMaps.folder).glob("*.safetensors"))


@dataclass(kw_only=True)
class LinearMLP(TokenPolicy):
    """A map stands in for the MLP of some layers, for all tokens of a prompt but the first and the last few.

    Acts in prompts only, as where a prompt ends decides who is computed exactly. Not for a model that is cut among processes.

    Args:
        layers: whose MLPs, from 1; None: all that the file has a map for.
        maps: `embedded`, what ships with the model; the path of a file of `quicksilver fit mlp=[…]`; or such maps.
        protect_first, protect_last: tokens whose MLPs are all computed.

    Raises:
        ConfigError: by `bind`: a layer without a map, maps of another model, none that ships with it, a model cut among processes.
    """

    layers: Sequence[Count] | None = None
    maps: Path | str | MLPMaps = "embedded"
    protect_first: Count = 4
    protect_last: Count = 28
    lookahead: bool = False
    priority: ClassVar[int] = 5
    halts: ClassVar[bool] = False
    causal = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._maps: Mapping[int, MLPMap] = {}
        if self.layers is not None and (not self.layers or 0 in self.layers):
            raise ConfigError(f"layers={list(self.layers)}: give layers from 1, as a module first decides after layer 0.")

    def bind(self, architecture: Architecture) -> None:
        own = self.maps
        if str(own) == EMBEDDED:
            own = next(iter(MLPMaps.of_model(architecture, "maps='embedded'").values()))
        elif not isinstance(own, MLPMaps):
            own = MLPMaps.load(own)
        own.check(architecture)
        if architecture.ranks.size > 1:
            raise ConfigError("LinearMLP does not run on a model that is cut among processes: leave it out.")
        weight = next(architecture.layers[0].parameters())
        self._maps = own.of_layers([layer for layer in own.layers if layer] if self.layers is None else self.layers, weight)

    @property
    def mlp_maps(self) -> Mapping[int, MLPMap]:
        return self._maps

    def required_layers(self) -> frozenset[int]:
        return frozenset({0})

    def acts_at(self, layer: int) -> bool:
        return layer == 0

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        tokens.map_mlp(tokens.active & ~by_place(view, self.protect_first, self.protect_last), self._maps)
