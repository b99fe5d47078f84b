"""States that stay packed from layer to layer where nobody looks: the same numbers, and fewer copies."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import draws
from tiny import Batch, Hashed

from quicksilver.measure.flop_counter import aten
from quicksilver.runtime import QuickSilverError, apply

BATCH = Batch((tuple(range(1, 17)), tuple(range(40, 24, -1))))


@pytest.mark.parametrize("name", tiny.thinned(tiny.MODELS))
@given(data=st.data(), layers=st.sampled_from([(0,), (2,), (0, 3), (1, 2)]))
@settings(max_examples=draws(6))
def test_with_few_decision_layers_compact_is_masked(name: str, data: st.DataObject, layers: tuple[int, ...]) -> None:
    model = tiny.load(name)
    batch, modules = (
        data.draw(tiny.batches()),
        [data.draw(tiny.hashed()), tiny.SkipLeastAttended()][: data.draw(st.integers(1, 2))],
    )
    chunks = data.draw(st.none() | tiny.chunkings(batch.width))
    options = {"chunks": chunks, "decision_layers": layers}
    with tiny.unless_blind(model) as blind:
        masked = tiny.forward(model, batch, modules, execution="masked", **options)
    if blind:
        with pytest.raises(QuickSilverError, match="no key left"):
            tiny.forward(model, batch, modules, **options)
        return
    compact = tiny.forward(model, batch, modules, **options)
    tiny.assert_same_decisions(tiny.decisions(batch, compact.trace), tiny.decisions(batch, masked.trace))
    tiny.assert_close(batch.real(compact.logits), batch.real(masked.logits))


@pytest.mark.parametrize("missing_kv", ["drop", "project", "predict"])
@torch.no_grad()
def test_whoever_asks_for_the_states_between_layers_gets_them_whole(missing_kv: str) -> None:
    model = tiny.build("llama")
    asked = {"use_cache": False, "output_hidden_states": True}
    with apply(model, [Hashed(0.5, missing_kv=missing_kv)], decision_layers=[1], execution="masked"):
        wanted = model(**BATCH.inputs(), **asked).hidden_states
    model = tiny.build("llama")  # without the hooks that transformers has just set
    with apply(model, [Hashed(0.5, missing_kv=missing_kv)], decision_layers=[1]):
        carried = model(**BATCH.inputs(), use_cache=False).logits
        found = model(**BATCH.inputs(), **asked)
        tiny.assert_close(found.hidden_states, wanted)
        assert torch.equal(found.logits, carried)
    seen: list[torch.Tensor] = []
    model = tiny.build("llama")
    handle = model.model.layers[3].register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    with apply(model, [Hashed(0.5, missing_kv=missing_kv)], decision_layers=[1]):
        assert torch.equal(model(**BATCH.inputs(), use_cache=False).logits, carried)
    handle.remove()
    tiny.assert_close(seen[0], wanted[3])


@torch.no_grad()
def test_states_are_gathered_and_put_back_once_for_layers_with_the_same_tokens() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Puts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func.overloadpacket is aten.index_copy
            return func(*args, **(kwargs or {}))

    def puts(model, hooked: bool) -> int:
        handles = [layer.register_forward_hook(lambda *_: None) for layer in model.model.layers] if hooked else []
        with apply(model, [Hashed(0.5, missing_kv="drop")], decision_layers=[0]), Puts() as counting:
            model(**BATCH.inputs(), use_cache=False)
        for handle in handles:
            handle.remove()
        return counting.count

    model = tiny.build("llama")
    assert puts(model, hooked=False) == 1 < puts(model, hooked=True) == tiny.LAYERS - 1
