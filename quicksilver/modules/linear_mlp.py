"""Linear maps in the place of MLPs: for most tokens of a prompt, the MLP of some layers is one fitted matrix (docs/predicted-kv.md).

All tokens keep their attention, so what a later token looks up stays where it was. Of a layer's products an MLP is two thirds, its map a
twenty-fourth (GPT-2). After Liu et al. 2024 (arXiv 2405.12250: transformers are nearly linear from layer to layer), but by layer and by token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from quicksilver.modules.checks import Ends
from quicksilver.modules.fitted import EMBEDDED, FittedFile, ModelShape, files_beside
from quicksilver.runtime import Architecture, ConfigError, LayerView, TokenPolicy, TokenState
from quicksilver.runtime.options import Count, Share
from quicksilver.runtime.translation import MLPMap


@dataclass(frozen=True)
class MLPMaps(FittedFile):
    """What stands in for the MLPs of some layers: `MLP(x) ≈ [1, x, a(x)] · W`, fitted on calibration text. x is what the MLP is given, and
    a(x) are the activations of H of its neurons, with their own weights.

    Attributes:
        layers: ascending.
        weight: (len(layers), 1 + D + H, D) float32, constant first.
        shape: of the model.
        provenance: fit text and its digest, tokens, ridge, steps of training.
        neurons: of each layer the H that stay, H the same everywhere; empty: none stays.

    Raises:
        ConfigError: layers out of order or that the model lacks, neurons of other layers, a weight of another shape or not finite.
    """

    layers: tuple[int, ...]
    weight: torch.Tensor = field(repr=False)
    shape: ModelShape
    weights_digest: str
    provenance: dict[str, Any] = field(default_factory=dict)
    neurons: tuple[Sequence[int], ...] = ()

    kind = "file of MLP maps"
    format = "quicksilver-mlp-maps-1"
    folder = "linear_mlp"
    later = ("neurons",)
    remedy = "fit them for this model: quicksilver fit model=MODEL mlp=[1,2,3]"

    def __post_init__(self) -> None:
        if list(self.layers) != sorted(set(self.layers)) or not set(self.layers) <= set(range(self.shape.n_layers)):
            raise ConfigError(f"layers={list(self.layers)} must ascend, from 0 to {self.shape.n_layers - 1}.")
        if self.neurons and (len(self.neurons) != len(self.layers) or len(set(map(len, self.neurons))) != 1):
            raise ConfigError(
                f"neurons={[len(one) for one in self.neurons]}: give as many for each of {len(self.layers)} layers."
            )
        self.check_tensors({"weight": (len(self.layers), 1 + self.shape.width + self.n_neurons, self.shape.width)})

    @property
    def n_neurons(self) -> int:
        """Neurons of a layer that stay."""
        return len(self.neurons[0]) if self.neurons else 0

    def model_facts(self) -> dict[str, object]:
        return {"n_layers": self.shape.n_layers, "width": self.shape.width, "model_type": self.shape.model_type}

    def of_layers(self, layers: Sequence[int], architecture: Architecture) -> dict[int, LinearMap]:
        """The maps of these layers, in the model's dtype; raises ConfigError for a layer or neuron that there is not."""
        if missing := sorted(set(layers) - set(self.layers)):
            there = ", ".join(map(str, self.layers))
            raise ConfigError(f"layers={list(layers)}: no map stands in for the MLP of layer {missing[0]}. There are: {there}.")
        found, dtype = {}, next(architecture.layers[0].parameters()).dtype  # not its device: an offloaded layer has none
        for layer in layers:
            place = self.layers.index(layer)
            neurons = Neurons.of(architecture, layer, self.neurons[place]) if self.neurons else None
            found[layer] = LinearMap(self.weight[place].to(dtype), neurons)
        return found


