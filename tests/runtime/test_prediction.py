"""What a family's adapter says of its layers; and K/V that are predicted for tokens that stop: by whom, when, how often, at what cost."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import tiny
import torch
from tiny import Batch, Does

from quicksilver.modules import AdaptiveQuantization
from quicksilver.runtime import Architecture, LayerView, TokenState, apply, architecture_of
from quicksilver.runtime.translation import PredictedKV

AT = 1  # tokens halt after this layer: the source layer is the next one
BATCH = Batch((tuple(range(1, 15)), tuple(range(40, 26, -1))))


@dataclass
class Constant:
    """Predicts known K and V: by layer and state, so that a mixed-up token or layer shows."""

    architecture: Architecture
    source_layer: int = AT + 1
    flops_per_token: int = 1000
    asked: list[torch.Size] = field(default_factory=list)
    made: list[PredictedKV] = field(default_factory=list)

    def translate(self, hidden: torch.Tensor) -> PredictedKV:
        self.asked.append(hidden.shape)
        of = self.architecture
        states = hidden[:, None, :, : of.head_dim].expand(-1, of.n_kv_heads, -1, -1)
        layers = range(self.source_layer + 1, of.n_layers)
        keys, values = (torch.stack(parts) for parts in ([states * i for i in layers], [states / i for i in layers]))
        self.made.append(PredictedKV(layers[0], keys, values))
        return self.made[-1]


def every_second(translator: Constant | None, missing_kv: str = "predict", count_per_row: int | None = None) -> Does:
    """Every second token halts after layer `AT`."""

    def halt(view: LayerView, tokens: TokenState) -> None:
        chosen = (view.slots % 2 == 1) & tokens.active
        tokens.halt(chosen, missing_kv=missing_kv, translator=translator, count_per_row=count_per_row)

    return Does(halt, at=AT, priority=10, copies_kv=missing_kv == "copy")


@torch.no_grad()
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("execution", ["compact", "masked"])
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_the_cache_holds_what_was_projected_then_what_was_predicted(name: str, execution: str, counted: bool) -> None:
    model = tiny.load(name)
    arch = architecture_of(model)
    states = model(**BATCH.inputs(), use_cache=False, output_hidden_states=True).hidden_states  # entering each layer
    frozen = states[AT + 1]  # nobody has halted before: these are the dense model's
    translator = Constant(arch)
    with apply(model, [every_second(translator, count_per_row=7 if counted else None)], execution=execution) as run:
        cache = model(**BATCH.inputs(), use_cache=True).past_key_values
    assert len(translator.asked) == 1
    assert translator.asked[0][1] == (7 if execution == "compact" else 14)
    assert int(run.trace.passes[0].halted_kv.max()) == 4
    kinds = model.config.layer_types if name == "gemma3" else [None] * arch.n_layers  # whose rotary factors are its own
    positions = torch.arange(BATCH.width)[None]
    rotaries = [None if name == "gpt2" else model.base_model.rotary_emb(frozen, positions, *filter(None, [of])) for of in kinds]
    for layer, store in enumerate(cache.layers):
        keys, values = (part[:, :, 1::2] for part in store.padded())
        if layer <= AT + 1:  # exact: the state that was frozen enters this layer
            wanted = tuple(part[:, :, 1::2] for part in arch.project_kv(layer, states[layer], rotaries[layer]))
        else:
            all_keys, all_values = translator.translate(frozen)[layer]
            wanted = arch.rotate_keys(layer, all_keys, rotaries[layer])[:, :, 1::2], all_values[:, :, 1::2]
        torch.testing.assert_close((keys, values), wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_keys_rotated_for_all_layers_at_once_are_those_of_each_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.load(name)
    found, at_once = [], []
    for small in (0, 2**18):
        monkeypatch.setattr("quicksilver.runtime.translation._SMALL", small)
        translator = Constant(architecture_of(model))
        with apply(model, [every_second(translator)]):
            found.append(model(**BATCH.inputs()).logits)
        at_once.append(len(translator.made[0]._rotated))
    assert torch.equal(*found)
    assert at_once == [0, 0 if name == "gpt2" else 2 if name == "gemma3" else 1]  # Gemma 3 has factors of two kinds of layer


@torch.no_grad()
def test_its_work_is_in_the_ledgers() -> None:
    model = tiny.load("llama")
    arch = architecture_of(model)
    found = {}
    for mode in ("predict", "copy", "drop"):
        module = every_second(Constant(arch) if mode == "predict" else None, mode)
        found[mode] = tiny.forward(model, BATCH, [module]).run.flops
    projected = 2 * arch.kv_params_per_layer
    assert found["predict"].executed - found["copy"].executed == 14 * (1000 + projected)
    assert found["predict"].nominal - found["copy"].nominal == 14 * (1000 + projected)
    assert found["drop"].executed < found["copy"].executed


@torch.no_grad()
def test_predicted_entries_are_packed_at_their_width() -> None:
    model = tiny.load("llama")
    arch = architecture_of(model)
    modules = [every_second(Constant(arch)), AdaptiveQuantization(bits=8, depth=0.2)]
    logits = []
    for execution in ("compact", "masked"):
        with apply(model, modules, execution=execution) as run:
            output = model(**BATCH.inputs(), use_cache=True)
            logits += [output.logits, model(BATCH.ids[:, :1], past_key_values=output.past_key_values).logits]
        if execution == "compact":
            assert run.kv_bytes.billed == run.kv_bytes.resident
            assert output.past_key_values.layers[-1].is_packed
    torch.testing.assert_close(logits[:2], logits[2:], atol=1e-4, rtol=1e-4)


def test_what_makes_no_sense_is_refused() -> None:
    one, two = (Constant(architecture_of(tiny.load("llama"))) for _ in range(2))
    late = "reads states entering layer 3, and tokens halt after layer 1: halt them after layer 2"
    mistakes: dict[str, list[tuple[str, Constant | None]]] = {
        "needs a translator": [("predict", None)], "takes no translator": [("drop", one)], late: [("predict", replace(one, source_layer=3))],
        "Two translators": [("predict", one), ("predict", two)],
    }  # fmt: skip
    for message, halts in mistakes.items():

        def halt(view: LayerView, tokens: TokenState, halts: list[Any] = halts) -> None:
            for i, (mode, translator) in enumerate(halts):
                tokens.halt(view.slots % 5 == i, missing_kv=mode, translator=translator)

        with tiny.refused(message):
            tiny.forward(tiny.load("llama"), BATCH, [Does(halt, at=AT)])


@pytest.fixture(params=tiny.FAMILIES)
def arch(request: pytest.FixtureRequest):
    return architecture_of(tiny.load(request.param))


def test_rotating_unrotated_keys_gives_the_layers_own(arch) -> None:
    hidden, moved = torch.randn(2, 6, arch.width), False
    for layer in range(arch.n_layers):
        kind = [arch.config.layer_types[layer]] if arch.config.model_type == "gemma3_text" else []  # each has factors of its own
        place = torch.zeros(1, 6, arch.width), torch.arange(3, 9)[None]
        rotary = arch.base.rotary_emb(*place, *kind) if hasattr(arch.base, "rotary_emb") else None
        keys, values = arch.project_kv(layer, hidden, rotary)
        raw, same_values = arch.project_kv_unrotated(layer, hidden)
        torch.testing.assert_close(arch.rotate_keys(layer, raw, rotary), keys)
        torch.testing.assert_close(same_values, values)
        moved |= not torch.allclose(raw, keys)
    assert moved == (rotary is not None)


def test_gain_and_bias_on_the_normalised_input_give_the_norm(arch) -> None:
    hidden = 3 * torch.randn(2, 6, arch.width) + 1
    norm = arch.input_norm(1)
    bias = 0 if getattr(norm, "bias", None) is None else norm.bias
    gain = getattr(norm, "weight", torch.ones(()))  # OLMo 2 has no norm there
    gain = 1 + gain if arch.family == "gemma" else gain
    torch.testing.assert_close(arch.normalised_input(1, hidden) * gain + bias, norm(hidden))
