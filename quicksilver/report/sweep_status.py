"""What a sweep has found so far: a table that fills while it runs, in the terminal and as a page beside its manifest."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from quicksilver.files import write_atomically
from quicksilver.records import lease
from quicksilver.records.record import Record, load_record
from quicksilver.records.stats import MIN_WINDOWS, paired_perplexity
from quicksilver.records.store import Store, read_object
from quicksilver.report.table import NO_VALUE, signed
from quicksilver.runs.estimate import duration
from quicksilver.runs.launchers import waiting_jobs
from quicksilver.runs.sweep import FOLDER, HEAD, PAGE, RunState, Sweep, names, time_left_s
from quicksilver.runtime.errors import ConfigError

NUMBERS, NEW_NUMBERS = "numbers.json", 20  # it is written anew once it lacks so many
MOST_INTERVALS = 300  # of one look; one takes as long as ten records without
LATER = "interval_later"
STATES = ("done", "running", "failed", "waiting")
_NUMBERS = {
    "ppl": "perplexity", "delta_ppl_pct": "Δ to dense, %", "kl_nats": "KL, nats", "executed_flops_saved_pct": "FLOPs saved, %",
    "prompt_executed_flops_saved_pct": "of the prompt", "seconds": "seconds, all workers",
}  # fmt: skip


class Board:
    """The table of one sweep. Numbers of records are kept in `numbers.json` beside the page: ten thousand are not read for each look. Where many are
    read at once, some get their intervals by later looks."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        found = read_object(sweep.folder / NUMBERS)
        self._found: dict[str, dict[str, Any]] = {name: row for name, row in found.items() if isinstance(row, dict)}
        self._new, self._intervals = 0, MOST_INTERVALS
        self._outdated, self._written, self._took_s = False, float("-inf"), 0.0

    def rows(self, most: int | None = None) -> list[dict[str, Any]]:
        """One row a run: `number`, `state`, its `settings` by key, numbers of its record, `where`, `left_s`, `since`, `error`, `fingerprint`.

        Args:
            most: the numbers of about so many records, spread evenly, are enough; None: of all.
        """
        states = self.sweep.states()
        done = [place for place, state in enumerate(states) if state.folder is not None]
        read = set(done if most is None else done[:: max(1, len(done) // most)])
        fresh = sum(state.folder.name not in self._found for place, state in enumerate(states) if place in read and state.folder)
        self._intervals = MOST_INTERVALS - fresh // 10
        rows = [self._row(state) | (self._numbers(state.folder) if place in read else {}) for place, state in enumerate(states)]
        if self._new > NEW_NUMBERS:
            self.sweep.store.write_cache(f"{FOLDER}/{self.sweep.manifest.name}/{NUMBERS}", self._found)
            self._new = 0
        return rows

    def _row(self, state: RunState) -> dict[str, Any]:
        run, failure, making = state.run, state.failure, state.making
        row = {"number": run.number, "state": state.state, "fingerprint": run.fingerprint, "error": failure.get("error")}
        row["settings"] = dict(text.partition("=")[::2] for text in run.differing)
        row["where"], row["left_s"] = shared(making) if making else (failure.get("host"), 0.0)
        return row | {"since": making[0][0].since if making else failure.get("time")}

    def _numbers(self, folder: Path | None) -> dict[str, Any]:
        """Those of the record in that folder; of one that cannot be read, its `error`."""
        assert folder is not None
        made = folder.stat().st_mtime_ns if folder.is_dir() else 0
        there, more = self._found.get(folder.name, {}), self._intervals > 0
        if there.get("made_ns") != made or (LATER in there and more):
            try:
                there = self._found[folder.name] = {**numbers(load_record(folder), more), "made_ns": made}
            except ConfigError as error:
                return {"error": str(error)}
            self._new += 1
            self._intervals -= "low" in there
        return there

    def headline(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """`NAME: 17 of 200 done, 2 running, 1 failed, 180 waiting; 2 at work, 1 job in the queue, about 12 min left`."""
        counts = {state: sum(row["state"] == state for row in rows) for state in STATES}
        said = [f"{counts['done']} of {len(rows)} done", *(f"{counts[state]} {state}" for state in STATES[1:] if counts[state])]
        left = counts["running"] + counts["waiting"]
        if not left:
            return f"{self.sweep.manifest.name}: {', '.join(said)}"
        workers, queued = len(self.sweep.workers()), waiting_jobs(self.sweep.folder / "workers")
        idle = "its workers start" if lease.is_held(self.sweep.folder / HEAD) else "nobody is at work"
        doing = [f"{workers} at work" if workers else idle]
        doing += [f"{queued} job{'s' * (queued > 1)} in the queue"] if queued else []
        # A run that was there before the sweep says how long one takes as well.
        left_s = time_left_s(left, [row["seconds"] for row in rows if "seconds" in row], workers) if workers else None
        of_runs = [row["left_s"] for row in rows if row["state"] == "running"]
        if not counts["waiting"] and all(of_runs):
            left_s = max(of_runs)
        doing += [f"about {duration(max(left_s, *of_runs, 0.0))} left"] if left_s else []
        return f"{self.sweep.manifest.name}: {', '.join(said)}; {', '.join(doing)}"

    def text(self, width: int | None = None) -> str:
        """The headline and the table, for a terminal of so many columns: what is too long for the last one goes on below."""
        rows, axes = self.rows(), self.sweep.manifest.axes
        lines = [["run", *(axis.rpartition(".")[2] for axis in axes), "state", *_NUMBERS.values(), "record, or why not"]]
        for row in rows:
            settings = (row["settings"].get(axis, "") for axis in axes)
            lines.append([str(row["number"]), *settings, row["state"], *(cell(row, key) for key in _NUMBERS), _about(row)])
        wide = [max(map(len, column)) for column in zip(*(line[:-1] for line in lines), strict=True)]
        words = len(wide) - len(_NUMBERS)  # these columns hold words, and stand to the left
        left = sum(wide) + 2 * len(wide)
        said = [self.headline(rows)]
        if later := sum(LATER in row for row in rows):
            said.append(f"{later} rows have no interval yet: each further look computes {MOST_INTERVALS}.")
        for line in lines:
            placed = enumerate(zip(line, wide, strict=False))
            cells = (text.ljust(to) if at < words else text.rjust(to) for at, (text, to) in placed)
            last = textwrap.wrap(line[-1], max(20, (width or 200) - left)) or [""]
            said.append("  ".join((*cells, last[0])).rstrip())
            said += [" " * left + more for more in last[1:]]
        return "\n".join((*said, *_notes(rows)))

    def changed(self) -> None:
        """Something did: the page is written anew, now or by a later `catch_up`."""
        self._outdated = True
        self.catch_up()

    def catch_up(self) -> None:
        """Write the page if it is behind. A page of many runs takes long: at most a twentieth of this process's time is spent on it. What counts is
        work: a write that waited for a busy processor or disk would put off the next one for minutes."""
        if self._outdated and time.monotonic() - self._written >= 20 * self._took_s:
            self.write()

    def write(self) -> None:
        """Write the page anew. Whoever writes looks first, and one writes at a time: an older look never replaces a newer one."""
        began_s = time.thread_time()
        self._outdated = False
        with self.sweep.store.writing(), self.sweep.store.wait(self.sweep.folder / "page.lock"):
            write_atomically(self.sweep.folder / PAGE, self.html().encode())
        self._written = time.monotonic()
        self._took_s = time.thread_time() - began_s

    def html(self) -> str:
        """The page: it loads nothing, and looks for its newer self every few seconds as long as there is something to come."""
        rows, now = self.rows(), datetime.now(UTC)
        counts = {state: count for state in STATES if (count := sum(row["state"] == state for row in rows))}
        shown: dict[str, Any] = dict(sweep=self.sweep.manifest, rows=rows, counts=counts, headline=self.headline(rows))
        shown |= dict(site=(self.sweep.store.root / "report/index.html").is_file(), now=now.isoformat(timespec="seconds"))
        shown |= dict(pages={row["number"]: self._page(row) for row in rows}, points=_points(rows), notes=_notes(rows))
        return _template().render(numbers=_NUMBERS, cell=cell, ticks=_ticks, about=_about, **shown)

    def _page(self, row: Mapping[str, Any]) -> str | None:
        """Where the sweep's page leads from a run: to its page in the report, else to its record; None: there is neither."""
        places = (f"report/runs/{row['fingerprint']}.html", f"runs/{row['fingerprint']}/record.json")
        found = next((place for place in places if (self.sweep.store.root / place).is_file()), None)
        return f"../../{found}" if found and row["state"] == "done" else None


@cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("quicksilver.report.site")
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template("sweep.html")


def status(results_dir: Path | str) -> str:
    """What is at work below a results folder: sweeps that are not over, with the runs that are being made, and runs of no sweep."""
    lines, seen, making = [], set[str](), dict[str, list[tuple[lease.Holder, Mapping[str, Any]]]]()
    for fingerprint, who, doing in Store(results_dir).at_work():
        making.setdefault(fingerprint, []).append((who, doing))
    busy = {(who.host, who.pid) for members in making.values() for who, _ in members}
    for name in names(results_dir):
        board = Board(Sweep.load(results_dir, name))
        states = board.sweep.states()
        seen |= {state.run.fingerprint for state in states if state.run.fingerprint is not None}
        if any(state.state in ("running", "waiting") for state in states):
            lines.append(board.headline(rows := board.rows(most=50)))
            runs = {run.number: board.sweep.manifest.label(run) for run in board.sweep.manifest.runs}
            lines += [f"  {runs[row['number']]}: {row['where']}" for row in rows if row["state"] == "running"]
            idle = (who for who in board.sweep.workers() if (who.host, who.pid) not in busy)
            lines += [f"  loading, or between two runs: {told(who, {})}" for who in idle]
    for fingerprint, members in making.items():
        if fingerprint not in seen:
            label = next((str(doing["label"]) for _, doing in members if doing.get("label")), fingerprint)
            lines.append(f"{label}: {shared(members)[0]}")
    return "\n".join(lines) or f"Nothing is at work below {results_dir}."


def shared(making: Sequence[tuple[lease.Holder, Mapping[str, Any]]]) -> tuple[str, float]:
    """How far a run is and who makes it, and the seconds left. Of several processes the one that has most windows says how far; the shortest time left
    counts, since each says it as if it were alone."""
    who, doing = max(making, key=lambda one: (one[1].get("windows") or (0, 0))[0])
    left_s = min((its["left_s"] for _, its in making if its.get("left_s")), default=0.0)
    others = (f"with {other.host}, process {other.pid}" for other, _ in making if other is not who)
    return "; ".join((told(who, {**doing, "left_s": left_s}), *others)), left_s


def told(who: lease.Holder, doing: Mapping[str, Any]) -> str:
    """How far a process is with a run, where it is, and of which job."""
    return " | ".join(filter(None, (how_far(doing), f"{who.host}, process {who.pid}", doing.get("job"))))


def how_far(doing: Mapping[str, Any]) -> str:
    """`quality, window 320 of 2000, 3.1 a second, about 9 min left`, of a `Progress` or what a draft says of it."""
    said = [doing["phase"]] if doing.get("phase") else []
    scored, windows = doing.get("windows") or (0, 0)
    if windows and scored == windows:
        said.append(f"all {windows} windows scored")
    elif windows:
        said.append(f"window {scored} of {windows}")
        said += [f"{doing['windows_per_s']:.3g} a second"] if doing.get("windows_per_s") else []
    return ", ".join(said + ([f"about {duration(doing['left_s'])} left"] if doing.get("left_s") else []))


def _about(row: Mapping[str, Any]) -> str:
    """Its record, or why there is none."""
    return str(row["error"] or (row["fingerprint"] if row["state"] == "done" else row["where"]) or "")


def _notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which runs also act on scored tokens; and a line for each group of runs that found the same to the last digit."""
    acting = [str(row["number"]) for row in rows if row.get("acts_on_scored")]
    which = f"Run {acting[0]} acts" if len(acting) == 1 else f"Runs {', '.join(acting)} act"
    said = [f"{which} on scored tokens too: perplexity pays for both. `quicksilver show` names an option against it."]
    found: dict[tuple[float, ...], list[str]] = {}
    for row in rows:
        if "kl_nats" in row:
            measured = tuple(row.get(key, math.nan) for key in ("ppl", "kl_nats", "executed_flops_saved_pct"))
            found.setdefault(measured, []).append(str(row["number"]))
    same = [", ".join(runs) for runs in found.values() if len(runs) > 1]
    return [*said * bool(acting), *(f"Runs {runs} found the same: what differs between them changed nothing." for runs in same)]


def _points(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a chart shows of runs that are done: their cost and its interval over the work that they save."""
    points = []
    for row in rows:
        if (cost := row.get("delta_ppl_pct")) is not None and (saved := row.get("executed_flops_saved_pct")) is not None:
            settings = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in row["settings"].items())
            ends = {"low": row.get("low", cost), "high": row.get("high", cost)}
            of = " · ".join(row["settings"][axis] for axis in ("model", "dataset") if axis in row["settings"])
            points.append({"number": row["number"], "settings": settings, "saved": saved, "cost": cost, "of": of, **ends})
    return points


def _ticks(low: float, high: float) -> list[float]:
    """At most seven round numbers between the ends of an axis, 0 among them where it lies between."""
    width = (high - low) or 1.0
    size = 10.0 ** math.floor(math.log10(width))
    step = next(step for step in (size / 5, size / 2, size, 2 * size) if width / step <= 6)
    return [round(place * step, 9) for place in range(math.ceil(low / step), math.floor(high / step) + 1)]


def numbers(record: Record, interval: bool = True) -> dict[str, Any]:
    """What a row shows of a record; an `interval` that it may have, and is not asked for, is marked `LATER`."""
    row: dict[str, Any] = {"ppl": record.quality.ppl, "seconds": record.seconds, "kl_nats": record.quality.kl_nats}
    if record.dense is not None:
        row["delta_ppl_pct"] = 100 * (record.quality.ppl / record.dense.ppl - 1)
        for of in ("", "prompt_"):
            row[f"{of}executed_flops_saved_pct"] = record.flops_saved_pct(f"{of}executed")
        row["acts_on_scored"] = record.acts_on_scored or None
        if record.data.windows >= MIN_WINDOWS and not interval:
            row[LATER] = True
        elif record.data.windows >= MIN_WINDOWS:
            frame = record.windows
            paired = paired_perplexity(frame["nll_nats"], frame["tokens"], frame["dense_nll_nats"])
            row |= {"delta_ppl_pct": paired.relative_pct, "low": paired.relative_pct_low, "high": paired.relative_pct_high}
    return {key: value for key, value in row.items() if value is not None}


def cell(row: Mapping[str, Any], key: str) -> str:
    """A number of a row in print, with its interval where it has one."""
    value = row.get(key)
    if value is None:
        return NO_VALUE
    if key == "delta_ppl_pct":
        ends = f" [{signed(row['low'], 2)} {signed(row['high'], 2)}]" if "low" in row else ""
        return signed(value, 2) + ends
    return signed(value) if key.endswith("_pct") else f"{value:.4g}"
