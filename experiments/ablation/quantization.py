"""Tables 3 and 10: entropy-aware quantization, one ablation in two places of the paper.

Entropies belong to a model, so the paper's thresholds give other shares of widths here. Its savings say what the shares were; the second section
meets them with percentiles, so that strategies compare at the paper's mix. Appendix O prints the rows above another rule, (0.25, 0.65) on normalised
entropies (docs/conflicts.md #18).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pandas as pd

from quicksilver.records.record import TRACE, Record
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row, artefact
from quicksilver.report.claims.ledger import AnsweredBy, added_pct, saved_pct
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.table import NO_VALUE, Column, Panel, Table, audit_cell, interval_cell, versus_null_cell

from ..inside import trace_counts
from .techniques import options, row_of

PANELS = {
    "all": "Protocol all: every position scored",
    "continuation": "Protocol continuation: a prompt is processed, the tokens after it are scored",
}
WIDTHS = {2: "two_bit_share_pct", 4: "four_bit_share_pct", 8: "eight_bit_share_pct"}
PRINTED, CALIBRATED = "Thresholds as the paper prints them", "Percentiles that give the shares of widths behind the paper's FLOPs"
APPENDIX_O = "The rule of Appendix O: 0.25 and 0.65 of log V"
MODULE = "adaptive_quantization"
# claim in reported.yaml -> what the paper calls it, yaml in conf/modules
STRATEGIES = {
    "uniform8": ("Uniform 8-bit", f"{MODULE}_uniform8"),
    "entropy_aware": ("Entropy-aware 2/4/8", MODULE),
    "no_2bit": ("Entropy-aware 4/8", f"{MODULE}_4_8"),
    "aggressive": ("Aggressive 2/4", f"{MODULE}_2_4"),
}


def rows(*, appendix_o: bool = False) -> list[Row]:
    """Under each protocol dense, the paper's four strategies with its thresholds, three of them with percentiles; with the row of Appendix O, as
    Table 10 has them."""
    found: list[Row] = []
    for panel in PANELS:

        def row(section: str, claim: str, *more: str, module: str = "", key: str = "", panel: str = panel) -> Row:
            technique = STRATEGIES[claim][0] if claim in STRATEGIES else "Full precision"
            made = row_of(panel, section, key or claim, technique, module, f"protocol={panel}", "measure=quick", overrides=more)
            return made if section == APPENDIX_O else replace(made, reported=f"table3.{claim}")

        found.append(row("", "baseline"))
        for claim, (_, module) in STRATEGIES.items():
            # One width for all: on other tokens it is the same run.
            found.append(row(PRINTED, claim, *["measure.null_control.enabled=false"] * (claim == "uniform8"), module=module))
        for claim, thresholds in paper_percentiles().items():
            given = options(MODULE, **{name: f"p{value:.4g}" for name, value in thresholds.items()})
            found.append(row(CALIBRATED, claim, *given, module=STRATEGIES[claim][1], key=f"{claim}.calibrated"))
        if appendix_o:
            found.append(row(APPENDIX_O, "entropy_aware", module=f"{MODULE}_paper_o", key="appendix_o"))
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
    found = {"entropy_aware": {"tau_low": at_2_bits, "tau_high": round(100 * (1 - at_8_bits), 1)}}
    for claim, share in (("no_2bit", 4 * (0.5 - beta["no_2bit"])), ("aggressive", 8 * (0.25 - beta["aggressive"]))):
        found[claim] = dict.fromkeys(("tau_low", "tau_high"), round(100 * share, 1))
    return found


def shares(record: Record) -> dict[str, float]:
    """Percent of the tokens at each width in the layers that hold widths, and the mean width in bits; from the record's trace."""
    if record.trace_path is None:
        return {}
    mix = _mix(record.trace_path)
    return {column: 100 * mix[width] for width, column in WIDTHS.items()} | {"mean_bits": sum(w * s for w, s in mix.items())}


@cache  # a trace takes a quarter of a second, and several claims ask for one
def _mix(trace: Path) -> dict[int, float]:
    from quicksilver.runtime.quantized.codes import mix_of
    from quicksilver.runtime.trace import Trace

    return mix_of(Trace.load(trace))


