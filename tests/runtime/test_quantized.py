"""Codes are nested, a cache holds packed what it says it holds, and integer products are the products they stand for."""

import itertools
import re
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import refused
from torch import nn
from transformers import DynamicCache
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime import ConfigError, UnsupportedModelError
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
    errors = {}
    for bits in (8, 4, 2):
        errors[bits] = (x - quantize_dequantize(x, bits, group)).abs()
    whole = shape[-1] // size * size  # groups that are not short
    groups = x[..., :whole].unflatten(-1, (-1, size))
    span = groups.amax(-1) - groups.amin(-1)
    assert (errors[8][..., :whole].unflatten(-1, (-1, size)).amax(-1) <= span / 510 + 1e-9).all()
    for bits in (4, 2):
        squared = errors[bits][..., :whole].unflatten(-1, (-1, size)).square().sum(-1)
        about_mean = (groups - groups.mean(-1, keepdim=True)).square().sum(-1)
        midpoints = encode(x, bits, group).code[..., :whole].unflatten(-1, (-1, size)).double()
        midpoints = (
            groups.amin(-1, keepdim=True) + (midpoints + 0.5 - 0.5 ** (9 - bits)) * 2 ** (8 - bits) * span[..., None] / 255
        )
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
OPERATIONS = st.lists(st.sampled_from(["write"] * 3 + ["rows", "repeat", "crop", "merge", "plain"]), min_size=2, max_size=7)


@given(st.data(), OPERATIONS, st.sampled_from([3, 8, 32]), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=60)
def test_a_packed_layer_reads_as_a_plain_one_that_was_given_what_is_held(data, operations, group, dtype):
    """Every way a cache is written and rearranged, with rows of different lengths and entries of different widths."""
    executor = SimulatedExecutor(kv_group_size=group)
    packed, plain = executor.new_store(), CacheLayer("ragged")
    assert packed.kind == "packed"
    batch = data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))

    def chosen(*shape: int, of: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(of, dtype=torch.uint8)[torch.randint(0, len(of), shape, generator=generator)]

    for number, operation in enumerate(operations):
        if packed.entries is None or operation in ("write", "plain"):
            n = data.draw(st.integers(1, 4))
            facts = {"slots": torch.arange(packed.seen, packed.seen + n).expand(batch, n)}
            keys, values = (torch.randn(batch, HEADS, n, HEAD_DIM, generator=generator).to(dtype) for _ in range(2))
            keep = chosen(batch, n, of=(0, 1, 1)).bool() if data.draw(st.booleans()) else None
            if operation != "plain":
                of = data.draw(st.sampled_from([(2, 4, 8, 16), (4,), (16,), (8, 2)]))
                facts["bits"] = chosen(batch, n, of=of)
            bits = facts.get("bits", torch.full((batch, n), 16, dtype=torch.uint8))
            read = packed.write(packed.plan(dict(facts), keep), keys, values)
            held = (executor.quantize_dequantize_kv(part, bits) for part in (keys, values))
            expected = plain.write(plain.plan(dict(facts), keep), *held)
            for layer in (packed, plain):
                layer.advance(n, torch.full((batch, 1), n))
            for found, wanted in zip(read, expected, strict=True):  # beyond the end of a row anything may stand
                real = packed.is_entry[:, None, :, None]
                assert torch.equal(found * real, wanted * real)
        elif operation == "rows":
            rows = torch.randint(0, batch, (batch,), generator=generator)
            for layer in (packed, plain):
                layer.reorder_cache(rows)
        elif operation == "repeat" and batch < 3:
            batch *= 2
            for layer in (packed, plain):
                layer.batch_repeat_interleave(2)
        elif operation == "crop" and not packed.merged:
            n = data.draw(st.integers(0, packed.seen))
            for layer in (packed, plain):
                layer.crop(-n)
        elif operation == "merge" and packed.slots.shape[1] > 1:
            columns = torch.arange(packed.slots.shape[1]).expand(batch, -1)
            pair = packed.is_entry & packed.is_entry.roll(-1, 1) & (columns % 2 == 0) & (columns < columns.shape[1] - 1)
            into = torch.where(pair, columns + 1, columns)
            packed.merge(into)
            plain.merge(into, executor.quantize_dequantize_kv)
        assert packed.billed_bytes() == packed.resident_bytes(), (number, operation)
        assert packed.resident_bytes() == held_in_memory(packed)
        assert packed.entries.keys() == plain.entries.keys()
        for name, fact in packed.entries.items():
            assert torch.equal(fact[packed.is_entry], plain.entries[name][plain.is_entry])
        assert torch.equal(packed.lengths, plain.lengths)
        assert torch.equal(packed.is_entry, plain.is_entry)
        for found, wanted in zip(packed.padded(), plain.padded(), strict=True):
            real = packed.is_entry[:, None, :, None]
            assert torch.equal(found * real, wanted * real), (number, operation)


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


def test_a_plain_cache_is_taken_over_and_goes_on_packed() -> None:
    cache = DynamicCache()
    keys, values = torch.randn(2, HEADS, 3, HEAD_DIM), torch.randn(2, HEADS, 3, HEAD_DIM)
    cache.update(keys, values, 0)
    layer = CacheLayer("packed")
    layer.adopt(cache.layers[0], torch.tensor([[0, 1, 1], [1, 1, 1]]).bool())
    assert not layer.is_packed
    new = torch.randn(2, HEADS, 1, HEAD_DIM)
    bits = torch.tensor([[4], [2]], dtype=torch.uint8)
    read, _ = layer.write(layer.plan({"slots": torch.tensor([[2], [3]]), "bits": bits}, None), new, new)
    assert torch.equal(read[0, :, :2], keys[0, :, 1:])
    assert torch.equal(read[1, :, :3], keys[1])
    assert torch.equal(read[0, :, 2], quantize_dequantize(new[0, :, 0], 4, 32, STORED_AS))
    assert torch.equal(read[1, :, 3], quantize_dequantize(new[1, :, 0], 2, 32, STORED_AS))
    assert layer.billed_bytes() == layer.resident_bytes() < keys.nbytes + values.nbytes


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
    with pytest.raises(ConfigError):
        executor.run_layer(block, widths, raising)
    assert block.a.__dict__["forward"] is hooked
    assert "forward" not in block.b.__dict__
    assert "forward" not in block.c.__dict__
    assert bool(calls) == (type(executor) is SimulatedExecutor)


def raising() -> torch.Tensor:
    raise ConfigError("in the layer")


def test_weights_are_prepared_once_until_they_are_forgotten() -> None:
    block, x, widths = Block(), values((1, 2, 24), 0), torch.full((1, 2), 8, dtype=torch.uint8)
    executor = IntegerExecutor(weights="int8")
    first = executor.run_layer(block, widths, lambda: block(x))
    (kept,) = [linear.prepared[8] for linear in executor._linears[block] if linear.module is block.a]
    assert torch.equal(executor.run_layer(block, widths, lambda: block(x)), first)
    (again,) = [linear.prepared[8] for linear in executor._linears[block] if linear.module is block.a]
    assert again is kept
    block.a.weight.mul_(2)
    executor.forget()
    assert not torch.equal(executor.run_layer(block, widths, lambda: block(x)), first)


def test_offloaded_weights_are_refused() -> None:
    block = nn.Sequential(nn.Linear(8, 8, device="meta"))
    x, widths = torch.zeros(1, 2, 8), torch.full((1, 2), 8, dtype=torch.uint8)
    with refused("offloaded", UnsupportedModelError):
        IntegerExecutor(weights="int8").run_layer(block, widths, lambda: block(x))
