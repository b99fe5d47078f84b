"""Table fair_trial: the paper at its best, every setting that it names searched on calibration data, the winners tested.

Of a mechanism's settings that save at least a budget of the prompt's operations, the one with the least KL to the dense model wins
(`WINNERS` has them, frozen before the first test). Quantization is not searched: simulated widths save no executed operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pandas as pd

from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.table import NO_VALUE, Column, Panel, Table, interval_cell, numbers, signed, versus_null_cell

from ..ablation.techniques import FIRST, FUSION, of_each, options

SEARCH, TEST = "search", "test"
BUDGETS_PCT = (5, 15, 25)
SEARCHED = ("protocol=continuation", "measure=sweep", "dataset.part=calibration", "dataset.windows=16")
TESTED = ("protocol=continuation", "measure=quick", "dataset.windows=128")
# The paper halts by causal thresholds, which act on scored tokens too, where fusion and our schedules do not: a second search is prompt-only.
PROMPT_ONLY = "halting_prompt"
MECHANISMS = {
    "halting": "Token halting",
    PROMPT_ONLY: "Token halting, in the prompt only",
    "kv_skipping": "KV skipping",
    "fusion": "Token fusion",
}
# Model -> mechanism and budget -> the setting that won on calibration text, frozen before the first test; nothing where no setting saved
# as much. A budget that was not frozen for a model has the setting of the first.
WINNERS: dict[str, dict[tuple[str, int], str]] = {
    FIRST: {  # on python-source
        ("halting", 5): "histogram entropy, relative drift, p25, drop, resume 4",
        ("halting", 15): "none entropy, relative drift, p25, drop, resume 4",
        ("halting", 25): "none entropy, relative drift, p40, drop, resume 4",
        (PROMPT_ONLY, 5): "histogram entropy, relative drift, p25, drop, resume 0, decided behind 3 layers, in the prompt only",
        (PROMPT_ONLY, 15): "histogram entropy, l2 drift, p25, drop, resume 0, in the prompt only",
        (PROMPT_ONLY, 25): "none entropy, relative drift, p25, drop, resume 0, decided behind 3 layers, in the prompt only",
        ("kv_skipping", 5): "0.75 of the prompt, from depth 0.4, 16 queries",
        ("fusion", 5): "relative, 0.15 of the prompt, from depth 0.4, last 16 left alone",
        ("fusion", 15): "relative, 0.3 of the prompt, from depth 0.4, last 16 left alone",
        ("fusion", 25): "relative, 0.3 of the prompt, from depth 0.2, last 16 left alone",
    },
    "far-llama": {  # on python-source
        ("halting", 5): "histogram entropy, relative drift, p25, drop, resume 4",
        ("halting", 15): "histogram entropy, relative drift, p40, drop, resume 4",
        ("halting", 25): "histogram entropy, relative drift, p60, project, resume 4",
        (PROMPT_ONLY, 5): "histogram entropy, relative drift, p25, drop, resume 0, decided behind 3 layers, in the prompt only",
        (PROMPT_ONLY, 15): "histogram entropy, relative drift, p40, project, resume 0, in the prompt only",
        (PROMPT_ONLY, 25): "histogram entropy, relative drift, p60, project, resume 4, in the prompt only",
        ("kv_skipping", 5): "0.75 of the prompt, from depth 0.4, 64 queries",
        ("fusion", 5): "cosine, 0.15 of the prompt, from depth 0.4, last 16 left alone",
        ("fusion", 15): "cosine, 0.3 of the prompt, from depth 0.4, last 16 left alone",
        ("fusion", 25): "l2, 0.3 of the prompt, from depth 0.2, last 16 left alone",
    },
    "reference-gpt2": {
        ("halting", 5): "latent entropy, relative drift, p25, drop, resume 0, decided behind 3 layers",
        ("halting", 15): "latent entropy, relative drift, p40, drop, resume 0, decided behind 3 layers",
        ("halting", 25): "latent entropy, relative drift, p60, drop, resume 0, decided behind 3 layers",
        # The setting of 15% had been scored on test text before this search; the search, on calibration text, chose it all the same.
        (PROMPT_ONLY, 5): "latent entropy, relative drift, p25, drop, resume 0, decided behind 3 layers, in the prompt only",
        (PROMPT_ONLY, 15): "latent entropy, relative drift, p40, drop, resume 0, decided behind 3 layers, in the prompt only",
        (PROMPT_ONLY, 25): "none entropy, relative drift, p25, drop, resume 0, decided behind 3 layers, in the prompt only",
        ("kv_skipping", 5): "0.75 of the prompt, from depth 0.4, 16 queries",
        ("fusion", 5): "l2, 0.15 of the prompt, from depth 0.4, last 16 left alone",
        ("fusion", 15): "l2, 0.3 of the prompt, from depth 0.4, last 16 left alone",
        ("fusion", 25): "cosine, 0.3 of the prompt, from depth 0.2, last 16 left alone",
    },
    "reference-llama": {
        ("halting", 5): "latent entropy, relative drift, p25, drop, resume 4",
        ("halting", 15): "latent entropy, relative drift, p40, drop, resume 4",
        # Before, gpt2's setting was tested here: +1233%.
        ("halting", 25): "latent entropy, relative drift, p60, project, resume 4",
        (PROMPT_ONLY, 5): "histogram entropy, relative drift, p25, drop, resume 0, decided behind 3 layers, in the prompt only",
        (PROMPT_ONLY, 15): "histogram entropy, l2 drift, p25, drop, resume 0, in the prompt only",
        # Until settings that project K/V were searched, "histogram entropy, l2 drift, p40, drop" had won, and was tested: 38.8% for +7.9%.
        (PROMPT_ONLY, 25): "none entropy, relative drift, p25, project, resume 0, in the prompt only",
        ("kv_skipping", 5): "0.75 of the prompt, from depth 0.4, 64 queries",
        ("fusion", 5): "cosine, 0.15 of the prompt, from depth 0.4, last 16 left alone",
        ("fusion", 15): "l2, 0.3 of the prompt, from depth 0.4, last 16 left alone",
        ("fusion", 25): "l2, 0.3 of the prompt, from depth 0.2, last 16 left alone",
    },
}

# Of each mechanism, the winner that Table 11 times, and that answers the paper's claims of it alone: of least KL among those that save 15% of the
# prompt, near the saving that is claimed; 5% where none saves as much.
BEST = {"halting": 15, PROMPT_ONLY: 15, "kv_skipping": 5, "fusion": 15}


def tuned_answers(panel: str, key: str) -> dict[str, tuple[AnsweredBy, ...]]:
    """By mechanism, the rows of a panel that answer for it as it was tuned; `key` has places for mechanism and budget."""
    found: dict[str, tuple[AnsweredBy, ...]] = {}
    for one, budget in BEST.items():
        note = "in the prompt only" * (one == PROMPT_ONLY)
        answer = AnsweredBy(panel, key.format(one, budget), tuned=True, note=note)
        mechanism = "halting" if one == PROMPT_ONLY else one
        found[mechanism] = (*found.get(mechanism, ()), answer)
    return found


ANSWERS = {
    f"{claims}.isolated.{mechanism}": answers
    for claims in ("table11", "p4")
    for mechanism, answers in tuned_answers(TEST, "{}.{}").items()
}


def settings(mechanism: str) -> dict[str, tuple[str, ...]]:
    """Every setting of a mechanism: name -> overrides."""
    if mechanism == PROMPT_ONLY:  # with the prompt's last token protected: it is known in a prompt only
        protected = options("halting", protect_last=1)
        return {f"{name}, in the prompt only": (*words, *protected) for name, words in _halting()}
    return dict({"halting": _halting, "kv_skipping": _kv_skipping, "fusion": _fusion}[mechanism]())


def _halting() -> Iterator[tuple[str, tuple[str, ...]]]:
    """2.1, 2.5, App. B and the FAQ: four entropies or none, drift measure, percentile, K/V of halted tokens, resuming, decision layers."""
    entropies = ("logit_lens", "tuned_lens", "latent", "histogram", "none")
    for entropy, tau, kv, resume in product(entropies, ("p25", "p40", "p60"), ("project", "drop"), (4, 0)):
        asked = {"tau_entropy": "null"} if entropy == "none" else {"tau_entropy": tau, "entropy": entropy}
        for drift in ("relative", "cosine", "l2") if (kv, resume) == ("drop", 0) else ("relative",):
            words = options("halting", **asked, tau_drift=tau, drift=drift, missing_kv=kv, resume_layers=resume)
            name = f"{entropy} entropy, {drift} drift, {tau}, {kv}, resume {resume}"
            yield name, ("modules=[halting]", *words)
            if (drift, kv, resume) == ("relative", "drop", 0):
                yield f"{name}, decided behind 3 layers", ("modules=[halting]", *words, "decision_layers=[3,6,9]")
                yield f"{name}, and KV skipping", ("modules=[halting,kv_skipping]", *words)


def _kv_skipping() -> Iterator[tuple[str, tuple[str, ...]]]:
    """2.2, App. C: share, depth, and how many of the prompt's last queries observe."""
    for share, depth, queries in product((0.25, 0.5, 0.75), (0.2, 0.4), (16, 64, "null")):
        words = options("kv_skipping", criterion="attention", skipped_share=share, min_depth=depth, last_queries=queries)
        yield f"{share:g} of the prompt, from depth {depth:g}, {queries} queries", ("modules=[kv_skipping]", *words)


