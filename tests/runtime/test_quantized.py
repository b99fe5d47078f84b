"""Codes are nested, a cache holds packed what it says it holds, and integer products are the products they stand for."""

import itertools
import random
import re
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import refused
from torch import nn
from transformers.cache_utils import DynamicLayer
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime import UnsupportedModelError
from quicksilver.runtime.cache import CacheLayer
from quicksilver.runtime.quantized import linear
from quicksilver.runtime.quantized.codes import STORED_AS, encode, quantize_dequantize
from quicksilver.runtime.quantized.linear import IntegerExecutor, SimulatedExecutor, encode_weight, kernel_for

# On a processor without VNNI the executor says so; its numbers are tested all the same.
pytestmark = [pytest.mark.filterwarnings("ignore:.*has no exact int8 matrix product"), pytest.mark.processor]

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 70))
GROUPS = st.sampled_from([None, 1, 3, 16, 32])


def values(shape: tuple[int, ...], seed: int, kind: str = "normal") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "outliers":
        x[..., 0] *= 1000
    if kind == "shifted":
        x += 50
    if kind == "one-sided":
        x = x.relu()
    return x


KINDS = st.sampled_from(["normal", "outliers", "shifted", "one-sided"])


# -- codes -----------------------------------------------------------------------------------------------------------------------
@given(SHAPES, GROUPS, KINDS, st.integers(0, 99), st.sampled_from([None, torch.bfloat16]))
def test_narrow_codes_are_the_leading_bits_of_the_8_bit_code(shape, group, kind, seed, stored_as):
    x = values(shape, seed, kind)
    eight, four, two = (encode(x, bits, group, stored_as).code for bits in (8, 4, 2))
    assert torch.equal(four, eight >> 4)
    assert torch.equal(two, eight >> 6)
    assert torch.equal(two, four >> 2)
    if x[0, 0].unique().numel() > 1 and group is None and stored_as is None:
        assert eight.amin(-1).max() == 0  # the whole range of the code is used
        assert (eight[0, 0].max(), four[0, 0].max(), two[0, 0].max()) == (255, 15, 3)


@given(st.integers(-128, 127))
def test_so_are_those_of_weights(seed: int) -> None:
    weight = values((3, 40), seed + 128)
    eight, four, two = (encode_weight(weight, bits)[0] for bits in (8, 4, 2))
    assert torch.equal(four >> 4, eight >> 4)
    assert torch.equal(two >> 6, eight >> 6)
    assert set((four & 15).unique().tolist()) == {8}
    errors = [((weight - scale[:, None] * code) ** 2).sum() for code, scale in (encode_weight(weight, b) for b in (8, 4, 2))]
    assert errors[0] < errors[1] < errors[2] < (weight**2).sum()


@given(st.floats(-1e4, 1e4), st.integers(1, 50), GROUPS, st.sampled_from([2, 4, 8]))
def test_equal_values_are_kept(value: float, width: int, group: int | None, bits: int) -> None:
    x = torch.full((2, width), value, dtype=torch.float64)
    torch.testing.assert_close(quantize_dequantize(x, bits, group), x, rtol=1e-12, atol=1e-12)


@given(SHAPES, GROUPS, KINDS, st.integers(0, 99))
def test_the_error_is_half_a_step_at_8_bits_and_the_least_that_a_line_leaves_below(shape, group, kind, seed):
    x = values(shape, seed, kind)
    size = shape[-1] if group is None else min(group, shape[-1])

    def grouped(states: torch.Tensor) -> torch.Tensor:
        """Groups that are not short."""
        return states[..., : shape[-1] // size * size].unflatten(-1, (-1, size))

    groups = grouped(x)
    least, span = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)
    assert (grouped(x - quantize_dequantize(x, 8, group)).abs() <= span / 510 + 1e-9).all()
    for bits in (4, 2):
        squared = grouped(x - quantize_dequantize(x, bits, group)).square().sum(-1)
        about_mean = (groups - groups.mean(-1, keepdim=True)).square().sum(-1)
        codes = grouped(encode(x, bits, group).code).double()
        midpoints = least + (codes + 0.5 - 0.5 ** (9 - bits)) * 2 ** (8 - bits) * span / 255
        assert (squared <= about_mean * (1 + 1e-9) + 1e-9).all()
        assert (squared <= (groups - midpoints).square().sum(-1) * (1 + 1e-9) + 1e-9).all()


