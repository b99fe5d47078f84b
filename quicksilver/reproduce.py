"""Remake a table or figure of the paper: run what has no record yet, print, write, say how far it is from the committed one.

    python -m quicksilver.reproduce list
    python -m quicksilver.reproduce table 11 model=reference-gpt2 dataset=python-docs measure.repeats=9
    python -m quicksilver.reproduce figure 8
    python -m quicksilver.reproduce all
    python -m quicksilver.reproduce claims
    python -m quicksilver.reproduce report
    python -m quicksilver.reproduce readme

Exit code: 0 everything is there; 1 something failed (what could be built was built); 2 the request makes no sense; 130 interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quicksilver.harness.answers import Answer, Answers
from quicksilver.report.artefacts import Artefact, Outcome, Row, artefacts, find, listing
from quicksilver.runtime.errors import ConfigError, QuickSilverError

if TYPE_CHECKING:
    from quicksilver.harness.config import RunConfig
    from quicksilver.harness.record import Record
    from quicksilver.harness.run import Planned, Progress, Workplace
    from quicksilver.harness.store import Store
    from quicksilver.report.figures import Figure
    from quicksilver.report.tables import Table

NOT_YET = "not in this version"
REFUSED = "refused under all: looks ahead"
FAILED = "failed"
# Where something is or goes does not change what is measured: no other name for the table.
_NEUTRAL = ("results_dir", "data.root", "tracker")


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    arguments = _parser().parse_args(words)
    try:
        if arguments.what == "list":
            print(listing(artefacts()))
            return 0
        if arguments.what == "readme":
            print(fill_readme(Path(__file__).resolve().parent.parent / "README.md", Path(arguments.results)))
            return 0
        if arguments.what == "all":
            return reproduce_all(arguments.overrides)
        if arguments.what == "report":
            return write_report(arguments.overrides)
        if arguments.what == "claims":
            return claims(arguments.overrides)
        return reproduce(find(arguments.what, arguments.number), arguments.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except QuickSilverError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Finished records are kept: the same command goes on from here.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quicksilver.reproduce", description="Remake tables and figures of the paper."
    )
    commands = parser.add_subparsers(dest="what", required=True, metavar="{table,figure,all,claims,report,list,readme}")
    missing = "runs what has no record yet"
    for what, said in {
        "table": f"remake one table: {missing}",
        "figure": f"remake one figure: {missing}",
        "all": f"remake every table and figure: {missing}",
        "claims": "judge the paper's claims by the records that are there: runs nothing",
    }.items():
        command = commands.add_parser(what, help=said)
        if what in ("table", "figure"):
            command.add_argument("number", help="its number in the paper, or its name (`list` says which there are)")
        command.add_argument(
            "overrides", nargs="*", metavar="key=value", help="model=…, dataset=…, measure.repeats=…, results_dir=…"
        )
    report = commands.add_parser("report", help="write a site of everything that was made, to be opened in a browser")
    report.add_argument("overrides", nargs="*", metavar="key=value", help="results_dir=…")
    commands.add_parser("list", help="which tables and figures there are")
    readme = commands.add_parser("readme", help="put the written tables and figures into README.md")
    readme.add_argument("results", nargs="?", default="results", help="folder that holds tables/ and figures/")
    return parser


# --- one artefact ---------------------------------------------------------------------------------------------------------------


@dataclass
class _Job:
    """One row of the artefact on its way to an outcome."""

    row: Row
    overrides: list[str]  # the row's and the user's
    config: RunConfig | None = None
    record: Record | None = None
    reason: str | None = None
    error: Exception | None = None

    def fail(self, error: Exception) -> None:
        self.reason, self.error = FAILED, error


def reproduce(artefact: Artefact, overrides: Sequence[str]) -> int:
    """Run what is missing, print and write the artefact; returns the exit code.

    Raises:
        ConfigError: overrides that no run of the artefact could have.
        QuickSilverError: the model or the text cannot be had.
    """
    plain = _plain(overrides)
    answers = Answers(plain.results_dir)
    jobs = [_job(row, overrides, answers) for row in artefact.experiment.rows()]
    _run_missing(jobs, answers)
    failed = [job for job in jobs if job.error is not None]
    if jobs and all(job.record is None for job in jobs):
        _explain(failed)
        print(f"Nothing could be measured, so there is no {artefact.kind}.", file=sys.stderr)
        return 1
    made = _build(artefact, jobs, plain, overrides)
    print(made.product.text(shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    print(made.distance)
    print("Written: " + ", ".join(map(str, made.written)))
    _explain(failed)
    return 1 if failed else 0


def _plain(overrides: Sequence[str]) -> RunConfig:
    """The config that the words of the command line alone compose.

    Raises:
        ConfigError: words that no artefact takes.
    """
    from quicksilver.harness.config import compose
    from quicksilver.harness.stats import MIN_WINDOWS

    _check_words(overrides)
    plain = compose(list(overrides))
    if plain.dataset.windows is not None and plain.dataset.windows < MIN_WINDOWS:
        raise ConfigError(f"dataset.windows={plain.dataset.windows}: intervals need at least {MIN_WINDOWS} windows.")
    return plain


@dataclass(frozen=True)
class _Made:
    product: Table | Figure
    distance: str  # from the committed one, in a sentence
    written: list[Path]


def _build(artefact: Artefact, jobs: Sequence[_Job], plain: RunConfig, overrides: Sequence[str]) -> _Made:
    """Make the artefact from its records and write it into results/tables or results/figures."""
    from quicksilver.harness.store import Store
    from quicksilver.report.compare import committed, distance

    store = Store(plain.results_dir)
    outcomes = [Outcome(job.row, job.record, store.dense_of(job.record) if job.record else None, job.reason) for job in jobs]
    product = artefact.build(outcomes, _name(artefact.name, plain, overrides))
    folder = Path(plain.results_dir) / f"{artefact.kind}s"
    reference = committed(folder / f"{product.name}.csv")
    return _Made(product, distance(product.frame, reference, f"{product.name}.csv"), product.write(folder))


def _check_words(overrides: Sequence[str]) -> None:
    for word in overrides:
        key = word.lstrip("+~").split("=")[0]
        if key in ("protocol", "protocol.name") or key.split(".")[0] == "modules":
            raise ConfigError(
                f"{word}: a table or figure sets protocol and modules itself. "
                f"To vary them: python -m quicksilver.run {shlex.quote(word)} …"
            )


def _name(name: str, plain: RunConfig, overrides: Sequence[str]) -> str:
    """`table11` for the embedded default; model and dataset in the name of others, and a digest where more was changed."""
    from quicksilver.harness.config import compose

    default = compose([])
    more = sorted(word for word in overrides if word.split("=")[0] not in ("model", "dataset", *_NEUTRAL))
    parts = [name]
    if more or (plain.model.name, plain.dataset.name) != (default.model.name, default.dataset.name):
        parts += [plain.model.name, plain.dataset.name]
    if more:
        parts.append(hashlib.sha256("\n".join(more).encode()).hexdigest()[:6])
    return re.sub(r"[^\w.-]", "_", "-".join(parts))  # a model's name may be a path


def _job(row: Row, overrides: Sequence[str], answers: Answers) -> _Job:
    """The row's record where it is remembered; else its config, or why there can be none."""
    job = _Job(row, [*overrides, *row.overrides])
    known = answers.get(job.overrides)
    if known is not None:
        job.record, job.reason = known.record, known.reason
        return job
    from quicksilver.harness.config import build_modules, choices, compose

    if not set(row.needs) <= set(choices("modules")):
        job.reason = NOT_YET
        return job
    try:
        config = compose(job.overrides)
        modules = build_modules(config.modules)
    except ConfigError as error:
        job.fail(error)
        return job
    # Asked before anything runs: a refusal is part of the table, not a failure. The rule is quicksilver.measure's check_allowed.
    if config.protocol.name == "all" and not all(module.causal or module.lookahead for module in modules):
        job.reason = REFUSED
        answers.put(job.overrides, config, Answer(reason=REFUSED))
    else:
        job.config = config
    return job


