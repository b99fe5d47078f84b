"""Ridge regression of later layers' K and V on a layer's input, from sums that one dense pass leaves behind.

XᵀX and XᵀY do not grow with the text. Products of one batch are taken in the model's float32 and added in float64.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from quicksilver.files import write_atomically
from quicksilver.modules.translators import ModelShape, Translator
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError

TOKENS_PER_COEFFICIENT = 10
RIDGE = 3e-3  # of the mean of the diagonal of XᵀX
CONTROLS = ("shuffled", "mean")


@dataclass
class Sums:
    """What is kept of the text for one source layer: moments of X = [1, LN₀(h_ℓ)] and of Y = K (unrotated) and V of all later layers.

    Attributes:
        xx: (1 + D, 1 + D) float64. xy: (1 + D, (L−1−ℓ)·2·d_kv) float64.
    """

    xx: torch.Tensor
    xy: torch.Tensor


class NormalEquations:
    """The sums of several source layers, filled by one pass over the text.

    Args:
        architecture: of the model, which runs as it is: on its own device, in its own dtype.
        source_layers: candidates for ℓ.
        control: `shuffled`: Y of a token is paired with X of another one of the batch, drawn by `seed`. What is predicted then knows the
            means alone, and noise.

    Raises:
        ConfigError: a source layer that the model lacks or after which there is none.
    """

    def __init__(
        self, architecture: Architecture, source_layers: Sequence[int], control: str | None = None, seed: int = 0
    ) -> None:
        last = architecture.n_layers - 2
        wrong = [layer for layer in source_layers if not 0 <= layer <= last]
        if wrong or not source_layers:
            raise ConfigError(
                f"source layers {list(source_layers)}: give layers from 0 to {last}; after them there is one to predict for."
            )
        self.arch = architecture
        self.shape = ModelShape.of(architecture)
        self.per_layer = 2 * architecture.n_kv_heads * architecture.head_dim
        rows = 1 + architecture.width
        self.sums = {
            layer: Sums(
                torch.zeros(rows, rows, dtype=torch.float64),
                torch.zeros(rows, (architecture.n_layers - 1 - layer) * self.per_layer, dtype=torch.float64),
            )
            for layer in sorted(set(source_layers))
        }
        self.control = control
        self.seed = seed
        self.tokens = 0
        self.windows = 0

    @torch.no_grad()
    def add(self, ids: torch.Tensor) -> None:
        """One dense pass over ids (B, N); memory: X of each source layer for this batch."""
        inputs: dict[int, torch.Tensor] = {}
        generator = torch.Generator().manual_seed(self.seed + self.windows)
        shuffled = torch.randperm(ids.numel(), generator=generator) if self.control == "shuffled" else None
        handles = [
            layer.register_forward_pre_hook(
                lambda module, args, kwargs, index=index: self._meet(
                    index, kwargs.get("hidden_states", args[0] if args else None), inputs, shuffled
                ),
                with_kwargs=True,
            )
            for index, layer in enumerate(self.arch.layers)
        ]
        try:
            self.arch.base(input_ids=ids.to(self.arch.model.device), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        self.tokens += ids.numel()
        self.windows += len(ids)

    def _meet(self, layer: int, hidden: torch.Tensor, inputs: dict[int, torch.Tensor], shuffled: torch.Tensor | None) -> None:
        if inputs:
            keys, values = self.arch.project_kv_unrotated(layer, hidden)
            targets = torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1) for part in (keys, values)], dim=-1).float()
            if shuffled is not None:
                targets = targets[shuffled.to(targets.device)]
            for source, states in inputs.items():
                start = (layer - source - 1) * self.per_layer
                self.sums[source].xy[:, start : start + self.per_layer] += (states.T @ targets).cpu().double()
        if layer in self.sums:
            normed = self.arch.normalised_input(layer, hidden).flatten(0, 1)
            states = torch.cat([torch.ones_like(normed[:, :1]), normed], dim=1)  # (B·N, 1 + D)
            self.sums[layer].xx += (states.T @ states).cpu().double()
            inputs[layer] = states

    def solve(self, source_layer: int, weights_digest: str, provenance: dict[str, Any], ridge: float = RIDGE) -> Translator:
        """(XᵀX + λI)⁻¹ XᵀY, λ = `ridge` × the mean of the diagonal.

        `control="mean"`: the constant alone, so that every token gets the mean K and V.

        Raises:
            ConfigError: too little text to determine the coefficients, or sums that are not finite.
        """
        sums, rows = self.sums[source_layer], 1 + self.arch.width
        if self.tokens < TOKENS_PER_COEFFICIENT * rows:
            raise ConfigError(
                f"{self.tokens} tokens are too few to fit {rows} coefficients a column: give at least {TOKENS_PER_COEFFICIENT * rows} "
                f"tokens (ten for each), by more windows or more text."
            )
        if not bool(torch.isfinite(sums.xx).all() and torch.isfinite(sums.xy).all()):
            raise ConfigError(f"The states entering layer {source_layer} are not all finite: fit with model.dtype=float32.")
        values = torch.linalg.eigvalsh(sums.xx)
        rank = int((values > 1e-7 * values[-1]).sum())
        if rank < self.arch.width // 2:
            raise ConfigError(
                f"The text spans {rank} of {rows} directions of the states entering layer {source_layer}: it repeats itself. Give other text."
            )
        if self.control == "mean":
            weight = torch.zeros_like(sums.xy)
            weight[0] = sums.xy[0] / sums.xx[0, 0]
        else:
            penalty = ridge * sums.xx.diagonal().mean() * torch.eye(rows, dtype=torch.float64)
            weight = torch.cholesky_solve(sums.xy, torch.linalg.cholesky(sums.xx + penalty))
        shape = self.shape
        weight = weight.view(rows, -1, 2, shape.n_kv_heads, shape.head_dim).float()
        said = provenance | {"ridge": ridge, "tokens": self.tokens, "control": self.control}
        return Translator(source_layer, weight, shape, weights_digest, said)

    # -- going on where it was stopped -------------------------------------------------------------------------------------------------

    def save(self, path: Path, key: str) -> None:
        """Write the sums atomically; `key` says what they are sums of."""
        tensors = {f"{name}.{layer}": getattr(sums, name) for layer, sums in self.sums.items() for name in ("xx", "xy")}
        content = save(tensors, {"key": key, "progress": json.dumps([self.windows, self.tokens])})
        write_atomically(path, content)

    def resume(self, path: Path, key: str) -> bool:
        """Take up the sums that `save` left for the same `key`; False where there are none, or they are of something else or torn."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("key") != key:
                    return False
                self.windows, self.tokens = json.loads(metadata["progress"])
                for layer, sums in self.sums.items():
                    sums.xx, sums.xy = file.get_tensor(f"xx.{layer}"), file.get_tensor(f"xy.{layer}")
        except (OSError, SafetensorError):
            return False
        return True
