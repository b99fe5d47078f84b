"""Table 11: the combined ablation, every module alone and one after another, under both protocols.

Under `all` only causal modules are allowed, so techniques that look ahead are refused there. Under `continuation` they act inside the prompt, and
further sections give the paper's mechanisms their best settings (table fair_trial has the search) and compare the signals by which tokens may be
chosen at one budget. P.4 and the abstract report other numbers for the same quantity (docs/conflicts.md #23); the legend quotes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import comparison
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.reported import reported
from quicksilver.report.table import Table

from ..sweeps import table_fair_trial as fair_trial
from .techniques import MECHANISMS, chosen, steps

PANELS = {
    "all": "Protocol all: every position scored, causal modules only",
    "continuation": "Protocol continuation: modules may look ahead inside the prompt; only the tokens after it are scored",
}
# Beside the paper's rows, under continuation: section -> key, what is printed; the settings are those of techniques.py.
BESIDE: dict[str, dict[str, str | tuple[str, str]]] = {
    # Exactly the same work for each: only which tokens leave, and how, differs. Each has random tokens as its null.
    "About 40% of the prompt's work, by which tokens leave after a fifth of the depth": {
        "budget.attention": "least attended",
        "budget.fusion": "least attended, fused",
        "budget.position": "oldest",
        "budget.drift": "least drift (paper)",
    },
    # Nothing is fitted, and no layer sees what is cut. Random tokens kept are the null of both.
    "Truncation: 40% of the prompt's work cut before the first layer": {
        "truncated.last": "newest kept",
        "truncated.ends": ("both ends kept", "truncated_ends"),
    },
    # What later layers see of the tokens that leave is predicted instead of dropped: the model's own schedules (docs/predicted-kv.md).
    "Ours: most tokens stop halfway, and a fitted linear map predicts their K/V": {
        "predicted.40": "at 40%",
        "predicted.50": "at 50%",
    },
}
# Table fair_trial answers for the quality of these settings, without times.
ANSWERS = {
    f"table11.isolated.{mechanism}.speedup_pct": answers
    for mechanism, answers in fair_trial.tuned_answers("continuation", "best.{}").items()
}


def rows() -> list[Row]:
    """The rows of both panels, in printed order."""
    found = []
    for panel in PANELS:
        protocol = f"protocol={panel}"
        found.append(Row(panel, "", "baseline", "Dense baseline", (protocol, "modules=[]"), reported="table11.baseline"))
        found += steps(panel, protocol, reported="table11.")
    section = "The paper at its best: the settings that won on calibration data"
    for mechanism, budget in fair_trial.BEST.items():
        in_prompt = mechanism == fair_trial.PROMPT_ONLY
        module, title = MECHANISMS["halting" if in_prompt else mechanism]
        title = f"{title}, from {budget}%{', in prompt' * in_prompt}"
        found.append(fair_trial.tuned(Row(panel, section, f"best.{mechanism}", title, (protocol,), (module,)), mechanism, budget))
    for section, members in BESIDE.items():
        found += chosen(panel, members, protocol, section=section)
    return found


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """Reported beside measured, a panel for each protocol."""
    frame, title = comparison.frame(outcomes), "Table 11: combined ablation, reported beside measured"
    winners = fair_trial.WINNERS[next((one for one in frame["model"].dropna() if one in fair_trial.WINNERS), fair_trial.FIRST)]
    settings = "; ".join(f"{fair_trial.MECHANISMS[one]}: {winners[one, budget]}" for one, budget in fair_trial.BEST.items())
    best = f"The paper at its best: of a row's settings that table fair_trial searched, the one of least KL that saves as much. {settings}."
    claims = [reported()[claim] for claim in ("table11.cumulative.quantization", "p4.joint", "abstract.joint")]
    joint = ", ".join(f"{claim.values['flops_saved_pct']:g}% ({claim.place})" for claim in claims)
    elsewhere = f"For the FLOPs that all four save together the paper has three numbers: {joint}."
    return comparison.table(outcomes, name, title, PANELS, rows=frame, more=(best, elsewhere))
