"""The leaderboard: records of any method on the same model and text, their work against their KL to dense."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from quicksilver.measure.audit import AuditResult
from quicksilver.measure.measurement import encoded
from quicksilver.records.record import Record
from quicksilver.report.site.collection import NamedRecord, varied
from quicksilver.report.site.views import settings
from quicksilver.report.sweeps import front
from quicksilver.report.table import speedup_cell, without_folders

FAR = "far-recall"  # the text whose answers depend on distant context
_OWN = ("far-",)  # texts made for that question: no board of their own
SAVED, COST = "prompt_executed_flops_saved_pct", "kl_nats"
FRONT_WINDOWS = 32  # fewer are too few to say that a method beats another
ON_FRONT, BEATEN, UNSEEN = "on the front", "beaten", "not compared"
_LEAST_PCT = 0.5  # of the prompt's work: what saves less decided hardly anything
_MOST_CHARACTERS = 90  # of the options of one row; its page has all of them


class Entry(NamedTuple):
    """A record on a board: its modules, the options in which it differs from others of the same, whether another record beats it there, and the
    record of the same settings on `FAR`, if any."""

    run: NamedRecord
    method: str
    options: str
    place: str
    far: NamedRecord | None

    @property
    def time(self) -> str:
        """The prompt's time saved, in percent."""
        return speedup_cell(self.run.row, "prompt_speedup_pct")[0]


class Board(NamedTuple):
    """The records of one model, text and prompt length, the least KL first, and what its chart shows of them. beaten: how many settings are left out,
    since another of the same method beats them; beaten_timed: so many of these were timed."""

    model: str
    text: str
    prompt: str
    entries: list[Entry]
    beaten: int
    beaten_timed: int

    @property
    def chart(self) -> dict[str, Any]:
        """Columns for the chart: the method, percent of the prompt's work saved, KL × 100, what the legend calls it."""
        return {
            "method": [f"{one.method} {one.options}".strip() for one in self.entries],
            "saved": [round(one.run.row[SAVED], 3) for one in self.entries],
            "kl": [round(100 * one.run.row[COST], 5) for one in self.entries],
            "place": [one.place for one in self.entries],
        }


def boards(runs: Iterable[NamedRecord]) -> list[Board]:
    """A board for each model, number format, text and length of prompt and window, the fullest first.

    A record is on it if it scores test text under protocol continuation without look-ahead, executes what it says (`compact`), saves half a percent of
    the prompt's work, and has its KL to dense. Of one method those settings are shown that no other of its settings beats; of two records with the same settings the
    timed one, then the one of more windows.
    """
    far: dict[str, NamedRecord] = {}
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run in runs:
        if (record := run.record) is None or not _counts(record, run.row):
            continue
        setting, text = _setting(record), record.data.name
        if text == FAR:
            far[setting] = max(far.get(setting, run), run, key=_windows)
        elif not text.startswith(_OWN):
            entry = {
                "run": run,
                "method": " + ".join(name.replace("quicksilver", "predicted_kv") for name in record.modules),
                "options": settings(record) | _code(record),
                "setting": setting,
            }
            entry |= {"saved": run.row[SAVED], "cost": run.row[COST]}
            made_by, protocol = record.model, record.protocol
            prompt = f"prompts of {protocol.prompt_tokens} tokens, then {protocol.window_tokens - protocol.prompt_tokens} scored"
            prompt += "" if made_by.dtype == "float32" else f", {made_by.dtype}"
            key = (str(without_folders(made_by.name)), text, prompt, made_by.weights_digest, record.data.digest)
            groups.setdefault(key, []).append(entry)
    found = []
    for (model, text, prompt, *_), members in groups.items():
        timed = sorted(members, key=lambda one: ("prompt_speedup_pct" in one["run"].row, one["run"].record.data.windows))
        frame = pd.DataFrame({one["setting"]: one for one in timed}.values())
        own = pd.concat([front(mine["saved"], mine["cost"]) for _, mine in frame.groupby("method")]).sort_index()
        beaten = [one.row for one in frame[~own]["run"]]
        frame = frame[own].sort_values(["cost", "saved"], ascending=[True, False], kind="stable")
        enough = frame["run"].map(_windows) >= FRONT_WINDOWS
        compared = enough & (enough.sum() > 1)
        best = front(frame["saved"].where(compared), frame["cost"])
        frame["place"] = [ON_FRONT if at else BEATEN if seen else UNSEEN for at, seen in zip(best, compared, strict=True)]
        keys = {method: _most_varied(list(mine["options"])) for method, mine in frame.groupby("method")}
        keys |= {
            one["method"]: [*one["options"]] for one in frame.to_dict("records") if not keys[one["method"]] and _is_foreign(one)
        }
        entries = []
        for one in frame.to_dict("records"):
            own_options = ((key.rpartition(".")[2], one["options"].get(key)) for key in keys[one["method"]])
            said = ", ".join(f"{key}={value}" for key, value in own_options if value is not None)
            said = str(without_folders(textwrap.shorten(said, _MOST_CHARACTERS, placeholder=" …")))
            entries.append(Entry(one["run"], one["method"], said, one["place"], far.get(one["setting"])))
        found.append(Board(model, text, prompt, entries, len(beaten), sum("prompt_speedup_pct" in row for row in beaten)))
    return sorted(found, key=lambda board: (-len(board.entries), board.model, board.text, board.prompt))


def _is_foreign(entry: Mapping[str, Any]) -> bool:
    """Whether the method is not the package's: nobody knows its defaults, so all of its options are said."""
    modules = entry["run"].record.config["modules"].values()
    return not all(str(one.get("_target_", "")).startswith("quicksilver.") for one in modules)


def _code(record: Record) -> dict[str, str]:
    """The beginning of a digest of the user's files, as an option: an edited method is another one."""
    files = "".join(record.identity.sources.values())
    return {"code": hashlib.sha256(files.encode()).hexdigest()[:6]} if files else {}


def _most_varied(options: Sequence[Mapping[str, str]]) -> list[str]:
    """The options that differ, those first that take the most values: a row has room for a few."""
    return sorted(varied(options), key=lambda key: -len({one.get(key) for one in options}))


def _counts(record: Record, row: Mapping[str, Any]) -> bool:
    if record.protocol.name != "continuation" or record.execution != "compact" or record.lookahead or record.data.part != "test":
        return False
    audit = record.found("audit", AuditResult)
    return row.get(COST) is not None and (row.get(SAVED) or 0.0) >= _LEAST_PCT and not (audit is not None and audit.leaks)


def _windows(run: NamedRecord) -> int:
    return 0 if run.record is None else run.record.data.windows


def _setting(record: Record) -> str:
    """Model, modules with all options and the user's code, and lengths of prompt and window: all but the text."""
    protocol = {**encoded(record.protocol), "batch_size": None}
    code = dict(record.identity.sources)
    return json.dumps([record.model.weights_digest, record.model.dtype, protocol, record.config["modules"], code], sort_keys=True)
