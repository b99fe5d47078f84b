"""The ceiling of early exit: who leaves costs least, what is paid is in the ledger, and no later token is read."""

from __future__ import annotations

import pytest
import tiny
import torch

from quicksilver.fitting.oracle_exit import OracleExit, share_that_saves
from quicksilver.runtime import MISSING_KV, ConfigError, apply, architecture_of

N = 40
BATCH = tiny.Batch((tuple(range(1, N + 1)), tuple(range(3, N + 3))))


def text(windows: int = 12, tokens: int = N) -> torch.Tensor:
    return torch.randint(1, tiny.VOCABULARY, (windows, tokens), generator=torch.Generator().manual_seed(3))


def fitted(name: str, save: float = 0.1) -> OracleExit:
    module = OracleExit(save=save, lookahead=True)
    module.fit(tiny.load(name), text(), batch_size=4)
    return module


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_it_saves_what_was_asked_for_and_loses_less_than_the_same_tokens_without_a_head(name: str) -> None:
    model, module = tiny.load(name), fitted(name)
    rows = [tiny.Batch((tuple(row),)) for row in text().tolist()]
    executed = [sum(tiny.forward(model, row, modules).run.flops.executed for row in rows) for modules in ([module], [])]
    # The threshold is the quantile that saves so much on this very text.
    assert 100 * (1 - executed[0] / executed[1]) == pytest.approx(10, abs=1.5)
    batch = tiny.Batch(tuple(tuple(row) for row in text().tolist()))
    dense, run = tiny.forward(model, batch, []), tiny.forward(model, batch, [module])
    (one,) = run.trace.passes
    left = one.halt_layer == module.exit.before - 1
    assert not left[:, :4].any()
    assert float(left.float().mean()) == pytest.approx(module.exit.share * (N - 4) / N, abs=0.02)
    assert (one.halted_kv[left] == MISSING_KV.index("predict")).all()

    def kl(logits: torch.Tensor) -> torch.Tensor:
        p = dense.logits.log_softmax(-1)
        return (p.exp() * (p - logits.log_softmax(-1))).sum(-1)

    exact = module.exit.head
    module._exit = type(module.exit)(module.exit.before, torch.zeros_like(exact), 1e9, 0.0, 0.0)
    without = tiny.forward(model, batch, [module]).logits
    assert float(kl(run.logits)[left].mean()) < float(kl(without)[left].mean())
    assert torch.equal(tiny.forward(model, batch, []).logits, dense.logits)  # nothing is left on the model


def test_what_comes_after_a_token_moves_neither_its_decision_nor_its_logits() -> None:
    model, module = tiny.load("llama"), fitted("llama")
    ids = BATCH.ids
    changed = ids.clone()
    changed[:, 20:] = 7
    with torch.no_grad(), apply(model, [module]) as run:
        one = model(ids).logits
        two = model(changed).logits
        before, after = run.trace.passes
    assert torch.equal(before.halt_layer[:, :20], after.halt_layer[:, :20])
    torch.testing.assert_close(one[:, :20], two[:, :20], rtol=1e-4, atol=1e-5)


def test_masked_and_compact_agree() -> None:
    model, module = tiny.load("llama"), fitted("llama")
    outcomes = [tiny.forward(model, BATCH, [module], execution=execution).logits for execution in ("compact", "masked")]
    tiny.assert_close(*outcomes)


def test_bad_input_is_refused() -> None:
    model = tiny.load("gpt2")
    with pytest.raises(ConfigError, match="save=0.95: not even all tokens leaving before layer 1 saves so much"):
        OracleExit(save=0.95).fit(model, text())
    with pytest.raises(ConfigError, match="are too few to fit"):
        OracleExit().fit(model, text(2))
    shares = [share_that_saves(architecture_of(model), 2, saved, N) for saved in (0.0, 0.05, 0.1, 0.99)]
    assert shares[0] == 0
    assert shares[3] is None
    assert 0 < shares[1] < shares[2] <= 1
