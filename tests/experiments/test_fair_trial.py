"""The paper's best chance: the search is over settings that exist, and a winner that the search no longer finds is named."""

from __future__ import annotations

import pandas as pd
import pytest

from quicksilver.experiments.sweeps import fair_trial
from quicksilver.harness.config import compose
from quicksilver.harness.parts import build_modules


def test_every_setting_composes_and_no_two_are_the_same_run() -> None:
    jobs = [row.overrides for row in fair_trial.rows()]
    assert len(set(jobs)) == len(jobs)
    for mechanism in fair_trial.MECHANISMS:
        name, overrides = next(iter(fair_trial.settings(mechanism).items()))
        assert build_modules(compose([*fair_trial.SEARCHED, *overrides]).modules), name


def test_the_frozen_winners_are_settings_of_the_search() -> None:
    assert fair_trial.WINNERS
    for (mechanism, budget), name in fair_trial.WINNERS.items():
        assert name in fair_trial.settings(mechanism)
        assert budget in fair_trial.BUDGETS_PCT


@pytest.mark.parametrize(("kl", "saved", "place"), [((0.3, 0.1, 0.2), (30, 4, 20), 2), ((0.3, None, 0.2), (1, 50, 2), None)])
def test_the_winner_has_the_least_kl_of_those_that_save_enough(kl, saved, place) -> None:
    rows = pd.DataFrame(
        {"panel": "search", "section": "halting", "kl_nats": pd.Series(kl, dtype=float), "prompt_executed_flops_saved_pct": saved}
    )
    assert fair_trial.winner(rows, "halting", 5) == place