def _fusion() -> Iterator[tuple[str, tuple[str, ...]]]:
    """2.3, App. D and I: which distance, how many, from which depth, how much of the prompt's end is left alone."""
    for criterion, share, start, last in product(("l2", "relative", "cosine"), (0.15, 0.3, 0.45), (0.2, 0.4), (1, 16)):
        words = options("token_fusion", criterion=criterion, fused_share=share, start=start, protect_last=last)
        name = f"{criterion}, {share:g} of the prompt, from depth {start:g}, last {last} left alone"
        yield name, ("modules=[token_fusion]", *FUSION, *words)


def tuned(row: Row, mechanism: str, budget: int) -> Row:
    """The row with a mechanism's winner at a budget (%), each model's own, behind the row's overrides."""
    found = ((model, names.get((mechanism, budget))) for model, names in WINNERS.items())
    won = {model: (*row.overrides, *settings(mechanism)[name]) for model, name in found if name is not None}
    return of_each(row, won)


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
    winners = _winners(rows)
    for (_, budget), best in winners.items():
        rows.loc[best, "wins_at"] = f"{rows.loc[best, 'wins_at']} {budget}%".strip()
    rows["budget_pct"], rows["still_wins"] = float("nan"), pd.Series([None] * len(rows), dtype=object)
    own = next((WINNERS[model] for model in rows["model"].dropna().unique() if model in WINNERS), {})
    for (mechanism, budget), name in (WINNERS[FIRST] | own).items():
        mine = (rows["panel"] == TEST) & (rows["key"] == f"{mechanism}.{budget}")
        best = winners.get((mechanism, budget))
        still_wins = best is not None and rows.loc[best, "key"] == name
        rows.loc[mine, ["technique", "budget_pct", "still_wins"]] = [name, budget, still_wins]
    return rows


