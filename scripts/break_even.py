"""Where each mechanism starts to pay on this machine: `python scripts/break_even.py`, on a quiet one.

Time of a run over time of dense inference, over batch × sequence × width × halting rate, for the prompt and for decoding one token
after another. Controls halt by schedule, on random weights of the true shapes with few layers: what is priced is the execution, not any
signal, and no checkpoint is needed. A point pays where even the worse quartile is faster than dense inference by more than the noise.

    prefill   one-shot halting of a share of the prompt's tokens after the first layer; half of the K/V skipped; 30% of the tokens
              fused; int8 from the second layer on
    decode    every new token stops at a share of the depth; the others leave a smaller cache, or narrower products

Writes break_even.csv and break_even.png.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from shapes import ROOT, SHAPES, Shape, environment, model_of, random_ids
from transformers import PreTrainedModel

from quicksilver.measure.latency import Alternation, alternate, shared_weight_copy
from quicksilver.modules import AdaptiveQuantization, Halting, KVSkipping, StaticDepth, TokenFusion
from quicksilver.report.figure import Figure, panels, style
from quicksilver.runtime import ConfigError, RuntimeModule, apply

PHASES = ("prefill", "decode")
STEPS = 4  # tokens decoded in one sample
Make = Callable[[], list[RuntimeModule]]


def mechanisms(phase: str, rates: Sequence[float], layers: int) -> dict[str, Make]:
    """What is timed against dense inference, by name; `halting` with each of its rates."""
    first = (0.0, 1 / layers)

    def halting(rate: float) -> Make:
        if phase == "decode":
            return lambda: [StaticDepth(depth=1 - rate, missing_kv="drop")]
        return lambda: [
            Halting(
                rule="capacity",
                signal="random",
                schedule="one_shot",
                halted_share=rate,
                window=first,
                missing_kv="drop",
                resume_layers=0,
            )
        ]

    return {f"halting {rate:.0%}": halting(rate) for rate in rates} | {
        "kv skipping 50%": lambda: [KVSkipping(criterion="attention", skipped_share=0.5, min_depth=0.0)],
        "fusion 30%": lambda: [TokenFusion(rule="capacity", tau_fuse=None, criterion="random", fused_share=0.3, start=0.0)],
        "int8": lambda: [AdaptiveQuantization(bits=8, execution="int8", depth=0.0)],
    }


def measure(
    model: PreTrainedModel, shape: Shape, phase: str, batch: int, sequence: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One cell of the map: every mechanism at this batch and sequence, in turns with dense inference."""
    place = {"shape": shape.name, "width": shape.width, "phase": phase, "batch": batch, "sequence": sequence}
    ids = random_ids(batch, sequence, device=options.device)
    call = one_pass(model, ids, phase)
    call()  # the first one asks the system for memory
    fits = time.perf_counter()
    call()
    fits = time.perf_counter() - fits
    if fits > options.cell_seconds:
        return [place | {"status": f"left out: one pass takes {fits:.1f} s, more than --cell-seconds {options.cell_seconds:g}"}]
    with ExitStack() as stack:
        fns = {"dense": call}
        for name, make in mechanisms(phase, options.rates, options.layers).items():
            other = shared_weight_copy(model)
            run = stack.enter_context(apply(other, make()))
            fns[name] = one_pass(other, ids, phase, run.reset)
        times = alternate(fns, options.warmup, options.repeats, options.device)
    return [place | row(times, name) for name in fns if name != "dense"]


