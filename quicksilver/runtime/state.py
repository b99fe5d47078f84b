"""What is decided about the tokens of one pass, and what a module sees of one layer.

A pass is one forward of the model: N new columns of B sequences, after whatever the cache holds. Decisions live in pass coordinates
(B, N); a module works in view coordinates (B, M), which are the packed active tokens under `compact` and all tokens under `masked`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.translation import KVTranslator

MissingKV = Literal["drop", "project", "copy", "zero", "predict"]
MISSING_KV: tuple[str, ...] = ("drop", "project", "copy", "zero", "predict")  # the code of a mode is its index


class PassState:
    """The decisions of one pass, in pass coordinates.

    Args:
        valid: (B, N) bool, False for padding.
        slots: (B, N) long, index of a token in its sequence, counted from the first real token.
        n_layers: number of decoder layers L.

    Attributes:
        halt_layer: (B, N) int16, last layer the token went through by decision; L-1 = never halted.
        halted_kv: (B, N) uint8, what later layers see of it while it is halted: index into `MISSING_KV`.
        resume_layer: (B, N) int16, first layer it takes part in again; L = never.
        kv_layer: (B, N) int16, last layer in which it has a K/V entry while active; L-1 = all.
        fused_layer: (B, N) int16, last layer it took part in before a neighbour carried it; L-1 = never fused.
        size: (B, N) float32, original tokens it stands for.
        bits: (B, N) uint8, width its activations and K/V are held at from the next layer on; 16 = untouched.
        fusions, precisions: what was decided, in order.
        merges, evictions: what was merged in the cache, and what left it, after the pass.
    """

    def __init__(self, valid: torch.Tensor, slots: torch.Tensor, n_layers: int) -> None:
        def full(value: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full(valid.shape, value, dtype=dtype, device=valid.device)

        self.valid = valid
        self.slots = slots
        self.n_layers = n_layers
        self.halt_layer = full(n_layers - 1, torch.int16)
        self.halted_kv = full(MISSING_KV.index("drop"), torch.uint8)
        self.resume_layer = full(n_layers, torch.int16)
        self.kv_layer = full(n_layers - 1, torch.int16)
        self.fused_layer = full(n_layers - 1, torch.int16)
        self.size = full(1, torch.float32)
        self.bits = full(16, torch.uint8)
        self.fusions: list[Fusion] = []
        self.precisions: list[Precision] = []
        self.merges: list[CacheMerge] = []
        self.evictions: list[Eviction] = []
        # Host-side facts, so that the common cases need no look at the device.
        self.any_halted = False
        self.any_kv_skipped = False
        self.remembers_kv = True
        self.translators: dict[int, KVTranslator] = {}  # of missing_kv=predict, by source layer
        self.kept_kv: set[str] = set()  # missing_kv modes other than drop that some token may be under
        self.resume_layers: set[int] = set()
        # Of rows without padding, by halts that said how many they took of each: (tokens, layer they take part in again).
        self.n_each: int | None = None
        self.counted: list[tuple[int, int]] | None = []

    def n_active(self, layer: int) -> int | None:
        """How many tokens of each row take part in `layer`, where all rows have as many and the host knows it."""
        if self.n_each is None or self.counted is None:
            return None
        return self.n_each - sum(tokens for tokens, resumed in self.counted if resumed > layer)

    def active(self, layer: int) -> torch.Tensor:
        """(B, N) bool: takes part in `layer`."""
        if not (self.any_halted or self.fusions):
            return self.valid
        return active_tokens(self.valid, self.halt_layer, self.resume_layer, self.fused_layer, layer)

    def predicted(self, layer: int, source_layer: int) -> torch.Tensor:
        """(B, N) bool: halted before `source_layer`, and later queries see K/V in `layer` that are predicted from there."""
        return self.kept(layer, "predict") & (self.halt_layer == source_layer - 1)

    def writes_kv(self, layer: int) -> torch.Tensor:
        """(B, N) bool: an active token of `layer` would store its K/V there."""
        return self.kv_layer >= layer

    def kept(self, layer: int, mode: str | None = None) -> torch.Tensor:
        """(B, N) bool: halted in `layer`, but later queries still see an entry for it (in `mode`, or any)."""
        code = self.halted_kv != MISSING_KV.index("drop") if mode is None else self.halted_kv == MISSING_KV.index(mode)
        return self.valid & ~self.active(layer) & code & (self.fused_layer >= layer) & self.writes_kv(layer)

    def kv_present(self, layer: int) -> torch.Tensor:
        """(B, N) bool: has a K/V entry in `layer`."""
        return (self.active(layer) & self.writes_kv(layer)) | self.kept(layer)

    def representatives(self) -> torch.Tensor:
        """(B, N) long: the column that carries each token in the end; its own for a token that was not fused."""
        columns = torch.arange(self.valid.shape[1], device=self.valid.device).expand_as(self.valid)
        for fusion in self.fusions:
            columns = fusion.into.gather(1, columns)
        return columns


@dataclass(frozen=True)
class Fusion:
    """After `layer`, tokens were merged: `into` (B, N) long is the column that carries each (its own where nothing happened),
    `weight` (B, N) float32 its share in the weighted mean."""

    layer: int
    into: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True)
class Precision:
    """After `layer`, widths were set: `bits` (B, N) uint8, 0 where nothing was said."""

    layer: int
    bits: torch.Tensor


@dataclass(frozen=True)
class CacheMerge:
    """After the pass, K/V entries of `layer` were merged: `into` (B, S) long is the slot whose entry carries each slot's."""

    layer: int
    into: torch.Tensor


