"""Stopwatches: callables take turns, every moment of a pass belongs to one component, every token served has a time. How long anything takes,
no test asserts."""

import ctypes
import gc
import resource
import statistics
from collections.abc import Callable
from functools import partial
from itertools import chain, count, repeat

import psutil
import pytest
import torch
from drawing import all_four
from thinning import first
from tiny import FAMILIES, VOCABULARY, Never, build, ids, left_untouched, load, refused, unlike_first
from transformers.cache_utils import Cache

from quicksilver.measure import Alternation, LatencySamples, alternate, components
from quicksilver.measure import latency as stopwatch
from quicksilver.measure.components import COMPONENTS, KERNELS, OF_PHASE, SectionClock, Subject, component_latency, watching
from quicksilver.measure.deployment import Percentiles, Served, ServingResult, deployment, serve
from quicksilver.modules import StaticDepth
from quicksilver.runtime import QuickSilverError, apply, architecture_of, phases


# -- turns -------------------------------------------------------------------------------------------------------------------------
class Clock:
    """The clock that times and the one on the wall; work moves them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.on_wall = 0.0, 1e9
        monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(stopwatch.time, "time", lambda: self.on_wall)

    def takes(self, *seconds: float, asleep: float = 0.0) -> Callable[[], None]:
        """A call takes the next of `seconds`, the last again and again; meanwhile `asleep` more pass on the wall alone."""
        durations = chain(seconds, repeat(seconds[-1]))

        def fn() -> None:
            passed = next(durations)
            self.now += passed
            self.on_wall += passed + asleep

        return fn


def test_times_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    # Warm-up, then three rounds; the call of a that ends a round begins the next.
    fns = {"a": clock.takes(9.0, 1.0, 2.0, 3.0, 3.0), "b": clock.takes(9.0, 0.5, 1.5, 1.5)}
    result = alternate(fns, warmup=1, repeats=3)
    assert result["a"].ms == pytest.approx([1000, 2000, 3000])
    assert (result["a"].median, result["a"].iqr) == pytest.approx((2000, 1000))
    assert result.control_ms == pytest.approx([2000, 3000, 3000])
    assert result.noise_floor == pytest.approx(0.75)  # ratios 2, 1.5, 1: the upper quartile
    ratio = result.ratio("b", "a")
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((0.5, 0.5, 0.625))
    assert result.clock_gap_s == pytest.approx(0)


def test_a_machine_that_sleeps_while_it_is_timed_is_noticed_and_a_clock_that_runs_backwards_gives_no_time(monkeypatch):
    clock = Clock(monkeypatch)
    second = clock.takes(1.0)
    assert "jumped by +180.0 s" in alternate({"a": second, "b": clock.takes(1.0, asleep=60)}, 0, 3).warnings[-1]
    for seconds in (-1.0, 0.0):
        with refused("b: the clock stood still or ran backwards", QuickSilverError):
            alternate({"a": second, "b": clock.takes(seconds)}, warmup=0, repeats=3)
        assert gc.isenabled()  # it is off while something is timed


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone gives pages back between two calls")
def test_what_a_timed_call_frees_is_touched_once_and_given_back_at_the_end() -> None:
    faults: list[int] = []

    def call() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        # 256 MiB, 65,536 pages of 4 KiB; 4 KiB fewer each time, or alignment may keep it from the place that is free.
        torch.ones(2**26 - 2**10 * len(faults))
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    before = psutil.Process().memory_info().rss
    alternate({"call": call}, warmup=4, repeats=4)
    assert statistics.median(faults[4:]) < 100 < faults[0]
    assert psutil.Process().memory_info().rss - before < 2**27


def test_another_load_and_a_clock_that_jumps_are_said() -> None:
    ours, some_times = torch.get_num_threads(), partial(Alternation, {"a": LatencySamples([1.0, 1.0, 1.0])})
    assert some_times().warnings == []
    assert some_times(load_before=ours + 0.4, seconds=100, clock_gap_s=0.15).warnings == []  # ours; a clock being adjusted
    (busy,) = some_times(load_before=ours + 2.0).warnings
    assert f"load average {ours + 2.0:.1f}" in busy
    for gap in (3600.0, -5.0):
        (jumped,) = some_times(seconds=100, clock_gap_s=gap).warnings
        assert f"jumped by {gap:+.1f} s" in jumped


# -- a pass taken apart ------------------------------------------------------------------------------------------------------------
CPU = torch.device("cpu")
BATCH = ids(2, 12)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by one second whenever somebody looks: a section's time is then how often it was innermost."""
    monkeypatch.setattr(components.time, "perf_counter", count(1.0).__next__)


def test_every_phase_of_the_runtime_is_a_component_and_inner_ones_are_not_counted_in_outer_ones(ticks: None) -> None:
    assert OF_PHASE.keys() == phases.PHASES.keys()
    assert set(OF_PHASE.values()) <= set(COMPONENTS)
    clock = SectionClock(CPU)
    clock.enter("model")  # looks at 1
    clock.enter("norms", 3)  # 2
    clock.enter("attention")  # 3, in the same layer
    for _ in range(3):  # 4, 5, 6
        clock.leave()
    assert clock.times_ms() == {("model", None): 2000, ("norms", 3): 2000, ("attention", 3): 1000}


