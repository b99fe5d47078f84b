"""Which record answers a command line: remembered, so that what is there is found without composing configs or importing torch.

Only for models and texts that come with the package: others lie in files that may change, and are looked at every time. Whatever
changes in the package or in conf/ makes everything forgotten.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicksilver.harness.record import Record
from quicksilver.harness.store import Store
from quicksilver.runtime.errors import QuickSilverError

if TYPE_CHECKING:
    from quicksilver.harness.config import RunConfig

_FILE = "cache/answers.json"
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Answer:
    """The record of a command line, or the reason why it can have none; of one that nobody made yet, its fingerprint alone."""

    record: Record | None = None
    reason: str | None = None
    fingerprint: str | None = None


class Answers:
    """What is remembered below one results folder."""

    def __init__(self, results_dir: Path | str, *, own: bool = False) -> None:
        self._store = Store(results_dir, own=own)
        self._stamp = _stamp()
        self._known: dict[str, Any] = {}
        try:
            kept = json.loads((self._store.root / _FILE).read_text(encoding="utf-8"))
            if kept["stamp"] == self._stamp:
                self._known = {key: answer for key, answer in kept["answers"].items() if _is_answer(answer)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # a cache: without it everything is composed and planned again
        self._changed = False

    def get(self, overrides: Sequence[str]) -> Answer | None:
        """The answer to the overrides of a run; None: it has to be found out. A record that is damaged, or whose dense record
        is gone, is no answer."""
        kept = self._known.get(_key(overrides))
        if kept is None:
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
        """Remember, where model, text and modules are those of the package."""
        ours = all(
            str(entry.get("_target_", "")).startswith("quicksilver.") and not entry.get("calibration")
            for entry in config.modules.values()
        )
        if config.model.path.startswith("embedded:") and config.dataset.reader == "pydoc" and ours:
            fingerprint = answer.record.fingerprint if answer.record is not None else answer.fingerprint
            kept = {"fingerprint": fingerprint} if fingerprint is not None else {"reason": answer.reason}
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
    return hashlib.sha256("\n".join(overrides).encode()).hexdigest()[:20]


def _stamp() -> str:
    """Changes with any file of the package or of conf/, and with Python, which carries the embedded text."""
    whole = hashlib.sha256(sys.version.encode())
    for path in sorted(_files()):
        stat = path.stat()
        whole.update(f"{path} {stat.st_mtime_ns} {stat.st_size}\n".encode())
    return whole.hexdigest()[:20]


def _files() -> Iterator[Path]:
    conf = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
    for folder, pattern in ((_PACKAGE, "*.py"), (_PACKAGE / "models" / "reference", "*"), (conf, "*.yaml")):
        yield from (path for path in folder.rglob(pattern) if path.is_file())
