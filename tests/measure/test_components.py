"""A pass taken apart: every moment belongs to one component, and nothing of the clockwork stays. No test asserts how long anything takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from drawing import all_four
from thinning import first
from tiny import FAMILIES, VOCABULARY, Batch, Never, build, load, unlike_first
from transformers.cache_utils import Cache

from quicksilver.measure import components
from quicksilver.measure.components import COMPONENTS, KERNELS, OF_PHASE, SectionClock, Subject, component_latency, watching
from quicksilver.runtime import apply, architecture_of, phases

CPU = torch.device("cpu")
BATCH = Batch(((5, 9, 2, 33, 7, 8, 21, 4, 50, 3, 11, 60), (7, 7, 31, 5, 1, 2, 40, 8, 9, 30, 22, 6)))


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that goes on by one second whenever somebody looks: a section's time is then how often it was innermost."""
    now = [0.0]

    def look() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(components.time, "perf_counter", look)
    yield now


def test_every_phase_of_the_runtime_is_a_component() -> None:
    assert OF_PHASE.keys() == phases.PHASES.keys()
    assert set(OF_PHASE.values()) <= set(COMPONENTS)


def test_inner_sections_are_not_counted_in_outer_ones(ticks: list[float]) -> None:
    clock = SectionClock(CPU)
    clock.enter("model")  # looks at 1
    clock.enter("norms", 3)  # 2
    clock.enter("attention")  # 3, in the same layer
    clock.leave()  # 4
    clock.leave()  # 5
    clock.leave()  # 6
    assert clock.times_ms() == {("model", None): 2000, ("norms", 3): 2000, ("attention", 3): 1000}
    assert sum(clock.times_ms().values()) == 1000 * (ticks[0] - 1)


@pytest.mark.parametrize("family", first(unlike_first(FAMILIES), 2))
def test_a_dense_pass_has_the_models_own_components_in_every_layer(family: str, ticks: list[float]) -> None:
    model = load(family)
    arch = architecture_of(model)

    def call() -> None:
        with torch.no_grad():
            model(**BATCH.inputs(), use_cache=True)

    found, times = component_latency({"dense": Subject(arch, call)}, warmup=1, repeats=3)
    dense = found["dense"]
    assert set(dense.components) == {*KERNELS, "kv_write", "model"} <= set(COMPONENTS)
    for component in ("attention", "mlp", "norms", "kv_write"):
        assert len(dense.layers_ms[component]) == arch.n_layers
        assert all(ms > 0 for ms in dense.layers_ms[component])
        assert sum(dense.layers_ms[component]) == dense.components[component].median_ms
    assert list(times) == ["dense"]
    assert times.noise_floor is not None
    assert dense.sum_ms == sum(part.median_ms for part in dense.components.values())
    assert dense.residual_pct == pytest.approx(100 * (dense.sum_ms / dense.headline_ms - 1))


@pytest.mark.parametrize("family", first(["gpt2", "llama", "gpt_neox"]))
def test_all_four_mechanisms_have_their_components_and_decide_alone_is_timed_beside_them(family: str) -> None:
    model, plain = load(family), build(family)
    with torch.no_grad(), apply(model, all_four()) as run:

        def call() -> None:
            run.reset()
            model(**BATCH.inputs(), use_cache=True)

        subjects = {
            "dense": Subject(architecture_of(plain), lambda: plain(**BATCH.inputs())),
            "run": Subject(run.arch, call, run.modules),
        }
        found, times = component_latency(subjects, 0, 3, besides={"decide": call})
    assert set(found["run"].components) == set(COMPONENTS)
    assert not {"decisions", "fusion", "quantization", "runtime"} & set(found["dense"].components)
    assert list(times) == ["dense", "run", "decide"]
    skipped = found["run"].layers_ms["decisions"][-1]
    assert skipped == 0  # after the last layer there is nothing left to decide


def test_entropy_does_not_look_like_the_models_output_head(ticks: list[float]) -> None:
    model = load("gpt2")

    def head_marks(entropy: bool) -> float:
        module = Never(entropy=entropy)
        with torch.no_grad(), apply(model, [module]) as run:
            clock = SectionClock(CPU)
            with watching(run.arch, run.modules, clock):
                model(**BATCH.inputs(), use_cache=False)
        return sum(ms for (component, _), ms in clock.times_ms().items() if component == "output_head")

    assert head_marks(entropy=True) == head_marks(entropy=False) > 0


def test_watching_changes_no_logit_and_leaves_nothing() -> None:
    model = load("llama")
    update = vars(Cache)["update"]
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
    modules = all_four()
    with torch.no_grad(), apply(model, modules) as run:
        own = [dict(vars(module)) for module in modules]
        expected = model(**BATCH.inputs(), use_cache=True).logits
        run.reset()
        with watching(run.arch, run.modules, SectionClock(CPU)):
            assert vars(Cache)["update"] is not update
            assert len(phases._observers) == 1
            assert torch.equal(model(**BATCH.inputs(), use_cache=True).logits, expected)
        assert [set(vars(module)) for module in modules] == [set(one) for one in own]
        with pytest.raises(IndexError), watching(run.arch, run.modules, SectionClock(CPU)):
            model(torch.full((1, 3), VOCABULARY + 1))
    assert vars(Cache)["update"] is update
    assert not phases._observers
    assert sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()) == hooks
