"""What a family's adapter says of its layers; and fitted maps, which predict the K/V of tokens that stop or stand in for MLPs: for whom, when, how
often, at what cost."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import tiny
import torch
from drawing import Preset, RandomMLP
from tiny import EVEN, RAGGED, Batch, Does, MapsMLPs

from quicksilver.baselines.number_formats import BFloat16, Int8Dynamic
from quicksilver.baselines.pruning import ChannelPruning
from quicksilver.measure import count_executed
from quicksilver.modules import AdaptiveQuantization, Replay, Schedule, shuffled
from quicksilver.modules.linear_mlp import LinearMap, Neurons
from quicksilver.runtime import Architecture, LayerView, TokenState, Transform, apply, architecture_of
from quicksilver.runtime.run import Execution
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

    def translate(self, hidden: torch.Tensor) -> PredictedKV:
        self.asked.append(hidden.shape)
        of = self.architecture
        states = hidden[:, None, :, : of.head_dim].expand(-1, of.n_kv_heads, -1, -1)
        layers = range(self.source_layer + 1, of.n_layers)
        keys, values = (torch.stack(parts) for parts in ([states * i for i in layers], [states / i for i in layers]))
        return PredictedKV(layers[0], keys, values)


def every_second(translator: Constant | None, missing_kv: str = "predict", count_per_row: int | None = None) -> Does:
    """Every second token halts after layer `AT`."""

    def halt(view: LayerView, tokens: TokenState) -> None:
        chosen = (view.slots % 2 == 1) & tokens.active
        tokens.halt(chosen, missing_kv=missing_kv, translator=translator, count_per_row=count_per_row)

    return Does(halt, at=AT, priority=10, copies_kv=missing_kv == "copy")


@pytest.mark.parametrize("transform", [Int8Dynamic, partial(ChannelPruning, share=0.5)])
def test_what_mlps_save_is_the_same_within_the_block_and_after_it_whatever_their_products_are(
    transform: Callable[[], Transform],
) -> None:
    model, flops, some = tiny.load("gpt2"), {}, partial(RandomMLP, protect_first=1, protect_last=3)
    for name, modules in {"maps": [some()], "both": [some(), transform()], "alone": [transform()], "none": []}.items():
        with apply(model, modules) as run:
            model(**EVEN.inputs())
            within = run.flops
        flops[name] = within.executed
        with apply(model, modules) as run:
            model(**EVEN.inputs())
        assert run.flops == within
    assert flops["maps"] < flops["none"]
    assert flops["both"] < flops["alone"]
    if transform is Int8Dynamic:
        assert flops["both"] == flops["maps"]


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("execution", ["compact", "masked"])
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_the_cache_holds_what_was_projected_then_what_was_predicted(name: str, execution: Execution, counted: bool) -> None:
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


def test_the_work_of_a_translator_is_in_the_ledgers() -> None:
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


# -- in the place of MLPs ---------------------------------------------------------------------------------------------------------
@dataclass
class Own:
    """The MLP itself."""

    mlp: Callable[[torch.Tensor], torch.Tensor]
    flops_per_token: int = 0

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return self.mlp(states)


@pytest.mark.parametrize("execution", ["compact", "masked"])
@pytest.mark.parametrize("batch", [EVEN, RAGGED])
@pytest.mark.parametrize("name", tiny.thinned(tiny.FAMILIES))
def test_a_map_that_is_the_mlp_changes_nothing(name: str, batch: Batch, execution: str) -> None:
    model = tiny.load(name)
    arch = architecture_of(model)
    maps = {layer: Own(arch.mlp(layer).forward) for layer in (1, 2)}
    every_second = Does(lambda view, tokens: tokens.map_mlp(view.slots % 2 == 0, maps), at=0)
    with tiny.left_untouched(model):
        found = tiny.forward(model, batch, [every_second], execution=execution)
    dense = tiny.forward(model, batch, [])
    tiny.assert_close(batch.real(found.logits), batch.real(dense.logits))


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_all_neurons_and_what_they_write_are_the_mlp(name: str) -> None:
    arch = architecture_of(tiny.load(name))
    for layer in (1, 2):
        x = torch.randn(7, arch.width, generator=torch.Generator().manual_seed(layer))
        constant, writes = arch.mlp(layer)(x[None])[0], arch.mlp_writer(layer)
        bias = getattr(arch.residual_writers(layer)[-1], "bias", None)
        found = LinearMap(torch.cat([constant.new_zeros(1 + arch.width, arch.width), writes]), Neurons.of(arch, layer))
        torch.testing.assert_close(found(x) + (0 if bias is None else bias), constant, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("execution", ["compact", "masked"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_states_that_leave_the_layer_have_the_map_where_it_stands_in_and_the_mlp_elsewhere(name: str, execution: str) -> None:
    model = tiny.load(name)
    arch, given, returned = architecture_of(model), list[torch.Tensor](), list[torch.Tensor]()

    def note(_: object, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        given.append(args[0])
        returned.append(output)

    with arch.mlp(1).register_forward_hook(note):
        tiny.forward(model, EVEN, [])
        tiny.forward(model, EVEN, [RandomMLP(layers=[1], protect_first=2, protect_last=3)], execution=execution)
    (x, exact), (same, found) = zip(given, returned, strict=True)
    torch.testing.assert_close(same, x)
    maps, kept = tiny.random_mlp_maps(arch), []
    weight = maps.weight[0]
    with arch.residual_writers(1)[-1].register_forward_pre_hook(lambda _, args: kept.append(args[0])):
        arch.mlp(1)(x)
    features = torch.cat([torch.ones_like(x[..., :1]), x, kept[0][..., list(maps.neurons[0])]], dim=-1)
    torch.testing.assert_close(found[:, 2:-3], (features @ weight)[:, 2:-3], atol=1e-4, rtol=1e-4)
    for part in (slice(0, 2), slice(-3, None)):
        torch.testing.assert_close(found[:, part], exact[:, part], atol=1e-5, rtol=1e-4)


def test_where_all_tokens_are_protected_no_map_is_computed() -> None:
    flops = tiny.forward(tiny.load("gpt2"), EVEN, [RandomMLP(protect_first=4, protect_last=64)]).run.flops
    assert flops.executed == tiny.forward(tiny.load("gpt2"), EVEN, []).run.flops.executed


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_work_of_maps_is_in_the_ledgers(name: str) -> None:
    """That these say what ran: test_any_run.py."""
    model = tiny.load(name)
    arch, (rows, tokens) = architecture_of(model), EVEN.ids.shape
    flops, dense = (
        tiny.forward(model, EVEN, modules).run.flops for modules in ([RandomMLP(protect_first=2, protect_last=3)], [])
    )
    # Three neurons of each stay: what reads for them, twice where one product gates another, and what they write.
    each = 2 * arch.width * (arch.width + 3 * {"gpt2": 2, "llama": 3}[name])
    layers, mapped = arch.n_layers - 1, rows * (tokens - 5)
    assert dense.executed - flops.executed == layers * (2 * arch.mlp_params_per_layer * mapped - rows * tokens * each)
    assert dense.nominal - flops.nominal == layers * (2 * arch.mlp_params_per_layer - each) * mapped
    assert flops.dense_nominal == dense.nominal


def test_with_tokens_at_fewer_bits_compact_is_masked() -> None:
    model = tiny.load("llama", dtype=torch.float64)
    modules = [RandomMLP(protect_first=1, protect_last=2), AdaptiveQuantization(bits=8, depth=0.2)]
    compact, masked = (tiny.forward(model, RAGGED, modules, execution=execution) for execution in ("compact", "masked"))
    tiny.assert_close(RAGGED.real(compact.logits), RAGGED.real(masked.logits), atol=1e-8)


@pytest.mark.parametrize("protect", [0, 2])
def test_with_tokens_at_fewer_bits_the_mlps_that_ran_are_counted(protect: int) -> None:
    modules = [RandomMLP(protect_first=protect, protect_last=protect), AdaptiveQuantization(bits=8, depth=0.2)]
    with apply(tiny.load("gpt2"), modules) as run:
        counted = count_executed(lambda: run.arch.model(EVEN.ids, use_cache=True))
    assert run.flops.executed == pytest.approx(counted, rel=0.01)


def test_under_a_module_of_another_format_a_map_has_that_format() -> None:
    model = tiny.load("gpt2")
    plain, rounded = (tiny.forward(model, EVEN, [RandomMLP(), *more]) for more in ([], [BFloat16()]))
    assert rounded.logits.isfinite().all()
    torch.testing.assert_close(rounded.logits.float(), plain.logits, atol=0.1, rtol=0.1)


def test_the_null_of_maps_deals_as_many_tokens_and_a_replay_needs_its_maps() -> None:
    """That a replay from a file is the run: tests/modules/test_invariants.py."""
    model = tiny.load("gpt2")
    trace = tiny.forward(model, EVEN, [MapsMLPs(), Preset(schedule=Schedule(1, 0.25, 3, 2, 5))]).trace
    own, dealt = (each.passes[0].mappings[0].tokens for each in (trace, shuffled(trace, seed=1, protect_first=2, protect_last=5)))
    assert own.sum(1).tolist() == dealt.sum(1).tolist()
    assert not torch.equal(own, dealt)
    with tiny.refused("Replay\\(trace, like=modules\\)"):
        tiny.forward(model, EVEN, [Replay(trace)])


def test_decoding_after_maps_is_plain() -> None:
    model = tiny.load("llama")
    with apply(model, [RandomMLP(protect_first=1, protect_last=2)]) as run:
        tiny.passes(model, EVEN.inputs(), [20, 1, 1, 1, 1])
    assert [len(one.mappings) for one in run.trace.passes] == [1, 0, 0, 0, 0]
