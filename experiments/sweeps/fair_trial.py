"""The paper's mechanisms under every setting that the paper names: a search on calibration text, and its winners on the test text.

The rule was written before a test text was touched. Of a mechanism's settings that save at least a budget of the prompt's executed
operations on calibration text, the one with the least KL to the dense model wins. Winners are frozen in `WINNERS`; `frame` says of each
whether the search still finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pandas as pd

from quicksilver.report import comparison
from quicksilver.report.artefacts import Outcome, Row

SEARCH, TEST = "search", "test"
BUDGETS_PCT = (5, 15, 25)
SEARCHED = ("protocol=continuation", "measure=sweep", "dataset.part=calibration", "dataset.windows=16")
TESTED = ("protocol=continuation", "measure=quick", "dataset.windows=128")
MECHANISMS = {"halting": "Token halting", "kv_skipping": "KV skipping", "fusion": "Token fusion"}
# Mechanism and budget -> the setting that won on calibration text, frozen before the first test; nothing where no setting saved as much.
WINNERS: dict[tuple[str, int], str] = {
    ("halting", 5): "latent entropy, relative drift, p25, drop, resume 0, decided behind 3 layers",
    ("halting", 15): "latent entropy, relative drift, p40, drop, resume 0, decided behind 3 layers",
    ("halting", 25): "latent entropy, relative drift, p60, drop, resume 0, decided behind 3 layers",
    ("kv_skipping", 5): "0.75 of the prompt, from depth 0.4, 16 queries",
    ("fusion", 5): "l2, 0.15 of the prompt, from depth 0.4, last 16 left alone",
    ("fusion", 15): "l2, 0.3 of the prompt, from depth 0.4, last 16 left alone",
    ("fusion", 25): "cosine, 0.3 of the prompt, from depth 0.2, last 16 left alone",
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


def rows() -> list[Row]:
    """The search, then dense and the winners on the test text."""
    found = [
        Row(SEARCH, mechanism, name, name, (*SEARCHED, *overrides))
        for mechanism in MECHANISMS
        for name, overrides in settings(mechanism).items()
    ]
    found.append(Row(TEST, "", "dense", "Dense", (*TESTED, "modules=[]")))
    for (mechanism, budget), name in WINNERS.items():
        found.append(Row(TEST, MECHANISMS[mechanism], f"{mechanism}.{budget}", name, (*TESTED, *settings(mechanism)[name])))
    return found


def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
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
    for (mechanism, budget), name in WINNERS.items():
        mine = (rows["panel"] == TEST) & (rows["key"] == f"{mechanism}.{budget}")
        best = names[mechanism, budget]
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
