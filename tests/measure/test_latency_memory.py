"""Order, statistics and refusals of the stopwatch; that a peak is seen. No test here asserts how long anything takes."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from harness_world import make_world
from tiny import Batch, Hashed, load

from quicksilver.measure import Alternation, LatencySamples, alternate, memory, peak_memory
from quicksilver.measure import latency as stopwatch
from quicksilver.measure.memory import MemoryResult, paper_kv_delta_bytes, peak_tensor_bytes
from quicksilver.records.record import load_record
from quicksilver.runs.config import compose
from quicksilver.runs.run import ensure
from quicksilver.runtime import QuickSilverError, apply

MIB = 1 << 20


def test_callables_take_turns_and_the_first_is_its_own_control() -> None:
    calls: list[str] = []
    fns = {name: (lambda name=name: calls.append(name)) for name in ("dense", "halting", "skipping")}
    result = alternate(fns, warmup=2, repeats=3)
    warm_up = ["dense", "halting", "skipping"] * 2
    assert calls == warm_up + ["dense", "halting", "skipping", "dense"] * 3
    assert list(result) == ["dense", "halting", "skipping"]
    assert all(len(samples.ms) == 3 for samples in result.values())
    assert result.control == "dense"
    assert len(result.control_ms) == 3


def test_times_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])

    def takes(*seconds: float):
        durations = iter(seconds)

        def fn() -> None:
            now[0] += next(durations)

        return fn

    # a: warm-up, then (sample, control) × 3
    result = alternate({"a": takes(9.0, 1.0, 1.5, 2.0, 2.0, 3.0, 3.0), "b": takes(9.0, 0.5, 1.5, 1.5)}, warmup=1, repeats=3)
    assert result["a"].ms == pytest.approx([1000, 2000, 3000])
    assert result["a"].median == pytest.approx(2000)
    assert result["a"].iqr == pytest.approx(1000)
    assert result.noise_floor == pytest.approx(0.25)  # ratios 1.5, 1, 1: the upper quartile
    ratio = result.ratio("b", "a")
    assert ratio.median == pytest.approx(0.5)
    assert (ratio.low, ratio.high) == pytest.approx((0.5, 0.625))


def test_an_exception_leaves_the_garbage_collector_as_it_was() -> None:
    import gc

    def fails() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        alternate({"a": fails}, warmup=0)
    assert gc.isenabled()


@pytest.mark.parametrize("method", ["kernel", "sampling"])
def test_a_peak_that_is_gone_afterwards_is_seen(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if method == "sampling":
        monkeypatch.setattr(memory, "_reset_high_water_mark", lambda: False)
    elif not memory._reset_high_water_mark():
        pytest.skip("this system keeps no high-water mark that can be reset")

    def allocate() -> None:
        for _ in range(20):  # long enough for a sampler that looks every 2 ms
            np.ones(64 * MIB, dtype=np.uint8)

    result = peak_memory(allocate)
    assert result.method == method
    assert result.device_bytes is None
    assert result.bytes == result.process_bytes
    assert result.process_bytes - result.before_bytes > 48 * MIB
    again = peak_memory(lambda: None)
    assert again.process_bytes - again.before_bytes < 16 * MIB  # the earlier peak does not linger


def some_times(**around: float) -> Alternation:
    return Alternation({"a": LatencySamples([1.0, 1.0, 1.0])}, **({"load_before": 0.0, "load_after": 0.0} | around))  # type: ignore[arg-type]


def test_another_load_and_a_clock_that_jumps_are_said() -> None:
    ours = torch.get_num_threads()
    assert some_times().warnings == []
    assert some_times(load_before=ours + 0.4, seconds=100, clock_gap_s=0.15).warnings == []  # ours; a clock being adjusted
    (busy,) = some_times(load_before=ours + 2.0).warnings
    assert f"load average {ours + 2.0:.1f}" in busy
    for gap in (3600.0, -5.0):
        (jumped,) = some_times(seconds=100, clock_gap_s=gap).warnings
        assert f"jumped by {gap:+.1f} s" in jumped


def test_a_machine_that_sleeps_while_it_is_timed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, on_wall = [0.0], [1e9]

    def takes_a_second() -> None:
        now[0] += 1
        on_wall[0] += 1

    def sleeps() -> None:  # the clock that times stands still meanwhile, the one on the wall does not
        takes_a_second()
        on_wall[0] += 60

    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(stopwatch.time, "time", lambda: on_wall[0])
    assert alternate({"a": takes_a_second}, warmup=0, repeats=3).clock_gap_s == 0
    assert "jumped by +180.0 s" in alternate({"a": takes_a_second, "b": sleeps}, warmup=0, repeats=3).warnings[-1]


def test_a_clock_that_runs_backwards_gives_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def takes(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    for seconds in (-1.0, 0.0):
        with pytest.raises(QuickSilverError, match="b: the clock stood still or ran backwards"):
            alternate({"a": lambda: takes(1.0), "b": lambda seconds=seconds: takes(seconds)}, warmup=0, repeats=3)


def test_a_peak_of_tensors_is_exact_and_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    kept: list[torch.Tensor] = [torch.zeros(MIB, dtype=torch.uint8)]

    def two_at_a_time() -> None:
        kept.clear()  # older than the measurement: its end is no allocation
        first = torch.empty(3 * MIB, dtype=torch.uint8)
        second = torch.empty(5 * MIB, dtype=torch.uint8)
        del first
        torch.empty(MIB, dtype=torch.uint8)
        kept.append(second)

    assert peak_tensor_bytes(two_at_a_time) == 8 * MIB
    assert peak_tensor_bytes(lambda: None) == 0

    kept.clear()

    def in_a_cycle() -> None:
        cycle: list[object] = [torch.empty(MIB, dtype=torch.uint8)]
        cycle.append(cycle)

    assert peak_tensor_bytes(in_a_cycle) == MIB  # waits for the collector: its end is not the next call's
    assert peak_tensor_bytes(lambda: (gc.collect(), two_at_a_time())) == 8 * MIB
    kept.clear()
    assert capfd.readouterr().err == ""


@torch.no_grad()
def test_cache_bytes_of_the_layers_add_up_and_the_papers_formula_is_evaluated_on_the_trace() -> None:
    model = load("llama")
    batch = Batch(((5, 9, 2, 33, 7, 8, 21, 4), (7, 7, 31, 5, 1, 2, 40, 8)))
    with apply(model, []) as run:
        assert run.kv_bytes_by_layer == []
        model(**batch.inputs(), use_cache=True)
        dense = run.kv_bytes_by_layer
        assert paper_kv_delta_bytes(run.trace, run.arch, 4) == [0] * run.arch.n_layers
    with apply(model, [Hashed(halt=0.4, missing_kv="drop")]) as run:
        model(**batch.inputs(), use_cache=True)
        layers = run.kv_bytes_by_layer
        assert sum(layer.billed for layer in layers) == run.kv_bytes.billed
        assert sum(layer.resident for layer in layers) == run.kv_bytes.resident < sum(layer.resident for layer in dense)
        # Halted tokens that leave nothing behind: here the formula of App. J is what is really saved.
        saved = [plain.resident - layer.resident for plain, layer in zip(dense, layers, strict=True)]
        assert paper_kv_delta_bytes(run.trace, run.arch, 4) == saved
        assert saved[-1] > 0


def test_the_dense_side_of_memory_is_the_same_whether_another_run_weighed_it_before(tmp_path) -> None:
    """In a process that made other runs, and in one of its own."""
    words = [*make_world(tmp_path), "protocol=continuation", "measure.memory.enabled=true"]
    skipping = [*words, "modules=[halting_attention]"]
    sides = []
    for results, configs in (("alone", [skipping]), ("after", [[*words, "modules=[random_halting]"], skipping])):
        *_, record = ensure([compose([*one, f"results_dir={tmp_path / results}"]) for one in configs])
        found = record.measured("memory", MemoryResult)
        sides.append((found.dense_peak_tensor_bytes, found.kv_bytes_by_layer.dense))
    assert sides[0][1] == sides[1][1]
    assert sides[0][0] == sides[1][0]
    assert sum(sides[0][1]) > 0
    dense = load_record(record.path.parent / record.dense_fingerprint).measured("memory", MemoryResult)
    assert dense.peak_tensor_bytes == dense.dense_peak_tensor_bytes == sides[0][0]
    assert dense.kv_bytes_by_layer.resident == dense.kv_bytes_by_layer.dense == sides[0][1]