def _run_missing(jobs: Sequence[_Job], answers: Answers, plain: RunConfig | None = None) -> None:
    """Give every job with a config its record, or its error.

    Args:
        plain: where the jobs are of several artefacts, whose models and texts may be their own: what most of them use.

    Raises:
        QuickSilverError: what `plain`, or else the first run, needs (model, text) cannot be had; the others need it too.
    """
    if all(job.config is None for job in jobs):
        answers.save()
        return
    try:
        _run(jobs, _workplace(plain), strict=plain is None)
    finally:
        for job in jobs:
            if job.config is not None and job.record is not None:
                answers.put(job.overrides, job.config, Answer(job.record))
        answers.save()


def _workplace(plain: RunConfig | None) -> Workplace:
    """A workplace at which the model and the text of `plain` can be had."""
    from quicksilver.harness.run import Workplace, plan

    workplace = Workplace()
    if plain is not None:
        plan([plain], workplace)
    return workplace


def _run(jobs: Sequence[_Job], workplace: Workplace, *, strict: bool) -> None:
    from quicksilver.harness.run import ensure, plan

    waiting: list[_Job] = []
    for job in jobs:
        if job.config is None:
            continue
        try:
            plan([job.config], workplace)
        except QuickSilverError as error:
            if not waiting and strict:
                raise
            job.fail(error)
        else:
            waiting.append(job)
    while waiting:
        configs = [job.config for job in waiting if job.config is not None]
        try:
            with _progress(plan(configs, workplace)) as report:
                records = ensure(configs, progress=report, workplace=workplace)
        except Exception as error:
            if not isinstance(error, QuickSilverError):
                traceback.print_exc()  # a fault of ours or of a library: the one line of the summary would not do
            waiting = _without_failed(waiting, error, workplace)
            continue
        for job, record in zip(waiting, records, strict=True):
            job.record = record
        return


