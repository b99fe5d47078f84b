"""Mirrors of records. Records stay the source; a mirror may be off, and is imported only when it is on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from quicksilver.harness.record import Record
from quicksilver.runtime.errors import ConfigError, QuickSilverError

if TYPE_CHECKING:
    from quicksilver.harness.config import TrackerConfig


def check_tracker(config: TrackerConfig) -> None:
    """Refuse a tracker that cannot work before anything is run for it.

    Raises:
        ConfigError: its package is not installed.
    """
    if config.name == "wandb" and importlib.util.find_spec("wandb") is None:
        raise ConfigError("tracker=wandb needs the package wandb, which is not installed: pip install wandb, or tracker=none.")


def mirror(record: Record, config: TrackerConfig, results_dir: Path) -> None:
    """Send one finished record to the tracker of the config.

    Raises:
        QuickSilverError: the tracker refuses (no login …); the record itself is finished and stays.
    """
    if config.name == "none":
        return
    import wandb

    try:
        run = wandb.init(
            project=config.project,
            mode=cast("Literal['offline', 'online', 'disabled']", config.mode),
            dir=str(results_dir),
            id=record.fingerprint,
            name=record["label"],
            group=f"{record['model']['name']} | {record['data']['name']} | {record['protocol']['name']}",
            config=dict(record["config"]),
            settings=wandb.Settings(silent=True),
        )
        run.log(scalars(record))
        run.finish()
    except wandb.errors.Error as error:
        raise QuickSilverError(
            f"{record.path} is finished, but W&B refused it: {error}. Log in, or use tracker.mode=offline."
        ) from error


def scalars(record: Record) -> dict[str, Any]:
    """The numbers of a record, nested ones joined with slashes."""
    flat: dict[str, Any] = {}

    def add(entries: Any, prefix: str) -> None:
        for key, value in entries.items():
            if isinstance(value, dict):
                add(value, f"{prefix}{key}/")
            elif isinstance(value, int | float) and not isinstance(value, bool):
                flat[f"{prefix}{key}"] = value

    add({k: v for k, v in record.data.items() if k not in ("config", "environment", "files")}, "")
    return flat
