"""The sentences below a table: which model, text, protocol, machine and records the numbers come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quicksilver.measure.energy import EmissionsResult
from quicksilver.measure.latency import LatencyResult
from quicksilver.records.record import Record
from quicksilver.records.times import TimedProcess, shared, timed_processes
from quicksilver.report.artefacts import Outcome
from quicksilver.report.table import without_folders

SHORT = 12  # characters of a digest that are printed; enough to find a folder of results/runs by its beginning


def notes(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """How the rows of one panel were measured. Where records disagree (two machines, say), all that was found is named."""
    records = [outcome.record for outcome in outcomes if outcome.record is not None]
    if not records:
        return ("No record: nothing was measured.",)
    lines = [f"Model: {_each(records, _model)}.", f"Text: {_each(records, _data)}."]
    lines.append(f"Protocol: {_each(records, _protocol)}; execution: {_each(records, lambda record: record.execution)}.")
    lines.append(_machines(outcomes, timed=not (processes := timings(outcomes))))
    if counted := [found for record in records if (found := record.found("emissions", EmissionsResult)) is not None]:
        said = _each(counted, lambda one: f"{one.method}; {one.grid_kg_per_kwh:.3g} kg/kWh, {one.grid}")
        lines.append(f"CO₂e by CodeCarbon: {said}.")
    lines += filter(None, [_tuned(records)])
    if kernels := dict.fromkeys(how for record in records for how in record.kernels.values()):
        lines.append(f"Quantised tokens: {' / '.join(kernels)}.")
        if any(record.simulated for record in records):
            lines.append("Simulated quantization: times are not representative.")
    seeds = _each(records, lambda record: str(record.config["seed"]))
    timed = "; of times: quartiles of rounds" if any(record.found("latency", LatencyResult) for record in records) else ""
    if processes:
        timed = "; of times: range over processes"
        started = f"{processes[0].started[:16].replace('T', ' ')} to {processes[-1].started[11:16]} UTC"
        lines.append(
            f"Times: median over {len(processes)} processes ({started}), each of {processes[0].rounds} rounds in an order drawn anew, on "
            f"{processes[-1].machine}. What a counter of energy read is of the runs themselves."
        )
    lines.append(f"Seed: {seeds}; intervals: 95%, bootstrap of the difference, paired by window{timed}.")
    lines += filter(None, [confirmation(records)])
    if warnings := timing_warnings(records):
        again = "On a quiet machine `quicksilver time` takes them again, in several processes."
        lines.append(f"Times are uncertain: {'; '.join(warnings)}. {again}")
    names: dict[str, list[str]] = {}  # `halting 0a1b2c3d4e5f`; rows that share a record share a name
    for record, key in ((one.record, one.row.key) for one in outcomes if one.record is not None):
        names.setdefault(record.fingerprint[:SHORT], []).append(key)
    named = ", ".join(f"{' = '.join(keys)} {fingerprint}" for fingerprint, keys in names.items())
    return (*map(without_folders, lines), f"Records: {named}.")


def timings(outcomes: Sequence[Outcome]) -> list[TimedProcess]:
    """Processes of `quicksilver time` that timed every run of these rows that has a time, after all of them were made: who makes them anew, here
    or on another machine, prints their own times."""
    timed = {one.record.fingerprint: one.record for one in outcomes if one.record is not None and has_time(one.record)}
    root = next((record.path.parents[1] for record in timed.values()), None)
    made = max((record.finished for record in timed.values()), default="")
    return [] if root is None else shared([one for one in timed_processes(root) if one.started > made], timed)


def has_time(record: Record) -> bool:
    """Whether it was timed, and the time says something: masked execution computes everything, simulated widths are computed in float."""
    return record.execution == "compact" and not record.simulated and record.found("latency", LatencyResult) is not None


def _set_before(record: Record) -> Iterator[tuple[str, dict[str, int]]]:
    """What a record says was set before the text was scored. Where a run fits its own map, the shipped one is not used, and a schedule that is given
    stands in its options."""
    own = [one for one in record.config.get("modules", {}).values() if str(one.get("_target_")).endswith(".FittedPrediction")]
    for what, windows in record.tuned.items():
        if own and what.startswith("predicted_kv/") and (what.endswith(".safetensors") or all(one["schedule"] for one in own)):
            continue
        yield ("the run's own map" if own and what == "thresholds" else what), windows


def _tuned(records: Sequence[Record]) -> str | None:
    """What was set before the text was scored, and on which calibrating text; None: nothing."""
    texts: dict[str, dict[str, set[int]]] = {}
    for what, windows in (tuned for record in records for tuned in _set_before(record)):
        found = texts.setdefault(what, {})
        for name, count in windows.items():
            found.setdefault(name, set()).add(count)
    alike: dict[str, list[str]] = {}
    for what, found in sorted(texts.items()):
        said = " and ".join(f"{name} ({' or '.join(map(str, sorted(counts)))})" for name, counts in sorted(found.items()))
        alike.setdefault(said or "text that its file does not name", []).append(what)
    parts = "; ".join(f"{', '.join(whats)} on {said}" for said, whats in alike.items())
    return f"Fitted on calibration data (windows): {parts}." if parts else None


def confirmation(records: Sequence[Record]) -> str | None:
    """What of these records was measured here and what was taken from the repository's; None: nothing was compared with it."""
    found = list({record.fingerprint: record.confirmed for record in records if record.confirmed is not None}.values())
    if not found:
        return None
    apart = max(one.largest_difference_nats for one in found)
    windows = " / ".join(dict.fromkeys(f"{one.windows} of {one.of}" for one in found))
    taken = sum(one.agrees for one in found)
    formats = ", ".join(dict.fromkeys(one.number_format or "float32" for one in found if one.agrees))
    if all(record.is_kept for record in records):
        return f"{taken} run{'s were' if taken > 1 else ' was'} made again; {windows} windows verified identical to {apart:.1g} nats a token."
    said = [
        f"{len(found)} run{'s' * (len(found) > 1)} scored {windows} windows again: at most {apart:.1g} nats a token from the repository's record."
    ]
    if others := len(found) - taken:
        why = "differ by more than their number format leaves, or have another kernel"
        said.append(f"{others} {why}, and were measured here as a whole.")
    if taken:
        timed = any(record.found("latency", LatencyResult) for record in records)
        said.append(f"{taken} agree{'s' * (taken == 1)} within the rounding of {formats}, so the quality is the repository's.")
        said.append(f"{'Times and energy are of this machine. ' * timed}records=own measures everything.")
    return " ".join(said)


