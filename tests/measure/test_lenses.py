"""What a lens reads: the model's own states, the loss and entropy that counting by hand gives, and a correlation with an interval."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from quicksilver.measure.bench import Bench
from quicksilver.measure.lenses import LOGIT_LENS, Lenses, correlation
from quicksilver.measure.measurement import Setting
from quicksilver.measure.perplexity import Protocol
from quicksilver.runtime import ConfigError, architecture_of

IDS = torch.randint(1, tiny.VOCABULARY, (8, 14), generator=torch.Generator().manual_seed(3))


class Windows:
    ids = IDS


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_layer_is_read_as_counting_by_hand_gives(family: str) -> None:
    model = tiny.load(family)
    found = Lenses(windows=8).run(Bench(model, Windows(), Protocol("all", 14)))  # type: ignore[arg-type]
    assert [one.layer for one in found.readings] == list(range(1, tiny.LAYERS))
    assert {one.lens for one in found.readings} == {LOGIT_LENS}
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


def test_a_correlation_of_something_with_itself_is_one_and_of_a_constant_none() -> None:
    values = np.random.default_rng(0).normal(size=(9, 20))
    assert correlation(values, 3 * values + 1) == pytest.approx((1.0, 1.0, 1.0))
    assert correlation(np.ones((9, 20)), values) == (0.0, 0.0, 0.0)
    middle, low, high = correlation(values, np.random.default_rng(1).normal(size=(9, 20)))
    assert low < 0 < high
    assert low <= middle <= high


def test_too_few_windows_for_an_interval_are_refused() -> None:
    with pytest.raises(ConfigError, match="windows"):
        Lenses(windows=2).check(Setting("all", 14, 0, "compact"))
