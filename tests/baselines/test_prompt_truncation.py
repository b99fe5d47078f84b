"""A prompt that is cut before the first layer is the dense model's shorter prompt: logits, text, cache and operations."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quicksilver.baselines.prompt_truncation import PromptTruncation
from quicksilver.measure.perplexity import Protocol, score
from quicksilver.measure.quality import by_chance
from quicksilver.runtime import ConfigError, apply
from quicksilver.runtime.trace import Trace

IDS = torch.arange(1, 49).reshape(2, 24)


@pytest.fixture(scope="module", params=tiny.UNALIKE)
def model(request):
    return tiny.load(request.param)


def generated(model, ids, **options):
    return model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, **options)[:, ids.shape[1] :]


def test_it_is_the_dense_models_shorter_prompt(model):
    with torch.no_grad():
        short = model(IDS[:, -14:], use_cache=True, logits_to_keep=1)
        after = model(IDS[:, :5], past_key_values=short.past_key_values)
        with apply(model, []) as run:
            model(IDS[:, -14:], logits_to_keep=1)
            wanted = run.flops
        with apply(model, [PromptTruncation(keep=14)]) as run:
            cut = model(IDS, use_cache=True, logits_to_keep=1)
            assert run.flops == wanted
            continued = model(IDS[:, :5], past_key_values=cut.past_key_values)
    torch.testing.assert_close(cut.logits, short.logits)
    torch.testing.assert_close(continued.logits, after.logits)
    assert cut.past_key_values.get_seq_length() == short.past_key_values.get_seq_length() == 14 + 5


def test_states_stand_in_the_columns_of_the_prompt_as_it_was_given(model):
    with torch.no_grad():
        short = model(IDS[:, -14:]).logits
        with apply(model, [PromptTruncation(keep=14)]):
            whole = model(IDS).logits
    assert whole[:, :10].isnan().all()
    torch.testing.assert_close(whole[:, 10:], short)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_is_cut_as_if_it_were_alone(model, side):
    mask = torch.ones_like(IDS)
    mask[1, slice(0, 9) if side == "left" else slice(15, None)] = 0
    alone = IDS[1:, 9:] if side == "left" else IDS[1:, :15]
    with torch.no_grad(), apply(model, [PromptTruncation(keep=0.5)]):
        logits = model(IDS, attention_mask=mask).logits[1][mask[1].bool()]
        torch.testing.assert_close(logits, model(alone).logits[0], equal_nan=True)
        if side == "left":
            assert torch.equal(generated(model, IDS, attention_mask=mask)[1:], generated(model, alone))


def test_it_writes_what_the_shorter_prompt_writes(model):
    wanted = generated(model, IDS[:, -14:])
    beams = generated(model, IDS[:, -14:], num_beams=2)
    with apply(model, [PromptTruncation(keep=14)]):
        assert torch.equal(generated(model, IDS), wanted)
        assert torch.equal(generated(model, IDS, num_beams=2), beams)
    assert torch.equal(generated(model, IDS[:, -14:]), wanted)  # nothing is left behind


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    keep=st.floats(0.01, 1.0) | st.integers(1, 24),
    which=st.sampled_from(["last", "ends", "random"]),
)
def test_as_many_are_kept_as_asked_for_and_always_the_last(lengths, keep, which):
    valid = torch.zeros(len(lengths), 24, dtype=torch.bool)
    for row, length in enumerate(lengths):
        valid[row, 24 - length :] = True
    module = PromptTruncation(keep=keep, which=which)
    if isinstance(keep, int) and keep > max(lengths):
        with pytest.raises(ConfigError, match=f"keep={keep} is more than the prompt's {max(lengths)} tokens"):
            module.kept(valid, None)
        return
    kept = module.kept(valid, None)
    wanted = [min(keep, n) if isinstance(keep, int) else max(1, int(n * keep + 0.5)) for n in lengths]
    assert kept.sum(1).tolist() == wanted
    assert not (kept & ~valid).any()
    if which != "ends" or min(wanted) > 1:
        assert kept[:, -1].all()
    if which == "ends":
        first = valid.long().argmax(1)
        assert all(kept[row, first[row]] for row, count in enumerate(wanted) if count > 1)


def test_its_null_keeps_as_many_at_random(model):
    kind, (null,) = by_chance([PromptTruncation()], Trace(2, []), seed=7)
    assert (kind, null) == ("random tokens", PromptTruncation(which="random", seed=7))
    scores = [score(model, IDS, Protocol("continuation", 24, 20), modules=[one]) for one in (PromptTruncation(), null)]
    assert scores[0].windows["executed_flops"].tolist() == scores[1].windows["executed_flops"].tolist()
    assert scores[0].nll_nats != scores[1].nll_nats


def test_speculative_decoding_is_refused(model):
    with apply(model, [PromptTruncation(keep=14)]), pytest.raises(ConfigError, match="cuts the prompt, and speculative decoding"):
        generated(model, IDS[:1], prompt_lookup_num_tokens=2)
