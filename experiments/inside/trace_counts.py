"""What became of the tokens of a run, counted from its trace: Figure 4 (the decision tree) and the decay of active tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from quicksilver.records.record import TRACE, Record
from quicksilver.records.stats import bootstrap
from quicksilver.report.artefacts import Outcome, Row, artefact, find
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.figure import DASHES, GREY, HATCHES, MARKERS, PALETTE, Figure, legend_below, panels, style
from quicksilver.report.provenance import notes
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.trace import PassTrace, Trace

from .. import drawing as draw
from . import sentences

WIDTHS = (2, 4, 8)
PANEL, HALTING, ALL_FOUR = "continuation", "isolated.halting", "cumulative.quantization"  # rows of Table 11


def by_layer(record: Record) -> pd.DataFrame:
    """Tokens of each window (`window`), part (`prompt`, `continuation`, or `all`) and layer (from 1).

    Columns: `tokens`; `active`, that took part in the layer; `halted` and `carried` (by a neighbour that they were fused with), that did
    not; `kv`, with an entry there; `bits_2`, `bits_4`, `bits_8`, active ones held at that width.
    Raises ConfigError: the record has no trace."""

    def counted() -> Iterator[Any]:
        for window, part, one in _passes(record):
            for layer in range(one.n_layers):
                active, carried, bits = one.active(layer), one.valid & (one.fused_layer < layer), one.bits(layer)
                counts = {"tokens": one.valid, "active": active, "halted": one.valid & ~active & ~carried, "carried": carried}
                counts |= {"kv": one.kv_present(layer), **{f"bits_{width}": active & (bits == width) for width in WIDTHS}}
                yield counts, window, {"part": part, "layer": layer + 1}

    return _summed(counted(), "window", "part", "layer")


def of_prompts(record: Record, *columns: str) -> pd.DataFrame:
    """Sums of these columns of `by_layer` over the prompts of all windows, a row a layer."""
    layers = by_layer(record)
    return layers[layers["part"] == "prompt"].groupby("layer", as_index=False)[list(columns)].sum()


def by_branch(record: Record) -> pd.DataFrame:
    """Tokens of each window and part by what was decided first: `tokens`, `halted`, `merged`, `full`; and `halted_layers` and `merged_layers`, the
    layers that they went through before, summed over tokens. Raises as `by_layer`."""

    def counted() -> Iterator[Any]:
        for window, part, one in _passes(record):
            last = one.n_layers - 1
            merged = one.valid & (one.fused_layer < last)
            halted = one.valid & (one.halt_layer < last) & ~merged
            counts = {"tokens": one.valid, "halted": halted, "merged": merged, "full": one.valid & ~halted & ~merged}
            counts["halted_layers"] = halted * (one.halt_layer.long() + 1)
            counts["merged_layers"] = merged * (one.fused_layer.long() + 1)
            yield counts, window, {"part": part}

    return _summed(counted(), "window", "part")


def _summed(frames: Iterator[tuple[dict[str, Any], int, dict[str, Any]]], *keys: str) -> pd.DataFrame:
    """Sums over the tokens of each window of masks or numbers (windows, tokens), from a window on; rows with the same `keys` summed."""
    found = []
    for counts, window, more in frames:
        sums = {name: values.sum(1).numpy() for name, values in counts.items()}
        found.append(pd.DataFrame(sums).assign(window=lambda frame, first=window: first + frame.index, **more))
    return pd.concat(found, ignore_index=True).groupby([*keys], sort=False, as_index=False).sum()


def _passes(record: Record) -> Iterator[tuple[int, str, PassTrace]]:
    """(first window, part, pass); a pass with nothing cached begins the next batch of windows."""
    if record.trace_path is None:
        raise ConfigError(f"{record.path} has no trace: nothing was decided in it.")
    whole = record.protocol.name == "all"
    first, batch = 0, 0
    for one in Trace.load(record.trace_path).passes:
        begins = one.first_column == 0
        if begins:
            first, batch = first + batch, one.valid.shape[0]
        yield first, "all" if whole else "prompt" if begins else "continuation", one


def share_pct(counts: pd.Series, of: pd.Series) -> Estimate:
    """100 · Σ counts / Σ of over windows, with a bootstrap interval."""
    return Estimate.of(bootstrap(lambda part, whole: 100 * part.sum(-1) / whole.sum(-1), counts, of))


def decay_per_layer(layers: pd.DataFrame, until: int) -> tuple[Estimate, float]:
    """α of N_ℓ = N·e^(−α·ℓ) (App. K), fitted by least squares to log shares of active tokens in layers 1 to `until`, and its R².

    The line goes through N at layer 0; the interval is bootstrapped over windows.
    """
    kept = layers[layers["layer"] <= until]
    active, tokens = (kept.pivot(index="layer", columns="window", values=name).to_numpy(float) for name in ("active", "tokens"))
    depth = np.arange(1, until + 1)

    def alpha(active: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return -np.tensordot(depth, np.log(active.sum(-1) / tokens.sum(-1)), axes=1) / (depth**2).sum()

    fitted = Estimate.of(bootstrap(alpha, active, tokens))
    logs = np.log(active.sum(1) / tokens.sum(1))
    spread = ((logs - logs.mean()) ** 2).sum()
    return fitted, float(1 - ((logs + fitted.value * depth) ** 2).sum() / spread) if spread else float("nan")


def decay_of_prompts(record: Record) -> tuple[Estimate, float, int]:
    """α and R² of the prompts' active tokens, and the last layer of the fit, before the one that halted tokens take part in again."""
    layers, until = by_layer(record), first_resumed_layer(record) - 1
    return *decay_per_layer(layers[layers["part"] == "prompt"], until), until


