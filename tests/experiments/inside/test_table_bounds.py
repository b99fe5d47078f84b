"""Table bounds from a record: what is printed is what was measured, and the ledger takes the layer where a bound holds least."""

from __future__ import annotations

import pytest

from quicksilver.experiments.inside import table_bounds
from quicksilver.measure.bounds import INEQUALITIES, BoundsResult, Held
from quicksilver.measure.strata import Share
from quicksilver.report.artefacts import Outcome, find


class Record:
    """As much of a record as the table reads."""

    fingerprint = "f" * 20

    def __init__(self, found: BoundsResult) -> None:
        self.found = found

    def measured(self, name: str, kind: type) -> BoundsResult:
        assert (name, kind) == ("bounds", BoundsResult)
        return self.found


def held(inequality: str, layer: int, share: float, constants: str = "measured") -> Held:
    return Held(inequality, constants, layer, 40, Share(share, share - 0.1, share + 0.05), 2.5, 0.5, 40.0)


@pytest.fixture
def outcomes(monkeypatch) -> list[Outcome]:
    monkeypatch.setattr(table_bounds.provenance, "notes", lambda outcomes: ())
    found = [held(name, layer, share) for name in INEQUALITIES for layer, share in ((6, 0.9), (8, 0.5))]
    found += [held(name, 6, 0.1, "one") for name in INEQUALITIES]
    asked, llama = table_bounds.rows()
    return [Outcome(asked, Record(BoundsResult([1.5, 2.0], found))), Outcome(llama, reason="it failed")]  # type: ignore[arg-type]


def test_every_bound_is_a_row_and_what_failed_is_said(outcomes):
    made = table_bounds.table(outcomes, "table_bounds")
    assert len(made.frame) == 9
    row = made.frame.set_index("key").loc["fusion.8.measured"]
    assert (row["holds_pct"], row["bound_ratio"], row["cases"]) == (50.0, 2.5, 40)
    text = made.text(200)
    assert "reference-llama: it failed." in text
    assert "L_j of the layers, from the first: 1.5, 2.0." in text
    assert "50.0" in text


def test_the_ledger_takes_the_layer_where_a_bound_holds_least(outcomes):
    (answer, llama) = table_bounds.ANSWERS["d4.bound.bound_holds_share"]
    assert answer.of is not None
    estimate = answer.of({table_bounds.KEY: outcomes[0]})
    assert estimate is not None
    assert (estimate.value, estimate.low, estimate.high) == (0.5, 0.4, 0.55)
    assert llama.of is not None
    assert llama.of({table_bounds.KEY: outcomes[1]}) is None
    assert len(table_bounds.ANSWERS) == 4
    assert find("table", "bounds").experiment.rows()