# --- claims -----------------------------------------------------------------------------------------------------------------------
def app_j_factor(record: Record) -> float | None:
    """What of the saving in the paper ledger, which charges bits/16, is left with Appendix J's own β (8, 4 and 2 bits cost 1, a half and a
    quarter). Of a run whose only module is quantization: every layer with widths saves 1 - mean β of the same work. None: no widths."""
    from quicksilver.runtime.ledger import BETA, BETA_APP_J

    found = shares(record) if len(record.modules) == 1 else {}
    if not found:
        return None
    saved = [sum(found[column] * (1 - beta[width]) for width, column in WIDTHS.items()) for beta in (BETA_APP_J, BETA)]
    return saved[0] / saved[1]


APP_J, ZERO = "with Appendix J's own β", "8 bits cost 1, so that a uniform 8 bits saves nothing"


def app_j(panel: str, key: str) -> AnsweredBy:
    """The answer of a row to a claim about operations: those gone in Appendix J with its own β."""

    def of(outcomes: Mapping[str, Outcome]) -> Estimate | None:
        record, dense = outcomes[key].record, outcomes[key].dense
        if record is None or dense is None or (factor := app_j_factor(record)) is None:
            return None
        return Estimate.of(saved_pct(record, dense, "paper_flops"), times=factor)

    return AnsweredBy(panel, key, of=of, note=APP_J, by_definition=ZERO * (key == "uniform8"))


def _against_8_bits(compare: Callable[[Record, Record], Estimate], key: str, panel: Mapping[str, Outcome]) -> Estimate | None:
    """Widths by entropy compared with the static precision of the same table, a uniform 8 bits."""
    guided, static = panel[key].record, panel["uniform8"].record
    return None if guided is None or static is None else compare(guided, static)


def answers() -> dict[str, tuple[AnsweredBy, ...]]:
    """Table 3's operations once more, with Appendix J's β; the rows themselves answer with bits/16."""
    found: dict[str, tuple[AnsweredBy, ...]] = {}
    for row in rows():
        if row.key != "baseline":
            claim = f"{row.reported}.flops_saved_pct"
            found[claim] = (*found.get(claim, ()), app_j(row.panel, row.key))
    guided = [row for row in rows() if row.reported == "table3.entropy_aware"]
    note = "widths by entropy against a uniform 8 bits, which saves fewer operations"
    leads = partial(_against_8_bits, lambda guided, static: Estimate.of(added_pct(guided, static), -1))
    found["o.static.lead_on_static_pct"] = tuple(
        AnsweredBy(row.panel, row.key, of=partial(leads, row.key), note=note) for row in guided
    )
    # Table 11's run alone is this one, and P.4's too. E.9 states what is gained beyond 8 bits.
    alone = [row for row in guided if row.section == PRINTED]
    for claim in ("table11", "p4"):
        found[f"{claim}.isolated.quantization.flops_saved_pct"] = tuple(app_j(row.panel, row.key) for row in alone)
    (beyond,) = (row for row in alone if row.panel == "all")  # of the other protocol: sweeps/multiruns.py
    for name, compare in (("delta_ppl", added_pct), ("flops_saved_pct", partial(saved_pct, column="paper_flops"))):
        of = partial(_against_8_bits, compare, beyond.key)
        answer = AnsweredBy(beyond.panel, beyond.key, of=of, note="against uniform 8 bits", against="uniform8")
        found[f"e9.quantization.{name}"] = (answer,)
    # With Appendix J's β a uniform 8 bits saves nothing: what is saved beyond it is all that is saved.
    found["e9.quantization.flops_saved_pct"] += (replace(app_j(beyond.panel, beyond.key), against="uniform8"),)
    return found


def two_bits(record: Record) -> Estimate | None:
    """Tokens at 2 bits in the layers that hold widths, by Appendix O's rule."""
    layers = trace_counts.by_layer(record)
    deep = layers[layers["bits_2"] + layers["bits_4"] + layers["bits_8"] > 0].groupby("window").sum(numeric_only=True)
    return trace_counts.share_pct(deep["bits_2"], deep["active"])


_NOTE = "by Appendix O's rule, decided once, after half of the layers"
_OF_O = tuple(AnsweredBy(panel, "appendix_o", of_record=two_bits, note=_NOTE) for panel in PANELS)


