"""Optuna draws the runs of a sweep, for several objectives at once; a study resumes where it was killed.

`hydra/sweeper=optuna` (conf/hydra/sweeper/optuna.yaml). The study is a journal beside the sweep's manifest, `results/sweeps/NAME/study.log`,
whose lock is a file made with `O_EXCL`, as leases are. A run that was drawn before has its record and is not made again.

Hydra's plugin (hydra-optuna-sweeper 1.3) is not used: it wants optuna below 3, and starts every run anew.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quicksilver.records.record import Record
from quicksilver.runs.choices import suggest
from quicksilver.runs.config import parsed
from quicksilver.runs.tracker import differences
from quicksilver.runtime.errors import ConfigError, QuickSilverError, installing

if TYPE_CHECKING:
    import optuna

# ruff: noqa: UP045  OmegaConf 2.3 reads `Optional[str]`, not `str | None`

JOURNAL = "study.log"
_OF_QUALITY = ("ppl", "bits_per_byte", "kl_nats", "top1_agreement")
_OF_DENSE = ("delta_ppl_pct", *(f"{ledger}_flops_saved_pct" for ledger in ("executed", "nominal", "paper")))
OBJECTIVES = (*_OF_QUALITY, *_OF_DENSE, *(f"prompt_{one}" for one in _OF_DENSE[1:]))
_SAMPLERS = {"tpe": "TPESampler", "nsga2": "NSGAIISampler", "random": "RandomSampler"}


@dataclass
class StudyConfig:
    """What conf/hydra/sweeper/optuna.yaml may say.

    Attributes:
        trials: runs that have to be made, those of an earlier start counted.
        objectives: a number of the record, and `minimize` or `maximize`.
        budget: by objective, what it must reach: at least where it is maximized, at most where it is minimized.
        sampler: tpe | nsga2 | random.
        params: what is drawn, where the command line does not say it.
    """

    trials: int = 30
    objectives: dict[str, str] = field(default_factory=dict)
    budget: Optional[dict[str, float]] = None
    sampler: str = "tpe"
    seed: int = 0
    params: Optional[dict[str, str]] = None

    def violations(self, values: Sequence[float]) -> list[float]:
        """By how much each part of the budget is missed, of a run with these objectives; none is positive: it is met."""
        names = list(self.objectives)
        missed = {name: bound - values[names.index(name)] for name, bound in (self.budget or {}).items()}
        return [by if self.objectives[name] == "maximize" else -by for name, by in missed.items()]


def study_config(settings: Any) -> StudyConfig:
    """The section `hydra.sweeper` of a sweep's config, checked.
    Raises ConfigError: optuna is not installed; an objective, direction or sampler that there is not."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(f"hydra/sweeper=optuna needs optuna: {installing('optuna')}.")
    try:
        found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(StudyConfig), settings))
    except OmegaConfBaseException as error:
        raise ConfigError(f"hydra.sweeper: {str(error).splitlines()[0]}") from error
    assert isinstance(found, StudyConfig)
    if not found.objectives:
        raise ConfigError("hydra.sweeper.objectives is empty: name a number of the record, {kl_nats: minimize}.")
    for name, direction in found.objectives.items():
        if name not in OBJECTIVES:
            raise ConfigError(f"hydra.sweeper.objectives: there is no {name}. {suggest(name, list(OBJECTIVES), 'Objectives')}")
        if direction not in ("minimize", "maximize"):
            raise ConfigError(f"hydra.sweeper.objectives.{name}={direction}: minimize or maximize.")
    if unknown := [name for name in found.budget or {} if name not in found.objectives]:
        raise ConfigError(f"hydra.sweeper.budget: {unknown[0]} is none of the objectives: {', '.join(found.objectives)}.")
    if found.sampler not in _SAMPLERS:
        raise ConfigError(f"hydra.sweeper.sampler={found.sampler}: {suggest(found.sampler, list(_SAMPLERS), 'Samplers')}")
    if found.trials < 1:
        raise ConfigError(f"hydra.sweeper.trials={found.trials} is out of range: at least 1.")
    return found


