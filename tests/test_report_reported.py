"""The paper's numbers, as data, are the paper's numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quicksilver.report.reported import reported

PAPER = Path(__file__).resolve().parents[2] / "shared" / "paper" / "quicksilver.txt"


@pytest.fixture(scope="module")
def paper() -> str:
    if not PAPER.is_file():
        pytest.skip("the paper's text is not beside this clone (../shared/paper/quicksilver.txt)")
    return PAPER.read_text(encoding="utf-8")


@pytest.mark.parametrize("claim", reported().values(), ids=lambda claim: claim.id)
def test_every_value_stands_in_its_quote(claim):
    # "18.1\\%" and "+0.12" and "0%" are numbers; the thresholds of Table 3 are in its quotes too, and no harm.
    numbers = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", claim.quote)}
    assert set(map(float, claim.values.values())) <= numbers


@pytest.mark.parametrize("claim", reported().values(), ids=lambda claim: claim.id)
def test_every_quote_stands_in_the_paper(claim, paper):
    assert claim.quote in paper


def test_table_11_is_complete(paper):
    start = paper.index("Technique\tApplication\tSpeedup (%)")
    printed = [line.split("\t") for line in paper[start : paper.index("\n\n", start)].splitlines()[1:]]
    values = [tuple(float(cell.rstrip("%")) for cell in cells[2:]) for cells in printed]
    ours = [claim for claim in reported().values() if claim.id.startswith("table11.")]
    assert [tuple(claim.values[key] for key in ("speedup_pct", "flops_saved_pct", "delta_ppl")) for claim in ours] == values
    assert [claim.quote.split("\t")[0] for claim in ours] == [cells[0] for cells in printed]


def test_the_four_addends_of_p4_are_its_sum():
    addends = [claim.values["flops_saved_pct"] for claim in reported().values() if claim.id.startswith("p4.isolated.")]
    assert sum(addends) == pytest.approx(66.5)
