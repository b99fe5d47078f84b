"""A run with a committed record: the first batch of windows is scored again; where it comes out the same, only times are measured here.

Perplexity and FLOPs depend on the machine by rounding alone; times do. Identity says that weights, text and options are the same; the batch says
that this machine and these libraries compute as before.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from quicksilver.records import archive
from quicksilver.records.description import Confirmed
from quicksilver.records.record import CHECKSUM, EVENTS, WINDOWS, Record, check_files
from quicksilver.records.store import Store
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench
    from quicksilver.measure.measurement import Measurement
    from quicksilver.records.store import Draft
    from quicksilver.runtime.module import NumberFormat

# By number format, ascending: nats a scored token in any window, and share of the work (a token at its threshold may fall to either side).
# Three times what scripts/measure_rounding.py found on three emulated processors (docs/identity.md).
BOUNDS: dict[NumberFormat, tuple[float, float]] = {"float32": (1e-4, 1e-3), "bfloat16": (0.1, 1e-3), "integer": (0.1, 1e-3)}
_UNNAMED = {"int8_dynamic": "int_mm"}  # what computed records that were made before they said so


def of_repository(results_dir: str, fingerprint: str, measurements: Mapping[str, Measurement]) -> Record | None:
    """The record to compare with; None: there is none that is whole, or a batch of windows does not speak for all that was measured."""
    if not all(one.timed or one.windows_speak for one in measurements.values()):
        return None
    try:
        record = Store(results_dir).get(fingerprint)
        if record is None or not record.is_kept:
            return None
        check_files(record)
    except ConfigError:
        return None  # it is damaged: the run is made as if it were not there
    return record


def format_of(bench: Bench) -> NumberFormat:
    """The coarsest format that a run computes in: its model's, or one of its modules'."""
    wide = next(bench.model.parameters()).dtype.itemsize >= 4
    formats: list[NumberFormat] = ["float32" if wide else "bfloat16", *(one.number_format for one in bench.modules)]
    return max(formats, key=list(BOUNDS).index)


def confirm(record: Record, bench: Bench) -> Confirmed:
    """Score the first batch as the run does, and compare it window by window with the record."""
    nats, work = compare(record, bench)
    number_format = format_of(bench)
    most_nats, most_work = BOUNDS[number_format]
    other = _other_kernels(record, bench)
    if other is not None:
        said = f"{record.fingerprint}: {other}; measured here as a whole. records=any reads it as it is."
        print(said, file=sys.stderr, flush=True)
    return Confirmed(
        windows=min(bench.protocol.batch_size, len(bench.windows.ids)),
        of=len(record.windows),
        largest_difference_nats=nats,
        agrees=other is None and nats <= most_nats and work <= most_work,
        number_format=number_format,
    )


def _other_kernels(record: Record, bench: Bench) -> str | None:
    """That the record was made by a kernel that is not used here, a clause; None: by the same ones."""

    def names(kernels: Iterable[str]) -> set[str]:  # `torch._int_mm` of `torch._int_mm on cpu (AVX512)`
        return {how.partition(" on ")[0].rstrip("; ") for how in kernels}

    there = {_UNNAMED[name] for name in record.config["modules"] if name in _UNNAMED and name not in record.kernels}
    there |= names(record.kernels.values())
    here = names(one.kernel for one in bench.modules if one.kernel is not None)
    if here <= there:
        return None
    gone = "; ".join(sorted(there - here)) or "a kernel that it does not name"
    return f"the repository's record was made by {gone}, which is not exact or not here, and this machine takes {'; '.join(sorted(here - there))}"


def compare(record: Record, bench: Bench) -> tuple[float, float]:
    """How far the first batch is from the record: the largest difference of a window in nats a token, and that of the work as a share."""
    from quicksilver.measure.perplexity import score

    count = min(bench.protocol.batch_size, len(bench.windows.ids))
    scores = score(
        bench.model, bench.windows.ids[:count], bench.protocol, bench.windows.token_bytes, modules=bench.modules,
        execution=bench.execution, progress=bench.batches_done, dense=bench.dense.logits if bench.dense and bench.modules else None, decision_layers=bench.decision_layers,
    )  # fmt: skip
    here, there = scores.windows, record.windows.iloc[:count]
    nats = max(
        float(np.abs(here[column].to_numpy(float) / by - there[column].to_numpy(float) / by).max())
        for column, by in (("nll_nats", here["tokens"].to_numpy(float)), ("kl_nats", 1.0))
        if column in here and column in there
    )
    done, before = (float(frame["executed_flops"].sum()) for frame in (here, there))
    return nats, abs(done / before - 1)


def copy_committed_results(record: Record, draft: Draft) -> dict[str, Any]:
    """What the record measured, for a record of this machine; its files are copied into the draft."""
    for name in record.files:
        if name != EVENTS:
            draft.write(name, partial(shutil.copyfile, record.path / name))
    draft.write(WINDOWS, lambda path: record.windows.to_parquet(path, index=False))
    return {key: entry for key, entry in record.content.items() if key not in (CHECKSUM, "files", "confirmed", archive.ENTRY)}
