"""The table of generated text is made of generation.parquet: means over prompts, differences to dense paired by prompt."""

import fakes
import pytest

from quicksilver.experiments.ablation import prompts
from quicksilver.measure.generation import GREEDY, SAMPLED
from quicksilver.report.artefacts import Outcome
from quicksilver.runs.choices import choices


def test_rows_are_those_of_modules_that_there_are():
    rows = prompts.generation_rows()
    assert {need for row in rows for need in row.needs} <= set(choices("modules"))
    assert {row.panel for row in rows} == set(prompts.WAYS)
    of = {panel: {row.key: row.overrides for row in rows if row.panel == panel} for panel in prompts.WAYS}
    assert of[GREEDY] == of[SAMPLED]  # which share a run


def test_what_is_printed_is_what_was_measured(tmp_path):
    run = fakes.make(tmp_path, "run", "continuation", per_token=0.01, saved=0.4, **fakes.generated())
    dense = fakes.make(tmp_path, "dense continuation", "continuation")
    rows = prompts.generation_rows()
    rows = [rows[0], next(row for row in rows if (row.panel, row.key) == (SAMPLED, "quicksilver"))]
    made = prompts.table_generation([Outcome(row, run, dense) for row in rows], "table")
    greedy, sampled = (made.frame[made.frame["panel"] == way].iloc[0] for way in (GREEDY, SAMPLED))
    assert greedy["same_tokens"] == pytest.approx(7.5)
    assert greedy["same_tokens_low"] < 7.5 < greedy["same_tokens_high"]
    assert greedy["flops_saved_pct"] == pytest.approx(40)
    assert greedy["repeated_more_low"] > 0
    assert (sampled["repeated_more"], sampled["repeated_more_low"], sampled["repeated_more_high"]) == (0, 0, 0)
    assert greedy["nats_more"] == pytest.approx(0.5)
    text = made.text(160)
    assert "0 of 16 to the end" in text
    assert "16 of 16 to the end" in text
    assert "16 prompts of 448 tokens, 64 new tokens" in " ".join(text.split())
    failed = prompts.table_generation([Outcome(rows[0], reason="failed")], "table")
    assert "failed" in failed.text(120)


def test_agreement_is_compared_with_the_first_row_prompt_by_prompt(tmp_path):
    dense = fakes.make(tmp_path, "dense continuation", "continuation")
    rows = [row for row in prompts.generation_rows() if row.panel == GREEDY][:2]
    made = [
        fakes.make(tmp_path, row.key, "continuation", **fakes.generated(agreement))
        for row, agreement in zip(rows, (0.25, 0.5), strict=True)
    ]
    table = prompts.table_generation([Outcome(row, run, dense) for row, run in zip(rows, made, strict=True)], "table")
    assert table.frame["agreement_less"].isna().tolist() == [True, False]
    assert table.frame.loc[1, ["agreement_less", "agreement_less_low", "agreement_less_high"]].tolist() == [25, 25, 25]
    assert "+25.0 [+25.0 +25.0]" in table.text(200)
