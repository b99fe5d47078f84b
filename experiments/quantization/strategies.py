"""Adaptive quantization as a table: Tables 3 and 10 are one ablation in two places of the paper.

The paper's thresholds are raw numbers and entropies belong to a model, so the paper's thresholds give other shares of widths here.
Its savings say what the shares were; the second section meets them with percentiles, so that strategies compare at the paper's mix.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.records.record import Record
from quicksilver.records.stats import paired_records
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy, saved_pct
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.table import (
    NO_VALUE,
    Column,
    Lines,
    Panel,
    Table,
    audit_cell,
    interval_cell,
    number,
    signed,
    versus_null_cell,
)

PANELS = {
    "all": "Protocol all: every position scored",
    "continuation": "Protocol continuation: a prompt is processed, the tokens after it are scored",
}
WIDTHS = {2: "two_bit_share_pct", 4: "four_bit_share_pct", 8: "eight_bit_share_pct"}
PRINTED, CALIBRATED = "Thresholds as the paper prints them", "Percentiles that give the shares of widths behind the paper's FLOPs"
MODULE = "adaptive_quantization"
# claim in reported.yaml -> what the paper calls it, yaml in conf/modules
STRATEGIES = {
    "uniform8": ("Uniform 8-bit", f"{MODULE}_uniform8"),
    "entropy_aware": ("Entropy-aware 2/4/8", MODULE),
    "no_2bit": ("Entropy-aware 4/8", f"{MODULE}_4_8"),
    "aggressive": ("Aggressive 2/4", f"{MODULE}_2_4"),
}
_MEASURE = "measure=quick"
_NO_NULL = "measure.null_control.enabled=false"  # one width for all: on other tokens it is the same run


def rows() -> list[Row]:
    """Both panels: dense, the paper's four strategies with its thresholds, three of them with percentiles."""
    return [row for panel in PANELS for row in _panel_rows(panel)]


def _panel_rows(panel: str) -> list[Row]:
    overrides = (f"protocol={panel}", _MEASURE)
    found = [Row(panel, "", "baseline", "Full precision", (*overrides, "modules=[]"), reported="table3.baseline")]
    for claim, (technique, module) in STRATEGIES.items():
        null = (_NO_NULL,) if claim == "uniform8" else ()
        found.append(
            Row(panel, PRINTED, claim, technique, (*overrides, f"modules=[{module}]", *null), (module,), f"table3.{claim}")
        )
    for claim, thresholds in paper_percentiles().items():
        technique, module = STRATEGIES[claim]
        given = tuple(f"modules.{MODULE}.{name}=p{value:.4g}" for name, value in thresholds.items())
        found.append(
            Row(
                panel,
                CALIBRATED,
                f"{claim}.calibrated",
                technique,
                (*overrides, f"modules=[{module}]", *given),
                (module,),
                f"table3.{claim}",
            )
        )
    return found


def paper_percentiles() -> dict[str, dict[str, float]]:
    """Percentiles of entropy that give each strategy the mean β behind its FLOPs in Table 3.

    With β = bits/16, a uniform 8 bits saves half of what it covers, so that covered share is twice its saving; what a strategy saves
    of the covered share is 1 - mean β. Of three widths that leaves one share open: 45% at 2 bits, App. O. The threshold that the
    other one makes idle goes along with it.
    """
    covered = 2 * reported()["table3.uniform8"].values["flops_saved_pct"]
    beta = {claim: 1 - reported()[f"table3.{claim}"].values["flops_saved_pct"] / covered for claim in STRATEGIES}
    at_2_bits, _ = reported()["o.two_bits"].bounds["two_bit_share_pct"]
    assert at_2_bits is not None
    # Shares add up to 1, charges (1/8, 1/4, 1/2) to the mean β.
    at_8_bits = 4 * (beta["entropy_aware"] - at_2_bits / 100 / 8 - (1 - at_2_bits / 100) / 4)
    at_4_of_4_8 = 100 * 4 * (0.5 - beta["no_2bit"])
    at_2_of_2_4 = 100 * 8 * (0.25 - beta["aggressive"])
    return {
        "entropy_aware": {"tau_low": at_2_bits, "tau_high": round(100 * (1 - at_8_bits), 1)},
        "no_2bit": {"tau_low": round(at_4_of_4_8, 1), "tau_high": round(at_4_of_4_8, 1)},
        "aggressive": {"tau_low": round(at_2_of_2_4, 1), "tau_high": round(at_2_of_2_4, 1)},
    }


def shares(record: Record) -> dict[str, float]:
    """Percent of the tokens at each width in the layers that hold widths, and the mean width in bits; from the record's trace."""
    from quicksilver.runtime.quantized.codes import mix_of
    from quicksilver.runtime.trace import Trace

    if record.trace_path is None:
        return {}
    mix = mix_of(Trace.load(record.trace_path))
    return {column: 100 * mix[width] for width, column in WIDTHS.items()} | {"mean_bits": sum(w * s for w, s in mix.items())}


