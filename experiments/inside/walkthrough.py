"""One sentence under all four mechanisms: token by token (Table 5), as trajectories through the layers (Figures 5 and 17), and mechanism by mechanism (2)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from quicksilver.records.record import Record
from quicksilver.report.artefacts import Outcome, artefact
from quicksilver.report.claims.reported import reported
from quicksilver.report.figure import DASHES, GREY, MARKERS, PALETTE, Figure, legend_below, panels, style
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, filled

from .. import drawing as draw
from . import halting, held, sentences

TEXT = sentences.SENTENCE
_RUNS = sentences.runs("all four")
_GREY = "#dedede"


# --- Table 5 ----------------------------------------------------------------------------------------------------------------------
@artefact(_RUNS, sentences.READ)
def table05_walkthrough(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table 5: the paper's sample sentence through all four modules, token by token.

    Claims: the statements of the paper's Table 5 about single words (reported_tokens.yaml, table5.…). Its rule for K/V contradicts itself
    (docs/conflicts.md #11).
    """
    frame = walk(sentences.measured(outcomes, "all four"))
    panel = Panel("sentence", "In the order of the sentence", COLUMNS, sentences.caption(outcomes, TEXT))
    halted, fused = frame["halts_after_layer"].notna().sum(), frame["fused_into"].notna().sum()
    skipped = ((frame["layers_without_kv"] > 0) & frame["fused_into"].isna()).sum()
    widths = frame["bits"].value_counts().sort_index(ascending=False)
    of_widths = ", ".join(f"{count} are held at {width:.0f} bits" for width, count in widths.items())
    counted = f"Of {len(frame)} tokens {halted} halt, {skipped} have no K/V entry in some layer, {fused} are carried by a neighbour, and {of_widths}."
    return Table(name, "Table 5: one sentence through all four modules", frame, (panel,), (counted, *LEGEND))


def walk(record: Record) -> pd.DataFrame:
    """Per token: after which layer it halts (`halts_after_layer`, empty if never) with the drift and entropy there; in how many layers it has
    no K/V entry; which token carries it from which layer on; its width and the entropy that decided it; the paper's words."""
    signals, tokens, n_layers = record.signals(TEXT), pd.Series(record.texts[TEXT].tokens).str.strip(), record.model.layers
    names = ("active", "kv", "carrier", "bits", "drift_relative", "entropy_nats")
    active, kv, carriers, bits, drift, entropy = (sentences.layers(signals, name) for name in names)
    carrier, width = carriers.loc[n_layers], bits.loc[n_layers]
    gone = carriers.ne(carriers.columns, axis=1)
    fused_after = (gone.idxmax() - 1).where(gone.any())
    halts = sentences.halted_after(active)
    halts = halts.where((halts < n_layers) & ~(halts >= fused_after))
    again = active.astype(bool) & (active.index.to_numpy()[:, None] > halts.to_numpy())
    decided = sentences.layer_after(record.config["modules"]["adaptive_quantization"]["depth"], n_layers)
    claims: dict[str, list[str]] = {}  # what the paper's Table 5 says, by word in lower case
    for key, claim in reported().items():
        if key.startswith("table5.") and (word := re.search(r'"([^"]+)"', claim.quote)) is not None:
            said = re.sub(r'^(Token )?"[^"]+":? *', "", claim.quote).replace("->", "→")
            claims.setdefault(word[1].lower(), []).append(said)
    quantized = width < held.UNTOUCHED_BITS
    frame = pd.DataFrame({"panel": "sentence", "section": "", "slot": tokens.index, "token": tokens, "halts_after_layer": halts})
    return frame.assign(
        resumes_in_layer=again.idxmax().where(again.any()),
        drift_relative=[np.nan if pd.isna(layer) else drift.loc[layer, slot] for slot, layer in halts.items()],
        entropy_nats=[np.nan if pd.isna(layer) else entropy.loc[layer, slot] for slot, layer in halts.items()],
        layers_without_kv=(~kv.astype(bool)).sum(),
        fused_after_layer=fused_after,
        fused_into=carrier.where(gone.any()),
        fused_into_token=carrier.map(tokens).where(gone.any()),
        parts=carrier.value_counts().reindex(tokens.index, fill_value=0),
        bits=width.where(quantized),
        deciding_entropy_nats=entropy.loc[decided].where(quantized),
        paper=["; ".join(claims.get(token.lower(), ())) for token in tokens],
    )


def _halting(row: Mapping[str, Any]) -> Lines:
    again = "" if pd.isna(row["resumes_in_layer"]) else ", again from {resumes_in_layer:.0f}"
    return filled("after {halts_after_layer:.0f}" + again, row)


