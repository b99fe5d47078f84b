"""Perplexity under a named protocol, with the decisions and FLOPs of the same forward passes; and how near predictions stay to the dense model's.

A perplexity means nothing without its protocol (docs/conflicts.md #25): which windows, which positions are scored, what was cached.
Two protocols (docs/design.md §3):

    all            one forward pass of each window; every position but the first is scored. Causal modules only.
    continuation   the first `prompt_tokens` of a window are processed in one call, with every module allowed; the tokens
                   after them are scored, given the cache the prompt left behind. What a deployed model would do.

Negative log-likelihoods are in nats, summed in float64, and divided once, at the end.

A perplexity may fall while predictions drift apart; KL to the dense model and top-1 agreement, position by position, show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pandas as pd
import torch
import torch.nn.functional as F

from quicksilver.data.windows import check_context
from quicksilver.measure.latency import Step, shared_weight_copy
from quicksilver.models.memory_check import free_memory_bytes
from quicksilver.runtime.architecture import architecture_of
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.ledger import Flops, head_flops, pass_flops
from quicksilver.runtime.module import RuntimeModule
from quicksilver.runtime.options import Options, Positive
from quicksilver.runtime.run import Execution, Run, apply
from quicksilver.runtime.trace import PassTrace, Trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Rows of logits turned to float32 at a time. The model's logits of a batch are the largest tensor of a pass already
# (8 × 511 × 50257 float32: 0.8 GB); a float32 copy and a softmax of all of it would triple the peak.
_ROWS_AT_A_TIME = 256
KEPT_BYTES = 2**30  # of dense logits, and at most a quarter of what is free; the rest is computed again
BLOCK_WINDOWS = 32


@dataclass(frozen=True)
class Protocol(Options):
    """Which positions of a window are scored, and how the model gets there.

    Args:
        window_tokens: length of a window. Windows are disjoint.
        prompt_tokens: length of the prompt under `continuation`; has no effect under `all`.
        batch_size: windows per forward pass.

    Raises:
        ConfigError: an unknown name, a size that is not a positive whole number, nothing left to score.
    """

    name: Literal["all", "continuation"] = "all"
    window_tokens: Positive = 512
    prompt_tokens: Positive = 448
    batch_size: Positive = 8

    prefix: ClassVar[str] = "protocol."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window_tokens < 2:
            raise ConfigError(f"protocol.window_tokens={self.window_tokens} leaves nothing to score: at least 2.")
        if self.name == "continuation" and self.prompt_tokens >= self.window_tokens:
            nothing = f"protocol.prompt_tokens={self.prompt_tokens} leaves nothing to score"
            window = f"of a window of protocol.window_tokens={self.window_tokens}"
            raise ConfigError(f"{nothing} {window}: make the prompt shorter or the window longer.")

    @property
    def first_scored(self) -> int:
        """Position of the first scored token of a window."""
        return self.prompt_tokens if self.name == "continuation" else 1

    @property
    def passes(self) -> int:
        """Forward passes of a batch of windows."""
        return 2 if self.name == "continuation" and self.scored_tokens > 1 else 1

    @property
    def scored_tokens(self) -> int:
        """Scored tokens of a window."""
        return self.window_tokens - self.first_scored


def check_allowed(modules: Sequence[RuntimeModule], protocol: Protocol, names: Sequence[str] = ()) -> None:
    """Raises ConfigError under `all`: a module that is neither causal nor marked `lookahead` (docs/design.md §3). `names` is what
    they are called; none: by their classes."""
    if protocol.name != "all":
        return
    called = names or [type(module).__name__ for module in modules]
    looking = [name for name, module in zip(called, modules, strict=True) if not module.causal and not module.lookahead]
    if looking:
        raise ConfigError(
            f"{' and '.join(looking)} {'looks' if len(looking) == 1 else 'look'} ahead: causal=False means that a decision may read tokens "
            "after its own, and protocol.name=all scores those. Ways out: protocol=continuation, which scores what follows a prompt; "
            "causal=true on a module of yours that reads earlier tokens only; or lookahead=true, the paper's variant, which marks every "
            "number that comes of it."
        )


@dataclass
class Scores:
    """What one pass over the windows gave.

    Attributes:
        windows: one row a window: `window`, `tokens` (scored), `bytes` (of them; missing without `token_bytes`), `nll_nats`,
            `executed_flops`, `nominal_flops`, `paper_flops`, `signal_flops`; under `continuation` also the prompt's share of
            each as `prompt_…`; compared with the dense model also `kl_nats`, KL(dense‖run) per scored token, and `top1_agreement`, the
            share of scored positions whose likeliest token is the dense model's.
        trace: every decision, pass by pass.
        kv_bytes_billed, kv_bytes_resident: KV cache at the end of every batch, summed over the batches; 0 under `all`.
    """

    windows: pd.DataFrame
    trace: Trace
    kv_bytes_billed: int
    kv_bytes_resident: int

    @property
    def tokens(self) -> int:
        """Scored tokens."""
        return int(self.windows["tokens"].sum())

    @property
    def nll_nats(self) -> float:
        """Negative log-likelihood of all scored tokens."""
        return float(self.windows["nll_nats"].sum())

    @property
    def ppl(self) -> float:
        """Perplexity per token: exp(nats / tokens); inf where that overflows."""
        mean_nats = self.nll_nats / self.tokens
        return math.exp(mean_nats) if mean_nats < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the scored text; None when byte lengths were not given."""
        if self.windows["bytes"].isna().any():
            return None
        return self.nll_nats / math.log(2) / int(self.windows["bytes"].sum())


