"""Table memory: KV cache and peak memory of a batch, and the ΔM of App. J beside what is really saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.measure.memory import MemoryResult
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, amount, number, signed

from . import costs


def rows() -> list[Row]:
    """Dense inference, every mechanism alone, one after another, and the attention budget."""
    return costs.rows()


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """Bytes, and percent of dense inference that is gone."""
    frame = pd.DataFrame([_row(outcome) for outcome in outcomes])
    columns = (
        Column("", "technique", lambda row: (row["technique"],), align="left"),
        Column("KV cache", "billed", lambda row: _bytes(row, "kv_billed_bytes")),
        Column("KV cache", "resident", lambda row: _bytes(row, "kv_resident_bytes")),
        Column("KV cache", "saved %", lambda row: (signed(number(row, "kv_saved_pct")),)),
        Column("KV cache", "ΔM %", lambda row: (signed(number(row, "paper_saved_pct")),)),
        Column("KV cache", "last layer %", lambda row: (signed(number(row, "kv_last_layer_saved_pct")),), expendable=1),
        Column("peak of tensors", "bytes", lambda row: _bytes(row, "peak_tensor_bytes")),
        Column("peak of tensors", "saved %", lambda row: (signed(number(row, "peak_tensor_saved_pct")),)),
        Column("", "peak of the process", lambda row: _bytes(row, "peak_memory_bytes"), expendable=2),
    )
    legend = (
        "KV cache of one batch after its last token. billed: bytes that the decisions ask for; resident: bytes in the tensors; "
        "saved: of resident bytes, in percent of dense.",
        "ΔM: what App. J's formula says is saved, N_halted · d_kv · h · 2 summed over layers. The formula leaves out two "
        "things: halted tokens that keep their K/V, and entries that are skipped, merged or stored in another format.",
        "peak of tensors: the most bytes that torch's allocator held during the batch, above what it held before (the weights); "
        "exact. On a GPU it is the allocator's own peak, weights included. peak of the process: says little about one batch, "
        "because a process keeps memory that it once had.",
    )
    panel = Panel(costs.PANEL, "One batch: its prompts and the tokens after them", columns, provenance.notes(outcomes))
    return Table(name, "Memory: KV cache and peaks", frame, (panel,), legend)


def _row(outcome: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {
        **{"panel": outcome.row.panel, "section": outcome.row.section, "key": outcome.row.key},
        **{"technique": outcome.row.technique, "status": outcome.reason or "measured"},
    }
    record = outcome.record
    if record is None:
        return row
    found = record.measured("memory", MemoryResult)
    layers = found.kv_bytes_by_layer
    dense = sum(layers.dense)
    tensors, dense_tensors = found.peak_tensor_bytes, found.dense_peak_tensor_bytes
    if tensors is None or dense_tensors is None:  # on a GPU
        tensors, dense_tensors = found.peak_memory_bytes, found.dense_peak_memory_bytes
    row |= {"kv_billed_bytes": sum(layers.billed), "kv_resident_bytes": sum(layers.resident), "kv_dense_bytes": dense}
    row |= {"peak_tensor_bytes": tensors, "dense_peak_tensor_bytes": dense_tensors}
    row |= {"peak_memory_bytes": found.peak_memory_bytes, "peak_memory_method": found.peak_memory_method}
    if record.dense_fingerprint is not None and dense:
        row["kv_saved_pct"] = 100 * (1 - sum(layers.resident) / dense)
        row["paper_saved_pct"] = 100 * sum(layers.paper_saved) / dense
        row["kv_last_layer_saved_pct"] = 100 * (1 - layers.resident[-1] / layers.dense[-1])
        row["peak_tensor_saved_pct"] = 100 * (1 - tensors / dense_tensors)
    return row | {"record": record.fingerprint}


def _bytes(row: Mapping[str, Any], key: str) -> Lines:
    value = number(row, key)
    return (NO_VALUE,) if value is None else (f"{amount(value)}B",)
