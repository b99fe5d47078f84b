"""Table fair_trial: the paper at its best, every setting that it names searched on calibration data, the winners tested.

Of a mechanism's settings that save at least a budget of the prompt's operations, the one with the least KL to the dense model wins
(`WINNERS` has them, frozen before the first test). Quantization is not searched: simulated widths save no executed operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pandas as pd

from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, interval_cell, number, signed, versus_null_cell

SEARCH, TEST = "search", "test"
BUDGETS_PCT = (5, 15, 25)
SEARCHED = ("protocol=continuation", "measure=sweep", "dataset.part=calibration", "dataset.windows=16")
TESTED = ("protocol=continuation", "measure=quick", "dataset.windows=128")
MECHANISMS = {"halting": "Token halting", "kv_skipping": "KV skipping", "fusion": "Token fusion"}
# Model -> mechanism and budget -> the setting that won on calibration text, frozen before the first test; nothing where no setting saved
# as much. Another model has those of the first, and so has a budget that was not frozen for a model.
FIRST = "reference-gpt2"
WINNERS: dict[str, dict[tuple[str, int], str]] = {
    FIRST: {
        ("halting", 5): "latent entropy, relative drift, p25, drop, resume 0, decided behind 3 layers",
        ("halting", 15): "latent entropy, relative drift, p40, drop, resume 0, decided behind 3 layers",
        ("halting", 25): "latent entropy, relative drift, p60, drop, resume 0, decided behind 3 layers",
        ("kv_skipping", 5): "0.75 of the prompt, from depth 0.4, 16 queries",
        ("fusion", 5): "l2, 0.15 of the prompt, from depth 0.4, last 16 left alone",
        ("fusion", 15): "l2, 0.3 of the prompt, from depth 0.4, last 16 left alone",
        ("fusion", 25): "cosine, 0.3 of the prompt, from depth 0.2, last 16 left alone",
    },
    "reference-llama": {
        ("halting", 5): "latent entropy, relative drift, p25, drop, resume 4",
        ("halting", 15): "latent entropy, relative drift, p40, drop, resume 4",
        ("kv_skipping", 5): "0.75 of the prompt, from depth 0.4, 64 queries",
        ("fusion", 5): "cosine, 0.15 of the prompt, from depth 0.4, last 16 left alone",
        ("fusion", 15): "l2, 0.3 of the prompt, from depth 0.4, last 16 left alone",
        ("fusion", 25): "l2, 0.3 of the prompt, from depth 0.2, last 16 left alone",
    },
}

# The budget whose winner also answers the paper's claims of a mechanism alone: the one nearest to the saving that Table 11 claims of it.
_NEAREST = {"halting": 15, "kv_skipping": 5, "fusion": 25}
ANSWERS = {
    f"{claims}.isolated.{mechanism}": AnsweredBy(TEST, f"{mechanism}.{budget}", tuned=True)
    for claims in ("table11", "p4")
    for mechanism, budget in _NEAREST.items()
}


def _halting() -> Iterator[tuple[str, tuple[str, ...]]]:
    """2.1, 2.5, App. B and the FAQ: four entropies or none, drift measure, percentile, K/V of halted tokens, resuming, decision layers."""
    tau = "modules.halting.tau_"
    for entropy, percentile, missing_kv, resume in product(
        ("logit_lens", "tuned_lens", "latent", "histogram", "none"), ("p25", "p40", "p60"), ("project", "drop"), (4, 0)
    ):
        for drift in ("relative", "cosine", "l2") if (missing_kv, resume) == ("drop", 0) else ("relative",):
            asked = (
                (f"{tau}entropy=null",)
                if entropy == "none"
                else (f"{tau}entropy={percentile}", f"modules.halting.entropy={entropy}")
            )
            settings = (
                "modules=[halting]", *asked, f"{tau}drift={percentile}", f"modules.halting.drift={drift}",
                f"modules.halting.missing_kv={missing_kv}", f"modules.halting.resume_layers={resume}",
            )  # fmt: skip
            name = f"{entropy} entropy, {drift} drift, {percentile}, {missing_kv}, resume {resume}"
            yield name, settings
            if drift == "relative" and (missing_kv, resume) == ("drop", 0):
                yield f"{name}, decided behind 3 layers", (*settings, "decision_layers=[3,6,9]")
                yield f"{name}, and KV skipping", ("modules=[halting,kv_skipping]", *settings[1:])


def _kv_skipping() -> Iterator[tuple[str, tuple[str, ...]]]:
    """2.2, App. C: share, depth, and how many of the prompt's last queries observe."""
    at = "modules.kv_skipping"
    for share, depth, queries in product((0.25, 0.5, 0.75), (0.2, 0.4), (16, 64, "null")):
        yield f"{share:g} of the prompt, from depth {depth:g}, {queries} queries", (
            "modules=[kv_skipping]", f"{at}.criterion=attention", f"{at}.skipped_share={share}", f"{at}.min_depth={depth}",
            f"{at}.last_queries={queries}",
        )  # fmt: skip


