"""What changes the model's own products: the same function but for what is chosen, counted, and nothing of it left behind."""

from contextlib import ExitStack

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import draws

from quicksilver.baselines.pruning import ChannelPruning
from quicksilver.measure.flop_counter import count_by_operator, count_executed
from quicksilver.modules import ChannelSparsity, calibrate_modules
from quicksilver.modules.channel_sparsity import linear_maps, rotated, weight_of
from quicksilver.modules.kernels import BlockAttention
from quicksilver.runtime import UnsupportedModelError, apply, architecture_of

IDS, MORE = tiny.ids(2, 12), tiny.ids(16, 12, seed=1)
BEHIND = ("olmo2", "gemma2", "gemma3")  # a norm behind each sublayer: what is added to the stream is no linear map


@pytest.mark.parametrize("family", BEHIND)
def test_a_stream_behind_norms_is_refused(family: str) -> None:
    arch = architecture_of(tiny.load(family))
    with tiny.refused("cannot be changed", UnsupportedModelError), rotated(arch, torch.eye(arch.width)):
        pass
    with tiny.refused(r"Leave .*channel_pruning out", UnsupportedModelError), apply(arch.model, [ChannelPruning()]):
        pass


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family not in BEHIND])
@torch.no_grad()
def test_a_rotated_model_is_the_same_function_and_leaves_nothing_behind(family: str) -> None:
    model = tiny.load(family, dtype=torch.float64)
    arch = architecture_of(model)
    expected = model(IDS).logits
    drawn = torch.randn(arch.width, arch.width, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    states = []
    with arch.layers[1].register_forward_pre_hook(lambda _, args, kwargs: states.append(args[0]), with_kwargs=True):
        with tiny.left_untouched(model), rotated(arch, torch.linalg.qr(drawn)[0]):
            found = model(IDS).logits
        assert torch.equal(model(IDS).logits, expected)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)  # an RMSNorm computes in float32
    assert not torch.allclose(states[0], states[1], atol=1e-3)  # the basis was another one


@torch.no_grad()
def test_what_is_skippable_is_what_was_zero() -> None:
    model = tiny.load("llama")
    module = ChannelSparsity(error=0.05, rotate=False)
    module.fit(model, MORE[:8])
    zeros = [0]

    def count(linear: torch.nn.Module, args: tuple[torch.Tensor, ...], _: object) -> None:
        # A forward hook sees the input as the pre-hook left it.
        zeros[0] += int((args[0] == 0).sum()) * 2 * weight_of(linear).shape[1]

    with apply(model, [module]) as run, ExitStack() as hooks:
        for linear in linear_maps(run.arch):
            hooks.enter_context(linear.register_forward_hook(count))
        model(IDS)
        found = run.flops.skippable
        assert run.flops.nominal == run.flops.dense_nominal - found
        run.reset()
        assert run.flops.skippable == 0
    assert found == zeros[0] > 0
    with apply(model, [module, tiny.Does(lambda view, tokens: view.logit_entropy_nats(tokens.active), at=0)]) as run:
        model(IDS)
    assert run.flops.signals > 0
    assert run.flops.skippable == found, "what the lens could skip is no operation of the model"


@torch.no_grad()
def test_each_map_loses_the_share_of_energy_that_was_asked_for() -> None:
    model = tiny.load("gpt2")
    module = ChannelSparsity(error=0.02, rotate=False)
    module.fit(model, MORE)
    for linear, threshold in zip(linear_maps(architecture_of(model)), module._thresholds, strict=True):
        inputs: list[torch.Tensor] = []
        with linear.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0])):
            for batch in MORE.split(8):
                model(batch)
        x = torch.cat([i.reshape(-1, i.shape[-1]) for i in inputs]).double()
        energy = (x * weight_of(linear).double().norm(dim=1)).square()
        lost = energy[x.abs() < threshold].sum() / energy.sum()
        assert 0.015 < lost <= 0.02 + 1e-6