@dataclass(frozen=True)
class Block:
    """What a pass over some of the windows gave: their rows of `Scores.windows`, and the rest as there."""

    rows: list[dict[str, Any]]
    trace: Trace
    kv_bytes_billed: int
    kv_bytes_resident: int


# Gives the blocks of a pass, in their order, and computes those that it has not, by the function it is given.
Compute = Callable[[range, int], Block]  # a block, and how many windows of others are done, for `progress`
Keep = Callable[[Sequence[range], Compute], Iterable[Block]]


def keep_nothing(blocks: Sequence[range], compute: Compute) -> Iterable[Block]:
    """Every block is computed."""
    return (compute(block, block.start) for block in blocks)


def check_windows(model: PreTrainedModel, windows: torch.Tensor, protocol: Protocol) -> None:
    """Raises ConfigError: windows that are not (W, protocol.window_tokens) whole numbers, no window at all, a window longer than
    the model's context, a token id outside its vocabulary, a model in training mode."""
    size = protocol.window_tokens
    if windows.ndim != 2 or windows.shape[1] != size or windows.dtype != torch.long:
        given = f"windows of shape {tuple(windows.shape)} and type {windows.dtype}"
        raise ConfigError(f"{given} do not fit protocol.window_tokens={size}: cut them with windows_of(ids, {size}).")
    if len(windows) == 0:
        raise ConfigError("there is no window to score: give at least one.")
    check_context(model, size)
    vocabulary = architecture_of(model).vocab_size
    low, high = int(windows.min()), int(windows.max())
    if low < 0 or high >= vocabulary:
        given = f"token ids run from {low} to {high} and the model's vocabulary has {vocabulary}"
        raise ConfigError(f"{given}: the text was encoded with another model's tokenizer.")
    if model.training:
        raise ConfigError("the model is in training mode, where dropout makes every number random: call model.eval() first.")


