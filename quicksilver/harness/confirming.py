"""A run of which the repository has the record: the first batch of windows is scored again, and where it comes out the same, only what a
clock reads is measured here. Perplexity and FLOPs do not depend on the machine beyond rounding; times do.

Identity says that weights, text and options are the same; the batch says that this machine and these libraries compute with them as before.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from quicksilver.harness import archive
from quicksilver.harness.description import Confirmed
from quicksilver.harness.record import CHECKSUM, EVENTS, WINDOWS, Record, check_files
from quicksilver.harness.store import Store
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.harness.store import Draft
    from quicksilver.measure.bench import Bench
    from quicksilver.measure.measurement import Measurement

MOST_NATS = 1e-4  # a scored token, in any window: 0.01% of its perplexity, and far above what rounding in float32 leaves
MOST_OF_FLOPS = 1e-3  # a token whose signal is at its threshold may fall to either side


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


def confirm(record: Record, bench: Bench) -> Confirmed:
    """Score the first batch as the run does, and compare it window by window with the record."""
    from quicksilver.measure.perplexity import score

    count = min(bench.protocol.batch_size, len(bench.windows.ids))
    scores = score(
        bench.model, bench.windows.ids[:count], bench.protocol, bench.windows.token_bytes, modules=bench.modules,
        execution=bench.execution, progress=bench.batches_done, dense=bench.dense.logits if bench.dense and bench.modules else None, decision_layers=bench.decision_layers,
    )  # fmt: skip
    here, there = scores.windows, record.windows.iloc[:count]
    apart = max(
        float(np.abs(here[column].to_numpy(float) / by - there[column].to_numpy(float) / by).max())
        for column, by in (("nll_nats", here["tokens"].to_numpy(float)), ("kl_nats", 1.0))
        if column in here and column in there
    )
    work, before = (float(frame["executed_flops"].sum()) for frame in (here, there))
    return Confirmed(
        windows=count,
        of=len(record.windows),
        largest_difference_nats=apart,
        agrees=apart <= MOST_NATS and abs(work / before - 1) <= MOST_OF_FLOPS,
    )


def taken(record: Record, draft: Draft) -> dict[str, Any]:
    """What the record measured, for a record of this machine; its files are copied into the draft."""
    for name in record.files:
        if name != EVENTS:
            draft.write(name, partial(shutil.copyfile, record.path / name))
    draft.write(WINDOWS, lambda path: record.windows.to_parquet(path, index=False))
    return {key: entry for key, entry in record.content.items() if key not in (CHECKSUM, "files", "confirmed", archive.ENTRY)}
