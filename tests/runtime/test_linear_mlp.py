"""Maps in the place of MLPs: for whom, in which layers, at what cost; and what makes no sense."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from drawing import Preset, RandomMLP
from tiny import EVEN, RAGGED, Batch, Does, MapsMLPs

from quicksilver.baselines.number_formats import BFloat16
from quicksilver.measure.flop_counter import count_executed
from quicksilver.modules import AdaptiveQuantization, Replay, Schedule, shuffled
from quicksilver.modules.linear_mlp import LinearMap, Neurons
from quicksilver.runtime import Trace, apply, architecture_of

EXECUTIONS = pytest.mark.parametrize("execution", ["compact", "masked"])


@dataclass
class Own:
    """The MLP itself."""

    mlp: Callable[[torch.Tensor], torch.Tensor]
    flops_per_token: int = 0

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return self.mlp(states)


@EXECUTIONS
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


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_all_neurons_and_what_they_write_are_the_mlp(name: str) -> None:
    arch = architecture_of(tiny.load(name))
    for layer in (1, 2):
        x = torch.randn(7, arch.width, generator=torch.Generator().manual_seed(layer))
        constant, writes = arch.mlp(layer)(x[None])[0], arch.mlp_writer(layer)
        bias = getattr(arch.residual_writers(layer)[-1], "bias", None)
        found = LinearMap(torch.cat([constant.new_zeros(1 + arch.width, arch.width), writes]), Neurons.of(arch, layer))
        torch.testing.assert_close(found(x) + (0 if bias is None else bias), constant, atol=1e-5, rtol=1e-4)


@EXECUTIONS
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


@torch.no_grad()
def test_where_all_tokens_are_protected_no_map_is_computed() -> None:
    flops = tiny.forward(tiny.load("gpt2"), EVEN, [RandomMLP(protect_first=4, protect_last=64)]).run.flops
    assert flops.executed == tiny.forward(tiny.load("gpt2"), EVEN, []).run.flops.executed


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_its_work_is_counted_and_in_the_ledgers(name: str) -> None:
    model = tiny.load(name)
    arch, made = architecture_of(model), list[tiny.Outcome]()
    counted = count_executed(lambda: made.append(tiny.forward(model, EVEN, [RandomMLP(protect_first=2, protect_last=3)])))
    flops, dense = made[0].run.flops, tiny.forward(model, EVEN, []).run.flops
    rows, tokens = EVEN.ids.shape
    # Three neurons of each stay: what reads for them, twice where one product gates another, and what they write.
    layers, mapped, each = (
        arch.n_layers - 1,
        rows * (tokens - 5),
        2 * arch.width * (arch.width + 3 * {"gpt2": 2, "llama": 3}[name]),
    )
    assert flops.executed == pytest.approx(counted, rel=0.01)
    assert dense.executed - flops.executed == layers * (2 * arch.mlp_params_per_layer * mapped - rows * tokens * each)
    assert dense.nominal - flops.nominal == layers * (2 * arch.mlp_params_per_layer - each) * mapped
    assert flops.dense_nominal == dense.nominal


def test_with_tokens_at_fewer_bits_compact_is_masked() -> None:
    model = tiny.load("llama", dtype=torch.float64)
    modules = [RandomMLP(protect_first=1, protect_last=2), AdaptiveQuantization(bits=8, depth=0.2)]
    compact, masked = (tiny.forward(model, RAGGED, modules, execution=execution) for execution in ("compact", "masked"))
    tiny.assert_close(RAGGED.real(compact.logits), RAGGED.real(masked.logits), atol=1e-8)


def test_under_a_module_of_another_format_a_map_has_that_format() -> None:
    model = tiny.load("gpt2")
    plain, rounded = (tiny.forward(model, EVEN, [RandomMLP(), *more]) for more in ([], [BFloat16()]))
    assert rounded.logits.isfinite().all()
    torch.testing.assert_close(rounded.logits.float(), plain.logits, atol=0.1, rtol=0.1)


def test_a_trace_holds_for_whom_and_a_replay_does_it_again(tmp_path: Path) -> None:
    model = tiny.load("gpt2")
    modules: list[Any] = [MapsMLPs(), Preset(schedule=Schedule(1, 0.25, 3, 2, 5))]
    made = tiny.forward(model, EVEN, modules)
    made.trace.save(tmp_path / "trace.safetensors")
    trace = Trace.load(tmp_path / "trace.safetensors")
    assert torch.equal(trace.passes[0].mappings[0].tokens, made.trace.passes[0].mappings[0].tokens)
    assert torch.equal(tiny.forward(model, EVEN, [Replay(trace, like=modules)]).logits, made.logits)
    dealt = shuffled(trace, seed=1, protect_first=2, protect_last=5)
    counts = [one.passes[0].mappings[0].tokens.sum(1).tolist() for one in (trace, dealt)]
    assert counts[0] == counts[1]
    assert not torch.equal(dealt.passes[0].mappings[0].tokens, trace.passes[0].mappings[0].tokens)
    with tiny.refused("Replay\\(trace, like=modules\\)"):
        tiny.forward(model, EVEN, [Replay(tiny.forward(model, EVEN, [MapsMLPs()]).trace)])


def test_two_of_them_and_a_mask_of_another_shape_are_refused() -> None:
    model = tiny.load("gpt2")
    with tiny.refused("Two modules replace MLPs"):
        tiny.forward(model, EVEN, [MapsMLPs(), RandomMLP(protect_last=3)])
    wrong = Does(lambda view, tokens: tokens.map_mlp(view.slots[:, :3] > 0, {}), at=0)
    with tiny.refused("map_mlp.*was given bool"):
        tiny.forward(model, EVEN, [wrong])


def test_decoding_after_it_is_plain() -> None:
    model = tiny.load("llama")
    with torch.no_grad(), apply(model, [RandomMLP(protect_first=1, protect_last=2)]) as run:
        tiny.passes(model, EVEN.inputs(), [20, 1, 1, 1, 1])
    assert [len(one.mappings) for one in run.trace.passes] == [1, 0, 0, 0, 0]