def _without_failed(waiting: Sequence[_Job], error: Exception, workplace: Workplace) -> list[_Job]:
    """Mark the jobs that the run which just failed stood for (rows may share one; all rows of a protocol need its dense run)."""
    from quicksilver.harness.run import plan

    planned = [plan([job.config], workplace) if job.config is not None else [] for job in waiting]
    broken = next(step.fingerprint for steps in planned for step in steps if not step.done)
    left = []
    for job, steps in zip(waiting, planned, strict=True):
        if any(step.fingerprint == broken for step in steps):
            job.fail(error)
        else:
            left.append(job)
    return left


def _explain(failed: Sequence[_Job]) -> None:
    """Why rows failed, and the command that repeats the first of them alone; rows with the same trouble share it."""
    troubles: dict[str, list[_Job]] = {}
    for job in failed:
        troubles.setdefault(str(job.error) or repr(job.error), []).append(job)
    for trouble, jobs in troubles.items():
        print(f"\nFailed: {', '.join(f'{job.row.panel} {job.row.key}' for job in jobs)}\n  {trouble}", file=sys.stderr)
        print(f"  To repeat it alone: python -m quicksilver.run {shlex.join(jobs[0].overrides)}", file=sys.stderr)


@contextmanager
def _progress(steps: Sequence[Planned]) -> Iterator[Callable[[Progress], None]]:
    """Say on stderr how much there is to do and how far it is: a bar with the time left on a terminal, else one line a run."""
    from quicksilver.harness.terminal import progress_bar

    missing = sum(not step.done for step in steps)
    if missing:
        print(
            f"{len(steps)} runs behind this, {len(steps) - missing} with a record, {missing} to do.", file=sys.stderr, flush=True
        )
    announced: set[int] = set()
    started = time.monotonic()
    with progress_bar() as bar:

        def show(progress: Progress) -> None:
            bar(progress)
            if not sys.stderr.isatty() and progress.run not in announced:
                announced.add(progress.run)
                left = _time_left(time.monotonic() - started, progress.fraction)
                print(f"[{progress.run + 1}/{progress.runs}] {progress.label}{left}", file=sys.stderr, flush=True)

        yield show


