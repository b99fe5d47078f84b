"""Invariant 1: without a decision nothing changes, bit for bit, and afterwards nothing is left on the model; weights that accelerate keeps on disk stay there."""

from typing import Any

import pytest
import tiny
import torch
from drawing import RandomMLP
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import diagonal, draws, first
from tiny import Batch, Does, Hashed, Never, left_untouched
from torch import nn
from transformers import AutoModelForCausalLM
from two_ranks import modules

from quicksilver.modules.fitted import model_digest
from quicksilver.runtime import ConfigError, apply, architecture_of

MODULES = {"none": [], "silent": [Never()], "attentive": [Never(attention=True, entropy=True)]}
IDS = torch.arange(1, 12)[None]


@pytest.mark.parametrize(("name", "attention"), diagonal(tiny.unlike_first(tiny.MODELS), ("sdpa", "eager"), n=18))
@given(batch=tiny.batches(high=14), which=st.sampled_from(sorted(MODULES)), data=st.data())
@settings(max_examples=draws(10))
def test_without_a_decision_the_logits_are_the_plain_models_bit_for_bit(name, attention, batch, which, data):
    model = tiny.load(name, attention)
    chunks = data.draw(st.none() | tiny.chunkings(batch.width))
    inputs = batch.inputs()
    if chunks is None:
        plain = model(**inputs, use_cache=False).logits
    else:
        plain = torch.cat([out.logits for out in tiny.passes(model, inputs, chunks)], dim=1)
    with left_untouched(model):
        found = tiny.forward(model, batch, MODULES[which], chunks=chunks).logits
    # Under a module real tokens are packed to the left, and what has left a sliding window is masked, which the plain cache forgets: the same
    # numbers in other shapes, so close and not equal.
    forgets = chunks is not None and architecture_of(model).attention_window(tiny.LAYERS - 1)
    if which != "none" and (batch.is_padded or forgets):
        tiny.assert_close(batch.real(found), batch.real(plain))
    else:
        assert torch.equal(found, plain)


HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False}, "sampling": {"do_sample": True, "temperature": 1.3}, "beams": {"do_sample": False, "num_beams": 3},
}  # fmt: skip


@pytest.mark.parametrize(("name", "attention", "how"), diagonal(tiny.unlike_first(tiny.FAMILIES), ("sdpa", "eager"), HOW, n=10))
def test_without_a_decision_generate_gives_the_plain_models_tokens(name: str, attention: str, how: str) -> None:
    model = tiny.load(name, attention)
    batch = Batch(((5, 9, 13, 2, 44, 17, 8, 30, 21), (7, 7, 3, 51), (12, 60, 33, 33, 1, 2)))
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True, **HOW[how]}

    def generate() -> Any:
        torch.manual_seed(3)
        return model.generate(batch.ids, attention_mask=batch.mask, **options)

    plain = generate()
    with left_untouched(model), apply(model, []):
        bare = generate()
    assert torch.equal(bare.sequences, plain.sequences)
    assert all(torch.equal(a, b) for a, b in zip(bare.logits, plain.logits, strict=True))
    with left_untouched(model), apply(model, [Never()]):
        assert torch.equal(generate().sequences, plain.sequences)


def test_generate_keeps_the_kwargs_and_outputs_of_the_model() -> None:
    """Hidden states, attentions and the loss come out as they did."""
    model, asked = tiny.load("llama", "eager"), {"labels": IDS, "output_hidden_states": True, "output_attentions": True}
    plain = model(IDS, **asked)
    with left_untouched(model), apply(model, [Never()]):
        found = model(IDS, **asked)
    ours, theirs = ((one.loss, *one.hidden_states, *one.attentions) for one in (found, plain))
    assert all(map(torch.equal, ours, theirs))
    assert len(ours) == len(theirs) == 2 + 2 * tiny.LAYERS


