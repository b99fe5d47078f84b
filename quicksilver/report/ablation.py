"""Ablations: modules against dense inference, the paper's numbers beside the measured ones. Tables 3 and 11 have this shape."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.report.artefacts import Outcome
from quicksilver.report.effects import amount, audit_cell, effects, interval_cell, number, signed, speedup_cell, versus_null_cell
from quicksilver.report.provenance import SHORT
from quicksilver.report.reported import reported
from quicksilver.report.tables import Column, Lines

MEASURED = "measured"  # status of a row that has a record; any other status is the reason why it has none

# claim in reported.yaml -> module in conf/modules, what the paper calls it; in the paper's order, which is also that of adding
TECHNIQUES = {
    "halting": ("halting", "Token halting"),
    "kv_skipping": ("kv_skipping", "KV skipping"),
    "fusion": ("token_fusion", "Token fusion"),
    "quantization": ("adaptive_quantization", "Quantization"),
}
# Fusion at a fixed share of each prompt, so that its null (random neighbours) has the same budget.
ALWAYS = {
    "fusion": ("modules.token_fusion.rule=capacity", "modules.token_fusion.tau_fuse=null"),
}
# Alone, KV skipping cannot follow halting (2.2): it skips the half of the tokens that gets least attention (C.2).
ALONE = {
    "kv_skipping": (
        "modules.kv_skipping.criterion=attention",
        "modules.kv_skipping.skipped_share=0.5",
        "modules.kv_skipping.min_depth=0.4",
    )
}

LEGEND = (
    "Speedup and FLOPs saved are decreases in percent of dense inference, as in the paper: 25 means that a quarter of the time "
    "or of the work is gone. The dense row has what they are percentages of (milliseconds a batch; operations in all, G = 10⁹).",
    "speedup: wall clock of one batch, median of rounds that alternate with the dense model; within: no larger than the noise "
    "floor below it, which is how far the dense model is from itself (A/A).",
    "FLOPs saved, three ledgers: exec = operations of what really ran, signals and modules included; nominal = the dense formula "
    "on active tokens; paper = Appendix J with its constants, comparable with the paper's column and with nothing else; prompt = "
    "exec, of the prompt alone.",
    "Δppl: perplexity minus dense perplexity on the same windows with its 95% interval; below it the same in percent. Null: the "
    "same decisions dealt to random tokens, so at exactly the same budget. vs null: whether the interval of their difference "
    "lies below 0 (better), above 0 (worse) or around it (no diff.). What is not better than its null did not choose its "
    "tokens well.",
    "audit: largest movement of a logit when the tokens after it are replaced: 0, or rounding, where nothing looks ahead. Where "
    "coarse codes magnify rounding under compact execution (second line), the first line is that of masked execution, whose sums "
    "do not depend on what was decided: what moves there is a leak.",
    "The paper measured GPT-2 774M on an A100: its numbers stand here for comparison, as no target for another model or machine.",
)
LOOKAHEAD = "† looks ahead: its perplexity knows tokens that it is asked to predict (the paper's variant, lookahead=true)."


def steps() -> Iterator[tuple[str, str, str, tuple[str, ...], tuple[str, ...]]]:
    """Every mechanism alone, then one after another: section, key, technique, modules it needs, overrides."""
    for claim, (module, technique) in TECHNIQUES.items():
        overrides = (f"modules=[{module}]", *ALWAYS.get(claim, ()), *ALONE.get(claim, ()))
        yield "Isolated", f"isolated.{claim}", technique, (module,), overrides
    for count, (claim, (_, technique)) in enumerate(TECHNIQUES.items(), start=1):
        claims = tuple(TECHNIQUES)[:count]
        together = tuple(TECHNIQUES[one][0] for one in claims)
        always = tuple(word for one in claims for word in ALWAYS.get(one, ()))
        yield "Cumulative", f"cumulative.{claim}", f"+ {technique}", together, (f"modules=[{','.join(together)}]", *always)


def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row an outcome, with the columns `COLUMNS`: what is reported, what was measured (see `effects`), and on what."""
    rows = []
    for outcome in outcomes:
        row: dict[str, Any] = {
            "panel": outcome.row.panel,
            "section": outcome.row.section,
            "key": outcome.row.key,
            "technique": outcome.row.technique,
            "status": outcome.reason or MEASURED,
        }
        if outcome.row.reported is not None:
            row |= {f"reported_{quantity}": value for quantity, value in reported()[outcome.row.reported].values.items()}
        if outcome.record is not None and outcome.dense is not None:
            model, data = outcome.record["model"], outcome.record["data"]
            row |= {"model": model["name"], "weights_digest": model["weights_digest"][:SHORT], "dtype": model["dtype"]}
            row |= {"data": data["name"], "token_digest": data["token_digest"][:SHORT]}
            row |= effects(outcome.record, outcome.dense)
        rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)


