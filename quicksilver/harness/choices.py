"""Where conf/ is, and what may be chosen from it."""

from __future__ import annotations

from collections.abc import Sequence
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


def files_stamp() -> int:
    """Changes with any yaml file of conf/."""
    stats = ((path, path.stat()) for path in config_dir().rglob("*.yaml"))
    return hash(frozenset((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in stats))