@pytest.mark.parametrize("name", tiny.thinned(tiny.FAMILIES))
def test_nothing_is_left_on_the_model_when_something_breaks_inside(name: str) -> None:
    model = tiny.load(name)
    plain = model(IDS).logits
    with left_untouched(model):
        with pytest.raises(ZeroDivisionError), apply(model, [Does(lambda view, tokens: 1 // 0, at=2)]):
            model(IDS)
        with pytest.raises(KeyError), apply(model, [Hashed()]):
            raise KeyError
    assert torch.equal(model(IDS).logits, plain)


def refuse(*_: Any) -> None:
    raise ConfigError("no")


def test_options_that_are_refused_leave_the_model_alone() -> None:
    with left_untouched(tiny.load("gpt2")):
        for module, wrong in ((Hashed(), {"execution": "fast"}), (Hashed(), {"decision_layers": [99]}), (Does(bind=refuse), {})):
            with pytest.raises(ConfigError):
                apply(tiny.load("gpt2"), [module], **wrong)
        apply(tiny.load("gpt2"), [Hashed()])  # made and never entered


def test_a_run_goes_on_after_an_inner_one_and_after_a_pass_that_broke_and_may_be_entered_again() -> None:
    model, run = tiny.load("llama"), apply(tiny.load("llama"), [Hashed(0.5)])
    expected = tiny.forward(model, Batch((tuple(range(1, 12)),)), [Hashed(0.5)]).logits
    with left_untouched(model), run:
        with tiny.refused("already under quicksilver.apply"), apply(model, []):
            pass
        assert torch.equal(model(IDS, use_cache=False).logits, expected)
        with pytest.raises(IndexError):
            model(torch.tensor([[tiny.VOCABULARY + 5]]))
        run.reset()
        assert torch.equal(model(IDS, use_cache=False).logits, expected)
        assert len(run.trace.passes) == 1
    run.reset()
    with left_untouched(model), run:
        assert torch.equal(model(IDS, use_cache=False).logits, expected)
    assert len(run.trace.passes) == 1


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


# -- weights that accelerate keeps on disk -----------------------------------------------------------------------------------------
BATCH = Batch((tuple(range(1, 21)), tuple(range(40, 25, -1))))  # of unequal length


def offloaded(model, folder):
    """Every second layer on disk, the first among them, all else in memory."""
    model.save_pretrained(folder)
    layers = {id(layer): ("disk", "cpu")[i % 2] for i, layer in enumerate(architecture_of(model).layers)}
    places, placed = {}, ()
    for name, module in model.named_modules():
        if name.startswith(placed):
            continue
        if id(module) in layers or not any(id(part) in layers for part in module.modules()):
            places[name] = layers.get(id(module), "cpu")
            placed = (*placed, f"{name}.")
    made = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=folder / "weights")
    return made.eval().requires_grad_(False)


@pytest.mark.parametrize("family", first(("gpt2", "llama", "phi3", "gpt_neox", "qwen3", "olmo2")))
def test_offloaded_is_plain(family, tmp_path, subtests):
    plain = tiny.load(family)
    model = offloaded(plain, tmp_path)
    elsewhere = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert len(elsewhere) > 10
    assert model_digest(model) == model_digest(plain)
    # Calls of an offloaded layer go through accelerate, which has a forward of its own in place.
    forwards = [layer.forward for layer in architecture_of(model).layers]
    for (name, ours), theirs in zip(modules(model).items(), modules(plain).values(), strict=True):
        with subtests.test(name):
            found = []
            for each, policies in ((plain, theirs), (model, ours)):
                with apply(each, policies) as run:
                    found.append((each(**BATCH.inputs(), use_cache=True).logits, run.flops, run.kv_bytes))
            assert all(torch.equal(a, b) for a, b in zip(BATCH.real(found[0][0]), BATCH.real(found[1][0]), strict=True))
            assert found[0][1:] == found[1][1:]
            assert found[0][1].executed != found[0][1].dense_nominal or name == "none"
    assert [name for name, parameter in model.named_parameters() if parameter.is_meta] == elsewhere
    assert [layer.forward for layer in architecture_of(model).layers] == forwards


def test_maps_of_mlps_are_there_where_the_first_layer_is_on_disk(tmp_path):
    plain, found = tiny.load("gpt2"), []
    for model in (plain, offloaded(plain, tmp_path)):
        with apply(model, [RandomMLP(protect_first=1, protect_last=3)]) as run:
            found.append((model(**BATCH.inputs()).logits, run.flops))
    assert all(torch.equal(a, b) for a, b in zip(*(BATCH.real(logits) for logits, _ in found), strict=True))
    assert found[0][1] == found[1][1]
