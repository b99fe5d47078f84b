"""Moving tokens whole gives what moving them number by number gives."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from quicksilver.runtime.plan import Packing
from quicksilver.runtime.rows import join_kv, put_rows, take_kv, take_rows

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(0, 6))


def _case(sizes: tuple[int, int, int], *trailing: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States (B, N, *trailing) and `order` (B, A), no column twice."""
    batch, n, taken = sizes
    generator = torch.Generator().manual_seed(batch * 100 + n * 10 + taken)
    order = torch.rand(batch, n, generator=generator).argsort(1)[:, : min(taken, n)]
    return torch.randn(batch, n, *trailing, generator=generator), order


@given(SIZES)
def test_taking_rows_is_a_gather(sizes: tuple[int, int, int]) -> None:
    states, order = _case(sizes, 5)
    assert torch.equal(take_rows(states, order), states.gather(1, order[..., None].expand(-1, -1, 5)))
    assert torch.equal(take_rows(states[..., 0], order), states[..., 0].gather(1, order))


@given(SIZES)
def test_putting_rows_is_a_scatter_and_leaves_the_old_states_alone(sizes: tuple[int, int, int]) -> None:
    states, order = _case(sizes, 5)
    before, new = states.clone(), torch.randn(*order.shape, 5)
    assert torch.equal(put_rows(states, order, new), states.scatter(1, order[..., None].expand_as(new), new))
    assert torch.equal(states, before)


@given(SIZES)
def test_keys_are_taken_and_joined_from_any_memory_layout(sizes: tuple[int, int, int]) -> None:
    by_head, order = _case((sizes[0], sizes[1], sizes[2]), 2, 3)
    for states in (by_head.transpose(1, 2), by_head.transpose(1, 2).contiguous()):
        taken = take_kv(states, order)
        assert torch.equal(taken, states.gather(2, order[:, None, :, None].expand(-1, 2, -1, 3)))
        assert torch.equal(join_kv((states, taken)), torch.cat([states, taken], dim=2))


def test_gradients_go_to_the_rows_that_moved() -> None:
    states = torch.zeros(1, 3, 2, requires_grad=True)
    order = torch.tensor([[2, 0]])
    new = torch.zeros(1, 2, 2, requires_grad=True)
    (put_rows(states, order, new) * torch.tensor([1.0, 10.0, 100.0])[None, :, None]).sum().backward()
    assert states.grad is not None
    assert new.grad is not None
    assert states.grad[0, :, 0].tolist() == [0, 10, 0]
    assert new.grad[0, :, 0].tolist() == [100, 1]


def test_rotary_factors_are_packed_once_for_each_kind() -> None:
    packing = Packing.of(torch.tensor([[True, False, True]]))
    one, other = ((torch.rand(1, 3, 4), torch.rand(1, 3, 4)) for _ in range(2))
    first = packing.rotary(one, 1)
    assert first is packing.rotary(one, 1)
    assert packing.rotary(other, 1) is not first
    assert first is not None
    assert torch.equal(first[0], one[0][:, [0, 2]])


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_a_row_is_packed_alone_as_it_is_in_a_batch(chosen: list[bool]) -> None:
    mask = torch.tensor([chosen])
    alone, both = Packing.of(mask), Packing.of(mask.repeat(2, 1))
    assert alone.width == both.width == sum(chosen)
    assert alone.real is both.real is None
    if all(chosen):
        assert alone.order is both.order is None
    else:
        assert alone.order.tolist() == both.order[:1].tolist()
