"""Halting in stages: at each of a few layers some tokens of a prompt stop, each stage by its own rule (docs/design.md §4).

`StagedHalting` takes the stages as they are given, `PresetHalting` the `Schedule` that was chosen for a model on calibration text, which lies
beside it (docs/predicted-kv.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml

from quicksilver.modules.calibration import Calibrated, Calibration, Thresholds
from quicksilver.modules.checks import Ends, check_known_ids, layer_after, share_of
from quicksilver.modules.fitted import EMBEDDED, BoundTranslator, FittedFile, Translator, translator_files, translator_for
from quicksilver.modules.halting import HaltingPolicy
from quicksilver.modules.linear_mlp import LinearMLP, MLPMaps, mlp_map_files
from quicksilver.modules.signals import Position, Signal, SignalSpec, lowest, make_signal
from quicksilver.runtime import Architecture, ConfigError, KVTranslator, LayerView, MLPMap, TokenPolicy, TokenState
from quicksilver.runtime.options import Count, InnerShare, Options, Positive, Share, check_choice, check_count, check_number
from quicksilver.runtime.pass_state import MissingKV
from quicksilver.runtime.reading import read_bytes


# -- stages ------------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Stage(Options):
    """One stage of halting.

    Args:
        before: the first layer that its tokens do not go through: a 0-based index (int), or a fraction of the depth (float).
        count: so many tokens of each row halt.
        share: this share of each row's own real tokens halts.
        multiple_of: of `share`: rounded so that a row less these tokens has a multiple of so many, as attention kernels work in tiles.
        rest: all tokens that are not protected halt.
        below: tokens whose score is below this halt: a number, or a percentile such as "p25". A stage gives one of the four.
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
    multiple_of: Positive = 1
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
        if self.multiple_of > 1 and self.share is None:
            raise ConfigError(f"multiple_of={self.multiple_of} rounds a share, and this stage gives none: remove it.")
        if not self.rest and self.signal is None:
            raise ConfigError(f"{given[0]}={getattr(self, given[0])!r} needs a signal, such as position, drift or attention.")
        _ = self.score  # an unknown signal is refused here

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

    def amount(self, n_tokens: int, free: int) -> int | None:
        """How many tokens of a row of `n_tokens` it halts, of which `free` may; None: that depends on the data."""
        if self.below is not None:
            return None
        if self.rest:
            return max(0, free)
        return min(max(0, free), int(self.wanted(torch.tensor([[n_tokens]]))))

    def wanted(self, n_tokens: torch.Tensor) -> torch.Tensor:
        """How many tokens `count` or `share` asks for, of rows of n_tokens (B, 1) long: (B, 1) long."""
        if self.count is not None:
            return torch.full_like(n_tokens, self.count)
        return share_in_tiles(n_tokens, self.share or 0.0, self.multiple_of)

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor, below: float | None) -> torch.Tensor:
        """Which of the `eligible` (B, M) bool halt: (B, M) bool. below: the threshold as a number, where there is one."""
        signal = self.score
        if signal is None:
            return eligible
        scores = signal(view, tokens, eligible)
        if below is not None:
            return eligible & (scores < below)
        return lowest(scores, eligible, self.wanted(view.n_tokens))


