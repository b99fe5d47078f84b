"""Modules that are fitted on a run's calibration text: controls of predicted K/V, and a ceiling of early exit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from quicksilver.fitting.fit import RIDGE, FitText, Sums, entering, fit_translators
from quicksilver.fitting.schedules import first_that_saves, layers_work
from quicksilver.measure.latency import shared_weight_copy
from quicksilver.modules.calibration import Fitted
from quicksilver.modules.fitted import EMBEDDED, BoundTranslator, Translator, check_weights, model_digest
from quicksilver.modules.staged_halting import PresetHalting, Schedule
from quicksilver.runtime.architecture import Architecture, architecture_of
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.ledger import LayerWork, head_flops
from quicksilver.runtime.module import TokenPolicy
from quicksilver.runtime.options import Count, InnerShare, Positive
from quicksilver.runtime.pass_state import TokenState
from quicksilver.runtime.translation import KVTranslator
from quicksilver.runtime.view import LayerView


# -- maps that know less -------------------------------------------------------------------------------------------------------------
@dataclass(kw_only=True)
class FittedPrediction(PresetHalting, Fitted):
    """`PresetHalting` with a map that is fitted by ridge regression on the calibration text of the run.

    What a fitted map must beat is a map that knows less, at the same schedule and so at the same work; with
    `drop_oldest=False` the work is as near as whole layers allow. All are fitted here on the same windows, so that nothing else differs between them.

    Args:
        control: `none`: states and K/V of the same token. `shuffled`: K/V of another token of the text. `mean`: the mean K and V.
        drop_oldest: False: no token is dropped; all tokens but the protected stop before one layer, the deepest that saves `save`
            of a prompt of `prompt_tokens` (static P@ℓ).
        prompt_tokens: for that choice.

    Raises:
        ConfigError: what `PresetHalting` refuses; a schedule of its own beside `drop_oldest=False`; in `fit`, too little text, or a budget
            that no layer reaches; by `apply`, a module that was not fitted.
    """

    control: Literal["none", "shuffled", "mean"] = "none"
    drop_oldest: bool = True
    prompt_tokens: Positive = 448
    translator: ClassVar[str] = EMBEDDED  # type: ignore[misc]  # no option: it is fitted here

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drop_oldest and self.schedule is not None:
            raise ConfigError("drop_oldest=false chooses its own schedule: give save instead of a schedule.")
        self._map: Translator | None = None

    @property
    def fitted(self) -> bool:
        return self._map is not None or self.missing_kv != "predict"

    def fit(self, model: Any, windows: torch.Tensor, batch_size: int = 8) -> None:
        """Fit the map from the layer at which the schedule stops tokens.

        Args:
            model: a causal language model of a known family.
            windows: (W, N) long, calibration text.
        """
        architecture = architecture_of(model)
        source = self._schedule(architecture).predict_before
        control = None if self.control == "none" else self.control
        self._map = fit_translators(architecture, FitText(windows, {}), [source], control=control, batch_size=batch_size)[source]

    def chosen(self, architecture: Architecture) -> tuple[Schedule, str | Path | BoundTranslator]:
        if self.missing_kv != "predict":
            return self._schedule(architecture), EMBEDDED
        if self._map is None:
            raise ConfigError("fitted_prediction has no map: call fit(model, windows) with calibration text first.")
        return self._schedule(architecture), self._map.bound(architecture)

    def _schedule(self, architecture: Architecture) -> Schedule:
        if self.drop_oldest or self.save is None:
            return super().chosen(architecture)[0]
        return static_schedule(architecture, self.save, self.prompt_tokens)


def static_schedule(architecture: Architecture, save: float, prompt_tokens: int = 448, protect_last: int = 32) -> Schedule:
    """All tokens but the first 4 and the last few stop before the deepest layer at which that saves the share `save` of a prompt.
    Raises ConfigError: none does."""
    schedules = (Schedule(1, 0.0, layer, 4, protect_last) for layer in range(architecture.n_layers - 2, 1, -1))
    if (found := first_that_saves(architecture, schedules, save, prompt_tokens)) is None:
        raise ConfigError(f"save={save:g}: no layer saves so much of {prompt_tokens} tokens by prediction alone: ask for less.")
    return found


# -- a ceiling of early exit ---------------------------------------------------------------------------------------------------------
WINDOW = (0.25, 0.75)  # of the depth: layers before which tokens may leave


@dataclass(frozen=True)
class Exit:
    """Where tokens leave, and with what they are read.

    Attributes:
        before: the first layer that they do not go through.
        head: (1 + D, D) float32; last state ≈ h + [1, h] · head.
        tau_nats: a token leaves whose KL(dense ‖ exit) is below it.
        share: of the calibration text's tokens that may leave: how many do.
        kl_nats: mean over all of them, the ones that stay as 0.
    """

    before: int
    head: torch.Tensor
    tau_nats: float
    share: float
    kl_nats: float

    @classmethod
    def at(cls, layer: int, head: torch.Tensor, kl_nats: torch.Tensor, share: float) -> Exit:
        """The exit by which `share` of the calibration text's tokens leave, of which each loses kl_nats (T,)."""
        tau = float(kl_nats.sort().values[min(len(kl_nats) - 1, round(share * len(kl_nats)))])
        leaving = kl_nats < tau
        return cls(layer, head, tau, float(leaving.float().mean()), float((kl_nats * leaving).mean()))


