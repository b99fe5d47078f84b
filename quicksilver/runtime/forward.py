"""One forward of the model: what came in, what was decided about it, and what layers leave for the layers after them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.ledger import PassWork
from quicksilver.runtime.pass_state import PassState
from quicksilver.runtime.plan import KV, Attended, Packing
from quicksilver.runtime.translation import KVTranslator, PredictedKV

if TYPE_CHECKING:
    from quicksilver.runtime.plan import Arrangement


class Forward:
    """One pass, from the base model's pre-hook to its hook.

    Args:
        arguments: what the base model was called with, by name.
        n_layers: number of decoder layers.
        index: which pass of the run.
        decides_only: decisions are taken and not executed.
        remembers_kv: K and V are kept for `missing_kv="copy"`.

    Attributes:
        batch, n, seen: sequences, new columns, columns cached before.
        input_ids: (B, N) long, or None where the model was given embeddings; pass_ids: the same with -1 for padding.
        padded: some column, new or cached, is padding; past_valid: (B, seen) bool, those that are not, or None.
        past_real: (B,) long, real tokens before the pass; n_real: (B, 1) long, in it.
        is_prompt: nothing was cached before and there is more than one column.
        decisions: what the modules decide. executed: what is executed: the same, or what nobody touches where they only decide.
        carried: where the layer before left the states of its packed tokens out of what it returned: which columns, and (B, A, D).
        predicted: K and V of later layers, of the tokens in `prediction_packing`, by source layer of their translator.

    Raises:
        ConfigError: neither ids nor embeddings, an attention mask that is no padding mask.
    """

    def __init__(self, arguments: dict[str, Any], n_layers: int, index: int, *, decides_only: bool, remembers_kv: bool) -> None:
        ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
        source = ids if ids is not None else embeds
        if source is None:
            raise ConfigError("The model was called without input_ids or inputs_embeds.")
        self.batch, self.n = source.shape[:2]
        cache = arguments.get("past_key_values")
        self.seen: int = cache.get_seq_length() if cache is not None else 0
        self.index = index
        self.input_ids = ids
        mask = self._padding_mask(arguments.get("attention_mask"), source.device)
        self.padded = mask is not None
        self.past_valid = None if mask is None else mask[:, : self.seen]
        valid, slots = self._columns(mask, source.device)
        self.decisions = self._new_state(valid, slots, n_layers)
        self.executed = self._new_state(valid, slots, n_layers) if decides_only else self.decisions
        self.decisions.remembers_kv = remembers_kv
        self.pass_ids = ids.masked_fill(~valid, -1) if self.padded and ids is not None else ids
        self.is_prompt = self.seen == 0 and self.n > 1
        self.work = PassWork(layers=[])
        self.past_lengths: list[torch.Tensor | int] = []
        self.newest_kv: KV | None = None
        self.predicted: dict[int, PredictedKV] = {}
        self.arranged: tuple[tuple[object, ...], Arrangement] | None = None  # the planner's, for layers with the same tokens
        self.carried: tuple[Packing, torch.Tensor] | None = None
        self._packing: Packing | None = None
        self._kept: dict[str, Packing] | None = None
        self._prediction_packing: dict[int, Packing] = {}

    def _padding_mask(self, mask: Any, device: torch.device) -> torch.Tensor | None:
        """(B, seen + N) bool, or None where nothing is padding."""
        if mask is None:
            return None
        if not (isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] == self.seen + self.n):
            shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
            prepared = not isinstance(mask, torch.Tensor) or mask.ndim == 4
            hint = " A static cache prepares such masks: use a DynamicCache (leave out cache_implementation)." if prepared else ""
            raise ConfigError(
                f"attention_mask must be a (B, {self.seen + self.n}) padding mask over cached and new tokens; got {shape}.{hint}"
            )
        mask = mask.to(device).bool()
        return None if bool(mask.all()) else mask

    def _columns(self, mask: torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Which new columns are tokens, (B, N) bool, and their slots, (B, N) long."""
        if mask is None:
            self.past_real = torch.full((self.batch,), self.seen, device=device)
            self.n_real = torch.full((self.batch, 1), self.n, device=device)
            slots = torch.arange(self.seen, self.seen + self.n, device=device).expand(self.batch, -1)
            return torch.ones(self.batch, self.n, dtype=torch.bool, device=device), slots
        valid = mask[:, self.seen :]
        self.past_real = mask[:, : self.seen].sum(1)
        self.n_real = valid.sum(1, keepdim=True)
        return valid, self.past_real[:, None] + valid.long().cumsum(1) - 1

    def _new_state(self, valid: torch.Tensor, slots: torch.Tensor, n_layers: int) -> PassState:
        state = PassState(valid, slots, n_layers)
        state.tokens_per_row = None if self.padded else self.n
        return state

    @property
    def end(self) -> int:
        """Columns seen after the pass."""
        return self.seen + self.n

    @property
    def has_holes(self) -> bool:
        """Some row has padding between tokens."""
        if not self.padded:
            return False
        assert self.past_valid is not None
        tokens = torch.cat([self.past_valid, self.decisions.valid], dim=1).int()
        return bool(((tokens.diff(dim=1) == 1).sum(1) + tokens[:, 0] > 1).any())

    @property
    def is_plain(self) -> bool:
        """No decision is being executed and nothing is padding: the model's own call is right."""
        return not self.padded and self.executed.is_untouched

    def decided(self, changed_active: bool) -> None:
        """Note that modules decided; `changed_active`: tokens were halted or fused."""
        if self.executed is not self.decisions:
            return
        if changed_active:
            self._packing = None
        if changed_active or self.executed.any_kv_skipped:
            self._kept = None

    # -- which columns -----------------------------------------------------------------------------------------------------------

    def packing(self, layer: int) -> Packing:
        """The columns that take part in `layer`."""
        state = self.executed
        if self._packing is None or layer in state.resume_layers:
            self._packing = Packing.of(state.active(layer), state.n_active(layer))
            self._kept = None
        return self._packing

    def kept(self, layer: int) -> dict[str, Packing]:
        """The columns of halted tokens that are seen in `layer`, by where their K/V come from, but for predicted ones."""
        state = self.executed
        if self._kept is None:
            modes = sorted(state.kept_kv - {"predict"})
            self._kept = {mode: Packing.of(state.kept(layer, mode), state.n_kept(layer, mode)) for mode in modes}
        return self._kept

    def prediction_packing(self, layer: int, source_layer: int) -> Packing:
        """The columns whose K/V come from the translator of `source_layer`, as they were when their tokens halted."""
        state = self.executed
        if source_layer not in self._prediction_packing:
            halted = state.kept(layer, "predict") & (state.halt_layer == source_layer - 1)
            packing = Packing.of(halted, state.n_kept(layer, "predict", source_layer - 1))
            self._prediction_packing[source_layer] = packing
        packing = self._prediction_packing[source_layer]
        if layer in state.resume_layers:  # who takes part again has K/V of its own
            still = packing.take(state.kept(layer, "predict"))
            real = still if packing.real is None else still & packing.real
            packing = self._prediction_packing[source_layer] = Packing(packing.order, real, packing.width)
        return packing

    def with_carried(self, hidden: torch.Tensor) -> torch.Tensor:
        """States (B, N, D) as they enter a layer, with those put in that the layer before carried over."""
        if self.carried is None:
            return hidden
        (packing, packed), self.carried = self.carried, None
        return packing.put_all(hidden, packed)

    # -- K and V kept for later layers -------------------------------------------------------------------------------------------

    def predict(self, translator: KVTranslator, hidden: torch.Tensor) -> None:
        """Predict the K/V of all layers after the translator's source layer; hidden: (B, E, D), states entering that layer."""
        self.predicted[translator.source_layer] = translator.translate(hidden)

    def remember(self, packing: Packing, attended: Attended) -> None:
        """Keep each token's newest K, V of this pass, for `missing_kv="copy"`."""
        keys, values = attended.new_keys, attended.new_values
        if packing.order is None:
            self.newest_kv = (keys, values)
            return
        if self.newest_kv is None:
            shape = (keys.shape[0], keys.shape[1], self.n, keys.shape[3])
            self.newest_kv = (keys.new_zeros(shape), values.new_zeros(shape))
        index = packing.order[:, None, :, None]
        real = None if packing.real is None else packing.real[:, None, :, None]
        updated = []
        for old, new in zip(self.newest_kv, (keys, values), strict=True):
            where = index.expand(-1, old.shape[1], -1, old.shape[3])
            updated.append(old.scatter(2, where, new if real is None else torch.where(real, new, old.gather(2, where))))
        self.newest_kv = (updated[0], updated[1])
