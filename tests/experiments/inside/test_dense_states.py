"""Table bounds from a record: what is printed is what was measured, and the ledger takes the layer where a bound holds least."""

from types import SimpleNamespace

import pytest

from quicksilver.experiments.inside import dense_states
from quicksilver.measure.dense_states import INEQUALITIES, BoundsResult, Held
from quicksilver.measure.strata import Share
from quicksilver.report.artefacts import Outcome, find


def held(inequality: str, layer: int, share: float, constants: str = "measured") -> Held:
    return Held(inequality, constants, layer, 40, Share(share, share - 0.1, share + 0.05), 2.5, 0.5, 40.0)


@pytest.fixture
def record():
    """As much of a record as the table reads."""
    found = [held(name, layer, share) for name in INEQUALITIES for layer, share in ((6, 0.9), (8, 0.5))]
    result = BoundsResult([1.5, 2.0], found + [held(name, 6, 0.1, "one") for name in INEQUALITIES])
    return SimpleNamespace(fingerprint="f" * 20, measured=lambda *asked: {("bounds", BoundsResult): result}[asked])


def test_every_bound_is_a_row_and_what_failed_is_said(record, monkeypatch):
    monkeypatch.setattr(dense_states.provenance, "notes", lambda outcomes: ())
    asked, llama = find("table", "bounds").experiment.rows()
    made = dense_states.table_bounds([Outcome(asked, record), Outcome(llama, reason="it failed")], "table_bounds")
    assert len(made.frame) == 9
    row = made.frame.set_index("key").loc["fusion.8.measured"]
    assert (row["holds_pct"], row["bound_ratio"], row["cases"]) == (50.0, 2.5, 40)
    text = made.text(200)
    assert [said for said in ("reference-llama: it failed.", "from the first: 1.5, 2.0.", "50.0") if said not in text] == []


def test_the_ledger_takes_the_layer_where_a_bound_holds_least(record):
    answers = find("table", "bounds").answered
    estimate = answers["d4.bound.bound_holds_share"][0].of_record(record)
    assert (estimate.value, estimate.low, estimate.high) == (0.5, 0.4, 0.55)
    assert len(answers) == 4
