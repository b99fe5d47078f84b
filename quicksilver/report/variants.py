"""The tables and figures that the repository has more than once: of another model, and on another text.

A variant is the same artefact of the same experiment with other overrides. Its files lie beside those of the default selection, with its name
behind theirs: results/tables/table11-reference-llama-python-docs.md. results/variants.md lists them, and says of each that is missing why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicksilver.report.artefacts import Artefact

if TYPE_CHECKING:
    from quicksilver.harness.jobs import Job

DEFAULT = "reference-gpt2 · python-docs"


@dataclass(frozen=True)
class Variant:
    """One selection of model and text.

    Attributes:
        name: behind the name of a table or figure.
        title: for people.
        overrides: the selection; 32 windows where a table asks for none of its own, as of the default text.
    """

    name: str
    title: str
    overrides: tuple[str, ...]


VARIANTS = (
    Variant("reference-llama-python-docs", "reference-llama · python-docs", ("model=reference-llama",)),
    Variant("reference-gpt2-wikitext103", "reference-gpt2 · WikiText-103", ("dataset=wikitext103", "dataset.windows=32")),
)


# Not repeated, and why: pictures of single runs and tokens, whose traces and arrays would fill the repository; scores of models that were
# fine-tuned for the tasks they are scored on, which no other model can do.
_ONE_RUN = "shows one run token by token: one selection is enough here, the command draws it of any other"
_TASKS = "is of tasks and of the models fine-tuned for them: a model that was not answers them by chance"
LEFT_OUT = dict.fromkeys(
    [f"figure{number}" for number in ("02", "05_17", "09", "10", "11", "12", "13", "14", "19", "20", "21", "22")]
    + ["figure_word_signals"],
    _ONE_RUN,
) | dict.fromkeys(["table04", "figure03_18"], _TASKS)


def selected_by(overrides: Sequence[str]) -> Variant | None:
    """The variant that these overrides select; None: none, or they change more."""
    return next((one for one in VARIANTS if set(one.overrides) == set(overrides)), None)


def of_name(name: str, artefact: str) -> Variant | None:
    """The variant of `artefact` (`table11`) that is called `name`; None: it is none."""
    return next((one for one in VARIANTS if name == f"{artefact}-{one.name}"), None)


def why_not(name: str, jobs: Sequence[Job], default: Sequence[str]) -> str | None:
    """Why there is no variant of an artefact; None: there is one.

    Args:
        name: the artefact's, `table11`.
        jobs: its rows under the variant's overrides, with the records that there are.
        default: fingerprints of the records of the default selection.
    """
    if not jobs:
        return "asks for no run of a model"
    if name in LEFT_OUT:
        return LEFT_OUT[name]
    found = {job.record.fingerprint for job in jobs if job.record is not None}
    if found and found <= set(default):
        return "is of models and texts of its own, the same under any selection"
    failed = next((str(job.error) for job in jobs if job.error is not None), None)
    if failed is not None:
        return failed
    lacking = sum(job.record is None and job.reason is None for job in jobs)
    return f"its runs were not made: {lacking} of {len(jobs)} rows have no record" if lacking else None


def index(there: Mapping[Variant, Mapping[Artefact, str | None]], commands: Mapping[Variant, Mapping[Artefact, str]]) -> str:
    """The page that lists them, as Markdown.

    Args:
        there: by variant and artefact, why it is missing; None: it is there.
        commands: what makes each.
    """
    artefacts = list(next(iter(there.values())))
    head = ["", DEFAULT, *(variant.title for variant in there)]
    lines = [
        "# Tables and figures of other models and texts",
        f"The repository has each table and figure for {DEFAULT}, and where the selection means something and its runs were made, a second and third "
        "time. Numbers, notes and records stand in each; pictures and JSON lie beside, CSV and LaTeX are written by the command that repeats it.",
        "\n".join([_line(head), "|" + " :-- |" * len(head), *(_line(_cells(one, there)) for one in artefacts)]),
    ]
    for variant, missing in there.items():
        reasons: dict[str, list[Artefact]] = {}
        for artefact, why in missing.items():
            if why is not None:
                reasons.setdefault(why, []).append(artefact)
        said = [f"- {', '.join(f'{one.kind} {one.number}' for one in those)}: {why}" for why, those in reasons.items()]
        example = next((commands[variant][one] for one, why in missing.items() if why is None), None)
        made = [f"Made by `{example}`, and so on."] if example else []
        lines += [f"## Not there for {variant.title}", "\n".join(said), *made]
    return "\n\n".join(lines) + "\n"


def _cells(artefact: Artefact, there: Mapping[Variant, Mapping[Artefact, str | None]]) -> list[str]:
    suffix = "md" if artefact.kind == "table" else "png"
    names = [
        artefact.name,
        *(f"{artefact.name}-{one.name}" if missing[artefact] is None else "" for one, missing in there.items()),
    ]
    title = f"{artefact.kind} {artefact.number}: {artefact.title}"
    return [title, *(f"[{artefact.kind}]({artefact.kind}s/{name}.{suffix})" if name else "" for name in names)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
