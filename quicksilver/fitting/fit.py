"""Fit linear maps to a frozen model: one dense pass over calibration text leaves sums behind, and one solve makes each map of them.

XᵀX and XᵀY do not grow with the text. Products of one batch are taken in the model's float32 and added in float64. The text is windows of
calibrating parts, without what evaluation texts have too, split in two halves: maps are fitted on one and schedules chosen on the other.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F

from quicksilver.data.overlap import without_overlap
from quicksilver.data.text import Text
from quicksilver.data.windows import encode
from quicksilver.files import write_atomically
from quicksilver.fitting.training import TrainingFile
from quicksilver.measure.memory import peak_memory
from quicksilver.modules.calibration import Progress
from quicksilver.modules.fitted import Lens, ModelShape, Translator, model_digest
from quicksilver.modules.linear_mlp import MLPMaps, Neurons
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import check_choice

# -- text --------------------------------------------------------------------------------------------------------------------------
Half = Literal["fit", "choose"]
HALVES: tuple[str, ...] = ("fit", "choose")  # even windows, odd windows


@dataclass(frozen=True)
class FitText:
    """Windows of several texts.

    Attributes:
        ids: (W, N) long.
        provenance: by text: its source and digest, windows taken, paragraphs left out and for which evaluation text.
    """

    ids: torch.Tensor
    provenance: dict[str, Any]

    @property
    def digest(self) -> str:
        """sha256 of the ids."""
        return hashlib.sha256(self.ids.cpu().contiguous().numpy().astype("<i8").tobytes()).hexdigest()

    def said(self, ridge: float) -> dict[str, Any]:
        """What a map that is fitted on it says of itself."""
        return {"text": self.provenance, "text_digest": self.digest, "ridge": ridge, "tokens": self.ids.numel()}


def fit_text(
    texts: Mapping[str, Text],
    evaluation: Mapping[str, str],
    tokenizer: Any,
    *,
    half: Half,
    windows: int | None,
    window_tokens: int,
    halves_of: int | None = None,
) -> FitText:
    """Windows of one half of `texts`, by name, at most `windows` in all: texts give equal numbers as far as they have them.

    Args:
        evaluation: texts that must share no 13 consecutive words with what is fitted on, by name.
        halves_of: tokens of the windows that make the halves; shorter ones are cut from them. None: `window_tokens`.

    Raises:
        ConfigError: nothing is left of a text, or it is shorter than two windows; windows longer than `halves_of`.
    """
    whole = halves_of or window_tokens
    if window_tokens > whole:
        held = f"the maps were fitted on every other window of {whole} tokens, and a longer one has some of that text"
        raise ConfigError(f"protocol.window_tokens={window_tokens}: {held}. Give at most {whole}.")
    parts: dict[str, torch.Tensor] = {}
    said: dict[str, Any] = {}
    for name, text in texts.items():
        kept = without_overlap(text.text, evaluation)
        if not kept.text.strip():
            raise ConfigError(f"Nothing of {name} is left: all of it shares 13 words with an evaluation text. Give other text.")
        every = encode(kept.text, tokenizer, whole).ids
        if len(every) < 2:
            raise ConfigError(f"{name} has {len(every)} windows of {whole} tokens: give at least two, one for each half.")
        parts[name] = every[HALVES.index(half) :: 2].unfold(1, window_tokens, window_tokens).flatten(0, 1)
        said[name] = {
            "source": text.source, "digest": text.digest, "paragraphs": kept.paragraphs, "left_out": kept.removed, "left_out_by": kept.removed_by,
        }  # fmt: skip
    left = sum(map(len, parts.values())) if windows is None else windows
    for rank, name in enumerate(sorted(parts, key=lambda name: len(parts[name]))):  # the shortest first
        count = min(len(parts[name]), left // (len(parts) - rank))
        left -= count
        parts[name] = parts[name][torch.linspace(0, len(parts[name]) - 1, count).long()]
        said[name]["windows"] = count
    return FitText(torch.cat(list(parts.values())), {"half": half, "window_tokens": window_tokens, "texts": said})


# -- sums --------------------------------------------------------------------------------------------------------------------------
TOKENS_PER_COEFFICIENT = 10
RIDGE = 3e-3  # of the mean of the diagonal of XᵀX
CONTROLS = ("shuffled", "mean")


class Sums:
    """Moments of X = [1, x] (R = 1 + D columns) and of Y (C columns) over a text.

    Attributes:
        xx: (R, R) float64. xy: (R, C) float64.
    """

    def __init__(self, width: int, columns: int) -> None:
        self.xx = torch.zeros(1 + width, 1 + width, dtype=torch.float64)
        self.xy = torch.zeros(1 + width, columns, dtype=torch.float64)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """Of inputs x (T, D); returns X (T, 1 + D)."""
        x = F.pad(x, (1, 0), value=1.0)
        self.xx += (x.T @ x).cpu().double()
        return x

    def add_targets(self, x: torch.Tensor, y: torch.Tensor, first: int = 0) -> None:
        """Of X (T, 1 + D) and Y (T, c), the columns of `xy` from `first` on."""
        self.xy[:, first : first + y.shape[1]] += (x.T @ y).cpu().double()

    def solution(self, ridge: float, states: str) -> torch.Tensor:
        """(XᵀX + λI)⁻¹ XᵀY, λ = `ridge` × the mean of the diagonal: (R, C) float64. states: what X is of, for messages. Raises
        ConfigError: fewer than ten tokens a coefficient, sums that are not finite."""
        rows, tokens = len(self.xx), round(float(self.xx[0, 0]))
        if tokens < (least := TOKENS_PER_COEFFICIENT * rows):
            raise ConfigError(f"{tokens} tokens are too few to fit {rows} coefficients a column: give at least {least}.")
        if not bool(torch.isfinite(self.xx).all() and torch.isfinite(self.xy).all()):
            raise ConfigError(f"The states {states} are not all finite: fit with model.dtype=float32.")
        penalty = ridge * self.xx.diagonal().mean() * torch.eye(rows, dtype=torch.float64)
        return torch.cholesky_solve(self.xy, torch.linalg.cholesky(self.xx + penalty))


@contextmanager
def entering(architecture: Architecture, meet: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """For the length of the context `meet` is told the states (B, N, D) entering each layer, and, as layer L, the final norm."""
    with ExitStack() as stack:
        for index, layer in enumerate([*architecture.layers, architecture.final_norm]):

            def hook(_: object, args: tuple, kwargs: dict[str, Any], index: int = index) -> None:
                meet(index, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


# -- translators -------------------------------------------------------------------------------------------------------------------
SAVED_EVERY_S = 20.0


def check_source_layers(architecture: Architecture, layers: Sequence[int]) -> None:
    """Refuse none, and layers after which there is none."""
    last = architecture.n_layers - 2
    if not layers or not all(0 <= layer <= last for layer in layers):
        raise ConfigError(f"layers={list(layers)}: give layers from 0 to {last}, which have one after them.")


@torch.no_grad()
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
    """One translator for each source layer: from LN₀ of the state entering it to K (unrotated) and V of all later layers.

    Args:
        ridge: λ as a multiple of the mean of the diagonal of XᵀX.
        control: what a translator must beat. `shuffled`: K/V of another token of the batch. `mean`: the mean K and V for every token.
        checkpoint: the sums are kept there now and then, and taken up again by the same command; removed when it is done.
        progress: wraps the batches that are left (`tqdm.tqdm`).

    Raises:
        ConfigError: a source layer that the model lacks, an unknown control, a ridge that is no positive number, too little text.
    """
    arch = architecture
    if control is not None:
        check_choice("control", control, CONTROLS)
    if not 0 < ridge < float("inf"):
        raise ConfigError(f"ridge={ridge!r} must be a number above 0, such as 0.003.")
    check_source_layers(arch, source_layers)
    digest = model_digest(arch.model)
    columns = 2 * arch.n_kv_heads * arch.head_dim
    sums = {layer: Sums(arch.width, (arch.n_layers - 1 - layer) * columns) for layer in sorted(set(source_layers))}
    file = TrainingFile(checkpoint, {"fit": [digest, text.digest, sorted(sums), control, batch_size]})
    done, saved_s = _resumed(file, sums), time.monotonic()
    for batch in progress(text.ids[done:].split(batch_size)):
        _add(arch, batch, sums, shuffled_by=done if control == "shuffled" else None)
        done += len(batch)
        if time.monotonic() - saved_s > SAVED_EVERY_S:
            file.save(windows=done, sums={layer: [one.xx, one.xy] for layer, one in sums.items()})
            saved_s = time.monotonic()
    said = text.said(ridge) | {"control": control}
    shape, found = ModelShape.of(arch), {}
    for layer, one in sums.items():
        weight = one.solution(ridge, f"entering layer {layer}")
        values = torch.linalg.eigvalsh(one.xx)
        if (rank := int((values > 1e-7 * values[-1]).sum())) < arch.width // 2:
            spans = f"{rank} of {1 + arch.width} directions of the states entering layer {layer}"
            raise ConfigError(f"The text spans {spans}: it repeats itself. Give other text.")
        if control == "mean":
            weight = torch.zeros_like(weight)
            weight[0] = one.xy[0] / one.xx[0, 0]
        weight = weight.view(1 + arch.width, -1, 2, shape.n_kv_heads, shape.head_dim).float()
        found[layer] = Translator(layer, weight, shape, digest, said)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return found


def _add(arch: Architecture, batch: torch.Tensor, sums: Mapping[int, Sums], shuffled_by: int | None) -> None:
    """A dense pass over windows (B, N). shuffled_by: a seed; targets are those of other tokens then."""
    columns, inputs = 2 * arch.n_kv_heads * arch.head_dim, dict[int, torch.Tensor]()  # X of each source layer
    generator = None if shuffled_by is None else torch.Generator().manual_seed(shuffled_by)
    order = None if generator is None else torch.randperm(batch.numel(), generator=generator)

    def meet(layer: int, hidden: torch.Tensor) -> None:
        if inputs and layer < arch.n_layers:
            keys, values = arch.project_kv_unrotated(layer, hidden)
            targets = torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1) for part in (keys, values)], dim=-1).float()
            targets = targets if order is None else targets[order.to(targets.device)]
            for source, states in inputs.items():
                sums[source].add_targets(states, targets, (layer - source - 1) * columns)
        if layer in sums:
            inputs[layer] = sums[layer].add(arch.normalised_input(layer, hidden).flatten(0, 1))

    with entering(arch, meet):
        arch.base(input_ids=batch.to(arch.model.device), use_cache=False)


@torch.no_grad()
def fit_mlp_maps(
    architecture: Architecture,
    text: FitText,
    layers: Sequence[int],
    *,
    neurons: int = 0,
    ridge: float = RIDGE,
    batch_size: int = 4,
    progress: Progress = iter,
) -> MLPMaps:
    """What stands in for the MLPs of `layers`: from what each is given to what it returns, by ridge regression on a dense pass.

    Args:
        neurons: so many of each stay. A first pass fits the activation of each linearly to what the MLP is given. Those stay whose mean
            squared error, times the squared norm of what the neuron writes, is largest.

    Raises:
        ConfigError: a layer that the model lacks, or 0, after which a module first decides; more neurons than there are; too little text.
    """
    arch = architecture
    if wrong := [layer for layer in layers if not 1 <= layer < arch.n_layers]:
        raise ConfigError(f"mlp={list(layers)}: layer {wrong[0]} has no map: give layers from 1 to {arch.n_layers - 1}.")
    asked = sorted(set(layers))
    most = arch.mlp_writer(asked[0]).shape[0] if neurons else 0
    if neurons > most:
        raise ConfigError(f"neurons={neurons}: an MLP of {arch.config.model_type} has {most} here. Give at most as many.")

    def passed(meet: Callable[[int, torch.Tensor, torch.Tensor], None]) -> None:
        """`meet` is told what the MLP of each layer is given and returns: (T, D) each."""
        with ExitStack() as stack:
            for layer in asked:

                def hook(_: object, args: tuple[torch.Tensor, ...], output: torch.Tensor, layer: int = layer) -> None:
                    meet(layer, args[0].flatten(0, 1), output.float().flatten(0, 1))

                stack.callback(arch.mlp(layer).register_forward_hook(hook).remove)
            for batch in progress(text.ids.split(batch_size)):
                arch.base(input_ids=batch.to(arch.model.device), use_cache=False)

    def solved(layer: int) -> torch.Tensor:
        return sums[layer].solution(ridge, f"in the MLP of layer {layer}")

    kept: dict[int, list[int]] = {}
    if neurons:
        every = {layer: Neurons.of(arch, layer) for layer in asked}
        sums = {layer: Sums(arch.width, most) for layer in asked}
        squares = {layer: torch.zeros(most, dtype=torch.float64) for layer in asked}

        def explain(layer: int, given: torch.Tensor, _: torch.Tensor) -> None:
            found = every[layer](given).float()
            squares[layer] += found.square().sum(0).cpu().double()
            sums[layer].add_targets(sums[layer].add(given.float()), found)

        passed(explain)
        for layer, one in sums.items():
            w = solved(layer)
            error = squares[layer] - (w * (2 * one.xy - one.xx @ w)).sum(0)
            written = arch.mlp_writer(layer).double().square().sum(1).cpu()
            kept[layer] = (error * written).topk(neurons).indices.sort().values.tolist()
    stay = {layer: Neurons.of(arch, layer, which) for layer, which in kept.items()}
    sums = {layer: Sums(arch.width + neurons, arch.width) for layer in asked}

    def stand_in(layer: int, given: torch.Tensor, returned: torch.Tensor) -> None:
        x = torch.cat([given, stay[layer](given)], dim=1) if stay else given
        sums[layer].add_targets(sums[layer].add(x.float()), returned)

    passed(stand_in)
    weight = torch.stack([solved(layer).float() for layer in asked])
    facts = ModelShape.of(arch), model_digest(arch.model), text.said(ridge)
    return MLPMaps(tuple(asked), weight, *facts, tuple(kept.values()))


def _resumed(file: TrainingFile, sums: Mapping[int, Sums]) -> int:
    """Take up the sums of the same fit; returns the windows that they are of, 0 where there are none, or they are of something else or torn."""
    found = None
    with suppress(ConfigError):
        found = file.load()
    if found is None:
        return 0
    for layer, (xx, xy) in found["sums"].items():
        sums[layer].xx, sums[layer].xy = xx, xy
    return int(found["windows"])


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
    arch = architecture
    sums = [Sums(arch.width, arch.width) for _ in range(arch.n_layers - 1)]
    states: list[torch.Tensor] = []

    def meet(layer: int, hidden: torch.Tensor) -> None:
        if layer == arch.n_layers:
            target = arch.final_norm.forward(hidden).flatten(0, 1).float()  # not by a call, which would meet this again
            for one, state in zip(sums, states, strict=True):
                one.add_targets(state, target)
            states.clear()
        elif layer:  # what enters a layer has left the one before
            states.append(sums[layer - 1].add(arch.normalised_input(layer - 1, hidden).flatten(0, 1)))

    with entering(arch, meet):
        for batch in progress(text.ids.split(batch_size)):
            arch.base(input_ids=batch.to(arch.model.device), use_cache=False)
    weight = torch.stack([one.solution(ridge, "of the model") for one in sums]).float()
    return Lens(weight, model_digest(arch.model), text.said(ridge))


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
        """For the console."""
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