@dataclass(kw_only=True)
class OracleExit(TokenPolicy, Fitted):
    """Tokens leave before one layer where an oracle knows that it costs least; no rule that has to find out can do better.

    The oracle runs the dense model beside this one: a token leaves where KL(dense ‖ exit head's answer) is below a threshold. What it runs is
    in no ledger: that makes it an oracle. All else is paid for: layers, predicted K/V, the exit head. Exit head and K/V map are ridge
    regressions on calibration text. Of the layers in the middle half of the depth the one is taken at which the leaving tokens lose least
    there; the threshold is the quantile that saves `save` there.

    Causal but for the oracle: a decision reads the token and those before it, through all layers. `lookahead=true` marks that.
    It acts in passes that start a sequence. Rows of a batch keep different numbers of tokens and are computed as long as the longest: with one
    row a batch *executed* operations are those of its own tokens.

    Args:
        save: share of the executed operations of a window whose positions are all scored, its output head included.
        head: `fitted`, or `lens`: the model's own norm and output head on the state as it is.
        missing_kv: `predict`, or `project`: K/V by each later layer's own projection of the frozen state.
        protect_first: the first tokens never leave.

    Raises:
        ConfigError: in `fit`, too little text, or more asked for than leaving saves; by `apply`, a module that was
            not fitted, or that was fitted to other weights.
    """

    save: InnerShare = 0.2
    head: Literal["fitted", "lens"] = "fitted"
    missing_kv: Literal["predict", "project"] = "predict"
    protect_first: Count = 4
    lookahead: bool = False
    priority: ClassVar[int] = 10
    causal = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._exit: Exit | None = None
        self._map: Translator | None = None
        self._digest: str | None = None

    @property
    def fitted(self) -> bool:
        return self._exit is not None

    @property
    def exit(self) -> Exit:
        """What was fitted; raises ConfigError before `fit`."""
        if self._exit is None:
            raise ConfigError("oracle_exit has no exit head: call fit(model, windows) with calibration text first.")
        return self._exit

    @property
    def translators(self) -> dict[int, KVTranslator]:
        return {} if self._translator is None else {self.exit.before - 1: self._translator}

    @torch.no_grad()
    def fit(self, model: Any, windows: torch.Tensor, batch_size: int = 8) -> None:
        """Fit an exit head for each candidate layer on windows (W, N), take the layer that loses least, fit its K/V map."""
        arch = architecture_of(model)
        first, last = (round(part * arch.n_layers) for part in WINDOW)
        candidates = list(range(max(1, first), min(last, arch.n_layers - 2) + 1))
        has_head, n_tokens = self.head == "fitted", windows.shape[1]
        wanted = {layer: share_that_saves(arch, layer, self.save, n_tokens, has_head) for layer in candidates}
        shares = {layer: share for layer, share in wanted.items() if share is not None}
        if not shares:
            raise ConfigError(f"save={self.save:g}: not even all tokens leaving before layer {candidates[0]} do so: ask less.")
        heads = {layer: torch.zeros(1 + arch.width, arch.width) for layer in shares}
        if has_head:
            heads = _exit_heads(arch, windows, list(shares), batch_size, self.protect_first)
        costs: dict[int, list[torch.Tensor]] = {layer: [] for layer in shares}
        for batch in windows.split(batch_size):
            states, dense = _states(arch, batch.to(model.device))
            for layer in shares:
                kl = _kl_nats(arch, dense, _read(states[layer], heads[layer].to(dense.device)))
                costs[layer].append(kl[:, self.protect_first :].flatten().cpu())
        of_those_that_may = n_tokens / max(1, n_tokens - self.protect_first)
        exits = [
            Exit.at(layer, heads[layer], torch.cat(costs[layer]), min(1.0, share * of_those_that_may))
            for layer, share in shares.items()
        ]
        self._exit = min(exits, key=lambda one: one.kl_nats)
        if self.missing_kv == "predict":
            before = self._exit.before
            self._map = fit_translators(arch, FitText(windows, {}), [before], batch_size=batch_size)[before]
        self._digest = model_digest(model)

    def bind(self, architecture: Architecture) -> None:
        self._head = self.exit.head.to(architecture.model.device)
        check_weights("oracle_exit", self._digest, architecture, "fit it again")
        self._translator: BoundTranslator | None = None if self._map is None else self._map.bound(architecture)
        self._architecture = architecture
        self._oracle = architecture_of(shared_weight_copy(architecture.model))  # plain, whatever happens to the model

    def required_layers(self) -> frozenset[int]:
        return frozenset({self.exit.before - 1})

    def acts_at(self, layer: int) -> bool:
        return layer == self.exit.before - 1

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        if not view.is_prompt or view.pass_ids is None:
            return
        known = view.pass_ids >= 0
        dense = self._oracle.model(input_ids=view.pass_ids.clamp(min=0), attention_mask=known.long(), use_cache=False).logits
        dense = dense.gather(1, view.index[..., None].expand(-1, -1, dense.shape[-1])).float().log_softmax(-1)
        read = _read(view.after, self._head)
        leaving = tokens.active & (view.slots >= self.protect_first) & (_kl_nats(self._oracle, dense, read) < self.exit.tau_nats)
        tokens.halt(leaving, missing_kv=self.missing_kv, translator=self._translator)
        view.add_signal_flops(2 * self._head.numel() * int(leaving.sum()) if self.head == "fitted" else 0)
        # The frozen states come back before the final norm; there those that left are what the exit head makes of them.
        left = torch.zeros_like(known).scatter(1, view.index, leaving)
        _once(self._architecture.final_norm, left, self._head)