def one_pass(
    model: PreTrainedModel, ids: torch.Tensor, phase: str, before: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """The prompt, or some tokens after it: the prompt's own pass is done here then, and what was decoded is taken back each time."""
    if phase == "prefill":

        def prefill() -> None:
            before()
            model(ids, use_cache=True, logits_to_keep=1)

        return prefill
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    new = ids[:, :1]

    def decode() -> None:
        before()
        for _ in range(STEPS):
            model(new, use_cache=True, past_key_values=cache)
        cache.crop(-STEPS)

    return decode


def row(times: Alternation, name: str) -> dict[str, Any]:
    """One mechanism in one cell."""
    ratio, noise = times.ratio(name, to="dense"), times.noise_floor or 0.0
    verdict = "pays" if ratio.high < 1 - noise else "costs" if ratio.low > 1 + noise else "within noise"
    return {
        "mechanism": name, "status": "measured", "verdict": verdict, "time_saved_pct": 100 * (1 - ratio.median),
        "time_saved_pct_low": 100 * (1 - ratio.high), "time_saved_pct_high": 100 * (1 - ratio.low), "noise_floor_pct": 100 * noise,
        "dense_ms": times["dense"].median, "load_average": times.load_before, "warnings": "; ".join(times.warnings),
    }  # fmt: skip


def break_even(frame: pd.DataFrame) -> pd.DataFrame:
    """The halting rate from which on time is saved, for each cell; `none` where no measured rate saves more than noise.

    Between the last rate that saves nothing and the first that pays it is interpolated.
    """
    measured = frame[frame["status"] == "measured"]
    found = []
    for key, cell in measured.groupby(["shape", "phase", "batch", "sequence"], sort=False):
        halting = cell[cell["mechanism"].str.startswith("halting")].to_dict("records")
        at, before = "none", None
        for step in halting:
            rate, saved = float(step["mechanism"].split()[1].rstrip("%")), step["time_saved_pct"]
            if step["verdict"] == "pays":
                at = f"at most {rate:.0f}%"
                if before is not None and before[1] < 0:
                    at = f"{before[0] + (rate - before[0]) * -before[1] / (saved - before[1]):.0f}%"
                break
            before = (rate, saved)
        found.append(dict(zip(("shape", "phase", "batch", "sequence"), key, strict=True)) | {"rate": at})
    return pd.DataFrame(found, columns=["shape", "phase", "batch", "sequence", "rate"])


def draw(frame: pd.DataFrame, around: dict[str, Any], options: argparse.Namespace) -> Figure:
    """A map for each phase and shape: a line a batch and sequence, a column a mechanism."""
    there = frame[frame["status"] == "measured"]
    shapes, phases = list(dict.fromkeys(there["shape"])), list(dict.fromkeys(there["phase"]))
    names = list(dict.fromkeys(there["mechanism"]))
    with style():
        drawing, axes = panels(len(phases), len(shapes), size=(1.2 + 2.9 * len(shapes), 1.0 + 2.3 * len(phases)), sharex=True)
        for line, phase in enumerate(phases):
            for column, shape in enumerate(shapes):
                plot = axes[line, column]
                cells = there[(there["phase"] == phase) & (there["shape"] == shape)]
                lines = list(dict.fromkeys(zip(cells["batch"], cells["sequence"], strict=True)))
                plot.set_title(f"{shape}, {phase}")
                plot.grid(visible=False)
                if not lines:
                    plot.text(0.5, 0.5, "left out", ha="center", transform=plot.transAxes)
                    continue
                shown = cells.assign(shown=cells["time_saved_pct"].where(cells["verdict"] != "within noise", 0.0))
                values = shown.pivot_table(index=["batch", "sequence"], columns="mechanism", values="shown").reindex(lines)[names]
                drawn = plot.imshow(values.to_numpy(), cmap="RdBu", vmin=-75, vmax=75, aspect="auto")
                for cell in cells.to_dict("records"):
                    at = (names.index(cell["mechanism"]), lines.index((cell["batch"], cell["sequence"])))
                    said = "·" if cell["verdict"] == "within noise" else f"{cell['time_saved_pct']:+.0f}"
                    plot.text(
                        *at,
                        said,
                        ha="center",
                        va="center",
                        size=7,
                        color="white" if abs(cell["time_saved_pct"]) > 50 else "black",
                    )
                plot.set_yticks(range(len(lines)), [f"{batch} × {sequence}" for batch, sequence in lines])
                plot.set_xticks(range(len(names)), names, rotation=60, ha="right")
                if column == 0:
                    plot.set_ylabel("batch × tokens")
        drawing.colorbar(drawn, ax=axes, label="time saved, % of dense (more is better)", shrink=0.8)
    caption = (
        f"Random weights of the true widths, {options.layers} layers, float32; {STEPS} tokens after each prompt in decode. Percent of dense time "
        "saved, median of rounds in turns; · = no further from dense than dense from itself (A/A) or than the quartiles.",
        f"Machine: {around['machine']}, {around['threads']} threads, torch {around['torch']}, transformers {around['transformers']}; "
        f"{options.repeats} rounds.",
    )
    return Figure("break_even", "Where a mechanism starts to pay", frame, drawing, caption)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["gpt2", "gpt2-large", "llama2-7b"])
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--sequence", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.25, 0.5, 0.75], help="shares of tokens, or of the depth, halted"
    )
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument(
        "--cell-seconds", type=float, default=1.0, help="a cell whose dense pass takes longer is left out, and said so"
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds, at least 3")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "benchmarks", help="a folder")
    options = parser.parse_args(arguments)
    if not all(0 < rate < 1 for rate in options.rates):
        parser.error(f"--rates {' '.join(map(str, options.rates))}: shares between 0 and 1")
    if options.layers < 2:
        parser.error(f"--layers {options.layers}: at least 2, what halts after the first must have something to miss")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name in options.shapes:
            model = model_of(SHAPES[name], options.layers, max(options.sequence) + STEPS, device=options.device)
            for phase in options.phases:
                for batch in options.batch:
                    for sequence in options.sequence:
                        with console.status(f"{name}, {phase}, {batch} × {sequence} …"):
                            found += measure(model, SHAPES[name], phase, batch, sequence, options)
    frame = pd.DataFrame(found)
    if not frame["status"].eq("measured").any():
        raise ConfigError(f"nothing was measured: every cell takes longer than --cell-seconds {options.cell_seconds:g}.")
    around = environment(options.device)
    written = draw(frame, around, options).write(options.output)
    table = Table(title=f"Halting rate from which time is saved ({around['machine']}, {around['threads']} threads)")
    for column in ("shape", "phase", "batch", "sequence", "rate"):
        table.add_column(column, justify="left" if column in ("shape", "phase") else "right")
    for cell in break_even(frame).to_dict("records"):
        table.add_row(*map(str, cell.values()))
    console.print(table)
    for cell in frame[frame["status"] != "measured"].to_dict("records"):
        console.print(f"{cell['shape']}, {cell['phase']}, {cell['batch']} × {cell['sequence']}: {cell['status']}")
    console.print("Saved to " + ", ".join(map(str, written)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"break_even: {error}")