@dataclass(frozen=True)
class Neurons:
    """Some neurons of an MLP.

    Attributes:
        weight: (D, G·H), bias: (G·H,): what each reads, G times where a second product gates the first.
        activation: of the first of the G.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    activation: Callable[[torch.Tensor], torch.Tensor]
    gated: bool

    @classmethod
    def of(cls, architecture: Architecture, layer: int, which: Sequence[int] | slice = slice(None)) -> Neurons:
        """Of one layer; raises ConfigError for a neuron that it lacks."""
        readers, activation = architecture.mlp_readers(layer)
        n = len(readers[0][0])
        if not isinstance(which, slice) and (wrong := [one for one in which if not 0 <= one < n]):
            raise ConfigError(f"Layer {layer} has neurons 0 to {n - 1}, and none is {wrong[0]}: {MLPMaps.remedy}.")
        at = which if isinstance(which, slice) else torch.tensor(which, device=readers[0][0].device)
        biases = [weight.new_zeros(n) if bias is None else bias for weight, bias in readers]
        weight = torch.cat([weight[at] for weight, _ in readers]).T.contiguous()
        return cls(weight, torch.cat([bias.detach()[at] for bias in biases]), activation, len(readers) == 2)

    def to(self, like: torch.Tensor) -> Neurons:
        """The same in another dtype or on another device."""
        return replace(self, weight=self.weight.to(like), bias=self.bias.to(like))

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """(T, D) -> (T, H)."""
        products = torch.addmm(self.bias, states, self.weight)
        if not self.gated:
            return self.activation(products)
        gate, up = products.chunk(2, dim=-1)
        return self.activation(gate) * up


def map_flops(width: int, n_neurons: int, n_readers: int) -> int:
    """Of a map for one token: a matrix (D, D), and of each neuron that stays `n_readers` vectors that read and one that writes."""
    return 2 * width * (width + (n_readers + 1) * n_neurons)


class LinearMap:
    """One of the maps: `quicksilver.runtime.translation.MLPMap`.

    Args:
        weight: (1 + D + H, D), constant first. neurons: the H of them; None: none.
    """

    def __init__(self, weight: torch.Tensor, neurons: Neurons | None = None) -> None:
        self._weight, self._neurons = weight, neurons
        width, n_readers = weight.shape[1], 2 if neurons is not None and neurons.gated else 1
        self.flops_per_token = map_flops(width, len(weight) - 1 - width, n_readers)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        weight, neurons = self._weight, self._neurons
        if (weight.dtype, weight.device) != (states.dtype, states.device):  # a module runs the model in another format
            self._weight = weight = weight.to(states)
            self._neurons = neurons = None if neurons is None else neurons.to(states)
        width, flat = weight.shape[1], states.flatten(0, -2)
        found = torch.addmm(weight[0], flat, weight[1 : 1 + width])
        if neurons is not None:
            # A product of their own. In bfloat16 the activation of a slice of the first one's takes two fifths of the map's time.
            found = torch.addmm(found, neurons(flat), weight[1 + width :])
        return found.view_as(states)


def mlp_map_files(entry: Mapping[str, Any], model_folder: Path) -> list[Path]:
    """The file of maps that a module with these arguments reads; none where it names none, or none ships with the model."""
    if (source := entry.get("maps")) is None:
        return []
    if str(source) != EMBEDDED:
        return [Path(source)]
    return files_beside(model_folder, MLPMaps.folder)


@dataclass(kw_only=True)
class LinearMLP(TokenPolicy):
    """A map stands in for the MLP of some layers, for all tokens of a prompt but the first and the last few.

    Acts in prompts only, as where a prompt ends decides who is computed exactly. Not for a model that is cut among processes.

    Args:
        layers: whose MLPs, from 1; None: all that the file has a map for.
        maps: `embedded`, what ships with the model; the path of a file of `quicksilver fit mlp=[…]`; or such maps.
        protect_first, protect_last: tokens whose MLPs are all computed.
        protect_at_most: of a short prompt the last tokens are this share instead, where that is less, and one at least.

    Raises:
        ConfigError: by `bind`: a layer without a map, maps of another model, none that ships with it, a model cut among processes.
    """

    layers: Sequence[Count] | None = None
    maps: Path | str | MLPMaps = "embedded"
    protect_first: Count = 4
    protect_last: Count = 28
    protect_at_most: Share = 1.0
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
        self._maps = own.of_layers([layer for layer in own.layers if layer] if self.layers is None else self.layers, architecture)

    @property
    def mlp_maps(self) -> Mapping[int, MLPMap]:
        return self._maps

    def required_layers(self) -> frozenset[int]:
        return frozenset({0})

    def acts_at(self, layer: int) -> bool:
        return layer == 0

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        protected = Ends(self.protect_first, self.protect_last, self.protect_at_most)
        if view.tokens_per_row is not None and view.is_prompt and view.tokens_per_row <= protected.count(view.tokens_per_row):
            return  # no token is left for them
        tokens.map_mlp(tokens.active & ~protected.mask(view), self._maps)
