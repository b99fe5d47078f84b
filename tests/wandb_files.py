"""W&B's own offline files, read back: what `wandb sync` would send."""

import json
import struct
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7  # of a log: records in parts, each with checksum, length and whether more of it follows


def _records(content: bytes) -> list[bytes]:
    found, whole, at = [], b"", _HEADER
    while at + _HEADER <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + _HEADER])
        whole += content[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # all of it, or its last part
            found.append(whole)
            whole = b""
    return found


def read_offline(results: Path) -> dict[str, dict[str, Any]]:
    """By a run's id its `name`, `group`, `config`, `history` (a mapping a step), and its `artefacts` with the type of each."""
    from wandb.proto import wandb_internal_pb2

    runs: dict[str, dict[str, Any]] = {}
    for path in sorted(results.glob("wandb/offline-run-*/*.wandb")):
        about: dict[str, Any] = {"history": [], "artefacts": {}}
        for content in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                config = {one.key: json.loads(one.value_json) for one in record.run.config.update}
                about |= {"name": record.run.display_name, "group": record.run.run_group, "config": config}
                runs[record.run.run_id] = about
            elif kind == "history":
                items = record.history.item
                about["history"].append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items})
            elif kind == "request" and record.request.HasField("log_artifact"):
                about["artefacts"][record.request.log_artifact.artifact.name] = record.request.log_artifact.artifact.type
            elif kind == "artifact":
                about["artefacts"][record.artifact.name] = record.artifact.type
    return runs
