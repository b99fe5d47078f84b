"""Budgets: "save 30% of the FLOPs" or "cost at most 1% of perplexity" becomes one value of one dial, found on the calibrating text.

`fit` bisects the dial, once for each setting of its grid, and takes the setting of least KL to the dense model: one rule for every method.
Every step is a record, so that a stopped search goes on where it was. `freeze` writes what was found as a module yaml: percentiles keep the
calibration they were found with, on whatever text they are used later.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quicksilver.files import write_atomically
from quicksilver.records.identity import Ledger
from quicksilver.records.record import Record
from quicksilver.records.stats import paired_records
from quicksilver.records.store import Store
from quicksilver.runs.choices import choices, config_dir
from quicksilver.runs.config import RunConfig, check_yaml, compose
from quicksilver.runs.context import RunContext
from quicksilver.runs.run import Progress, calibrated_modules, ensure
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Options, Percent
from quicksilver.runtime.reading import read_bytes

SEARCH = ("dataset.part=calibration", "measure=sweep")  # below the overrides of the user and of the dial


@dataclass
class Dial:
    """Options of modules that move together, from saving least to saving most: what a yaml of conf/budget says.

    Attributes:
        name: of its file in conf/budget.
        overrides: the run, the dial left out.
        keys: the options that get its value.
        low, high: its ends; at `high` it saves most, whichever is the greater number.
        grid: other options and their values: every combination is tried at the budget.
        percentile: its values are percentiles, p25, which the search and later runs take from one calibration.
    """

    name: str
    overrides: list[str] = MISSING
    keys: list[str] = MISSING
    low: float = MISSING
    high: float = MISSING
    percentile: bool = False
    grid: dict[str, list[Any]] = field(default_factory=dict)

    def settings(self) -> Iterator[Dial]:
        """The dial at every combination of the grid."""
        for values in itertools.product(*self.grid.values()):
            given = [f"{key}={json.dumps(value)}" for key, value in zip(self.grid, values, strict=True)]
            yield dataclasses.replace(self, overrides=[*self.overrides, *given], grid={})

    def at(self, value: float) -> tuple[str, ...]:
        """The run with the dial at `value`."""
        return (*self.overrides, *(f"{key}={self.text(value)}" for key in self.keys))

    def said(self, value: float) -> str:
        """Every option that the run has then, those of its grid too: `start=0.1, halted_share=0.29`."""
        options = (word.partition("=") for word in self.at(value) if word.startswith("modules."))
        return ", ".join(f"{key.rpartition('.')[2]}={given}" for key, _, given in options)

    def text(self, value: float) -> str:
        """The value as a configuration has it."""
        return f"p{value:.4g}" if self.percentile else f"{value:.4g}"


def load_dial(name: str) -> Dial:
    """The dial of conf/budget/NAME.yaml, or of a yaml of the user's own. Raises ConfigError: there is none, or it says something else."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else config_dir() / "budget" / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"There is no dial {name}. There are: {', '.join(choices('budget'))}; or give a yaml file of your own.")
    try:
        check_yaml(path)
        found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Dial(path.stem)), OmegaConf.load(path)))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        raise ConfigError(f"{path} is no dial: {str(error).splitlines()[0]}") from error
    assert isinstance(found, Dial)
    if found.low == found.high or (found.percentile and found.low > found.high) or not all(found.grid.values()):
        raise ConfigError(f"{path}: low={found.low:g} and high={found.high:g} must be two ends, each of grid a list of values.")
    return dataclasses.replace(found, name=path.stem)