def ranking(rows: pd.DataFrame, mechanism: str, budget_pct: float) -> pd.Series:
    """KL of a mechanism's searched settings that save enough, by their place in `rows`, least first."""
    searched = (rows["panel"] == SEARCH) & (rows["section"] == mechanism)
    enough = rows[searched & (rows["prompt_executed_flops_saved_pct"] >= budget_pct)]
    return enough["kl_nats"].dropna().astype(float).sort_values(kind="stable")


def _winners(rows: pd.DataFrame) -> dict[tuple[str, int], Any]:
    """The place of the setting with the least KL by mechanism and budget; nothing where none saves enough."""
    rankings = {(one, budget): ranking(rows, one, budget) for one in MECHANISMS for budget in BUDGETS_PCT}
    return {at: found.index[0] for at, found in rankings.items() if len(found)}


_SHOWN = 3  # best settings at each budget; the frame has all


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """The best of the search, then the test."""
    frame = measured(outcomes)
    setting = Column("", "setting", "{technique}", align="left")
    saved = Column("saved of the prompt", "exec %", "{prompt_executed_flops_saved_pct:+.1f}")
    kl = Column("", "KL × 100", "{kl_nats:100*.2f}")
    searched, tested = (provenance.notes([one for one in outcomes if one.row.panel == panel]) for panel in (SEARCH, TEST))
    search = Panel(
        SEARCH,
        "Search on calibration text: the settings with the least KL to the dense model at each budget",
        (setting, saved, kl, Column("", "wins at", lambda row: (row["wins_at"],))),
        searched[:-1],  # hundreds of records: in the frame
    )
    columns = (
        setting,
        Column("", "for", lambda row: (NO_VALUE if pd.isna(row["budget_pct"]) else f"{row['budget_pct']:g}%",)),
        saved,
        Column("perplexity", "Δppl", lambda row: interval_cell(row, "delta_ppl")),
        kl,
        Column("perplexity", "vs random", versus_null_cell),
        Column("", "search agrees", lambda row: ({None: NO_VALUE, True: "yes", False: "no"}[row["still_wins"]],)),
    )
    test = Panel(TEST, "Test text: the frozen winners", columns, tested)
    won = _winners(frame)
    none = [f"{title} at {budget}%" for one, title in MECHANISMS.items() for budget in BUDGETS_PCT if (one, budget) not in won]
    number = ", ".join(f"{len(settings(mechanism))} of {title}" for mechanism, title in MECHANISMS.items())
    legend = (
        *_verdict(frame),
        "exec: operations of the prompt that really ran, signals included, against dense inference; negative: more than dense.",
        "KL × 100: of the dense model's next-token distribution to the run's, hundredths of a nat a token. vs random: the same counts, on random "
        f"tokens. {comparison.VERSUS_RANDOM}",
        "wins at: the setting has the least KL of all that save at least so much. A budget that no setting reaches has no winner.",
        "search agrees: the winner that was frozen before the test is still the one that the search above finds.",
        f"Searched: {number}. No setting saves enough: {', '.join(none) or 'none'}.",
        *comparison.marks(frame),
    )
    title = "The paper at its best: its mechanisms under any of their settings (protocol continuation)"
    best = {at for one in MECHANISMS for budget in BUDGETS_PCT for at in ranking(frame, one, budget).index[:_SHOWN]}
    shown = frame[(frame["panel"] == TEST) | frame.index.isin(best)].reset_index(drop=True)
    return Table(name, title, shown, (search, test), legend)


