"""What another paper states: judged by the interval of a difference, in the ledger beside our paper's claims and not counted among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quicksilver.report.artefacts import Artefact, find
from quicksilver.report.claims.ledger import STATEMENT, Source, Statement, ledger
from quicksilver.report.claims.reported import Estimate


@pytest.mark.parametrize(
    ("ends", "fails", "verdict"),
    [
        ((0.01, 0.2), False, "reproduced"),
        ((-0.01, 0.2), False, "undecided"),
        ((-0.2, -0.01), False, "not reproduced"),
        ((0.01, 0.2), True, "not reproduced"),
        (None, False, "not measured"),
    ],
)
def test_a_verdict_is_where_the_interval_lies(ends, fails, verdict):
    estimate = None if ends is None else Estimate(sum(ends) / 2, *ends)
    assert Statement("a.b", "a paper", "words", "this minus that", estimate, "why", fails).verdict == verdict


def test_the_ledger_has_the_statements_with_the_numbers_of_the_study():
    artefact = find("table", "token_halting_claims")
    table = ledger([Source(artefact, [], "make it")])
    found = table.frame[table.frame["kind"] == STATEMENT].set_index("claim")
    assert set(found["panel"]) == {"arXiv 2303.05078 (Ye et al., token halting)"}
    judged = found[found["measured"].notna()]
    assert len(judged) >= 5
    for one in judged.itertuples():
        expected = "reproduced" if one.measured_low > 0 else "not reproduced" if one.measured_high < 0 else "undecided"
        assert one.verdict == expected or (one.verdict == "not reproduced" and "time" in one.why)
        assert one.measured_low <= one.measured <= one.measured_high
    # The table says the same.
    printed = artefact.build([], artefact.name).frame
    assert printed["verdict"].tolist() == found["verdict"].tolist()
    claims = table.frame[table.frame["kind"] == "claim"]
    assert f"{claims['claim'].nunique()} numbers in {len(claims)} rows" in table.title
    assert "token_halting.input_dependent" not in set(claims["claim"])


def test_an_experiment_that_states_nothing_adds_no_row():
    artefact = Artefact("table", ("98",), Path("none.py"))
    artefact.__dict__["experiment"] = find("table", "detection").experiment
    assert STATEMENT not in set(ledger([Source(artefact, [], "")]).frame["kind"])
