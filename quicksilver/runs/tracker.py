"""Mirrors of records. Records stay the source; a mirror may be off, and is imported only when it is on."""

from __future__ import annotations

import dataclasses
import importlib.util
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from quicksilver.records.record import CHECKSUM, Record, flat
from quicksilver.runtime.errors import ConfigError, QuickSilverError, installing

if TYPE_CHECKING:
    import pandas as pd

    from quicksilver.runs.config import TrackerConfig

BLOCKS = 40  # points of a curve
SO_FAR = "so_far/"


class NotMirrored(QuickSilverError):
    """A record is finished, and the tracker did not take it."""


def check_tracker(config: TrackerConfig) -> None:
    """Refuse a tracker that cannot work before anything is run for it. Raises ConfigError: its package is not installed."""
    if config.name == "wandb" and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"tracker=wandb needs the package wandb: {installing('tracking')}, or tracker=none.")


def mirror(
    record: Record,
    config: TrackerConfig,
    results_dir: Path,
    *,
    name: str | None = None,
    group: str | None = None,
    tags: Sequence[str] = (),
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Send one finished record to the tracker of the config: its numbers, its curves and table by window, and its files as an artefact.
    Raises NotMirrored: the tracker refuses (no login …); the record itself is finished and stays.

    Args:
        name: of the run; None: its label.
        group: runs that belong together; None: those of the same model, text and protocol.
        more: further numbers.
    """
    if config.name == "none":
        return
    group = group or f"{record.model.name} | {record.data.name} | {record.protocol.name}"
    about = {"id": record.fingerprint, "name": name or record.label, "group": group, "config": dict(record.config)}
    try:
        with start(config, results_dir, tags=[*tags] or None, **about) as run:
            import wandb

            run.define_metric(f"{SO_FAR}*", step_metric=f"{SO_FAR}windows")
            for numbers in curves(record).to_dict("records"):
                run.log(numbers)
            run.log({"by_window": wandb.Table(dataframe=record.windows)})
            run.log(scalars(record) | differences(record) | dict(more))
            with record.folder() as folder:
                run.log_artifact(str(folder), name=f"record-{record.fingerprint}", type="record")
    except QuickSilverError as error:
        raise NotMirrored(f"{record.path} is finished, but {error}") from error


@contextmanager
def start(tracker: TrackerConfig, results_dir: Path, **about: Any) -> Iterator[Any]:
    """A W&B run below `results_dir`, finished at the end of the block; `about` goes to `wandb.init`.
    Raises QuickSilverError: W&B refuses."""
    import wandb

    mode = cast("Literal['offline', 'online', 'disabled']", tracker.mode)
    settings = wandb.Settings(silent=True, console="off")
    try:
        run = wandb.init(project=tracker.project, mode=mode, dir=str(results_dir), settings=settings, **about)
        yield run
        run.finish()
    except wandb.errors.Error as error:
        raise QuickSilverError(f"W&B refused it: {error}. Log in, or use tracker.mode=offline.") from error


def sync_hint(config: TrackerConfig, results_dir: Path | str, fingerprints: Sequence[str]) -> str:
    """What to type so that runs of these records, which W&B has offline, are sent; empty: they are not, or not offline."""
    if config.name != "wandb" or config.mode != "offline":
        return ""
    folder, total = Path(results_dir) / "wandb", len(fingerprints)
    there = [found[-1] for one in fingerprints if (found := sorted(folder.glob(f"offline-run-*-{one}")))]
    if missing := total - len(there):
        command = f"python -m quicksilver.report.wandb {shlex.quote(f'results_dir={results_dir}')}"
        return f"{missing} of {total} records were there before, and W&B has no run of them. To mirror all: {command}"
    which = shlex.quote(str(there[0])) if len(there) == 1 else f"{shlex.quote(str(folder))}/offline-run-*"
    return f"W&B has {'it' if len(there) == 1 else 'them'} offline. To send: wandb sync {which}"


def curves(record: Record, blocks: int = BLOCKS) -> pd.DataFrame:
    """Perplexity over the windows so far, and against the dense run, after each of at most so many blocks of windows."""
    import numpy as np
    import pandas as pd

    frame, tokens = record.windows, record.windows["tokens"]
    found = {f"{SO_FAR}windows": range(1, len(frame) + 1), f"{SO_FAR}ppl": np.exp(frame["nll_nats"].cumsum() / tokens.cumsum())}
    if "dense_nll_nats" in frame:
        added = (frame["nll_nats"] - frame["dense_nll_nats"]).cumsum() / tokens.cumsum()
        found[f"{SO_FAR}delta_ppl_pct"] = 100 * np.expm1(added)
    for name in frame.columns.intersection(["kl_nats", "null_kl_nats"]):
        found[f"{SO_FAR}{name}"] = (frame[name] * tokens).cumsum() / tokens.cumsum()
    ends = {len(frame) * block // blocks for block in range(1, blocks + 1)} - {0}
    return pd.DataFrame(found)[lambda every: every[f"{SO_FAR}windows"].isin(ends)]


def differences(record: Record) -> dict[str, float]:
    """What a record has against its dense run, in percent: perplexity added (`delta_ppl_pct`), FLOPs saved
    (`executed_flops_saved_pct`, `prompt_executed_flops_saved_pct` …). A dense record has none."""
    if record.dense is None:
        return {}
    names = (field.name for field in dataclasses.fields(record.dense) if field.name.endswith("_flops"))
    saved = {f"{name}_saved_pct": record.flops_saved_pct(name.removesuffix("_flops")) for name in names}
    added = {"delta_ppl_pct": 100 * (record.quality.ppl / record.dense.ppl - 1)}
    return added | {name: pct for name, pct in saved.items() if pct is not None}


def scalars(record: Record) -> dict[str, Any]:
    """The numbers of a record, nested ones joined with slashes."""
    left_out = ("config", "identity", "environment", "files", CHECKSUM)
    entries = flat({key: entry for key, entry in record.content.items() if key not in left_out}, "/")
    return {key: entry for key, entry in entries.items() if isinstance(entry, int | float) and not isinstance(entry, bool)}