def _fusion() -> Iterator[tuple[str, tuple[str, ...]]]:
    """2.3, App. D and I: which distance, how many, from which depth, how much of the prompt's end is left alone."""
    at = "modules.token_fusion"
    for criterion, share, start, protect in product(("l2", "relative", "cosine"), (0.15, 0.3, 0.45), (0.2, 0.4), (1, 16)):
        yield f"{criterion}, {share:g} of the prompt, from depth {start:g}, last {protect} left alone", (
            "modules=[token_fusion]", f"{at}.rule=capacity", f"{at}.tau_fuse=null", f"{at}.criterion={criterion}",
            f"{at}.fused_share={share}", f"{at}.start={start}", f"{at}.protect_last={protect}",
        )  # fmt: skip


def settings(mechanism: str) -> dict[str, tuple[str, ...]]:
    """Every setting of a mechanism: name -> overrides."""
    return dict({"halting": _halting, "kv_skipping": _kv_skipping, "fusion": _fusion}[mechanism]())


def tuned(row: Row, mechanism: str, budget: int) -> Row:
    """The row with a mechanism's winner at a budget (%), each model's own, behind the row's overrides."""
    found = ((model, names.get((mechanism, budget))) for model, names in WINNERS.items())
    won = {model: (*row.overrides, *settings(mechanism)[name]) for model, name in found if name is not None}
    return replace(row, overrides=won[FIRST], of_model=won)


def rows() -> list[Row]:
    """The search, then dense and the winners on the test text."""
    found = [
        Row(SEARCH, mechanism, name, name, (*SEARCHED, *overrides))
        for mechanism in MECHANISMS
        for name, overrides in settings(mechanism).items()
    ]
    found.append(Row(TEST, "", "dense", "Dense", (*TESTED, "modules=[]")))
    for (mechanism, budget), name in WINNERS[FIRST].items():
        found.append(tuned(Row(TEST, MECHANISMS[mechanism], f"{mechanism}.{budget}", name, TESTED), mechanism, budget))
    return found


