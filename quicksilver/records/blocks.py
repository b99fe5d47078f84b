"""Blocks of windows that an unfinished run has scored. Whoever makes the run goes on behind them.

results/runs/.drafts/<fingerprint>/<windows of a block>-<code>/
    quality-000064.block    the windows from 64 on: a line with the digest of the rest, a line of json (rows, bytes), the decisions' tensors
    quality-000064.lock     the lease of the process that computes them

A block appears in one rename, and goes once the record of its run is there. Blocks of other code or of another size have a folder of their own:
no record is made of both. Several processes may make the same run: each takes the next free block (`lease.py`), and all of them get all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicksilver.files import fingerprint_of, write_atomically
from quicksilver.records import lease
from quicksilver.runtime.reading import parse_json

if TYPE_CHECKING:
    from quicksilver.measure.perplexity import Block, Compute, Keep
    from quicksilver.records.store import Store

NAP_S = 0.2


class SupersededError(Exception):
    """The record is there: another process has made it of the blocks."""


class Blocks:
    """The blocks of one run.

    Attributes:
        seconds: that others, or a process that was killed, spent on the blocks that were read here.
    """

    def __init__(self, store: Store, fingerprint: str) -> None:
        self._store, self._fingerprint = store, fingerprint_of(fingerprint)
        self.folder = store.drafts / self._fingerprint
        self.seconds = 0.0

    def of_pass(self, name: str, shared: bool = False) -> Keep:
        """What `score` is given to keep the blocks of one pass.

        Args:
            shared: other processes make the same run; one of them may finish it, and then `SupersededError` is raised.
        """

        def keep(blocks: Sequence[range], compute: Compute) -> Iterable[Block]:
            folder = self._folder_of(len(blocks[0]))
            paths = {block: folder / f"{name}-{block.start:06d}.block" for block in blocks}
            mine: set[range] = set()

            def made(block: range) -> Block:
                done = sum(len(one) for one, path in paths.items() if one != block and path.exists())
                return self._compute(paths[block], block, lambda block: compute(block, done))

            while left := [block for block in blocks if not paths[block].exists()]:
                taken = len(mine)
                for block in left:
                    if shared and self._store.path(self._fingerprint).exists():
                        raise SupersededError
                    held = lease.take(paths[block].with_suffix(".lock"))
                    if held is None:
                        continue
                    try:
                        with held:
                            if not paths[block].exists():
                                made(block)
                                mine.add(block)
                    except BaseException:
                        with suppress(OSError):  # others are there, or whole blocks
                            folder.rmdir()
                            self.folder.rmdir()
                        raise
                if len(mine) == taken:
                    time.sleep(NAP_S)  # all that is left is computed elsewhere
            # Those computed here are read again, too: memory does not grow with what is behind.
            return (self._read(path, block in mine) or made(block) for block, path in paths.items())

        return keep

    def _compute(self, path: Path, block: range, compute: Callable[[range], Block]) -> Block:
        began = time.monotonic()
        found = compute(block)
        with self._store.writing():
            write_atomically(path, packed(found, time.monotonic() - began), sync=False)
        return found

    def _read(self, path: Path, mine: bool) -> Block | None:
        """The block; None: its file is damaged, which is said. The seconds of one that is `mine` are counted already."""
        try:
            block, seconds = unpacked(path.read_bytes())
        except (ValueError, OSError) as error:
            _say(f"{path} is damaged ({error}): these windows are scored again, all others are taken as they are.")
            return None
        self.seconds += 0 if mine else seconds
        return block

    def _folder_of(self, windows: int) -> Path:
        folder = self.folder / f"{windows}-{code_digest()}"
        with self._store.writing():
            others = ", ".join(sorted(path.name for path in self.folder.glob("*") if path != folder))
            if others and not folder.exists():
                _say(f"{self.folder} has blocks of other code, or of another number of windows ({others}): they are left alone.")
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def remove(self) -> None:
        """Once the record is there."""
        shutil.rmtree(self.folder, ignore_errors=True)


def packed(block: Block, seconds: float) -> bytes:
    """A block as a file, with the seconds that it took."""
    from safetensors.torch import save

    tensors, trace = block.trace.to_tensors()
    about = {
        "rows": block.rows, "kv_bytes_billed": block.kv_bytes_billed, "kv_bytes_resident": block.kv_bytes_resident, "trace": trace,
        "host": lease.host_name(), "seconds": seconds,
    }  # fmt: skip
    content = json.dumps(about).encode() + b"\n" + save(tensors)
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def unpacked(file: bytes) -> tuple[Block, float]:
    """What `packed` was given. Raises ValueError: not a byte of it may have changed."""
    from safetensors.torch import load

    from quicksilver.measure.perplexity import Block
    from quicksilver.runtime.trace import Trace

    digest, _, content = file.partition(b"\n")
    if hashlib.sha256(content).hexdigest().encode() != digest:
        raise ValueError("its digest is another")
    first, _, tensors = content.partition(b"\n")
    about: dict[str, Any] = parse_json(first)
    trace = Trace.from_tensors(load(tensors), about["trace"]).compact()
    return Block(about["rows"], trace, about["kv_bytes_billed"], about["kv_bytes_resident"]), about["seconds"]


@cache
def code_digest() -> str:
    """Of this package's code and of the libraries that compute."""
    import torch
    import transformers

    whole = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        with suppress(OSError):
            whole.update(path.read_bytes())
    return whole.hexdigest()[:12]


def _say(line: str) -> None:
    print(f"quicksilver: {line}", file=sys.stderr, flush=True)