def first_resumed_layer(record: Record) -> int:
    """The first layer (from 1) that halted tokens take part in again; one beyond the last where they never do."""
    import torch  # seconds, which who only asks for the rows must not wait for

    last = record.model.layers
    firsts = [int(torch.where(one.halt_layer < last - 1, one.resume_layer, last).min()) for _, _, one in _passes(record)]
    return min(firsts) + 1


def _of_table_11(*keys: str) -> Callable[[], list[Row]]:
    return lambda: [row for row in find("table", "11").experiment.rows() if row.panel == PANEL and row.key in keys]


# --- Figure 4: the decision tree --------------------------------------------------------------------------------------------------
BRANCHES = {"halted": "halted", "merged": "merged", "full": "computed in full"}
LOOK = {"halted": (PALETTE[6], HATCHES[1]), "merged": (PALETTE[5], HATCHES[2]), "full": (PALETTE[0], "")}
DEEP = 20 / 30  # "at depth ℓ > 20" (K), in models of 30 layers


def fused_share(record: Record) -> Estimate:
    """Prompt tokens that a neighbour carries in the last third of the layers."""
    layers = by_layer(record)
    deep = layers[(layers["part"] == "prompt") & (layers["layer"] > DEEP * record.model.layers)]
    sums = deep.groupby("window").sum(numeric_only=True)
    return share_pct(sums["carried"], sums["tokens"])


