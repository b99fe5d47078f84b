"""Finished records that differ in the options of their modules only, ordered so that a person can move from one to the next.

Nothing is interpolated: every position of the explorer is a record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any

from quicksilver.measure.latency import LatencyResult
from quicksilver.measure.typed import encoded
from quicksilver.records.record import Record
from quicksilver.report.comparison import against_dense
from quicksilver.report.table import number
from quicksilver.runtime.errors import QuickSilverError

_INTERVALS = ("delta_ppl", "delta_ppl_pct", "null_delta_ppl_pct", "versus_null_ppl")
_NUMBERS = (
    *("ppl", "executed_flops_saved_pct", "nominal_flops_saved_pct", "paper_flops_saved_pct", "prompt_executed_flops_saved_pct"),
    *("kv_bytes_saved_pct", "speedup_pct", "noise_floor_pct", "prompt_speedup_pct", "prompt_noise_floor_pct"),
)
_MIN_RECORDS = 2
_NONE = "none"
_SCALE = 3  # fewer numbers are no scale


def sweeps(panels: Iterable[tuple[str, Sequence[tuple[Record, Record]]]]) -> list[dict[str, Any]]:
    """What can be moved through: of every panel the records of the same modules on the same model, text, protocol and execution.

    Args:
        panels: a title, and records with their dense records. A set of records that an earlier panel had is not shown again.

    Returns:
        per sweep: `title`, `where` (modules, model, text, protocol), `options` (each with its `values` in order, and whether that is an order of
        numbers, `ordered`) and `records`, each with the place of its value in every option, its numbers and their intervals. Options that always
        change together are one option. What has most to move through comes first: a scale of at least three numbers, then by the number of records.
    """
    found, seen = [], set()
    for title, pairs in panels:
        groups: dict[tuple[str, ...], list[tuple[Record, Record]]] = {}
        for record, dense in sorted(pairs, key=lambda pair: pair[0].fingerprint):
            if record.dense_fingerprint is not None:
                groups.setdefault(_group(record), []).append((record, dense))
        for members in groups.values():
            names = frozenset(record.fingerprint for record, _ in members)
            sweep = _sweep(title, members) if names not in seen else None
            if sweep is not None:
                seen.add(names)
                found.append(sweep)
    return sorted(found, key=_interest)


def _interest(sweep: Mapping[str, Any]) -> tuple[bool, int]:
    """Key that puts first what a person can learn from: several numbers of one option, with different outcomes; then many records."""
    scale = any(option["ordered"] and len(option["values"]) >= _SCALE for option in sweep["options"])
    outcomes = {(record["executed_flops_saved_pct"], record["delta_ppl_pct"][0]) for record in sweep["records"]}
    return not (scale and len(outcomes) >= _SCALE), -len(sweep["records"])


def _group(record: Record) -> tuple[str, ...]:
    modules = json.dumps({name: entry["_target_"] for name, entry in record.config["modules"].items()}, sort_keys=True)
    protocol = {**encoded(record.protocol), "batch_size": None}
    same = (record.model.name, record.model.weights_digest, record.model.dtype, record.data.token_digest)
    return (modules, json.dumps(protocol, sort_keys=True), record.execution, *same)


def _sweep(title: str, members: Sequence[tuple[Record, Record]]) -> dict[str, Any] | None:
    distinct: dict[str, tuple[Record, Record]] = {}
    # Two records of one setting differ in how much was measured: the timed one says more.
    for record, dense in sorted(members, key=lambda pair: pair[0].found("latency", LatencyResult) is None):
        distinct.setdefault(json.dumps(record.config["modules"], sort_keys=True), (record, dense))
    rows = []
    for record, dense in sorted(distinct.values(), key=lambda pair: pair[0].fingerprint):
        with suppress(QuickSilverError):  # too few windows for an interval: its own page says so
            rows.append((record, against_dense(record, dense)))
    if len({(row.get("executed_flops_saved_pct"), row.get("delta_ppl_pct")) for _, row in rows}) < _MIN_RECORDS:
        return None  # one outcome, whatever is set: there is nothing to move through
    options = _options([settings(record) for record, _ in rows])
    first = rows[0][0]
    return {
        "title": title,
        "where": ", ".join((" + ".join(first.modules), first.model.name, first.data.name, first.protocol.name, first.execution)),
        "options": [{key: value for key, value in option.items() if key != "places"} for option in options],
        "records": [
            {
                "fingerprint": record.fingerprint,
                "at": [option["places"][place] for option in options],
                **{name: _rounded(number(row, name)) for name in _NUMBERS},
                **{name: [_rounded(number(row, f"{name}{end}")) for end in ("", "_low", "_high")] for name in _INTERVALS},
            }
            for place, (record, row) in enumerate(rows)
        ],
    }


def settings(record: Record) -> dict[str, str]:
    """The options of a record's modules, `halting.tau_drift`, in words."""
    modules: Mapping[str, Mapping[str, Any]] = record.config["modules"]
    options = {module: {name: value for name, value in entry.items() if name != "_target_"} for module, entry in modules.items()}
    return {f"{module}.{name}": _named(value) for module, entry in options.items() for name, value in entry.items()}


