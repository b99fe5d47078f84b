"""What is decided about the tokens of one pass, and the verbs with which a module decides.

A pass is one forward of the model: N new columns of B sequences, after whatever the cache holds. Decisions live in pass coordinates
(B, N); a module works in view coordinates (B, M), which are the packed active tokens under `compact` and all tokens under `masked`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.phases import phase

if TYPE_CHECKING:
    from quicksilver.runtime.translation import KVTranslator, MLPMap
    from quicksilver.runtime.view import LayerView

MissingKV = Literal["drop", "project", "copy", "zero", "predict"]
MISSING_KV: tuple[str, ...] = ("drop", "project", "copy", "zero", "predict")  # the code of a mode is its index


class Decisions:
    """Which tokens take part where, from the decisions of one pass: `PassState` while it goes on, `PassTrace` afterwards."""

    valid: torch.Tensor
    halt_layer: torch.Tensor
    halted_kv: torch.Tensor
    resume_layer: torch.Tensor
    kv_layer: torch.Tensor
    fused_layer: torch.Tensor

    def active(self, layer: int) -> torch.Tensor:
        """(B, N) bool: takes part in `layer`."""
        return self.valid & ((self.halt_layer >= layer) | (self.resume_layer <= layer)) & (self.fused_layer >= layer)

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


class PassState(Decisions):
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
        bits: (B, N) uint8, width of its activations and K/V from the next layer on; 16 = untouched.
        fusions, precisions: what was decided, in order.
        mlp_maps: what stands in for the MLP of a layer; mappings: for which tokens, one or none.
        merges, evictions: what was merged in the cache, and what left it, after the pass.
    """

    def __init__(self, valid: torch.Tensor, slots: torch.Tensor, n_layers: int) -> None:
        self.valid, self.slots, self.n_layers = valid, slots, n_layers
        last, self.resume_layer, self.halted_kv, self.bits = _untouched(*valid.shape, n_layers, valid.device)
        self.halt_layer = self.kv_layer = self.fused_layer = last
        self.size = torch.ones(valid.shape, dtype=torch.float32, device=valid.device)
        self.fusions: list[Fusion] = []
        self.precisions: list[Precision] = []
        self.mlp_maps: Mapping[int, MLPMap] = {}
        self.mappings: list[MLPMapping] = []
        self.merges: list[CacheMerge] = []
        self.evictions: list[Eviction] = []
        # Host-side facts, so that the common cases need no look at the device.
        self.any_halted = self.any_kv_skipped = False
        self.remembers_kv = True
        self.kept_kv: set[str] = set()  # missing_kv modes other than drop that some token may be under
        self.resume_layers: set[int] = set()
        self.translators: dict[int, KVTranslator] = {}  # of missing_kv=predict, by source layer
        self.tokens_per_row: int | None = None  # of every row, where no row is padded
        self.counted: list[CountedHalt] | None = []  # None: a halt did not say how many it took

    @property
    def is_untouched(self) -> bool:
        """Nothing has been decided."""
        return not (self.any_halted or self.any_kv_skipped or self.fusions or self.precisions or self.mappings)

    def left(self, layer: int | None = None) -> Known:
        """Of the tokens that take part in `layer` (None: have not been halted)."""
        if self.tokens_per_row is None or self.counted is None:
            return NOTHING_KNOWN
        gone = [halt for halt in self.counted if layer is None or halt.resume_layer > layer]
        n, columns = self.tokens_per_row - sum(halt.tokens for halt in gone), _columns_of(gone)
        if columns is None:
            return Known(n)
        left: Ranges = ((0, self.tokens_per_row),)
        for start, stop in columns:
            left = split_ranges(left, start, stop - start)[1]
        return Known(n, left)

    def known_kept(self, layer: int, mode: str, halted_after: int | None = None) -> Known:
        """Of the tokens that `kept` has; of those that halted after layer `halted_after` (None: any)."""
        if self.tokens_per_row is None or self.counted is None or self.any_kv_skipped:
            return NOTHING_KNOWN
        seen = [halt for halt in self.counted if halt.missing_kv == mode and halt.resume_layer > layer]
        seen = [halt for halt in seen if halted_after in (None, halt.layer)]
        return Known(sum(halt.tokens for halt in seen), _columns_of(seen))

    def active(self, layer: int) -> torch.Tensor:
        if not (self.any_halted or self.fusions):
            return self.valid
        if not (self.resume_layers or self.fusions):
            return self.valid & (self.halt_layer >= layer)
        return super().active(layer)

    def representatives(self) -> torch.Tensor:
        """(B, N) long: the column that carries each token in the end; its own for a token that was not fused."""
        columns = torch.arange(self.valid.shape[1], device=self.valid.device).expand_as(self.valid)
        for fusion in self.fusions:
            columns = fusion.into.gather(1, columns)
        return columns