def _unless_fused(fused: str, plain: Callable[[Mapping[str, Any]], str]) -> Callable[[Mapping[str, Any]], Lines]:
    """A form where the token goes into another, else what is said of a token by itself."""
    return lambda row: (plain(row) if pd.isna(row["fused_into"]) else fused.format(**row),)


_KV = _unless_fused("carrier’s", lambda row: f"none in {row['layers_without_kv']:.0f}" if row["layers_without_kv"] else "all")
_FUSED = "into {fused_into_token} ({fused_into:.0f}) after {fused_after_layer:.0f}"
_FUSION = _unless_fused(_FUSED, lambda row: f"carries {row['parts']:.0f}" if row["parts"] > 1 else NO_VALUE)
COLUMNS = (
    Column("", "#", "{slot:.0f}"),
    Column("", "token", "{token}", align="left"),
    Column("1. halting", "layer", _halting, align="left"),
    Column("1. halting", "drift", "{drift_relative:.3f}", expendable=2),
    Column("1. halting", "entropy", "{entropy_nats:.2f}", expendable=2),
    Column("2. K/V", "layers", _KV, align="left"),
    Column("3. fusion", "layer", _FUSION, align="left"),
    Column("4. quantization", "bits", "{bits:.0f}"),
    Column("4. quantization", "entropy", "{deciding_entropy_nats:.2f}", expendable=2),
    Column("", "the paper says", "{paper}", align="left", expendable=1),
)


LEGEND = (
    "Layers are counted from 1. 1: the token halts after this layer, with this drift (relative) and this entropy (nats, "
    "logit lens); it takes part again in the last layers. 2: in how many layers the token has no K/V entry, so that "
    "no later token sees it; the first four tokens always keep theirs. 3: the token that it is fused into, with its number, and after which layer. 4: the bit-width from half the depth "
    "on, and the entropy by which it was chosen. -: nothing was done to it.",
    "Order at one layer: halting, K/V, fusion, precision (2.4). A token that halted or was fused before gets no bit-width.",
    "What the paper says of a word (in a model of 30 layers) stands beside every token that is that whole word. The paper's "
    "rule for K/V contradicts its own text: it skips at 15.18 > 0.45, which is the opposite of convergence, and 1.00 is not "
    "below 0.30.",
)


# --- Figures 5 and 17 -------------------------------------------------------------------------------------------------------------
class Shown(NamedTuple):
    """A token worth drawing: why, its slot, and the last layer before it halted or was fused (None: it was not)."""

    role: str
    slot: int
    until: int | None = None