@artefact(_of_table_11(ALL_FOUR), (TRACE,))
def figure04_decision_tree(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure 4: the decision tree of halting and merging, with the measured share of tokens that goes down each branch."""
    record = sentences.measured(outcomes, ALL_FOUR)
    frame, prompts = branches(record), of_prompts(record, "tokens", "active", "halted", "carried")
    with style():
        drawing, axes = panels(1, 2, size=(9, 4.1), width_ratios=[1.55, 1])
        _tree(axes[0, 0], frame)
        right, below = axes[0, 1], pd.Series(0.0, index=prompts.index)  # stacked shares of what prompt tokens do in each layer
        for kind, column in {"full": "active", "merged": "carried", "halted": "halted"}.items():
            height, (colour, hatch) = 100 * prompts[column] / prompts["tokens"], LOOK[kind]
            look: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
            right.bar(prompts["layer"], height, 1.0, bottom=below, label="computed" if kind == "full" else kind, **look)
            below = below + height
        right.set(xlabel="layer", ylabel="tokens of the prompts (%)", xlim=(0.5, prompts["layer"].max() + 0.5), ylim=(0, 100))
        right.grid(visible=False)
        draw.legend_above(right, ncols=1, reverse=True)
    alpha, quality, until = decay_of_prompts(record)
    again = f" From layer {until + 1} on halted tokens take part again (resume_layers)." if until < record.model.layers else ""
    after = frame[(frame["part"] == "continuation") & (frame["branch"] == "halted")].iloc[0]
    caption = (
        "Left: what was decided first about each token of a prompt, halting before merging (paper, section 2.4); shares are of all prompt tokens, with 95% "
        "intervals over windows. A token is stable when its drift and its entropy are below their thresholds at some layer, and merged when it is "
        "among the share of its prompt that lies closest to a neighbour at the layer where fusion acts.",
        f"Right: the same tokens by layer.{again}",
        f"Computed tokens decay by {alpha.value:.3f} [{alpha.low:.3f} {alpha.high:.3f}] a layer up to layer {until}, were it exponential "
        f"(R² {quality:.2f}); the paper says 0.05 to 0.1 (App. K).",
        f"Of the tokens after the prompts {after['share_pct']:.1f}% [{after['low']:.1f} {after['high']:.1f}] halt; none may be merged, because that looks ahead.",
        *notes(outcomes),
    )
    both = pd.concat([frame, prompts.assign(part="prompt, by layer")], ignore_index=True)
    shares = frame[frame["part"] == "prompt"].set_index("branch")["share_pct"]
    finding = f"{shares['halted']:.0f}% of prompt tokens halt, {shares['merged']:.0f}% are merged, {shares['full']:.0f}% are computed in full"
    return Figure(name, "Figure 4: halting, merging, or neither", both, drawing, caption, finding=finding)


def branches(record: Record) -> pd.DataFrame:
    """A row a part and branch: share of its tokens with interval, and the mean layer after which it was decided."""
    rows: list[dict[str, Any]] = []
    for part, windows in by_branch(record).groupby("part", sort=False):
        for branch in BRANCHES:
            share, total = share_pct(windows[branch], windows["tokens"]), windows[branch].sum()
            mean = windows[f"{branch}_layers"].sum() / total if total and branch != "full" else None
            row = {"part": part, "branch": branch, "share_pct": share.value, "low": share.low, "high": share.high}
            rows.append(row | {"mean_layer": mean})
    return pd.DataFrame(rows)


def _tree(axes: Axes, frame: pd.DataFrame) -> None:
    """Questions left to right, outcomes below the answer that leads to them; arrows as wide as their share."""
    rows = frame[frame["part"] == "prompt"].set_index("branch")
    share = rows["share_pct"]
    asked_second = 100 - share["halted"]
    axes.set(xlim=(-0.4, 10.65), ylim=(0.3, 5.7))
    axes.axis("off")
    _arrow(axes, (1.5, 4.9), (1.95, 4.9), 100)
    _arrow(axes, (4.25, 4.9), (6.1, 4.9), asked_second)
    axes.text(5.15, 5.3, f"no\n{asked_second:.1f}%", ha="center", va="bottom", linespacing=1.2)
    _arrow(axes, (3.1, 4.2), (2.6, 2.25), share["halted"], "yes")
    _arrow(axes, (7.1, 4.2), (6.1, 2.25), share["merged"], "yes")
    _arrow(axes, (8.1, 4.2), (9.1, 2.25), share["full"], "no")
    _box(axes, (0.58, 4.9), 1.84, 1.4, "every token\nof a prompt")
    _box(axes, (3.1, 4.9), 2.3, 1.4, "stable?\ndrift < τ and\nentropy < τ")
    _box(axes, (7.6, 4.9), 3.0, 1.4, "like its neighbour?\namong the closest\nof its prompt")
    for branch, place in (("halted", 2.2), ("merged", 5.7), ("full", 9.2)):
        row = rows.loc[branch]
        after = f"mean layer {row['mean_layer']:.1f}" if pd.notna(row["mean_layer"]) else "in every layer"
        text = f"{BRANCHES[branch]}\n{row['share_pct']:.1f}%  [{row['low']:.1f} {row['high']:.1f}]\n{after}"
        _box(axes, (place, 1.3), 2.8, 1.8, text, LOOK[branch])


def _box(
    axes: Axes, centre: tuple[float, float], width: float, height: float, text: str, look: tuple[str, str] | None = None
) -> None:
    """Words in a frame; an outcome has a band of the colour that it has on the right."""
    corner = (centre[0] - width / 2, centre[1] - height / 2)
    framed: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.9}
    axes.add_patch(Rectangle(corner, width, height, facecolor="white", zorder=3, **framed))
    band = 0.35 if look else 0.0
    if look:
        axes.add_patch(Rectangle(corner, width, band, facecolor=look[0], hatch=look[1], edgecolor="white", linewidth=0, zorder=3))
        axes.add_patch(Rectangle(corner, width, band, facecolor="none", zorder=3.5, **framed))
    words: dict[str, Any] = {"linespacing": 1.35, "weight": "bold" if look else "normal"}
    axes.text(centre[0], centre[1] + band / 2, text, ha="center", va="center", zorder=4, **words)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], share: float, label: str = "") -> None:
    arrow = {"arrowstyle": "-|>", "linewidth": 0.8 + share / 14, "color": "#8a8a8a", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops={**arrow, "mutation_scale": 10 + share / 8}, zorder=2)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    if label:
        axes.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2, label, ha="center", va="center", zorder=4, bbox=box)


# --- how active tokens decay ------------------------------------------------------------------------------------------------------
DECAYING = {
    HALTING: "halting alone",
    "isolated.fusion": "fusion alone",
    ALL_FOUR: "all four",
    "budget.attention": "halting by attention",
}


_FITTED = "fitted up to the layers that halted tokens take part in again; for each of 30 layers"
# Fusion takes away a share that is configured, all at once; so halting alone has a row of its own.
_of_30 = lambda record: Estimate.of(decay_of_prompts(record)[0], record.model.layers / 30)
_ANSWER = tuple(AnsweredBy(PANEL, key, of_record=_of_30, note=f"{DECAYING[key]}, {_FITTED}") for key in (HALTING, ALL_FOUR))


@artefact(_of_table_11(*DECAYING), (TRACE,), {"k.decay.decay_per_layer": _ANSWER})
def figure_token_decay(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Figure token-decay: active tokens by layer, and how well N·exp(−α·ℓ) fits them (App. J and K say α from 0.05 to 0.1)."""
    frames = []
    for one in outcomes:
        if one.record is not None:
            alpha, quality, until = decay_of_prompts(one.record)
            sums = of_prompts(one.record, "tokens", "active")
            mine = pd.DataFrame({"key": one.row.key, "layer": sums["layer"], "active_pct": 100 * sums["active"] / sums["tokens"]})
            mine["fitted"] = sums["layer"] <= until
            frames.append(mine.assign(alpha=alpha.value, alpha_low=alpha.low, alpha_high=alpha.high, r_squared=quality))
    frame = pd.concat(frames, ignore_index=True)
    low, high = reported()["k.decay"].bounds["decay_per_layer"]
    with style():
        drawing, axes = panels(1, 1, size=(7.6, 4.2))
        plot = axes[0, 0]
        depth = np.arange(0, int(frame["layer"].max()) + 1)
        steepest, flattest = (100 * np.exp(-(end or 0) * depth) for end in (high, low))
        plot.fill_between(depth, steepest, flattest, color="#ececec", label=f"the paper: α {low:g} to {high:g}")
        for place, (key, mine) in enumerate(frame.groupby("key", sort=False)):
            one, colour = mine.iloc[0], {"color": PALETTE[place]}
            law = f"α {one['alpha']:.3f} [{one['alpha_low']:.3f} {one['alpha_high']:.3f}], R² {one['r_squared']:.2f}"
            dash, marker = DASHES[place % len(DASHES)], MARKERS[place]
            draw.line(plot, mine["layer"], mine["active_pct"], linewidth=0.6, alpha=0.5, **colour)
            draw.points(plot, mine["layer"], mine["active_pct"], marker=marker, markersize=5, markeredgecolor="white", **colour)
            at = np.array([0, *mine.loc[mine["fitted"], "layer"]])
            draw.line(plot, at, 100 * np.exp(-one["alpha"] * at), linestyle=dash, linewidth=1, **colour)
            plot.plot([], [], linestyle=dash, marker=marker, linewidth=1, label=f"{DECAYING[str(key)]}: {law}", **colour)
        draw.horizontal(plot, 100, color=GREY)
        plot.set_yscale("log")
        plot.set_yticks([10, 20, 30, 50, 70, 100], ["10", "20", "30", "50", "70", "100"])
        plot.set_ylim(0.9 * min(frame["active_pct"].min(), steepest.min()), 110)
        plot.minorticks_off()
        plot.set(xlabel="layer", ylabel="active tokens of a prompt, %")
        title = "points: measured; lines: the exponential N·exp(−α·ℓ) fitted to them"
        legend_below(drawing, plot.get_legend_handles_labels()[0], ncols=2, title=title)
    caption = (
        "Share of a prompt's tokens that are computed in each layer. The paper says that it falls exponentially (App. J, K). A fit starts at 100% "
        "before the first layer and ends before the layer from which halted tokens are computed again (resume_layers). R² below 0: the mean of "
        "all layers fits better than an exponential.",
        "Fit: least squares in logarithms. Brackets: 95% intervals of α, bootstrap over windows.",
        *notes(outcomes),
    )
    fits = frame.groupby("key").first()
    inside = int((fits["alpha"].between(low, high) & (fits["r_squared"] > 0.9)).sum())
    finding = f"{inside} of {len(fits)} curves fall exponentially (R² above 0.9) at the paper's rate, α {low:g} to {high:g}"
    return Figure(name, "Active tokens by layer, with exponential fits", frame, drawing, caption, finding=finding)
