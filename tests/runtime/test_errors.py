"""What cannot be done is refused in one message that names the value and the remedy."""

import math
from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from tiny import Batch, Does, HaltAll, Hashed
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GPT2Model, StaticCache

import quicksilver
from quicksilver import runtime
from quicksilver.runtime import RuntimeModule, apply
from quicksilver.runtime.architecture import LlamaArchitecture, architecture_of, families
from quicksilver.runtime.errors import ConfigError, QuickSilverError, UnsupportedModelError

BATCH = Batch((tuple(range(1, 13)),))
SMALL: dict[str, Any] = dict(
    vocab_size=61, hidden_size=16, n_embd=16, num_hidden_layers=1, n_layer=1, num_attention_heads=2, n_head=2, intermediate_size=16,
    num_key_value_heads=2, rotary_dim=4, num_local_experts=2, bos_token_id=0, eos_token_id=0, pad_token_id=0,
)  # fmt: skip


def of_type(model_type: str) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL)).eval()


def with_attention(name: str, attention: str) -> Any:
    model = tiny.build(name)
    model.config._attn_implementation = attention
    return model


class Decides(RuntimeModule):
    def decide(self, *_: Any) -> None: ...


MODELS = {
    r"'bert'.*gpt2.*gpt_neox.*llama.*mistral.*qwen2.*qwen3.*smollm3.*docs/.*\.md": lambda: of_type("bert"),
    "'gptj' has no adapter: .*rotary factors itself.*There are: .*llama": lambda: of_type("gptj"),
    "'bloom' has no adapter: .*ALiBi.*There are: .*llama": lambda: of_type("bloom"),
    "'mixtral' has no adapter: .*experts.*There are: .*llama": lambda: of_type("mixtral"),
    "'sdpa' leaves out the cap.*attn_implementation='eager'": lambda: with_attention("gemma2", "sdpa"),
    "'flex_attention'.*'sdpa' or 'eager'": lambda: with_attention("llama", "flex_attention"),
    r"SimpleNamespace holds a model: apply to that, apply\(pipe\.model, …\)": lambda: SimpleNamespace(model=tiny.load("gpt2")),
    r"no decoder layer \(num_hidden_layers=0\)": lambda: tiny.build("llama", num_hidden_layers=0),
    "GPT2Model has no output head.*AutoModelForCausalLM": lambda: GPT2Model(tiny.load("gpt2").config).eval(),
    "'Linear'": lambda: torch.nn.Linear(2, 2).eval(),
    r"training mode.*model\.eval\(\)": lambda: tiny.build("gpt2").train(),
}


@pytest.mark.parametrize("says", MODELS)
def test_a_model_that_cannot_be_served_says_why(says: str) -> None:
    with tiny.refused(says, ConfigError if "training" in says else UnsupportedModelError):
        apply(MODELS[says](), [Hashed()])


NO_LIST: list[Any] = [None, HaltAll(1), "halting", {"halting": {}}, 3, HaltAll, torch.nn.Linear(1, 1)]
NO_MODULE: list[Any] = ["halting", None, 3, HaltAll, {}, torch.nn.Linear(1, 1), [HaltAll(1)]]
NO_LAYERS: list[Any] = ["12", b"12", 3, True, 1.5, [], (), set(), [1.5], [True], ["1"], [None], [-1], [99], [math.nan], object()]


@pytest.mark.parametrize(("argument", "value", "says"), [
    ("execution", "compct", "'compct'.*compact, masked, decide"), ("decision_layers", [5], r"\[5\].*0 to 4"),
    ("decision_layers", [0, 2], r"\[0, 2\]: Does would never be asked, it acts after layer 1"),
    ("modules", [Decides()], "Decides is no kind of runtime module: derive it from one or more of TokenPolicy, Merge"),
    *(("modules", value, "") for value in NO_LIST), *(("modules", [value], "") for value in NO_MODULE),
    *(("decision_layers", value, "") for value in NO_LAYERS), *(("execution", value, "") for value in ["", None, 3, "COMPACT", ["compact"]]),
])  # fmt: skip
def test_an_argument_that_makes_no_sense_is_refused_in_one_line(argument: str, value: Any, says: str) -> None:
    arguments = {"modules": [Does(at=1)], "execution": "compact", "decision_layers": [1, 2]}
    apply(tiny.load("gpt2"), **arguments)
    with tiny.refused(says):
        apply(tiny.load("gpt2"), **arguments | {argument: value})