@dataclass(frozen=True)
class Space:
    """What is drawn, and what stays: distributions by key, and the words of every run."""

    drawn: Mapping[str, Any]
    fixed: tuple[str, ...]

    def words(self, params: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The overrides of a run with these values, and those of them that are drawn."""
        texts = {key: f"{params[key]:.6g}" if isinstance(params[key], float) else params[key] for key in self.drawn}
        differing = tuple(f"{key}={text}" for key, text in texts.items())
        return (*self.fixed, *differing), differing

    @property
    def least(self) -> tuple[str, ...]:
        """The overrides of the run with the smallest, or first, value of each key."""
        return self.words({key: one.low if hasattr(one, "low") else one.choices[0] for key, one in self.drawn.items()})[0]


def space_of(words: Sequence[str], params: Mapping[str, str] | None) -> Space:
    """From Hydra's words: `key=a,b` or `choice(a,b)` one of several, `interval(0,1)` any between, `range(1,9)` whole numbers.
    Raises ConfigError: nothing is drawn, or an interval that is none. HydraException: a word that is no override."""
    more = {key: parsed(f"{key}={value}") for key, value in (params or {}).items()}
    given = {one.key_or_group: one for one in map(parsed, words)}  # of two words for one key the later one counts
    drawn, fixed = dict[str, Any](), list[str]()
    for one in (*(one for one in more.values() if one.key_or_group not in given), *given.values()):
        if not one.is_sweep_override():
            fixed.append(str(one.input_line))
            continue
        try:
            drawn[one.get_key_element()] = _distribution(one)
        except ValueError as error:  # optuna's, of an interval that is none
            raise ConfigError(f"{one.input_line}: {error}") from error
    if not drawn:
        example = "modules.halting.tau_drift=interval(0.01,0.5)"
        raise ConfigError(f"hydra/sweeper=optuna draws nothing: give a key several values, {example}.")
    return Space(drawn, tuple(fixed))


def _distribution(override: Override) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value: Any = override.value()
    if isinstance(value, IntervalSweep):
        ends: list[Any] = [value.start, value.end]  # whole ones where the word says int(interval(1,5))
        kind: Any = IntDistribution if all(isinstance(end, int) for end in ends) else FloatDistribution
        return kind(*ends, log="log" in value.tags)
    if isinstance(value, RangeSweep) and not value.shuffle:
        values: list[Any] = list(override.sweep_iterator())
        whole = all(isinstance(one, int) for one in values)
        kind, step = (IntDistribution, int(value.step)) if whole else (FloatDistribution, float(value.step))
        return kind(values[0], values[-1], step=step)
    return CategoricalDistribution(list(override.sweep_string_iterator()))


def open_study(folder: Path, name: str, config: StudyConfig) -> optuna.Study:
    """The study of a sweep, new or as it was left: what a killed process was making is drawn again first.
    Raises QuickSilverError: the journal is damaged, or of other objectives."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path = str(folder / JOURNAL)
    try:
        storage = JournalStorage(JournalFileBackend(path, lock_obj=JournalFileOpenLock(path)))
        directions: list[Any] = list(config.objectives.values())
        study = optuna.create_study(study_name=name, storage=storage, directions=directions, load_if_exists=True)
        asked = study.user_attrs.get("objectives")
        if asked is not None and asked != config.objectives:
            raise QuickSilverError(f"{path} is a study of {asked}, and now {config.objectives} is asked: give another name=…")
        study.set_user_attr("objectives", config.objectives)
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)
            study.enqueue_trial(trial.params)
        # A resumed study must not draw again what it drew from the same seed.
        options: dict[str, Any] = {"seed": config.seed + len(study.get_trials(deepcopy=False))}
        if config.budget and config.sampler != "random":
            options["constraints_func"] = lambda trial: config.violations(trial.values) if trial.values else [1.0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # options that optuna calls experimental
            study.sampler = getattr(optuna.samplers, _SAMPLERS[config.sampler])(**options)
    except (OSError, ValueError, KeyError) as error:
        raise QuickSilverError(f"{path} cannot be used: {error}. Remove it to begin anew; records stay.") from error
    return study


def complete(study: optuna.Study) -> list[Any]:
    """The trials that have their values."""
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def values_of(record: Record, objectives: Iterable[str]) -> list[float]:
    """The objectives of one record.
    Raises QuickSilverError: the record does not have one: nothing was compared with dense inference, or the protocol has no
    prompt."""
    found: dict[str, float | None] = {name: getattr(record.quality, name) for name in _OF_QUALITY}
    found |= differences(record)
    if missing := [name for name in objectives if found.get(name) is None]:
        raise QuickSilverError(f"{record.path} has no {missing[0]}: a run without modules has no difference, `all` no prompt.")
    return [float(found[name] or 0.0) for name in objectives]


def front(study: optuna.Study, config: StudyConfig) -> tuple[list[Mapping[str, Any]], bool]:
    """The values of the runs on the Pareto front, and whether a run meets the budget; then the front is of those that do.
    The first is the best in the first objective that the budget does not bind."""
    trials = complete(study)
    within = [trial for trial in trials if all(by <= 0 for by in config.violations(trial.values))]
    trials = within or trials
    signs = [1 if direction == "minimize" else -1 for direction in config.objectives.values()]
    costs = np.array([trial.values for trial in trials]).reshape(-1, len(signs)) * signs
    best = [i for i, cost in enumerate(costs) if not ((costs <= cost).all(1) & (costs < cost).any(1)).any()]
    free = next((i for i, name in enumerate(config.objectives) if name not in (config.budget or {})), 0)
    return [trials[i].params for i in sorted(best, key=lambda i: (costs[i, free], trials[i].number))], bool(within)
