"""Remake tables and figures of the paper: run what has no record yet, print and write them.

quicksilver reproduce table 11 model=reference-gpt2 dataset=python-docs measure.latency.repeats=9
quicksilver reproduce figure 8
quicksilver reproduce all

A table or figure that is asked for by itself is timed on this machine. Perplexity and FLOPs come from the records that the repository
has, after each run scored its first windows again and came out alike (records=checked); records=own measures all of it here. `all` takes
the records that the repository has (records=any) and runs only what has none. What has records of this machine is written beside the
repository's, as NAME-mine.

`quicksilver list` names every table and figure. A run that has its record is not repeated: stopped, the same command goes on.
Keys: those of `quicksilver run`, but for protocol and modules, which a table or figure sets itself, and

  svg=true             write a figure's vector graphics as well; not of `all`
  plan=true            only say what would run, and what it would take on this machine (docs/recipes.md)
  workers=1            processes for runs that read no clock, of the models that come with the package; as it comes one a core
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicksilver.cli.arguments import split
from quicksilver.cli.progress import counted, explain, show_fault, watched, width
from quicksilver.records.record import TRACE
from quicksilver.report.artefacts import Artefact, artefacts, find
from quicksilver.report.reproduction import base_config, build, command_of, jobs_of
from quicksilver.runs.jobs import RecordIndex, make_side_by_side, run_missing, text_of
from quicksilver.runtime.errors import ConfigError, QuickSilverError

if TYPE_CHECKING:
    from quicksilver.runs.config import RunConfig
    from quicksilver.runs.jobs import Job

KINDS = ("table", "figure")
LONG = ("gpt2-large", "llama2-7b")  # models whose tables take so long that it is said before


@dataclass
class Options:
    """The command's own keys, as its help has them."""

    svg: bool = False
    plan: bool = False
    workers: int | None = None


def main(words: Sequence[str]) -> int:
    """Remake one artefact, or all; returns the exit code."""
    what, *rest = words or [""]
    if what == "all":
        options, overrides = split(rest, Options, "reproduce all")
        if options.svg:
            raise ConfigError("svg=true: say of which figure: quicksilver reproduce figure 8 svg=true.")
        return reproduce_all(overrides, plan=options.plan, workers=options.workers)
    if what not in KINDS:
        raise ConfigError(
            f"{f'{what}: ' if what else ''}say what to reproduce: quicksilver reproduce table 11, figure 8, or all."
        )
    if not rest or "=" in rest[0]:
        raise ConfigError(f"Say which {what}: quicksilver reproduce {what} 11. `quicksilver list` names all of them.")
    artefact = find(what, rest[0])
    options, overrides = split(rest[1:], Options, f"reproduce {what} {rest[0]}")
    if not any(override.split("=")[0] == "records" for override in overrides):
        # Who asks for one table wants it measured here. Decisions are large: the repository has them only where something is drawn of them.
        overrides = [*overrides, "records=own" if TRACE in artefact.reads else "records=checked"]
    return reproduce(artefact, overrides, svg=options.svg, plan=options.plan, workers=options.workers)


def reproduce(
    artefact: Artefact, overrides: Sequence[str], *, svg: bool = False, plan: bool = False, workers: int | None = None
) -> int:
    """Run what is missing, print and write the artefact, with `svg` a figure's vector graphics too; returns the exit code.

    With `plan` nothing is run: what would be is printed, with what it would take. Long work says so by itself before it starts.

    Raises:
        ConfigError: overrides that no run of the artefact could have.
        QuickSilverError: the model or the text cannot be had.
    """
    base = base_config(overrides)
    answers = RecordIndex(base.results_dir, base.records)
    jobs = jobs_of(artefact, overrides, answers)
    missing = [job.config for job in jobs if job.config is not None]
    if plan:
        _say_estimates(_without_record(missing))
        return 0
    if missing and base.model.name in LONG:
        with suppress(ConfigError):  # of what cannot be known before, nothing is said
            _say_estimates(missing)
    make_side_by_side(jobs, workers, watch=watched)
    run_missing(jobs, answers, watch=watched, on_fault=show_fault)
    failed = [job for job in jobs if job.error is not None]
    if jobs and all(job.record is None for job in jobs):
        explain(failed)
        print(f"Nothing could be measured, so there is no {artefact.kind}.", file=sys.stderr)
        return 1
    made = build(artefact, jobs, base, overrides, svg=svg)
    failed = [job for job in jobs if job.error is not None]
    print(made.product.text(width()))
    print(made.distance)
    print("Written: " + ", ".join(map(str, made.written)))
    explain(failed)
    return 1 if failed else 0


