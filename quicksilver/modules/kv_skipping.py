"""KV-cache Skipping: which tokens leave no K/V entry in deeper layers (paper 2.2, App. C)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from quicksilver.modules.calibration import Calibrated, Calibration, Thresholds, check_thresholds, halted_key
from quicksilver.modules.checks import Ends, TokenMask, check_known_ids, layer_to_act, marked, share_of
from quicksilver.modules.signals import AttentionReceived, Signal, lowest
from quicksilver.runtime import Architecture, ConfigError, LayerView, TokenPolicy, TokenState
from quicksilver.runtime.options import Count, Positive, Share, TokenIds


@dataclass(kw_only=True)
class KVSkipping(TokenPolicy, Calibrated):
    """Keep no K/V of tokens that later queries have no use for: neither stored nor attended (paper 2.2, App. C).

    `halted` (2.2): tokens as they halt. Causal. `attention` (C.2): tokens that go on, when in this layer the most attention any
    head of any observing query gives them is below `tau_kv`, or they are in the `skipped_share` that gets least (once, at
    `min_depth`). `halted_and_attention` (C.4): tokens as they halt, if that attention is below `tau_kv`. What later queries
    attend to is known in a prompt only, so the last two act in prompts only.

    Args:
        criterion: as above.
        tau_kv: 0 to 1; a number, one per layer, or a percentile of the attention that halted tokens get, "p95" (C.3).
        skipped_share: instead of `tau_kv`, for `attention`: this share of each row's real tokens.
        last_queries: the observing queries are the last ones of the prompt, which is cheap; None: all of them (C.2).
        min_depth: fraction of the layers gone through before a token may be skipped (2.2 "halting delay"); a token that halts
            earlier keeps what `Halting.missing_kv` gives it.
        keep_ids, keep_mask: tokens whose K/V always stay (2.2), by id, or by slot: a bool tensor (S,) or (B, S).
        protect_first: so do those of the first tokens, the attention sinks (arXiv 2309.17453).
        protect_last: and of the last tokens of a prompt, which makes the module non-causal. The observing queries always stay.
        calibration: a `Calibration` or the path of one; percentiles need it.
        lookahead: act outside prompts too although it looks ahead; every number it touches is marked.

    Raises:
        ConfigError: an option out of range, `tau_kv` and `skipped_share` both or neither where one is needed.
    """

    criterion: Literal["halted", "attention", "halted_and_attention"] = "halted"
    tau_kv: Annotated[Thresholds, partial(check_thresholds, high=1.0)] | None = None
    skipped_share: Share | None = None
    last_queries: Positive | None = 16
    min_depth: Share = 0.0
    keep_ids: TokenIds = ()
    keep_mask: TokenMask = None
    protect_first: Count = 4
    protect_last: Count = 0
    calibration: Calibration | Path | str | None = None
    lookahead: bool = False
    priority: ClassVar[int] = 20
    halts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._attention = AttentionReceived(self.last_queries, "max")
        if self.criterion == "attention" and (self.tau_kv is None) == (self.skipped_share is None):
            given = f"tau_kv={self.tau_kv!r} and skipped_share={self.skipped_share!r}"
            raise ConfigError(f"criterion='attention' needs one of tau_kv and skipped_share, not {given}.")
        if self.criterion == "halted_and_attention" and self.tau_kv is None:
            raise ConfigError("criterion='halted_and_attention' needs tau_kv: a number from 0 to 1, one per layer, or 'p95'.")

    @property
    def causal(self) -> bool:
        return self.criterion == "halted" and not self.protect_last

    @property
    def follows_halting(self) -> bool:
        return self.criterion != "attention"

    def compared(self) -> list[tuple[Signal, Thresholds | None]]:
        return [] if self.criterion == "halted" else [(self._attention, self.tau_kv)]

    def bind(self, architecture: Architecture) -> None:
        check_known_ids("keep_ids", self.keep_ids, architecture.vocab_size)
        self.first_layer = layer_to_act("min_depth", self.min_depth, architecture.n_layers, "skip K/V")
        if self.criterion != "halted":
            self._tau_kv = self.resolved("tau_kv", self.tau_kv, architecture, halted_key(self._attention.key))

    def acts_at(self, layer: int) -> bool:
        once = self.criterion == "attention" and self.skipped_share is not None
        return layer == self.first_layer if once else layer >= self.first_layer

    def wants_attention(self, layer: int) -> bool:
        return self.criterion != "halted" and self.acts_at(layer)

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        eligible = tokens.active if self.criterion == "attention" else tokens.newly_halted
        ends = Ends(self.protect_first, self.protect_last)
        eligible = eligible & ~marked(view, "keep", self.keep_ids, self.keep_mask, ends)
        if self.criterion != "halted":
            received = self._attention(view, tokens, eligible)
            if self.criterion == "attention" and self.skipped_share is not None:
                eligible = lowest(received, eligible & received.isfinite(), share_of(view.n_tokens, self.skipped_share))
            else:
                assert self._tau_kv is not None
                eligible = eligible & (received < self._tau_kv[view.layer])
        tokens.skip_kv(eligible)
