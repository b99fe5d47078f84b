"""Tables, figures and the ledger of claims, made of records."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from quicksilver.cli.arguments import Command, MakesRuns, key
from quicksilver.cli.main import say
from quicksilver.cli.progress import counted, explain, show_fault, watched, width
from quicksilver.models.hub import nothing_fetched
from quicksilver.records.record import TRACE
from quicksilver.records.store import KEPT, Store
from quicksilver.report import reproduction
from quicksilver.report.artefacts import Artefact, Outcome, artefacts, experiments_folder, find
from quicksilver.report.provenance import has_time
from quicksilver.report.table import read
from quicksilver.runs.jobs import Job, RecordIndex, make_side_by_side, run_context, run_missing, text_of
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Positive, at_least, check_positive

if TYPE_CHECKING:
    import pandas as pd

    from quicksilver.runs.config import RunConfig

KINDS = ("table", "figure")
CLAIMS = "claims"


@dataclass
class Reproduce(MakesRuns):
    """
    quicksilver reproduce table 11 model=reference-gpt2 dataset=python-docs measure.latency.repeats=9
    quicksilver reproduce figure 8
    quicksilver reproduce all

    One table or figure is timed on this machine. It reuses committed quality results after checking 8 windows of each run (records=checked).
    records=own measures everything here. Figures of single decisions need that, so they set it and say so. `all` uses committed records
    (records=any) and runs only what has none. A result with records of this machine is written as NAME-mine, beside the committed one.

    `quicksilver list` names every table and figure. Runs are cached: repeat a command to resume it. A table or figure sets protocol and modules
    itself.
    """

    takes = "run"
    most_names: ClassVar[int] = 2
    svg: bool = key("true", "write a figure's vector graphics as well: `quicksilver report` then shows pictures that zoom", False)

    @classmethod
    def next_names(cls, given: Sequence[str]) -> list[str]:
        if not given:
            return [*KINDS, "all"]
        return [number for one in artefacts() if [one.kind] == [*given] for number in one.numbers]

    def main(self) -> int:
        """Run what is missing for one artefact or for all, then print and write one after another. With `plan` nothing is run.

        Of all, what fails is named at the end, and the others are built; returns 1 then.
        """
        only, overrides = self._wanted(), self.overrides
        base = reproduction.base_config(overrides)
        answers = RecordIndex(base.results_dir, base.records)
        if only is not None:
            work, troubles = {only: reproduction.jobs_of(only, overrides, answers)}, dict[Artefact, str]()
        else:
            work, troubles = jobs_of_all(overrides, answers)
        every = [job for jobs in work.values() for job in jobs]
        missing = [job.config for job in every if job.config is not None]
        if missing or self.plan:
            from quicksilver.runs.estimate import check_time, estimates, table, without_record

            if self.plan:
                (left, absent), refused = without_record(missing), [job for job in every if job.error is not None]
                rows = {id(job.config): job.name for job in every}
                if left or not refused:
                    print(table(estimates(left, differing=[rows[id(one)] for one in left]), absent), flush=True)
                explain(refused, "No run of")
                return 1 if refused else 0
            check_time(missing, self.yes)
        make_side_by_side(every, self.workers, watch=watched)
        # What is left reads a clock, and is made alone: runs of one text after one another, so that each is read and scored densely once.
        every_text = sorted(every, key=lambda job: text_of(job.config) if job.config is not None else "")
        run_missing(every_text, answers, shared=base if only is None else None, watch=watched, on_fault=show_fault)
        for artefact, jobs in work.items():
            if jobs and all(job.record is None for job in jobs):
                troubles[artefact] = "nothing could be measured"
                continue
            with collected(troubles, artefact) if only is None else nullcontext():
                made = reproduction.build(artefact, jobs, base, overrides, svg=self.svg)
                if only is None:
                    print(f"{artefact.kind} {artefact.number}: {made.written[0]} … {made.distance}", flush=True)
                else:
                    said = [_source(base.records, jobs, Store(base.results_dir, base.records))] if jobs else []
                    print(*filter(None, (made.product.text(width()), made.distance, *said)), sep="\n")
                    print(f"Written: {', '.join(map(str, made.written))}")
            failed = [job for job in jobs if job.error is not None]
            if failed and artefact not in troubles:
                troubles[artefact] = f"{len(failed)} of {len(jobs)} rows have no record"
        explain([job for job in every if job.error is not None])
        for artefact, trouble in troubles.items():
            again = reproduction.command_of(artefact, overrides)
            print(f"{artefact.kind} {artefact.number}: {trouble}. Repeat it: {again}", file=sys.stderr)
        if only is None:
            total = len(artefacts())
            print(f"{total - len(troubles)} of {total} tables and figures are complete: {base.results_dir}/tables and figures.")
        return 1 if troubles else 0

    def _wanted(self) -> Artefact | None:
        """The table or figure that is asked for; None: all."""
        what, *number = self.names or [""]
        if (joined := re.fullmatch(r"(table|figure)[ _]?(\w+)", what)) and not number:
            what, *number = joined.groups()
        if what not in (*KINDS, "all"):
            raise ConfigError(f"{f'{what}: ' if what else ''}say what to reproduce: table 11, figure 8, or all.")
        if what == "all":
            if number:
                raise ConfigError(f"{number[0]!r} is not key=value: quicksilver reproduce all takes no number.")
            return None
        if not number:
            raise ConfigError(f"Say which {what}: quicksilver reproduce {what} 11. `quicksilver list` names all of them.")
        artefact = find(what, number[0])
        if not any(word.split("=")[0] == "records" for word in self.overrides):
            # Who asks for one table wants it measured here. Decisions are large: the repository has them only where something is drawn of them.
            self.overrides.append("records=own" if TRACE in artefact.reads else "records=checked")
        return artefact


def _source(records: str, jobs: Sequence[Job], store: Store) -> str:
    """Where the numbers of a result come from, those of the dense runs included, in one line."""
    if records == "any":
        return "records=any: records of any machine"
    rows = [job.record for job in jobs if job.record is not None]
    made = {one.fingerprint: one for one in (*rows, *map(store.dense_of, rows))}.values()
    reused = [one.confirmed for one in made if one.confirmed is not None and one.confirmed.agrees]
    if not reused:
        return f"records={records}: every row was measured on this machine"
    apart, here = max(one.largest_difference_nats for one in reused), len(made) - len(reused)
    windows = f"{max(one.windows for one in reused)} windows{' of each' * (len(reused) > 1)}"
    taken = f"the quality of {len(reused)} of {len(made)} runs is the repository's: {windows}"
    timed = " Times are of this machine." * any(map(has_time, rows))
    agree = f"agree to {apart:.1g} nats a token" if apart else "are equal"
    rest = f" The other{'s were' if here > 1 else ' was'} measured here." * (here > 0)
    return f"records={records}: {taken} were scored again and {agree}.{rest}{timed}"


@dataclass
class Time(Command):
    """
    quicksilver time table peers
    quicksilver time table 11 repeats=5 pause_min=10 records=own

    Times of one process may not repeat in the next. So several processes time all rows again, in random order, beside the dense model. Each
    leaves one file in results_dir/times. The table then prints the median over processes, with their range. Only processes of one machine that
    timed all rows are compared. Run nothing else meanwhile.
    """

    takes = "run"
    most_names: ClassVar[int] = 2
    repeats: Positive = key("3", "processes, one after another", 3)
    pause_min: Annotated[float, check_positive] = key("2", "minutes between two of them", 2.0)
    rounds: Annotated[int, at_least(3)] = key(
        "10", "rounds of each row, in turns with the dense model, which begins and ends each", 10
    )
    next_names = Reproduce.next_names

    def main(self) -> int:
        """Start the processes; one alone is this one."""
        artefact = find(*self.names) if len(self.names) == 2 and self.names[0] in KINDS else None
        if artefact is None:
            raise ConfigError("Say which table or figure to time again: quicksilver time table peers.")
        base = reproduction.base_config(self.overrides)
        answers = RecordIndex(base.results_dir, base.records)
        jobs = reproduction.jobs_of(artefact, self.overrides, answers, to_run=False)
        found = reproduction.recorded(artefact, jobs, Store(base.results_dir, base.records), None, answers)
        there = {one.record.fingerprint: job for one, job in zip(found, jobs, strict=True) if one.record and has_time(one.record)}
        if not there and not any(map(_is_timed, jobs)):
            raise ConfigError(f"{artefact.kind} {artefact.number} has no times: none of its rows is timed. Table 11 has.")
        if not there:
            asked = reproduction.command_of(artefact, self.overrides)
            raise ConfigError(f"{artefact.kind} {artefact.number} has no row with a record that was timed: {asked}")
        if self.repeats == 1:
            print(f"Written: {self._time(artefact, there, base)}")
            return 0
        words = [*self.names, *self.overrides, "repeats=1", f"rounds={self.rounds}"]
        for number in range(self.repeats):
            if number:
                time.sleep(60 * self.pause_min)
            print(f"process {number + 1} of {self.repeats}, {len(there)} rows:", flush=True)
            if code := subprocess.run([sys.executable, "-m", "quicksilver", "time", *words], check=False).returncode:
                return code
        print(f"{reproduction.command_of(artefact, self.overrides)} prints them.")
        return 0

    def _time(self, artefact: Artefact, there: Mapping[str, Job], base: RunConfig) -> Path:
        """Time every run once more; returns the file."""
        from quicksilver.measure.latency import Latency
        from quicksilver.records.times import TimedProcess
        from quicksilver.runs.config import compose
        from quicksilver.runs.context import RunContext
        from quicksilver.runs.run import bench_of, store_of, torch_threads
        from quicksilver.runtime.quantized.kernels import machine

        context, results = RunContext(), {}
        started, measure = datetime.now(UTC).isoformat(timespec="seconds"), Latency(repeats=self.rounds)
        for fingerprint in counted(random.sample(sorted(there), len(there)), "timing"):
            config = compose(there[fingerprint].overrides)
            with torch_threads(config.threads):
                bench, _ = bench_of(config, context, store_of(config))
                results[fingerprint] = measure.run(bench)
        name = reproduction.name_of(artefact.name, base, self.overrides)
        return TimedProcess(name, started, machine(), self.rounds, results).write(Path(base.results_dir))


def _is_timed(job: Job) -> bool:
    """Whether its run reads a clock; also of one that cannot be composed."""
    from quicksilver.runs.config import compose
    from quicksilver.runs.parts import is_on

    with suppress(ConfigError):
        config = compose(job.overrides)
        return config.execution == "compact" and is_on("latency", config.measure.get("latency"))
    return True


@dataclass
class Claims(Command):
    """
    quicksilver claims
    quicksilver claims table11.isolated.halting        every claim whose name begins so, with its commands and records
    quicksilver claims model=gpt2-large dataset=wikitext103

    Prints the ledger and writes it to results/claims.md, .csv and .json. Of some claims it prints more, and writes nothing.
    """

    takes = "run"
    most_names: ClassVar[int] = 20

    def main(self) -> int:
        from quicksilver.report.claims.ledger import Source, answers_claims, beginnings, ledger, told
        from quicksilver.report.provenance import SHORT
        from quicksilver.runs.run import store_of

        begins = beginnings(self.names, artefacts()) if self.names else []
        base = reproduction.base_config(self.overrides)
        store = store_of(base)
        index = RecordIndex(base.results_dir, base.records)
        with nothing_fetched():
            found, troubles = recorded_of_all(base, self.overrides, index, wanted=answers_claims)
        failed = [job for jobs, _ in found.values() for job in jobs if job.error is not None]
        sources = [Source(one, outcomes, reproduction.command_of(one, self.overrides)) for one, (_, outcomes) in found.items()]
        name = reproduction.name_of(CLAIMS, base, self.overrides)
        path = store.root / f"{name}.json"
        # A written ledger that names records which are not here, too large to be kept, says more than what can be said now.
        lacks = path.is_file() and not all(_is_usable(store, fingerprint) for fingerprint in read(path).records)
        # Of another model or text some rows are refused everywhere, such as word classes of a text without tags.
        refused = bool(failed) and name == CLAIMS
        whole = all(reproduction.all_kept(source.outcomes, store) for source in sources) and not (refused or troubles or lacks)
        table = ledger(sources, name if whole else f"{name}{reproduction.LOCAL_SUFFIX}", _others(store) if name == CLAIMS else {})
        if self.names:
            said, clone = told(table.frame, begins), experiments_folder().resolve().parent / "results"
            for one in (outcome.record for source in sources for outcome in source.outcomes):
                if one is not None and not one.is_kept:  # a fingerprint alone may be that of a record of the repository, too
                    said = said.replace(f"show {one.fingerprint[:SHORT]}", f"show {one.path}")
            print(said)
            if "\n  record " not in said and not (store.root / KEPT).is_dir():
                there = clone if (clone / KEPT).is_dir() else "CLONE/results"
                say(f"{store.root.resolve()} has no record that answers. The repository's records do: results_dir={there}.")
            return 0
        print(table.text(width()))
        print("Written: " + ", ".join(map(str, table.write(store.root, "md", "csv", "json"))))
        print("One claim with its command and record: quicksilver claims table11.isolated.halting")
        # An error that begins with a key of the command line is of a model or text that is not here.
        damaged = [job for job in failed if not str(job.error).startswith(("model=", "dataset="))]
        explain(damaged, "No record of")
        for artefact, trouble in troubles.items():
            print(f"{artefact.kind} {artefact.number}: {trouble}", file=sys.stderr)
        if len(damaged) < len(failed):
            absent = dict.fromkeys(str(job.error).partition(":")[0] for job in failed if job not in damaged)
            rows = f"{len(failed) - len(damaged)} rows have no record here"
            print(f"{rows}, and what would make them is not on this machine: {', '.join(absent)}.", file=sys.stderr)
        return 1 if damaged or troubles else 0


def _is_usable(store: Store, fingerprint: str) -> bool:
    """Whether that record is there; a damaged one is not, and the job that needs it says so."""
    with suppress(ConfigError):
        return store.get(fingerprint) is not None
    return False


def _others(store: Store) -> dict[str, pd.DataFrame]:
    """The written ledgers of other models and texts, by what these are called; one of more windows is none of them."""
    import pandas as pd

    others = [one for one in reproduction.VARIANTS if any(word.startswith(("model=", "dataset=")) for word in one.overrides)]
    paths = {one.title: store.root / f"{CLAIMS}-{one.name}.json" for one in others}
    return {title: pd.DataFrame(read(path).entries) for title, path in paths.items() if path.is_file()}


def jobs_of_all(
    overrides: Sequence[str], answers: RecordIndex, *, to_run: bool = True, wanted: Callable[[Artefact], bool] = lambda _: True
) -> tuple[dict[Artefact, list[Job]], dict[Artefact, str]]:
    """The jobs of every artefact that is `wanted`, and what is wrong with those that have none; `to_run` as in `make_job`."""
    work, troubles = dict[Artefact, list[Job]](), dict[Artefact, str]()
    for artefact in counted(artefacts(), "reading runs"):
        with collected(troubles, artefact):
            if wanted(artefact):
                work[artefact] = reproduction.jobs_of(artefact, overrides, answers, to_run=to_run)
    return work, troubles


def recorded_of_all(
    base: RunConfig, overrides: Sequence[str], answers: RecordIndex, wanted: Callable[[Artefact], bool] = lambda _: True
) -> tuple[dict[Artefact, tuple[list[Job], list[Outcome]]], dict[Artefact, str]]:
    """The jobs of every `wanted` artefact with their outcomes on disk, and what is wrong with those that have none; runs nothing."""
    found: dict[Artefact, tuple[list[Job], list[Outcome]]] = {}
    work, troubles = jobs_of_all(overrides, answers, to_run=False, wanted=wanted)
    place = run_context(base) if any(job.config is not None for jobs in work.values() for job in jobs) else None
    store = Store(base.results_dir, base.records)
    for artefact, jobs in counted(work.items(), "reading records"):
        with collected(troubles, artefact):
            found[artefact] = jobs, reproduction.recorded(artefact, jobs, store, place, answers)
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
