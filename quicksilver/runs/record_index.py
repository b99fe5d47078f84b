"""Which record answers a command line: remembered, so that what is there is found without composing configs or importing torch.

Only for models and texts that come with the package: others lie in files that may change, and are looked at every time. Whatever
changes in the package or in conf/ makes everything forgotten. The repository has such an index of its own beside its records
(`quicksilver dev keep`); where no folder of data is named, that one is believed about texts of others too: its records are what there is of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicksilver.records.record import Record
from quicksilver.records.store import KEPT, Store
from quicksilver.runtime.errors import QuickSilverError

if TYPE_CHECKING:
    from quicksilver.runs.config import RunConfig

_FILE = "cache/answers.json"
INDEX = f"{KEPT}/answers.json"
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Answer:
    """The record of a command line, or the reason why it can have none; of one that nobody made yet, its fingerprint alone."""

    record: Record | None = None
    reason: str | None = None
    fingerprint: str | None = None


class RecordIndex:
    """What is remembered below one results folder."""

    def __init__(self, results_dir: Path | str, records: str = "any") -> None:
        self._store = Store(results_dir, records)
        self._stamp = _stamp()
        self._known = self._read(_FILE)
        self._index = self._read(INDEX) if records == "any" else {}
        self._changed = False

    def _read(self, name: str) -> dict[str, Any]:
        try:
            kept = json.loads((self._store.root / name).read_text(encoding="utf-8"))
            if kept["stamp"] == self._stamp:
                return {key: answer for key, answer in kept["answers"].items() if _is_answer(answer)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # a cache: without it everything is composed and planned again
        return {}

    def index(self) -> dict[str, Any]:
        """What the repository remembers: `INDEX`. Of a record that it does not have, its fingerprint: that it is not there need not be found
        out anew."""
        return {"stamp": self._stamp, "answers": dict(sorted((self._index | self._known).items()))}

    def get(self, overrides: Sequence[str]) -> Answer | None:
        """The remembered record of a run with these overrides; None: nothing is remembered, or the record is damaged, or its dense record
        is gone."""
        key = _key(overrides)
        kept = self._known.get(key)
        if kept is None or kept.get("outside"):
            kept = self._index.get(key)
            if kept is None or (kept.get("outside") and os.environ.get("QUICKSILVER_DATA")):
                return None
        if "reason" in kept:
            return Answer(reason=kept["reason"])
        try:
            record = self._store.get(kept["fingerprint"])
            if record is not None:
                self._store.dense_of(record)
        except QuickSilverError:
            return None
        return Answer(record, fingerprint=kept["fingerprint"])

    def put(self, overrides: Sequence[str], config: RunConfig, answer: Answer) -> None:
        """Remember; where model, text or modules are not those of the package, for `index` alone."""
        ours = all(
            str(entry.get("_target_", "")).startswith("quicksilver.") and not entry.get("calibration")
            for entry in config.modules.values()
        )
        inside = config.model.path.startswith("embedded:") and config.dataset.reader == "pydoc" and ours
        fingerprint = answer.record.fingerprint if answer.record is not None else answer.fingerprint
        kept: dict[str, Any] = {"fingerprint": fingerprint} if fingerprint is not None else {"reason": answer.reason}
        if not inside:
            kept["outside"] = True
        self._changed |= self._known.get(_key(overrides)) != kept
        self._known[_key(overrides)] = kept

    def save(self) -> None:
        """Write what is new, where it can be written."""
        if self._changed:
            self._store.write_cache(_FILE, {"stamp": self._stamp, "answers": self._known})
            self._changed = False


def _is_answer(kept: Any) -> bool:
    return isinstance(kept, dict) and any(isinstance(kept.get(name), str) for name in ("reason", "fingerprint"))


def _key(overrides: Sequence[str]) -> str:
    """The same whether the default of where records come from is typed or not."""
    return hashlib.sha256("\n".join(word for word in overrides if word != "records=any").encode()).hexdigest()[:20]


def _stamp() -> str:
    """A hash that changes with any file of the package or of conf/, and with Python's version, whose own documentation is the embedded text; the
    same in every clone."""
    whole = hashlib.sha256(sys.version.encode())
    for name, path in sorted(_files()):
        whole.update(f"{name}\n".encode() + path.read_bytes())
    return whole.hexdigest()[:20]


def _files() -> Iterator[tuple[str, Path]]:
    """What decides about an answer, weights included, by names that are the same wherever the package lies."""
    conf = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
    for folder, pattern in ((_PACKAGE, "*.py"), (_PACKAGE / "models" / "reference", "*"), (conf, "*.yaml")):
        for path in folder.rglob(pattern):
            if path.is_file():
                yield f"{folder.name}/{path.relative_to(folder).as_posix()}", path