@dataclass(frozen=True)
class Eviction:
    """After the pass, K/V entries of `layer` left the cache: `gone` (B, S) bool, by slot; True only where there was an entry."""

    layer: int
    gone: torch.Tensor


@dataclass(frozen=True)
class Span:
    """How far back the queries of a layer see: the last `window` slots, their own included, and the first `sinks` of the sequence."""

    window: int
    sinks: int = 0

    @property
    def reach(self) -> int:
        """Tokens of a sequence up to which nothing is out of sight."""
        return self.window + self.sinks

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Slots of queries (B, Q) and keys (B, K) -> (B, Q, K) bool, apart from causality."""
        return (keys[:, None, :] > queries[:, :, None] - self.window) | (keys < self.sinks)[:, None, :]


def active_tokens(
    valid: torch.Tensor, halt_layer: torch.Tensor, resume_layer: torch.Tensor, fused_layer: torch.Tensor, layer: int
) -> torch.Tensor:
    return valid & ((halt_layer >= layer) | (resume_layer <= layer)) & (fused_layer >= layer)


class TokenState:
    """The verbs, in the coordinates of one view. Masks are (B, M) bool; tokens outside `active` are left alone.

    Attributes:
        active: (B, M) bool, real tokens of this view that have not been halted.
        newly_halted: (B, M) bool, halted by a module at this layer.
    """

    def __init__(self, state: PassState, view: LayerView, index: torch.Tensor | None, real: torch.Tensor) -> None:
        self._state = state
        self._view = view
        self._layer = view.layer
        self._index = index  # (B, M) columns of the pass, or None when the view is the whole pass
        # A token that takes part again after a halt is computed, but there is nothing left to decide about it.
        self.active = real & (self._read(state.halt_layer) == state.n_layers - 1) if state.any_halted else real.clone()
        if state.fusions:  # `decide` computes what was merged away, too
            self.active &= self._read(state.fused_layer) == state.n_layers - 1
        self.newly_halted = torch.zeros_like(real)

    def _read(self, field: torch.Tensor) -> torch.Tensor:
        return field if self._index is None else field.gather(1, self._index)

    def _write(self, field: torch.Tensor, mask: torch.Tensor, value: int) -> torch.Tensor:
        """`field` (B, N) with `value` where `mask` (B, M); columns of a view are distinct, so nothing is written twice."""
        updated = torch.where(mask, value, self._read(field)).to(field.dtype)
        return updated if self._index is None else field.scatter(1, self._index, updated)

    @property
    def n_left(self) -> int | None:
        """How many of each row's tokens have not been halted; None where rows may differ or only the device knows."""
        state = self._state
        if state.n_each is None or state.counted is None:
            return None
        return state.n_each - sum(tokens for tokens, _ in state.counted)

    @property
    def size(self) -> torch.Tensor:
        """(B, M) float32, original tokens that each stands for."""
        return self._read(self._state.size)

    def left_neighbour(self) -> torch.Tensor:
        """The active token just before each active one: (B, M) long view columns, its own where there is none.

        There is none at the start of the pass, and where a halted token stands in between. Tokens merged away stand nowhere:
        their super-token's neighbours are theirs.
        """
        state = self._state
        standing = state.valid & (state.fused_layer == state.n_layers - 1)
        columns = torch.arange(standing.shape[1], device=standing.device).expand_as(standing)
        last = torch.where(standing, columns, -1).cummax(1).values
        before = torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], dim=1)  # (B, N) columns of the pass
        own = columns[:, : self.active.shape[1]]
        if self._index is not None:
            in_view = torch.full_like(columns, -1).scatter(1, self._index, own)
            before = self._read(torch.where(before >= 0, in_view.gather(1, before.clamp(min=0)), -1))
        found = self.active & (before >= 0)
        before = torch.where(found, before, own)
        return torch.where(found & self.active.gather(1, before), before, own)

    def halt(
        self,
        mask: torch.Tensor,
        *,
        missing_kv: str = "project",
        resume_layers: int = 0,
        each: int | None = None,
        translator: KVTranslator | None = None,
    ) -> None:
        """Freeze tokens from the next layer on.

        Args:
            mask: (B, M) bool.
            missing_kv: what later layers see of a halted token: nothing (`drop`), K/V projected from its frozen state (`project`),
                the K/V of the layer it halted at (`copy`), zeros (`zero`: a zero key still draws attention, conflicts.md #9), or
                projected in the next layer and predicted by a translator after that (`predict`).
            resume_layers: it takes part again in that many last layers.
            translator: of `predict`; its source layer is the next one.
            each: how many active tokens of each row `mask` has, where the module knows without asking the device: as long as
                all halts of a pass say so, the shapes that follow cost no host sync.

        Raises:
            ConfigError: an unknown `missing_kv`, `resume_layers` outside 0..L, `predict` without a translator or
                with one of another layer.
            RuntimeError: another number than `each` (on a GPU raised later, by the device).
        """
        state = self._state
        if missing_kv not in MISSING_KV:
            raise ConfigError(f"missing_kv={missing_kv!r} is not one of {', '.join(MISSING_KV)}.")
        if missing_kv == "copy" and not state.remembers_kv:
            raise ConfigError("missing_kv='copy' needs K/V that were not remembered: the module must return True from copies_kv.")
        if (missing_kv == "predict") != (translator is not None):
            raise ConfigError(
                f"missing_kv={missing_kv!r} {'needs a translator: give' if translator is None else 'takes no translator: leave out'} "
                "halt(translator=...)."
            )
        if translator is not None and translator.source_layer != self._layer + 1:
            raise ConfigError(
                f"The translator reads states entering layer {translator.source_layer}, and tokens halt after layer {self._layer}: "
                f"halt them after layer {translator.source_layer - 1}."
            )
        if not 0 <= resume_layers <= state.n_layers:
            raise ConfigError(f"resume_layers={resume_layers} must lie between 0 and the model's {state.n_layers} layers.")
        if self._layer >= state.n_layers - 1:
            return  # nothing is left to save
        mask = mask & self.active
        if each is None:
            state.counted = None
        else:
            torch._assert_async(
                (mask.sum(1) == each).all(), f"halt(each={each}): a row's mask has another number of active tokens."
            )
            if state.counted is not None:
                state.counted.append((each, state.n_layers - resume_layers))
        state.halt_layer = self._write(state.halt_layer, mask, self._layer)
        state.halted_kv = self._write(state.halted_kv, mask, MISSING_KV.index(missing_kv))
        if resume_layers:
            first = state.n_layers - resume_layers
            state.resume_layer = self._write(state.resume_layer, mask, first)
            state.resume_layers.add(first)
        state.any_halted = True
        if missing_kv != "drop":
            state.kept_kv.add(missing_kv)
        if translator is not None:
            state.translators[translator.source_layer] = translator
        self.active = self.active & ~mask
        self.newly_halted = self.newly_halted | mask

    def skip_kv(self, mask: torch.Tensor) -> None:
        """No K/V entry: for a newly halted token while it is halted, for an active one from the next layer on. mask: (B, M) bool."""
        state = self._state
        state.halted_kv = self._write(state.halted_kv, mask & self.newly_halted, MISSING_KV.index("drop"))
        first = self._read(state.kv_layer) == state.n_layers - 1  # whoever has none already lost it earlier
        state.kv_layer = self._write(state.kv_layer, mask & self.active & first, self._layer)
        state.any_kv_skipped = True

    def fuse(self, into: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Merge tokens: each goes into the super-token at column `into` of the view, which from the next layer on alone is computed and
        has K/V. The super-token's state becomes the weighted mean of its parts, at once: modules asked later see it.

        Args:
            into: (B, M) long, a token's own column where nothing shall happen. A target must be active, lie at a later slot and go into
                itself; entries of inactive tokens are ignored.
            weight: (B, M) float, share of each part in the mean; None: the number of original tokens it stands for.

        Raises:
            ConfigError: a target that is inactive, earlier, or itself merged away; a weight that is not positive.
        """
        state, view = self._state, self._view
        columns = torch.arange(into.shape[1], device=into.device).expand_as(into)
        into = torch.where(self.active, into, columns)
        moves = into != columns
        target_moves = moves.gather(1, into) | ~self.active.gather(1, into) | (view.slots.gather(1, into) <= view.slots)
        if bool((moves & target_moves).any()):
            raise ConfigError(f"fuse() at layer {self._layer}: a group must go into its own last active token.")
        size = self._read(state.size)
        weight = size if weight is None else weight.to(torch.float32)
        if bool((weight[self.active] <= 0).any()):
            raise ConfigError(f"fuse() at layer {self._layer}: weights must be positive.")
        part = torch.where(self.active, weight, 0.0)
        total = torch.zeros_like(part).scatter_add_(1, into, part)
        mean = torch.zeros_like(view.after, dtype=torch.float32)
        mean.scatter_add_(1, into[..., None].expand_as(mean), view.after.float() * part[..., None])
        is_target = torch.zeros_like(part).scatter_add_(1, into, moves.float()) > 0
        mean = (mean / total.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).to(view.after.dtype)
        view.after = torch.where(is_target[..., None], mean, view.after)
        grown = torch.zeros_like(size).scatter_add_(1, into, torch.where(self.active, size, 0.0))
        state.counted = None
        self._state.size = self._write_values(state.size, torch.where(self.active & ~moves, grown, size))
        state.fused_layer = self._write(state.fused_layer, moves, self._layer)
        state.fusions.append(
            Fusion(self._layer, self._pass_columns(into), self._write_values(torch.ones_like(state.size), weight))
        )
        self.active = self.active & ~moves

    def set_bits(self, mask: torch.Tensor, bits: int) -> None:
        """Hold tokens at `bits` from the next layer on: the inputs of linear layers, and their K/V. mask: (B, M) bool.

        Raises:
            ConfigError: a width other than 2, 4, 8 or 16.
        """
        if bits not in (2, 4, 8, 16):
            raise ConfigError(f"bits={bits} is not one of 2, 4, 8, 16 (16 = untouched).")
        state = self._state
        mask = mask & self.active
        state.bits = self._write(state.bits, mask, bits)
        said = torch.zeros_like(state.bits)
        if state.precisions and state.precisions[-1].layer == self._layer:  # one event a layer, however many widths it sets
            said = state.precisions.pop().bits
        state.precisions.append(Precision(self._layer, self._write(said, mask, bits)))

    def _write_values(self, field: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.to(field.dtype) if self._index is None else field.scatter(1, self._index, values.to(field.dtype))

    def _pass_columns(self, into: torch.Tensor) -> torch.Tensor:
        """`into` in columns of the pass: (B, M) in view columns -> (B, N)."""
        if self._index is None:
            return into.clone()
        columns = torch.arange(self._state.valid.shape[1], device=into.device).expand_as(self._state.valid)
        return columns.scatter(1, self._index, self._index.gather(1, into))


class LayerView:
    """One layer of one pass after it ran: what a module may look at.

    Attributes:
        layer, n_layers: this layer (0-based) and their number.
        pass_index: which forward since the runtime was applied or reset.
        is_prompt: nothing was cached before and there is more than one token: all of it is known (DESIGN §3).
        before, after: (B, M, D) states entering and leaving the layer.
        slots: (B, M) long, index in the sequence from its first real token.
        index: (B, M) long, column in this pass.
        input_ids: (B, M) long, or None when the model was given embeddings.
        n_tokens: (B, 1) long, real tokens of each row in this pass.
        pass_ids: (B, N) long, the ids of the whole pass, -1 for padding; None as `input_ids`.
        n_each: what `n_tokens` says of every row, where no row is padded; else None.
    """

    def __init__(
        self,
        *,
        layer: int,
        n_layers: int,
        pass_index: int,
        is_prompt: bool,
        before: torch.Tensor,
        after: torch.Tensor,
        slots: torch.Tensor,
        index: torch.Tensor,
        input_ids: torch.Tensor | None,
        n_tokens: torch.Tensor,
        logits: Callable[[torch.Tensor], torch.Tensor],
        attention: Callable[[int | None, str], torch.Tensor] | None,
        count_flops: Callable[[int], None],
        pass_ids: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
        attention_output: torch.Tensor | None = None,
        n_each: int | None = None,
    ) -> None:
        self.n_each = n_each
        self.layer, self.n_layers, self.pass_index, self.is_prompt = layer, n_layers, pass_index, is_prompt
        self.before, self.after, self.slots, self.index, self.input_ids, self.n_tokens = (
            before,
            after,
            slots,
            index,
            input_ids,
            n_tokens,
        )
        self.pass_ids = pass_ids
        self._keys, self._attention_output = keys, attention_output
        self._logits, self._attention = logits, attention
        self.add_signal_flops = count_flops

    def logits(self, mask: torch.Tensor) -> torch.Tensor:
        """Logit lens of the K tokens in mask (B, M) bool, in row-major order: (K, V). Its cost goes into the ledger."""
        return self._logits(self.after[mask])

    def logit_entropy_nats(self, mask: torch.Tensor) -> torch.Tensor:
        """Entropy of the logit lens of the K tokens in mask (B, M): (K,) float32, in nats (paper 2.1)."""

        def entropy_nats(logits: torch.Tensor) -> torch.Tensor:
            log_p = logits.log_softmax(-1)
            return -(log_p.exp() * log_p).sum(-1)

        return self._of_logits(mask, entropy_nats)

    def logit_margin(self, mask: torch.Tensor) -> torch.Tensor:
        """By how much the logit lens of the K tokens in mask (B, M) prefers its first choice: (K,) float32, the difference of the two
        largest probabilities, 0 to 1 (CALM, arXiv 2207.07061)."""

        def margin(logits: torch.Tensor) -> torch.Tensor:
            first, second = logits.softmax(-1).topk(2, dim=-1).values.unbind(-1)
            return first - second

        return self._of_logits(mask, margin)

    def _of_logits(self, mask: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        selected = self.after[mask]
        if selected.shape[0] == 0:
            return selected.new_zeros(0, dtype=torch.float32)
        # In pieces: K x V logits of a long prompt and a large vocabulary would be gigabytes.
        return torch.cat([reduce(self._logits(piece).float()) for piece in selected.split(1024)])

    def attention_received(self, last_queries: int | None = 16, reduce: str = "mean") -> torch.Tensor:
        """Attention each token of the view gets in this layer from the last `last_queries` active tokens of its row: (B, M) float32.

        `mean` over heads and queries, or the `max` over both. None: from all active tokens. The queries' own tokens are included.

        Raises:
            ConfigError: the module did not say `wants_attention` for this layer, or an unknown `reduce`.
        """
        if reduce not in ("mean", "max"):
            raise ConfigError(f"attention_received(reduce={reduce!r}): give 'mean' or 'max'.")
        if self._attention is None:
            raise ConfigError(
                f"Attention was not kept at layer {self.layer}: the module must return True from wants_attention({self.layer})."
            )
        return self._attention(last_queries, reduce)

    @property
    def keys(self) -> torch.Tensor:
        """The tokens' own keys of this layer, as they are attended to: (B, H_kv, M, head_dim). Raises ConfigError as
        `attention_received`."""
        return self._watched(self._keys, "keys")

    @property
    def attention_output(self) -> torch.Tensor:
        """What the layer's attention adds to the residual stream: (B, M, D). Raises ConfigError as `attention_received`."""
        return self._watched(self._attention_output, "attention_output")

    def _watched(self, value: torch.Tensor | None, name: str) -> torch.Tensor:
        if value is None:
            raise ConfigError(
                f"view.{name} was not kept at layer {self.layer}: the module must return True from wants_attention({self.layer})."
            )
        return value


@dataclass(frozen=True)
class CacheView:
    """The K/V entries of one layer between two passes: what a module that merges or evicts them may look at.

    Attributes:
        layer, n_layers, pass_index: as in `LayerView`; the pass is the one that has just gone by.
        slots: (B, K) long, ascending within a row; present: (B, K) bool, False where there is no entry.
        size: (B, K) float32, original tokens that each entry stands for.
        n_seen: (B, 1) long, real tokens seen so far.
        n_new: columns since the prompt, or since entries were last merged.
        attention: (B, K) float32, attention each entry has received so far, summed over queries and averaged over heads; None unless
            a module's `sums_attention` asked for it.
        read_keys: gives `keys`.
    """

    layer: int
    n_layers: int
    pass_index: int
    slots: torch.Tensor
    present: torch.Tensor
    size: torch.Tensor
    n_seen: torch.Tensor
    n_new: int
    read_keys: Callable[[], torch.Tensor]
    attention: torch.Tensor | None = None

    @property
    def keys(self) -> torch.Tensor:
        """(B, H_kv, K, head_dim), unpacked when asked for."""
        return self.read_keys()
