"""A capacity rule decides how many, not only who: shapes follow without asking the device, as a CUDA graph needs it (docs/design.md §2)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from thinning import diagonal
from torch.utils._python_dispatch import TorchDispatchMode

from quicksilver.baselines.halting import OneShotHalting, PromptPruning
from quicksilver.modules import ExponentialDecay, Halting, StagedHalting, StaticDepth
from quicksilver.runtime import LayerView, RuntimeModule, TokenPolicy, TokenState, apply

# `tolist` shows as `resolve_conj`, and does so in inference mode only.
WAITING = ("_local_scalar_dense", "resolve_conj", "nonzero", "masked_select", "bincount", "is_nonzero", "equal", "_unique2")


class Waits(TorchDispatchMode):
    """What would make a host wait for a GPU: operations whose result, or whose result's shape, the host must read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for arg in args
            if isinstance(arg, (list, tuple))
            for index in arg
        )
        if name in WAITING or by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits() -> Iterator[list[str]]:
    with Waits() as mode:
        yield mode.found


def halting(**options: Any) -> Halting:
    return Halting(**({"rule": "capacity", "missing_kv": "drop", "resume_layers": 0} | options))


class PredictsHalf(tiny.Halts):
    """Half of a prompt of 16 stops, its K/V predicted, and says how many that are."""

    missing_kv = "predict"

    def acts_at(self, layer: int) -> bool:
        return layer == 1

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        mask, translator = tokens.active & (view.slots % 2 == 1), self.translators[1]
        tokens.halt(mask, missing_kv="predict", translator=translator, count_per_row=8)


OLDEST = {"before": 1, "count": 4, "signal": "position", "missing_kv": "drop"}
STATIC = {
    "predicted": lambda: [PredictsHalf()],
    "one shot": lambda: [halting(schedule="one_shot", signal="random")],
    "gradual, drift": lambda: [halting(schedule="gradual", signal="drift")],
    "exponential, oldest": lambda: [halting(schedule="exponential", signal="position")],
    "least attended": lambda: [halting(schedule="one_shot", signal={"name": "attention", "last_queries": 4, "pool": 3})],
    "resumed": lambda: [halting(schedule="one_shot", resume_layers=1)],
    "sinks spared": lambda: [halting(schedule="one_shot", halted_share=0.4, protect_first=2)],
    "twice": lambda: [halting(schedule="one_shot", halted_share=0.2), ExponentialDecay(alpha=0.3, missing_kv="drop")],
    "decay": lambda: [ExponentialDecay(alpha=0.2, missing_kv="drop")],
    "staged": lambda: [
        StagedHalting(stages=[OLDEST, {"before": 4, "rest": True, "missing_kv": "project"}], protect_first=1, protect_last=3)
    ],
    "static depth": lambda: [StaticDepth(depth=0.5, missing_kv="drop")],
    "one-shot peer": lambda: [OneShotHalting(halted_share=0.5, start=0.4, missing_kv="drop")],
    "pruned": lambda: [PromptPruning(missing_kv="drop")],
}


@pytest.mark.parametrize(
    ("policy", "name", "use_cache"), diagonal(STATIC, ("gpt2", "llama", "gpt_neox"), (False, True), n=2 * len(STATIC))
)
def test_a_prompt_of_static_shapes_asks_the_device_nothing(policy: str, name: str, use_cache: bool) -> None:
    model, ids = tiny.load(name), torch.arange(2, 34).view(2, 16)

    def asked() -> list[str]:
        with waits() as found:  # transformers looks at the ids; not while a graph is captured
            cache = model(ids, use_cache=use_cache, logits_to_keep=1).past_key_values
        if policy == "static depth" and use_cache:  # its tokens after the prompt stop at half depth too
            with waits() as later:
                model(ids[:, :1], use_cache=True, past_key_values=cache)
            found += later
        return found

    with torch.inference_mode():
        of_its_own = asked()
    with torch.inference_mode(), apply(model, STATIC[policy]()) as run:
        run.count_decisions(False)  # torch's counter takes operations of a user's decision apart, and may read their scalars
        assert asked() == of_its_own
        # ... and something happened: fewer tokens than came in go through the last layers but those that resume.
        assert int(run.trace.passes[0].halt_layer.min()) < run.arch.n_layers - 1


@pytest.mark.parametrize("modules", [
    [Halting(tau_drift=10.0, missing_kv="drop", tau_entropy=None, resume_layers=0)],  # who halts decides how many
    [halting(schedule="one_shot", full_ids=[3])],  # how many are spared is in the ids
])  # fmt: skip
def test_what_depends_on_the_data_does_ask(modules: Sequence[RuntimeModule]) -> None:
    model, ids = tiny.load("llama"), torch.arange(2, 34).view(2, 16)
    with torch.inference_mode(), waits() as of_its_own:
        model(ids, use_cache=False)
    with torch.inference_mode(), apply(model, modules), waits() as found:
        model(ids, use_cache=False)
    assert len(found) > len(of_its_own)


@dataclass
class Misstated(TokenPolicy):
    """Halts five tokens of each row, and says something else about them."""

    said: dict[str, int]

    def acts_at(self, layer: int) -> bool:
        return layer == 1

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        tokens.halt(tokens.active & (view.slots > 0) & (view.slots < 6), missing_kv="drop", **self.said)


@pytest.mark.parametrize(("said", "message"), [
    ({"count_per_row": 6}, r"halt\(count_per_row=6\)"),
    ({"count_per_row": 5, "oldest_from": 0}, r"halt\(oldest_from=0\)"),
    ({"count_per_row": 5, "oldest_from": 2}, r"halt\(oldest_from=2\)"),
])  # fmt: skip
def test_a_wrong_statement_is_no_run(said: dict[str, int], message: str) -> None:
    model = tiny.load("llama")
    with torch.inference_mode(), apply(model, [Misstated(said)]), pytest.raises(RuntimeError, match=message):
        model(torch.arange(2, 34).view(2, 16))


@pytest.mark.parametrize("missing_kv", ["drop", "project", "zero", "copy"])
@pytest.mark.parametrize("resume_layers", [0, 1])
@given(dropped=st.integers(1, 6), first=st.integers(0, 3), last=st.integers(1, 5))
def test_the_oldest_are_cut_out_whole(missing_kv: str, resume_layers: int, dropped: int, first: int, last: int) -> None:
    """Without sorting or picking tokens one by one; with the same answer and the same cache."""
    model, ids = tiny.load("llama"), torch.arange(2, 34).view(2, 16)
    stages = [OLDEST | {"count": dropped}, {"before": 2, "rest": True, "missing_kv": missing_kv}]

    def answer(oldest: bool) -> tuple[torch.Tensor, ...]:
        module = StagedHalting(stages=stages, protect_first=first, protect_last=last, resume_layers=resume_layers)
        with torch.inference_mode(), apply(model, [module]) as run, pytest.MonkeyPatch.context() as patch:
            if oldest:  # sorting would fail
                patch.setattr("quicksilver.runtime.executions.join_kv", None)
            else:
                patch.setattr(StagedHalting, "halts_oldest", lambda self, layer: False)
            found = model(ids, use_cache=True)
            after = model(ids[:, :1], use_cache=True, past_key_values=found.past_key_values)
            return (
                found.logits,
                after.logits,
                *(part for layer in found.past_key_values.layers for part in layer.padded()),
                run.flops,
            )

    *cut, cut_flops = answer(oldest=True)
    *picked, picked_flops = answer(oldest=False)
    assert cut_flops == picked_flops
    for one, other in zip(cut, picked, strict=True):
        torch.testing.assert_close(one, other)
