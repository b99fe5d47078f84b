"""Table deployment: one prompt at a time, greedy decoding, time to the first token and per token (App. J, deployment simulation)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.measure.deployment import DeploymentResult
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, number, time_cell

from . import costs


def rows() -> list[Row]:
    """Dense inference, every mechanism alone, one after another, and the attention budget."""
    return costs.rows()


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """Milliseconds of a request, and what of it is within the budget."""
    found = [_row(outcome) for outcome in outcomes]
    comparison.pool_noise(found)
    frame = pd.DataFrame(found)
    columns = (
        Column("", "technique", lambda row: (row["technique"],), align="left"),
        Column("ms to the first token", "median", lambda row: _ms(row, "first_token_ms")),
        Column("ms per token after it", "p50", lambda row: _ms(row, "p50_ms")),
        Column("ms per token after it", "p95", lambda row: _ms(row, "p95_ms")),
        Column("ms per token after it", "p99", lambda row: _ms(row, "p99_ms")),
        Column("per token", "saved %", lambda row: time_cell(number(row, "saved_pct"), number(row, comparison.FLOOR))),
        Column("", "tokens/s", lambda row: _ms(row, "tokens_per_s")),
        Column("", "in budget %", lambda row: _ms(row, "within_budget_pct"), expendable=1),
    )
    requests = {
        (served.prompt_tokens, served.new_tokens, served.budget_ms)
        for record in costs.by_key(outcomes).values()
        if (served := record.found("deployment", DeploymentResult))
    }
    said = "; ".join(
        f"a prompt of {prompt} tokens, {new} new ones, {budget:g} ms a token" for prompt, new, budget in sorted(requests)
    )
    legend = (
        f"One request at a time through generate(), greedy: {said}. Run and dense take turns; the dense row is the dense record's own.",
        f"saved: mean time per token, in percent of dense inference, round by round. {comparison.NOISE}",
        "p99: - where fewer than 100 tokens were timed. tokens/s: over the whole call, prompt included.",
    )
    panel = Panel(
        costs.PANEL, "Batch 1, greedy", columns, (*comparison.noise_note(found, "a token's time"), *provenance.notes(outcomes))
    )
    return Table(name, "Deployment: one request at a time", frame, (panel,), legend)


def _row(outcome: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {
        **{"panel": outcome.row.panel, "section": outcome.row.section, "key": outcome.row.key},
        **{"technique": outcome.row.technique, "status": outcome.reason or "measured"},
    }
    if outcome.record is None:
        return row
    found = outcome.record.measured("deployment", DeploymentResult)
    mine = found.ours
    row |= {"first_token_ms": mine.first_token_ms.median, "first_token_iqr_ms": mine.first_token_ms.iqr}
    row |= {f"{percentile}_ms": ms for percentile, ms in vars(mine.per_token_ms).items()}
    row |= {key: getattr(mine, key) for key in ("tokens_per_s", "within_budget_pct", "tokens_timed")}
    ratio = found.per_token_ratio
    if ratio is not None:
        row |= {"saved_pct": 100 * (1 - ratio.median), "saved_pct_low": 100 * (1 - ratio.high)}
        row |= {"saved_pct_high": 100 * (1 - ratio.low), comparison.FLOOR: found.noise_floor_pct}
    return row | {"record": outcome.record.fingerprint}


def _ms(row: Mapping[str, Any], key: str) -> Lines:
    value = number(row, key)
    if value is None:
        return (NO_VALUE,)
    iqr = number(row, "first_token_iqr_ms") if key == "first_token_ms" else None
    return (f"{value:.1f}",) if iqr is None else (f"{value:.1f}", f"± {iqr / 2:.1f}")


def _per_token(outcomes: Mapping[str, Outcome]) -> Estimate | None:
    record = outcomes[costs.JOINT].record
    if record is None:
        return None
    ms = record.measured("deployment", DeploymentResult).ours.per_token_ms
    return Estimate(ms.p50, ms.p50, ms.p95)


ANSWERS = {
    "j.budget.time_per_output_token_ms": AnsweredBy(
        costs.PANEL, costs.JOINT, of=_per_token, note="median, to the 95th percentile"
    )
}
