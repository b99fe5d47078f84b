"""Table token_halting_claims: what the second paper's abstract and introduction state (arXiv 2303.05078), beside what was measured here.

They print no number, so the rule of docs/verdicts.md has nothing to compare with: a statement that something is better is reproduced where the
interval of the difference lies above 0, not reproduced where it lies below, and undecided where it holds 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.cells import signed
from quicksilver.report.table import Column, Lines, Panel, Table

from . import study

PANEL = "claims"
# (quote, what is compared, detector, policy, against, with recycling)
BETTER: tuple[tuple[str, str, str, str, str, bool], ...] = (
    (
        "Our method significantly improves the Pareto frontier of efficiency versus accuracy when compared with the existing approaches",
        "AP of learned halting minus that of halting by feature norm, the best rule here, at the same rates",
        *("box", "learned", "norm", True),
    ),
    ("the same", "the same without recycling", *("box", "learned", "norm", False)),
    (
        "deciding whether or not to halt a token needs to depend on the input",
        "AP of learned halting minus that of random halting at the same rates",
        *("box", "learned", "random", True),
    ),
    (
        "A non-uniform token sparsity loss is employed to improve the learning of the halting module",
        "AP with box weights minus that with uniform weights",
        *("box", "learned", "uniform", True),
    ),
    ("the same", "the same without recycling", *("box", "learned", "uniform", False)),
)
WIDER = "By halting tokens and increasing model capacity, we are able to improve the baseline model's performance without increasing the model's latency"
RECYCLED = "our framework allows halted tokens to be reused to inform the model's predictions through a straightforward token recycling mechanism"
PSEUDO = "a theoretical analysis is conducted to evaluate the accuracy of the pseudo-gradient"


def rows() -> list[Row]:
    """None: the study has frames of its own."""
    return []


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """One row a statement."""
    found = pd.DataFrame(_judged(), columns=["quote", "compared", "difference", "low", "high", "verdict", "why"])
    found.insert(0, "panel", PANEL)
    found.insert(1, "section", "")
    panel = Panel(PANEL, "Statements of the abstract and the introduction, at the paper's threshold p < ½", COLUMNS, study.note())
    return Table(name, "What arXiv 2303.05078 states, and what was measured", found, (panel,), LEGEND)


def verdict(low: float, high: float) -> str:
    """Of a statement that a difference is above 0."""
    return "reproduced" if low > 0 else "not reproduced" if high < 0 else "undecided"


def _judged() -> list[tuple[object, ...]]:
    apart, each, slopes = study.frame("differences"), study.frame("evaluations"), study.frame("gradients")
    made: list[tuple[object, ...]] = []
    for quote, compared, detector, policy, against, recycled in BETTER:
        if apart.empty:
            made.append((quote, compared, None, None, None, "not measured", study.COMMAND))
            continue
        chosen = apart[
            (apart["detector"] == detector) & (apart["policy"] == policy) & (apart["dial"] == study.PAPER_THRESHOLD)
            & (apart["against"] == against) & (apart["recycled"] == recycled)
        ]  # fmt: skip
        (one,) = chosen.to_dict("records")
        why = "95% over scenes, mean of seeds"
        made.append((quote, compared, one["difference"], one["low"], one["high"], verdict(one["low"], one["high"]), why))
    if not each.empty:
        box = each[(each["detector"] == "box") & (each["policy"] == "learned") & (each["dial"] == study.PAPER_THRESHOLD)]
        gain = box["ap"] - box["ap_unrecycled"]
        said = "from the least to the greatest of the seeds"
        made.append(
            (
                RECYCLED,
                "AP with recycling minus without",
                gain.mean(),
                gain.min(),
                gain.max(),
                verdict(gain.min(), gain.max()),
                said,
            )
        )
    made.append(_wider(each))
    if not slopes.empty:
        own = slopes[slopes["estimate"] == "both"]["correlation"]
        compared = "correlation of the pseudo-gradient with the effect of turning the decision round"
        said = "from the least to the greatest, layer by layer, kept and halted tokens apart"
        made.append((PSEUDO, compared, own.mean(), own.min(), own.max(), verdict(own.min(), own.max()), said))
    return made


def _wider(each: pd.DataFrame) -> tuple[object, ...]:
    compared = "AP of a wider detector that halts minus that of the dense one, at no more time"
    timed = study.frame("timing")
    if each.empty or "wide_box" not in set(each["detector"]) or timed.empty:
        return WIDER, compared, None, None, None, "not measured", f"the wider detector was not trained: {study.COMMAND}"
    wide = each[(each["detector"] == "wide_box") & (each["dial"] == study.PAPER_THRESHOLD)].set_index("seed")["ap"]
    dense = each[each["detector"] == "control"].set_index("seed")["ap"]
    gain = wide - dense
    ratio = float(timed.set_index("detector").loc["wide_box", "latency_ratio"])
    judged = verdict(gain.min(), gain.max()) if ratio <= 1 else "not reproduced"
    return WIDER, compared, gain.mean(), gain.min(), gain.max(), judged, f"it takes {ratio:.2f} of the dense detector's time"


def _words(key: str, width: int) -> object:
    import textwrap

    return lambda row: tuple(textwrap.wrap(str(row[key]), width)) or ("",)


def _measured(row: Mapping[str, object]) -> Lines:
    if pd.isna(row["difference"]):
        return ("-",)
    return (f"{signed(row['difference'], 3)} [{signed(row['low'], 3)} {signed(row['high'], 3)}]",)  # type: ignore[arg-type]


COLUMNS = (
    Column("", "the paper states", _words("quote", 44), align="left"),  # type: ignore[arg-type]
    Column("", "compared", _words("compared", 34), align="left"),  # type: ignore[arg-type]
    Column("", "measured", _measured),
    Column("", "verdict", lambda row: (row["verdict"],), align="left"),
    Column("", "why", _words("why", 34), align="left"),  # type: ignore[arg-type]
)

LEGEND = (
    "reproduced: the interval lies above 0; not reproduced: below; undecided: it holds 0. The paper's text at hand prints no number.",
    "On small detectors of made scenes, not on the Waymo Open Dataset: a verdict does not say that the paper is wrong.",
)
