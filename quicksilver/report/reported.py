"""The numbers that the paper reports, from `reported.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

import yaml


@dataclass(frozen=True)
class Reported:
    """What one place of the paper reports.

    Attributes:
        id: dotted name, for example `table11.isolated.halting`.
        place: where it stands.
        quote: the paper's wording, tabs between the cells of a table row.
        values: quantity (unit in its name) to number.
    """

    id: str
    place: str
    quote: str
    values: Mapping[str, float]


@cache
def reported() -> Mapping[str, Reported]:
    """Every entry of `reported.yaml` by id."""
    claims = yaml.safe_load(files(__package__).joinpath("reported.yaml").read_text(encoding="utf-8"))["claims"]
    return MappingProxyType({claim["id"]: Reported(**claim | {"values": MappingProxyType(claim["values"])}) for claim in claims})
