"""A capacity rule decides how many, not only who: shapes follow without asking the device, as a CUDA graph needs it (docs/design.md §2).
And no state is moved twice."""

from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import diagonal, draws
from torch.utils._python_dispatch import TorchDispatchMode

from quicksilver.baselines.halting import OneShotHalting, PromptPruning
from quicksilver.modules import ExponentialDecay, Halting, StagedHalting, StaticDepth
from quicksilver.runtime import Flops, LayerView, RuntimeModule, TokenState, apply

# `tolist` shows as `resolve_conj`, and does so in inference mode only.
WAITING = ("_local_scalar_dense", "resolve_conj", "nonzero", "masked_select", "bincount", "is_nonzero", "equal", "_unique2")


class Calls(TorchDispatchMode):
    """What is computed: `all` operations, and those that `wait`, because the host must read their result or its shape from a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.wait = list[str](), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for arg in args
            if isinstance(arg, (list, tuple))
            for index in arg
        )
        self.all.append(name)
        if name in WAITING or by_mask:
            self.wait.append(name)
        return func(*args, **(kwargs or {}))


def halting(**options: Any) -> Halting:
    return Halting(**({"rule": "capacity", "missing_kv": "drop", "resume_layers": 0} | options))


class PredictsHalf(tiny.HaltAll):
    """Half of a prompt of 16 stops, its K/V predicted, and says how many that are."""

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        mask, translator = tokens.active & (view.slots % 2 == 1), self.translators[1]
        tokens.halt(mask, missing_kv="predict", translator=translator, count_per_row=8)


OLDEST = {"before": 1, "count": 4, "signal": "position", "missing_kv": "drop"}
STATIC = {
    "predicted": lambda: [PredictsHalf(1, "predict")],
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
        with Calls() as mode:  # transformers looks at the ids; not while a graph is captured
            cache = model(ids, use_cache=use_cache, logits_to_keep=1).past_key_values
            if policy == "static depth" and use_cache:  # its tokens after the prompt stop at half depth too
                model(ids[:, :1], use_cache=True, past_key_values=cache)
        return mode.wait

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
    with torch.inference_mode(), Calls() as of_its_own:
        model(ids, use_cache=False)
    with torch.inference_mode(), apply(model, modules), Calls() as mode:
        model(ids, use_cache=False)
    assert len(mode.wait) > len(of_its_own.wait)


@pytest.mark.parametrize(("said", "message"), [
    ({"count_per_row": 6}, r"halt\(count_per_row=6\)"),
    ({"count_per_row": 5, "oldest_from": 0}, r"halt\(oldest_from=0\)"),
    ({"count_per_row": 5, "oldest_from": 2}, r"halt\(oldest_from=2\)"),
])  # fmt: skip
def test_a_wrong_statement_is_no_run(said: dict[str, int], message: str) -> None:
    five = lambda view, tokens: tokens.halt(tokens.active & (view.slots > 0) & (view.slots < 6), missing_kv="drop", **said)
    with pytest.raises(RuntimeError, match=message):
        tiny.forward(tiny.load("llama"), tiny.EVEN, [tiny.Does(five, at=1)])


@pytest.mark.parametrize("missing_kv", ["drop", "project", "zero", "copy"])
@pytest.mark.parametrize("resume_layers", [0, 1])
@given(dropped=st.integers(1, 6), first=st.integers(0, 3), last=st.integers(1, 5))
@settings(max_examples=draws(6))
def test_the_oldest_are_cut_out_whole(missing_kv: str, resume_layers: int, dropped: int, first: int, last: int) -> None:
    """Without sorting or picking tokens one by one; with the same answer and the same cache."""
    model, ids = tiny.load("llama"), torch.arange(2, 34).view(2, 16)
    stages = [OLDEST | {"count": dropped}, {"before": 2, "rest": True, "missing_kv": missing_kv}]

    def answer(oldest: bool) -> tuple[list[torch.Tensor], Flops]:
        module = StagedHalting(stages=stages, protect_first=first, protect_last=last, resume_layers=resume_layers)
        with torch.inference_mode(), apply(model, [module]) as run, pytest.MonkeyPatch.context() as patch:
            if oldest:  # sorting would fail
                patch.setattr("quicksilver.runtime.executions.join_kv", None)
            else:
                patch.setattr(StagedHalting, "halts_oldest", lambda self, layer: False)
            found = model(ids, use_cache=True)
            after = model(ids[:, :1], use_cache=True, past_key_values=found.past_key_values)
            stored = [part for layer in found.past_key_values.layers for part in layer.padded()]
            return [found.logits, after.logits, *stored], run.flops

    (cut, cut_flops), (picked, picked_flops) = answer(oldest=True), answer(oldest=False)
    assert cut_flops == picked_flops
    torch.testing.assert_close(cut, picked)


def test_states_are_gathered_and_put_back_once_for_layers_with_the_same_tokens() -> None:
    model, puts = tiny.build("llama"), list[int]()
    for hooked in (False, True):
        if hooked:
            for layer in model.model.layers:
                layer.register_forward_hook(lambda *_: None)
        with apply(model, [tiny.Hashed(0.5, missing_kv="drop")], decision_layers=[0]), Calls() as calls:
            model(**tiny.EVEN.inputs(), use_cache=False)
        puts.append(calls.all.count("index_copy"))
    assert puts == [1, tiny.LAYERS - 1]
