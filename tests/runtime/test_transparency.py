"""Invariant 1: without a decision nothing changes, bit for bit, and afterwards nothing is left on the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import diagonal, draws
from tiny import Batch, Hashed, Never
from torch import nn
from transformers import PreTrainedModel

from quicksilver.runtime import ConfigError, LayerView, RuntimeModule, TokenPolicy, TokenState, apply, architecture_of

MODULES = st.sampled_from(["none", "silent", "attentive"])


def modules_of(name: str) -> list[RuntimeModule]:
    return {"none": [], "silent": [Never()], "attentive": [Never(attention=True, entropy=True)]}[name]


def fingerprint(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """All that the runtime might leave behind: attributes, hooks, an instance's own forward, the config."""
    found: list[tuple[str, Any]] = [("config", model.config.to_dict())]
    for name, module in model.named_modules():
        own = {k: v for k, v in module.__dict__.items() if k not in ("_parameters", "_buffers", "_modules")}
        found += [(f"{name}.{k}", dict(v) if isinstance(v, dict) else v) for k, v in own.items()]
    return found


@contextmanager
def left_untouched(model: PreTrainedModel) -> Iterator[None]:
    before = fingerprint(model)
    yield
    assert fingerprint(model) == before


@pytest.mark.parametrize(("name", "attention"), tiny.with_attention(tiny.MODELS, all_sdpa=True))
@given(data=st.data())
@settings(max_examples=draws(5))
@torch.no_grad()
def test_without_a_decision_the_logits_are_the_plain_models_bit_for_bit(name: str, attention: str, data: st.DataObject) -> None:
    model = tiny.load(name, attention)
    batch = data.draw(tiny.batches(high=14, padded=False))
    chunks = data.draw(st.none() | tiny.chunkings(batch.width))
    which = data.draw(MODULES)
    inputs = batch.inputs()
    if chunks is None:
        plain = model(**inputs, use_cache=False).logits
    else:
        plain = torch.cat([out.logits for out in tiny.passes(model, inputs, chunks)], dim=1)
    with left_untouched(model):
        found = tiny.forward(model, batch, modules_of(which), chunks=chunks)
    if which != "none" and chunks is not None and architecture_of(model).attention_window(tiny.LAYERS - 1):
        # The plain cache of a sliding window forgets what has left it, the ragged one masks it: other shapes, other rounding.
        torch.testing.assert_close(found.logits, plain, atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(found.logits, plain)


@pytest.mark.parametrize(("name", "attention"), tiny.with_attention(tiny.MODELS))
@given(data=st.data())
@settings(max_examples=draws(3))
@torch.no_grad()
def test_without_a_module_a_left_padded_batch_is_the_plain_models_bit_for_bit(name: str, attention: str, data: st.DataObject):
    model = tiny.load(name, attention)
    batch = data.draw(tiny.batches(high=12, padded=True))
    chunks = data.draw(tiny.chunkings(batch.width))
    inputs = batch.inputs()
    plain = model(**inputs, use_cache=False).logits
    plain_cached = [out.logits for out in tiny.passes(model, inputs, chunks)]
    with left_untouched(model):
        assert torch.equal(tiny.forward(model, batch, []).logits, plain)
        assert torch.equal(tiny.forward(model, batch, [], chunks=chunks).logits, torch.cat(plain_cached, dim=1))
    # A module that never decides packs the real tokens to the left: the same numbers in other shapes, so close and not equal.
    tiny.assert_close(batch.real(tiny.forward(model, batch, [Never()]).logits), batch.real(plain))


HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3},
    "beams": {"do_sample": False, "num_beams": 3},
}


@pytest.mark.parametrize(("name", "attention", "how"), diagonal(tiny.unlike_first(tiny.FAMILIES), ("sdpa", "eager"), HOW, n=10))
@torch.no_grad()
def test_without_a_decision_generate_gives_the_plain_models_tokens(name: str, attention: str, how: str) -> None:
    model = tiny.load(name, attention)
    batch = Batch(((5, 9, 13, 2, 44, 17, 8, 30, 21), (7, 7, 3, 51), (12, 60, 33, 33, 1, 2)))
    prompt = {"input_ids": batch.ids, "attention_mask": batch.mask}

    def generate() -> Any:
        torch.manual_seed(3)
        return model.generate(
            **prompt, max_new_tokens=5, min_new_tokens=5, return_dict_in_generate=True, output_logits=True, **HOW[how]
        )

    plain = generate()
    with left_untouched(model), apply(model, []):
        bare = generate()
    assert torch.equal(bare.sequences, plain.sequences)
    assert all(torch.equal(a, b) for a, b in zip(bare.logits, plain.logits, strict=True))
    with left_untouched(model), apply(model, [Never()]):
        assert torch.equal(generate().sequences, plain.sequences)


