"""From an artefact of `experiments/` and the overrides of a person to its jobs, and from their records to the files in results/."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quicksilver.files import write_files
from quicksilver.records.store import KEPT
from quicksilver.report.artefacts import Artefact, Outcome, Row, artefacts
from quicksilver.report.table import markdown, read
from quicksilver.runs.jobs import FAILED, Job, RecordIndex, make_job
from quicksilver.runtime.errors import ConfigError, QuickSilverError

if TYPE_CHECKING:
    from quicksilver.records.store import Store
    from quicksilver.report.figure import Figure
    from quicksilver.report.table import Table
    from quicksilver.runs.config import RunConfig
    from quicksilver.runs.context import RunContext

UNUSABLE = "its record cannot be used"  # what is wrong with it is said beside the table
FOUND = "Found: "  # begins a line of a table's legend that README shows above the table's rows
_NEUTRAL = ("results_dir", "records", "data.root", "tracker")  # where something is or goes: no other name for the table
LOCAL_SUFFIX = "-mine"  # behind the name of what has records of this machine: what the repository has is not overwritten


class Made(NamedTuple):
    """A table or figure that was written; `distance` says in a sentence how far it is from the committed one, unless its notes do."""

    product: Table | Figure
    distance: str
    written: list[Path]


def base_config(overrides: Sequence[str]) -> RunConfig:
    """The config that the overrides of a person alone compose.
    Raises ConfigError: overrides that no artefact takes."""
    from quicksilver.records.stats import MIN_WINDOWS
    from quicksilver.runs.config import compose

    for override in overrides:
        key = override.lstrip("+~").split("=")[0]
        if key in ("protocol", "protocol.name") or key.split(".")[0] == "modules":
            vary = f"To vary them: quicksilver run {shlex.quote(override)} …"
            raise ConfigError(f"{override}: a table or figure sets protocol and modules itself. {vary}")
    base = compose(list(overrides))
    if base.dataset.windows is not None and base.dataset.windows < MIN_WINDOWS:
        raise ConfigError(f"dataset.windows={base.dataset.windows}: intervals need at least {MIN_WINDOWS} windows.")
    return base


def all_kept(outcomes: Sequence[Outcome], store: Store) -> bool:
    """Whether the repository has every record behind these outcomes; also where it has none at all: then nothing of it can be overwritten."""
    return not (store.root / KEPT).is_dir() or all(record.is_kept for one in outcomes for record in one.records)


def jobs_of(artefact: Artefact, overrides: Sequence[str], answers: RecordIndex, *, to_run: bool = True) -> list[Job]:
    """One job for each row of the artefact, in their order; `to_run` as in `make_job`. A variant leaves a row the text that it has of its own."""
    made = []
    for row in artefact.experiment.rows():
        text = any(word.startswith("dataset=") for word in row.defaults) and selected_by(_given(overrides)) is not None
        asked = [word for word in overrides if not (text and word.startswith("dataset="))]
        made.append(make_job(f"{row.panel} {row.key}", row.words(asked), answers, to_run=to_run))
    return made


def _given(overrides: Sequence[str]) -> list[str]:
    """Those that change what is measured."""
    return [override for override in overrides if override.split("=")[0] not in _NEUTRAL]


def build(artefact: Artefact, jobs: Sequence[Job], base: RunConfig, overrides: Sequence[str], *, svg: bool = False) -> Made:
    """Make the artefact from its records and write it into results/tables or results/figures; `svg`: a figure's vector graphics too."""
    from quicksilver.records import archive
    from quicksilver.report.comparison import committed, distance
    from quicksilver.report.table import Table
    from quicksilver.runs.run import store_of

    store = store_of(base)
    outcomes = [_sound(row, job, store) for row, job in zip(artefact.experiment.rows(), jobs, strict=True)]
    name = name_of(artefact.name, base, overrides)
    folder = Path(base.results_dir) / f"{artefact.kind}s"
    path = folder / f"{name}.json"
    # What was written has rows from records that the repository keeps and these outcomes lack: text that is not here, say.
    here = {record.fingerprint for one in outcomes for record in one.records}
    says_less = path.is_file() and not here.issuperset({*read(path).records}.intersection(archive.names(store.root / KEPT)))
    reference = committed(path.with_suffix(".csv"))
    product = artefact.build(outcomes, name if all_kept(outcomes, store) and not says_less else f"{name}{LOCAL_SUFFIX}")
    written = product.write(folder, svg=True) if svg and not isinstance(product, Table) else product.write(folder)
    own = [record for one in outcomes for record in one.records if not record.is_kept]
    confirmed = bool(own) and all(record.confirmed is not None for record in own)  # its notes say how far it is
    return Made(product, "" if confirmed else distance(product.frame, reference, f"{name}.csv"), written)