def legend(rows: pd.DataFrame) -> tuple[str, ...]:
    """What the columns mean; the mark of looking ahead is explained where a row has it."""
    return (*LEGEND, LOOKAHEAD) if rows["lookahead"].eq(True).any() else LEGEND


def columns(*, prompt: bool) -> tuple[Column, ...]:
    """The printed columns; `prompt` adds the share of the prompt's own work that was saved."""
    ledgers = [("exec", "executed", 0), ("nominal", "nominal", 4), ("paper", "paper", 3)]
    if prompt:
        ledgers.append(("prompt", "prompt_executed", 2))
    flops = [Column("FLOPs saved %", header, _flops(ledger), expendable=rank) for header, ledger, rank in ledgers]
    return (
        Column("", "technique", _technique, align="left"),
        Column("paper reports", "speed", _reported("speedup_pct", 0), expendable=7),
        Column("paper reports", "FLOPs", _reported("flops_saved_pct", 0), expendable=7),
        Column("paper reports", "Δppl", _reported("delta_ppl", 2), expendable=7),
        Column("measured", "speedup", _speedup),
        *flops,
        Column("perplexity against dense", "Δppl", _delta_ppl),
        Column("perplexity against dense", "Δppl of null", lambda row: interval_cell(row, "null_delta_ppl"), expendable=5),
        Column("perplexity against dense", "vs null", versus_null_cell, expendable=1),
        Column("", "audit", audit_cell, expendable=6),
    )


def _measured(row: Mapping[str, Any]) -> bool:
    return row["status"] == MEASURED


def _is_dense(row: Mapping[str, Any]) -> bool:
    return _measured(row) and row["record"] == row["dense_record"]


def _technique(row: Mapping[str, Any]) -> Lines:
    if _measured(row):
        return (f"{row['technique']} †" if row["lookahead"] else row["technique"],)
    return (row["technique"], *textwrap.wrap(row["status"], 20))


def _reported(quantity: str, decimals: int) -> Callable[[Mapping[str, Any]], Lines]:
    return lambda row: (signed(number(row, f"reported_{quantity}"), decimals),)


def _speedup(row: Mapping[str, Any]) -> Lines:
    latency = number(row, "latency_ms")
    return (f"{latency:.0f} ms",) if _is_dense(row) and latency is not None else speedup_cell(row)


def _flops(ledger: str) -> Callable[[Mapping[str, Any]], Lines]:
    def cell(row: Mapping[str, Any]) -> Lines:
        total, saved = number(row, f"{ledger}_flops"), number(row, f"{ledger}_flops_saved_pct")
        return (amount(total),) if _is_dense(row) and total is not None else (signed(saved),)

    return cell


def _delta_ppl(row: Mapping[str, Any]) -> Lines:
    # What everything below is compared with: absolute numbers stand in the dense row, differences in all others.
    return (f"ppl {row['ppl']:.2f}",) if _is_dense(row) else interval_cell(row, "delta_ppl")


def _with_interval(name: str) -> list[str]:
    return [f"{name}{suffix}" for suffix in ("", "_low", "_high", "_pct", "_pct_low", "_pct_high")]


COLUMNS = [
    *("panel", "section", "key", "technique", "status"),
    *("reported_speedup_pct", "reported_flops_saved_pct", "reported_delta_ppl"),
    *("speedup_pct", "speedup_pct_low", "speedup_pct_high", "noise_floor_pct"),
    *("prompt_speedup_pct", "prompt_speedup_pct_low", "prompt_speedup_pct_high", "prompt_noise_floor_pct"),
    *("executed_flops_saved_pct", "nominal_flops_saved_pct", "paper_flops_saved_pct", "prompt_executed_flops_saved_pct"),
    *("kv_bytes_saved_pct", "ppl", "dense_ppl", *_with_interval("delta_ppl")),
    *("null_kind", "null_ppl", *_with_interval("null_delta_ppl"), *_with_interval("versus_null_ppl")),
    *("audit_max_abs_logit_difference", "audit_masked_max_abs_logit_difference", "lookahead", "execution", "bits_per_byte"),
    *("latency_ms", "prompt_latency_ms", "executed_flops", "nominal_flops", "paper_flops", "prompt_executed_flops"),
    *("model", "weights_digest", "dtype", "data", "token_digest", "windows", "tokens", "record", "dense_record"),
]
