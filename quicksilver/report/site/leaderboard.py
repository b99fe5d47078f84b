"""The leaderboard: records of any method on the same model and text, their work against their KL to dense."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pandas as pd

from quicksilver.measure.measurement import encoded
from quicksilver.records.record import Record
from quicksilver.report.site.collection import NamedRecord
from quicksilver.report.sweeps import front
from quicksilver.report.table import without_folders

FAR = "far-recall"  # the text whose answers depend on distant context
_OWN = ("far-",)  # texts made for that question: no board of their own
SAVED, COST = "prompt_executed_flops_saved_pct", "kl_nats"


class Entry(NamedTuple):
    """A record on a board, whether no other one beats it there, and the record of the same settings on `FAR`, if any."""

    run: NamedRecord
    on_front: bool
    far: NamedRecord | None


class Board(NamedTuple):
    """The records of one model and text, most work saved first, and what its chart shows of them."""

    model: str
    text: str
    entries: list[Entry]

    @property
    def chart(self) -> dict[str, Any]:
        """Columns for the chart: the method, percent of the prompt's work saved, KL × 100, whether it is on the front."""
        rows = [(one.run.row, f"{one.run.label} {one.run.differing}".strip(), one.on_front) for one in self.entries]
        return {
            "method": [said for _, said, _ in rows],
            "saved": [round(row[SAVED], 3) for row, _, _ in rows],
            "kl": [round(100 * row[COST], 5) for row, _, _ in rows],
            "front": [on_front for *_, on_front in rows],
        }


def boards(runs: Iterable[NamedRecord]) -> list[Board]:
    """A board for each model and text, the fullest first.

    A record is on it if it was made under protocol continuation without look-ahead, executes what it says (`compact`), saves work of the prompt
    and has its KL to dense. Of one method those settings are shown that no other of its settings beats.
    """
    far: dict[str, NamedRecord] = {}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        if (record := run.record) is None or not _counts(record, run.row):
            continue
        setting, text = _setting(record), record.data.name
        if text == FAR:
            far[setting] = run
        elif not text.startswith(_OWN):
            entry = {"run": run, "method": run.label, "setting": setting, "saved": run.row[SAVED], "cost": run.row[COST]}
            groups.setdefault((str(without_folders(record.model.name)), text), []).append(entry)
    found = []
    for (model, text), members in groups.items():
        frame = pd.DataFrame(members)
        own = pd.concat([front(mine["saved"], mine["cost"]) for _, mine in frame.groupby("method")]).sort_index()
        frame = frame[own].sort_values(["saved", "cost"], ascending=[False, True], kind="stable")
        frame["front"] = front(frame["saved"], frame["cost"])
        entries = [Entry(one["run"], bool(one["front"]), far.get(one["setting"])) for one in frame.to_dict("records")]
        found.append(Board(model, text, entries))
    return sorted(found, key=lambda board: (-len(board.entries), board.model, board.text))


def _counts(record: Record, row: Mapping[str, Any]) -> bool:
    if record.protocol.name != "continuation" or record.execution != "compact" or record.lookahead:
        return False
    return row.get(COST) is not None and (row.get(SAVED) or 0.0) > 0


def _setting(record: Record) -> str:
    """Model, modules with all options, and lengths of prompt and window: all but the text."""
    protocol = {**encoded(record.protocol), "batch_size": None}
    return json.dumps([record.model.weights_digest, record.model.dtype, protocol, record.config["modules"]], sort_keys=True)