def recorded(
    artefact: Artefact, jobs: Sequence[Job], store: Store, place: RunContext | None, answers: RecordIndex
) -> list[Outcome]:
    """The outcomes of the artefact as far as they are on disk; nothing is run. A damaged record makes its job fail. `answers` learns them."""
    from quicksilver.runs.context import RunContext

    found = []
    for row, job in zip(artefact.experiment.rows(), jobs, strict=True):
        try:
            if job.config is not None:
                fingerprint = job.planned(place or RunContext()).wanted[0].fingerprint
                job.record = store.get(fingerprint)
                answers.put(job.overrides, job.config, fingerprint=fingerprint)
            found.append(_sound(row, job, store))
        except QuickSilverError as error:
            job.record = None
            job.fail(error)
            found.append(Outcome(row, reason=job.reason))
        if job.reason == FAILED:
            found[-1] = Outcome(row, reason=f"{FAILED}: {str(job.error).partition(': ')[0]}")
    return found


def _sound(row: Row, job: Job, store: Store) -> Outcome:
    """The row with its record; a record that cannot be read to its end costs this row and no other."""
    if job.record is None:
        return Outcome(row, reason=job.reason)
    from quicksilver.records.record import check_files
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
    from quicksilver.runs.config import compose

    given = _given(overrides)
    if (variant := selected_by(given)) is not None:
        return f"{name}-{variant.name}"
    default = compose([])
    more = sorted(override for override in given if override.split("=")[0] not in ("model", "dataset"))
    of = (base.model.name, base.dataset.name)
    parts = [name, *of] if more or of != (default.model.name, default.dataset.name) else [name]
    parts += [hashlib.sha256("\n".join(more).encode()).hexdigest()[:6]] if more else []
    return re.sub(r"[^\w.-]", "_", "-".join(parts))  # a model's name may be a path


def command_of(artefact: Artefact, overrides: Sequence[str]) -> str:
    """`quicksilver reproduce table 11 model=gpt2-large`: what repeats the artefact anywhere."""
    return shlex.join(["quicksilver", "reproduce", artefact.kind, artefact.numbers[0], *overrides])


# --- other models and texts -------------------------------------------------------------------------------------------------------
DEFAULT = "far-gpt2 · python-source"


class Variant(NamedTuple):
    """A selection of model, text or size of which the repository has tables and figures too, beside those of the default one.

    Attributes:
        name: behind the name of a table or figure.
        title: for people.
        overrides: the selection; 32 windows where neither it nor a table asks for others.
    """

    name: str
    title: str
    overrides: tuple[str, ...]


VARIANTS = tuple(
    Variant(name, title, tuple(words.split()))
    for name, title, words in (
        ("far-llama-python-source", "far-llama · python-source", "model=far-llama"),
        # Models that use little of their context.
        ("reference-gpt2-python-docs", "reference-gpt2 · python-docs", "model=reference-gpt2 dataset=python-docs"),
        ("reference-llama-python-docs", "reference-llama · python-docs", "model=reference-llama dataset=python-docs"),
        (
            "reference-gpt2-wikitext103",
            "reference-gpt2 · WikiText-103",
            "model=reference-gpt2 dataset=wikitext103 dataset.windows=32",
        ),
        # With the power that the first command has no time for. More windows change no time.
        (
            "128-windows",
            f"{DEFAULT}, 3 random draws, 128 windows instead of 32, nothing timed",
            "dataset.windows=128 measure.null_control.seeds=3 measure.latency.enabled=false measure.emissions.enabled=false",
        ),
    )
)