def calls(
    model: PreTrainedModel, batch: torch.Tensor, protocol: Protocol, before: Step = lambda: None
) -> list[Callable[[], Any]]:
    """The forward calls that score a batch of windows (B, N), each giving logits (B, S, V): one under `all`; the prompt, and what
    follows it, under `continuation`. `before` is called at the beginning of the first."""
    whole, prompt, cache = protocol.name == "all", protocol.prompt_tokens, None

    def begin() -> Any:
        nonlocal cache
        before()
        # Of the prompt only the last token's prediction is used, and a deployed model computes no other.
        output = model(batch, use_cache=False) if whole else model(batch[:, :prompt], use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        return output.logits

    def rest() -> Any:
        nonlocal cache
        given, cache = cache, None
        return model(batch[:, prompt:-1], use_cache=True, past_key_values=given).logits if protocol.passes == 2 else None

    return [begin] if whole else [begin, rest]


def scored_logits(model: PreTrainedModel, batch: torch.Tensor, protocol: Protocol) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The `calls` of one batch of windows (B, N): logits (B, S, V) of each, and the tokens they are scored on, (B, S). The caller
    may look at the ledgers between two."""
    scored = batch[:, protocol.first_scored :]
    targets = [scored] if protocol.name == "all" else [scored[:, :1], scored[:, 1:]]
    for call, tokens in zip(calls(model, batch, protocol)[: protocol.passes], targets, strict=False):
        yield call()[:, : tokens.shape[1]], tokens


def _in_pieces(compute: Callable[..., tuple[torch.Tensor, ...]], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`compute` of tensors (B, S, …), a few positions S at a time; its results (B, S) whole."""
    positions = max(1, _ROWS_AT_A_TIME // tensors[0].shape[0])
    found = [compute(*pieces) for pieces in zip(*(one.split(positions, dim=1) for one in tensors), strict=True)]
    return tuple(torch.cat(parts, dim=1) for parts in zip(*found, strict=True))


def _nll_nats(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Negative log-likelihood of targets (B, S) under logits (B, S, V): (B, S) float64; and which logits are finite, (B, S)."""
    wide = logits.float()
    return F.cross_entropy(wide.transpose(1, 2), targets, reduction="none").double(), wide.isfinite().all(-1)


def _ledger_by_window(run: Run, passes: Sequence[PassTrace], head_tokens: int, total: Flops) -> list[Flops]:
    """Ledgers of the last of a batch's `passes`, window by window; the passes before it filled the cache it started from. For
    each window it computed `head_tokens` rows of logits; `total` is of all windows together.

    What was executed is shared equally: rows of unequal length are padded to the longest, so every row costs the same; so is what
    could have been skipped. The nominal and the paper ledger are otherwise the row's own.
    """
    *earlier, last = passes
    rows = last.valid.shape[0]
    ledgers = []
    for row in range(rows):
        # Whole shares that differ by at most one and add up to the total.
        executed, signals, skippable = (n // rows + (row < n % rows) for n in (total.executed, total.signals, total.skippable))
        cached = [p.row(row) for p in earlier]
        past: list[torch.Tensor | int] = [
            sum(int(p.kv_present(layer).sum()) - int(p.evicted(layer).sum()) for p in cached)
            for layer in range(run.arch.n_layers)
        ]
        of_row = replace(run.work, layers=[], past_real=None, past_lengths=past)
        own = pass_flops(run.arch, of_row, last.row(row), run.beta) + head_flops(run.arch, head_tokens)
        ledgers.append(replace(own, executed=executed, signals=signals, nominal=own.nominal - skippable, skippable=skippable))
    return ledgers


def score(
    model: PreTrainedModel,
    windows: torch.Tensor,
    protocol: Protocol,
    token_bytes: torch.Tensor | None = None,
    *,
    modules: Sequence[RuntimeModule] = (),
    execution: Execution = "compact",
    progress: Callable[[int, int], object] = lambda done, of: None,
    dense: DenseLogits | None = None,
    decision_layers: Sequence[int] | None = None,
    keep: Keep = keep_nothing,
) -> Scores:
    """Score windows of text under a protocol, with modules applied.

    Args:
        model: a causal language model in evaluation mode; windows are moved to its device.
        windows: (W, protocol.window_tokens) long, of `windows_of`.
        token_bytes: (V,) long, of `token_byte_lengths`; None leaves the bytes out.
        modules: empty scores the dense model, through the same runtime.
        progress: called at the beginning and after every batch with windows done and windows in all.
        dense: adds to every window how far its predictions are from the dense model's: one forward pass more for each batch.
        decision_layers: layers after which modules are asked; None: after every layer.
        keep: may keep blocks of about `BLOCK_WINDOWS` windows, so that a pass goes on where it was killed.

    Raises:
        ConfigError: windows that do not fit the protocol or the model, a module that the protocol does not allow.
        QuickSilverError: logits that are not finite.
    """
    check_allowed(modules, protocol)
    check_windows(model, windows, protocol)
    size = protocol.batch_size * max(1, BLOCK_WINDOWS // protocol.batch_size)
    blocks = [range(first, min(first + size, len(windows))) for first in range(0, len(windows), size)]
    # One context for all: what modules do to the model is done once.
    with torch.no_grad(), apply(model, modules, execution=execution, decision_layers=decision_layers) as run:

        def compute(block: range, done: int) -> Block:
            # A replayed trace is looked up by the pass's number; ledgers and tensors of the blocks before are let go.
            run.reset(block.start // protocol.batch_size * protocol.passes)
            rows: list[dict[str, Any]] = []
            billed = resident = 0
            for start in block[:: protocol.batch_size]:
                progress(done + start - block.start, len(windows))
                batch = windows[start : min(start + protocol.batch_size, block.stop)].to(model.device)
                rows += _scored(run, model, start, batch, protocol, token_bytes, dense)
                billed += run.kv_bytes.billed
                resident += run.kv_bytes.resident
            progress(done + len(block), len(windows))
            return Block(rows, run.trace.compact(), billed, resident)

        parts = []
        for block in keep(blocks, compute):  # one at a time: rows take ten times the memory of their frame
            parts.append((pd.DataFrame(block.rows), block.trace, block.kv_bytes_billed, block.kv_bytes_resident))
        run.reset()
    frames, traces, billed, resident = zip(*parts, strict=True)
    frame = pd.concat(frames, ignore_index=True).astype({"bytes": "Int64"})
    return Scores(frame, Trace.concat(traces), sum(billed), sum(resident))


def _scored(
    run: Run,
    model: PreTrainedModel,
    start: int,
    batch: torch.Tensor,
    protocol: Protocol,
    token_bytes: torch.Tensor | None,
    dense: DenseLogits | None,
) -> list[dict[str, Any]]:
    """The rows of one batch of windows (B, N), of which the first is number `start`."""
    scores, apart, ledgers, rows = [], [], [], []
    first_pass, before = len(run.trace.passes), run.flops
    theirs = iter(()) if dense is None else dense.calls(start, batch)
    for logits, targets in scored_logits(model, batch, protocol):
        scores.append(_in_pieces(_nll_nats, logits, targets))
        if dense is not None:
            apart.append(divergence(next(theirs), logits))
        head_tokens = logits.shape[1] + (protocol.name == "all")
        passes, spent = run.trace.passes[first_pass:], run.flops - before
        ledgers.append(_ledger_by_window(run, passes, head_tokens, spent))
        before = run.flops
        del logits
    next(theirs, None)  # the last call is kept when the iterator ends
    nll, finite = (torch.cat(parts, dim=1) for parts in zip(*scores, strict=True))
    check_finite(finite, start, protocol, model)
    columns: dict[str, Sequence[Any]] = {"nll_nats": [float(row.sum()) for row in nll]}
    if apart:
        kl, same = (torch.cat(parts, dim=1) for parts in zip(*apart, strict=True))
        columns |= {"kl_nats": kl.mean(1).tolist(), "top1_agreement": same.double().mean(1).tolist()}
    scored = batch[:, protocol.first_scored :].cpu()
    for i in range(len(batch)):
        length = None if token_bytes is None else int(token_bytes[scored[i]].sum())
        row: dict[str, Any] = {"window": start + i, "tokens": protocol.scored_tokens, "bytes": length}
        row |= {name: of_windows[i] for name, of_windows in columns.items()}
        row |= ledger_columns(sum((call[i] for call in ledgers), Flops()))
        if protocol.name == "continuation":
            row |= {f"prompt_{name}": value for name, value in ledger_columns(ledgers[0][i]).items()}
        rows.append(row)
    return rows


def ledger_columns(flops: Flops) -> dict[str, int]:
    """The ledgers as columns of a frame."""
    found = {"executed": flops.executed, "nominal": flops.nominal, "paper": flops.paper, "signal": flops.signals}
    return {f"{name}_flops": count for name, count in found.items()}


def check_finite(finite: torch.Tensor, first_window: int, protocol: Protocol, model: PreTrainedModel) -> None:
    """finite: (B, S) bool, by scored position."""
    if bool(finite.all()):
        return
    row, position = (~finite).nonzero()[0].tolist()
    raise QuickSilverError(
        f"window {first_window + row}: the logits that score position {protocol.first_scored + position} are NaN or infinite "
        f"(protocol={protocol.name}, dtype={model.dtype}). No perplexity can be given: check the weights, or use dtype=float32."
    )


def divergence(dense: torch.Tensor, run: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of logits (B, S, V) of the same positions: KL(dense‖run) in nats, (B, S) float64, and whether both have their greatest logit
    at the same token, (B, S) bool."""

    def compute(dense: torch.Tensor, run: torch.Tensor) -> tuple[torch.Tensor, ...]:
        log_p, log_q = dense.float().log_softmax(-1), run.float().log_softmax(-1)
        # Rounding leaves equal distributions a few 1e-8 to either side of 0.
        kl = (log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64).clamp(min=0)
        return kl, dense.argmax(-1) == run.argmax(-1)

    return _in_pieces(compute, dense, run)


class DenseLogits:
    """The dense model's logits of batches of windows, computed once where they fit into `kept_bytes`. `model` is that of the run,
    whose weights are shared; not under `apply` yet."""

    def __init__(self, model: PreTrainedModel, protocol: Protocol, kept_bytes: int | None = None) -> None:
        self._model, self._protocol = shared_weight_copy(model), protocol
        self._left = min(KEPT_BYTES, free_memory_bytes() // 4) if kept_bytes is None else kept_bytes
        self._kept: dict[int, list[torch.Tensor]] = {}

    def calls(self, first_window: int, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        """Logits (B, S, V) of the windows (B, N), of which the first is number `first_window`; call by call as `scored_logits` yields them."""
        if first_window in self._kept:
            yield from self._kept[first_window]
            return
        calls: list[torch.Tensor] = []
        held = 0
        for logits, _ in scored_logits(self._model, batch, self._protocol):
            held += logits.nbytes
            calls = [*calls, logits] if held <= self._left else []
            yield logits
        if held <= self._left:
            self._kept[first_window] = calls
            self._left -= held


class DensePasses:
    """What passes of the dense model gave that several runs need: computed by the first of them.

    Attributes:
        logits: of the windows.
        peak_tensor_bytes: of one batch; None: not measured yet.
        energy_j_per_token: as CodeCarbon read it over one batch, again and again; by its settings.
    """

    def __init__(self, model: PreTrainedModel, protocol: Protocol) -> None:
        self.logits = DenseLogits(model, protocol)
        self.peak_tensor_bytes: int | None = None
        self.energy_j_per_token: dict[str, float] = {}
