"""Table 11: the combined ablation, every module alone and one after another, under both protocols.

Two panels, one per protocol. Under `all` only causal modules are allowed, so techniques that look ahead are refused there; under
`continuation` they act inside the prompt, and further sections give the paper's mechanisms their best settings (table fair_trial has the search) and
compare the signals by which tokens may be chosen at one budget.
Which thresholds a module has stands in conf/modules; only what makes a row this row is said here.

Claims: the nine rows of the paper's Table 11 (reported.yaml). P.4 and the abstract report other numbers for the same quantity
(docs/conflicts.md #23); the legend quotes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import reported
from quicksilver.report.table import Panel, Table

from ..quantization import strategies
from ..sweeps import table_fair_trial as fair_trial
from .techniques import steps

PANELS = {
    "all": "Protocol all: every position scored, causal modules only",
    "continuation": "Protocol continuation: modules may look ahead inside the prompt; only the tokens after it are scored",
}
# Of every setting that the paper names, the one of least KL on calibration text that saves 15% of the prompt; 5% where none saves as much.
BEST = {"halting": ("halting", 15), "kv_skipping": ("kv_skipping", 5), "fusion": ("token_fusion", 15)}
# About 40% of the prompt's work, exactly the same for each: only which tokens leave, and how, differs. Each has random tokens as its null.
HALTING, FUSION = "halting_attention", "token_fusion_attention"
QUANTIZATION = "isolated.quantization"
BUDGET = {
    "attention": ("least attended", HALTING, ()),
    "fusion": ("least attended, fused", FUSION, ()),
    "position": ("oldest", HALTING, ("modules.halting.signal=position",)),
    "drift": ("least drift (paper)", HALTING, ("modules.halting.signal=drift",)),
}
# Nothing is fitted, and no layer sees what is cut. Random tokens kept are the null of both.
TRUNCATED = {
    "last": ("newest kept", ()),
    "ends": ("both ends kept", ("modules.prompt_truncation.which=ends",)),
}
# What later layers see of the tokens that leave is predicted instead of dropped: the model's own schedules (docs/predicted-kv.md).
PREDICTED = {"40": ("at 40%", "quicksilver"), "50": ("at 50%", "quicksilver_50")}


def rows() -> list[Row]:
    """The rows of both panels, in printed order."""
    return [row for panel in PANELS for row in _panel_rows(panel)]


def _panel_rows(panel: str) -> Iterator[Row]:
    protocol = f"protocol={panel}"
    yield Row(panel, "", "baseline", "Dense baseline", (protocol, "modules=[]"), reported="table11.baseline")
    for section, key, technique, needs, overrides in steps():
        yield Row(panel, section, key, technique, (protocol, *overrides), needs, f"table11.{key}")
    if panel == "continuation":
        section = "The paper at its best: the settings that won on calibration data"
        for mechanism, (module, budget) in BEST.items():
            title = f"{fair_trial.MECHANISMS[mechanism]}, from {budget}%"
            row = Row(panel, section, f"best.{mechanism}", title, (protocol,), (module,))
            yield fair_trial.tuned(row, mechanism, budget)
        section = "About 40% of the prompt's work, by which tokens leave after a fifth of the depth"
        for key, (technique, module, overrides) in BUDGET.items():
            yield Row(panel, section, f"budget.{key}", technique, (protocol, f"modules=[{module}]", *overrides), (module,))
        section = "Truncation: 40% of the prompt cut before the first layer"
        for key, (technique, overrides) in TRUNCATED.items():
            module = "prompt_truncation"
            yield Row(panel, section, f"truncated.{key}", technique, (protocol, f"modules=[{module}]", *overrides), (module,))
        section = "A few of the oldest dropped; others stop later with K/V from a fitted linear map"
        for key, (technique, module) in PREDICTED.items():
            yield Row(panel, section, f"predicted.{key}", technique, (protocol, f"modules=[{module}]"), (module,))


ANSWERS = {
    f"{claim}.flops_saved_pct": tuple(
        AnsweredBy(panel, QUANTIZATION, of=strategies.app_j(QUANTIZATION), note=strategies.APP_J) for panel in PANELS
    )
    for claim in ("table11.isolated.quantization", "p4.isolated.quantization")
}


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """Reported beside measured, a panel for each protocol."""
    frame, panels = comparison.frame(outcomes), []
    for key, title in PANELS.items():
        notes = provenance.notes([outcome for outcome in outcomes if outcome.row.panel == key])
        panels.append(
            Panel(key, title, comparison.columns(prompt=key == "continuation"), (*comparison.cautions(frame, key), *notes))
        )
    title = "Table 11: combined ablation, reported beside measured"
    return Table(name, title, frame, tuple(panels), (*comparison.legend(frame), _best_chance(frame), _elsewhere()))


def _best_chance(frame: pd.DataFrame) -> str:
    model = next((model for model in frame["model"].dropna() if model in fair_trial.WINNERS), fair_trial.FIRST)
    winners = fair_trial.WINNERS[model]
    settings = "; ".join(f"{fair_trial.MECHANISMS[one]}: {winners[one, budget]}" for one, (_, budget) in BEST.items())
    return f"The paper at its best: of all settings that table fair_trial searched, the one of least KL that saves as much. {settings}."


def _elsewhere() -> str:
    """The other numbers of the paper for its joint row."""
    claims = [reported()[claim] for claim in ("table11.cumulative.quantization", "p4.joint", "abstract.joint")]
    numbers = ", ".join(f"{claim.values['flops_saved_pct']:g}% ({claim.place})" for claim in claims)
    return f"For the FLOPs that all four save together the paper has three numbers: {numbers}."
