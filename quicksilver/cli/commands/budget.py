"""Set a dial so that a budget holds: "save 30% of the FLOPs", or "cost at most 1% of perplexity".

quicksilver budget save=30
quicksilver budget cost=1 dial=fusion_attention transfer=wikitext103 data.root=/folder
quicksilver budget save=[20,40] cost=2 sure=true model=gpt2-large dataset=wikitext103

The search reads the calibrating part of the text alone. A dial with a grid, as those of published methods have (docs/sweeps-and-budgets.md), is set at
each of its settings, and the setting of least KL to the dense model is taken. What it finds is frozen, written as a module yaml, and reported on the test part
and on other texts. Every step is a record: the same command goes on where it was stopped. Without a budget it lists the dials.

Keys of its own:
  save=PCT            at least so many percent of the FLOPs; several: save=[20,40]
  cost=PCT            at most so many percent of perplexity; several: cost=[1,2]
  sure=true           with cost: the upper end of the 95% interval counts
  of=executed         whose FLOPs save counts: executed, nominal, paper, or prompt_executed …
  dial=NAME           a file of conf/budget, or a yaml like those; default: halting_attention
  transfer=[NAME,…]   datasets on which the frozen dial is used too
  halvings=6          steps of the search, at each setting
  output=FILE         a yaml that gets what was found and compared, beside what it has of other models and dials
All others are those of `quicksilver run`: model, dataset, data.root, results_dir …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from quicksilver.cli.arguments import split
from quicksilver.cli.commands.list import listed
from quicksilver.cli.main import say
from quicksilver.cli.progress import progress_bar, width
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Options, Percent, Positive, check_positive

if TYPE_CHECKING:
    from quicksilver.records.record import Record
    from quicksilver.runs.config import RunConfig
    from quicksilver.runs.context import RunContext
    from quicksilver.runs.dials import Fit


@dataclass
class Keys(Options):
    """The command's own keys, as its help has them."""

    save: list[Percent] = field(default_factory=list)
    cost: list[Annotated[float, check_positive]] = field(default_factory=list)
    sure: bool = False
    of: str = "executed"
    dial: str = "halting_attention"
    transfer: list[str] = field(default_factory=list)
    halvings: Positive = 6
    output: str | None = None


def main(words: Sequence[str]) -> int:
    """Search, freeze and report; returns the exit code: 1 where one of several budgets cannot be met.

    Raises:
        ConfigError: a single budget that cannot be met, or a request that makes no sense.
    """
    asked, overrides = split(words, Keys, "budget")
    if not asked.save and not asked.cost:
        print(listed("budget"))
        print("Say what to hold: quicksilver budget save=30, or cost=1 (make budget ARGS='save=30').")
        return 0
    from quicksilver.report.sweeps import BudgetReport, budget_table
    from quicksilver.runs import dials as budgets
    from quicksilver.runs.config import compose
    from quicksilver.runs.context import RunContext

    dial, context = budgets.load_dial(asked.dial), RunContext()
    wanted = [budgets.Budget("save", pct, asked.of) for pct in asked.save]
    wanted += [budgets.Budget("cost", pct, sure=asked.sure) for pct in asked.cost]
    results = Path(compose(overrides).results_dir)
    reports: list[BudgetReport] = []
    refused: list[str] = []
    for budget in wanted:
        try:
            with progress_bar() as progress:
                found = budgets.fit(budget, dial, overrides, halvings=asked.halvings, context=context, progress=progress)
        except ConfigError as error:
            if len(wanted) == 1:
                raise
            refused.append(str(error))
            continue
        yaml = budgets.freeze(found, results / "budget", context=context)
        if asked.output:
            budgets.note(found, Path(asked.output))
        reports.append(BudgetReport(found, _later(found, yaml, asked.transfer, overrides, context)))
        protocol = f"protocol={found.config.protocol.name}"
        print(f"To {budget}: {dial.keys[0]}={dial.text(found.chosen.value)}, written to {yaml}. To use it:")
        print(f"  quicksilver run --config-dir {results / 'budget'} modules=[{yaml.stem}] {protocol}\n")
    if reports:
        made = budget_table(reports, _name(dial.name, reports[0].found.config))
        print(made.text(width()))
        print("Written: " + ", ".join(map(str, made.write(results / "tables"))))
    for message in refused:
        say(message)
    return 1 if refused else 0


def _later(
    found: Fit, yaml: Path, transfer: Sequence[str], overrides: Sequence[str], context: RunContext
) -> dict[str, tuple[Record, Record]]:
    """The frozen dial on the test part, and on other texts."""
    from quicksilver.records.store import Store
    from quicksilver.runs.config import compose
    from quicksilver.runs.dials import frozen_overrides
    from quicksilver.runs.run import ensure

    frozen = frozen_overrides(found, yaml)
    texts: dict[str, list[str]] = {"test": [], **{name: [f"dataset={name}"] for name in transfer}}
    later = {}
    for name, more in texts.items():
        config = compose(["measure=quick", *overrides, *more, *frozen])
        with progress_bar() as progress:
            (record,) = ensure([config], progress=progress, context=context)
        later[name] = (record, Store(config.results_dir).dense_of(record))
    return later


def _name(dial: str, config: RunConfig) -> str:
    """`budget-halting_attention` for the embedded default, model and text in the name of others."""
    from quicksilver.runs.config import compose

    default = compose([])
    other = (config.model.name, config.dataset.name) != (default.model.name, default.dataset.name)
    return "-".join(["budget", dial, *([config.model.name, config.dataset.name] if other else [])])