def _time_left(seconds: float, fraction: float) -> str:
    """`, about 12 min left`; nothing as long as nothing is done."""
    if fraction <= 0:
        return ""
    left = seconds * (1 - fraction) / fraction
    return f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"


# --- all of them ----------------------------------------------------------------------------------------------------------------


def reproduce_all(overrides: Sequence[str]) -> int:
    """Every table and figure: run what is missing for any of them, then build one after another; returns the exit code.

    What fails is named at the end; all others are built.

    Raises:
        ConfigError: overrides that no run could have.
        QuickSilverError: the model or the text of the overrides cannot be had.
    """
    plain = _plain(overrides)
    answers = Answers(plain.results_dir)
    work, troubles = _jobs_of_all(overrides, answers)
    _run_missing([job for jobs in work.values() for job in jobs], answers, plain)
    for artefact, jobs in work.items():
        failed = [job for job in jobs if job.error is not None]
        if failed:
            troubles[artefact] = f"{len(failed)} of {len(jobs)} rows have no record"
        if jobs and all(job.record is None for job in jobs):
            troubles[artefact] = "nothing could be measured"
            continue
        with _collected(troubles, artefact):
            made = _build(artefact, jobs, plain, overrides)
            print(f"{artefact.kind} {artefact.number}: {made.written[0]} … {made.distance}", flush=True)
    _explain([job for jobs in work.values() for job in jobs if job.error is not None])
    for artefact, trouble in troubles.items():
        print(f"{artefact.kind} {artefact.number}: {trouble}. To repeat it: {_command(artefact, overrides)}", file=sys.stderr)
    total = len(artefacts())
    print(f"{total - len(troubles)} of {total} tables and figures are complete, in {plain.results_dir}/tables and figures.")
    return 1 if troubles else 0


def _jobs_of_all(overrides: Sequence[str], answers: Answers) -> tuple[dict[Artefact, list[_Job]], dict[Artefact, str]]:
    """The jobs of every artefact, and what is wrong with those that have none."""
    work: dict[Artefact, list[_Job]] = {}
    troubles: dict[Artefact, str] = {}
    for artefact in artefacts():
        with _collected(troubles, artefact):
            work[artefact] = [_job(row, overrides, answers) for row in artefact.experiment.rows()]
    return work, troubles


@contextmanager
def _collected(troubles: dict[Artefact, str], artefact: Artefact) -> Iterator[None]:
    """Keep what goes wrong with one artefact from the others."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, QuickSilverError):
            traceback.print_exc()
        troubles[artefact] = str(error) or repr(error)


def _command(artefact: Artefact, overrides: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "quicksilver.reproduce", artefact.kind, artefact.numbers[0], *overrides])


# --- the claims -----------------------------------------------------------------------------------------------------------------


def claims(overrides: Sequence[str]) -> int:
    """Print and write the claims ledger, from the records that are there; returns the exit code. Runs nothing.

    Raises:
        ConfigError: overrides that no run could have; an experiment that answers a claim or names a row that is not there.
        QuickSilverError: the model or the text of the overrides cannot be had.
    """
    from quicksilver.harness.store import Store
    from quicksilver.report.claims import Source, ledger
    from quicksilver.report.writing import write_files

    plain = _plain(overrides)
    work, troubles = _jobs_of_all(overrides, Answers(plain.results_dir))
    workplace = _workplace(plain) if any(job.config is not None for jobs in work.values() for job in jobs) else None
    store, sources, failed = Store(plain.results_dir), [], []
    for artefact, jobs in work.items():
        with _collected(troubles, artefact):
            outcomes = [_recorded(job, store, workplace) for job in jobs]
            sources.append(Source(artefact, outcomes, _make(artefact, overrides)))
            failed += [job for job in jobs if job.error is not None]
    table = ledger(sources, _name("claims", plain, overrides))
    print(table.text(shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    contents = {f"{table.name}.md": table.markdown().encode(), f"{table.name}.csv": table.csv().encode()}
    print("Written: " + ", ".join(map(str, write_files(store.root, contents))))
    _explain(failed)
    for artefact, trouble in troubles.items():
        print(f"{artefact.kind} {artefact.number}: {trouble}", file=sys.stderr)
    return 1 if failed or troubles else 0


def _make(artefact: Artefact, overrides: Sequence[str]) -> str:
    """`make reproduce-table TABLE=11 MODEL=gpt2-large`, with the words of the command line."""
    parts = ["make", f"reproduce-{artefact.kind}", f"{artefact.kind.upper()}={artefact.numbers[0]}"]
    selected = [word for word in overrides if word.split("=")[0] in ("model", "dataset")]
    parts += [f"{key.upper()}={value}" for key, value in (word.split("=", 1) for word in selected)]
    more = [word for word in overrides if word not in selected]
    return shlex.join(parts) + (f" ARGS={shlex.quote(shlex.join(more))}" if more else "")


def _recorded(job: _Job, store: Store, workplace: Workplace | None) -> Outcome:
    """The job's outcome as far as it is on disk; a record that is damaged makes it fail."""
    try:
        if job.config is not None:
            from quicksilver.harness.run import plan

            job.record = store.get(plan([job.config], workplace)[-1].fingerprint)
        return Outcome(job.row, job.record, store.dense_of(job.record) if job.record else None, job.reason)
    except QuickSilverError as error:
        job.record = None
        job.fail(error)
        return Outcome(job.row, reason=job.reason)


