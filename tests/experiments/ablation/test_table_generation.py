"""The table of generated text is made of generation.parquet: means over prompts, differences to dense paired by prompt."""

import fakes
import numpy as np
import pandas as pd
import pytest

from quicksilver.experiments.ablation import table_generation
from quicksilver.measure.generation import GREEDY, SAMPLED, TEXTS, GenerationResult, Written
from quicksilver.report.artefacts import Outcome
from quicksilver.runs.choices import choices

PROMPTS = 16


def record(results):
    """A run whose greedy texts repeat half as much again as the dense ones, and whose sampled texts are the dense ones."""
    repeated = np.random.default_rng(0).uniform(0.1, 0.3, PROMPTS)
    frames = []
    for way, same in ((GREEDY, False), (SAMPLED, True)):
        measured = {
            **{"same_tokens": 64 if same else range(PROMPTS), "identical": same, "agreement": 1.0 if same else 0.25},
            **{"edit_distance": 0.5, "repeated": repeated * (1 if same else 1.5), "dense_repeated": repeated},
            **{"distinct": 0.9, "dense_distinct": 0.9, "nats": 2.0, "dense_nats": 1.5},
        }
        frames.append(pd.DataFrame({"prompt": range(PROMPTS), "way": way, "text": "a", "dense_text": "b", **measured}))
    frame = pd.concat(frames)
    one = Written(7.5, 0, 0.25, 0.5, 0.3, 0.2, 0.9, 0.9, 2.0, 1.5)
    found = GenerationResult(PROMPTS, 448, 64, one, one, 60, 100)
    dense = fakes.make(results, "dense continuation", "continuation")
    made = fakes.make(
        results, "run", "continuation", per_token=0.01, saved=0.4, measured={"generation": found},
        files={TEXTS: lambda path: frame.to_parquet(path)},
    )  # fmt: skip
    return made, dense


def test_rows_are_those_of_modules_that_there_are():
    rows = table_generation.rows()
    assert {need for row in rows for need in row.needs} <= set(choices("modules"))
    assert {row.panel for row in rows} == {GREEDY, SAMPLED}
    by_key = {key: {row.overrides for row in rows if row.key == key} for key in {row.key for row in rows}}
    assert all(len(overrides) == 1 for overrides in by_key.values())  # both panels share a run


def test_what_is_printed_is_what_was_measured(tmp_path):
    run, dense = record(tmp_path)
    outcomes = [Outcome(row, run, dense) for row in table_generation.rows()[:1]]
    outcomes += [Outcome(row, run, dense) for row in table_generation.rows() if row.panel == SAMPLED and row.key == "quicksilver"]
    made = table_generation.table(outcomes, "table")
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
    failed = table_generation.table([Outcome(table_generation.rows()[0], reason="failed")], "table")
    assert "failed" in failed.text(120)