@dataclass(frozen=True)
class Budget(Options):
    """What is asked for.

    Attributes:
        kind: `save`: at least `pct` percent of the FLOPs of `ledger`. `cost`: at most `pct` percent of perplexity added.
        ledger: executed, nominal or paper, with `prompt_` before it for the prompt's alone.
        sure: of `cost`: the upper end of the 95% interval counts, not the middle.
    """

    kind: Literal["save", "cost"]
    pct: Percent
    ledger: Ledger = "executed"
    sure: bool = False

    def __str__(self) -> str:
        if self.kind == "save":
            ledger = self.ledger.replace("prompt_", "the prompt's ")
            return f"save {self.pct:g}% of {ledger} FLOPs"
        return f"cost at most {self.pct:g}% of perplexity{', interval included' if self.sure else ''}"

    @property
    def slug(self) -> str:
        """For the names of files: `save30_prompt_executed`, `cost1`."""
        return f"{self.kind}{self.pct:g}".replace(".", "_") + (f"_{self.ledger}" if self.kind == "save" else "_sure" * self.sure)

    def reached(self, record: Record, dense: Record) -> float:
        """What a record saves, or costs, in percent of dense.
        Raises ConfigError: the protocol has no prompt, or too few windows for an interval."""
        if self.kind == "cost":
            paired = paired_records(record, dense)
            return paired.relative_pct_high if self.sure else paired.relative_pct
        count, whole = record.flops(self.ledger), dense.flops(self.ledger)
        if count is None or whole is None:
            raise ConfigError(f"protocol={record.protocol.name} has no {self.ledger} FLOPs: give another ledger.")
        return 100 * (1 - count / whole)

    def met(self, reached: float) -> bool:
        """Whether that is within the budget."""
        return reached >= self.pct if self.kind == "save" else reached <= self.pct


@dataclass(frozen=True)
class Step:
    """One position of the dial and what it gave."""

    value: float
    reached: float
    record: Record
    dense: Record


@dataclass(frozen=True)
class Fit:
    """A dial that meets a budget on the calibrating text.

    Attributes:
        dial: at the setting that was taken; chosen: the position that was; steps: all that were tried at any setting.
        config: the run at that position, on the calibrating text.
        settings: what every setting of the grid came to within the budget, the least KL first.
    """

    budget: Budget
    dial: Dial
    chosen: Step
    config: RunConfig
    steps: tuple[Step, ...] = field(repr=False)
    settings: tuple[Fit, ...] = field(default=(), repr=False)

    @property
    def kl_nats(self) -> float:
        """To the dense model, a token of the calibrating text; infinite where it was not measured."""
        kl = self.chosen.record.quality.kl_nats
        return math.inf if kl is None else kl

    def entry(self) -> dict[str, Any]:
        """As a file of what was searched holds it: overrides, what they save or cost, KL to dense, and all that was compared."""
        return {
            "overrides": list(self.dial.at(self.chosen.value)), "reached_pct": round(self.chosen.reached, 2), "kl_nats": round(self.kl_nats, 5),
            "record": self.chosen.record.fingerprint, "compared": [one.entry() for one in self.settings[1:]],
        }  # fmt: skip