def _once(norm: nn.Module, left: torch.Tensor, head: torch.Tensor) -> None:
    """Exchange the states of `left` (B, N) when all of a pass's next enter the final norm; then it is gone."""

    def before(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        states = args[0]
        if states.shape[:2] != left.shape:
            return None
        handle.remove()
        return (torch.where(left[..., None], _read(states, head), states), *args[1:])

    handle = norm.register_forward_pre_hook(before)


def _read(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """The exit head's last state: (..., D) -> (..., D)."""
    return states + (head[0] + states.float() @ head[1:]).to(states.dtype)


def _kl_nats(arch: Architecture, dense: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """KL(dense ‖ exit): log-probabilities (B, M, V) and last states (B, M, D) -> (B, M); row by row, as logits are large."""
    exits = (arch.logits(state).float().log_softmax(-1) for state in last)
    return torch.stack([(row.exp() * (row - other)).sum(-1) for row, other in zip(dense, exits, strict=True)])


def _states(arch: Architecture, ids: torch.Tensor) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """States entering each layer (L: after the last), (B, N, D) each, and the dense log-probabilities (B, N, V)."""
    found: dict[int, torch.Tensor] = {}
    with entering(arch, found.__setitem__):
        logits = arch.model(input_ids=ids, use_cache=False).logits
    return found, logits.float().log_softmax(-1)


def _exit_heads(
    arch: Architecture, windows: torch.Tensor, layers: Sequence[int], batch_size: int, protect_first: int
) -> dict[int, torch.Tensor]:
    """Ridge regression of what the layers from each on add to a state: (1 + D, D) float32 by layer."""
    sums = {layer: Sums(arch.width, arch.width) for layer in layers}
    for batch in windows.split(batch_size):
        states: dict[int, torch.Tensor] = {}
        with entering(arch, states.__setitem__):
            arch.model(input_ids=batch.to(arch.model.device), use_cache=False, logits_to_keep=1)
        last = states[arch.n_layers][:, protect_first:].flatten(0, 1).float()
        for layer, one in sums.items():
            own = states[layer][:, protect_first:].flatten(0, 1).float()
            one.add_targets(one.add(own), last - own)
    return {layer: one.solution(RIDGE, f"entering layer {layer}").float() for layer, one in sums.items()}


def share_that_saves(arch: Architecture, before: int, save: float, n_tokens: int, has_head: bool) -> float | None:
    """The least share of tokens that must leave before a layer to save so much of a scored window; None: not even all. `has_head`: an exit
    head reads each of them."""
    head = head_flops(arch, n_tokens).executed
    whole = arch.n_layers * LayerWork(1, n_tokens, None).flops(arch) + head
    for leaving in range(n_tokens + 1):
        active = [n_tokens] * before + [n_tokens - leaving] * (arch.n_layers - before)
        work = layers_work(arch, active, {before: leaving})
        exit_head = 2 * (1 + arch.width) * arch.width * leaving * has_head
        if sum(one.flops(arch) for one in work) + head + exit_head <= whole * (1 - save):
            return leaving / n_tokens
    return None