def _verdict(frame: pd.DataFrame) -> tuple[str, ...]:
    """What the best of all settings costs on the test text, budget by budget; which is best, calibration text says."""
    tested, won = frame[frame["panel"] == TEST].set_index("key"), _winners(frame)
    said = []
    for budget in BUDGETS_PCT:
        kl = {one: float(frame.loc[at, "kl_nats"]) for (one, asked), at in won.items() if asked == budget}
        if not kl:
            continue
        best = min(kl, key=lambda mechanism: kl[mechanism])
        name, key = frame.loc[won[best, budget], "technique"], f"{best}.{budget}"
        row = tested.loc[key] if key in tested.index else {"still_wins": False}
        if not row["still_wins"]:
            found = "was not frozen and so not tested"
        elif pd.isna(row["delta_ppl_pct"]):
            found = "has no record on the test text"
        else:
            cost, low, high = map(signed, numbers(row, "delta_ppl_pct"))
            saved = f"{row['prompt_executed_flops_saved_pct']:.1f}%"
            found = f"on the test text saves {saved} and costs {cost}% [{low}, {high}] perplexity"
        said.append(f"for {budget}% {MECHANISMS[best]} ({name}), which {found}")
    best_is = "Under the paper's mechanisms and any of these settings, the best on calibration text is"
    return (f"{best_is} {'; '.join(said)}.",) if said else ()