def share_in_tiles(n_tokens: torch.Tensor, share: float, multiple_of: int) -> torch.Tensor:
    """`share` of n_tokens (B, 1) long, rounded so that the rest is the nearest multiple of `multiple_of` (half up), or all: (B, 1) long."""
    wanted = share_of(n_tokens, share)
    if multiple_of == 1:
        return wanted
    left = (n_tokens - wanted + multiple_of // 2) // multiple_of * multiple_of
    return n_tokens - left.clamp(min=multiple_of).minimum(n_tokens)


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


def _out_of_order(i: int, one: Stage, two: Stage) -> ConfigError:
    given = f"stages[{i}] has before={one.before} and stages[{i + 1}] has before={two.before}"
    return ConfigError(f"{given}: give stages in order of depth, one a layer.")


# -- the module --------------------------------------------------------------------------------------------------------------------
@dataclass(kw_only=True)
class StagedHalting(HaltingPolicy, Calibrated):
    """Tokens of a prompt halt in stages, each with its own layer, amount, signal and `missing_kv`.

    Numbers and shares are of each row's own real tokens. It acts in prompts only, unless all stages are thresholds on causal signals.

    Args:
        stages: `Stage`s, or mappings of their options, in order of depth. `missing_kv`, `protect_first` and `protect_last` of the
            module are for stages that give none; forced tokens halt at the first stage.
        protect_at_most: of a short prompt the last tokens that do not halt are this share instead, where that is less, and one at least.
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
    protect_at_most: Share = 1.0
    window: tuple[float, float] = field(default=(0.0, 1.0), init=False)
    calibration: Calibration | Path | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.stages:
            raise ConfigError("stages=[] names no stage: give one or more, such as [{before: 3, count: 96, signal: position}].")
        self._stages = self._completed([_stage(i, entry) for i, entry in enumerate(self.stages)])
        self._numbers: dict[int, int] = {}  # of the stages, by the layer that each is decided after
        if (shares := sum(stage.share or 0.0 for stage in self._stages)) > 1 + 1e-9:
            raise ConfigError(f"The shares of the stages add up to {shares:g}, more than all tokens: give at most 1 together.")
        for i, (one, two) in enumerate(pairwise(self._stages)):
            if one.rest:
                raise ConfigError(f"stages[{i}] halts the rest, so stages[{i + 1}] has no tokens left: remove one.")
            if isinstance(one.before, float) == isinstance(two.before, float) and one.before >= two.before:
                raise _out_of_order(i, one, two)

    def _completed(self, stages: Sequence[Stage]) -> list[Stage]:
        """The stages, with the module's options where they give none."""
        first, last = self.protect_first, self.protect_last
        if last is None:
            last = 0 if all(stage.causal for stage in stages) else 1
        made: list[Stage] = []
        # From the last: what a later stage protects must still be there then.
        wanted_first, wanted_last = 0, 0
        for i, stage in reversed(list(enumerate(stages))):
            wanted_first = max(wanted_first, first if stage.protect_first is None else stage.protect_first)
            wanted_last = max(wanted_last, last if stage.protect_last is None else stage.protect_last)
            seen = self.missing_kv if stage.missing_kv is None else stage.missing_kv
            if (seen == "predict") != (stage.translator is not None):
                wrong = f"translator={str(stage.translator)!r} has no effect with missing_kv={seen!r}: remove one."
                if stage.translator is None:
                    wrong = f"missing_kv={seen!r} needs a translator: give translator=embedded or the path of a fitted one."
                raise ConfigError(f"stages[{i}]: {wrong}")
            made.insert(0, replace(stage, missing_kv=seen, protect_first=wanted_first, protect_last=wanted_last))
        return made

    @property
    def chooses_causally(self) -> bool:  # type: ignore[override]
        return all(stage.causal for stage in self._stages)

    @property
    def protected_last(self) -> int:
        return self._stages[0].protect_last or 0  # no later stage protects more

    @property
    def copies_kv(self) -> bool:
        return any(stage.missing_kv == "copy" for stage in self._stages)

    def compared(self) -> list[tuple[Signal, Thresholds | None]]:
        return [(signal, stage.below) for stage in self._stages if (signal := stage.score) is not None]

    def bind(self, architecture: Architecture) -> None:
        check_known_ids("full_ids", self.full_ids, architecture.vocab_size)
        check_known_ids("forced_ids", self.forced_ids, architecture.vocab_size)
        n_layers, last = architecture.n_layers, architecture.n_layers - 1 - self.resume_layers
        layers = [stage.layer(n_layers) for stage in self._stages]
        for i, (stage, layer) in enumerate(zip(self._stages, layers, strict=True)):
            if not 1 <= layer <= last:
                resumed = f" and tokens resume in the last {self.resume_layers}" if self.resume_layers else ""
                there = f"the model has layers 0 to {n_layers - 1}{resumed}, so give a layer from 1 to {last}"
                raise ConfigError(f"stages[{i}]: before={stage.before} is layer {layer}, where halting saves nothing: {there}.")
            if i and layer <= layers[i - 1]:
                raise _out_of_order(i - 1, self._stages[i - 1], stage)
        self._numbers = {layer - 1: i for i, layer in enumerate(layers)}
        self._tau_below: dict[int, float] = {}
        self._translators = {}
        for layer, i in self._numbers.items():
            stage = self._stages[i]
            if stage.missing_kv == "predict":
                self._translators[layer] = translator_for(architecture, stage.translator or EMBEDDED, layer + 1)
            if stage.below is not None and stage.score is not None:
                taus = self.resolved(f"stages[{i}].below", stage.below, architecture, stage.score.key)
                assert taus is not None, "a stage with `below` has thresholds"
                self._tau_below[layer] = taus[layer]

    def required_layers(self) -> frozenset[int]:
        return frozenset(self._numbers)

    def acts_at(self, layer: int) -> bool:
        return layer in self._numbers

    def wants_attention(self, layer: int) -> bool:
        signal = self._stages[self._numbers[layer]].score if self.acts_at(layer) else None
        return signal is not None and signal.needs_attention

    def protected_at(self, layer: int) -> Ends:
        return self._protected(self._stages[self._numbers[layer]])

    def _protected(self, stage: Stage) -> Ends:
        return Ends(stage.protect_first or 0, stage.protect_last or 0, self.protect_at_most)

    def missing_kv_at(self, layer: int) -> str:
        return self._stages[self._numbers[layer]].missing_kv or self.missing_kv

    def halts_oldest(self, layer: int) -> bool:
        stage = self._stages[self._numbers[layer]]
        return stage.below is None and (stage.rest or isinstance(stage.score, Position))

    def halted_of(self, layer: int, n_tokens: int, n_left: int) -> int | None:
        i = self._numbers[layer]
        known = self._known(i, n_tokens)
        # Another module may have halted tokens that this stage protects: then only the device knows how many are left.
        if known is None or n_left != n_tokens - known[0]:
            return None
        return self._stages[i].amount(n_tokens, known[1])

    def _known(self, index: int, n_tokens: int) -> tuple[int, int] | None:
        """Of a row of `n_tokens`: how many tokens the stages before `index` have halted, and how many that one may halt then (below 0: it
        protects more than are left). None: that depends on the data."""
        halted = 0
        if index > 0:
            before = self._known(index - 1, n_tokens)
            amount = None if before is None else self._stages[index - 1].amount(n_tokens, before[1])
            if before is None or amount is None:
                return None
            halted = before[0] + amount
        return halted, n_tokens - halted - self._protected(self._stages[index]).count(n_tokens)

    def _count_per_row(self, view: LayerView, tokens: TokenState) -> int | None:
        # Outside of a prompt (`lookahead`) the protected tokens are not in the pass.
        return super()._count_per_row(view, tokens) if view.is_prompt else None

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        i = self._numbers[view.layer]
        stage = self._stages[i]
        if view.is_prompt and stage.count is not None:
            n_tokens = int(view.n_tokens.min()) if view.tokens_per_row is None else view.tokens_per_row
            known = self._known(i, n_tokens)
            if known is not None and stage.count > known[1]:
                halted, free = known
                wanted = f"stages[{i}]: count={stage.count} is more than a prompt of {n_tokens} tokens has left"
                gone = f"{halted} have halted before and {n_tokens - halted - free} are protected"
                raise ConfigError(f"{wanted}: {gone}. Give at most {max(0, free)}, or a share.")
        return stage.choose(view, tokens, eligible, self._tau_below.get(view.layer))


# -- two stages, chosen for a model ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Schedule(Options):
    """Which tokens of a prompt stop where.

    Args:
        drop_before: the layer (from 0) before which the oldest stop and are dropped.
        drop_share: how many, as a share of the prompt.
        predict_before: the layer before which all others stop, but the protected; their K/V are predicted from there.
        protect_first, protect_last: tokens that go through all layers.
        protect_at_most: of a short prompt the last tokens are this share instead, where that is less, and one at least.
        tile: what the drop leaves of a prompt is a multiple of it.
        linear_mlp: layers in which a linear map stands in for the MLP of tokens that stop.

    Raises:
        ConfigError: a share outside [0, 1], layers out of order, a linear MLP where no token has any.
    """

    drop_before: Positive
    drop_share: Share
    predict_before: Positive
    protect_first: Count = 4
    protect_last: Count = 32
    tile: Positive = 1
    linear_mlp: tuple[Positive, ...] = ()
    protect_at_most: Share = 1.0
    prefix: ClassVar[str] = "schedule."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drop_before >= self.predict_before:
            given = f"drop_before={self.drop_before} and predict_before={self.predict_before}"
            raise ConfigError(f"{given}: drop earlier than you predict.")
        if late := [layer for layer in self.linear_mlp if layer >= self.predict_before]:
            raise ConfigError(
                f"linear_mlp={list(self.linear_mlp)}: no token has an MLP from layer {self.predict_before} on. Leave {late[0]} out."
            )

    def __str__(self) -> str:
        dropped = f"{100 * self.drop_share:.3g}% d@{self.drop_before} + " if self.drop_share else ""
        if self.linear_mlp:
            dropped += f"linear MLP {', '.join(map(str, self.linear_mlp))} + "
        return f"{dropped}P@{self.predict_before}/{self.protect_last}"

    def dropped(self, n_tokens: int) -> int:
        """How many tokens of a prompt of `n_tokens` are dropped."""
        wanted = int(share_in_tiles(torch.tensor([[n_tokens]]), self.drop_share, self.tile)) if self.drop_share else 0
        return min(wanted, max(0, n_tokens - self.protected(n_tokens)))

    def protected(self, n_tokens: int) -> int:
        """How many tokens of a prompt of `n_tokens` go through all layers."""
        return Ends(self.protect_first, self.protect_last, self.protect_at_most).count(n_tokens)

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Schedule:
        """A schedule from its fields; raises ConfigError for one that it has not, or lacks."""
        known = [f.name for f in fields(Schedule)]
        content = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
        if unknown := sorted(map(repr, set(content) - set(known))):
            raise ConfigError(f"schedule has no {unknown[0]}: there are {', '.join(known)}.")
        try:
            return cls(**content)
        except TypeError as error:
            raise ConfigError(f"schedule={dict(content)} is incomplete ({error}): give {', '.join(known)}.") from error

    def modules(
        self,
        missing_kv: str = "predict",
        translator: str | Path | BoundTranslator = EMBEDDED,
        maps: Path | str | MLPMaps = EMBEDDED,
    ) -> list[TokenPolicy]:
        """All that do it, the one that stops tokens last: with linear maps in the place of MLPs, where there are any, and with another `missing_kv` for the
        second stage where that is compared."""
        protects = {name: getattr(self, name) for name in ("protect_first", "protect_last", "protect_at_most")}
        amount = {"share": self.drop_share, "multiple_of": self.tile}
        dropped = {"before": self.drop_before, "signal": "position", "missing_kv": "drop", **amount}
        stopped: dict[str, Any] = {"before": self.predict_before, "rest": True, "missing_kv": missing_kv}
        if missing_kv == "predict":
            stopped["translator"] = translator
        stages = [dropped, stopped] if self.drop_share else [stopped]
        mapping = [LinearMLP(layers=self.linear_mlp, maps=maps, **protects)] if self.linear_mlp else []
        return [*mapping, StagedHalting(stages=stages, **protects)]


@dataclass(frozen=True)
class Schedules(FittedFile):
    """The schedules that were chosen for one model: a file of `quicksilver schedule`.

    Attributes:
        schedules: by the share of a prompt's executed FLOPs that each was chosen for, ascending.
        files: of the maps that they were chosen with, by source layer; none: those that ship with the model.
        mlp_maps: the file of the linear MLPs, likewise.
    """

    schedules: dict[float, Schedule]
    weights_digest: str
    files: dict[int, Path]
    mlp_maps: Path | None = None

    kind = "file of schedules"
    reads_states = False
    format = "yaml"
    folder = Translator.folder
    suffix = ".yaml"
    remedy = "give schedule={drop_before, drop_share, predict_before, protect_last} and a translator, or fit and search: docs/predicted-kv.md"

    @classmethod
    def _read(cls, path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
        try:
            content = yaml.safe_load(read_bytes(path))
            chosen = content["schedules"]
            schedules = {round(pct / 100, 6): Schedule.read(chosen[pct]["schedule"]) for pct in sorted(chosen)}
            files = {int(layer): path.parent / str(name) for layer, name in content.get("files", {}).items()}
            mlp_maps = path.parent / str(content["mlp_maps"]) if "mlp_maps" in content else None
            digest = str(content["weights_digest"])
        except (TypeError, KeyError, AttributeError, RecursionError, yaml.YAMLError, ConfigError) as error:
            raise ValueError((str(error).splitlines() or [type(error).__name__])[0]) from error
        return {"format": cls.format, "schedules": schedules, "weights_digest": digest, "files": files, "mlp_maps": mlp_maps}, {}

    def chosen_for(self, save: float | None) -> Schedule:
        """The schedule for a share; raises ConfigError, which names those there are."""
        there = ", ".join(f"{share:g}" for share in self.schedules)
        if save is None or round(save, 6) not in self.schedules:
            raise ConfigError(f"save={save}: there are schedules for {there}: give one of these, or {self.remedy}.")
        return self.schedules[round(save, 6)]


def schedules_of(architecture: Architecture) -> dict[float, Schedule]:
    """The schedules that ship with the model, by the share that they were chosen for, ascending; none: {}."""
    return next((one.schedules for one in Schedules.of_model(architecture).values()), {})


def shipped_with_schedules() -> list[str]:
    """Names of the shipped models that have schedules."""
    return [path.parts[-3] for path in Schedules.shipped()]


@dataclass(kw_only=True)
class PresetHalting(TokenPolicy):
    """Halting by a `Schedule` (`P@ℓ`): the model's own at a budget, or one that is given.

    Acts in prompts only, as where a prompt ends decides which tokens stop.

    Args:
        save: share of the prompt's executed FLOPs for which the model's schedule was chosen, 0 to 1.
        schedule: a file of `quicksilver schedule`, in place of what ships with the model; or a schedule, or its fields, and `save` is unread.
        missing_kv: what later layers see of the second stage's tokens: `predict`, or what it is compared with.
        translator: `embedded`, what ships with the model or lies beside the schedule's file; or the path of one.

    Raises:
        ConfigError: neither a share nor a schedule; by `bind`: no schedule for this model at that budget, a stage that the model has no
            layer for, a translator that does not fit.
    """

    save: InnerShare | None = 0.4
    schedule: Schedule | Mapping[str, Any] | Path | str | None = None
    missing_kv: MissingKV = "predict"
    translator: str | Path = "embedded"
    lookahead: bool = False
    maps: ClassVar[str | MLPMaps] = EMBEDDED  # no option: linear MLPs are those beside the schedule
    priority: ClassVar[int] = 10
    causal = False

    def __post_init__(self) -> None:
        self._parts: list[TokenPolicy] = []
        super().__post_init__()
        if self.save is None and self.schedule is None:
            raise ConfigError("save=None and schedule=None: give one of them, such as save=0.4, or a schedule of your own.")
        if isinstance(self.schedule, Mapping):
            self.schedule = Schedule.read(self.schedule)
        elif self.schedule is not None and not (isinstance(self.schedule, Schedule) or str(self.schedule).endswith(".yaml")):
            raise ConfigError(f"schedule={str(self.schedule)!r} is no file of `quicksilver schedule`: its name ends with .yaml.")

    @property
    def copies_kv(self) -> bool:
        return self.missing_kv == "copy"

    @property
    def halting(self) -> TokenPolicy:
        """The module that stops tokens, once it is known; raises ConfigError before `bind`."""
        if not self._parts:
            raise ConfigError("The stages of a preset are the model's own: give the module to quicksilver.apply first.")
        return self._parts[-1]

    @property
    def translators(self) -> Mapping[int, KVTranslator]:
        return self.halting.translators

    @property
    def mlp_maps(self) -> Mapping[int, MLPMap]:
        return self._parts[0].mlp_maps if self._parts else {}

    def bind(self, architecture: Architecture) -> None:
        schedule, translator = self.chosen(architecture)
        named = Schedules.load(self.schedule).mlp_maps if isinstance(self.schedule, Path | str) else None
        self._parts = schedule.modules(self.missing_kv, translator, self.maps if named is None else named)
        for part in self._parts:
            part.bind(architecture)

    def chosen(self, architecture: Architecture) -> tuple[Schedule, str | Path | BoundTranslator]:
        """The schedule for this model, and its translator; raises ConfigError where there is none."""
        if isinstance(self.schedule, Schedule):
            return self.schedule, self.translator
        if self.schedule is None:
            own = next(iter(Schedules.of_model(architecture, f"save={self.save}").values()))
            return own.chosen_for(self.save), self.translator
        own = Schedules.load(str(self.schedule))
        own.check(architecture)
        schedule = own.chosen_for(self.save)
        given = self.missing_kv != "predict" or str(self.translator) != EMBEDDED
        return schedule, self.translator if given else own.files.get(schedule.predict_before, self.translator)

    def required_layers(self) -> frozenset[int]:
        return self.halting.required_layers().union(*(part.required_layers() for part in self._parts))

    def acts_at(self, layer: int) -> bool:
        return any(part.acts_at(layer) for part in self._parts)

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        for part in self._parts:
            if part.acts_at(view.layer):
                part.decide(view, tokens)


def schedule_files(entry: Mapping[str, Any], model_folder: Path) -> list[Path]:
    """The files that decide what a module with these arguments does beside its own options: schedules and maps. Raises
    ConfigError: a schedule's file that is none."""
    schedule = str(entry.get("schedule"))
    mapped = mlp_map_files({"maps": EMBEDDED}, model_folder) if {"save", "schedule"} <= set(entry) else []
    if not schedule.endswith(".yaml"):
        return [*translator_files(entry, model_folder), *mapped]
    own = Schedules.load(schedule)
    named = list(own.files.values()) if str(entry.get("translator", EMBEDDED)) == EMBEDDED else []
    mapped = mapped if own.mlp_maps is None else [own.mlp_maps]
    return [Path(schedule), *(named or translator_files(entry, model_folder)), *mapped]