def _named(value: Any) -> str:
    """A value as words: `off`, `0.27 to 0.8`, `and, to, by`; numbers and text as they are."""
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_named(one)}" for key, one in value.items()) or _NONE
    if isinstance(value, list):
        numbers = len(value) == 2 and all(isinstance(one, int | float) and not isinstance(one, bool) for one in value)
        return (" to " if numbers else ", ").join(map(_named, value)) or _NONE
    return value if isinstance(value, str) else json.dumps(value)


def _options(rows: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """What differs between `rows`: each option with its sorted values and the place of every row among them."""
    names = sorted({name for row in rows for name in row})
    together: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        values = [row.get(name, _NONE) for row in rows]
        seen = list(dict.fromkeys(values))
        if len(seen) > 1:
            together.setdefault(tuple(map(seen.index, values)), []).append(name)
    options = []
    for members in together.values():
        # The member that reads as numbers gives the order; the others follow it.
        name = min(members, key=lambda one: (sum(_order(row.get(one, _NONE))[0] for row in rows), members.index(one)))
        values = sorted({row.get(name, _NONE) for row in rows}, key=_order)
        first = [next(row for row in rows if row.get(name, _NONE) == value) for value in values]
        also = [{"name": other, "values": [row.get(other, _NONE) for row in first]} for other in members if other != name]
        places = [values.index(row.get(name, _NONE)) for row in rows]
        ordered = all(_order(value)[0] == 0 for value in values)
        options.append({"name": name, "also": also, "values": values, "places": places, "ordered": ordered})
    return sorted(options, key=lambda option: (-len(option["values"]), option["name"]))


def _order(value: str) -> tuple[int, float, str]:
    """Numbers (`0.3`, `p25`) before words, in their order."""
    match = re.fullmatch(r"p?(-?\d+(?:\.\d+)?(?:e-?\d+)?)", value)
    return (0, float(match[1]), value) if match else (1, 0.0, value)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


# --- charts, drawn by Bokeh in the browser (templates/charts.js) -----------------------------------------------------------------


def bokeh_script() -> bytes:
    """BokehJS itself with its drawing functions, one file for the whole site."""
    folder = files("bokeh").joinpath("server", "static", "js")
    return b"\n".join(folder.joinpath(f"bokeh{part}.min.js").read_bytes() for part in ("", "-api"))


def windows_chart(record: Record) -> dict[str, Any]:
    """By window: nats a token more than dense, of the run and of its null; of a dense record, nats a token."""
    frame = record.windows
    columns = {"run": "nll_nats", "null": "null_nll_nats"} if "dense_nll_nats" in frame else {"dense": "nll_nats"}
    base = frame.get("dense_nll_nats", 0.0)
    series = {name: ((frame[column] - base) / frame["tokens"]).round(5) for name, column in columns.items() if column in frame}
    return {"window": frame["window"].tolist(), "series": {name: values.tolist() for name, values in series.items()}}