@lru_cache(maxsize=16)
def _untouched(rows: int, columns: int, n_layers: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Fields of a pass in which nothing is decided: `PassState` replaces them and never writes into them, so passes share them."""
    drop = MISSING_KV.index("drop")
    of_fields = (n_layers - 1, torch.int16), (n_layers, torch.int16), (drop, torch.uint8), (16, torch.uint8)
    with torch.inference_mode(False):
        return tuple(torch.full((rows, columns), value, dtype=dtype, device=device) for value, dtype in of_fields)


Ranges = tuple[tuple[int, int], ...]
"""Columns in ascending order, as ranges: the first of each, and the one behind its last."""


def split_ranges(ranges: Ranges, first: int, n: int) -> tuple[Ranges, Ranges]:
    """The first `n` columns from column `first` on, and the others."""
    taken, others = list[tuple[int, int]](), list[tuple[int, int]]()
    for start, stop in ranges:
        low = min(max(start, first), stop)
        high = min(stop, low + n)
        n -= high - low
        taken.append((low, high))
        others += [(start, low), (high, stop)]
    return join_ranges(taken), join_ranges(others)


def join_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges that share no column, in order."""
    return tuple(sorted((start, stop) for start, stop in ranges if start < stop))


class Known(NamedTuple):
    """What the host knows of some tokens of a pass without asking the device.

    Attributes:
        n: how many each row has, where all rows have as many.
        ranges: their columns, where those are the same in all rows.
    """

    n: int | None = None
    ranges: Ranges | None = None


NOTHING_KNOWN = Known()


@dataclass(frozen=True)
class CountedHalt:
    """A halt after `layer` that took as many tokens of every row: `tokens`, until `resume_layer`; later layers see of them what
    `missing_kv` says. `ranges`: their columns, where the host knows them."""

    layer: int
    tokens: int
    resume_layer: int
    missing_kv: str
    ranges: Ranges | None = None


def _columns_of(halts: Sequence[CountedHalt]) -> Ranges | None:
    """All that they took; None: of some the host does not know."""
    if any(halt.ranges is None for halt in halts):
        return None
    return join_ranges(columns for halt in halts for columns in halt.ranges or ())


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
class MLPMapping:
    """After `layer`, maps were put in the place of MLPs: `tokens` (B, N) bool, for which."""

    layer: int
    tokens: torch.Tensor


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


class TokenState:
    """The verbs, in the coordinates of one view. Masks are (B, M) bool; tokens outside `active` are left alone.

    Attributes:
        active: (B, M) bool, real tokens of this view that have not been halted.
        newly_halted: (B, M) bool, halted by a module at this layer.
    """

    def __init__(self, state: PassState, view: LayerView, index: torch.Tensor | None, real: torch.Tensor) -> None:
        self._state, self._view, self._layer = state, view, view.layer
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
        return self._state.left().n

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
        translator: KVTranslator | None = None,
        resume_layers: int = 0,
        count_per_row: int | None = None,
        oldest_from: int | None = None,
    ) -> None:
        """Freeze tokens from the next layer on.

        Args:
            mask: (B, M) bool.
            missing_kv: what later layers see of a halted token: nothing (`drop`), K/V projected from its frozen state (`project`),
                the K/V of the layer it halted at (`copy`), zeros (`zero`: a zero key still draws attention, docs/conflicts.md #9), K/V that
                `translator` predicts from its frozen state (`predict`).
            translator: of `predict`; its source layer is the next one.
            resume_layers: it takes part again in that many last layers.
            count_per_row: how many active tokens of each row `mask` has, where the module knows without asking the device: as long
                as all halts of a pass say so, the shapes that follow cost no host sync.
            oldest_from: with `count_per_row`, these are each row's oldest active tokens from this slot on; then they are cut out whole
                and need no sorting.

        Raises:
            ConfigError: a mask of another shape or dtype, an unknown `missing_kv`, `resume_layers` outside 0..L, `predict` without a
                translator or with one of another source layer.
            RuntimeError: another number than `count_per_row`, others than `oldest_from` says (on a GPU raised later, by the device).
        """
        state = self._state
        self._check_given("halt(mask)", mask, torch.bool)
        self._check_halt(missing_kv, translator, resume_layers)
        if self._layer >= state.n_layers - 1:
            return  # nothing is left to save
        mask = mask & self.active
        self._count_halt(mask, missing_kv, resume_layers, count_per_row, oldest_from)
        state.halt_layer = self._write(state.halt_layer, mask, self._layer)
        if missing_kv != "drop" or state.kept_kv:  # else `drop` is what is written there already
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

    def _check_given(self, what: str, given: torch.Tensor, dtype: torch.dtype) -> None:
        """Refuse what is not one entry a token of the view, (B, M), of that dtype."""
        if given.dtype is not dtype or given.shape != self.active.shape:
            seen = f"{str(given.dtype).removeprefix('torch.')} {tuple(given.shape)}"
            asked = f"{str(dtype).removeprefix('torch.')} {tuple(self.active.shape)}"
            raise ConfigError(f"{what} at layer {self._layer} was given {seen}. Give {asked}, one entry a token of the view.")

    def _check_halt(self, missing_kv: str, translator: KVTranslator | None, resume_layers: int) -> None:
        state = self._state
        if missing_kv not in MISSING_KV:
            raise ConfigError(f"missing_kv={missing_kv!r} is not one of {', '.join(MISSING_KV)}.")
        if missing_kv == "copy" and not state.remembers_kv:
            raise ConfigError("missing_kv='copy' needs K/V that were not remembered: the module must return True from copies_kv.")
        if not 0 <= resume_layers <= state.n_layers:
            raise ConfigError(f"resume_layers={resume_layers} must lie between 0 and the model's {state.n_layers} layers.")
        if (missing_kv == "predict") != (translator is not None):
            raise ConfigError(
                f"missing_kv={missing_kv!r} {'needs a translator: give' if translator is None else 'takes no translator: leave out'} "
                "halt(translator=...)."
            )
        if translator is None:
            return
        if translator.source_layer != self._layer + 1:
            raise ConfigError(
                f"The translator reads states entering layer {translator.source_layer}, and tokens halt after layer {self._layer}: "
                f"halt them after layer {translator.source_layer - 1}."
            )
        if state.translators.get(translator.source_layer, translator) is not translator:
            raise ConfigError(f"Two translators for tokens that halt after layer {self._layer}: give one.")

    def _count_halt(
        self, mask: torch.Tensor, missing_kv: str, resume_layers: int, count_per_row: int | None, oldest_from: int | None
    ) -> None:
        """Note how many tokens of each row halt, and which; mask (B, M) of active ones."""
        state = self._state
        if count_per_row is None:
            state.counted = None
            return
        torch._assert_async(
            (mask.sum(1) == count_per_row).all(),
            f"halt(count_per_row={count_per_row}): a row's mask has another number of active tokens.",
        )
        left, ranges = state.left().ranges, None
        if left is not None and oldest_from is not None and self._view.is_prompt:
            ranges, _ = split_ranges(left, oldest_from, count_per_row)
            old = self.active & (self._view.slots >= oldest_from)
            torch._assert_async(
                (mask == (old & (old.cumsum(1) <= count_per_row))).all(),
                f"halt(oldest_from={oldest_from}): a row's mask has others than its oldest active tokens.",
            )
        if state.counted is not None:
            state.counted.append(CountedHalt(self._layer, count_per_row, state.n_layers - resume_layers, missing_kv, ranges))

    def skip_kv(self, mask: torch.Tensor) -> None:
        """No K/V entry: for a newly halted token while it is halted, for an active one from the next layer on. mask: (B, M) bool.

        Raises:
            ConfigError: a mask of another shape or dtype.
        """
        state = self._state
        self._check_given("skip_kv(mask)", mask, torch.bool)
        state.halted_kv = self._write(state.halted_kv, mask & self.newly_halted, MISSING_KV.index("drop"))
        first = self._read(state.kv_layer) == state.n_layers - 1  # what has none lost it after an earlier layer
        state.kv_layer = self._write(state.kv_layer, mask & self.active & first, self._layer)
        state.any_kv_skipped = True

    @phase("fuse")
    def fuse(self, into: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Merge tokens: each goes into the super-token at column `into` of the view, which from the next layer on alone is computed and
        has K/V. The super-token's state becomes the weighted mean of its parts, at once: modules asked later see it.

        Args:
            into: (B, M) long, a token's own column where nothing shall happen. A target must be active, lie at a later slot and go into
                itself; entries of inactive tokens are ignored.
            weight: (B, M) float, share of each part in the mean; None: the number of original tokens it stands for.

        Raises:
            ConfigError: another shape or dtype; a target that is inactive, earlier, or itself merged away; a weight that is not positive.
        """
        state, view = self._state, self._view
        self._check_given("fuse(into)", into, torch.int64)
        if weight is not None:
            self._check_given("fuse(weight)", weight, weight.dtype)
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
        columns = into.clone()
        if self._index is not None:  # of the view; here those of the pass
            columns = torch.arange(state.valid.shape[1], device=into.device).expand_as(state.valid)
            columns = columns.scatter(1, self._index, self._index.gather(1, into))
        state.fusions.append(Fusion(self._layer, columns, self._write_values(torch.ones_like(state.size), weight)))
        self.active = self.active & ~moves

    def map_mlp(self, mask: torch.Tensor, maps: Mapping[int, MLPMap]) -> None:
        """In later layers that `maps` has, a map stands in for the MLP of these tokens. mask: (B, M) bool.

        Raises:
            ConfigError: a mask of another shape or dtype, a second call in one pass.
        """
        state = self._state
        self._check_given("map_mlp(mask)", mask, torch.bool)
        if state.mappings:
            raise ConfigError("Two modules replace MLPs by maps: give one.")
        state.mlp_maps = {layer: one for layer, one in maps.items() if layer > self._layer}
        tokens = self._write(torch.zeros_like(state.valid), mask & self.active, True)
        state.mappings.append(MLPMapping(self._layer, tokens))

    def set_bits(self, mask: torch.Tensor, bits: int) -> None:
        """Quantise tokens to `bits` from the next layer on: the inputs of linear layers, and their K/V. mask: (B, M) bool.

        Raises:
            ConfigError: a mask of another shape or dtype, or a width other than 2, 4, 8 or 16.
        """
        self._check_given("set_bits(mask)", mask, torch.bool)
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
