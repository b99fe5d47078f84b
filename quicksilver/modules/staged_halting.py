"""Halting in stages: at each of a few layers some tokens of a prompt stop, each stage by its own rule (docs/design.md §4).

`StagedHalting` takes the stages as they are given. `PresetHalting` has two, chosen for a model on calibration text (docs/predicted-kv.md): before
layer d the oldest tokens are dropped, before layer p all others stop but the first and the last few, and the K/V of the layers after p are
predicted. Which d, p and how many lies beside the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import yaml

from quicksilver.modules import translators
from quicksilver.modules.checks import layer_after
from quicksilver.modules.fitted import MODELS_FOLDER, model_digest
from quicksilver.modules.halting import HaltingPolicy
from quicksilver.modules.signals import Signal, SignalSpec, lowest, make_signal, share_of
from quicksilver.modules.thresholds import Calibrated, Calibration, Thresholds, is_percentile, resolve_thresholds
from quicksilver.modules.translators import EMBEDDED, BoundTranslator, Translator, translator_for
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import TokenPolicy
from quicksilver.runtime.options import Count, InnerShare, Options, Positive, Share, check_choice, check_count, check_number
from quicksilver.runtime.pass_state import MISSING_KV, MissingKV, TokenState
from quicksilver.runtime.reading import read_bytes
from quicksilver.runtime.translation import KVTranslator
from quicksilver.runtime.view import LayerView

# -- stages ------------------------------------------------------------------------------------------------------------------------


MISSING_KV_LABELS = {
    "drop": "dropped",
    "project": "projected",
    "copy": "copied",
    "zero": "zeroed",
    "predict": "predicted",
}  # by missing_kv
_LOWEST = {"position": "oldest", "random": "random", "attention": "least attended"}  # tokens of lowest score, by signal


@dataclass(frozen=True, kw_only=True)
class Stage(Options):
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
    count: Positive | None = None
    share: Share | None = None
    rest: bool = False
    below: Thresholds | None = None
    signal: SignalSpec | None = None
    missing_kv: MissingKV | None = None
    translator: Path | str | BoundTranslator | None = None
    protect_first: Count | None = None
    protect_last: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.before, float):
            check_number("before", self.before, 0.0, 1.0)
        else:
            check_count("before", self.before, 1)
        given = [name for name in ("count", "share", "below") if getattr(self, name) is not None] + ["rest"] * bool(self.rest)
        if len(given) != 1:
            said = f"it gives {' and '.join(given)}" if given else "it gives none"
            raise ConfigError(f"a stage needs exactly one of count, share, rest and below, and {said}.")
        if self.rest and self.signal is not None:
            raise ConfigError(f"signal={self.signal!r} has no effect with rest=true, which halts every token: remove one.")
        if not self.rest and self.signal is None:
            raise ConfigError(f"{given[0]}={getattr(self, given[0])!r} needs a signal, such as position, drift or attention.")
        if self.signal is not None:
            make_signal(self.signal)  # an unknown one is refused here

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
    if not value:
        raise ConfigError("stages=[] names no stage: give one or more, such as [{before: 3, count: 96, signal: position}].")
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
        made.insert(0, replace(stage, missing_kv=cast(MissingKV, seen), protect_first=wanted_first, protect_last=wanted_last))
    _check_together(made)
    return tuple(made)


def _stage(i: int, entry: Stage | Mapping[str, Any]) -> Stage:
    if isinstance(entry, Stage):
        return entry
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


# -- the module --------------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class StagedHalting(HaltingPolicy, Calibrated):
    """Tokens of a prompt halt in stages, each with its own layer, amount, signal and `missing_kv`.

    Numbers and shares are of each row's own real tokens. It reads the whole prompt, so it acts in prompts only, unless every stage
    is a threshold on a causal signal.

    Args:
        stages: `Stage`s, or mappings of their options, in order of depth. `missing_kv`, `protect_first` and `protect_last` of the
            module are for stages that give none; forced tokens halt at the first stage.
        calibration: a `Calibration` or the path of one; percentiles in `below` need it.

    Raises:
        ConfigError: what `Stage` refuses; stages out of order, or that halt more than there is; by `bind`, a stage that leaves no
            layer to save; in a run, a `count` larger than what a prompt has left.
    """

    stages: Sequence[Stage | Mapping[str, Any]] = (
        {"before": 0.2, "share": 0.2, "signal": "position", "missing_kv": "drop"},
        {"before": 0.5, "share": 0.4, "signal": "attention", "missing_kv": "drop"},
    )
    missing_kv: MissingKV = "drop"
    protect_first: Count = 4
    protect_last: Count | None = 1
    window: tuple[float, float] = field(default=(0.0, 1.0), init=False)
    calibration: Calibration | Path | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stages = stages_of(
            self.stages, missing_kv=self.missing_kv, protect_first=self.protect_first, protect_last=self.protect_last
        )

    @property
    def chooses_causally(self) -> bool:  # type: ignore[override]
        return all(stage.causal for stage in self._stages)

    @property
    def protected_last(self) -> int:
        return self._stages[0].protect_last or 0  # no later stage protects more

    @property
    def copies_kv(self) -> bool:
        return any(stage.missing_kv == "copy" for stage in self._stages)

    def calibration_signals(self) -> list[Signal]:
        if self.calibration is not None:
            return []
        return [signal for stage in self._stages if is_percentile(stage.below) and (signal := stage.score) is not None]

    def bind(self, architecture: Architecture) -> None:
        for i, stage in enumerate(self._stages):
            if stage.missing_kv not in MISSING_KV:
                raise ConfigError(
                    f"stages[{i}]: missing_kv={stage.missing_kv!r} cannot be executed by this version: give one of "
                    f"{', '.join(MISSING_KV)}."
                )
        layers = layers_of(self._stages, architecture.n_layers, self.resume_layers)
        self._number_of = {layer - 1: i for i, layer in enumerate(layers)}  # by the layer that it is decided after
        self.first_layer, self.last_layer = layers[0] - 1, layers[-1] - 1
        self._translators = {
            layer: translator_for(architecture, self._stages[i].translator or EMBEDDED, layer + 1)
            for layer, i in self._number_of.items()
            if self._stages[i].missing_kv == "predict"
        }
        self._tau_below: dict[int, float] = {}
        for layer, i in self._number_of.items():
            stage = self._stages[i]
            if stage.below is not None and stage.score is not None:
                taus = resolve_thresholds(f"stages[{i}].below", stage.below, architecture, self.calibration, stage.score.key)
                self._tau_below[layer] = taus[layer]

    def required_layers(self) -> frozenset[int]:
        return frozenset(self._number_of)

    def acts_at(self, layer: int) -> bool:
        return layer in self._number_of

    def wants_attention(self, layer: int) -> bool:
        signal = self._stages[self._number_of[layer]].score if self.acts_at(layer) else None
        return signal is not None and signal.needs_attention

    def protected_at(self, layer: int) -> tuple[int, int]:
        stage = self._stages[self._number_of[layer]]
        return stage.protect_first or 0, stage.protect_last or 0

    def missing_kv_at(self, layer: int) -> str:
        return self._stages[self._number_of[layer]].missing_kv or self.missing_kv

    def halted_of(self, layer: int, n_tokens: int, n_left: int) -> int | None:
        i = self._number_of[layer]
        before = halted_before(self._stages, i, n_tokens)
        # Another module may have halted tokens that this stage protects: then only the device knows how many are left.
        return halted_by(self._stages[i], n_tokens, before) if before is not None and n_left == n_tokens - before else None

    def _count_per_row(self, view: LayerView, tokens: TokenState) -> int | None:
        # Outside of a prompt (`lookahead`) the protected tokens are not in the pass.
        return super()._count_per_row(view, tokens) if view.is_prompt else None

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        i = self._number_of[view.layer]
        if view.is_prompt and self._stages[i].count is not None:
            check_prompt(self._stages, i, int(view.n_tokens.min()) if view.tokens_per_row is None else view.tokens_per_row)
        return self._stages[i].choose(view, tokens, eligible, self._tau_below.get(view.layer))

    def describe(self) -> str:
        """One line for a table: `96 oldest dropped @3, rest but 4+32 predicted @10`."""
        return ", ".join(stage.describe() for stage in self._stages)


# -- two stages, chosen for a model ------------------------------------------------------------------------------------------------


SCHEDULES_FILE = "schedules.yaml"
REMEDY = "give schedule={drop_before, drop_share, predict_before, protect_last} and a translator, or fit and search: docs/predicted-kv.md"


@dataclass(frozen=True)
class Schedule(Options):
    """Which tokens of a prompt stop where.

    Args:
        drop_before: the layer (from 0) before which the oldest stop and are dropped.
        drop_share: how many, as a share of the prompt.
        predict_before: the layer before which all others stop, but the protected; their K/V are predicted from there.
        protect_first, protect_last: tokens that go through all layers.

    Raises:
        ConfigError: a share outside [0, 1], layers out of order.
    """

    drop_before: Positive
    drop_share: Share
    predict_before: Positive
    protect_first: Count = 4
    protect_last: Count = 32
    prefix: ClassVar[str] = "schedule."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drop_before >= self.predict_before:
            raise ConfigError(
                f"schedule: tokens are dropped before layer {self.drop_before} and predicted before layer {self.predict_before}: drop earlier "
                "than you predict."
            )

    def __str__(self) -> str:
        dropped = f"{100 * self.drop_share:.3g}% d@{self.drop_before} + " if self.drop_share else ""
        return f"{dropped}P@{self.predict_before}/{self.protect_last}"

    def halting(self, missing_kv: str = "predict", translator: str | Path | BoundTranslator = EMBEDDED) -> StagedHalting:
        """The module that does it, with another `missing_kv` for the second stage where that is compared."""
        dropped = {"before": self.drop_before, "share": self.drop_share, "signal": "position", "missing_kv": "drop"}
        stopped: dict[str, Any] = {"before": self.predict_before, "rest": True, "missing_kv": missing_kv}
        if missing_kv == "predict":
            stopped["translator"] = translator
        stages = [dropped, stopped] if self.drop_share else [stopped]
        return StagedHalting(stages=stages, protect_first=self.protect_first, protect_last=self.protect_last)


@dataclass(kw_only=True)
class PresetHalting(TokenPolicy):
    """Halting by a `Schedule` (`P@ℓ`): the model's own at a budget, or one that is given.

    Acts in prompts only, as where a prompt ends decides who stops.

    Args:
        save: share of the prompt's executed FLOPs for which the model's schedule was chosen, 0 to 1.
        schedule: a file of `quicksilver schedule`, in place of what ships with the model; or a schedule, or its fields, and `save` is unread.
        missing_kv: what later layers see of the second stage's tokens: `predict`, or what it is compared with (`project`: SwiftKV
            without training; `drop`).
        translator: `embedded`, what ships with the model or lies beside the schedule's file; or the path of one.

    Raises:
        ConfigError: neither a share nor a schedule; by `bind`: no schedule for this model at that budget, a stage that the model has no
            layer for, a translator that does not fit.
    """

    save: InnerShare | None = 0.4
    schedule: Schedule | Mapping[str, Any] | Path | str | None = None
    missing_kv: str = "predict"
    translator: str | Path = "embedded"
    lookahead: bool = False
    priority: ClassVar[int] = 10

    def __post_init__(self) -> None:
        self._halting: StagedHalting | None = None
        super().__post_init__()
        if self.save is None and self.schedule is None:
            raise ConfigError(
                "save=None and schedule=None: give one of them, a share such as save=0.4 or a schedule of your own."
            )
        if isinstance(self.schedule, Mapping):
            self.schedule = read_schedule(self.schedule)
        elif self.schedule is not None and not (isinstance(self.schedule, Schedule) or str(self.schedule).endswith(".yaml")):
            raise ConfigError(f"schedule={str(self.schedule)!r} is no file of `quicksilver schedule`: its name ends with .yaml.")

    @property
    def causal(self) -> bool:
        return False

    @property
    def copies_kv(self) -> bool:
        return self.missing_kv == "copy"

    @property
    def halting(self) -> StagedHalting:
        """The stages, once they are known.

        Raises:
            ConfigError: before `bind`.
        """
        if self._halting is None:
            raise ConfigError("The stages of a preset are the model's own: give the module to quicksilver.apply first.")
        return self._halting

    @property
    def translators(self) -> Mapping[int, KVTranslator]:
        return self.halting.translators

    def bind(self, architecture: Architecture) -> None:
        schedule, translator = self.schedule, self.translator
        if not isinstance(schedule, Schedule):
            assert not isinstance(schedule, Mapping)
            file = None if schedule is None else Path(schedule)
            schedule = schedule_of(architecture, self.save, file)
            if file is not None and self.missing_kv == "predict" and str(translator) == EMBEDDED:
                translator = _translators(file).get(schedule.predict_before, translator)
        halting = schedule.halting(self.missing_kv, translator)
        halting.bind(architecture)
        self._halting = halting

    def required_layers(self) -> frozenset[int]:
        return self.halting.required_layers()

    def acts_at(self, layer: int) -> bool:
        return self.halting.acts_at(layer)

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        self.halting.decide(view, tokens)


def read_schedule(content: Mapping[str, Any]) -> Schedule:
    """A schedule from its fields; raises ConfigError for one that it has not, or lacks."""
    known = [f.name for f in fields(Schedule)]
    unknown = sorted(map(repr, set(content) - set(known)))
    if unknown:
        raise ConfigError(f"schedule has no {unknown[0]}: there are {', '.join(known)}.")
    try:
        return Schedule(**content)
    except TypeError as error:
        raise ConfigError(f"schedule={dict(content)} is incomplete ({error}): give {', '.join(known)}.") from error


def schedule_of(architecture: Architecture, save: float | None, file: Path | None = None) -> Schedule:
    """The schedule that was chosen for the model to save that share of a prompt's executed FLOPs: by a file, or by what ships with the model.

    Raises:
        ConfigError: none for the model, or none at that budget; a file that is none, or of another model.
    """
    own = schedules_of(architecture) if file is None else _read_schedules(file, architecture)
    if save is None:
        raise ConfigError(f"save=None: {file} has schedules for {', '.join(f'{share:g}' for share in own)}: give one of these.")
    if not own:
        digest = model_digest(architecture.model)
        raise ConfigError(f"save={save:g}: no schedule ships with this model (digest {digest[:12]}…): {REMEDY}.")
    if round(save, 6) not in own:
        raise ConfigError(
            f"save={save:g}: for this model there are schedules for {', '.join(f'{share:g}' for share in own)}; or {REMEDY}."
        )
    return own[round(save, 6)]


def schedules_of(architecture: Architecture) -> dict[float, Schedule]:
    """The schedules that ship with the model, by the share of a prompt's executed FLOPs that they were chosen for, ascending; none: {}."""
    digest = model_digest(architecture.model)
    return next((_schedules(content) for content in _shipped().values() if content["weights_digest"] == digest), {})


