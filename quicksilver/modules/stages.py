"""Stages of halting: before which layer, which tokens of a prompt stop, how many, and what later layers see of them (docs/design.md §4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import torch

from quicksilver.modules.checks import check_choice, check_count, check_number, layer_after
from quicksilver.modules.signals import Signal, SignalSpec, lowest, make_signal, share_of
from quicksilver.modules.thresholds import check_thresholds
from quicksilver.modules.translators import BoundTranslator
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.pass_state import TokenState
from quicksilver.runtime.view import LayerView

MISSING_KV_LABELS = {
    "drop": "dropped",
    "project": "projected",
    "copy": "copied",
    "zero": "zeroed",
    "predict": "predicted",
}  # by missing_kv
_LOWEST = {"position": "oldest", "random": "random", "attention": "least attended"}  # tokens of lowest score, by signal


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of halting.

    Args:
        before: the first layer that its tokens do not go through: a 0-based index (int), or a fraction of the depth (float).
        count: so many tokens of each row halt.
        share: this share of each row's own real tokens halts.
        rest: all tokens that are not protected halt.
        below: tokens whose score is below this halt: a number, or a percentile such as "p25". Of `count`, `share`, `rest` and
            `below` a stage gives exactly one.
        signal: the score; with `count` and `share` the tokens of lowest score halt. As `Halting.signal`. Not for `rest`.
        missing_kv: what later layers see of its tokens; None: what the module's `missing_kv` says.
        translator: for `predict`: the path of a fitted translator, or `embedded` for the one that ships with the model.
        protect_first, protect_last: tokens that this stage does not halt; None: as many as the module protects. Earlier stages do
            not halt them either, so that they are there when this stage is reached.

    Raises:
        ConfigError: an option out of range, none or several of the four amounts, `predict` without a translator.
    """

    before: int | float
    count: int | None = None
    share: float | None = None
    rest: bool = False
    below: float | str | None = None
    signal: SignalSpec | None = None
    missing_kv: str | None = None
    translator: Path | str | BoundTranslator | None = None
    protect_first: int | None = None
    protect_last: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.before, float):
            check_number("before", self.before, 0.0, 1.0)
        else:
            check_count("before", self.before, 1)
        given = [name for name in ("count", "share", "below") if getattr(self, name) is not None] + ["rest"] * bool(self.rest)
        if len(given) != 1:
            said = f"it gives {' and '.join(given)}" if given else "it gives none"
            raise ConfigError(f"a stage needs exactly one of count, share, rest and below, and {said}.")
        if self.count is not None:
            check_count("count", self.count, 1)
        if self.share is not None:
            check_number("share", self.share, 0.0, 1.0)
        if self.below is not None:
            check_thresholds("below", self.below)
        if self.rest and self.signal is not None:
            raise ConfigError(f"signal={self.signal!r} has no effect with rest=true, which halts every token: remove one.")
        if not self.rest and self.signal is None:
            raise ConfigError(f"{given[0]}={getattr(self, given[0])!r} needs a signal, such as position, drift or attention.")
        if self.signal is not None:
            make_signal(self.signal)  # an unknown one is refused here
        if self.missing_kv is not None:
            check_choice("missing_kv", self.missing_kv, MISSING_KV_LABELS)
        for name in ("protect_first", "protect_last"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))

    @property
    def score(self) -> Signal | None:
        """The signal as an object; None for `rest`."""
        return None if self.signal is None else make_signal(self.signal)

    @property
    def causal(self) -> bool:
        """Whether a token's halting reads tokens up to it only."""
        return self.below is not None and self.score is not None and self.score.causal

    def layer(self, n_layers: int) -> int:
        """First layer that its tokens do not go through."""
        return layer_after(self.before, n_layers) + 1 if isinstance(self.before, float) else int(self.before)

    def wanted(self, n_tokens: int) -> int | None:
        """Tokens of a row of `n_tokens` that `count` or `share` asks for; None: another amount."""
        if self.count is not None:
            return self.count
        return None if self.share is None else math.floor(n_tokens * self.share + 0.5)

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor, below: float | None) -> torch.Tensor:
        """Which of the `eligible` (B, M) bool halt: (B, M) bool. below: the threshold as a number, where there is one."""
        signal = self.score
        if signal is None:
            return eligible
        scores = signal(view, tokens, eligible)
        if below is not None:
            return eligible & (scores < below)
        k = torch.full_like(view.n_tokens, self.count) if self.count is not None else share_of(view.n_tokens, self.share or 0.0)
        return lowest(scores, eligible, k)

    def describe(self) -> str:
        """As a table says it: `96 oldest dropped @3`."""
        assert self.missing_kv is not None
        if self.rest:
            kept = f"{self.protect_first}+{self.protect_last}"
            which = "all" if kept == "0+0" else f"rest but {kept}"
        else:
            signal = self.score
            assert signal is not None
            if self.below is not None:
                which = f"{signal.name} < {self.below}"
            else:
                amount = f"{self.count}" if self.count is not None else f"{100 * (self.share or 0.0):g}%"
                which = f"{amount} {_LOWEST.get(signal.name, f'of lowest {signal.name}')}"
        return f"{which} {MISSING_KV_LABELS[self.missing_kv]} @{self.before}"


