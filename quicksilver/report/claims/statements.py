"""What another paper states without a number, judged by the experiment that measured it: rows of the ledger beside the claims of ours.

An experiment declares `STATEMENTS`, a function that returns them. They have a panel of their own and are not counted among the numbers of
arXiv 2506.22396: the rule of docs/verdicts.md needs a number to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quicksilver.report.artefacts import Artefact
from quicksilver.report.claims.verdicts import Estimate

KIND = "statement"


@dataclass(frozen=True)
class Statement:
    """A statement that a difference is above 0.

    Attributes:
        id: dotted name. paper: where it stands. quote: its words.
        compared: which difference was measured here.
        estimate: the difference; None: it was not measured.
        why: what the interval is over, what else speaks for or against it, or the command that would measure it.
        fails: a condition of the statement does not hold here, whatever the difference; `why` says which.
    """

    id: str
    paper: str
    quote: str
    compared: str
    estimate: Estimate | None
    why: str
    fails: bool = False

    @property
    def verdict(self) -> str:
        """`reproduced` where the interval lies above 0, `not reproduced` below; `undecided` where it holds 0."""
        if self.estimate is None:
            return "not measured"
        if self.fails or self.estimate.high < 0:
            return "not reproduced"
        return "reproduced" if self.estimate.low > 0 else "undecided"


def rows(artefact: Artefact) -> Iterator[dict[str, Any]]:
    """Rows of the ledger: one a statement of the experiment, none where it declares none."""
    stated: Callable[[], list[Statement]] | None = getattr(artefact.experiment, "STATEMENTS", None)
    for one in stated() if stated is not None else ():
        row: dict[str, Any] = {
            "panel": one.paper,
            "section": "",
            "kind": KIND,
            "claim": one.id,
            "place": one.paper,
            "quote": one.quote,
        }
        row |= {
            "reported": "> 0",
            "target_low": 0.0,
            "verdict": one.verdict,
            "why": f"{one.compared}; {one.why}",
            "artefact": artefact.name,
        }
        if one.estimate is not None:
            row |= {"measured": one.estimate.value, "measured_low": one.estimate.low, "measured_high": one.estimate.high}
        yield row
