"""The paper's best chance: the search is over settings that exist, and a winner that the search no longer finds is named."""

import pandas as pd
import pytest

from quicksilver.experiments.sweeps import table_fair_trial as fair_trial
from quicksilver.runs.config import compose
from quicksilver.runs.parts import build_modules


def test_every_setting_composes_and_no_two_are_the_same_run() -> None:
    jobs = [row.overrides for row in fair_trial.rows()]
    assert len(set(jobs)) == len(jobs)
    for mechanism in fair_trial.MECHANISMS:
        name, overrides = next(iter(fair_trial.settings(mechanism).items()))
        assert build_modules(compose([*fair_trial.SEARCHED, *overrides]).modules), name


@pytest.mark.parametrize("model", fair_trial.WINNERS)
def test_each_model_is_tested_with_its_own_frozen_winners(model: str) -> None:
    tested = {row.key: row for row in fair_trial.rows() if row.panel == fair_trial.TEST}
    for (mechanism, budget), name in fair_trial.WINNERS[model].items():
        assert budget in fair_trial.BUDGETS_PCT
        words = tested[f"{mechanism}.{budget}"].words([f"model={model}"])
        assert words == (f"model={model}", *fair_trial.TESTED, *fair_trial.settings(mechanism)[name])
    assert tested["halting.15"].words(["model=gpt2-large"])[1:] == tested["halting.15"].overrides


@pytest.mark.parametrize(("kl", "saved", "place"), [((0.3, 0.1, 0.2), (30, 4, 20), 2), ((0.3, None, 0.2), (1, 50, 2), None)])
def test_the_winner_has_the_least_kl_of_those_that_save_enough(kl, saved, place) -> None:
    rows = pd.DataFrame(
        {"panel": "search", "section": "halting", "kl_nats": pd.Series(kl, dtype=float), "prompt_executed_flops_saved_pct": saved}
    )
    assert fair_trial._winners(rows).get(("halting", 5)) == place


def test_the_page_says_what_the_best_of_all_settings_costs_where_that_one_was_frozen_and_tested() -> None:
    rows = pd.DataFrame(
        [
            ("search", "halting", "a", "A", 0.02, 6.0, None, None),
            ("search", "fusion", "b", "B", 0.01, 16.0, None, None),
            ("test", "Token halting", "halting.5", "A", 0.03, 7.0, 9.0, True),
            ("test", "Token fusion", "fusion.5", "B", 0.03, 17.0, 4.0, True),
            ("test", "Token fusion", "fusion.15", "C", 0.03, 18.0, 5.0, False),
        ],
        columns=["panel", "section", "key", "technique", "kl_nats", "prompt_executed_flops_saved_pct", "delta_ppl_pct", "still_wins"],
    )  # fmt: skip
    rows["delta_ppl_pct_low"], rows["delta_ppl_pct_high"] = rows["delta_ppl_pct"] - 1, rows["delta_ppl_pct"] + 1
    (said,) = fair_trial._verdict(rows)
    assert "for 5% Token fusion (B), which on the test text saves 17.0% and costs +4.0% [+3.0, +5.0] perplexity" in said
    assert "for 15% Token fusion (B), which was not frozen and so not tested" in said
    assert "25%" not in said  # no setting saves as much
    assert fair_trial._verdict(rows[rows["panel"] == "test"]) == ()