# Not repeated, and why: pictures of single runs and tokens, whose traces and arrays would fill the repository; scores of models that were
# fine-tuned for the tasks they are scored on, which no other model can do.
_PICTURES = "figure02 figure05_17 figure09 figure10 figure11 figure12 figure13 figure14 figure19 figure20 figure21 figure22"
_ONE_RUN = "shows one run token by token: one selection is enough here, the command draws it of any other"
_TASKS = "needs models fine-tuned for tasks; others answer at random"
LEFT_OUT = dict.fromkeys([*_PICTURES.split(), "figure_word_signals"], _ONE_RUN) | dict.fromkeys(
    ["table04", "figure03_18"], _TASKS
)


def selected_by(overrides: Sequence[str]) -> Variant | None:
    """The variant that these overrides select, whether or not they name the default model or text too; None: none, or they change more."""
    model, dataset = DEFAULT.split(" · ")
    asked = {*overrides} - {f"model={model}", f"dataset={dataset}"}
    return next((one for one in VARIANTS if {*one.overrides} == asked), None)


def of_name(name: str, artefact: str) -> Variant | None:
    """The variant of `artefact` (`table11`) that is called `name`; None: it is none."""
    return next((one for one in VARIANTS if name == f"{artefact}-{one.name}"), None)


def why_not(name: str, jobs: Sequence[Job], default: Sequence[str]) -> str | None:
    """Why there is no variant of the artefact `name`, whose rows under the variant's overrides are `jobs`; None: there is one.
    `default`: fingerprints of the records of the default selection."""
    if not jobs:
        return "asks for no run of a model"
    if name in LEFT_OUT:
        return LEFT_OUT[name]
    found = {job.record.fingerprint for job in jobs if job.record is not None}
    if found and found <= set(default):
        return "fixes its own models, texts and windows"
    failed = next((str(job.error) for job in jobs if job.error is not None), None)
    lacking = any(job.record is None and job.reason is None for job in jobs)
    return failed or ("its runs, or some of them, were not made" if lacking else None)


def variants_page(
    there: Mapping[Variant, Mapping[Artefact, str | None]], commands: Mapping[Variant, Mapping[Artefact, str]]
) -> str:
    """The page that lists them, as Markdown. `there`: why each is missing, None where it is there; `commands`: what makes each."""
    ledgers = ["[ledger](claims.md)", *(f"[ledger](claims-{one.name}.md)" for one in there)]
    rows = [["", DEFAULT, *(one.title for one in there)], [":--"] * (2 + len(there))]
    rows.append(["claims of the paper, with verdicts", *ledgers])
    for artefact in next(iter(there.values())):
        title = f"{artefact.kind} {artefact.number}: {artefact.title}".replace("|", "\\|")
        suffix = "md" if artefact.kind == "table" else "png"
        names = [artefact.name, *(f"{artefact.name}-{one.name}" * (missing[artefact] is None) for one, missing in there.items())]
        rows.append([title, *(f"[{artefact.kind}]({artefact.kind}s/{name}.{suffix})" if name else "" for name in names)])
    parts = [
        "# Tables and figures of other models and texts",
        f"Each table and figure is there for {DEFAULT}, and for the other selections where applicable. Each has its numbers, notes and records. "
        "Pictures and JSON are beside it. The command that repeats it writes CSV and LaTeX. A table or figure with a text of its own keeps that text, "
        "whatever the selection's.",
        "\n".join("| " + " | ".join(row) + " |" for row in rows),
    ]
    for variant, missing in there.items():
        reasons: dict[str, list[str]] = {}
        for artefact, why in missing.items():
            if why:
                reasons.setdefault(why, []).append(f"{artefact.kind} {artefact.number}")
        listed = "\n".join(f"- {', '.join(those)}: {why}" for why, those in reasons.items())
        parts += [f"## Not there for {variant.title}", listed]
        made = next((commands[variant][one] for one, why in missing.items() if why is None), None)
        parts += [f"Made by `{made}`, and so on."] if made else []
    return "\n\n".join(parts) + "\n"


