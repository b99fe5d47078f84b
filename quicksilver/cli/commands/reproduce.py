"""Remake tables and figures of the paper: run what has no record yet, print and write them.

quicksilver reproduce table 11 model=reference-gpt2 dataset=python-docs measure.latency.repeats=9
quicksilver reproduce figure 8
quicksilver reproduce all

One table or figure is timed on this machine. It reuses committed quality results after checking 8 windows of each run (records=checked).
records=own measures everything here. `all` uses committed records (records=any) and runs only what has none. A result with records of this
machine is written as NAME-mine, beside the committed one.

`quicksilver list` names every table and figure. Runs are cached: repeat a command to resume it.
Keys: those of `quicksilver run`, but for protocol and modules, which a table or figure sets itself, and

  svg=true             write a figure's vector graphics as well; not of `all`
  plan=true            only say what would run, and what it would take on this machine (docs/recipes.md)
  yes=true             start what is said to take more than an hour
  workers=1            processes for runs that read no clock, of the models that come with the package; as it comes one a core
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicksilver.cli.arguments import split
from quicksilver.cli.progress import counted, explain, show_fault, watched, width
from quicksilver.records.record import TRACE
from quicksilver.records.store import Store
from quicksilver.report.artefacts import Artefact, Outcome, artefacts, find
from quicksilver.report.reproduction import base_config, build, command_of, jobs_of, recorded
from quicksilver.runs.jobs import RecordIndex, make_side_by_side, run_context, run_missing, text_of
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Options, Positive

if TYPE_CHECKING:
    from quicksilver.runs.config import RunConfig
    from quicksilver.runs.jobs import Job

KINDS = ("table", "figure")


@dataclass
class Keys(Options):
    """The command's own keys, as its help has them."""

    svg: bool = False
    plan: bool = False
    yes: bool = False
    workers: Positive | None = None


def main(words: Sequence[str]) -> int:
    """Remake one artefact, or all; returns the exit code."""
    what, *rest = words or [""]
    if what not in (*KINDS, "all"):
        raise ConfigError(
            f"{f'{what}: ' if what else ''}say what to reproduce: quicksilver reproduce table 11, figure 8, or all."
        )
    if what == "all":
        options, overrides = split(rest, Keys, "reproduce all")
        if options.svg:
            raise ConfigError("svg=true: say of which figure: quicksilver reproduce figure 8 svg=true.")
        return reproduce(None, overrides, options)
    if not rest or "=" in rest[0]:
        raise ConfigError(f"Say which {what}: quicksilver reproduce {what} 11. `quicksilver list` names all of them.")
    artefact = find(what, rest[0])
    options, overrides = split(rest[1:], Keys, f"reproduce {what} {rest[0]}")
    if not any(override.split("=")[0] == "records" for override in overrides):
        # Who asks for one table wants it measured here. Decisions are large: the repository has them only where something is drawn of them.
        overrides = [*overrides, "records=own" if TRACE in artefact.reads else "records=checked"]
    return reproduce(artefact, overrides, options)


def reproduce(only: Artefact | None, overrides: Sequence[str], options: Keys) -> int:
    """Run what is missing for one artefact or for all, then print and write one after another; returns the exit code.

    Of all, what fails is named at the end, and the others are built. With `plan` nothing is run: what would be is printed, with what it would
    take.

    Raises:
        ConfigError: overrides that no run could have, more than an hour of runs without `yes`.
        QuickSilverError: the model or the text of the overrides cannot be had.
    """
    base = base_config(overrides)
    answers = RecordIndex(base.results_dir, base.records)
    troubles: dict[Artefact, str] = {}
    if only is not None:
        work = {only: jobs_of(only, overrides, answers)}
    else:
        with counted(len(artefacts()), "reading runs") as done:
            work, troubles = jobs_of_all(overrides, answers, done=done)
    every = [job for jobs in work.values() for job in jobs]
    missing = [job.config for job in every if job.config is not None]
    if missing or options.plan:
        from quicksilver.runs.estimate import check_time, estimates, table, without_record

        if options.plan:
            print(table(estimates(without_record(missing))), flush=True)
            return 0
        check_time(missing, options.yes)
    make_side_by_side(every, options.workers, watch=watched)
    # What is left reads a clock, and is made alone: runs of one text after one another, so that each is read and scored densely once.
    run_missing(sorted(every, key=_text_of), answers, shared=base if only is None else None, watch=watched, on_fault=show_fault)
    for artefact, jobs in work.items():
        if jobs and all(job.record is None for job in jobs):
            troubles[artefact] = "nothing could be measured"
            continue
        with collected(troubles, artefact) if only is None else nullcontext():
            made = build(artefact, jobs, base, overrides, svg=options.svg)
            if only is None:
                print(f"{artefact.kind} {artefact.number}: {made.written[0]} … {made.distance}", flush=True)
            else:
                print(f"{made.product.text(width())}\n{made.distance}\nWritten: {', '.join(map(str, made.written))}")
        failed = [job for job in jobs if job.error is not None]
        if failed and artefact not in troubles:
            troubles[artefact] = f"{len(failed)} of {len(jobs)} rows have no record"
    explain([job for job in every if job.error is not None])
    for artefact, trouble in troubles.items():
        print(f"{artefact.kind} {artefact.number}: {trouble}. To repeat it: {command_of(artefact, overrides)}", file=sys.stderr)
    if only is None:
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


def recorded_of_all(
    base: RunConfig, overrides: Sequence[str], answers: RecordIndex
) -> tuple[dict[Artefact, tuple[list[Job], list[Outcome]]], dict[Artefact, str]]:
    """The jobs of every artefact with their outcomes as far as they are on disk, and what is wrong with those that have none; nothing is run.

    Raises:
        QuickSilverError: the model or the text of `base` cannot be had, and is needed to know what was recorded.
    """
    found: dict[Artefact, tuple[list[Job], list[Outcome]]] = {}
    with counted(len(artefacts()), "reading runs") as read, counted(len(artefacts()), "reading records") as judged:
        work, troubles = jobs_of_all(overrides, answers, to_run=False, done=read)
        place = run_context(base) if any(job.config is not None for jobs in work.values() for job in jobs) else None
        for artefact, jobs in work.items():
            with collected(troubles, artefact):
                found[artefact] = jobs, recorded(artefact, jobs, Store(base.results_dir, base.records), place, answers)
            judged()
    answers.save()
    return found, troubles


@contextmanager
def collected(troubles: dict[Artefact, str], artefact: Artefact) -> Iterator[None]:
    """Keep what goes wrong with one artefact from the others."""
    try:
        yield
    except Exception as error:
        show_fault(error)
        troubles[artefact] = str(error) or repr(error)
