"""How time grows with the length of a sequence and with depth, dense and with tokens that leave: `python scripts/scaling.py`.

App. J says that a run costs the sum of its active tokens over layers, and that these decay as N·exp(−αℓ) with α from 0.05 to 0.1. Controlled
here: random weights of a true shape, `ExponentialDecay` at the paper's ends of α, time against sequence length and against depth, each
with the power law that fits it best. What real decisions do to N_ℓ is fitted in `figure decay`, from records.

Writes scaling.csv and scaling.png.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from shapes import ROOT, SHAPES, environment, model_of, random_ids

from quicksilver.measure.latency import alternate, shared_weight_copy
from quicksilver.modules import ExponentialDecay
from quicksilver.report.figure import DASHES, MARKERS, PALETTE, Figure, panels, style
from quicksilver.runtime import ConfigError, apply

ALPHAS = (0.05, 0.1)  # per layer, App. J


def measure(sequence: int, layers: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Dense inference and both decays, in turns, at one length and depth."""
    model = model_of(SHAPES[options.shape], layers, sequence, device=options.device)
    ids = random_ids(options.batch, sequence, device=options.device)
    # Few layers fall along the curve of all: the share of active tokens at the same fraction of depth is that of the true model.
    scale = SHAPES[options.shape].layers / layers

    def call(which: Any, before: Callable[[], None] = lambda: None) -> Callable[[], None]:
        def fn() -> None:
            before()
            which(ids, use_cache=False)

        return fn

    executed: dict[str, int] = {}
    with ExitStack() as stack:
        fns = {"dense": call(model)}
        with apply(model, []) as run:
            fns["dense"]()
            executed["dense"] = run.flops.executed
        for alpha in ALPHAS:
            other, name = shared_weight_copy(model), f"decay {alpha:g}"
            decaying = stack.enter_context(apply(other, [ExponentialDecay(alpha=alpha * scale, missing_kv="drop")]))
            fns[name] = call(other, decaying.reset)
            fns[name]()
            executed[name] = decaying.flops.executed
        times = alternate(fns, options.warmup, options.repeats, options.device)
    place = {"shape": options.shape, "batch": options.batch, "sequence": sequence, "layers": layers}
    noise = 100 * (times.noise_floor or 0.0)
    return [
        place
        | {"way": name, "ms": samples.median, "iqr_ms": samples.iqr, "noise_floor_pct": noise, "executed_flops": executed[name]}
        | {"time_of_dense": times.ratio(name, to="dense").median, "flops_of_dense": executed[name] / executed["dense"]}
        | {"load_average": times.load_before, "warnings": "; ".join(times.warnings)}
        for name, samples in times.items()
    ]


def power_law(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Exponent of y ~ x^k by least squares in logarithms, and R²; NaN of fewer than three points, which any line nearly fits."""
    if len(x) < 3:
        return math.nan, math.nan
    logs, values = np.log(x), np.log(y)
    slope, intercept = np.polyfit(logs, values, 1)
    residual = float(((values - (slope * logs + intercept)) ** 2).sum())
    return float(slope), 1 - residual / float(((values - values.mean()) ** 2).sum())


def fits(frame: pd.DataFrame) -> pd.DataFrame:
    """Power laws of time: against length, and against depth, for each way."""
    found = []
    for axis in ("sequence", "layers"):
        for way, mine in frame[frame["axis"] == axis].groupby("way", sort=False):
            exponent, r_squared = power_law(mine[axis], mine["ms"])
            found.append({"axis": axis, "way": way, "exponent": exponent, "r_squared": r_squared, "points": len(mine)})
    return pd.DataFrame(found)


def draw(frame: pd.DataFrame, fitted: pd.DataFrame, around: Mapping[str, Any], options: argparse.Namespace) -> Figure:
    """Time against length and against depth, on logarithmic axes."""
    labels = {"sequence": "tokens of a sequence", "layers": "layers"}
    with style():
        drawing, axes = panels(1, 2, size=(7.6, 3.3))
        for plot, axis in zip(axes.flat, labels, strict=True):
            for place, (way, mine) in enumerate(frame[frame["axis"] == axis].groupby("way", sort=False)):
                fit = fitted[(fitted["axis"] == axis) & (fitted["way"] == way)].iloc[0]
                law = "" if math.isnan(fit["exponent"]) else f": ~ {fit['exponent']:.2f} power, R² {fit['r_squared']:.3f}"
                plot.errorbar(
                    mine[axis], mine["ms"], yerr=mine["iqr_ms"] / 2, label=f"{way}{law}", color=PALETTE[place], marker=MARKERS[place],
                    linestyle=DASHES[place], elinewidth=0.7, capsize=2,
                )  # fmt: skip
            plot.set_xscale("log", base=2)
            plot.set_yscale("log", base=2)
            plot.set_xlabel(labels[axis])
            plot.set_ylabel("time of one pass, ms")
            points = sorted(set(frame.loc[frame["axis"] == axis, axis]))
            plot.set_xticks(points, [f"{point:g}" for point in points])
            plot.yaxis.set_major_formatter("{x:g}")
            plot.legend()
    caption = (
        f"{options.shape}'s width with random weights, batch {options.batch}, float32; left with {options.fixed_layers} layers, right with "
        f"{options.fixed_sequence} tokens. decay α: N·exp(−αℓ) tokens active in layer ℓ of the true depth ({SHAPES[options.shape].layers} layers), at the "
        "same fraction of this one's. Medians of rounds in turns; bars: half of the interquartile range.",
        f"Machine: {around['machine']}, {around['threads']} threads, torch {around['torch']}, transformers {around['transformers']}; "
        f"{options.repeats} rounds.",
    )
    return Figure("scaling", "Time against length and depth", frame, drawing, caption)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="gpt2")
    parser.add_argument("--sequence", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--fixed-layers", type=int, default=4, help="depth while the length varies")
    parser.add_argument("--fixed-sequence", type=int, default=256, help="length while the depth varies")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds, at least 3")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "benchmarks", help="a folder")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for axis, points in (
            ("sequence", [(sequence, options.fixed_layers) for sequence in options.sequence]),
            ("layers", [(options.fixed_sequence, layers) for layers in options.layers]),
        ):
            for sequence, layers in points:
                with console.status(f"{sequence} tokens, {layers} layers …"):
                    found += [{"axis": axis} | row for row in measure(sequence, layers, options)]
    frame = pd.DataFrame(found)
    fitted, around = fits(frame), environment(options.device)
    written = draw(frame, fitted, around, options).write(options.output)
    table = Table(title=f"Time against length and depth ({options.shape}, {around['machine']}, {around['threads']} threads)")
    for column in ("against", "way", "exponent", "R²", "points"):
        table.add_column(column, justify="left" if column in ("against", "way") else "right")
    for fit in fitted.to_dict("records"):
        law = ("too few points", "") if math.isnan(fit["exponent"]) else (f"{fit['exponent']:.3f}", f"{fit['r_squared']:.4f}")
        table.add_row(fit["axis"], fit["way"], *law, str(fit["points"]))
    console.print(table)
    console.print("Saved to " + ", ".join(map(str, written)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"scaling: {error}")