def test_a_subclass_of_a_family_is_found_by_its_own_model_types() -> None:
    """A file of one's own needs a few lines where a family is near another; the family it comes from stays what it is."""

    class Mine(LlamaArchitecture):
        family = "mine"
        model_types = ("mine",)

    class Plain(Mine):
        """Names no model type: it serves none."""

    model = tiny.build("llama")
    assert type(architecture_of(model)) is LlamaArchitecture
    model.config.model_type = "mine"
    assert type(architecture_of(model)) is Mine
    assert Plain not in families().values()
    assert LlamaArchitecture in families()["olmo2"].__mro__


def test_a_mask_that_is_not_a_padding_mask_is_refused_with_its_shape() -> None:
    model = tiny.load("llama")
    with apply(model, [Hashed()]):
        for shape in ((1, 1, 12, 12), (1, 9)):
            with tiny.refused(rf"\(B, 12\) padding mask.*\({', '.join(map(str, shape))}\)"):
                model(BATCH.ids, attention_mask=torch.ones(shape, dtype=torch.bool).tril())
        cache = model(BATCH.ids, use_cache=True).past_key_values
        with tiny.refused(r"\(B, 13\) padding mask over cached and new tokens.*\(1, 1\)"):
            model(BATCH.ids[:, :1], past_key_values=cache, attention_mask=torch.ones(1, 1))