def test_what_is_not_finite_is_not_hidden() -> None:
    for bad in (float("nan"), float("inf")):
        x = torch.ones(1, 8)
        x[0, 3] = bad
        for bits in (2, 4, 8):
            assert not quantize_dequantize(x, bits, None).isfinite().all()


# -- the cache -------------------------------------------------------------------------------------------------------------------
HEADS, HEAD_DIM = 2, 10
OPERATIONS = ("append", "append", *("write",) * 4, "rows", "repeat", "crop", "crop", "merge", "evict", "reset")


def contents(layer: CacheLayer) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """The entries of all rows, one after the other: facts, K and V, (T, ...) each."""
    keys, values = (part.transpose(1, 2)[layer.is_entry] for part in layer.padded())
    return {name: fact[layer.is_entry] for name, fact in layer.entries.items()}, keys, values


def pairs(layer: CacheLayer) -> torch.Tensor:
    """Every second entry of a row goes into the next one."""
    into = torch.arange(layer.is_entry.shape[1]).repeat(len(layer.is_entry), 1)
    for row, present in zip(into, layer.is_entry, strict=True):
        columns = present.nonzero()[:, 0]
        row[columns[:-1:2]] = columns[1::2]
    return into


@given(st.integers(0, 9999), st.sampled_from([3, 8, 32]), st.booleans())
@settings(max_examples=100)
def test_a_cache_reads_as_what_it_was_given_however_it_keeps_it(seed, group, curious):
    """Every way a cache is written and rearranged, with rows of different lengths and entries of different widths: dense layers are given what codes
    hold. While every column has a plain entry it is transformers' own layer. Facts are not written down until somebody asks, which changes nothing."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    executor, dtype = SimulatedExecutor(kv_group_size=group), draw.choice([torch.float32, torch.bfloat16])
    packed, ragged, masked = layers = [executor.new_store(), CacheLayer("ragged"), CacheLayer("masked")]
    plain: DynamicLayer | None = DynamicLayer()
    batch = draw.randint(1, 3)
    for operation in draw.choices(OPERATIONS, k=8):
        if operation in OPERATIONS[:6] or not packed.seen:
            n = draw.randint(1, 4)
            keys, values = (torch.randn(batch, HEADS, n, HEAD_DIM, generator=generator).to(dtype) for _ in range(2))
            if operation != "write" and plain is not None:
                own = plain.update(keys, values)
                for layer in layers:
                    assert all(map(torch.equal, layer.update(keys, values), own))
            else:
                slots, keep = torch.arange(packed.seen, packed.seen + n).expand(batch, n), None
                bits, facts = torch.full((batch, n), 16, dtype=torch.uint8), {}
                if widths := draw.choice([(), (2, 4, 8, 16), (4,), (16,), (8, 2)]):
                    drawn = torch.randint(0, len(widths), (batch, n), generator=generator)
                    facts["bits"] = bits = torch.tensor(widths, dtype=torch.uint8)[drawn]
                if draw.random() < 0.5:
                    keep = torch.randint(0, 3, (batch, n), generator=generator) > 0
                held = [executor.quantize_dequantize_kv(part, bits) for part in (keys, values)]
                for layer, given in zip(layers, ((keys, values), held, held), strict=True):
                    read = layer.write(layer.plan({"slots": slots, **facts}, keep), *given)
                    layer.advance(n, torch.full((batch, 1), n))
                    for found, whole in zip(read, layer.padded(), strict=True):  # beyond the end of a row anything may stand
                        real = layer.is_entry[:, None, :, None]
                        assert torch.equal(found * real, whole * real)
                plain = None
        elif operation == "rows":
            rows = torch.randint(0, batch, (batch,), generator=generator)
            for layer in filter(None, (*layers, plain)):
                layer.reorder_cache(rows)
        elif operation == "repeat" and batch < 3:
            batch *= 2
            for layer in filter(None, (*layers, plain)):
                layer.batch_repeat_interleave(2)
        elif operation == "crop" and not packed.changed_at:
            n = draw.randint(0, packed.seen)
            for layer in filter(None, (*layers, plain)):
                layer.crop(-n)
        elif operation == "merge":
            for layer in layers:
                layer.merge(pairs(layer), executor.quantize_dequantize_kv)
            plain = None
        elif operation == "evict":
            for layer in layers:
                layer.evict(layer.is_entry & (layer.is_entry.cumsum(1) % 3 == 0))
            plain = None
        elif operation == "reset":
            for layer in layers:
                layer.reset()
            plain = DynamicLayer()
        if plain is not None and packed.seen:
            for layer in layers:
                assert layer.is_complete
                assert layer.get_seq_length() == layer.seen == plain.keys.shape[2]
                assert torch.as_tensor(layer.length).expand(batch).tolist() == [layer.seen] * batch
                assert torch.equal(layer.keys, plain.keys)
        if packed.seen and (curious or plain is None):
            same(packed, ragged)
            same(masked, ragged)
            for layer in (packed, ragged):
                assert layer.billed_bytes() == layer.resident_bytes() == held_in_memory(layer)
                assert plain is None or torch.equal(layer.slots, torch.arange(layer.seen).expand(batch, -1))
            assert masked.billed_bytes() == ragged.billed_bytes() <= masked.resident_bytes()


def same(one: CacheLayer, other: CacheLayer) -> None:
    """They hold the same entries, and know the same of them."""
    (facts, *kv), (other_facts, *other_kv) = contents(one), contents(other)
    assert facts.keys() == other_facts.keys()
    assert all(torch.equal(facts[name], other_facts[name]) for name in facts)
    assert all(map(torch.equal, kv, other_kv))
    assert one.lengths.tolist() == other.lengths.tolist()
    assert torch.equal(one.real_seen, other.real_seen)


def held_in_memory(layer: CacheLayer) -> int:
    """Bytes of the storage behind K and V: a view of something larger would not be caught by its own size."""
    tensors = [part for pool in getattr(layer.storage, "pools", {}).values() for part in pool]
    tensors += [t for t in (layer.keys, layer.values) if t is not None]
    return sum(t.untyped_storage().nbytes() for t in {t.untyped_storage().data_ptr(): t for t in tensors if t.numel()}.values())


def test_a_mix_of_three_and_a_half_bits_takes_less_than_three_tenths_of_bfloat16() -> None:
    """Scales and offsets included, in the tensors: head_dim 64 as in gpt2-large."""
    heads, n, head_dim = 4, 40, 64
    bits = torch.tensor([8] * 5 + [4] * 15 + [2] * 20, dtype=torch.uint8)[None]  # 3.5 on average
    layer = CacheLayer("packed")
    keys, values = torch.randn(1, heads, n, head_dim), torch.randn(1, heads, n, head_dim)
    layer.write(layer.plan({"slots": torch.arange(n)[None], "bits": bits}, None), keys, values)
    in_bfloat16 = 2 * heads * n * head_dim * 2
    assert layer.resident_bytes() == held_in_memory(layer) == layer.billed_bytes()
    assert layer.resident_bytes() <= 0.30 * in_bfloat16
    assert layer.resident_bytes() == in_bfloat16 * (3.5 + 2 * 8 * STORED_AS.itemsize / 32) / 16


# -- linear layers ---------------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    """Two linear layers that read the same input, and one that reads theirs."""

    def __init__(self, width: int = 24, wide: int = 40) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(width, wide), Conv1D(wide, width), nn.Linear(wide, width, bias=False)
        nn.init.normal_(self.b.bias)
        self.double().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.a(x) * self.b(x).tanh())


def held_forward(block: Block, x: torch.Tensor, bits: torch.Tensor, group: int | None, weights: str) -> torch.Tensor:
    """The same, written out: one token at a time."""
    out = torch.zeros_like(x)
    for at in itertools.product(*map(range, bits.shape)):
        width = int(bits[at])

        def linear(layer: nn.Module, token: torch.Tensor, width: int = width) -> torch.Tensor:
            weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
            if width < 16 and weights != "float":
                code, scale = encode_weight(weight, width if weights == "token" else 8)
                weight = code * scale[:, None]
            held = quantize_dequantize(token, width, group)
            return weight @ held + (0 if layer.bias is None else layer.bias)

        token = x[at]
        out[at] = linear(block.c, linear(block.a, token) * linear(block.b, token).tanh())
    return out


WIDTH = st.sampled_from([2, 4, 8, 16])
BITS = st.lists(st.lists(WIDTH, min_size=3, max_size=3), min_size=1, max_size=3) | WIDTH.map(lambda width: [[width] * 3] * 2)


@given(BITS, st.sampled_from(["float", "int8", "token"]), st.sampled_from([None, 8]), st.integers(0, 99))
def test_simulated_layers_are_the_dense_ones_on_held_inputs(bits: list[list[int]], weights: str, group: int | None, seed: int):
    block, widths = Block(), torch.tensor(bits, dtype=torch.uint8)
    x = values((*widths.shape, 24), seed)
    executor = SimulatedExecutor(weights=weights, group_size=group)
    found = executor.run_layer(block, widths, lambda: block(x))
    torch.testing.assert_close(found, held_forward(block, x, widths, group, weights))


@given(BITS, st.sampled_from(["int8", "token"]), KINDS, st.integers(0, 99))
def test_integer_layers_are_simulated_ones_with_one_scale_a_token(bits: list[list[int]], weights: str, kind: str, seed: int):
    block, widths = Block(), torch.tensor(bits, dtype=torch.uint8)
    x = values((*widths.shape, 24), seed, kind)
    simulated, integers = SimulatedExecutor(weights=weights, group_size=None), IntegerExecutor(weights=weights)
    expected = simulated.run_layer(block, widths, lambda: block(x))
    found = integers.run_layer(block, widths, lambda: block(x))
    scale = expected.abs().max()
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-9)
    if (widths < 16).any():
        assert integers.kernel.startswith(("torch._int_mm on cpu", "float products of the codes on cpu"))


def test_without_an_exact_kernel_there_is_one_warning_and_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x, widths = Block(), values((2, 3, 24), 0), torch.tensor([[8, 4, 16], [2, 8, 8]], dtype=torch.uint8)
    says = "cpu has no exact int8 .*linear layers of quantised tokens.*slower than the dense"
    found = []
    for fault in (linear.int_mm_fault, lambda device: "overflows"):
        monkeypatch.setattr(linear, "int_mm_fault", fault)
        executor = IntegerExecutor(weights="int8")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found += [executor.run_layer(block, widths, lambda: block(x)) for _ in range(2)]
        assert len(caught) == ("float" in executor.kernel)
        assert all(re.search(says, str(one.message)) for one in caught)
    assert executor.kernel.startswith("float products of the codes on cpu (")
    torch.testing.assert_close(found[2:], found[:2])


def test_a_shape_for_which_a_device_has_no_integer_product_is_multiplied_as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_for("cuda", 64, 36) == "float products of the codes"  # cuBLASLt wants multiples of 8
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert kernel_for("cpu", 64, 64) == "float products of the codes"


@pytest.mark.parametrize("executor", [SimulatedExecutor(), IntegerExecutor(weights="int8")])
def test_nothing_stays_on_the_layer(executor: SimulatedExecutor) -> None:
    block, x, widths = Block(), values((1, 2, 24), 0), torch.full((1, 2), 4, dtype=torch.uint8)
    calls: list[int] = []
    plain = block.a.forward

    def hooked(x: torch.Tensor) -> torch.Tensor:  # as accelerate sets it on the instance
        calls.append(x.shape[0])
        return plain(x)

    block.a.forward = hooked
    executor.run_layer(block, widths, lambda: block(x))
    with pytest.raises(ZeroDivisionError):
        executor.run_layer(block, widths, lambda: 1 // 0)
    assert block.a.__dict__["forward"] is hooked
    assert "forward" not in block.b.__dict__
    assert "forward" not in block.c.__dict__
    assert bool(calls) == (type(executor) is SimulatedExecutor)


def test_weights_are_prepared_once_until_they_are_forgotten() -> None:
    block, x, widths = Block(), values((1, 2, 24), 0), torch.full((1, 2), 8, dtype=torch.uint8)
    executor = IntegerExecutor(weights="int8")
    first = executor.run_layer(block, widths, lambda: block(x))
    kept = [linear.prepared[8] for linear in executor._linears[block]]
    assert torch.equal(executor.run_layer(block, widths, lambda: block(x)), first)
    assert all(linear.prepared[8] is one for linear, one in zip(executor._linears[block], kept, strict=True))
    block.a.weight.mul_(2)
    executor.forget()
    assert not torch.equal(executor.run_layer(block, widths, lambda: block(x)), first)


def test_offloaded_weights_are_refused() -> None:
    block = nn.Sequential(nn.Linear(8, 8, device="meta"))
    x, widths = torch.zeros(1, 2, 8), torch.full((1, 2), 8, dtype=torch.uint8)
    with refused("offloaded", UnsupportedModelError):
        IntegerExecutor(weights="int8").run_layer(block, widths, lambda: block(x))
