"""Published methods beside ours in the same run: table peers, and Figures 8 and 15 of the same records.

A method that saves the work of a prompt saves about 40% of it here, as ours do, by a setting that was searched as ours were (`searched.yaml`). One
that saves K/V keeps as much of it as ours leave; the others have no such dial. Every row is timed in turns with the dense model in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from quicksilver.measure.deployment import DeploymentResult
from quicksilver.measure.latency import LatencyResult, Timing
from quicksilver.measure.measurement import Quartiles
from quicksilver.records.record import Record
from quicksilver.records.times import TimedProcess, one_by_one, over
from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row, artefact
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.figure import GREY, HATCHES, MARKERS, PALETTE, Figure, legend_below, panels, style, whiskers
from quicksilver.report.sweeps import FRONT, front
from quicksilver.report.table import ENDS, KL_CELL, NO_VALUE, Column, Lines, Panel, Table, number, speedup_cell, time_cell

from .. import drawing as draw
from ..ablation.techniques import KEPT, of_each, options, row_of, steps
from ..cost.costs import set_against

PANEL = "peers"
DENSE, WORK, CACHE, OURS = "Dense", "Save the prompt's work", "Save K/V", "Ours"
FORMAT = "Another number format, or another way to decode"
QUANTISED = "int8_dynamic"  # what Figures 8 and 15 set to 1.00
CLAIM = "section3.quantized_baseline"
CLAIMED = reported()[CLAIM].values["time_ratio"]
FOUR = "paper.four"  # a row of Table 11, and the same record
PAPER = "The paper's mechanisms"
THREE = "paper.three"  # another one: the mechanisms that 3.1 names beside its 0.40; widths are simulated, and have no time

# model -> dial -> what `quicksilver budget save=0.4 of=prompt_executed dial=… model=… output=searched.yaml` took, and what it compared
FOUND = yaml.safe_load(Path(__file__).with_name("searched.yaml").read_text(encoding="utf-8"))
BUDGET = "save40_prompt_executed"
SEARCHED: dict[str, object] = {}  # the dial stands in FOUND

NEWEST, _ = KEPT[448]
# module in conf/modules -> section, what is printed, the dial at this budget
PEERS: dict[str, tuple[str, str, dict[str, object]]] = {
    "prompt_truncation": (WORK, "Truncation, newest kept", {"keep": NEWEST}),
    "prompt_truncation.ends": (WORK, "Truncation, both ends kept", {"which": "ends", "keep": NEWEST}),
    "prompt_truncation.random": (WORK, "Truncation, random tokens kept", {"which": "random", "keep": NEWEST}),
    "static_exit": (WORK, "Static early exit", SEARCHED),
    "confidence_exit": (WORK, "Confidence exit, states (CALM)", SEARCHED),
    "confidence_exit.softmax": (WORK, "Confidence exit, softmax (CALM)", {"measure": "softmax"}),
    "token_merging": (WORK, "Token merging (ToMe)", SEARCHED),
    "prompt_pruning": (WORK, "Prompt pruning (LazyLLM)", SEARCHED),
    "one_shot_halting": (WORK, "One-shot halting (DASH)", SEARCHED),
    "quicksilver.projected": (WORK, "K/V projected (SwiftKV, untrained)", {"missing_kv": "project"}),
    "fitted_prediction.static": (WORK, "All predicted at one layer, none dropped", {"drop_oldest": "false"}),
    "fitted_prediction.shuffled": (WORK, "Control: map fitted on shuffled tokens", {"control": "shuffled"}),
    "fitted_prediction.mean": (WORK, "Control: mean K/V, not predicted", {"control": "mean"}),
    "learned_halting": (WORK, "Learned halting (Ye et al.)", {}),
    "sliding_window": (CACHE, "Sliding window", {"window": 347}),
    "sink_attention": (CACHE, "Sinks and window (StreamingLLM)", {"window": 343}),
    "heavy_hitter": (CACHE, "Heavy hitters (H2O)", {"heavy": 173, "recent": 173}),
    "bfloat16": (FORMAT, "bfloat16", {}),
    QUANTISED: (FORMAT, "Dynamic int8", {}),
    "prompt_lookup": (FORMAT, "Prompt lookup (speculative)", {}),
}
_FITTED = ("dataset.calibration_windows=40",)  # 20 thousand tokens, ten and more for each coefficient
_PEER = ("measure.null_control.enabled=false",)
# Ours: modules joined by `+` -> what is printed. Those in float32 are rows of Table 11, and the same records. A number format goes with any of
# them.
BEST = {
    "halting_attention": "Halting, least attended",
    "token_fusion_attention": "Fusion, least attended",
    "token_fusion_attention+bfloat16": "Fusion, least attended, in bfloat16",
    "quicksilver": "Predict K/V",
    "quicksilver+bfloat16": "Predict K/V, in bfloat16",
    "quicksilver_50+bfloat16": "Predict K/V, 50%, in bfloat16",
    "bfloat16+block_attention": "bfloat16, attention in blocks",
    "quicksilver+bfloat16+block_attention": "Predict K/V, in bfloat16, attention in blocks",
    "quicksilver_50+bfloat16+block_attention": "Predict K/V, 50%, in bfloat16, attention in blocks",
}
_ALWAYS = ("protocol=continuation",)
# Decoding is timed where a method is about it. Its dense run is one more.
_DECODING = ("measure.deployment.enabled=true", "measure.deployment.new_tokens=32")


def rows() -> list[Row]:
    """Dense, the peers, ours."""
    found = [row_of(PANEL, DENSE, "dense", "Dense float32", "", *_ALWAYS)]
    for key, (section, technique, dial) in PEERS.items():
        module = key.partition(".")[0]
        always = (*_ALWAYS, *_PEER, *(() if section == WORK else _DECODING))
        dialled = (*options(module, **dial), *(_FITTED if module == "fitted_prediction" else ()))
        row = row_of(PANEL, section, key, technique, module, *always, overrides=dialled)
        if dial is SEARCHED:  # each model's own dial
            asked = {model: dials[module][BUDGET]["overrides"] for model, dials in FOUND.items()}
            mine = {model: [word for word in words if word.startswith(f"modules.{module}.")] for model, words in asked.items()}
            row = of_each(row, {model: (*row.overrides, *words) for model, words in mine.items()})
        found.append(row)
    for joined, technique in BEST.items():
        more = _PEER if "bfloat16" in joined else ()
        found.append(row_of(PANEL, OURS, f"ours.{joined}", technique, joined.replace("+", ","), *_ALWAYS, overrides=more))
    return [*found, _of_the_paper("cumulative.quantization", FOUR, "all four mechanisms")]


def _of_the_paper(step: str, key: str, said: str, *more: str) -> Row:
    (row,) = (row for row in steps("continuation", *_ALWAYS, *more) if row.key == step)
    return replace(row, panel=PANEL, section=OURS, key=key, technique=f"Paper: {said}")


def frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """`comparison.frame` with what a comparison needs.

    `prompt_time_ratio`: time of the prompt over that of the dense model. `versus_int8`: over that of dynamic int8, as in Figure 8; of
    several processes the median of their quotients. `token_ratio`: time per decoded token over dense, with its quartiles;
    `token_noise_pct`: its noise floor.
    `judged_speedup_pct` and `judged_loss_pct`: the speedup of the prompt where it is beyond the noise floor and Δ perplexity where its
    interval does not contain 0, else 0; `front`: no row, the dense model included, has as much of the one for no more of the other.
    """
    found, processes, more = comparison.frame(outcomes), provenance.timings(outcomes), []
    for outcome in outcomes:
        row: dict[str, Any] = {"prompt_time_ratio": _prompt_ratio(outcome, processes)}
        served = None if outcome.record is None else outcome.record.found("deployment", DeploymentResult)
        if served is not None and (of_token := served.per_token_ratio) is not None:
            row |= {"token_ratio": of_token.median, "token_ratio_low": of_token.low, "token_ratio_high": of_token.high}
            row |= {"token_noise_pct": served.noise_floor_pct, "same_first_tokens": served.same_first_tokens}
        more.append(row)
    columns = ["prompt_time_ratio", *(f"token_ratio{end}" for end in ENDS), "token_noise_pct", "same_first_tokens"]
    found = found.join(pd.DataFrame(more, index=found.index, columns=columns))
    each = one_by_one(processes)
    of_each_process = [[_prompt_ratio(outcome, those) for those in each] for outcome in outcomes]
    ratios = pd.DataFrame(of_each_process, index=found.index, dtype=float)
    quantised = ratios[found["key"] == QUANTISED]
    found["versus_int8"] = ratios.div(quantised.iloc[0]).median(axis=1) if len(quantised) else float("nan")
    speedup, noise = found["prompt_speedup_pct"], found["prompt_noise_floor_pct"]
    found["judged_speedup_pct"] = speedup.where(speedup.abs() > noise, 0.0).where(speedup.notna())
    loss, low, high = (found[f"delta_ppl_pct{end}"] for end in ENDS)
    found["judged_loss_pct"] = loss.where((low > 0) | (high < 0), 0.0).where(loss.notna())
    dense = (found["key"] == "dense") & (found["status"] == comparison.MEASURED)
    found.loc[dense, ["judged_speedup_pct", "judged_loss_pct"]] = 0.0
    found["front"] = front(found["judged_speedup_pct"], found["judged_loss_pct"])
    return found


def prompt_timing(record: Record, processes: Sequence[TimedProcess]) -> Timing | None:
    """Times of the prompt, over the processes that timed it again, if any; None: it was not timed, or its widths are simulated."""
    if not provenance.has_time(record):
        return None
    own = record.measured("latency", LatencyResult)
    return over(processes, record.fingerprint, prompt=True) if processes else own.timing(prompt=True)


def _prompt_ratio(outcome: Outcome, processes: Sequence[TimedProcess]) -> float | None:
    """Time of the prompt over that of the dense model, whose own is 1."""
    timing = None if outcome.record is None else prompt_timing(outcome.record, processes)
    return None if timing is None else 1.0 if outcome.row.key == "dense" else timing.ratio.median


# --- printed --------------------------------------------------------------------------------------------------------------------
def _token(row: Mapping[str, Any]) -> Lines:
    ratio, noise = number(row, "token_ratio"), number(row, "token_noise_pct")
    if ratio is None:
        return (NO_VALUE,)
    within = noise is not None and abs(ratio - 1) * 100 <= noise
    shown = time_cell(100 * (1 - ratio), noise)[0] if within else f"{ratio:.2f}"
    return (shown,) if noise is None else (shown, f"noise {noise:.1f}%")


COLUMNS = (
    Column("", "technique", comparison.technique_cell, align="left"),
    Column("perplexity against dense", "Δppl", comparison.delta_ppl_cell),
    Column("", "KL × 100", KL_CELL, expendable=3),
    Column("saved %", "exec, prompt", "{prompt_executed_flops_saved_pct:+.1f}"),
    Column("saved %", "KV bytes", "{kv_bytes_saved_pct:+.1f}"),
    Column("time", "prompt speedup %", lambda row: speedup_cell(row, "prompt_speedup_pct")),
    Column("time", "÷ int8", "{versus_int8:.2f}", expendable=2),
    Column("time", "a decoded token, ÷ dense", _token, expendable=1),
    FRONT,
)
LEGEND = (
    "Δppl: perplexity of the tokens after the prompt minus dense float32 on the same windows with its 95% interval; below it the same in "
    "percent.",
    "KL × 100: from the dense model's next-token distribution to the run's, hundredths of a nat a scored token.",
    "saved: executed operations of the prompt, signals included, and resident KV bytes. A mask adds operations that the "
    "causal kernel would have skipped.",
    f"prompt speedup: wall clock of the prompt in percent of dense, median of rounds that alternate with it. {comparison.NOISE} "
    "÷ int8: time over that of dynamic int8, the measure of Figures 8 and 15. A decoded token: greedy, batch 1, prompt of 256.",
    "front: ● where no other row is as fast for no more loss. A speedup within the noise and a Δppl whose interval has 0 in it count as 0.",
    "Budgets: a method that saves the prompt's work is set to about 40% of it, as ours are; prompt saved % says how near. "
    "ToMe weighs attention by size, which takes a mask. Static exit, CALM, ToMe, LazyLLM and DASH were searched for each model by "
    "`quicksilver budget`, on calibrating text: of python-source for far-gpt2 and far-llama, else of python-docs. Of the settings that save 40%, the one of least KL was taken (experiments/peers/searched.yaml has all). CALM's softmax "
    "measure saves nothing at any threshold: the output head costs three layers. It keeps its own threshold. A method that saves K/V "
    "keeps 346 entries a layer, as ours.",
)


def findings(rows: pd.DataFrame) -> tuple[str, ...]:
    """What the rows say about ours: who is faster at no more loss, and the paper's ratio to quantization beside the measured one."""

    def named(row: pd.Series) -> tuple[str, str]:
        return f"{row['prompt_speedup_pct']:+.0f}%", f"for {row['delta_ppl_pct']:+.1f}%"

    measured = rows[rows["judged_speedup_pct"].notna() & rows["judged_loss_pct"].notna()].set_index("key")
    peers, said = measured[measured["section"] != OURS], []
    for _, ours in measured[measured["section"] == OURS].iterrows():
        gain, loss = (peers[column] - ours[column] for column in ("judged_speedup_pct", "judged_loss_pct"))
        beats = peers[(gain >= 0) & (loss <= 0) & ((gain > 0) | (loss < 0))]
        theirs = (row for _, row in beats.iterrows() if row["section"] != DENSE)
        others = "; ".join(f"{row['technique']}, {' '.join(named(row))}" for row in theirs)
        verdict = f"beaten by {others or 'dense inference itself'}"
        if beats.empty:
            verdict = "beaten by no method of others: none is as fast for no more loss"
        said.append(f"{ours['technique']} ({named(ours)[0]} of the prompt's time {named(ours)[1]} ppl) is {verdict}.")
    fastest = measured.loc[measured["section"] == OURS, "versus_int8"].min()
    if pd.notna(fastest):
        quantised = float(measured.loc[QUANTISED, "prompt_time_ratio"])
        said.append(
            f"The fastest of ours takes {fastest:.2f} of the time of dynamic int8, which takes {quantised:.2f} of that of dense float32; the "
            f"paper says {CLAIMED:.2f} of its quantized baseline."
        )
    return tuple(said)


