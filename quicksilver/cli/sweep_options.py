"""Keys of a sweep that are no part of a run. Light: a refusal of a single run need not load what a sweep needs."""

from __future__ import annotations

from dataclasses import dataclass

from quicksilver.runtime.errors import ConfigError


@dataclass
class SweepOptions:
    """Keys of a sweep that are no part of a run.

    Attributes:
        name: of the sweep; None: of its experiment, and what only the same runs get.
        limit: make no more than so many runs that have no record; the others wait for the same command without it.
        workers: processes at once, of a launcher that has several; None: as the launcher's yaml says.
        plan: only say what would run and what it would take; of a single run as well.
    """

    name: str | None = None
    limit: int | None = None
    workers: int | None = None
    plan: bool = False

    def check(self) -> None:
        """
        Raises:
            ConfigError: names the value.
        """
        for key in ("limit", "workers"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"{key}={value} is out of range: at least 1.")
