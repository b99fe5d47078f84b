"""Table lenses: what the entropy of a middle layer is worth, read by the paper's logit lens and by a lens fitted to the model.

The paper halts a token whose entropy is low. A lens that knows less than uniform reads noise, and noise chooses nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.measure.lenses import LensesResult
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, number

# panel -> title, defaults
PANELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "asked": ("The model and text that were asked for", ()),
    "llama": ("reference-llama", ("model=reference-llama",)),
}
KEY = "dense"
LEGEND = (
    "loss: of the next token, nats, when the state after that layer is read as if it were the last. Above that of a uniform guess, which stands below the panel, the lens "
    "knows less than nothing of it.",
    "r: correlation of a token's entropy there with its entropy at the end, with its 95% interval, bootstrap over windows. What halts tokens of low "
    "entropy in the middle goes by this number.",
    "tuned lens: ridge regression of the head's input on calibration text, one map a layer (arXiv 2303.08112 fits by KL). - where none ships with the model.",
)


def rows() -> list[Row]:
    """The dense model, and reference-llama."""
    always = ("protocol=all", "measure=lenses", "dataset.windows=16", "modules=[]")
    return [Row(panel, "", KEY, title, (*always, *more)) for panel, (title, more) in PANELS.items()]


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A panel a model, a row a layer."""
    frame = pd.DataFrame([row for outcome in outcomes for row in _rows(outcome)], columns=COLUMNS)
    columns = (
        Column("", "after layer", lambda row: (f"{row['layer']}",), align="left"),
        *(
            Column(said, heading, cell)
            for lens, said in (("logit", "logit lens"), ("tuned", "tuned lens"))
            for heading, cell in (
                ("loss", _nats(f"{lens}_nats")), ("entropy", _nats(f"{lens}_entropy_nats")), ("r", _correlation(lens)),
            )
        ),
    )  # fmt: skip
    panels = tuple(
        Panel(key, title, columns, tuple(_notes([one for one in outcomes if one.row.panel == key])))
        for key, (title, _) in PANELS.items()
    )
    return Table(name, "What a lens reads in the middle layers", frame, panels, LEGEND)


_OF = [f"{lens}_{what}" for lens in ("logit", "tuned") for what in ("nats", "entropy_nats", "r", "r_low", "r_high")]
COLUMNS = ["panel", "section", "key", "layer", *_OF, "record"]


def _rows(outcome: Outcome) -> Iterator[dict[str, Any]]:
    if outcome.record is None:
        return
    by_layer: dict[int, dict[str, Any]] = {}
    for one in outcome.record.measured("lenses", LensesResult).readings:
        row = by_layer.setdefault(
            one.layer, {"panel": outcome.row.panel, "section": "", "key": f"{one.layer}", "layer": one.layer}
        )
        lens = one.lens.split()[0]
        row |= {f"{lens}_nats": one.nats, f"{lens}_entropy_nats": one.entropy_nats, f"{lens}_r": one.correlation}
        row |= {
            f"{lens}_r_low": one.correlation_low,
            f"{lens}_r_high": one.correlation_high,
            "record": outcome.record.fingerprint,
        }
    yield from by_layer.values()


def _notes(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        if outcome.record is None:
            yield f"{outcome.row.technique}: {outcome.reason}."
            continue
        found = outcome.record.measured("lenses", LensesResult)
        yield (
            f"A uniform guess loses {found.uniform_nats:.2f} nats a token, the model itself {found.final_nats:.2f}, at a mean entropy of "
            f"{found.final_entropy_nats:.2f}; {found.tokens:,} tokens in {found.windows} windows."
        )
        if found.no_tuned_because is not None:
            yield "No tuned lens ships with this model."
    yield from provenance.notes(outcomes)


def _nats(key: str) -> Any:
    return lambda row: (NO_VALUE if (value := number(row, key)) is None else f"{value:.2f}",)


def _correlation(lens: str) -> Any:
    def cell(row: Mapping[str, Any]) -> Lines:
        value, low, high = (number(row, f"{lens}_r{end}") for end in ("", "_low", "_high"))
        return (NO_VALUE,) if value is None else (f"{value:.2f}", f"[{low:.2f} {high:.2f}]")

    return cell