@artefact(rows)
def table_peers(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table peers: published methods and ours in the same run: quality, executed FLOPs, time and K/V at matched budgets."""
    found = frame(outcomes)
    title = "Protocol continuation: modules may look ahead inside the prompt; only the tokens after it are scored"
    panel = Panel(PANEL, title, COLUMNS, (*comparison.cautions(found, PANEL), *provenance.notes(outcomes)))
    return Table(name, "Peers and ours in the same run", found, (panel,), (*findings(found), *LEGEND))


# --- the figure -------------------------------------------------------------------------------------------------------------------
def _timed(outcomes: Mapping[str, Outcome], processes: Sequence[TimedProcess] = (), *, decoded: bool) -> dict[str, Estimate]:
    """Times of the prompt over dense, by key of the row, or of a token decoded after one."""
    found: dict[str, tuple[Quartiles | None, float]] = {}
    for key, record in ((key, one.record) for key, one in outcomes.items() if one.record is not None):
        if decoded and (served := record.found("deployment", DeploymentResult)) is not None:
            found[key] = served.per_token_ratio, served.noise_floor_pct
        elif not decoded and (timing := prompt_timing(record, processes)) is not None:
            found[key] = timing.ratio, timing.noise_floor_pct
    return {key: Estimate(one.median, one.low, one.high, noise / 100) for key, (one, noise) in found.items() if one is not None}


def _three_over(outcomes: Mapping[str, Outcome], other: str, *, decoded: bool) -> Estimate | None:
    """Time under the paper's three over that of another row; None: one of them was not timed."""
    processes = () if decoded else provenance.timings([*outcomes.values()])
    found = [_timed(outcomes, those, decoded=decoded) for those in one_by_one(processes)]
    if any(not {THREE, other} <= timed.keys() for timed in found):
        return None
    return set_against([(timed[THREE], timed[other]) for timed in found], truediv)


def _fastest(outcomes: Mapping[str, Outcome], *, decoded: bool) -> str:
    """The key of the fastest method of others; empty: none was timed."""
    timed = _timed(outcomes, () if decoded else provenance.timings([*outcomes.values()]), decoded=decoded)
    others = [key for key in timed if outcomes[key].row.section not in (DENSE, OURS)]
    return min(others, key=lambda key: timed[key].value, default="")


def _lead(outcomes: Mapping[str, Outcome], *, decoded: bool) -> Estimate | None:
    """Percent of the time of the fastest method of others that the paper's three take less."""
    found = _three_over(outcomes, _fastest(outcomes, decoded=decoded), decoded=decoded)
    return found and Estimate(100 * (1 - found.value), 100 * (1 - found.high), 100 * (1 - found.low), 100 * found.floor)


def _both(of: Callable[..., Estimate | None], versus: Callable[..., str], against: str) -> tuple[AnsweredBy, ...]:
    """Of the prompt, and of decoded tokens: the paper times those. Its own mechanisms, not our best: that is what its figure shows."""
    found = []
    for decoded, when in ((False, "the prompt"), (True, "tokens generated one by one")):
        ours, theirs = partial(of, decoded=decoded), partial(versus, decoded=decoded)
        note = f"halting, KV skipping and fusion, as 3.1 has it; {when}, {against}"
        found.append(AnsweredBy(PANEL, THREE, of=ours, versus=theirs, own_time=decoded, note=note))
    return tuple(found)


ANSWERS = {
    f"{CLAIM}.time_ratio": _both(partial(_three_over, other=QUANTISED), lambda _, decoded: QUANTISED, "over dynamic int8"),
    "section3.fastest.lead_pct": _both(_lead, _fastest, "against the fastest method of others"),
}


@artefact(
    lambda: [*rows(), _of_the_paper("cumulative.fusion", THREE, "halting, KV skipping, fusion", *_DECODING)], answers=ANSWERS
)
def figure08_15_peers(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figures 8 and 15: inference time against existing acceleration methods, over that of quantization, and what that time costs."""
    sections = (OURS, WORK, CACHE, FORMAT, DENSE, PAPER)  # ours stand out
    colours = dict(zip(sections, (PALETTE[1], PALETTE[3], PALETTE[5], PALETTE[6], GREY, PALETTE[0]), strict=True))
    hatches = dict(zip(sections, HATCHES, strict=False))
    of_table = [one for one in outcomes if one.row.key != THREE]
    found, three = frame(of_table), frame(outcomes)
    paper = three[three["key"] == THREE].assign(front=False)  # not our best: the front is that of the table
    drawn = pd.concat([found, paper.dropna(axis=1, how="all")], ignore_index=True)[list(found)]
    shown = drawn.dropna(subset=["prompt_time_ratio"]).sort_values("prompt_time_ratio", ascending=False).reset_index(drop=True)
    shown.loc[shown["key"].isin([FOUR, THREE]), "section"] = PAPER
    with style():
        drawing, plots = panels(1, 2, size=(10.4, 0.22 * len(shown) + 1.3), sharey=True, width_ratios=[1.5, 1])
        _times(plots[0, 0], shown, colours, hatches)
        _losses(plots[0, 1], shown, colours)
        plots[0, 0].set_yticks(range(len(shown)), shown["technique"])
        for label, best in zip(plots[0, 0].get_yticklabels(), shown["front"], strict=True):
            label.set_fontweight("bold" if best else "normal")
        looks = {one: {"facecolor": colours[one], "hatch": hatches[one]} for one in sections}
        legend_below(drawing, draw.keys_of(looks, shown["section"], {}, edgecolor="white"), ncols=3)
    spread = "range over processes" if provenance.timings(of_table) else "quartiles of rounds in turns"
    said = (
        f"Left: time of the prompt over that of the dense model in float32 (median; bars: {spread}), the fastest on top. "
        "Right: perplexity added to the tokens after it (95% intervals), linear below 1% and logarithmic above. Bold and ringed: no other "
        "method is as fast for no more loss.",
        "A speedup within the noise floor and a Δ whose interval has 0 in it count as 0 for that.",
    )
    title = "Existing methods and ours: time of a prompt and perplexity after it"
    ratio, finding = paper["versus_int8"].dropna(), ""
    if len(ratio):
        finding = f"The paper's mechanisms take {ratio.iloc[0]:.2f} of the time of dynamic int8; the paper reports {CLAIMED:.2f}"
    return Figure(name, title, drawn, drawing, (*said, *findings(found), *provenance.notes(outcomes)), finding=finding)


def _times(plot: Any, shown: pd.DataFrame, colours: Mapping[str, str], hatches: Mapping[str, str]) -> None:
    x = shown["prompt_time_ratio"]
    low, high = (1 - shown[f"prompt_speedup_pct_{end}"] / 100 for end in ("high", "low"))
    ends = [pd.Series(end, x.index).fillna(0.0) for end in whiskers(x, low, high)]
    for section, rows in shown.groupby("section"):
        colour, hatch = colours[str(section)], hatches[str(section)]
        plot.barh(rows.index, x[rows.index], height=0.72, color=colour, hatch=hatch, edgecolor="white")
    plot.errorbar(x, shown.index, xerr=ends, linestyle="", marker="", color="black", elinewidth=0.7, capsize=1.5)
    for i, (value, end) in enumerate(zip(x, x + ends[1], strict=True)):
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}  # the line at 1 must not strike it out
        plot.annotate(f"{value:.2f}", (end, i), (4, 0), textcoords="offset points", va="center", bbox=box)
    draw.vertical(plot, 1)
    above: dict[str, Any] = {"transform": plot.get_xaxis_transform(), "va": "bottom"}
    quantised = shown.loc[shown["key"] == QUANTISED, "prompt_time_ratio"]
    if len(quantised):
        paper = CLAIMED * float(quantised.iloc[0])
        draw.vertical(plot, paper, linewidth=1.0, linestyle=(0, (4, 2)), zorder=3)
        side = "right" if paper < 1 else "left"
        plot.text(paper, 1.0, f"the paper's QuickSilver:\n{CLAIMED:.2f} of dynamic int8", ha=side, **above)
    plot.text(1, 1.0, "dense", ha="center", **above)
    plot.set_xlim(0, 1.12 * max((x + ends[1]).max(), 1.0) if len(x) else None)
    plot.set_xlabel("time of the prompt, × dense float32")
    plot.grid(axis="y", visible=False)


def _losses(plot: Any, shown: pd.DataFrame, colours: Mapping[str, str]) -> None:
    y = shown["delta_ppl_pct"].fillna(0.0)
    ends = [pd.Series(end, y.index).fillna(0.0) for end in whiskers(y, shown["delta_ppl_pct_low"], shown["delta_ppl_pct_high"])]
    for place, (section, rows) in enumerate(shown.groupby("section")):
        at, colour = rows.index, colours[str(section)]
        bars: dict[str, Any] = {"xerr": [end[at] for end in ends], "elinewidth": 0.9, "capsize": 1.5}
        plot.errorbar(y[at], at, linestyle="", marker=MARKERS[place], color=colour, **bars)
    best = shown.index[shown["front"]]
    plot.plot(y[best], best, linestyle="", marker="o", markersize=9, markerfacecolor="none", color="black")
    draw.vertical(plot, 0)
    plot.set_xscale("symlog", linthresh=1.0)
    plot.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f}k" if x >= 1000 else f"{x:.0f}")
    least = float((y - ends[0]).min()) if len(y) else 0.0
    plot.set_xlim(1.5 * min(least, -0.5), None)  # no room for losses below zero that nobody has
    plot.set_xlabel("Δ perplexity after it, % of dense")
    plot.minorticks_off()
