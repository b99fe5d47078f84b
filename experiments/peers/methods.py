"""Published methods beside ours in the same run: what each saves, what it costs, and who is on the frontier (Figures 8 and 15).

Whoever can save the work of a prompt saves about 40% of it here, as ours do; whoever saves K/V keeps as much of it as ours
leave; the others have no such dial. Every row is timed in turns with the dense model in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.measure.deployment import DeploymentResult
from quicksilver.measure.latency import LatencyResult, Timing
from quicksilver.records.record import Record
from quicksilver.report import comparison
from quicksilver.report.artefacts import Outcome, Row, find
from quicksilver.report.claims.reported import reported
from quicksilver.report.sweeps import front
from quicksilver.report.table import NO_VALUE, Column, Lines, interval_cell, kl_cell, number, signed, speedup_cell

PANEL = "peers"
DENSE, WORK, CACHE, FORMAT, OURS = (
    "Dense",
    "Save the prompt's work",
    "Save K/V",
    "Another number format, or another way to decode",
    "QuickSilver",
)
QUANTISED = "int8_dynamic"  # what Figures 8 and 15 set to 1.00
CLAIM = "section3.quantized_baseline"
FOUR = "paper.four"  # a row of Table 11, and the same record

FIT_WINDOWS = ("dataset.calibration_windows=40",)  # 20 thousand tokens, ten and more for each coefficient
# module in conf/modules -> section, what is printed, the dial at this budget
PEERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "prompt_truncation": (WORK, "Truncation, newest kept", ()),
    "prompt_truncation.ends": (WORK, "Truncation, both ends kept", ("modules.prompt_truncation.which=ends",)),
    "prompt_truncation.random": (WORK, "Truncation, random tokens kept", ("modules.prompt_truncation.which=random",)),
    "static_exit": (WORK, "Static early exit", ("modules.static_exit.depth=0.6",)),
    "confidence_exit": (WORK, "Confidence exit, states (CALM)", ("modules.confidence_exit.threshold=0.994",)),
    "confidence_exit.softmax": (WORK, "Confidence exit, softmax (CALM)", ("modules.confidence_exit.measure=softmax",)),
    "token_merging": (WORK, "Token merging (ToMe)", ("modules.token_merging.r=0.057",)),
    "prompt_pruning": (WORK, "Prompt pruning (LazyLLM)", ()),
    "one_shot_halting": (WORK, "One-shot halting (DASH)", ()),
    "quicksilver.projected": (WORK, "K/V projected (SwiftKV, untrained)", ("modules.quicksilver.missing_kv=project",)),
    "fitted_prediction.static": (
        WORK, "All predicted at one layer, none dropped", ("modules.fitted_prediction.drop_oldest=false", *FIT_WINDOWS)
    ),
    "fitted_prediction.shuffled": (
        WORK, "Control: map fitted on shuffled tokens", ("modules.fitted_prediction.control=shuffled", *FIT_WINDOWS)
    ),
    "fitted_prediction.mean": (
        WORK, "Control: mean K/V, not predicted", ("modules.fitted_prediction.control=mean", *FIT_WINDOWS)
    ),
    "learned_halting": (WORK, "Learned halting (Ye et al.)", ()),
    "sliding_window": (CACHE, "Sliding window", ("modules.sliding_window.window=347",)),
    "sink_attention": (CACHE, "Sinks and window (StreamingLLM)", ("modules.sink_attention.window=343",)),
    "heavy_hitter": (CACHE, "Heavy hitters (H2O)", ("modules.heavy_hitter.heavy=173", "modules.heavy_hitter.recent=173")),
    "bfloat16": (FORMAT, "bfloat16", ()),
    QUANTISED: (FORMAT, "Dynamic int8", ()),
    "prompt_lookup": (FORMAT, "Prompt lookup (speculative)", ()),
}  # fmt: skip
_PEER = ("measure.null_control.enabled=false",)
# Ours: modules joined by `+` -> what is printed, further overrides. Those in float32 are rows of Table 11, and the same records. A number format
# goes with any of them. Yamls called `*best*` are rows as well.
BEST: dict[str, tuple[str, tuple[str, ...]]] = {
    "halting_attention": ("Halting, least attended", ()),
    "token_fusion_attention": ("Fusion, least attended", ()),
    "token_fusion_attention+bfloat16": ("Fusion, least attended, in bfloat16", _PEER),
    "quicksilver": ("Dropped, then predicted", ()),
    "quicksilver+bfloat16": ("Dropped, then predicted, in bfloat16", _PEER),
    "quicksilver_50+bfloat16": ("Dropped, then predicted, 50%, in bfloat16", _PEER),
    "bfloat16+block_attention": ("bfloat16, attention in blocks", _PEER),
    "quicksilver+bfloat16+block_attention": ("Dropped, then predicted, in bfloat16, attention in blocks", _PEER),
    "quicksilver_50+bfloat16+block_attention": ("Dropped, then predicted, 50%, in bfloat16, attention in blocks", _PEER),
}
_ALWAYS = ("protocol=continuation",)
# Decoding is timed where a method is about it. Its dense run is one more.
_DECODING = ("measure.deployment.enabled=true", "measure.deployment.new_tokens=32")


def rows() -> list[Row]:
    """Dense, the peers, ours."""
    from quicksilver.runs.choices import choices

    found = [Row(PANEL, DENSE, "dense", "Dense float32", (*_ALWAYS, "modules=[]"))]
    for key, (section, technique, dial) in PEERS.items():
        module = key.partition(".")[0]
        overrides = (*_ALWAYS, *_PEER, *(() if section == WORK else _DECODING), f"modules=[{module}]", *dial)
        found.append(Row(PANEL, section, key, technique, overrides, (module,)))
    best: dict[str, tuple[str, tuple[str, ...]]] = {
        name: (name.replace("_", " ").capitalize(), ()) for name in choices("modules") if "best" in name
    }
    for joined, (technique, overrides) in (BEST | best).items():
        modules = tuple(joined.split("+"))
        chosen = f"modules=[{','.join(modules)}]"
        found.append(Row(PANEL, OURS, f"ours.{joined}", technique, (*_ALWAYS, chosen, *overrides), modules))
    four = next(
        row
        for row in find("table", "11").experiment.rows()
        if (row.panel, row.key) == ("continuation", "cumulative.quantization")
    )
    found.append(Row(PANEL, OURS, FOUR, "The paper's four mechanisms", four.overrides, four.needs))
    return found


def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """`comparison.frame` with what a comparison needs.

    `prompt_time_ratio`: time of the prompt over that of the dense model, and `versus_int8`: the same over that of dynamic int8, as in
    Figure 8. `token_ratio`: time per decoded token over dense, with its quartiles; `token_noise_pct`: its noise floor.
    `judged_speedup_pct` and `judged_loss_pct`: the speedup of the prompt where it is beyond the noise floor and Δ perplexity where its
    interval does not contain 0, else 0; `front`: no row, the dense model included, has as much of the one for no more of the other.
    """
    found = comparison.frame(outcomes)
    extra = pd.DataFrame([_more(outcome) for outcome in outcomes], index=found.index, columns=_MORE)
    found = pd.concat([found, extra], axis=1)
    quantised = found.loc[found["key"] == QUANTISED, "prompt_time_ratio"]
    found["versus_int8"] = found["prompt_time_ratio"] / (float(quantised.iloc[0]) if len(quantised) else float("nan"))
    speedup, noise = found["prompt_speedup_pct"], found["prompt_noise_floor_pct"]
    found["judged_speedup_pct"] = speedup.where(speedup.abs() > noise, 0.0).where(speedup.notna())
    loss, low, high = (found[f"delta_ppl_pct{part}"] for part in ("", "_low", "_high"))
    found["judged_loss_pct"] = loss.where((low > 0) | (high < 0), 0.0).where(loss.notna())
    dense = found["key"] == "dense"
    measured = found["status"] == comparison.MEASURED
    found.loc[dense & measured, ["judged_speedup_pct", "judged_loss_pct"]] = 0.0
    found["front"] = front(found["judged_speedup_pct"], found["judged_loss_pct"])
    return found


_MORE = ("prompt_time_ratio", "token_ratio", "token_ratio_low", "token_ratio_high", "token_noise_pct", "same_first_tokens")


def prompt_timing(record: Record) -> Timing | None:
    """Times of the prompt; None: it was not timed, or its widths are simulated."""
    latency = record.found("latency", LatencyResult)
    return None if latency is None or record.simulated else latency.timing(prompt=True)


def _more(outcome: Outcome) -> dict[str, Any]:
    record = outcome.record
    if record is None:
        return {}
    row: dict[str, Any] = {}
    timing = prompt_timing(record)
    if timing is not None:
        row["prompt_time_ratio"] = 1.0 if outcome.row.key == "dense" else timing.ratio.median
    served = record.found("deployment", DeploymentResult)
    if served is not None and served.per_token_ratio is not None:
        ratio = served.per_token_ratio
        row |= {"token_ratio": ratio.median, "token_ratio_low": ratio.low, "token_ratio_high": ratio.high}
        row |= {"token_noise_pct": served.noise_floor_pct, "same_first_tokens": served.same_first_tokens}
    return row


# --- printed --------------------------------------------------------------------------------------------------------------------


def columns() -> tuple[Column, ...]:
    """The printed columns."""
    return (
        Column("", "technique", _technique, align="left"),
        Column("perplexity against dense", "Δppl", _quality),
        Column("", "KL × 100", kl_cell, expendable=3),
        Column("saved %", "exec, prompt", lambda row: (signed(number(row, "prompt_executed_flops_saved_pct")),)),
        Column("saved %", "KV bytes", lambda row: (signed(number(row, "kv_bytes_saved_pct")),)),
        Column("time", "prompt speedup %", lambda row: speedup_cell(row, "prompt_speedup_pct")),
        Column("time", "÷ int8", _ratio_cell("versus_int8"), expendable=2),
        Column("time", "a decoded token, ÷ dense", _token, expendable=1),
        Column("", "front", lambda row: ("●" if row["front"] else "",)),
    )


def _technique(row: Mapping[str, Any]) -> Lines:
    return (row["technique"],) if row["status"] == comparison.MEASURED else (row["technique"], row["status"])


def _quality(row: Mapping[str, Any]) -> Lines:
    ppl = number(row, "ppl")
    return (f"ppl {ppl:.2f}",) if row["key"] == "dense" and ppl is not None else interval_cell(row, "delta_ppl")


def _ratio_cell(key: str) -> Any:
    def cell(row: Mapping[str, Any]) -> Lines:
        value = number(row, key)
        return (NO_VALUE,) if value is None else (f"{value:.2f}",)

    return cell


def _token(row: Mapping[str, Any]) -> Lines:
    ratio, noise = number(row, "token_ratio"), number(row, "token_noise_pct")
    if ratio is None:
        return (NO_VALUE,)
    shown = "≈ 0" if noise is not None and abs(ratio - 1) * 100 <= noise else f"{ratio:.2f}"
    return (shown,) if noise is None else (shown, f"noise {noise:.1f}%")


LEGEND = (
    "Δppl: perplexity of the tokens after the prompt minus dense float32 on the same windows with its 95% interval; below it the same in "
    "percent.",
    "saved: executed operations of the prompt, signals included, and resident KV bytes. A mask adds operations that the "
    "causal kernel would have skipped.",
    "prompt speedup: wall clock of the prompt in percent of dense, median of rounds that alternate with it. "
    f"{comparison.NOISE} "
    "÷ int8: time over that of dynamic int8, the measure of Figures 8 and 15. A decoded token: greedy, batch 1, prompt of 256.",
    "front: ● where no other row is as fast for no more loss. A speedup within the noise and a Δppl whose interval has 0 in it count as 0.",
    "Budgets: a method that saves the prompt's work is set to about 40% of it, as ours are. Where that can be done at "
    "several depths (DASH, LazyLLM, ToMe), the depths are those that cost least on the calibrating part of the text. CALM's "
    "softmax measure saves nothing at any threshold here, because the output head costs three layers; it keeps its own "
    "threshold. A method that saves K/V keeps 346 entries a layer, as ours.",
)


def findings(rows: pd.DataFrame) -> tuple[str, ...]:
    """What the rows say about ours: who is faster at no more loss, and the paper's ratio to quantization beside the measured one."""
    measured = rows[rows["judged_speedup_pct"].notna() & rows["judged_loss_pct"].notna()].set_index("key")
    said = []
    for _, ours in measured[measured["section"] == OURS].iterrows():
        peers = measured[measured["section"] != OURS]
        faster = peers["judged_speedup_pct"] > ours["judged_speedup_pct"]
        beats = (peers["judged_speedup_pct"] >= ours["judged_speedup_pct"]) & (
            peers["judged_loss_pct"] <= ours["judged_loss_pct"]
        )
        beats &= faster | (peers["judged_loss_pct"] < ours["judged_loss_pct"])
        where = (
            f"{ours['technique']} ({ours['prompt_speedup_pct']:+.0f}% of the prompt's time for {ours['delta_ppl_pct']:+.1f}% ppl)"
        )
        if beats.any():
            names = "; ".join(
                f"{row['technique']}, {row['prompt_speedup_pct']:+.0f}% for {row['delta_ppl_pct']:+.1f}%"
                for _, row in peers[beats].iterrows()
                if row["section"] != DENSE
            )
            said.append(f"{where} is beaten by {names or 'dense inference itself'}.")
        else:
            said.append(f"{where} is beaten by no peer: none is as fast for no more loss.")
    fastest = measured.loc[measured["section"] == OURS, "versus_int8"].min()
    if pd.notna(fastest):
        claimed = reported()[CLAIM].values["time_ratio"]
        quantised = float(measured.loc[QUANTISED, "prompt_time_ratio"])
        said.append(
            f"The fastest of ours takes {fastest:.2f} of the time of dynamic int8, which takes {quantised:.2f} of that of dense float32; the "
            f"paper says {claimed:.2f} of its quantized baseline."
        )
    return tuple(said)
