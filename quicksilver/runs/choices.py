"""Where conf/ is, and what may be chosen from it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from quicksilver.runtime.errors import ConfigError

GROUPS = ("model", "dataset", "modules", "protocol", "measure", "tracker", "experiment")


def config_dir() -> Path:
    """The folder of yaml files: `quicksilver/conf` in an installed package, `conf` beside the package in a clone.

    Raises:
        ConfigError: neither is there; the installation is incomplete.
    """
    package = Path(__file__).resolve().parents[1]
    places = (package / "conf", package.parent / "conf")
    found = next((place for place in places if (place / "run.yaml").is_file()), None)
    if found is None:
        raise ConfigError(
            f"the configuration is missing: neither {places[0]} nor {places[1]} has a run.yaml; install quicksilver again."
        )
    return found


def choices(group: str, extra_dirs: Sequence[Path] = ()) -> list[str]:
    """Names that may follow `group=`, sorted: the yaml files of that group."""
    return sorted({path.stem for root in (config_dir(), *extra_dirs) for path in (root / group).glob("*.yaml")})


def files_stamp(extra_dirs: Sequence[Path] = ()) -> int:
    """Changes with any yaml file of conf/ and of the user's own folders."""
    return hash(frozenset(stat for root in (config_dir(), *extra_dirs) for stat in _files(str(root))))


def _files(folder: str) -> Iterator[tuple[str, int, int]]:
    """Path, time of change in ns and bytes of every yaml below a folder; none where there is no such folder."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir():
            yield from _files(entry.path)
        elif entry.name.endswith((".yaml", ".yml")):
            stat = entry.stat()
            yield entry.path, stat.st_mtime_ns, stat.st_size
