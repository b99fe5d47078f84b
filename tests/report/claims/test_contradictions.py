"""The paper set against itself: what is computed is right, and could have come out otherwise."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from quicksilver.report.claims import reported as module
from quicksilver.report.claims.reported import Reported, contradictions, reported
from quicksilver.report.table import read

ROOT = Path(__file__).resolve().parents[3]
ROWS = {row.id: row for row in contradictions()}


def test_every_numbered_conflict_has_a_row():
    assert {row.conflict for row in ROWS.values()} - {None} == set(range(1, 28))
    assert len(ROWS) == len(contradictions())


def test_every_row_says_what_it_found_and_what_is_done_instead():
    for row in ROWS.values():
        assert row.says, row.id
        assert row.ours, row.id
        finding = row.finding()
        if row.check:
            assert finding.text, row.id
            assert row.places, row.id
            assert row.agreement == ("consistent" if finding.holds else "contradiction"), row.id
        else:
            assert finding is None, row.id
            assert row.agreement == "choice", row.id


def test_the_committed_ledger_has_what_is_computed():
    written = {str(row["claim"]): row for row in read(ROOT / "results" / "claims.json").entries if row["kind"] == "conflict"}
    assert written.keys() == {f"conflict.{name}" for name in ROWS}
    for name, row in ROWS.items():
        assert written[f"conflict.{name}"]["verdict"] == row.agreement, name
        if row.check:
            assert row.finding().text in written[f"conflict.{name}"]["why"], name
    assert ROWS["superadditive"].finding().text.endswith("δ = -19.3 points")


def changed(entry: str, quote: str | None = None, **values: float) -> Reported:
    claim = reported()[entry]
    return dataclasses.replace(claim, quote=quote or claim.quote, values=dict(claim.values) | values)


@pytest.mark.parametrize(
    ("holds", "finding"),
    [
        (True, module.same(a=1.0, b=(0.9, 1.1))),
        (False, module.same(a=1.2, b=(0.9, 1.1))),
        (True, module.at_least(6, 6)),
        (True, module.superadditive(70, a=30, b=30)),
        (False, module.beyond_pairs(59, a=30, b=30, c=1)),
        (True, module.beta_saves(0.5, 26.4)),
        (True, module.joint_beyond_alone(47, 39)),
        (True, module.model_size(774, 36, 1280, 20)),
        (False, module.model_size(774, 36, 1280, 12)),
        (True, module.entropy_units(1.0, 0.6931471805599453)),
        (True, module.inside_grid(0.3, 0.6, (0.2, 0.4), (0.5, 0.7))),
        (True, module.on_the_scale((0, 1), a=0.4)),
        (True, module.energy_of_a_token(1e-6, 0.4, 121, 512)),
        (False, module.emissions_arithmetic(0.51, 0.40, 27.5, 0.29, 43.1)),
        (True, module.steepest_is_last(1.0, a=0.9, b=0.5)),
        (True, module.quantized_baseline(0.7, 40, 15)),
        (True, module.milliseconds_are_percent(18, 121, 15)),
        (True, module.within_bound((None, 0.2), a=0.19)),
        (True, module.saves_at_most_what_it_merges((12, 18), 15)),
        (True, module.weighted_share((80, None), a=changed("table2.determiners"))),
        (True, module.table5_widths(0.3, 0.6, reducing=changed("table5.bits.reducing"))),
        (False, module.table7_arithmetic(changed("table7.total"), a=changed("table7.attention"))),
        (False, module.table7_arithmetic(changed("table7.attention", speedup_pct=41.0), a=changed("table7.attention"))),
        (
            True,
            module.table5_kv(
                a=changed("table5.kv.is", '"is": KV diff 0.18 < 0.45 -> Skip'),
                b=changed("table5.kv.long", '"long": KV diff 17.38 > 0.30 -> Write'),
            ),
        ),
        (
            False,
            module.table5_kv(
                a=changed("table5.kv.is", '"is": KV diff 18.18 > 0.45 -> Skip'),
                b=changed("table5.kv.long", '"long": KV diff 17.38 > 0.30 -> Write'),
            ),
        ),
        (True, module.decay_and_halted_share((0.01, 0.2), 15, a=changed("table2.content_words"))),
    ],
)
def test_a_check_can_come_out_either_way(holds, finding):
    assert finding.holds == holds