def _read_schedules(file: Path, architecture: Architecture) -> dict[float, Schedule]:
    try:
        content = yaml.safe_load(read_bytes(file))
        own, digest = _schedules(content), str(content["weights_digest"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, yaml.YAMLError, ConfigError) as error:
        why = str(error).splitlines()[0] or type(error).__name__
        raise ConfigError(f"schedule={file} is no file of `quicksilver schedule`: {why}.") from error
    if digest != (found := model_digest(architecture.model)):
        raise ConfigError(
            f"schedule={file} was chosen for other weights (digest {digest[:12]}…, this model's is {found[:12]}…): choose one by `quicksilver schedule`."
        )
    return own


def _translators(file: Path) -> dict[int, Path]:
    """The files of maps that a file of schedules was chosen with, by source layer."""
    named = yaml.safe_load(read_bytes(file)).get("files", {})
    return {int(layer): file.parent / str(name) for layer, name in named.items()}


def files_behind(entry: Mapping[str, Any], model_folder: Path) -> list[Path]:
    """The files that decide what a module with these arguments does beside its own options: schedules and maps.

    Raises:
        ConfigError: a schedule's file that is none.
    """
    schedule = str(entry.get("schedule"))
    if not schedule.endswith(".yaml"):
        return translators.files_behind(entry, model_folder)
    try:
        beside = [] if str(entry.get("translator", EMBEDDED)) != EMBEDDED else list(_translators(Path(schedule)).values())
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(f"schedule={schedule} is no file of `quicksilver schedule`: {str(error).splitlines()[0]}.") from error
    own = beside or translators.files_behind(entry, model_folder)
    return [Path(schedule), *own]


def _schedules(content: Mapping[str, Any]) -> dict[float, Schedule]:
    own = content["schedules"]
    return {round(pct / 100, 6): read_schedule(own[pct]["schedule"]) for pct in sorted(own)}


def shipped_with_schedules() -> list[str]:
    """Names of the shipped models that have schedules of their own."""
    return list(_shipped())


def _shipped() -> dict[str, Any]:
    found = sorted(MODELS_FOLDER.glob(f"*/{Translator.folder}/{SCHEDULES_FILE}"))
    return {path.parts[-3]: yaml.safe_load(path.read_text(encoding="utf-8")) for path in found}