def stages_of(
    value: Sequence[Stage | Mapping], *, missing_kv: str, protect_first: int, protect_last: int | None
) -> tuple[Stage, ...]:
    """The stages that a configuration gives, with the module's options where they give none.

    Args:
        protect_last: None: 1, or 0 where all stages are causal.

    Raises:
        ConfigError: what `Stage` refuses; an unknown option; stages out of order; shares that add up to more than all;
            a stage after one that halts the rest.
    """
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence) or not len(value):
        raise ConfigError(f"stages={value!r} must be a list of stages, such as [{{before: 3, count: 96, signal: position}}].")
    stages = [_stage(i, entry) for i, entry in enumerate(value)]
    last = (0 if all(stage.causal for stage in stages) else 1) if protect_last is None else protect_last
    first = protect_first
    made: list[Stage] = []
    # From the last: what a later stage protects must still be there then.
    wanted_first, wanted_last = 0, 0
    for i in reversed(range(len(stages))):
        stage = stages[i]
        wanted_first = max(wanted_first, first if stage.protect_first is None else stage.protect_first)
        wanted_last = max(wanted_last, last if stage.protect_last is None else stage.protect_last)
        seen = missing_kv if stage.missing_kv is None else stage.missing_kv
        if (seen == "predict") != (stage.translator is not None):
            raise ConfigError(
                f"stages[{i}]: missing_kv={seen!r} needs a translator: give translator=embedded or the path of a fitted one."
                if seen == "predict"
                else f"stages[{i}]: translator={str(stage.translator)!r} has no effect with missing_kv={seen!r}: remove one."
            )
        made.insert(0, replace(stage, missing_kv=seen, protect_first=wanted_first, protect_last=wanted_last))
    _check_together(made)
    return tuple(made)


def _stage(i: int, entry: object) -> Stage:
    if isinstance(entry, Stage):
        return entry
    if not isinstance(entry, Mapping):
        raise ConfigError(f"stages[{i}]={entry!r} must be a mapping, such as {{before: 3, count: 96, signal: position}}.")
    options = {str(name): value for name, value in entry.items()}
    for name in options:
        check_choice(f"option of stages[{i}]", name, [field.name for field in fields(Stage)])
    if "before" not in options:
        raise ConfigError(f"stages[{i}] does not say before which layer: give before=3, or a fraction of the depth such as 0.2.")
    try:
        return Stage(**options)
    except ConfigError as error:
        raise ConfigError(f"stages[{i}]: {error}") from error


def _check_together(stages: Sequence[Stage]) -> None:
    shares = sum(stage.share or 0.0 for stage in stages)
    if shares > 1 + 1e-9:
        raise ConfigError(
            f"The shares of the stages add up to {shares:g}, more than all tokens: give shares of at most 1 together."
        )
    for i, (one, two) in enumerate(pairwise(stages)):
        if one.rest:
            raise ConfigError(f"stages[{i}] halts the rest, so stages[{i + 1}] has no tokens left: remove one.")
        if isinstance(one.before, float) == isinstance(two.before, float) and one.before >= two.before:
            raise ConfigError(_out_of_order(i, one, two))


def _out_of_order(i: int, one: Stage, two: Stage) -> str:
    return (
        f"stages[{i}] has before={one.before} and stages[{i + 1}] has before={two.before}: give stages in order of depth, "
        "one a layer."
    )


def layers_of(stages: Sequence[Stage], n_layers: int, resume_layers: int) -> list[int]:
    """For each stage the first layer that its tokens do not go through, in a model of `n_layers`.

    Raises:
        ConfigError: a stage that leaves no layer to save, two stages of one layer or out of order in this model.
    """
    last = n_layers - 1 - resume_layers
    layers = [stage.layer(n_layers) for stage in stages]
    for i, (stage, layer) in enumerate(zip(stages, layers, strict=True)):
        if not 1 <= layer <= last:
            resumed = f" and tokens resume in the last {resume_layers}" if resume_layers else ""
            raise ConfigError(
                f"stages[{i}]: before={stage.before} is layer {layer}, where halting saves nothing: the model has layers 0 to "
                f"{n_layers - 1}{resumed}, so give a layer from 1 to {last}."
            )
        if i and layer <= layers[i - 1]:
            raise ConfigError(_out_of_order(i - 1, stages[i - 1], stage))
    return layers


def halted_before(stages: Sequence[Stage], index: int, n_tokens: int) -> int | None:
    """How many tokens of a row of `n_tokens` the stages before `index` have halted; None: that depends on the data."""
    halted = 0
    for stage in stages[:index]:
        k = halted_by(stage, n_tokens, halted)
        if k is None:
            return None
        halted += k
    return halted


def halted_by(stage: Stage, n_tokens: int, halted: int) -> int | None:
    """How many tokens of a row of `n_tokens` the stage halts after `halted` of them; None: that depends on the data."""
    if stage.below is not None:
        return None
    assert stage.protect_first is not None
    assert stage.protect_last is not None
    free = max(0, n_tokens - halted - stage.protect_first - stage.protect_last)
    wanted = stage.wanted(n_tokens)
    return free if wanted is None else min(wanted, free)


def check_prompt(stages: Sequence[Stage], index: int, n_tokens: int) -> None:
    """Raises ConfigError where a prompt of `n_tokens` has fewer tokens than the stage's `count` needs."""
    stage = stages[index]
    halted = halted_before(stages, index, n_tokens)
    if stage.count is None or halted is None:
        return
    assert stage.protect_first is not None
    assert stage.protect_last is not None
    free = n_tokens - halted - stage.protect_first - stage.protect_last
    if stage.count > free:
        raise ConfigError(
            f"stages[{index}]: count={stage.count} is more than a prompt of {n_tokens} tokens has left: {halted} have halted before and "
            f"{stage.protect_first}+{stage.protect_last} are protected. Give at most {max(0, free)}, or a share."
        )