def app_j_factor(record: Record) -> float | None:
    """What of the saving in the paper ledger, which charges bits/16, is left with Appendix J's own β (8, 4 and 2 bits cost 1, a half and a
    quarter). Of a run whose only module is quantization: every layer with widths saves 1 - mean β of the same work. None: no widths."""
    from quicksilver.runtime.ledger import BETA, BETA_APP_J

    found = shares(record) if len(record.modules) == 1 else {}
    if not found:
        return None
    saved = [sum(found[column] * (1 - beta[width]) for width, column in WIDTHS.items()) for beta in (BETA_APP_J, BETA)]
    return saved[0] / saved[1]


def app_j(key: str) -> Callable[[Mapping[str, Outcome]], Estimate | None]:
    """Operations gone in Appendix J with its own β, by the row `key`."""

    def of(panel: Mapping[str, Outcome]) -> Estimate | None:
        outcome = panel[key]
        factor = None if outcome.record is None else app_j_factor(outcome.record)
        if factor is None or outcome.record is None or outcome.dense is None:
            return None
        found = saved_pct(outcome.record, outcome.dense, "paper_flops")
        return Estimate(factor * found.value, factor * found.low, factor * found.high)

    return of


APP_J = "with Appendix J's own β"


def answers() -> dict[str, tuple[AnsweredBy, ...]]:
    """Table 3's operations once more, with Appendix J's β; the rows themselves answer with bits/16."""
    found: dict[str, tuple[AnsweredBy, ...]] = {}
    for row in rows():
        if row.reported is not None and row.key != "baseline":
            claim = f"{row.reported}.flops_saved_pct"
            found[claim] = (*found.get(claim, ()), AnsweredBy(row.panel, row.key, of=app_j(row.key), note=APP_J))
    guided = [row for row in rows() if row.reported == "table3.entropy_aware"]
    note = "widths by entropy against the same widths at random"
    found["o.static.lead_on_chance_pct"] = tuple(AnsweredBy(row.panel, row.key, of=_lead(row.key), note=note) for row in guided)
    return found


def _lead(key: str) -> Callable[[Mapping[str, Outcome]], Estimate | None]:
    def of(panel: Mapping[str, Outcome]) -> Estimate | None:
        record = panel[key].record
        if record is None or "null_nll_nats" not in record.windows:
            return None
        paired = paired_records(record, record, baseline_column="null_nll_nats")
        return Estimate(-paired.relative_pct, -paired.relative_pct_high, -paired.relative_pct_low)

    return of


def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row an outcome: what is reported, the thresholds, what was measured, the shares of widths."""
    table = comparison.frame(outcomes)
    timed = [name for name in table if any(part in name for part in ("speed", "noise", "latency"))]
    table = table.drop(columns=[*timed, "reported_delta_ppl"])
    dense_ppl = reported()["table3.baseline"].values["ppl"]
    claims = [reported()[row.row.reported].values if row.row.reported else {} for row in outcomes]
    place = table.columns.get_loc("reported_flops_saved_pct")
    table.insert(place, "reported_ppl", [claim.get("ppl") for claim in claims])
    table.insert(place + 1, "reported_delta_ppl", [claim["ppl"] - dense_ppl if claim else None for claim in claims])
    table.insert(place, "thresholds", [_thresholds(outcome) for outcome in outcomes])
    mixes = [shares(outcome.record) if outcome.record is not None else {} for outcome in outcomes]
    for column in (*WIDTHS.values(), "mean_bits"):
        table[column] = [mix.get(column) for mix in mixes]
    factors = [None if outcome.record is None else app_j_factor(outcome.record) for outcome in outcomes]
    table["app_j_flops_saved_pct"] = pd.Series(factors, table.index, dtype=float) * table["paper_flops_saved_pct"].astype(float)
    return table


def _thresholds(outcome: Outcome) -> str:
    """`1.0, 2.3` as the record's configuration has them, `0.25, 0.65; of log V`; empty where entropy decides nothing."""
    if outcome.record is None:
        return ""
    module = outcome.record.config["modules"].get(MODULE)
    if module is None or module["bits"] is not None:
        return ""
    low, high, widths = module["tau_low"], module["tau_high"], module["widths"]
    used = [high] if widths == [4, 8] else [low] if widths == [2, 4] else [low, high]
    scale = {"none": "", "log_vocab": "; of log V", "minmax": "; min-max"}[module["normalisation"]]
    return ", ".join(map(str, used)) + scale


