"""Table fair_trial: the paper's best chance, every setting that it names searched on calibration text, the winners tested.

Of a mechanism's settings that save at least a budget of the prompt's operations, the one with the least KL to the dense model wins
(`fair_trial.py` has the settings and the frozen winners). Quantization is not searched: simulated widths save no executed operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, interval_cell, number, signed, versus_null_cell

from . import fair_trial

_SHOWN = 3  # best settings at each budget; the frame has all


def rows() -> list[Row]:
    """The whole search, and the winners on the test text."""
    return fair_trial.rows()


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """The best of the search, then the test."""
    frame = fair_trial.frame(outcomes)
    saved = Column("saved of the prompt", "exec %", lambda row: (signed(number(row, "prompt_executed_flops_saved_pct")),))
    kl = Column("", "KL × 100", _kl)
    search = Panel(
        fair_trial.SEARCH,
        "Search on calibration text: the settings with the least KL to the dense model at each budget",
        (Column("", "setting", lambda row: (row["technique"],), align="left"), saved, kl, Column("", "wins at", _wins)),
        provenance.notes([one for one in outcomes if one.row.panel == fair_trial.SEARCH])[
            :-1
        ],  # hundreds of records: in the frame
    )
    test = Panel(
        fair_trial.TEST,
        "Test text: the frozen winners",
        (
            Column("", "setting", lambda row: (row["technique"],), align="left"),
            Column("", "for", lambda row: (NO_VALUE if pd.isna(row["budget_pct"]) else f"{row['budget_pct']:g}%",)),
            saved,
            Column("perplexity", "Δppl", lambda row: interval_cell(row, "delta_ppl")),
            kl,
            Column("perplexity", "vs null", versus_null_cell),
            Column("", "search agrees", lambda row: (NO_VALUE if row["still_wins"] is None else "yes" if row["still_wins"] else "no",)),
        ),
        provenance.notes([one for one in outcomes if one.row.panel == fair_trial.TEST]),
    )  # fmt: skip
    legend = (
        *_verdict(frame),
        "exec: operations of the prompt that really ran, signals included, against dense inference; negative: more than dense.",
        "KL × 100: of the dense model's next-token distribution to the run's, hundredths of a nat a token.",
        "wins at: the setting has the least KL of all that save at least so much. A budget that no setting reaches has no winner.",
        "search agrees: the winner that was frozen before the test is still the one that the search above finds.",
        _none_reaches(frame),
    )
    title = "The paper's best chance: its mechanisms under any of their settings (protocol continuation)"
    shown = frame[(frame["panel"] == fair_trial.TEST) | _best(frame)].reset_index(drop=True)
    return Table(name, title, shown, (search, test), legend)


def _verdict(frame: pd.DataFrame) -> tuple[str, ...]:
    """What the best of all settings costs on the test text, budget by budget; which is best, calibration text says."""
    tested = frame[frame["panel"] == fair_trial.TEST].set_index("key")
    said = []
    for budget in fair_trial.BUDGETS_PCT:
        winners = {mechanism: fair_trial.winner(frame, mechanism, budget) for mechanism in fair_trial.MECHANISMS}
        kl = {mechanism: float(frame.loc[place, "kl_nats"]) for mechanism, place in winners.items() if place is not None}
        if not kl:
            continue
        best = min(kl, key=lambda mechanism: kl[mechanism])
        name = f"{fair_trial.MECHANISMS[best]} ({frame.loc[winners[best], 'technique']})"
        row = tested.loc[f"{best}.{budget}"] if f"{best}.{budget}" in tested.index else None
        if row is None or not row["still_wins"] or pd.isna(row["delta_ppl_pct"]):
            frozen = row is not None and row["still_wins"]
            said.append(
                f"for {budget}% {name}, which {'has no record on the test text' if frozen else 'was not frozen and so not tested'}"
            )
            continue
        cost, low, high = (signed(row[f"delta_ppl_pct{end}"]) for end in ("", "_low", "_high"))
        saved = f"{row['prompt_executed_flops_saved_pct']:.1f}%"
        said.append(f"for {budget}% {name}, which on the test text saves {saved} and costs {cost}% [{low}, {high}] perplexity")
    return (
        (f"Under the paper's mechanisms and any of these settings, the best on calibration text is {'; '.join(said)}.",)
        if said
        else ()
    )


def _best(frame: pd.DataFrame) -> pd.Series:
    """Rows of the search that are among the best of their mechanism at some budget."""
    best = pd.Series(False, index=frame.index)
    for mechanism in fair_trial.MECHANISMS:
        for budget in fair_trial.BUDGETS_PCT:
            enough = (
                (frame["panel"] == fair_trial.SEARCH)
                & (frame["section"] == mechanism)
                & (frame["prompt_executed_flops_saved_pct"] >= budget)
            )
            best |= frame.index.isin(frame.loc[enough, "kl_nats"].dropna().astype(float).nsmallest(_SHOWN).index)
    return best


def _none_reaches(frame: pd.DataFrame) -> str:
    none = [
        f"{title} at {budget}%"
        for mechanism, title in fair_trial.MECHANISMS.items()
        for budget in fair_trial.BUDGETS_PCT
        if fair_trial.winner(frame, mechanism, budget) is None
    ]
    searched = ", ".join(
        f"{len(fair_trial.settings(mechanism))} of {title}" for mechanism, title in fair_trial.MECHANISMS.items()
    )
    return f"Searched: {searched}. No setting saves enough: {', '.join(none) or 'none'}."


def _kl(row: Mapping[str, Any]) -> Lines:
    value = number(row, "kl_nats")
    return (NO_VALUE if value is None else f"{100 * value:.2f}",)


def _wins(row: Mapping[str, Any]) -> Lines:
    return (row["wins_at"] or "",)