@pytest.mark.parametrize("family", first(unlike_first(FAMILIES), 2))
def test_a_dense_pass_has_the_models_own_components_in_every_layer(family: str, ticks: None) -> None:
    model = load(family)
    arch = architecture_of(model)
    call = torch.no_grad()(lambda: model(BATCH, use_cache=True))
    found, times = component_latency({"dense": Subject(arch, call)}, warmup=1, repeats=3)
    dense = found["dense"]
    assert set(dense.components) == {*KERNELS, "kv_write", "model"}
    for component in ("attention", "mlp", "norms", "kv_write"):
        assert len(dense.layers_ms[component]) == arch.n_layers
        assert min(dense.layers_ms[component]) > 0
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
            model(BATCH, use_cache=True)

        dense = Subject(architecture_of(plain), lambda: plain(BATCH))
        subjects = {"dense": dense, "run": Subject(run.arch, call, run.modules)}
        found, times = component_latency(subjects, 0, 3, besides={"decide": call})
    assert set(found["run"].components) == set(COMPONENTS)
    assert not {"decisions", "fusion", "quantization", "runtime"} & set(found["dense"].components)
    assert list(times) == ["dense", "run", "decide"]
    assert found["run"].layers_ms["decisions"][-1] == 0  # after the last layer there is nothing left to decide


def test_entropy_does_not_look_like_the_models_output_head(ticks: None) -> None:
    model, marks = load("gpt2"), []
    for entropy in (True, False):
        clock = SectionClock(CPU)
        with torch.no_grad(), apply(model, [Never(entropy=entropy)]) as run, watching(run.arch, run.modules, clock):
            model(BATCH, use_cache=False)
        marks.append(clock.times_ms()["output_head", None])
    assert marks[0] == marks[1] > 0


def test_watching_changes_no_logit_and_leaves_nothing() -> None:
    model, modules, update = load("llama"), all_four(), vars(Cache)["update"]
    with left_untouched(model), torch.no_grad(), apply(model, modules) as run:
        own = [dict(vars(module)) for module in modules]
        expected = model(BATCH, use_cache=True).logits
        run.reset()
        with watching(run.arch, run.modules, SectionClock(CPU)):
            assert vars(Cache)["update"] is not update
            assert len(phases._observers) == 1
            assert torch.equal(model(BATCH, use_cache=True).logits, expected)
        assert [set(vars(module)) for module in modules] == [set(one) for one in own]
        with pytest.raises(IndexError), watching(run.arch, run.modules, SectionClock(CPU)):
            model(torch.full((1, 3), VOCABULARY + 1))
    assert vars(Cache)["update"] is update
    assert not phases._observers


# -- one request at a time ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@torch.no_grad()
def test_served_tokens_are_those_of_greedy_decoding_and_of_the_modules(family: str) -> None:
    model, new = load(family), 9
    prompt = text = torch.tensor([[5, 9, 2, 33, 7, 5, 9, 2, 33, 7, 5, 9, 2]])
    for _ in range(new):
        logits = model(text, use_cache=False).logits[:, -1]
        logits[:, model.generation_config.eos_token_id] = -torch.inf
        text = torch.cat([text, logits.argmax(-1, keepdim=True)], dim=1)
    greedy = text[0, -new:].tolist()
    served = serve(model, prompt, new)
    assert served.tokens == greedy
    assert len(served.per_token_ms) == new - 1
    assert 0 < served.first_ms <= served.first_ms + sum(served.per_token_ms) <= served.total_ms
    served = serve(model, prompt, new, {"prompt_lookup_num_tokens": 3})  # several at a time
    assert served.tokens == greedy
    assert len(served.per_token_ms) <= new - 1  # what came with the first token has no time of its own
    with apply(model, [StaticDepth(depth=0.2, missing_kv="drop")]) as run:
        assert serve(model, prompt, new).tokens != greedy
        assert len(run.trace.passes) == new


def served(step_ms: float, tokens: int = 5) -> Served:
    steps = [step_ms] * (tokens - 1)
    return Served(10.0, steps, 10.0 + sum(steps), list(range(tokens)))


def test_ways_take_turns_and_the_first_is_its_own_control_and_a_hundred_tokens_have_a_99th_percentile() -> None:
    order: list[str] = []
    steps = {"dense": iter([9.0, 40.0, 44.0, 40.0, 40.0]), "run": iter([9.0, 60.0, 60.0, 80.0])}

    def way(name: str) -> Served:
        order.append(name)
        return served(next(steps[name]))

    found, times = deployment({name: partial(way, name) for name in steps}, warmup=1, repeats=3)
    assert order == ["dense", "run"] + ["dense"] + ["run", "dense"] * 3
    assert times["dense"].ms == [40, 44, 40]
    assert times.control_ms == [44, 40, 40]
    assert times.ratio("run", to="dense").median == pytest.approx(1.5)
    assert times.noise_floor == pytest.approx(0.05)
    run = ServingResult.of(found["run"], 50.0)
    assert run.per_token_ms == Percentiles(60, 80, None)  # twelve tokens have no 99th percentile
    assert run.within_budget_pct == 0
    assert ServingResult.of(found["dense"], 50.0).within_budget_pct == 100
    many = ServingResult.of([served(float(ms), 51) for ms in (40, 60)], budget_ms=50.0)
    assert (many.tokens_timed, many.per_token_ms.p99, many.within_budget_pct) == (100, 60, 50)
    assert many.tokens_per_s == pytest.approx((51 / 2.010 + 51 / 3.010) / 2)
