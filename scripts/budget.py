"""Set a dial so that a budget holds: "save 30% of the FLOPs", or "cost at most 1% of perplexity".

    python scripts/budget.py --save 30
    python scripts/budget.py --cost 1 --dial fusion_attention --transfer wikitext103 data.root=/folder
    python scripts/budget.py --save 20 --save 40 --cost 2 --sure model=gpt2-large dataset=wikitext103

The search reads the calibrating part of the text alone. What it finds is frozen, written as a module yaml, and reported on the test part
(and on other texts: --transfer). Every step is a record: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from quicksilver.harness.budget import LEDGERS, Budget, Fit, dials, fit, freeze, frozen_words, load_dial
from quicksilver.harness.config import RunConfig, compose
from quicksilver.harness.record import Record
from quicksilver.harness.run import Workplace, ensure
from quicksilver.harness.store import Store
from quicksilver.harness.terminal import progress_bar
from quicksilver.report.budget import Report, table
from quicksilver.runtime.errors import ConfigError, QuickSilverError


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask = parser.add_argument_group("budgets (any number)")
    ask.add_argument(
        "--save", type=float, action="append", default=[], metavar="PCT", help="at least so many percent of the FLOPs"
    )
    ask.add_argument(
        "--cost", type=float, action="append", default=[], metavar="PCT", help="at most so many percent of perplexity"
    )
    parser.add_argument("--sure", action="store_true", help="with --cost: the upper end of the interval counts")
    ledgers = [f"{part}{ledger}" for part in ("", "prompt_") for ledger in LEDGERS]
    parser.add_argument("--of", default="executed", choices=ledgers, help="whose FLOPs --save counts (default: %(default)s)")
    parser.add_argument(
        "--dial",
        default="halting_attention",
        help=f"{', '.join(dials())}, or a yaml file like those of conf/budget (default: %(default)s)",
    )
    parser.add_argument("--transfer", action="append", default=[], metavar="DATASET", help="use it on that text too (any number)")
    parser.add_argument("--halvings", type=int, default=6, help="steps of the search (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="model=…, dataset=…, data.root=…, results_dir=…")
    found = parser.parse_args(argv)
    if not found.save and not found.cost:
        parser.error("ask for something: --save 30, or --cost 1")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where one of several budgets cannot be met."""
    asked = arguments(argv)
    dial, workplace = load_dial(asked.dial), Workplace()
    budgets = [Budget("save", pct, asked.of) for pct in asked.save] + [Budget("cost", pct, sure=asked.sure) for pct in asked.cost]
    results = Path(compose(asked.overrides).results_dir)
    reports: list[Report] = []
    refused: list[str] = []
    for budget in budgets:
        try:
            with progress_bar() as progress:
                found = fit(budget, dial, asked.overrides, halvings=asked.halvings, workplace=workplace, progress=progress)
        except ConfigError as error:
            if len(budgets) == 1:
                raise
            refused.append(str(error))
            continue
        yaml = freeze(found, results / "budget", workplace=workplace)
        reports.append(Report(found, _later(found, yaml, asked, workplace)))
        print(f"To {budget}: {dial.keys[0]}={dial.text(found.chosen.value)}, written to {yaml}. To use it:")
        print(f"  python -m quicksilver.run --config-dir {results / 'budget'} modules=[{yaml.stem}] {_protocol(found)}\n")
    if reports:
        made = table(reports, _name(dial.name, reports[0].found.config))
        print(made.text(shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
        print("Written: " + ", ".join(map(str, made.write(results / "tables"))))
    for message in refused:
        print(f"error: {message}", file=sys.stderr)
    return 1 if refused else 0


def _later(found: Fit, yaml: Path, asked: argparse.Namespace, workplace: Workplace) -> dict[str, tuple[Record, Record]]:
    """The frozen dial on the test part, and on other texts."""
    frozen = frozen_words(found, yaml)
    texts = {"test": [], **{name: [f"dataset={name}"] for name in asked.transfer}}
    later = {}
    for name, more in texts.items():
        config = compose(["measure=quick", *asked.overrides, *more, *frozen])
        with progress_bar() as progress:
            (record,) = ensure([config], progress=progress, workplace=workplace)
        later[name] = (record, Store(config.results_dir).dense_of(record))
    return later


def _name(dial: str, config: RunConfig) -> str:
    """`budget-halting_attention` for the embedded default, model and text in the name of others."""
    default = compose([])
    other = (config.model.name, config.dataset.name) != (default.model.name, default.dataset.name)
    return "-".join(["budget", dial, *([config.model.name, config.dataset.name] if other else [])])


def _protocol(found: Fit) -> str:
    return f"protocol={found.config.protocol.name}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QuickSilverError as error:
        sys.exit(f"error: {error}")
