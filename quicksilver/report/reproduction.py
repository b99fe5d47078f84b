"""From an artefact of `experiments/` and the overrides of a person to its jobs, and from their records to the files in results/."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quicksilver.harness.answers import Answer, Answers
from quicksilver.harness.jobs import Job, make_job
from quicksilver.harness.store import KEPT
from quicksilver.report.artefacts import Artefact, Outcome, Row
from quicksilver.report.variants import selected_by
from quicksilver.runtime.errors import ConfigError, QuickSilverError

if TYPE_CHECKING:
    from quicksilver.harness.config import RunConfig
    from quicksilver.harness.store import Store
    from quicksilver.harness.workplace import Workplace
    from quicksilver.report.figure import Figure
    from quicksilver.report.table import Table

UNUSABLE = "its record cannot be used"  # what is wrong with it is said beside the table
# Where something is or goes does not change what is measured: no other name for the table.
_NEUTRAL = ("results_dir", "records", "data.root", "tracker")
MINE = "-mine"  # behind the name of what has records of this machine: what the repository has is not overwritten


@dataclass(frozen=True)
class Made:
    """A table or figure that was written; `distance` says in a sentence how far it is from the committed one."""

    product: Table | Figure
    distance: str
    written: list[Path]


def base_config(overrides: Sequence[str]) -> RunConfig:
    """The config that the overrides of a person alone compose.

    Raises:
        ConfigError: overrides that no artefact takes.
    """
    from quicksilver.harness.config import compose

    for override in overrides:
        key = override.lstrip("+~").split("=")[0]
        if key in ("protocol", "protocol.name") or key.split(".")[0] == "modules":
            raise ConfigError(
                f"{override}: a table or figure sets protocol and modules itself. "
                f"To vary them: quicksilver run {shlex.quote(override)} …"
            )
    base = compose(list(overrides))
    from quicksilver.harness.stats import MIN_WINDOWS

    if base.dataset.windows is not None and base.dataset.windows < MIN_WINDOWS:
        raise ConfigError(f"dataset.windows={base.dataset.windows}: intervals need at least {MIN_WINDOWS} windows.")
    return base


def all_kept(outcomes: Sequence[Outcome], store: Store) -> bool:
    """Whether the repository has every record behind these outcomes; also where it has none at all: then nothing of it can be overwritten."""
    return not (store.root / KEPT).is_dir() or all(
        record.is_kept for one in outcomes for record in (one.record, one.dense) if record is not None
    )


def _says_less(written: Path, outcomes: Sequence[Outcome], store: Store) -> bool:
    """Whether the written version has rows from records that the repository keeps and these outcomes lack: text that is not here, say."""
    from quicksilver.harness import archive
    from quicksilver.report.written import read

    if not written.is_file():
        return False
    here = {record.fingerprint for one in outcomes for record in (one.record, one.dense) if record is not None}
    return not here.issuperset(set(read(written).records).intersection(archive.names(store.root / KEPT)))


def jobs_of(artefact: Artefact, overrides: Sequence[str], answers: Answers, *, to_run: bool = True) -> list[Job]:
    """One job for each row of the artefact, in their order; `to_run` as in `make_job`."""
    return [
        make_job(f"{row.panel} {row.key}", row.words(overrides), row.needs, answers, to_run=to_run)
        for row in artefact.experiment.rows()
    ]


def build(artefact: Artefact, jobs: Sequence[Job], base: RunConfig, overrides: Sequence[str], *, svg: bool = False) -> Made:
    """Make the artefact from its records and write it into results/tables or results/figures; `svg`: a figure's vector graphics too."""
    from quicksilver.harness.run import store_of
    from quicksilver.report.committed import committed, distance
    from quicksilver.report.provenance import confirmation
    from quicksilver.report.table import Table

    store = store_of(base)
    outcomes = [_sound(row, job, store) for row, job in zip(artefact.experiment.rows(), jobs, strict=True)]
    name = name_of(artefact.name, base, overrides)
    folder = Path(base.results_dir) / f"{artefact.kind}s"
    reference = committed(folder / f"{name}.csv")
    plain = all_kept(outcomes, store) and not _says_less(folder / f"{name}.json", outcomes, store)
    product = artefact.build(outcomes, name if plain else f"{name}{MINE}")
    written = product.write(folder, svg=True) if svg and not isinstance(product, Table) else product.write(folder)
    records = [record for one in outcomes for record in (one.record, one.dense) if record is not None]
    here = [record for record in records if not record.is_kept]
    return Made(product, confirmation(here) or distance(product.frame, reference, f"{name}.csv"), written)


