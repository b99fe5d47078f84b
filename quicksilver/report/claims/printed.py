"""The claims ledger as a table: what is printed, and what the site lays out."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.report.cells import number
from quicksilver.report.claims.ledger import BY_DEFINITION, CONTRADICTIONS, VERDICTS, Source, frame
from quicksilver.report.provenance import SHORT
from quicksilver.report.table import Column, Lines, Panel, Table

LEGEND = (
    "measured: with its 95% interval, a time with the quartiles of its rounds; of several protocols each has its row. Perplexity is compared in percent of dense perplexity, "
    "operations in the paper's ledger, time in percent of dense inference in the same process.",
    "reproduced: the interval reaches the claim and rules out that it is wrong by nearly its whole size. partly: it rules that out and does "
    "not reach the claim. not reproduced: neither. A saving is judged no better than the quality claimed with it, by the same run: where that "
    "is not reproduced or undecided, neither is the saving reproduced. A quality is reproduced at the claimed saving only. not comparable: a "
    "setting, or an absolute number of another model or machine. not measured: no record, or an interval too wide. by definition: it could "
    "not be otherwise; not counted. The whole rule: docs/verdicts.md.",
    "contradiction, consistent: computed from the paper's numbers alone; choice: the paper leaves it open.",
    "A verdict is about the model and the text that were measured: it does not say that the paper's number is wrong on its own.",
)


def ledger(sources: Sequence[Source], name: str = "claims") -> Table:
    """The ledger as a table, a panel for each group of claims."""
    rows = frame(sources)
    panels = [
        Panel(str(group), f"{group}: {_counts(members)}", _columns(str(group)), _notes(members))
        for group, members in rows.groupby("panel", sort=False)
    ]
    claims = rows[rows["kind"] == "claim"]
    title = f"The claims of arXiv 2506.22396: {claims['claim'].nunique()} numbers in {len(claims)} rows, {_counts(claims)}"
    return Table(name, title, rows, tuple(panels), LEGEND)


def _counts(rows: pd.DataFrame) -> str:
    counts = Counter(rows["verdict"])
    order = [*VERDICTS, *(word for word in counts if word not in (*VERDICTS, BY_DEFINITION))]
    return ", ".join(f"{counts[word]} {word}" for word in order if counts[word])


def _notes(rows: pd.DataFrame) -> tuple[str, ...]:
    measured = rows[rows["record"] != ""]
    if measured.empty:
        return ()
    on = measured[["model", "weights_digest", "data", "token_digest"]].drop_duplicates()
    models = "; ".join(
        f"{one.model} (weights {one.weights_digest}) on {one.data} (tokens {one.token_digest})" for one in on.itertuples()
    )
    names = measured.drop_duplicates("record")["record"].str[:SHORT]
    return (f"Measured on {models}.", f"Records: {', '.join(names)}.")


def _columns(group: str) -> tuple[Column, ...]:
    if group == CONTRADICTIONS:
        return (
            Column("", "conflict", _words("claim", 26, "conflict."), align="left"),
            Column("", "#", lambda row: (row["reported"],), expendable=2),
            Column("", "the paper says", _words("quote", 44), align="left"),
            Column("", "verdict", lambda row: (row["verdict"],), align="left"),
            Column("", "computed; here", _words("why", 54), align="left"),
        )
    return (
        Column("", "claim", _words("claim", 34), align="left"),
        Column("", "paper", lambda row: (f"{row['reported']} {'' if row['unit'].startswith('% ') else row['unit']}".strip(),)),
        Column("", "compared", _compared, expendable=3),
        Column("", "measured", _measurement),
        Column("", "protocol", _protocol, align="left", expendable=1),
        Column("", "verdict", lambda row: (row["verdict"],), align="left"),
        Column("", "why", _words("why", 40), align="left"),
    )


def _words(column: str, width: int, without: str = "") -> Callable[[Mapping[str, Any]], Lines]:
    """A cell of wrapped words; commands are long words, and names break at their dots."""

    def cell(row: Mapping[str, Any]) -> Lines:
        text = str(row[column]).removeprefix(without)
        if column == "claim" and len(text) > width:
            head, _, tail = text.rpartition(".")
            return (f"{head}.", tail) if head else (tail,)
        if column == "why":
            text = "; ".join(filter(None, (text, row["versus_null"])))
        return tuple(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)) or ("",)

    return cell


def _compared(row: Mapping[str, Any]) -> Lines:
    """The claim in the unit of the measurement, where that is another."""
    if not row["unit"].startswith("% "):
        return ("",)
    low, high = number(row, "target_low"), number(row, "target_high")
    if low is None:
        return (f"≤ {high:.2f}%",)
    middle = (low + (high or 0.0)) / 2
    return (f"{middle:+.2f}%",)


def _measurement(row: Mapping[str, Any]) -> Lines:
    value, low, high = (number(row, name) for name in ("measured", "measured_low", "measured_high"))
    if value is None or low is None or high is None:
        return ("-",)
    size = max(abs(value), abs(low), abs(high))
    decimals = 3 if size < 0.1 else 2 if size < 10 else 1
    unit = "%" if row["unit"].startswith("%") else ""
    text = f"{value:.{decimals}f}{unit}"
    return (text,) if low == high else (text, f"[{low:.{decimals}f} {high:.{decimals}f}]")


def _protocol(row: Mapping[str, Any]) -> Lines:
    return (
        (f"{row['protocol']} †" if row["lookahead"] is True else row["protocol"],) if isinstance(row["protocol"], str) else ("",)
    )
