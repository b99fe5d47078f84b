"""What a perplexity is made of: windows, nats, protocols; the audit that nothing looked ahead; and KL to dense."""

import math
from functools import partial

import pytest
import tiny
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import diagonal, draws

from quicksilver.baselines.number_formats import BFloat16
from quicksilver.measure import Protocol, score
from quicksilver.measure.audit import audit
from quicksilver.measure.perplexity import DenseLogits, divergence, scored_logits
from quicksilver.runtime import QuickSilverError, apply


def odd(place: int) -> tiny.Does:
    """Tokens halt after the first layer whose own id is odd (0), or the next token's (-1), which it says that it does not read."""
    halt = lambda view, tokens: tokens.halt(tokens.active & (view.input_ids.roll(place, dims=1) % 2 == 1), missing_kv="drop")
    return tiny.Does(halt, at=0)


NAMES = ("all", "continuation")
ALL, CONTINUATION = (Protocol(name, 16, 8, 2) for name in NAMES)
IDS = tiny.ids(5, 16)


# -- scores ----------------------------------------------------------------------------------------------------------------------
@settings(max_examples=draws(12), deadline=None)
@given(
    count=st.integers(1, 5), batch=st.integers(1, 3), tokens=st.integers(2, 20), prompt=st.integers(1, 19), llama=st.booleans(),
    continuation=st.booleans(),
)  # fmt: skip
def test_dense_scores_are_those_of_the_plain_model(count, batch, tokens, prompt, llama, continuation):
    """Under `continuation` too: the cached continuation of a dense model scores as the same positions of one full forward."""
    model = tiny.load("llama") if llama else tiny.load("gpt2")
    prompt = min(prompt, tokens - 1)
    protocol = Protocol("continuation" if continuation else "all", tokens, prompt, batch)
    windows = tiny.ids(count, tokens, seed=tokens)
    table = torch.arange(tiny.VOCABULARY)
    scores = score(model, windows, protocol, table, dense=DenseLogits(model, protocol))
    with torch.no_grad():  # one window at a time, softmax in float64, no batching, no cache
        logits = torch.cat([model(window[None]).logits for window in windows]).double()
    nll = F.cross_entropy(logits[:, :-1].transpose(1, 2), windows[:, 1:], reduction="none")
    expected = nll[:, protocol.first_scored - 1 :].sum(1)  # (W,)
    torch.testing.assert_close(torch.tensor(scores.windows["nll_nats"].tolist()), expected.float(), rtol=1e-5, atol=1e-4)
    assert scores.windows["window"].tolist() == list(range(count))
    assert scores.tokens == count * protocol.scored_tokens
    assert scores.ppl == pytest.approx(math.exp(expected.sum().item() / scores.tokens), rel=1e-4)
    text_bytes = int(table[windows[:, protocol.first_scored :]].sum())
    assert int(scores.windows["bytes"].sum()) == text_bytes
    alone = score(model, windows, protocol)
    assert alone.bits_per_byte is None  # without the lengths in bytes
    # Without modules nothing diverges.
    assert scores.windows["kl_nats"].max() == 0
    assert scores.windows["top1_agreement"].min() == 1
    assert "kl_nats" not in alone.windows
    if text_bytes:
        assert scores.bits_per_byte == pytest.approx(expected.sum().item() / math.log(2) / text_bytes, rel=1e-4)


def test_the_prompt_has_its_own_share_of_the_ledgers_and_leaves_a_cache() -> None:
    protocol = Protocol("continuation", window_tokens=20, prompt_tokens=14, batch_size=4)
    windows = tiny.ids(4, 20)
    dense = score(tiny.load("gpt2"), windows, protocol)
    halted = score(tiny.load("gpt2"), windows, protocol, modules=[odd(0)])
    for scores in (dense, halted):
        share = scores.windows["prompt_executed_flops"] / scores.windows["executed_flops"]
        assert share.between(0.5, 0.95).all()  # 14 of 19 tokens
    assert (halted.windows["prompt_executed_flops"] < dense.windows["prompt_executed_flops"]).all()
    assert 0 < halted.kv_bytes_billed < dense.kv_bytes_billed
    alone = score(tiny.load("gpt2"), windows, Protocol("all", window_tokens=20))
    assert "prompt_executed_flops" not in alone.windows
    assert alone.kv_bytes_billed == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error_that_names_window_and_protocol(name: str, value: float) -> None:
    model = tiny.build("gpt2")
    windows = tiny.ids(4, 8)
    windows[windows == 7] = 8
    windows[2, 5] = 7  # the only window that holds the damaged embedding
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.transformer.wte.weight[7] = value
    protocol = Protocol(name, window_tokens=8, prompt_tokens=4, batch_size=3)
    with tiny.refused(rf"window 2: .*protocol={name}", QuickSilverError):
        score(model, windows, protocol)


