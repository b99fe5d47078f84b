"""Fit linear maps to a frozen model: one dense pass over calibration text leaves sums behind, and one solve makes each map of them.

XᵀX and XᵀY do not grow with the text. Products of one batch are taken in the model's float32 and added in float64.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from quicksilver.files import write_atomically
from quicksilver.fitting.text import FitText
from quicksilver.measure.memory import peak_memory
from quicksilver.modules.fitted import ModelShape, model_digest
from quicksilver.modules.lens import Lens
from quicksilver.modules.translators import Translator
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import parse_json

# -- sums --------------------------------------------------------------------------------------------------------------------------


TOKENS_PER_COEFFICIENT = 10
RIDGE = 3e-3  # of the mean of the diagonal of XᵀX
CONTROLS = ("shuffled", "mean")


def check_enough(tokens: int, coefficients: int) -> None:
    """Raises ConfigError where so many tokens do not determine so many coefficients."""
    least = TOKENS_PER_COEFFICIENT * coefficients
    if tokens < least:
        raise ConfigError(
            f"{tokens} tokens are too few to fit {coefficients} coefficients a column: give at least {least} tokens (ten for each), by more "
            "windows or more text."
        )


def ridge_solution(xx: torch.Tensor, xy: torch.Tensor, ridge: float) -> torch.Tensor:
    """(XᵀX + λI)⁻¹ XᵀY, λ = `ridge` × the mean of the diagonal: (..., R, R), (..., R, C) -> (..., R, C), float64."""
    penalty = ridge * xx.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * torch.eye(xx.shape[-1], dtype=torch.float64)
    return torch.cholesky_solve(xy, torch.linalg.cholesky(xx + penalty))


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
        check_enough(self.tokens, rows)
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
            weight = ridge_solution(sums.xx, sums.xy, ridge)
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
                self.windows, self.tokens = parse_json(metadata["progress"])
                for layer, sums in self.sums.items():
                    sums.xx, sums.xy = file.get_tensor(f"xx.{layer}"), file.get_tensor(f"xy.{layer}")
        except (OSError, SafetensorError):
            return False
        return True


# -- translators -------------------------------------------------------------------------------------------------------------------


SAVED_EVERY_S = 20.0
Progress = Callable[[Sequence[torch.Tensor]], Iterable[torch.Tensor]]


def fit_translators(
    architecture: Architecture,
    text: FitText,
    source_layers: Sequence[int],
    *,
    ridge: float = RIDGE,
    control: str | None = None,
    batch_size: int = 4,
    checkpoint: Path | None = None,
    progress: Progress = iter,
) -> dict[int, Translator]:
    """One translator for each source layer.

    Args:
        ridge: λ as a multiple of the mean of the diagonal of XᵀX.
        control: `shuffled` or `mean`: what a translator must beat (`NormalEquations`).
        checkpoint: the sums are kept there now and then, and taken up again by the same command; removed when it is done.
        progress: wraps the batches that are left (`tqdm.tqdm`).

    Raises:
        ConfigError: a source layer that the model lacks, an unknown control, a ridge that is no positive number, too little text.
    """
    if control is not None and control not in CONTROLS:
        raise ConfigError(f"control={control!r} is not one of {', '.join(CONTROLS)}.")
    if not 0 < ridge < float("inf"):
        raise ConfigError(
            f"ridge={ridge!r} must be a number above 0: without a penalty the constant and the state are not told apart."
        )
    digest = model_digest(architecture.model)
    sums = NormalEquations(architecture, source_layers, control)
    asked = [digest, text.digest, sorted(sums.sums), control, batch_size]
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    if checkpoint is not None:
        sums.resume(checkpoint, key)
    saved_s = time.monotonic()
    for batch in progress(text.ids[sums.windows :].split(batch_size)):
        sums.add(batch)
        if checkpoint is not None and time.monotonic() - saved_s > SAVED_EVERY_S:
            sums.save(checkpoint, key)
            saved_s = time.monotonic()
    said: dict[str, Any] = {"text": text.provenance, "text_digest": text.digest}
    found = {layer: sums.solve(layer, digest, said, ridge) for layer in sums.sums}
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return found


# -- lenses ------------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def fit_lens(
    architecture: Architecture, text: FitText, *, ridge: float = RIDGE, batch_size: int = 4, progress: Progress = iter
) -> Lens:
    """From the state after each layer to what the model's own last state gives the output head.

    Args:
        ridge: λ as a multiple of the mean of the diagonal of XᵀX.
        progress: wraps the batches (`tqdm.tqdm`).

    Raises:
        ConfigError: too little text, or states that are not finite.
    """
    arch, rows = architecture, 1 + architecture.width
    check_enough(text.ids.numel(), rows)
    xx = torch.zeros(arch.n_layers - 1, rows, rows, dtype=torch.float64)
    xy = torch.zeros(arch.n_layers - 1, rows, arch.width, dtype=torch.float64)
    states: list[torch.Tensor] = []

    def meet(layer: int, module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        normed = arch.normalised_input(layer, hidden).flatten(0, 1)
        states.append(torch.cat([torch.ones_like(normed[:, :1]), normed], dim=1))  # (B·N, 1 + D)

    def end(module: Any, args: Any, output: torch.Tensor) -> None:
        target = output.flatten(0, 1).float()
        for layer, state in enumerate(states):
            xx[layer] += (state.T @ state).cpu().double()
            xy[layer] += (state.T @ target).cpu().double()
        states.clear()

    handles = [layer.register_forward_hook(partial(meet, index)) for index, layer in enumerate(arch.layers[: arch.n_layers - 1])]
    handles.append(arch.final_norm.register_forward_hook(end))
    try:
        for batch in progress(text.ids.split(batch_size)):
            arch.base(input_ids=batch.to(arch.model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if not bool(torch.isfinite(xy).all() and torch.isfinite(xx).all()):
        raise ConfigError("The model's states are not all finite: fit with model.dtype=float32.")
    weight = ridge_solution(xx, xy, ridge).float()
    said = {**text.provenance, "digest": text.digest, "ridge": ridge, "tokens": text.ids.numel()}
    return Lens(weight, model_digest(arch.model), said)


# -- what it took ------------------------------------------------------------------------------------------------------------------


T = TypeVar("T")


@dataclass(frozen=True)
class FitCost:
    """Of one `quicksilver fit`, text and model loaded before.

    Attributes:
        layers: source layers that a map was fitted from. distill_steps: of each.
        tokens: of the text.
        seconds: wall clock; cpu_seconds: of this process, all threads.
        peak_bytes: of the process's resident memory meanwhile, model and libraries included.
        machine: processor, torch, threads.
    """

    model: str
    layers: list[int]
    distill_steps: int
    tokens: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    machine: str

    def line(self) -> str:
        distilled = f", {self.distill_steps} steps of distillation each" if self.distill_steps else ""
        return (
            f"{self.model}: {len(self.layers)} maps on {self.tokens:,} tokens{distilled}: {self.seconds:.1f} s "
            f"({self.cpu_seconds:.1f} s of processor time), peak memory {self.peak_bytes / 1e9:.2f} GB; {self.machine}"
        )

    def save(self, path: Path) -> None:
        """As JSON, in one rename."""
        write_atomically(path, (json.dumps(asdict(self), indent=1) + "\n").encode())


def priced(fit: Callable[[], T], *, model: str, layers: list[int], distill_steps: int, tokens: int) -> tuple[T, FitCost]:
    """What `fit` returns, and what it took."""
    from quicksilver.runtime.quantized.kernels import machine

    found: list[T] = []
    began, cpu_began = time.perf_counter(), time.process_time()
    peak = peak_memory(lambda: found.append(fit()))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    cost = FitCost(model, layers, distill_steps, tokens, round(seconds, 2), round(cpu_seconds, 2), peak.process_bytes, machine())
    return found[0], cost