def measured(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """`comparison.frame`; `budget_pct`: of a winner; `wins_at`: the budgets at which a searched setting has the least KL; `still_wins`."""
    rows = comparison.frame(outcomes)
    rows["wins_at"] = ""
    for mechanism in MECHANISMS:
        for budget in BUDGETS_PCT:
            best = winner(rows, mechanism, budget)
            if best is not None:
                rows.loc[best, "wins_at"] = f"{rows.loc[best, 'wins_at']} {budget}%".strip()
    names = {(mechanism, budget): winner(rows, mechanism, budget) for mechanism in MECHANISMS for budget in BUDGETS_PCT}
    rows["budget_pct"], rows["still_wins"] = float("nan"), pd.Series([None] * len(rows), dtype=object)
    models = rows["model"].dropna().unique()
    own = next((WINNERS[model] for model in models if model in WINNERS), {})
    for (mechanism, budget), name in (WINNERS[FIRST] | own).items():
        mine = (rows["panel"] == TEST) & (rows["key"] == f"{mechanism}.{budget}")
        best = names[mechanism, budget]
        rows.loc[mine, "technique"] = name
        rows.loc[mine, "budget_pct"] = budget
        rows.loc[mine, "still_wins"] = best is not None and rows.loc[best, "key"] == name
    return rows


def winner(rows: pd.DataFrame, mechanism: str, budget_pct: float) -> int | None:
    """The place of the setting with the least KL among those that save enough; None: none does."""
    enough = rows[
        (rows["panel"] == SEARCH) & (rows["section"] == mechanism) & (rows["prompt_executed_flops_saved_pct"] >= budget_pct)
    ]
    kl = enough["kl_nats"].dropna()
    return None if kl.empty else int(kl.astype(float).idxmin())


_SHOWN = 3  # best settings at each budget; the frame has all


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """The best of the search, then the test."""
    frame = measured(outcomes)
    saved = Column("saved of the prompt", "exec %", lambda row: (signed(number(row, "prompt_executed_flops_saved_pct")),))
    kl = Column("", "KL × 100", _kl)
    search = Panel(
        SEARCH,
        "Search on calibration text: the settings with the least KL to the dense model at each budget",
        (Column("", "setting", lambda row: (row["technique"],), align="left"), saved, kl, Column("", "wins at", _wins)),
        provenance.notes([one for one in outcomes if one.row.panel == SEARCH])[:-1],  # hundreds of records: in the frame
    )
    test = Panel(
        TEST,
        "Test text: the frozen winners",
        (
            Column("", "setting", lambda row: (row["technique"],), align="left"),
            Column("", "for", lambda row: (NO_VALUE if pd.isna(row["budget_pct"]) else f"{row['budget_pct']:g}%",)),
            saved,
            Column("perplexity", "Δppl", lambda row: interval_cell(row, "delta_ppl")),
            kl,
            Column("perplexity", "vs random", versus_null_cell),
            Column("", "search agrees", lambda row: (NO_VALUE if row["still_wins"] is None else "yes" if row["still_wins"] else "no",)),
        ),
        provenance.notes([one for one in outcomes if one.row.panel == TEST]),
    )  # fmt: skip
    legend = (
        *_verdict(frame),
        "exec: operations of the prompt that really ran, signals included, against dense inference; negative: more than dense.",
        "KL × 100: of the dense model's next-token distribution to the run's, hundredths of a nat a token.",
        "wins at: the setting has the least KL of all that save at least so much. A budget that no setting reaches has no winner.",
        "search agrees: the winner that was frozen before the test is still the one that the search above finds.",
        _none_reaches(frame),
    )
    title = "The paper at its best: its mechanisms under any of their settings (protocol continuation)"
    shown = frame[(frame["panel"] == TEST) | _best(frame)].reset_index(drop=True)
    return Table(name, title, shown, (search, test), legend)


def _verdict(frame: pd.DataFrame) -> tuple[str, ...]:
    """What the best of all settings costs on the test text, budget by budget; which is best, calibration text says."""
    tested = frame[frame["panel"] == TEST].set_index("key")
    said = []
    for budget in BUDGETS_PCT:
        winners = {mechanism: winner(frame, mechanism, budget) for mechanism in MECHANISMS}
        kl = {mechanism: float(frame.loc[place, "kl_nats"]) for mechanism, place in winners.items() if place is not None}
        if not kl:
            continue
        best = min(kl, key=lambda mechanism: kl[mechanism])
        name = f"{MECHANISMS[best]} ({frame.loc[winners[best], 'technique']})"
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
    for mechanism in MECHANISMS:
        for budget in BUDGETS_PCT:
            enough = (
                (frame["panel"] == SEARCH)
                & (frame["section"] == mechanism)
                & (frame["prompt_executed_flops_saved_pct"] >= budget)
            )
            best |= frame.index.isin(frame.loc[enough, "kl_nats"].dropna().astype(float).nsmallest(_SHOWN).index)
    return best


def _none_reaches(frame: pd.DataFrame) -> str:
    none = [
        f"{title} at {budget}%"
        for mechanism, title in MECHANISMS.items()
        for budget in BUDGETS_PCT
        if winner(frame, mechanism, budget) is None
    ]
    searched = ", ".join(f"{len(settings(mechanism))} of {title}" for mechanism, title in MECHANISMS.items())
    return f"Searched: {searched}. No setting saves enough: {', '.join(none) or 'none'}."


def _kl(row: Mapping[str, Any]) -> Lines:
    value = number(row, "kl_nats")
    return (NO_VALUE if value is None else f"{100 * value:.2f}",)


def _wins(row: Mapping[str, Any]) -> Lines:
    return (row["wins_at"] or "",)
