"""Component latency, energy and deployment as passes of a run: what they put into a record, and that they are not there when off."""

import dataclasses
import time
from pathlib import Path
from typing import Any, Literal

import fakes
import pytest
import torch

from quicksilver.cli.progress import summary
from quicksilver.measure import energy
from quicksilver.measure.bench import Bench
from quicksilver.measure.components import BreakdownResult, ComponentsResult, Part
from quicksilver.measure.deployment import DeploymentResult, Percentiles, ServingResult
from quicksilver.measure.energy import EnergyResult, TokenEnergy
from quicksilver.measure.measurement import Quartiles, Spread
from quicksilver.measure.perplexity import Protocol
from quicksilver.runs.config import compose
from quicksilver.runs.context import RunContext
from quicksilver.runs.parts import build_measurements, build_modules
from quicksilver.runs.run import measured_scalars
from quicksilver.runtime import ConfigError
from quicksilver.runtime.run import Run

torch.set_num_threads(1)
COST = [
    *("measure=cost", "measure.batch_windows=2", "measure.deployment.prompt_tokens=8", "measure.deployment.new_tokens=4"),
    *(f"measure.{name}.repeats=3" for name in ("latency", "components", "deployment")),
]
HALTING = ["modules=[static_depth]", "modules.static_depth.missing_kv=drop"]


class Meter:
    """Ten joules a second."""

    method, measured, grid_kg_per_kwh = "a test's meter", True, 0.4

    def start(self) -> None:
        self.began = time.perf_counter()

    def stop(self) -> float:
        return 10 * (time.perf_counter() - self.began)


def measured(world: list[str], monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[str, Any]:
    """What the measurements of such a run put into record.json."""
    monkeypatch.setattr(energy, "meter_of", lambda country: Meter())
    config = compose([*world, *COST, *overrides])
    measurements = build_measurements(config.measure)
    if "energy" in measurements:
        measurements["energy"].window_s = 0.02
    context = RunContext()
    bench = Bench(
        context.model(config).model, context.windows(config, "test"), Protocol(**dataclasses.asdict(config.protocol)),
        build_modules(config.modules), batch_windows=config.measure["batch_windows"],
    )  # fmt: skip
    return measured_scalars(bench, measurements, lambda phase, share: None)


def test_a_run_says_where_time_and_energy_go(world: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    counting = []  # is nobody while a clock runs, also where modules decide and all is computed
    monkeypatch.setattr(Run, "count_decisions", lambda run, counts: counting.append((run.execution, counts)))
    scalars = measured(world, monkeypatch, "protocol=continuation", *HALTING)
    assert ("decide", False) in counting
    components, energy, deployment = (scalars[section] for section in ("components", "energy", "deployment"))
    assert components["of"] == "prompt"
    for who in ("dense", "run"):
        parts = components[who]
        assert parts["sum_ms"] == pytest.approx(sum(part["median_ms"] for part in parts["components"].values()))
        assert len(parts["layers_ms"]["attention"]) == 6
        assert energy[who]["gross_j_per_token"] > 0
        assert energy[who]["tokens"] % (2 * 31) == 0  # two windows, whose last token is scored but not processed
    assert "runtime" in components["run"]["components"]
    assert {"run_ratio", "decide_ratio", "noise_floor_pct"} <= components.keys()
    assert (energy["method"], energy["measured"], energy["country_iso_code"]) == ("a test's meter", True, "USA")
    assert (deployment["prompt_tokens"], deployment["new_tokens"], deployment["budget_ms"]) == (8, 4, 50)
    assert deployment["run"]["tokens_timed"] == 9
    assert 0 <= deployment["same_first_tokens"] <= 4
    layers = scalars["kv_bytes_by_layer"]
    assert layers["billed"] == layers["resident"]
    saved = [dense - resident for dense, resident in zip(layers["dense"], layers["resident"], strict=True)]
    assert saved == layers["paper_saved"]
    assert saved[0] == 0 < saved[-1]
    assert scalars["peak_tensor_bytes"] > 0
    assert all(isinstance(section["timing_warnings"], list) for section in (scalars, components, deployment))


def test_a_dense_run_is_taken_apart_once(world: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    scalars = measured(world, monkeypatch, "protocol=all")
    assert scalars["components"]["of"] == "window"
    assert all("run" not in scalars[section] for section in ("components", "energy", "deployment"))
    assert "kv_write" not in scalars["components"]["dense"]["components"]  # no cache is written under `all`
    assert scalars["kv_bytes_by_layer"]["dense"] == []


def test_measurements_that_are_off_are_no_part_of_a_run(world: list[str]) -> None:
    plain = compose([*world, "measure=default"]).identity()["measure"]
    assert plain.keys() == {"batch_windows", "quality", "null_control", "audit", "flops", "latency", "memory"}
    idle = ["measure.energy.country_iso_code=FRA", "measure.deployment.budget_ms=20", "measure.components.repeats=9"]
    assert plain == compose([*world, "measure=default", *idle]).identity()["measure"]
    for off in ("measure.latency.enabled=false", "measure.latency=null", "measure.latency=false"):
        assert compose([*world, "measure=default", off]).identity()["measure"].keys() == plain.keys() - {"latency"}
    cost, more = (compose([*world, *COST, f"measure.components.repeats={n}"]).identity()["measure"] for n in (3, 9))
    assert {"components", "energy", "deployment"} <= cost.keys()
    assert cost != more


def test_a_prompt_that_outgrows_the_models_positions_is_refused(world: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [f"measure.{other}.enabled=false" for other in ("energy", "components", "latency", "flops", "memory")]
    with pytest.raises(ConfigError, match="new_tokens=60.*64 positions"):
        measured(world, monkeypatch, "protocol=all", *alone, "measure.deployment.new_tokens=60")


def test_the_summary_of_a_run_says_what_was_measured_and_what_to_take_care_of(tmp_path: Path) -> None:
    net: Literal["below resolution"] = "below resolution"
    measured = {
        "components": ComponentsResult("window", 1.0, BreakdownResult({"mlp": Part(3.0, 0.1), "norms": Part(1.0, 0.1)}, {}, 4.1, 4.0, -2.4)),
        "energy": EnergyResult(TokenEnergy(0.02, 2e-6, net, net, 1e-4, 3, 1000), "RAPL", True, 0.056, 5.0, 0.1, 2.0, 0.1, "FRA"),
        "deployment": DeploymentResult(ServingResult(Spread(30.0, 1.0), Percentiles(5.0, 7.0, None), 60, 190.0, 100.0), 256, 64, 50.0, 3.0),
    }  # fmt: skip
    warnings = ["load average 9.0 before timing: something"]
    text = summary(fakes.make(tmp_path, "dense all", measured=measured, timing_warnings=warnings))
    assert "mlp 3.0 ms, norms 1.0 ms of 4.1 ms; sum off by -2.4%" in text
    assert "below resolution (RAPL; 0.056 kg/kWh, FRA)" in text
    assert "30.0 ms to the first token, 5.0 ms a token (p95 7.0), 100% within 50 ms" in text
    served = measured["deployment"]
    within = "≈ 0 of a token's time saved: -2.0% is within the noise"
    for ratio, said in ((1.02, within), (1.5, "-50.0% of a token's time saved (slower; ")):
        run = dataclasses.replace(served, run=served.dense, per_token_ratio=Quartiles(ratio, ratio - 0.01, ratio + 0.01))
        assert said in run.line()
    assert "care         load average 9.0" in text