@pytest.mark.parametrize("name", NAMES)
def test_a_module_that_reads_the_next_token_is_caught(name: str) -> None:
    audited = partial(audit, tiny.load("gpt2"), tiny.ids(4, 16), Protocol(name, 16, 8, 4), seed=1)
    result = audited([odd(-1)])
    assert result.max_abs_logit_difference > 0.05 * result.max_abs_logit
    assert result.leaks
    assert not audited([]).leaks


def test_nan_behind_other_tokens_is_no_small_movement(monkeypatch):
    passes = []

    def poisoned(*given):
        passes.append(1)
        for logits, tokens in scored_logits(*given):
            yield logits * (math.nan if len(passes) > 1 else 1.0), tokens

    monkeypatch.setattr("quicksilver.measure.perplexity.scored_logits", poisoned)
    with tiny.refused("NaN or infinite", QuickSilverError):
        audit(tiny.load("gpt2"), tiny.ids(4, 16), ALL, [], seed=1)


@given(tokens=st.integers(2, 12), prompt=st.integers(1, 11), name=st.sampled_from(NAMES), seed=st.integers(0, 9))
@settings(max_examples=draws(15), deadline=None)
def test_the_audit_finds_probes_in_windows_of_any_length(tokens: int, prompt: int, name: str, seed: int) -> None:
    protocol = Protocol(name, window_tokens=tokens, prompt_tokens=min(prompt, tokens - 1))
    result = audit(tiny.load("gpt2"), tiny.ids(1, tokens), protocol, seed=seed)
    assert 1 <= result.probes == len(result.positions) <= 3
    assert all(protocol.first_scored - 1 <= probe < tokens - 1 for probe in result.positions)
    assert result.max_abs_logit_difference < 1e-4


def test_it_is_the_divergence_of_the_textbook():
    dense, run = torch.randn(3, 700, 11), torch.randn(3, 700, 11)  # more positions than are taken at a time
    kl, same = divergence(dense, run)
    expected = F.kl_div(run.log_softmax(-1), dense.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(kl, expected.double(), atol=1e-5, rtol=1e-5)
    assert torch.equal(same, dense.argmax(-1) == run.argmax(-1))
    assert kl.min() >= 0
    assert divergence(dense, dense)[0].max() == 0


@pytest.mark.parametrize(("family", "protocol"), diagonal(["gpt2", "llama"], [ALL, CONTINUATION]))
@torch.no_grad()
def test_scoring_compares_the_positions_that_it_scores(family: str, protocol: Protocol):
    model, module = tiny.load(family), tiny.Hashed(halt=0.4)
    scores = score(model, IDS, protocol, modules=[module], dense=DenseLogits(model, protocol))
    dense = model(IDS).logits
    for row in range(len(IDS)):
        with apply(model, [module]):
            run = model(IDS[row : row + 1]).logits
        scored = slice(protocol.first_scored - 1, 15)
        kl, same = divergence(dense[row : row + 1, scored], run[:, scored])
        assert scores.windows["kl_nats"][row] == pytest.approx(kl.mean().item(), rel=1e-4)
        assert scores.windows["top1_agreement"][row] == same.double().mean().item()
    assert scores.windows["kl_nats"].min() > 0


def test_what_is_kept_is_what_is_computed_and_no_more_than_allowed(monkeypatch):
    monkeypatch.setattr("quicksilver.measure.perplexity.free_memory_bytes", lambda: 4 * 2 * 15 * tiny.VOCABULARY * 4)
    model, forwards = tiny.load("gpt2"), []
    for kept_bytes in (0, 2 * 15 * tiny.VOCABULARY * 4, 2**30, None):
        dense = DenseLogits(model, ALL, kept_bytes)
        calls: list[int] = []
        dense._model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        columns = [score(model, IDS, ALL, modules=[tiny.Hashed()], dense=dense).windows["kl_nats"].tolist() for _ in range(2)]
        assert columns[0] == columns[1]
        forwards.append(len(calls))
    assert forwards == [6, 5, 3, 5]  # three batches, twice; the first kept; all kept; a quarter of what is free


@torch.no_grad()
def test_the_dense_model_stays_dense_while_the_run_s_weights_are_exchanged():
    model = tiny.load("llama")
    before, dense = model(IDS).logits, DenseLogits(model, ALL)
    score(model, IDS, ALL, modules=[BFloat16()], dense=dense)
    kept = torch.cat([calls[0] for calls in dense._kept.values()])
    torch.testing.assert_close(kept, before[:, :-1], atol=1e-5, rtol=1e-5)