def _without_record(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """Those that would run; of what is not at hand, weights or text, nothing can have been run."""
    from quicksilver.runs.context import RunContext
    from quicksilver.runs.run import plan

    place, left = RunContext(), []
    for config in configs:
        try:
            done = plan([config], place).done
        except QuickSilverError:
            done = False
        if not done:
            left.append(config)
    return left


def _say_estimates(missing: Sequence[RunConfig]) -> None:
    from quicksilver.runs.estimate import estimates, table

    print(table(estimates(missing)) if missing else "Every run has its record: nothing would run.", flush=True)


def reproduce_all(overrides: Sequence[str], *, plan: bool = False, workers: int | None = None) -> int:
    """Every table and figure: run what is missing for any of them, then build one after another; returns the exit code.

    What fails is named at the end; all others are built. With `plan` nothing is run: what would be is printed.

    Raises:
        ConfigError: overrides that no run could have.
        QuickSilverError: the model or the text of the overrides cannot be had.
    """
    base = base_config(overrides)
    answers = RecordIndex(base.results_dir, base.records)
    with counted(len(artefacts()), "reading runs") as done:
        work, troubles = jobs_of_all(overrides, answers, done=done)
    every = [job for jobs in work.values() for job in jobs]
    if plan:
        _say_estimates(_without_record([job.config for job in every if job.config is not None]))
        return 0
    make_side_by_side(every, workers, watch=watched)
    # What is left reads a clock, and is made alone: runs of one text after one another, so that each is read and scored densely once.
    left = sorted((job for job in every if job.config is not None), key=_text_of)
    run_missing(left, answers, shared=base, watch=watched, on_fault=show_fault)
    for artefact, jobs in work.items():
        if jobs and all(job.record is None for job in jobs):
            troubles[artefact] = "nothing could be measured"
            continue
        with collected(troubles, artefact):
            made = build(artefact, jobs, base, overrides)
            print(f"{artefact.kind} {artefact.number}: {made.written[0]} … {made.distance}", flush=True)
        failed = [job for job in jobs if job.error is not None]
        if failed and artefact not in troubles:
            troubles[artefact] = f"{len(failed)} of {len(jobs)} rows have no record"
    explain([job for jobs in work.values() for job in jobs if job.error is not None])
    for artefact, trouble in troubles.items():
        print(f"{artefact.kind} {artefact.number}: {trouble}. To repeat it: {command_of(artefact, overrides)}", file=sys.stderr)
    total = len(artefacts())
    print(f"{total - len(troubles)} of {total} tables and figures are complete, in {base.results_dir}/tables and figures.")
    return 1 if troubles else 0


def _text_of(job: Job) -> str:
    return text_of(job.config) if job.config is not None else ""


def jobs_of_all(
    overrides: Sequence[str], answers: RecordIndex, *, to_run: bool = True, done: Callable[[], None] = lambda: None
) -> tuple[dict[Artefact, list[Job]], dict[Artefact, str]]:
    """The jobs of every artefact, and what is wrong with those that have none; `to_run` as in `make_job`, `done` is called after each."""
    work: dict[Artefact, list[Job]] = {}
    troubles: dict[Artefact, str] = {}
    for artefact in artefacts():
        with collected(troubles, artefact):
            work[artefact] = jobs_of(artefact, overrides, answers, to_run=to_run)
        done()
    return work, troubles


@contextmanager
def collected(troubles: dict[Artefact, str], artefact: Artefact) -> Iterator[None]:
    """Keep what goes wrong with one artefact from the others."""
    try:
        yield
    except Exception as error:
        show_fault(error)
        troubles[artefact] = str(error) or repr(error)