# --- report -----------------------------------------------------------------------------------------------------------------------


def write_report(overrides: Sequence[str]) -> int:
    """The site of everything that was written so far; says what is missing in it and returns the exit code.

    Raises:
        ConfigError: nothing was written yet, or a library is not installed.
    """
    from quicksilver.harness.config import compose

    try:
        from quicksilver.report.site import describe, make
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "quicksilver":
            raise
        raise ConfigError(
            f"The report needs {error.name}, which is not installed: pip install 'quicksilver[report,plots]'."
        ) from error
    page, problems = make(compose(list(overrides)).results_dir)
    print(f"Written: {page}")
    if problems:
        print(f"Missing in it:\n{describe(problems)}", file=sys.stderr)
    return 1 if problems else 0


# --- README ---------------------------------------------------------------------------------------------------------------------

_MARKED = re.compile(r"(<!-- (\w+):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)


def fill_readme(readme: Path, results: Path) -> str:
    """Put every written table or figure between its markers `<!-- NAME:begin -->` and `<!-- NAME:end -->`; says what was done.

    Raises:
        ConfigError: no README there, or something marked that was not written yet.
    """
    if not readme.is_file():
        raise ConfigError(f"{readme} is not there: this command is for a clone of the repository.")
    titles = {artefact.name: artefact.title for artefact in artefacts()}
    names = []

    def filled(match: re.Match[str]) -> str:
        name = match[2]
        kind = "figure" if name.startswith("figure") else "table"
        path = results / f"{kind}s" / f"{name}.{'png' if kind == 'figure' else 'md'}"
        if not path.is_file():
            number = (
                name.removeprefix(f"{kind}_") if name[len(kind)] == "_" else name.removeprefix(kind).split("_")[0].lstrip("0")
            )
            raise ConfigError(f"{path} is not there: make it first, make reproduce-{kind} {kind.upper()}={number}.")
        names.append(name)
        if kind == "figure":
            title = titles.get(name, name)
            return f"{match[1]}![{title[:1].upper()}{title[1:]}]({path.as_posix()})\n{match[3]}"
        # One level deeper: the table is a part of the README.
        return match[1] + re.sub(r"^#", "##", path.read_text(encoding="utf-8"), flags=re.MULTILINE) + match[3]

    content = _MARKED.sub(filled, readme.read_text(encoding="utf-8"))
    readme.write_text(content, encoding="utf-8")
    return f"{readme}: {', '.join(names) or 'no markers found'}"


if __name__ == "__main__":
    sys.exit(main())