def test_generate_keeps_the_kwargs_and_outputs_of_the_model() -> None:
    """Hidden states, attentions and the loss come out as they did."""
    model, ids = tiny.load("llama", "eager"), torch.arange(1, 11)[None]
    with torch.no_grad():
        plain = model(ids, labels=ids, output_hidden_states=True, output_attentions=True)
        with left_untouched(model), apply(model, [Never()]):
            found = model(ids, labels=ids, output_hidden_states=True, output_attentions=True)
    assert torch.equal(found.loss, plain.loss)
    assert all(torch.equal(a, b) for a, b in zip(found.hidden_states, plain.hidden_states, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found.attentions, plain.attentions, strict=True))


class Refuses(TokenPolicy):
    def decide(self, view: LayerView, tokens: TokenState) -> None:
        if view.layer == 2:
            raise ZeroDivisionError("a module broke")


@pytest.mark.parametrize("name", tiny.thinned(tiny.FAMILIES))
@torch.no_grad()
def test_nothing_is_left_on_the_model_when_something_breaks_inside(name: str) -> None:
    model, ids = tiny.load(name), torch.arange(1, 9)[None]
    plain = model(ids).logits
    with left_untouched(model):
        with pytest.raises(ZeroDivisionError), apply(model, [Refuses()]):
            model(ids)
        with pytest.raises(KeyError), apply(model, [Hashed()]):
            raise KeyError
    assert torch.equal(model(ids).logits, plain)


@torch.no_grad()
def test_a_module_that_broke_once_may_be_called_again_inside_the_same_block() -> None:
    model, batch = tiny.load("llama"), Batch((tuple(range(1, 9)),))
    policy = Hashed(0.4)
    expected = tiny.forward(model, batch, [policy])
    with apply(model, [policy]) as run:
        with pytest.raises(IndexError):
            model(torch.tensor([[tiny.VOCABULARY + 5]]))
        run.reset()
        assert torch.equal(model(batch.ids, use_cache=False).logits, expected.logits)
        assert len(run.trace.passes) == 1


def test_options_that_are_refused_leave_the_model_alone() -> None:
    class Picky(Never):
        def bind(self, architecture: Any) -> None:
            raise ConfigError("no")

    with left_untouched(tiny.load("gpt2")):
        for module, wrong in ((Hashed(), {"execution": "fast"}), (Hashed(), {"decision_layers": [99]}), (Picky(), {})):
            with pytest.raises(ConfigError):
                apply(tiny.load("gpt2"), [module], **wrong)
        apply(tiny.load("gpt2"), [Hashed()])  # made and never entered


@torch.no_grad()
def test_an_inner_apply_is_refused_and_the_outer_one_goes_on() -> None:
    model, batch = tiny.load("llama"), Batch((tuple(range(1, 12)),))
    expected = tiny.forward(model, batch, [Hashed(0.5)]).logits
    with left_untouched(model), apply(model, [Hashed(0.5)]):
        with pytest.raises(ConfigError, match="already under quicksilver.apply"), apply(model, []):
            pass
        assert torch.equal(model(batch.ids, use_cache=False).logits, expected)


@torch.no_grad()
def test_a_run_may_be_entered_again() -> None:
    model, batch = tiny.load("llama"), Batch((tuple(range(1, 12)),))
    run = apply(model, [Hashed(0.5)])
    with run:
        first = model(batch.ids).logits
    run.reset()
    with left_untouched(model), run:
        assert torch.equal(model(batch.ids).logits, first)
    assert len(run.trace.passes) == 1


@torch.no_grad()
def test_accelerates_own_hooks_survive() -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Noted(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs["hidden_states"].shape[1] if "hidden_states" in kwargs else args[0].shape[1])
            return args, kwargs

    seen: list[int] = []
    model, ids = tiny.build("llama"), torch.arange(1, 13)[None]
    for layer in architecture_of(model).layers:
        hooks.add_hook_to_module(layer, Noted())
    with left_untouched(model), apply(model, [Hashed(0.5, missing_kv="drop")]) as run:
        model(ids)
    assert seen == run.trace.active_counts().tolist()
    assert seen[-1] < seen[0]
    seen.clear()
    model(ids)
    assert seen == [12] * tiny.LAYERS
