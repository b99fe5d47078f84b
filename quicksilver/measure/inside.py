"""A look inside one text: what the model and the modules do with each of its tokens, layer by layer.

A pass of its own: nothing here is timed or scored. The text is given to the model as a prompt of its own, once as the dense model and
once under the modules. Row ℓ of an array is layer ℓ counted from 1; row 0 is before the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from quicksilver.measure.latency import shared_weight_copy
from quicksilver.modules.signals import AttentionReceived, Drift
from quicksilver.runtime.architecture import Architecture, architecture_of
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import RuntimeModule, TokenPolicy
from quicksilver.runtime.pass_state import TokenState
from quicksilver.runtime.run import Execution, apply
from quicksilver.runtime.trace import PassTrace
from quicksilver.runtime.view import LayerView

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quicksilver.measure.bench import Bench

COMPONENTS = 3
_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True)
class Inside:
    """Signals of one text of N tokens in a model of L layers.

    Attributes:
        arrays: float32, NaN where there is nothing. Measured on the dense model (`dense.NAME`) and, where there are modules, on the run
            (`run.NAME`), (L+1, N): `drift_relative` and `drift_l2` (row ℓ: from ℓ-1 to ℓ), `entropy_nats` of the logit lens,
            `attention_received` from all active tokens of the text (mean over heads and queries; not in the last layer), `state_norm`, `pca` (L+1, N, 3);
            and (N,) `nll_nats` of each token given those before it. A token that a neighbour carries has the carrier's state.
            Of the run alone, (L+1, N): `active`, `kv` (has an entry), `bits`, `carrier` (column that carries it, its own where nothing was
            fused), `sdi_l2`, the Semantic Drift Index ‖h_dense − h_run‖₂ (paper R.3).
            With attribution, (L+1, N): `dense.gradient_norm` ‖∂L/∂h‖₂ and `dense.gradient_x_state` ∂L/∂h · h with L the summed nats of the
            dense model, and `run.attributed_nats` ∂L/∂h · (h_run − h_dense): to first order, what this token's deviation in that layer adds
            to L.
        explained: share of the variance behind each component of `pca`.
    """

    arrays: dict[str, torch.Tensor]
    explained: tuple[float, ...]


def look_inside(
    model: PreTrainedModel,
    ids: torch.Tensor,
    modules: Sequence[RuntimeModule] = (),
    *,
    execution: Execution = "compact",
    attribution: bool = False,
    decision_layers: Sequence[int] | None = None,
) -> Inside:
    """Signals of the text `ids` (N,) long; with `decision_layers`, the attention of a run is known behind these layers only.

    The components are those of the dense states of all layers, without the first token: its state is an attention sink, in many
    models tens of times longer than all others. Raises ConfigError: fewer than 2 tokens, more than the model's context takes, a
    module that does not fit the model, or one that cuts the prompt.
    """
    context = getattr(model.config, "max_position_embeddings", None) or len(ids)
    if not 2 <= len(ids) <= context:
        raise ConfigError(f"A text of {len(ids)} tokens cannot be looked into: give 2 to {context}, the model's context.")
    arch = architecture_of(model)
    ids = ids.to(model.device)
    dense = _observe(arch, ids, (), execution)
    basis, explained = _components(dense.states)
    arrays = {f"dense.{name}": value for name, value in _signals(arch, dense, ids, basis).items()}
    gradient = _gradient(arch, ids) if attribution else None
    if gradient is not None:
        arrays["dense.gradient_norm"] = gradient.norm(dim=-1)
        arrays["dense.gradient_x_state"] = (gradient * dense.states).sum(-1)
    if modules:
        run = _observe(arch, ids, modules, execution, decision_layers)
        if run.states.shape != dense.states.shape:
            raise ConfigError(
                f"Signals compare each token with the dense run, and these modules give the layers {run.states.shape[1]} of {len(ids)} tokens: "
                "leave measure.signals out, or prompt_truncation."
            )
        apart = run.states - dense.states
        arrays |= {f"run.{name}": value for name, value in (_signals(arch, run, ids, basis) | _decisions(run.trace)).items()}
        arrays["run.sdi_l2"] = apart.norm(dim=-1)
        if gradient is not None:
            arrays["run.attributed_nats"] = (gradient * apart).sum(-1)
    return Inside({name: value.to("cpu", torch.float32).contiguous() for name, value in arrays.items()}, explained)


Look = Callable[[LayerView, TokenState], dict[str, torch.Tensor]]


@dataclass
class _Watch(TokenPolicy):
    """Decides nothing: keeps what `look` says of every layer that is asked, by layer. `attention`: it asks for attention received."""

    look: Look
    attention: bool = True
    seen: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    priority = 90
    halts = False

    @property
    def causal(self) -> bool:
        return not self.attention

    def wants_attention(self, layer: int) -> bool:
        return self.attention

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        self.seen[view.layer] = self.look(view, tokens)


@torch.no_grad()
def observed(bench: Bench, windows: int, width: int, look: Look, *, attention: bool = False) -> dict[str, torch.Tensor]:
    """What `look` says of the first `windows` windows in the dense model, each as a prompt of `width` tokens: from a view to
    arrays (B, …) by name, alike in every layer. `attention`: it asks for attention received. Gives by name (L', W, …) on the CPU,
    L' the layers that are asked: all but the last, which nothing is decided after."""
    batches: list[dict[str, torch.Tensor]] = []  # (L', B, …)
    model = shared_weight_copy(bench.model)
    for batch in bench.windows.ids[:windows, :width].split(bench.protocol.batch_size):
        bench.progress(len(batches) * bench.protocol.batch_size / windows)
        watch = _Watch(look, attention)
        with apply(model, [watch], execution="compact"):
            model(batch.to(model.device), use_cache=False, logits_to_keep=1)
        layers = list(watch.seen.values())
        batches.append({name: torch.stack([layer[name].float().cpu() for layer in layers]) for name in layers[0]})
    return {name: torch.cat([batch[name] for batch in batches], dim=1) for name in batches[0]}


class _Observed(NamedTuple):
    states: torch.Tensor  # (L+1, N, D) float32
    attention: torch.Tensor  # (L+1, N)
    logits: torch.Tensor  # (N, V)
    trace: PassTrace


@torch.no_grad()
def _observe(
    arch: Architecture,
    ids: torch.Tensor,
    modules: Sequence[RuntimeModule],
    execution: Execution,
    layers: Sequence[int] | None = None,
) -> _Observed:
    """One forward of ids (N,), watched."""
    watch = _Watch(_attention)
    watched = apply(arch.model, [*modules, watch], execution=execution, decision_layers=layers)
    with _captured(arch) as captured, watched as run:
        logits = arch.model(ids[None], use_cache=False).logits[0]
        trace = run.trace.passes[0]
    states = torch.stack([state[0].detach().float().to(logits.device) for state in captured])
    received = states.new_full(states.shape[:2], torch.nan)
    for row in range(1, arch.n_layers + 1):
        states[row] = states[row, carriers(trace, row)[0].to(states.device)]
        if row - 1 in watch.seen:
            columns, values = watch.seen[row - 1].values()
            received[row, columns.to(states.device)] = values.to(states.device)
    return _Observed(states, received, logits, trace)


def _attention(view: LayerView, tokens: TokenState) -> dict[str, torch.Tensor]:
    """Of a single row: the active tokens' columns, and the attention that each receives."""
    where = tokens.active | tokens.newly_halted
    received = AttentionReceived(last_queries=None)(view, tokens, where)
    return {"column": view.index[where], "received": received[where]}


@contextmanager
def _captured(arch: Architecture) -> Iterator[list[torch.Tensor]]:
    """The state entering the first layer and those leaving each layer, (B, N, D), as the model sees them."""
    states: list[torch.Tensor] = []

    def entering(_: Any, args: tuple, kwargs: dict) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    with ExitStack() as hooks:
        hooks.callback(arch.layers[0].register_forward_pre_hook(entering, with_kwargs=True).remove)
        for layer in arch.layers:
            hooks.callback(layer.register_forward_hook(lambda _, args, output: states.append(output)).remove)
        yield states


def carriers(trace: PassTrace, layer: int) -> torch.Tensor:
    """(B, N) long, on the CPU: the column that carries each token after `layer`, counted from 1; 0: before the first."""
    columns = torch.arange(trace.valid.shape[1]).expand(trace.valid.shape)
    for fusion in trace.fusions:
        if fusion.layer < layer:
            columns = fusion.into.cpu().gather(1, columns)
    return columns


def _signals(arch: Architecture, seen: _Observed, ids: torch.Tensor, basis: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    states = seen.states
    nothing = torch.full_like(states[:1, :, 0], torch.nan)
    mean, directions = basis
    nll = F.cross_entropy(seen.logits[:-1].float(), ids[1:], reduction="none")
    steps: Any = SimpleNamespace(before=states[:-1], after=states[1:])  # the signal that modules use, of all layers at once
    drift = {kind: Drift(kind).score(steps, steps, steps.after[..., 0] == 0) for kind in ("relative", "l2")}
    return {
        **{f"drift_{kind}": torch.cat([nothing, moved]) for kind, moved in drift.items()},
        "entropy_nats": _entropy_nats(arch, states),
        "attention_received": seen.attention,
        "state_norm": states.norm(dim=-1),
        "pca": (states - mean) @ directions,
        "nll_nats": torch.cat([nothing[0, :1], nll]),
    }


@torch.no_grad()
def _entropy_nats(arch: Architecture, states: torch.Tensor) -> torch.Tensor:
    """Entropy of the logit lens, (L+1, N, D) -> (L+1, N)."""
    pieces = []
    for piece in states.flatten(0, 1).split(_ROWS_AT_A_TIME):
        log_p = arch.logits(piece.to(arch.model.dtype)).float().log_softmax(-1)
        pieces.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(pieces).view(states.shape[:2])


def _components(states: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[float, ...]]:
    """Mean (D,) and first principal directions (D, 3) of dense states (L+1, N, D), and the variance they explain."""
    rows = states[:, 1:].flatten(0, 1)
    mean = rows.mean(0)
    values, vectors = torch.linalg.eigh((rows - mean).T.double() @ (rows - mean).double())  # ascending
    count = min(COMPONENTS, len(values))
    directions = vectors[:, -count:].flip(1)
    # An eigenvector has no sign of its own.
    largest = directions.abs().argmax(0)
    directions = directions * directions[largest, torch.arange(count, device=directions.device)].sign()
    total = values.clamp(min=0).sum()
    explained = tuple(float(v / total) if total > 0 else 0.0 for v in values[-count:].flip(0))
    return (mean, directions.to(states.dtype)), explained


def _gradient(arch: Architecture, ids: torch.Tensor) -> torch.Tensor:
    """∂L/∂h of the dense model, L the summed nats of ids (N,) from the second token on: (L+1, N, D)."""
    with torch.enable_grad(), _captured(arch) as states:
        embedded = arch.model.get_input_embeddings()(ids[None]).detach().requires_grad_()  # or a frozen model would have no graph
        logits = arch.model(inputs_embeds=embedded, use_cache=False).logits[0]
        loss = F.cross_entropy(logits[:-1].float(), ids[1:], reduction="sum")
        gradients = torch.autograd.grad(loss, states)
    return torch.stack([gradient[0].float().to(ids.device) for gradient in gradients])


def _decisions(trace: PassTrace) -> dict[str, torch.Tensor]:
    """Which tokens take part in each layer, at which width, carried by which; row 0 is before anything was decided."""
    trace = trace.row(0)
    layers = range(trace.n_layers)
    undecided = torch.full_like(trace.valid[0], 16, dtype=torch.long)
    return {
        "active": torch.stack([trace.valid[0], *(trace.active(layer)[0] for layer in layers)]),
        "kv": torch.stack([trace.valid[0], *(trace.kv_present(layer)[0] for layer in layers)]),
        "bits": torch.stack([undecided, *(trace.bits(layer)[0] for layer in layers)]),
        "carrier": torch.stack([carriers(trace, 0)[0], *(carriers(trace, layer)[0] for layer in layers)]),
    }
