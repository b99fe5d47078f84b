"""Table all_positions: what can be saved where every position is scored, and decisions may not look ahead.

Stopping tokens cannot: each of them is asked for its prediction. The ceiling says by how much: an oracle that has seen the dense model's answers
chooses who leaves, as many as save 20% on calibration text; exit head and predicted K/V are fitted. Sparsity inside a token can: small input
channels of every linear map are set to zero (`channel_sparsity`, after TEAL, arXiv 2408.14690). Its error was chosen on calibration text, as the
least of a fixed list that saves 18% of the nominal operations there, before a test text was scored (`CHOSEN`; the runs behind it are the panel
`calibration`). No kernel here skips the zeros: executed operations are those of the dense model, and nominal ones say what a sparse kernel could
leave out.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from quicksilver.report import comparison
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import Table

from .techniques import row_of

CHOSEN = {"reference-gpt2": 0.0002, "reference-llama": 0.0006}
TEXTS = ("python-docs", "wikitext103")
ERRORS = (0.0001, 0.0002, 0.0003, 0.0004, 0.0006)
TARGET_PCT = 18.0
ALWAYS = ("protocol=all", "measure=quick")
# An oracle says who may leave, a fitted head reads them, their K/V are predicted; all of it fitted on 40 windows of calibration text. Rows of a
# batch keep different numbers of tokens, so one row a batch: else padding would be counted as work.
ORACLE = (
    *("modules.oracle_exit.lookahead=true", "measure.null_control.enabled=false"),
    *("dataset.calibration_windows=40", "protocol.batch_size=1"),
)


def _sparse(error: float) -> tuple[str]:
    return (f"modules.channel_sparsity.error={error}",)


def rows() -> list[Row]:
    """A panel for each model and text, then what was tried on calibration text."""
    found = []
    for model, error in CHOSEN.items():
        for text in TEXTS:
            panel, always = f"{model} {text}", (*ALWAYS, f"model={model}", f"dataset={text}", "dataset.windows=64")
            found += [
                row_of(panel, "", "dense", "Dense", "", *always),
                row_of(panel, "", "channels", "Channels inside tokens", "channel_sparsity", *always, overrides=_sparse(error)),
                row_of(panel, "", "paper", "Token halting (paper)", "halting", *always),
            ]
            if text == TEXTS[0]:
                found.append(
                    row_of(panel, "", "ceiling", "Ceiling of stopping: an oracle", "oracle_exit", *always, overrides=ORACLE)
                )
    for model in CHOSEN:
        panel, always = f"calibration {model}", (*ALWAYS, f"model={model}", "dataset.part=calibration", "dataset.windows=32")
        found += [
            row_of(panel, "", f"{error:g}", f"error {error:g}", "channel_sparsity", *always, overrides=_sparse(error))
            for error in ERRORS
        ]
    return found


def chosen(frame: pd.DataFrame, model: str) -> float | None:
    """The least error whose run on calibration text saves the target; None: none of those that are there does."""
    tried = frame[(frame["panel"] == f"calibration {model}") & (frame["nominal_flops_saved_pct"] >= TARGET_PCT)]
    return min((float(key) for key in tried["key"]), default=None)


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A panel for each model and text, and one for each model's search."""
    frame = comparison.frame(outcomes)
    panels = {f"{model} {text}": f"{model}, {text}: every position scored" for model in CHOSEN for text in TEXTS}
    panels |= {f"calibration {model}": f"{model}, calibration text: the choice of the error" for model in CHOSEN}
    said = {key: comparison.cautions(frame, key) for key in panels}
    for model in CHOSEN:
        best = chosen(frame, model)
        error = "none" if best is None else f"error {best:g}"
        said[f"calibration {model}"] += (f"Chosen: {error}, the least that saves {TARGET_PCT:g}% here.",)
    title = "All positions scored: work inside a token, and tokens that stop"
    return comparison.table(outcomes, name, title, panels, rows=frame, said=said, cautious=False)