@artefact(_RUNS, sentences.READ)
def figure05_17_trajectories(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figures 5 and 17: trajectories of tokens through the layers, where one halts and where two are fused.

    The paper draws one made-up value a layer. Here: the states on their first two principal components, and their norm.
    """
    record = sentences.measured(outcomes, "all four")
    signals, text = record.signals(TEXT), record.texts[TEXT]
    shown, names = chosen(signals), sentences.labels(text.tokens)
    columns = ["layer", "slot", "token", "pca_0", "pca_1", "state_norm", "dense_pca_0", "dense_pca_1", "dense_state_norm"]
    frame = signals[columns].merge(pd.DataFrame(shown, columns=["role", "slot", "until"]), on="slot", how="left")
    with style():
        drawing, axes = panels(1, 2, size=(10, 4.2), width_ratios=[1.1, 1])
        left, right = axes[0]
        for _, token in frame[(frame["slot"] > 0) & frame["role"].isna()].groupby("slot"):
            draw.line(left, token["dense_pca_0"], token["dense_pca_1"], color=_GREY, linewidth=0.4, alpha=0.6, zorder=1)
            draw.line(right, token["layer"], token["dense_state_norm"], color=_GREY, linewidth=0.4, alpha=0.6, zorder=1)
        for i, one in enumerate(shown):
            token = frame[frame["slot"] == one.slot]
            _trajectory(left, token, one, i, "pca_0", "pca_1", None)
            _trajectory(right, token, one, i, "layer", "state_norm", f"“{names[one.slot]}” {one.role}")
        events: dict[int, dict[str, None]] = {}  # what happens after which layer
        for one in shown:
            if one.until is not None:
                events.setdefault(one.until, {})["halting" if one.role == "halts" else "fusion"] = None
        look: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "bottom", "transform": right.get_xaxis_transform()}
        for until, kinds in events.items():
            draw.vertical(right, until, linestyle=":", zorder=0)
            right.text(until, 0.02, f" {' and '.join(kinds)} point ", **look)
        first, second = (100 * share for share in text.pca_explained[:2])
        left.set(xlabel=f"first component ({first:.0f}% of the variance)", ylabel=f"second component ({second:.0f}%)")
        left.set_title("States, a dot a layer (state units)")
        right.set(xlabel="layer (0: embedding)", ylabel="‖h‖₂ (state units)", title="Norm of the state")
        legend_below(drawing, right.get_legend_handles_labels()[0], ncols=4, handlelength=3.5)
    jump = finding = ""
    for one in shown:
        if one.role == "carries both":  # a state just merged is the mean of two
            at = signals[(signals["slot"] == one.slot) & (signals["layer"] == one.until)].iloc[0]
            away, norm = at["sdi_l2"], at["dense_state_norm"]
            jump = f" Right after the fusion the carrier's state is {away:.0f} away from its dense one, whose norm is {norm:.0f}."
            finding = f"Fusion moves the carrier's state by {away / norm:.0%} of its norm"
    inner = signals[signals["layer"] > 0]
    sink, others = (inner.loc[places, "dense_state_norm"].median() for places in (inner["slot"] == 0, inner["slot"] > 0))
    caption = sentences.caption(
        outcomes,
        TEXT,
        "States of a few tokens, layer by layer. Star: the token halts here; cross: it is fused with its neighbour. From there on the faint line in "
        f"its colour shows the same token in the dense model. Grey: the other tokens, dense.{jump}",
        "Drawn: the token nearest the middle of the sentence that never halts, the token that halts first, and the first pair that is fused.",
        "Left: first two principal components of the dense states, over all layers and all tokens but the first, which often lies far off (an "
        f"attention sink; its median norm is {sink:.0f}, that of the others {others:.0f}).",
    )
    return Figure(name, "Figures 5 and 17: trajectories of halting and fusion", frame, drawing, caption, finding=finding)


def chosen(signals: pd.DataFrame) -> list[Shown]:
    """Of words that are themselves to the end: the one in the middle of the sentence that never halts, and the one that halts longest;
    and the first two that are fused with each other. What does not happen is left out."""
    active = sentences.layers(signals, "active").astype(bool)
    carrier = sentences.layers(signals, "carrier")
    n_layers, n_tokens = active.index[-1], active.shape[1]
    carried = carrier.loc[n_layers].value_counts()  # tokens by the slot that they end in
    words = {int(slot) for slot, token in zip(signals["slot"], signals["token"], strict=True) if token.strip().isalpha()}
    alone = [slot for slot in range(1, n_tokens) if (carrier[slot] == slot).all() and carried[slot] == 1]
    alone = [slot for slot in alone if slot in words] or alone
    halts = sentences.halted_after(active).loc[alone]
    found = []
    never = [slot for slot in alone if active[slot].all()]
    if never:
        found.append(Shown("goes through all layers", min(never, key=lambda slot: abs(slot - n_tokens // 2))))
    if (halts < n_layers).any():
        found.append(Shown("halts", int(halts.idxmin()), int(halts.min())))
    for slot in range(1, n_tokens):
        gone, into = carrier[slot] != slot, int(carrier.loc[n_layers, slot])
        if gone.any() and carried[into] == 2:  # a pair
            until = int(gone.idxmax()) - 1
            return [*found, Shown("is fused into the next", slot, until), Shown("carries both", into, until)]
    return found


def _trajectory(axes: Axes, token: pd.DataFrame, one: Shown, i: int, x: str, y: str, label: str | None) -> None:
    colour, last = PALETTE[(0, 1, 3, 2)[i % 4]], token["layer"].max()
    end = one.until if one.until is not None and one.role != "carries both" else last
    before, at = token[token["layer"] <= end], token[token["layer"] == one.until]
    look: dict[str, Any] = {"linestyle": DASHES[i], "marker": MARKERS[i], "markersize": 3, "label": label}
    axes.plot(before[x], before[y], color=colour, zorder=3, **look)
    if one.until is not None:
        dense_x, rest = x if x == "layer" else f"dense_{x}", token[token["layer"] >= one.until]
        draw.line(axes, rest[dense_x], rest[f"dense_{y}"], color=colour, linewidth=1.2, alpha=0.5, zorder=2)
        mark: dict[str, Any] = {"marker": "*" if one.role == "halts" else "X", "markersize": 11, "markeredgewidth": 0.6}
        draw.points(axes, at[x], at[y], color=colour, markeredgecolor="black", zorder=4, **mark)


# --- Figure 2 --------------------------------------------------------------------------------------------------------------------
MECHANISMS = {
    "overridden": "(a) Dynamic token halting",
    "all four": "(b) KV skipping",
    "fusing": "(c) Token fusion",
    "quantization": "(d) Bit-widths",
}
# forced, natural and full tokens of (a): colour, marker, dash; in the paper red, blue and grey
KINDS: dict[str, tuple[str, str, Any, str]] = {
    "full": (GREY, "", "-", "goes through all layers"),
    "natural": (PALETTE[2], "o", "-", "halts by itself"),
    "forced": (PALETTE[1], "s", (0, (3, 1)), "forced to halt"),
}


@artefact(sentences.runs(*MECHANISMS), sentences.READ)  # the runs of figures 9, 10, 11 and 13
def figure02_mechanisms(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 2: the four mechanisms on one sentence: (a) halting, (b) KV skipping, (c) fusion, (d) bit-widths."""
    records = {key: sentences.measured(outcomes, key) for key in MECHANISMS}
    tokens = sentences.labels(records["fusing"].texts[TEXT].tokens)
    with style():
        drawing, axes = panels(len(MECHANISMS), 1, size=(9, 16))
        frames = []
        for axis, (key, title), panel in zip(axes.flat, MECHANISMS.items(), (_curves, _entries, _lives, _widths), strict=True):
            frame, handles = panel(axis, records[key])
            frames.append(frame.assign(panel=key))
            draw.legend_above(axis, handles, ncols=3 if key in ("overridden", "fusing") else 4, borderaxespad=0.2)
            axis.set_title(title, weight="bold", pad=18)
            if key != "overridden":
                draw.labels_below(axis, tokens)
                axis.set(xlabel="token", ylabel="layer")
    entries = "; ".join(f"{name}: {said.partition(': ')[2]}" for name, (said, _) in held.ENTRIES.items())
    caption = sentences.caption(
        outcomes,
        TEXT,
        "(a) Drift relative to the state, by layer; a curve ends where its token halts. (b) K/V entries under all four mechanisms; "
        f"{entries}. (c) Fusion in steps: a dashed line ends in a neighbour, a thick line carries several tokens. (d) "
        "Bit-widths by entropy. Figures 9, 10, 11 and 13 are larger.",
    )
    data = pd.concat(frames, ignore_index=True)
    halted, fused, widths = (data[data["panel"] == key] for key in ("overridden", "fusing", "quantization"))
    halts, forced = (halted.loc[those, "slot"].nunique() for those in (halted["kind"] != "full", halted["kind"] == "forced"))
    merged, low = int((fused["into"] != fused["slot"]).sum()), widths.loc[widths["bits"] < 8, "slot"].nunique()
    alone = f"Each mechanism alone, on one sentence of {len(tokens)} tokens"
    finding = f"{alone}: {halts} halt ({forced} are forced to), {merged} are fused into a neighbour, {low} get fewer than 8 bits"
    return Figure(name, "Figure 2: the mechanisms on one sentence", data, drawing, caption, finding=finding)


def _curves(axes: Axes, record: Record) -> tuple[pd.DataFrame, list[Any]]:
    frame, handles = halting.curves(record), []
    for kind, (colour, marker, dash, words) in KINDS.items():
        members = frame[frame["kind"] == kind]
        for _, token in members.groupby("slot"):
            x, y = (token.loc[token["layer"] <= token["halts_after_layer"], name] for name in ("layer", "drift_relative"))
            draw.line(axes, x, y, color=colour, linestyle=dash, linewidth=0.8, alpha=0.5 if kind == "full" else 0.9)
            if kind != "full":
                end: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4.5, "markeredgecolor": "white"}
                axes.plot(x.iloc[-1:], y.iloc[-1:], **end)
        look = {"color": colour, "linestyle": dash, "marker": marker, "markersize": 4.5, "linewidth": 1}
        handles.append(draw.line_key(f"{words} ({members['slot'].nunique()})", **look))
    axes.set(xlabel="layer", ylabel="relative drift (ratio)", yscale="log", xlim=(1.5, record.model.layers + 0.5))
    axes.set_yticks([0.1, 0.2, 0.5], ["0.1", "0.2", "0.5"])
    axes.minorticks_off()
    return frame[["layer", "slot", "token", "kind", "drift_relative"]], handles


def _entries(axes: Axes, record: Record) -> tuple[pd.DataFrame, list[Any]]:
    signals = record.signals(TEXT)
    frame = sentences.in_layers(signals).assign(entry=held.entries(signals))
    held.draw_entries(axes, sentences.layers(frame, "entry"))
    return frame, held.entries_keys(frame["entry"], short=True)


def _lives(axes: Axes, record: Record) -> tuple[pd.DataFrame, list[Any]]:
    signals = record.signals(TEXT)
    frame = held.lives(signals)
    held.draw_lives(axes, signals, range(len(frame)), across=False)
    return frame.rename(columns={"until": "layer"}), held.lives_keys(short=True)


def _widths(axes: Axes, record: Record) -> tuple[pd.DataFrame, list[Any]]:
    signals = record.signals(TEXT)
    frame = sentences.in_layers(signals, "bits", "entropy_nats").assign(held=held.held(signals))
    states = sentences.layers(frame, "held")
    held.draw_held(axes, states)
    draw.separate_columns(axes, states.shape[1])
    return frame, held.held_keys(frame["held"], record.model.dtype)