@pytest.mark.parametrize("rotate", [True, False])
@torch.no_grad()
def test_it_is_causal_and_the_same_token_by_token(rotate: bool) -> None:
    model = tiny.load("llama")
    module = ChannelSparsity(error=0.05, rotate=rotate)
    module.fit(model, MORE[:8])
    with apply(model, [module]):
        whole = model(IDS).logits
        torch.testing.assert_close(model(IDS[:, :7]).logits, whole[:, :7], atol=1e-4, rtol=1e-4)
        steps = [out.logits for out in tiny.passes(model, {"input_ids": IDS}, [1] * IDS.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-4, rtol=1e-4)


def test_without_calibration_text_it_is_refused(tmp_path) -> None:
    model, other = tiny.load("gpt2"), tiny.build("gpt2", n_layer=2)
    module = ChannelSparsity()
    calibration = calibrate_modules([module], tmp_path, model, MORE[:4], batch_size=2)
    assert module.fitted
    assert not calibration.percentiles
    with tiny.refused("fitted to other weights"), apply(other, [module]):
        pass


SDPA = [family for family in tiny.FAMILIES if family not in tiny.EAGER_ONLY]


@pytest.mark.parametrize("family", tiny.thinned(SDPA))
@given(data=st.data(), block=st.integers(1, 20))
@settings(max_examples=draws(6))
def test_halted_runs_are_the_same_in_blocks_and_their_work_is_what_is_counted(family: str, data: st.DataObject, block: int):
    model = tiny.load(family)
    batch = data.draw(tiny.batches())
    modules = data.draw(tiny.policies())
    plain = tiny.forward(model, batch, modules)
    for execution in ("compact", "masked"):
        found: list[torch.Tensor] = []
        with torch.no_grad(), apply(model, [*modules, BlockAttention(block=block)], execution=execution) as run:
            counted = count_executed(lambda: found.append(model(**batch.inputs(), use_cache=False).logits))  # noqa: B023
            assert run.flops.executed == pytest.approx(counted, rel=0.01)
        tiny.assert_close(batch.real(found[0]), batch.real(plain.logits), atol=1e-4)


@pytest.mark.parametrize("family", tiny.thinned(SDPA))
def test_a_model_that_is_loaded_so_attends_as_under_the_module(family: str) -> None:
    modules, runs = [tiny.Hashed(0.5, missing_kv="project")], []
    for attention, more in (("blocks", []), ("sdpa", [BlockAttention()])):
        model, found = tiny.load(family, attention), list[torch.Tensor]()
        assert architecture_of(model).attention_implementation == "sdpa"
        with torch.no_grad(), apply(model, [*modules, *more]) as run:
            counted = count_executed(lambda: found.append(model(**tiny.EVEN.inputs(), use_cache=False).logits))  # noqa: B023
        runs.append((tiny.forward(model, tiny.EVEN, more).logits, found[0], run.flops))
        assert run.flops.executed == pytest.approx(counted, rel=0.01)
    (dense, halted, flops), (dense_of_module, halted_of_module, flops_of_module) = runs
    assert torch.equal(dense, dense_of_module)
    assert torch.equal(halted, halted_of_module)
    assert flops == flops_of_module


def test_ledgers_may_be_read_after_the_block() -> None:
    with torch.no_grad(), apply(tiny.load("llama"), [BlockAttention()]) as run:
        counted = count_executed(lambda: tiny.load("llama")(torch.arange(24)[None], use_cache=False))
    assert run.flops.executed == pytest.approx(counted, rel=0.01)


def test_no_prompt_is_left_to_the_fused_kernel_and_one_token_is() -> None:
    def fused(modules: list, chunks: list[int]) -> int:
        found = count_by_operator(lambda: tiny.forward(tiny.load("llama"), tiny.EVEN.alone(0), modules, chunks=chunks))
        return sum(n for name, n in found.items() if "scaled_dot_product" in name)

    assert fused([BlockAttention()], [24]) == 0 < fused([], [24])
    assert fused([BlockAttention()], [20, 1, 1, 1, 1]) > 0
    assert fused([tiny.Hashed(0.5, missing_kv="drop"), BlockAttention()], [24]) == 0


def test_another_attention_is_refused() -> None:
    with tiny.refused("attn_implementation='eager': leave that out"), apply(tiny.load("gpt2", "eager"), [BlockAttention()]):
        pass


# -- channels left out of every MLP ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family not in BEHIND])
@torch.no_grad()
def test_a_pruned_model_is_the_one_with_these_channels_at_zero(family: str) -> None:
    model, zeroed = tiny.load(family), tiny.build(family)
    before = model(IDS).logits
    with tiny.left_untouched(model), apply(model, [ChannelPruning(share=0.5)]) as run:
        counted = count_executed(lambda: model(IDS))
        found = model(IDS).logits
        for kept, whole in zip(run.arch.layers, architecture_of(zeroed).layers, strict=True):
            small, large = (weight_of_output(layer) for layer in (kept, whole))
            assert 2 * small.shape[1] == large.shape[1]
            there = (large[:, :, None] == small[:, None, :]).all(0).any(1)  # (H,) the channels that are left
            sizes = large.norm(dim=0)
            for name, linear in whole.named_modules():  # the maps that write the channels, (H or 2H, D)
                rows = getattr(linear, "weight", torch.empty(0))
                rows = rows if isinstance(linear, torch.nn.Linear) or rows.ndim != 2 else rows.T
                if "mlp" in name and rows.ndim == 2 and rows.shape[0] % len(there) == 0 and rows.shape[0] > rows.shape[1]:
                    sizes = sizes * rows.reshape(-1, *there.shape, rows.shape[1]).norm(dim=(0, 2))
            assert sizes[there].min() >= sizes[~there].max()
            large[:, ~there] = 0
    torch.testing.assert_close(found, zeroed(IDS).logits, atol=1e-5, rtol=1e-5)
    assert 2 * counted == run.flops.executed
    assert run.flops.nominal < run.flops.dense_nominal
    assert torch.equal(model(IDS).logits, before)


def weight_of_output(layer: torch.nn.Module) -> torch.Tensor:
    """The last map of a layer's MLP as (D, H), to be written to."""
    linear = [module for name, module in layer.named_modules() if "mlp" in name and hasattr(module, "weight")][-1]
    return linear.weight.data if isinstance(linear, torch.nn.Linear) else linear.weight.data.T