# --- the tables -------------------------------------------------------------------------------------------------------------------
def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row an outcome: what is reported, the thresholds, what was measured, the shares of widths."""
    table = comparison.frame(outcomes)
    timed = [name for name in table if any(part in name for part in ("speed", "noise", "latency"))]
    table = table.drop(columns=[*timed, "reported_delta_ppl"])
    dense_ppl = reported()["table3.baseline"].values["ppl"]
    claims = [reported()[row.row.reported].values if row.row.reported else {} for row in outcomes]
    records = [outcome.record for outcome in outcomes]
    place = table.columns.get_loc("reported_flops_saved_pct")
    table.insert(place, "reported_ppl", [claim.get("ppl") for claim in claims])
    table.insert(place + 1, "reported_delta_ppl", [claim["ppl"] - dense_ppl if claim else None for claim in claims])
    table.insert(place, "thresholds", [_thresholds(record) if record else "" for record in records])
    mixes = [shares(record) if record else {} for record in records]
    table = table.join(pd.DataFrame(mixes, table.index, [*WIDTHS.values(), "mean_bits"]))
    factors = pd.Series([app_j_factor(record) if record else None for record in records], table.index, dtype=float)
    return table.assign(app_j_flops_saved_pct=factors * table["paper_flops_saved_pct"].astype(float))


def _thresholds(record: Record) -> str:
    """`1.0, 2.3` as the record's configuration has them, `0.25, 0.65; of log V`; empty where entropy decides nothing."""
    module = record.config["modules"].get(MODULE)
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
    "Δppl: perplexity minus that of full precision on the same windows with its 95% interval; below it the same in percent.",
    "Δppl of null: the same widths on random tokens, against full precision. vs random: the run against that null. "
    f"{comparison.VERSUS_RANDOM}",
    "τ: thresholds in nats, p45 the 45th percentile of the entropies on the calibrating part of the text. Two widths have one threshold.",
)


def _table(outcomes: Sequence[Outcome], name: str, title: str, *legend: str) -> Table:
    """Reported beside measured, a panel for each protocol; `legend` stands before what both tables say."""
    panels = (
        Panel(key, heading, COLUMNS, provenance.notes([one for one in outcomes if one.row.panel == key]))
        for key, heading in PANELS.items()
    )
    wanted = "; ".join(
        f"{STRATEGIES[claim][0]} {', '.join(f'p{value:.4g}' for value in dict.fromkeys(thresholds.values()))}"
        for claim, thresholds in paper_percentiles().items()
    )
    calibrated = f"{CALIBRATED}: {wanted}. From Table 3's FLOPs with β = bits/16, and for three widths from App. O's 45% of the tokens at 2 bits."
    found = frame(outcomes)
    return Table(name, title, found, tuple(panels), (*legend, *LEGEND, calibrated, *comparison.marks(found)))


COLUMNS = (
    Column("", "technique", comparison.marked_technique_cell, align="left"),
    Column("", "τ", lambda row: tuple(row["thresholds"].split("; ")) if row["thresholds"] else (NO_VALUE,), expendable=4),
    Column("paper reports", "ppl", "{reported_ppl:.1f}", expendable=7),
    Column("paper reports", "FLOPs", "{reported_flops_saved_pct:.1f}", expendable=7),
    Column("saved %", "paper", "{paper_flops_saved_pct:+.1f}\nJ {app_j_flops_saved_pct:+.1f}"),
    Column("saved %", "exec", "{executed_flops_saved_pct:+.1f}", expendable=3),
    Column("saved %", "KV", "{kv_bytes_saved_pct:+.1f}", expendable=1),
    Column("measured", "2/4/8 %", "/".join(f"{{{column}:.0f}}" for column in WIDTHS.values())),
    Column("measured", "bits", "{mean_bits:.2f}", expendable=2),
    Column("measured", "Δppl", comparison.delta_ppl_cell),
    Column("measured", "Δppl of null", lambda row: interval_cell(row, "null_delta_ppl"), expendable=5),
    Column("measured", "vs random", versus_null_cell),
    Column("", "audit", audit_cell, expendable=6),
)


@artefact(rows, reads=(TRACE,), answers=answers())
def table03_quantization(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table 3: entropy-aware quantization, uniform and by entropy, with the paper's thresholds and at the paper's mix."""
    return _table(outcomes, name, "Table 3: entropy-aware quantization, reported beside measured")


@artefact(lambda: rows(appendix_o=True), reads=(TRACE,), answers={"o.two_bits.two_bit_share_pct": _OF_O})
def table10_quantization(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table 10: the rows of Table 3 again, with Appendix O's own thresholds on entropies over log V."""
    legend = "The rows above Appendix O's rule are its table. That table uses the thresholds of Table 3, not those of the rule."
    return _table(outcomes, name, "Table 10: entropy-aware quantization again, reported beside measured", legend)