def fit(
    budget: Budget,
    dial: Dial,
    overrides: Sequence[str] = (),
    *,
    halvings: int = 6,
    context: RunContext | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Fit:
    """Turn the dial until the budget is just met on the calibrating text, at every setting of its grid; of these, the least KL to dense.

    Just met: the least of the dial that saves enough, or the most of it that costs little enough. Saving grows with the dial; where cost does not, the position found is within the budget and need not be the last one that is.
    Raises ConfigError: the budget cannot be met between the dial's ends; what they gave is named. QuickSilverError: a run failed.

    Args:
        overrides: the user's: model, dataset, windows …
        halvings: of the interval between the dial's ends.
    """
    shared, found, refused = context or RunContext(), list[Fit](), list[ConfigError]()
    for one in dial.settings():
        try:
            found.append(_bisected(budget, one, overrides, halvings, partial(ensure, progress=progress, context=shared)))
        except ConfigError as error:
            refused.append(error)
    if not found:
        raise refused[-1]
    found.sort(key=lambda one: one.kl_nats)
    return dataclasses.replace(found[0], steps=tuple(step for one in found for step in one.steps), settings=tuple(found))


def _bisected(
    budget: Budget, dial: Dial, overrides: Sequence[str], halvings: int, made: Callable[[list[RunConfig]], list[Record]]
) -> Fit:
    """`fit` at one setting."""
    steps: list[Step] = []

    def composed(value: float) -> RunConfig:
        return compose([*SEARCH, *overrides, *dial.at(value)])

    def at(value: float) -> Step:
        (record,) = made([composed(value)])
        dense = Store(composed(value).results_dir).dense_of(record)
        steps.append(Step(value, budget.reached(record, dense), record, dense))
        return steps[-1]

    # The end that is surely within the budget, and the one that asks more of it.
    inside, outside = (dial.high, dial.low) if budget.kind == "save" else (dial.low, dial.high)
    chosen = at(inside)
    if not budget.met(chosen.reached):
        verb = "saves at most" if budget.kind == "save" else "costs at least"
        found = f"with {dial.keys[0]}={dial.text(inside)} it {verb} {chosen.reached:.1f}% on the calibrating text"
        raise ConfigError(f"{dial.name} cannot {budget}: {found}. Ask less, take another dial, or widen its ends.")
    if budget.met((further := at(outside)).reached):
        chosen, halvings = further, 0
    for _ in range(halvings):
        middle = at(float(f"{(inside + outside) / 2:.4g}"))
        if budget.met(middle.reached):
            inside, chosen = middle.value, middle
        else:
            outside = middle.value
    return Fit(budget, dial, chosen, composed(chosen.value), tuple(steps))


def freeze(found: Fit, folder: Path | str, *, context: RunContext | None = None) -> Path:
    """Write the modules of a fit as FOLDER/modules/NAME.yaml, and beside it the calibration that its percentiles are of.

    `quicksilver run --config-dir FOLDER modules=[NAME]` uses them.

    Returns:
        The yaml; its stem is the name, with model and dataset where they are not the default ones.
    """
    from quicksilver.modules.calibration import Calibrated, Calibration

    folder, store, default = Path(folder), Store(found.config.results_dir), compose([])
    of, usual = ([one.model.name, one.dataset.name] for one in (found.config, default))
    name = re.sub(r"\W", "_", "_".join([found.dial.name, found.budget.slug, *(of if of != usual else [])]))
    modules, _ = calibrated_modules(found.config, context or RunContext(), store)
    entries = {key: dict(entry) for key, entry in sorted(found.config.modules.items())}
    path, chosen, config = folder / "modules" / f"{name}.yaml", found.chosen, found.config
    said = (
        f"# @package modules\n# To {found.budget}: {found.dial.said(chosen.value)} {found.budget.kind}s {chosen.reached:.2f}% on the "
        f"calibrating\n# part of {config.dataset.name} with {config.model.name}, record {chosen.record.fingerprint}.\n"
    )
    for one in found.settings if len(found.settings) > 1 else ():
        grid = " ".join(word for word in one.dial.at(one.chosen.value) if word not in found.dial.overrides[:1])
        said += f"# compared: KL {one.kl_nats:.4f} nats, {one.chosen.reached:.2f}%: {grid}\n"
    with store.writing():
        path.parent.mkdir(parents=True, exist_ok=True)
        for entry, module in zip(entries.values(), modules, strict=True):
            if found.dial.percentile and isinstance(module, Calibrated) and isinstance(module.calibration, Calibration):
                entry["calibration"] = str(folder / f"{name}.calibration.json")
                module.calibration.save(entry["calibration"])
        path.write_text(said + OmegaConf.to_yaml(OmegaConf.create(entries)), encoding="utf-8")
    return path


def frozen_overrides(found: Fit, yaml: Path) -> tuple[str, ...]:
    """The overrides of a run with what `freeze` wrote, without its folder: the dial's, and the frozen calibration of percentiles."""
    written = OmegaConf.load(yaml).items() if found.dial.percentile else ()
    calibrations = (f"modules.{key!s}.calibration={entry.calibration}" for key, entry in written if entry.get("calibration"))
    return (*found.dial.at(found.chosen.value), *calibrations)


def note(found: Fit, path: Path) -> None:
    """Put what was found into a yaml of many searches: model, dial, budget -> `Fit.entry`.
    Raises ConfigError: the file is none of these."""
    try:
        there = yaml.safe_load(read_bytes(path)) if path.exists() else {}
        own = there.setdefault(found.config.model.name, {}).setdefault(found.dial.name, {})
        own[found.budget.slug] = found.entry()
    except (OSError, ValueError, AttributeError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"output={path} is no file of `quicksilver budget`: {str(error).splitlines()[0]}.") from error
    write_atomically(path, yaml.safe_dump(there, sort_keys=True, width=160).encode())
