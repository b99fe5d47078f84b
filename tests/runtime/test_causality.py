"""Invariants 3 and 4: however a sequence is cut into passes, and whatever comes after it, a causal run says the same."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import draws
from tiny import Batch, Hashed
from transformers import PreTrainedModel

from quicksilver.runtime import LayerView, RuntimeModule, TokenPolicy, TokenState

# -- 3: passes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "attention"), tiny.with_attention(tiny.MODELS))
@given(data=st.data(), execution=st.sampled_from(["compact", "masked"]))
@settings(max_examples=draws(3))
def test_one_pass_is_many(name: str, attention: str, execution: str, data: st.DataObject) -> None:
    """Prefill = token by token = any other cut, left padding included; passes that are padding for some rows as well."""
    model = tiny.load(name, attention)
    batch = data.draw(tiny.batches(low=2))
    modules = data.draw(tiny.causal_policies())
    with tiny.unless_blind(model) as blind:
        whole = tiny.forward(model, batch, modules, execution=execution)
    if blind:
        return
    for chunks in ([1] * batch.width, data.draw(tiny.chunkings(batch.width))):
        cut = tiny.forward(model, batch, modules, chunks=chunks, execution=execution)
        assert len(cut.trace.passes) == len(chunks)
        tiny.assert_same_decisions(tiny.decisions(batch, cut.trace), tiny.decisions(batch, whole.trace))
        tiny.assert_close(batch.real(cut.logits), batch.real(whole.logits))


# -- 4: no lookahead -------------------------------------------------------------------------------------------------------------


def leak(
    model: PreTrainedModel, module: RuntimeModule, row: tuple[int, ...], probe: int, seed: int, execution: str
) -> tuple[float, bool]:
    """Largest change of the logits up to `probe` when the tokens after it are replaced, and whether a decision up to it changed."""
    tail = torch.randint(1, tiny.VOCABULARY, (len(row) - probe - 1,), generator=torch.Generator().manual_seed(seed)).tolist()
    found = []
    for ids in (row, (*row[: probe + 1], *tail)):
        batch = Batch((ids,))
        outcome = tiny.forward(model, batch, [module], execution=execution)
        (decided,) = tiny.decisions(batch, outcome.trace)
        found.append((outcome.logits[0, : probe + 1], {name: x[: probe + 1] for name, x in decided.items()}))
    (logits, before), (others, after) = found
    return float((logits - others).abs().max()), any(not torch.equal(before[name], after[name]) for name in before)


ROWS = st.lists(st.integers(1, tiny.VOCABULARY - 1), min_size=4, max_size=16).map(tuple)


@pytest.mark.parametrize("name", tiny.thinned(tiny.MODELS))
@given(data=st.data(), row=ROWS, seed=st.integers(0, 99), execution=st.sampled_from(["compact", "masked"]))
@settings(max_examples=draws(8))
def test_what_comes_after_does_not_matter(
    name: str, data: st.DataObject, row: tuple[int, ...], seed: int, execution: str
) -> None:
    modules = data.draw(tiny.causal_policies())
    probe = data.draw(st.integers(0, len(row) - 2))
    for module in modules:
        difference, decided = leak(tiny.load(name), module, row, probe, seed, execution)
        assert difference < 1e-5 * (10 if name == tiny.STORIES else 1)  # its logits are ten times as large
        assert not decided


@dataclass
class Peeking(TokenPolicy):
    """Drops a token before an even one, and says that it is causal: it is not."""

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        if view.layer == 1:
            following = torch.cat([view.input_ids[:, 1:], view.input_ids[:, -1:]], dim=1)
            tokens.halt(tokens.active & (following % 2 == 0) & (view.slots > 0), missing_kv="drop")


@pytest.mark.parametrize("execution", ["compact", "masked"])
def test_the_same_check_finds_a_module_that_looks_ahead(execution: str) -> None:
    model = tiny.load("llama")
    leaks = [leak(model, Peeking(), tuple(range(3, 15)), probe, seed=1, execution=execution) for probe in range(2, 11)]
    assert any(decided for _, decided in leaks)
    assert max(difference for difference, _ in leaks) > 1e-2
    honest = [leak(model, Hashed(0.5), tuple(range(3, 15)), probe, seed=1, execution=execution) for probe in range(2, 11)]
    assert max(honest) < (1e-5, True)


@pytest.mark.parametrize("name", tiny.thinned(tiny.FAMILIES))
@given(data=st.data(), row=ROWS, seed=st.integers(0, 99))
@settings(max_examples=draws(4))
def test_after_a_prompt_that_looked_ahead_nothing_looks_ahead(
    name: str, data: st.DataObject, row: tuple[int, ...], seed: int
) -> None:
    """The `continuation` protocol: anything goes inside the prompt, and what follows is decided and predicted causally."""
    model = tiny.load(name)
    modules = data.draw(tiny.prompt_policies())
    prompt, probe = (2 * n for n in (1, len(row) // 4))
    other = (*row[: probe + 1], *((t * 7) % (tiny.VOCABULARY - 1) + 1 for t in row[probe + 1 :]))
    chunks = [prompt, len(row) - prompt]
    found = [tiny.forward(model, Batch((ids,)), modules, chunks=chunks) for ids in (row, other)]
    torch.testing.assert_close(found[0].logits[:, : probe + 1], found[1].logits[:, : probe + 1], atol=1e-5, rtol=1e-5)
