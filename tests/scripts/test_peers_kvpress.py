"""Peers by their own code: the loop that runs beside kvpress scores as this package does."""

import copy

import peers_kvpress
import pytest
import tiny
import torch

from quicksilver.measure.perplexity import Protocol, score


def test_dense_windows_are_scored_as_here_and_other_weights_against_them():
    model, windows = tiny.load("llama"), torch.arange(1, 49).reshape(2, 24)
    found = peers_kvpress.scored(model, windows, 16, None)
    here = score(model, windows, Protocol("continuation", 24, 16)).windows["nll_nats"]
    assert found["nll_nats"] == pytest.approx(here.tolist(), rel=1e-5)
    assert found["top1_agreement"] == [1, 1]
    other = copy.deepcopy(model)
    assert peers_kvpress.scored(model, windows, 16, None, other)["kl_nats"] == pytest.approx([0, 0], abs=1e-6)
    torch.nn.init.zeros_(other.model.layers[0].mlp.down_proj.weight)
    found = peers_kvpress.scored(model, windows, 16, None, other)
    assert found["nll_nats"] == peers_kvpress.scored(other, windows, 16, None)["nll_nats"]
    assert min(found["kl_nats"]) > 0


def test_methods_here_keep_the_share_that_is_asked_for():
    for _, modules in peers_kvpress.of_this_package(448, 0.2):
        (one,) = modules
        kept = getattr(one, "keep", None) or getattr(one, "window", 0) + getattr(one, "sinks", 0) or one.heavy + one.recent
        assert kept == 90


def test_a_share_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        peers_kvpress.main(["--kept", "0.2", "2"])
    assert "--kept 2: give shares above 0 and below 1" in capsys.readouterr().err
