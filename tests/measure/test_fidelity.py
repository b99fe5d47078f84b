"""KL to dense and top-1 agreement: against the textbook, the same whether kept or computed again, and in a record."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
import torch.nn.functional as F

from quicksilver.baselines.bfloat16 import BFloat16
from quicksilver.measure import Protocol, score
from quicksilver.measure.fidelity import DenseLogits, divergence
from quicksilver.runtime import apply

ALL, CONTINUATION = Protocol("all", 16, 8, 2), Protocol("continuation", 16, 8, 2)


def windows(count: int = 5) -> torch.Tensor:
    return torch.randint(1, tiny.VOCABULARY, (count, 16), generator=torch.Generator().manual_seed(0))


def test_it_is_the_divergence_of_the_textbook():
    dense, run = torch.randn(3, 700, 11), torch.randn(3, 700, 11)  # more positions than are taken at a time
    kl, same = divergence(dense, run)
    expected = F.kl_div(run.log_softmax(-1), dense.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(kl, expected.double(), atol=1e-5, rtol=1e-5)
    assert torch.equal(same, dense.argmax(-1) == run.argmax(-1))
    assert kl.min() >= 0
    assert divergence(dense, dense)[0].max() == 0
    p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5])
    two, _ = divergence(p.log()[None, None], q.log()[None, None])
    assert two.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-7)


@pytest.mark.parametrize("protocol", [ALL, CONTINUATION], ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_scoring_compares_the_positions_that_it_scores(family: str, protocol: Protocol):
    model, ids = tiny.load(family), windows()
    module = tiny.Hashed(halt=0.4)
    scores = score(model, ids, protocol, modules=[module], dense=DenseLogits(model, protocol))
    with torch.no_grad():
        dense = model(ids).logits
    for row in range(len(ids)):
        with torch.no_grad(), apply(model, [module]):
            run = model(ids[row : row + 1]).logits
        scored = slice(protocol.first_scored - 1, 15)
        kl, same = divergence(dense[row : row + 1, scored], run[:, scored])
        assert scores.windows["kl_nats"][row] == pytest.approx(kl.mean().item(), rel=1e-4)
        assert scores.windows["top1_agreement"][row] == same.double().mean().item()
    assert scores.windows["kl_nats"].min() > 0


def test_what_is_kept_is_what_is_computed_and_no_more_than_allowed():
    model, ids = tiny.load("gpt2"), windows()
    forwards = []
    for kept_bytes in (0, 2 * 15 * tiny.VOCABULARY * 4, 2**30):
        dense = DenseLogits(model, ALL, kept_bytes)
        calls: list[int] = []
        dense._model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        columns = [score(model, ids, ALL, modules=[tiny.Hashed()], dense=dense).windows["kl_nats"].tolist() for _ in range(2)]
        assert columns[0] == columns[1]
        forwards.append(len(calls))
    assert forwards == [6, 5, 3]  # three batches, twice; the first kept; all kept


def test_the_dense_model_stays_dense_while_the_run_s_weights_are_exchanged():
    model, ids = tiny.load("llama"), windows()
    with torch.no_grad():
        before = model(ids).logits
    dense = DenseLogits(model, ALL)
    score(model, ids, ALL, modules=[BFloat16()], dense=dense)
    kept = torch.cat([calls[0] for calls in dense._kept.values()])
    torch.testing.assert_close(kept, before[:, :-1], atol=1e-5, rtol=1e-5)


def test_without_modules_nothing_diverges():
    model = tiny.load("gpt2")
    scores = score(model, windows(), CONTINUATION, dense=DenseLogits(model, CONTINUATION))
    assert scores.windows["kl_nats"].max() == 0
    assert scores.windows["top1_agreement"].min() == 1
    assert "kl_nats" not in score(model, windows(), CONTINUATION).windows
