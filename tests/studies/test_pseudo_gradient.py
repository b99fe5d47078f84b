"""The table of the pseudo-gradient: its columns are what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_encoder import MODEL, states

from quicksilver.runtime import ConfigError
from quicksilver.studies.token_halting.frames import accuracy, effects


def test_effects_are_those_of_turning_one_decision_round():
    given, decisions = states(1, 9), torch.ones(1, 9)
    decisions[0, 4] = 0.0

    def loss() -> torch.Tensor:
        return MODEL(given).square().mean()

    found = effects(MODEL, loss, 1, decisions, [2, 4, 7])
    assert found.kept.tolist() == [True, False, True]
    # The derivative of the equivalent forward is that of its soft mask; the parts of it are less, and together the whole.
    np.testing.assert_allclose(found.estimated["both"], found.estimated["finite difference"], rtol=0.05, atol=1e-4)
    parts = found.estimated["states"] + found.estimated["attention"]
    assert np.abs(found.estimated["states"] - found.estimated["both"]).max() > 1e-4
    assert np.isfinite(parts).all()
    assert np.abs(found.true).min() > 0
    with pytest.raises(ConfigError, match="no token"):
        effects(MODEL, loss, 1, decisions, [])


def test_accuracy_of_estimates_that_are_plain():
    true = np.array([1.0, -2.0, 3.0, 1e-6])
    right = accuracy(true, true)
    assert (right.correlation, right.same_sign, right.relative_error, right.decisions) == (pytest.approx(1), 1, 0, 4)
    wrong = accuracy(true, -true)
    assert (wrong.correlation, wrong.same_sign, wrong.relative_error) == (pytest.approx(-1), 0, pytest.approx(2))
