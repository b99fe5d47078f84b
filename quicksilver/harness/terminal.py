"""What a run shows on a terminal: a progress bar while it goes, a few lines when it is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm

from quicksilver.harness.config import RunConfig
from quicksilver.harness.record import Record
from quicksilver.harness.run import Progress
from quicksilver.harness.stats import MIN_WINDOWS, paired_perplexity


def relative_cost(config: RunConfig) -> float:
    """What a run costs beside a dense one under `all`. Modules bring a null, their signals and a slower batch; under `continuation` a
    prompt is timed by itself as well. Of the runs of table 11: 1, 2.5, 2.5 and 4."""
    dense, whole = not config.modules, config.protocol.name == "all"
    return {(True, True): 1.0, (False, True): 2.5, (True, False): 2.5, (False, False): 4.0}[dense, whole]


def share_done(progress: Progress, costs: Sequence[float]) -> float:
    """Share of all work that is done, 0 to 1.

    Args:
        costs: of the runs that `progress` counts, in any unit; none: all cost the same.
    """
    if len(costs) != progress.runs:
        return progress.fraction
    of_this_run = progress.fraction * progress.runs - progress.run
    return (sum(costs[: progress.run]) + of_this_run * costs[progress.run]) / sum(costs)


@contextmanager
def progress_bar(costs: Sequence[float] = ()) -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr over all missing runs; nothing when stderr is not a terminal, or nothing has to run.

    Args:
        costs: of the missing runs, as in `share_done`: the time left follows from them.
    """
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
        bar.update(max(0.0, 100 * share_done(progress, costs) - bar.n))

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


def summary(record: Record) -> str:
    """What a person wants to know of one record; everything else is in its folder."""
    data, protocol = record["data"], record["protocol"]
    lines = [
        f"{record['label']}  ({record['execution']}, {record['model']['dtype']}{', LOOKS AHEAD' if record['lookahead'] else ''})",
        f"  text         {data['windows']} windows of {protocol['window_tokens']} tokens, {record['tokens']} scored, "
        f"{data['form']} text",
        f"  perplexity   {record['ppl']:.4g} per token{_per_byte(record)}",
    ]
    if record.dense_fingerprint is not None:
        lines += _against_dense(record)
    audit = record["audit"]
    lines.append(
        f"  audit        logits moved by {audit['max_abs_logit_difference']:.2g} of {audit['max_abs_logit']:.3g} at "
        f"{audit['probes']} probes"
        + (
            f" ({masked:.2g} under masked execution, free of rounding)"
            if (masked := audit.get("masked_max_abs_logit_difference")) is not None
            else ""
        )
    )
    lines += _costs(record)
    lines.append(f"  record       {record.path}")
    return "\n".join(lines)


def _costs(record: Record) -> list[str]:
    """What was asked for beside the usual passes, and why times may be worth less than they look."""
    lines = []
    who = "dense" if record.dense_fingerprint is None else "run"
    if record.get("components"):
        found = record["components"][who]
        dearest = sorted(found["components"].items(), key=lambda part: -part[1]["median_ms"])[:3]
        parts = ", ".join(f"{name} {part['median_ms']:.1f} ms" for name, part in dearest)
        lines.append(f"  components   {parts} of {found['headline_ms']:.1f} ms; sum off by {found['residual_pct']:+.1f}%")
    if record.get("energy"):
        energy = record["energy"]
        net = energy[who]["net_j_per_token"]
        said = (
            net if isinstance(net, str) else f"{1e3 * net:.3g} mJ a token, {1e6 * energy[who]['net_gco2_per_token']:.3g} µg CO₂"
        )
        lines.append(
            f"  energy       {said} ({energy['method']}; {energy['grid_kg_per_kwh']:.3g} kg/kWh, {energy['country_iso_code']})"
        )
    if record.get("deployment"):
        served = record["deployment"][who]
        lines.append(
            f"  deployment   {served['first_token_ms']['median']:.1f} ms to the first token, {served['per_token_ms']['p50']:.1f} ms a token "
            f"(p95 {served['per_token_ms']['p95']:.1f}), {served['within_budget_pct']:.0f}% within {record['deployment']['budget_ms']:g} ms"
        )
    warnings = dict.fromkeys(w for key, found in record.data.items() if key.endswith("timing_warnings") for w in found)
    return [*lines, *(f"  care         {warning}" for warning in warnings)]


def _per_byte(record: Record) -> str:
    return "" if record["bits_per_byte"] is None else f", {record['bits_per_byte']:.4g} bits per byte"


def _against_dense(record: Record) -> list[str]:
    frame = record.windows
    lines = [_difference("against dense", frame["nll_nats"], record)]
    if record.get("null") is not None:
        lines.append(_difference("its null", frame["null_nll_nats"], record))
    prefix = "prompt_" if record["protocol"]["name"] == "continuation" else ""
    saved = {
        name: 100 * (1 - record[f"{prefix}{name}_flops"] / record[f"dense_{prefix}{name}_flops"])
        for name in ("executed", "nominal", "paper")
    }
    of = " of the prompt's" if prefix else ""
    lines.append(f"  FLOPs saved  {', '.join(f'{name} {value:.1f}%' for name, value in saved.items())}{of}")
    if record.get(f"{prefix}latency_ms") is not None:
        ratio = record[f"{prefix}latency_ratio"]
        lines.append(
            f"  time saved   {100 * (1 - ratio['median']):.1f}%{of} (quartiles {100 * (1 - ratio['high']):.1f} to "
            f"{100 * (1 - ratio['low']):.1f}; noise {record[f'{prefix}noise_floor_pct']:.1f}%)"
        )
    return lines


def _difference(name: str, nats: object, record: Record) -> str:
    frame = record.windows
    if len(frame) < MIN_WINDOWS:
        return f"  {name:<12} no interval from {len(frame)} windows (at least {MIN_WINDOWS}: dataset.windows)"
    paired = paired_perplexity(nats, frame["tokens"], frame["dense_nll_nats"])  # type: ignore[arg-type]
    return (
        f"  {name:<12} {paired.relative_pct:+.2f}% perplexity [{paired.relative_pct_low:+.2f}, {paired.relative_pct_high:+.2f}]"
    )