def timing_warnings(records: Sequence[Record]) -> list[str]:
    """What was wrong with the machine or its clock while these records were timed, each warning once, with how many have one like it."""
    found: dict[str, list[str]] = {}
    for record in records:
        for warning in record.timing_warnings:
            found.setdefault(warning.split(":")[-1].strip(), []).append(record.fingerprint)
    return [f"{why} ({len(set(where))} of {len(records)} records)" for why, where in found.items()]


def _each(records: Sequence[Any], describe: Any) -> str:
    """The distinct descriptions in order of appearance."""
    return " / ".join(dict.fromkeys(describe(record) for record in records))


def _model(record: Record) -> str:
    model, size = record.model, f"{record.model.parameters / 1e6:.1f} M parameters"
    return f"{without_folders(model.name)} ({size}, {model.dtype}, weights {model.weights_digest[:SHORT]})"


def _data(record: Record) -> str:
    data = record.data
    return (
        f"{data.name} ({data.shown_form}, digest {data.digest[:SHORT]}), {data.windows} windows of "
        f"{record.protocol.window_tokens} tokens, {record.quality.tokens} tokens scored"
    )


def _protocol(record: Record) -> str:
    protocol, detail = record.protocol, "every position but the first scored, teacher-forced"
    if protocol.name == "continuation":
        detail = f"prompt of {protocol.prompt_tokens}, then {protocol.window_tokens - protocol.prompt_tokens} scored"
    return f"{protocol.name} ({detail}; batch {protocol.batch_size})"


def _machines(outcomes: Sequence[Outcome], *, timed: bool) -> str:
    """All machines; of those that timed fewer rows than another, which rows."""
    rows: dict[str, list[str]] = {}
    for record, key in ((one.record, one.row.key) for one in outcomes if one.record is not None):
        rows.setdefault(_machine(record, timed=timed), []).append(key)
    most = max(rows, key=lambda machine: len(rows[machine]))
    apart = timed and any(one.record is not None and has_time(one.record) for one in outcomes) and len(rows) > 1
    said = [f"{one} ({', '.join(keys)})" if apart and one != most else one for one, keys in rows.items()]
    return f"Machine: {' / '.join(said)}." + " Times of different machines do not compare." * apart


def _machine(record: Record, *, timed: bool) -> str:
    environment = record.environment
    processor = environment.gpu if record.model.device.startswith("cuda") else environment.cpu
    threads = f"{environment.threads} thread{'s' if environment.threads > 1 else ''}"
    latency, said = record.found("latency", LatencyResult) if timed else None, ""
    if latency is not None:
        rounds = len(latency.latency_ms.samples or ())
        said = f"; timed on {record.batch_windows} windows at once" + (f", {rounds} rounds" if rounds else "")
    return f"{processor}, {threads}, torch {environment.torch}, transformers {environment.transformers}{said}"
