"""Lenses and bounds: the model's own states, what counting by hand gives, and what does not hold fails."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from thinning import first

from quicksilver.measure.bench import Bench
from quicksilver.measure.dense_states import BY_ENTROPY, INEQUALITIES, ROUNDED, Bounds, Lenses, _one, _Window, correlation
from quicksilver.measure.measurement import decoded, encoded
from quicksilver.measure.perplexity import Protocol
from quicksilver.runtime import architecture_of
from quicksilver.runtime.quantized.codes import quantize_dequantize

IDS = tiny.ids(8, 14, seed=3)
FAMILIES = first(["gpt2", "llama"])
WINDOWS = SimpleNamespace(ids=IDS)
ROW, FOLLOWED = IDS[0], 4


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_read_as_counting_by_hand_gives(family: str) -> None:
    model = tiny.load(family)
    found = Lenses(windows=8).run(Bench(model, WINDOWS, Protocol("all", 14)))
    assert [one.layer for one in found.readings] == list(range(1, tiny.LAYERS))
    assert {one.lens for one in found.readings} == {"logit lens"}
    assert "none with this model" in str(found.no_tuned_because)
    assert found.uniform_nats == pytest.approx(np.log(tiny.VOCABULARY))
    arch = architecture_of(model)
    with torch.no_grad():
        output = model(IDS, use_cache=False, output_hidden_states=True)
        log_p = arch.logits(output.hidden_states[2][:, :-1]).log_softmax(-1)
        own = output.logits[:, :-1].log_softmax(-1)
    loss = -log_p.gather(2, IDS[:, 1:, None]).mean()
    entropy, end = (-(one.exp() * one).sum(-1) for one in (log_p, own))
    second = found.readings[1]
    assert (second.nats, second.entropy_nats) == pytest.approx((float(loss), float(entropy.mean())), rel=1e-4)
    assert second.correlation == pytest.approx(np.corrcoef(entropy.flatten(), end.flatten())[0, 1], abs=1e-4)
    assert second.correlation_low <= second.correlation <= second.correlation_high
    assert found.final_entropy_nats == pytest.approx(float(end.mean()), rel=1e-4)

    assert [one.layer for one in found.roundings] == [layer for layer in range(1, tiny.LAYERS) for _ in (*ROUNDED, BY_ENTROPY)]
    states = output.hidden_states[2][:, :-1]
    by_width = {bits: (states - quantize_dequantize(states, bits, 32)).norm(dim=-1) for bits in ROUNDED}
    rounded = {one.bits: one for one in found.roundings if one.layer == 2}
    for bits, lost in by_width.items():
        assert rounded[bits].error_l2 == pytest.approx(float(lost.mean()), rel=1e-4)
        r = np.corrcoef(entropy.flatten(), lost.flatten())[0, 1]
        assert rounded[bits].correlation == pytest.approx(r, abs=1e-3)
    assert rounded[8].error_l2 < rounded[BY_ENTROPY].error_l2 < rounded[2].error_l2
    assert not Lenses(windows=8, rounding=False).run(Bench(model, WINDOWS, Protocol("all", 14))).roundings

    negative = [("logit lens", -0.5), ("tuned lens", 0.3), ("logit lens", -0.4)]
    readings = [replace(second, lens=lens, correlation=r) for lens, r in negative]
    said = "logit lens r -0.40 after layer 2, tuned lens r 0.30 after layer 2"
    assert replace(found, readings=readings).line() == f"entropy against the end: {said}"


def test_a_correlation_of_something_with_itself_is_one_and_of_a_constant_none() -> None:
    values = np.random.default_rng(0).normal(size=(9, 20))
    assert correlation(values, 3 * values + 1) == pytest.approx((1.0, 1.0, 1.0))
    assert correlation(np.ones((9, 20)), values) == (0.0, 0.0, 0.0)
    middle, low, high = correlation(values, np.random.default_rng(1).normal(size=(9, 20)))
    assert low < 0 < high
    assert low <= middle <= high


@pytest.fixture(params=FAMILIES)
def window(request) -> _Window:
    model = tiny.load(request.param)
    return _Window(model, architecture_of(model), ROW, FOLLOWED)


def test_states_are_the_models_and_a_layer_with_nothing_changed_gives_the_next_ones(window):
    hidden = window.arch.model(ROW[None], use_cache=False, output_hidden_states=True).hidden_states
    assert len(window.states) == tiny.LAYERS + 1
    for layer in range(tiny.LAYERS):
        torch.testing.assert_close(window.states[layer], hidden[layer][0], atol=1e-5, rtol=1e-5)
        own = window.states[layer][window.followed]
        torch.testing.assert_close(window.layer(layer, own), window.states[layer + 1][window.followed], atol=1e-5, rtol=1e-5)


def test_a_gain_is_the_largest_singular_value_of_a_tokens_own_jacobian(window):
    at = window.states[1][window.followed]
    jacobian = torch.autograd.functional.jacobian(lambda own: window.layer(1, own), at)  # (R, D, R, D)
    each = torch.stack([torch.linalg.matrix_norm(jacobian[r, :, r], ord=2) for r in range(FOLLOWED)])
    assert float(window.gain(1, 40)) == pytest.approx(float(each.max()), rel=0.02)
    assert float(window.gain(1, 1)) <= float(each.max()) * 1.01  # fewer iterations find less, never more


def test_the_sides_are_what_counting_by_hand_gives(window):
    error, unit = window.halting(1)
    states = window.states
    assert len(error) == len(ROW) - 1
    assert float(error[4]) == pytest.approx(float((states[-1][5] - states[2][5]).norm()))
    assert float(unit[4]) == pytest.approx(float((states[2][5] - states[1][5]).norm()))
    error, unit = window.fusion(1)
    t = int(window.followed[2])
    changed = states[2].clone()
    changed[t] = (states[2][t] + states[2][t - 1]) / 2
    with torch.no_grad():
        by_hand = window.calls[2](changed[None])[0, t]
    assert float(error[2]) == pytest.approx(float((states[3][t] - by_hand).norm()), rel=1e-4)
    assert float(unit[2]) == pytest.approx(float((states[2][t] - states[2][t - 1]).norm()) / 2)
    _, apart = window.fusion_to_the_end(1)
    torch.testing.assert_close(apart, 2 * unit)


def test_a_bound_holds_where_it_is_larger():
    error, unit = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 1.0, 1.0, 1.0])
    found = _one("halting", "measured", 4, [(error[:2], unit[:2]), (error[2:], unit[2:])], 3.0)
    assert (found.layer, found.cases, found.holds.value) == (5, 4, 0.75)
    assert found.bound_ratio == pytest.approx((3 / 2 + 1) / 2)
    assert _one("halting", "one", 4, [(error, unit)], 0.5).holds.value == 0


def test_every_inequality_is_tested_at_every_depth():
    measurement = Bounds(windows=2, tokens=12, followed=3, iterations=2, depths=[0.4, 0.6])
    found = measurement.run(Bench(tiny.load("gpt2"), WINDOWS, Protocol("all", 14)))
    assert len(found.gains) == tiny.LAYERS
    assert min(found.gains) > 0
    assert {(one.inequality, one.constants) for one in found.held} == {*product(INEQUALITIES, ("measured", "one"))}
    measured = found.of("fusion", "measured", found.held[0].layer)
    one = found.of("fusion", "one", measured.layer)
    assert measured.bound_ratio == pytest.approx(one.bound_ratio * found.gains[measured.layer], rel=1e-4)
    assert decoded(type(found), encoded(found)) == found
    with tiny.refused("was not tested at layer 99: there are layers"):
        found.of("halting", "one", 99)