@pytest.mark.parametrize("execution", ["compact", "masked"])
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_ragged_cache_is_not_continued_outside(name: str, execution: str) -> None:
    model = tiny.load(name)
    with apply(model, [HaltAll(1)], execution=execution):
        cache = model(BATCH.ids, use_cache=True).past_key_values
    with pytest.raises(UnsupportedModelError, match=r"quicksilver\.apply.*inside the context, or start a new cache"):
        model(BATCH.ids[:, :1], past_key_values=cache)
    with pytest.raises(UnsupportedModelError, match="inside the context"), apply(model, []):
        model(BATCH.ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("execution", ["compact", "masked", "decide"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-mixed", "gemma3"])
def test_a_static_cache_and_one_of_another_execution_are_refused(name: str, execution: Any) -> None:
    model, options = tiny.load(name), {"attention_mask": BATCH.mask, "max_new_tokens": 3, "cache_implementation": "static"}
    with apply(model, [Hashed()], execution="masked" if execution == "compact" else "compact"):
        other = model(BATCH.ids, use_cache=True).past_key_values
    with apply(model, [Hashed()], execution=execution):
        with pytest.raises(QuickSilverError, match=r"[sS]tatic.*DynamicCache"):
            model(BATCH.ids, past_key_values=StaticCache(config=model.config, max_cache_len=32))
        with pytest.raises(QuickSilverError, match=r"[sS]tatic.*DynamicCache"):
            model.generate(BATCH.ids, **options)
        if execution != "decide":
            with pytest.raises(UnsupportedModelError, match="another execution"):
                model(BATCH.ids[:, :1], past_key_values=other)


def test_an_offloaded_cache_is_refused() -> None:
    model, cache = tiny.load("llama"), DynamicCache()
    cache.offloading = True  # what DynamicCache(offloading=True) says, where a GPU gives it the stream that it asks for
    with apply(model, [Hashed()]), pytest.raises(UnsupportedModelError, match=r"offloaded.*leave out offloading=True"):
        model(BATCH.ids, past_key_values=cache)


def test_a_sliding_window_that_has_dropped_tokens_is_not_adopted() -> None:
    model = tiny.load("mistral")
    cache = DynamicCache(config=model.config)
    model(BATCH.ids, past_key_values=cache)  # 12 tokens, a window of 7
    with (
        pytest.raises(UnsupportedModelError, match=r"already dropped tokens.*start inside the context"),
        apply(model, [Hashed()]),
    ):
        model(BATCH.ids[:, :1], past_key_values=cache)


FROM_2 = SimpleNamespace(source_layer=2)
LATE = "reads states entering layer 3, and tokens halt after layer 1: halt them after layer 2"


@pytest.mark.parametrize(("call", "words"), [
    (lambda v, t: t.halt(t.active.float()), r"halt\(mask\) at layer \d was given float32 .* Give bool "),
    (lambda v, t: t.halt(t.active[:, 1:]), r"halt\(mask\) .* one entry a token of the view"),
    (lambda v, t: t.skip_kv(t.active[0]), r"skip_kv\(mask\)"),
    (lambda v, t: t.set_bits(t.active.long(), 8), r"set_bits\(mask\) .* given int64"),
    (lambda v, t: t.fuse(t.active), r"fuse\(into\) .* given bool"),
    (lambda v, t: t.fuse(t.active.long(), t.active[:, :1].float()), r"fuse\(weight\)"),
    (lambda v, t: t.halt(t.active, missing_kv="keep"), "missing_kv='keep' is not one of drop, project, copy, zero"),
    (lambda v, t: t.halt(t.active, resume_layers=6), "resume_layers=6 must lie between 0 and the model's 5 layers"),
    (lambda v, t: t.halt(t.active, resume_layers=-1), "resume_layers=-1"),
    (lambda v, t: v.attention_received(), r"not kept at layer 1.*wants_attention\(1\)"),
    (lambda v, t: v.attention_received(reduce="sum"), "'sum'.*'mean' or 'max'"),
    (lambda v, t: t.halt(t.active & (v.slots > 0), missing_kv="copy"), "copies_kv"),
    (lambda v, t: t.halt(t.active, missing_kv="predict"), "needs a translator"),
    (lambda v, t: t.halt(t.active, missing_kv="drop", translator=FROM_2), "takes no translator"),
    (lambda v, t: t.halt(t.active, missing_kv="predict", translator=SimpleNamespace(source_layer=3)), LATE),
    (lambda v, t: [t.halt(v.slots == i, missing_kv="predict", translator=each) for i, each in enumerate((FROM_2, copy(FROM_2)))], "Two translators"),
    (lambda v, t: t.map_mlp(v.slots[:, :3] > 0, {}), "map_mlp.*was given bool"),
    (lambda v, t: [t.map_mlp(t.active, {}) for _ in range(2)], "Two modules replace MLPs"),
    (lambda v, t: t.set_bits(t.active, 3), "bits=3 is not one of 2, 4, 8, 16"),
    (lambda v, t: t.fuse(v.slots.clamp(min=3) - 3), "a group must go into its own last active token"),
    (lambda v, t: t.fuse(v.slots, 0.0 * v.slots), "weights must be positive"),
    (lambda v, t: v.after.mul_(2), r"Does.decide changed the states of layer 1: .* write into neither"),
    (lambda v, t: v.before[:, 0].zero_(), "changed the states"),
    (lambda v, t: setattr(v, "after", v.before), "changed the states"),
])  # fmt: skip
@pytest.mark.parametrize("execution", ["compact", "masked"])
def test_a_verb_that_makes_no_sense_is_refused_by_value(call: Any, words: str, execution: str) -> None:
    with tiny.refused(words):
        tiny.forward(tiny.load("llama"), BATCH, [Does(call, at=1)], execution=execution)


def test_a_layer_called_on_its_own_or_a_model_called_with_nothing_is_refused() -> None:
    model = tiny.load("llama")
    with tiny.refused("call the model", QuickSilverError), apply(model, [Hashed()]):
        model.model.layers[0](torch.zeros(1, 3, tiny.WIDTH))
    with pytest.raises((ConfigError, ValueError), match="input_ids"), apply(model, [Hashed()]):
        model()


def test_public_names_are_there() -> None:
    assert quicksilver.apply is apply
    assert [name for name in runtime.__all__ if not hasattr(runtime, name)] == []
    with pytest.raises(AttributeError, match="aply"):
        _ = quicksilver.aply