def recorded(artefact: Artefact, jobs: Sequence[Job], store: Store, place: Workplace | None, answers: Answers) -> list[Outcome]:
    """The outcomes of the artefact as far as they are on disk; nothing is run. A record that is damaged makes its job fail. What was looked
    up goes into `answers`."""
    return [_recorded(row, job, store, place, answers) for row, job in zip(artefact.experiment.rows(), jobs, strict=True)]


def _recorded(row: Row, job: Job, store: Store, place: Workplace | None, answers: Answers) -> Outcome:
    try:
        if job.config is not None:
            from quicksilver.harness.run import plan

            fingerprint = plan([job.config], place)[-1].fingerprint
            job.record = store.get(fingerprint)
            answers.put(job.overrides, job.config, Answer(job.record, fingerprint=fingerprint))
        return _sound(row, job, store)
    except QuickSilverError as error:
        job.record = None
        job.fail(error)
        return Outcome(row, reason=job.reason)


def _sound(row: Row, job: Job, store: Store) -> Outcome:
    """The row with its record; a record that cannot be read to its end costs this row and no other."""
    if job.record is None:
        return Outcome(row, reason=job.reason)
    from quicksilver.harness.record import check_files
    from quicksilver.report.comparison import check_against_dense

    try:
        dense = store.dense_of(job.record)
        for record in (job.record, dense):
            check_files(record)
        check_against_dense(job.record, dense)
    except Exception as error:  # a record that was damaged may do anything
        known = isinstance(error, QuickSilverError)
        job.fail(error if known else ConfigError(f"{job.record.path} is damaged ({type(error).__name__}: {error})."))
        job.record, job.reason = None, UNUSABLE
        return Outcome(row, reason=UNUSABLE)
    return Outcome(row, job.record, dense, job.reason)


def name_of(name: str, base: RunConfig, overrides: Sequence[str]) -> str:
    """`table11` for the embedded default; model and dataset in the name of others, and a digest where more was changed than in a variant that the
    repository has."""
    from quicksilver.harness.config import compose

    variant = selected_by([override for override in overrides if override.split("=")[0] not in _NEUTRAL])
    if variant is not None:
        return f"{name}-{variant.name}"
    default = compose([])
    more = sorted(override for override in overrides if override.split("=")[0] not in ("model", "dataset", *_NEUTRAL))
    parts = [name]
    if more or (base.model.name, base.dataset.name) != (default.model.name, default.dataset.name):
        parts += [base.model.name, base.dataset.name]
    if more:
        parts.append(hashlib.sha256("\n".join(more).encode()).hexdigest()[:6])
    return re.sub(r"[^\w.-]", "_", "-".join(parts))  # a model's name may be a path


def make_command(artefact: Artefact, overrides: Sequence[str]) -> str:
    """`make reproduce-table TABLE=11 MODEL=gpt2-large`: what repeats the artefact in a clone."""
    parts = ["make", f"reproduce-{artefact.kind}", f"{artefact.kind.upper()}={artefact.numbers[0]}"]
    selected = [override for override in overrides if override.split("=")[0] in ("model", "dataset")]
    parts += [f"{key.upper()}={value}" for key, value in (override.split("=", 1) for override in selected)]
    more = [override for override in overrides if override not in selected]
    return shlex.join(parts) + (f" ARGS={shlex.quote(shlex.join(more))}" if more else "")


def command_of(artefact: Artefact, overrides: Sequence[str]) -> str:
    """`quicksilver reproduce table 11 model=gpt2-large`: what repeats the artefact anywhere."""
    return shlex.join(["quicksilver", "reproduce", artefact.kind, artefact.numbers[0], *overrides])
