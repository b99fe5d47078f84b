"""What a run shows on a terminal: a progress bar while it goes, a few lines when it is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from quicksilver.measure.audit import AuditResult
from quicksilver.measure.components import ComponentsResult
from quicksilver.measure.deployment import DeploymentResult
from quicksilver.measure.emissions import EmissionsResult
from quicksilver.measure.energy import EnergyResult
from quicksilver.measure.latency import LatencyResult
from quicksilver.measure.measurement import Result
from quicksilver.measure.null import NullResult
from quicksilver.measure.task import TaskResult
from quicksilver.records.record import Record
from quicksilver.records.stats import MIN_WINDOWS, paired_perplexity
from quicksilver.runs.run import Progress


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr over all missing runs; nothing when stderr is not a terminal, or nothing has to run."""
    bar: tqdm | None = None

    def show(progress: Progress) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(
                total=100.0,
                smoothing=0,
                file=sys.stderr,
                disable=None,
                leave=False,
                bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}",
            )
        bar.set_description_str(f"run {progress.run + 1}/{progress.runs} {progress.label}", refresh=False)
        bar.set_postfix_str(progress.phase, refresh=False)
        bar.update(max(0.0, 100 * progress.fraction - bar.n))

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


def summary(record: Record) -> str:
    """What a person wants to know of one record; everything else is in its folder."""
    data, quality = record.data, record.quality
    per_byte = "" if quality.bits_per_byte is None else f", {quality.bits_per_byte:.4g} bits per byte"
    lines = [
        f"{record.label}  ({record.execution}, {record.model.dtype}{', LOOKS AHEAD' if record.lookahead else ''})",
        f"  text         {data.windows} windows of {record.protocol.window_tokens} tokens, {quality.tokens} scored, {data.form} text",
        f"  perplexity   {quality.ppl:.4g} per token{per_byte}",
    ]
    if record.dense is not None:
        lines += _against_dense(record)
    for name, result in {
        "audit": AuditResult, "task": TaskResult, "emissions": EmissionsResult, "components": ComponentsResult, "energy": EnergyResult,
        "deployment": DeploymentResult,
    }.items():  # fmt: skip
        found: Result | None = record.found(name, result)
        if found is not None:
            lines.append(f"  {name:<12} {found.line()}")
    lines += [f"  care         {warning}" for warning in record.timing_warnings]
    lines.append(f"  record       {record.path}")
    return "\n".join(lines)


def _against_dense(record: Record) -> list[str]:
    frame = record.windows
    lines = [_difference("against dense", frame["nll_nats"], record)]
    if record.found("null", NullResult) is not None:
        lines.append(_difference("its null", frame["null_nll_nats"], record))
    prompt = record.protocol.name == "continuation"
    ledgers = {name: record.flops_saved_pct(f"prompt_{name}" if prompt else name) for name in ("executed", "nominal", "paper")}
    said = ", ".join(f"{name} {value:.1f}%" for name, value in ledgers.items() if value is not None)
    of = " of the prompt's" if prompt else ""
    lines.append(f"  FLOPs saved  {said}{of}")
    latency = record.found("latency", LatencyResult)
    if latency is not None:
        lines.append(f"  latency      {latency.line()}")
    return lines


def _difference(name: str, nats: object, record: Record) -> str:
    frame = record.windows
    if len(frame) < MIN_WINDOWS:
        return f"  {name:<12} no interval from {len(frame)} windows (at least {MIN_WINDOWS}: dataset.windows)"
    paired = paired_perplexity(nats, frame["tokens"], frame["dense_nll_nats"])  # type: ignore[arg-type]
    return (
        f"  {name:<12} {paired.relative_pct:+.2f}% perplexity [{paired.relative_pct_low:+.2f}, {paired.relative_pct_high:+.2f}]"
    )