# --- README.md --------------------------------------------------------------------------------------------------------------------
def fill_readme(readme: Path, results: Path) -> str:
    """Put every written table or figure between its markers `<!-- NAME:begin -->` and `<!-- NAME:end -->`; says what was done.

    `NAME.rows` is a table's rows alone, with a line that says where they come from; `claims` is the one line that counts verdicts.
    Raises ConfigError: no README there, or something marked that was not written yet."""
    if not readme.is_file():
        raise ConfigError(f"{readme} is not there: this command is for a clone of the repository.")
    known = {artefact.name: artefact for artefact in artefacts()}
    names = []

    def filled(match: re.Match[str]) -> str:
        begin, name, only_rows, end = match.groups()
        artefact = known.get(name.partition("-")[0])  # behind it the name of a variant
        kind = artefact.kind if artefact is not None else "figure" if name.startswith("figure") else "table"
        path = results / "claims.json" if name == "claims" else results / f"{kind}s" / f"{name}.json"
        if not path.is_file():
            variant = of_name(name, artefact.name) if artefact is not None else None
            make = command_of(artefact, variant.overrides if variant else ()) if artefact is not None else "quicksilver claims"
            raise ConfigError(f"{path} is not there: make it first, {make}.")
        written = read(path)
        names.append(name)
        link = path.with_suffix(".md").as_posix()
        if name == "claims":
            counts, *others = written.title.split(". ")  # of other models and texts the page says more
            said = f"[{'. '.join((counts, *others[-1:]))}]({link}).\n"
        elif written.kind == "figure":
            title = artefact.title if artefact is not None else name
            said = f"![{title[:1].upper()}{title[1:]}]({path.with_name(written.pictures[0]).as_posix()})\n"
        elif only_rows:  # the first panel; below it model, text and protocol, and where the rest stands
            first, notes = dataclasses.replace(written.panels[0], notes=()), " ".join(written.panels[0].notes[:4])
            text = markdown(dataclasses.replace(written, panels=(first,), legend=()))
            rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
            found = (line.removeprefix(FOUND) for line in written.legend if line.startswith(FOUND))
            said = "".join(f"- {line[:1].upper()}{line[1:]}\n" for line in found)
            said += f"\n{rows}\n\n<sub>{notes} [What the columns mean, and the records]({link}).</sub>\n"
        else:
            said = markdown(written, level=3)  # one level deeper: the table is a part of the README
        return begin + said + end

    marked = re.compile(r"(<!-- ([\w-]+)(\.rows)?:begin -->\n).*?(<!-- \2(?:\.rows)?:end -->)", re.DOTALL)
    content = with_cells(marked.sub(filled, readme.read_text(encoding="utf-8")), results)
    write_files(readme.parent, {readme.name: content.encode()})
    return f"{readme}: {', '.join(names) or 'its numbers'}"


def with_cells(text: str, results: Path) -> str:
    """`text` with each number before `<!-- TABLE column=value,… COLUMN -->` as that cell of `results/tables/TABLE.json` has it, with as many
    decimals, and signed if it was. Of other models and texts the repository has no CSV.
    Raises ConfigError: no such table, or not one such cell."""

    def cell(match: re.Match[str]) -> str:
        shown, source, name, where, column = match.groups()
        path = results / "tables" / f"{name}.json"
        if not path.is_file():
            raise ConfigError(f"{path} is not there: make it first: quicksilver reproduce all.")
        rows = read(path).entries
        for one in where.split(","):
            key, _, value = one.partition("=")
            rows = [row for row in rows if str(row[key]) == value]
        if len(rows) != 1:
            raise ConfigError(f"{where} names {len(rows)} rows of {path}: name one.")
        decimals = len(shown.partition(".")[2].rstrip("%"))
        value = f"{rows[0][column]:{'+' * (shown[0] in '+-')}.{decimals}f}"
        return f"{value}{'%' * shown.endswith('%')}{source}"

    return re.sub(r"([+-]?\d+(?:\.\d+)?%?)(<!-- ([\w-]+) (\S+=\S+) (\w+) -->)", cell, text)