LEGEND = (
    "FLOPs saved, in percent of dense. paper: by Appendix J's formula with β = bits/16, which was chosen because it gives Table 3's 26.4% for a "
    "uniform 8 bits, so that this number is circular; J, below it: with App. J's own β, 1, 1/2 and 1/4 for 8, 4 and 2 bits. exec: operations of what ran; an "
    "integer product counts as many as a float one, so it shows the cost of deciding.",
    "The paper's column is of a model with 36 layers, 19 of them after the decision; the same thresholds act on another "
    "model's entropies here. It has no interval.",
    "2/4/8 %: shares of the tokens at 2, 4 and 8 bits in the layers after the decision; bits: their mean. KV: resident bytes of the cache "
    "saved, scales included, of a cache in the model's own dtype.",
    "Δppl: perplexity minus that of full precision on the same windows with its 95% interval; below it the same in percent. vs "
    "random: against the same widths, on random tokens. better, worse: the interval of the difference excludes 0. same: otherwise.",
    "τ: thresholds in nats, p45 the 45th percentile of the entropies on the calibrating part of the text. Two widths have one threshold.",
)


def table(outcomes: Sequence[Outcome], name: str, title: str, legend: Sequence[str] = ()) -> Table:
    """Reported beside measured, a panel for each protocol; `legend` stands before what every such table says."""
    panels = []
    for key, heading in PANELS.items():
        notes = provenance.notes([outcome for outcome in outcomes if outcome.row.panel == key])
        panels.append(Panel(key, heading, columns(kv=key == "continuation"), notes))
    found = frame(outcomes)
    marks = (comparison.LOOKAHEAD,) if found["lookahead"].eq(True).any() else ()
    return Table(name, title, found, tuple(panels), (*legend, *LEGEND, _calibration(), *marks))


def _calibration() -> str:
    wanted = "; ".join(
        f"{STRATEGIES[claim][0]} {', '.join(f'p{value:.4g}' for value in dict.fromkeys(thresholds.values()))}"
        for claim, thresholds in paper_percentiles().items()
    )
    return f"{CALIBRATED}: {wanted}. From Table 3's FLOPs with β = bits/16, and for three widths from App. O's 45% of the tokens at 2 bits."


def columns(*, kv: bool) -> tuple[Column, ...]:
    """The printed columns; `kv` adds the bytes of the cache, which `all` does not keep."""
    kept = [Column("saved %", "KV", _signed("kv_bytes_saved_pct"), expendable=1)] if kv else []
    return (
        Column("", "technique", _technique, align="left"),
        Column("", "τ", lambda row: tuple(row["thresholds"].split("; ")) if row["thresholds"] else (NO_VALUE,), expendable=4),
        Column("paper reports", "ppl", _plain("reported_ppl", 1), expendable=7),
        Column("paper reports", "FLOPs", _plain("reported_flops_saved_pct", 1), expendable=7),
        Column("saved %", "paper", _paper),
        Column("saved %", "exec", _signed("executed_flops_saved_pct"), expendable=3),
        *kept,
        Column("measured", "2/4/8 %", _shares),
        Column("measured", "bits", _plain("mean_bits", 2), expendable=2),
        Column("measured", "Δppl", _delta_ppl),
        Column("measured", "Δppl of null", lambda row: interval_cell(row, "null_delta_ppl"), expendable=5),
        Column("measured", "vs random", versus_null_cell),
        Column("", "audit", audit_cell, expendable=6),
    )


def _technique(row: Mapping[str, Any]) -> Lines:
    if row["status"] == comparison.MEASURED:
        return (f"{row['technique']} †" if row["lookahead"] else row["technique"],)
    return (row["technique"], *textwrap.wrap(row["status"], 20))


def _plain(key: str, decimals: int) -> Callable[[Mapping[str, Any]], Lines]:
    def cell(row: Mapping[str, Any]) -> Lines:
        value = number(row, key)
        return (NO_VALUE if value is None else f"{value:.{decimals}f}",)

    return cell


def _signed(key: str) -> Callable[[Mapping[str, Any]], Lines]:
    return lambda row: (signed(number(row, key)),)


def _paper(row: Mapping[str, Any]) -> Lines:
    own = number(row, "app_j_flops_saved_pct")
    return (signed(number(row, "paper_flops_saved_pct")), *(() if own is None else (f"J {signed(own)}",)))


def _shares(row: Mapping[str, Any]) -> Lines:
    found = [number(row, column) for column in WIDTHS.values()]
    return (NO_VALUE if None in found else "/".join(f"{value:.0f}" for value in found if value is not None),)


def _delta_ppl(row: Mapping[str, Any]) -> Lines:
    return (
        (f"ppl {row['ppl']:.2f}",)
        if row["key"] == "baseline" and row["status"] == comparison.MEASURED
        else interval_cell(row, "delta_ppl")
    )
