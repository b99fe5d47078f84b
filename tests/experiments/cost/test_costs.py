"""Table 7, Figure 16, the waterfall, deployment and memory, made of hand-made records: what is noise is called noise, what is missing is said."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import fakes
import pytest
from thinning import first

from quicksilver.experiments.cost import costs
from quicksilver.experiments.cost.components import TIMED, realization
from quicksilver.experiments.cost.costs import BELOW
from quicksilver.measure.components import BreakdownResult, ComponentsResult, Part
from quicksilver.measure.deployment import DeploymentResult, Percentiles, ServingResult
from quicksilver.measure.energy import EnergyResult, TokenEnergy
from quicksilver.measure.measurement import Quartiles, Result, Spread
from quicksilver.measure.memory import KvBytesByLayer, MemoryResult
from quicksilver.records.record import Record
from quicksilver.report import provenance
from quicksilver.report.artefacts import Artefact, Outcome, find
from quicksilver.report.claims.ledger import Source
from quicksilver.report.claims.reported import reported
from quicksilver.runtime.errors import ConfigError

DENSE_MS = {"embedding": 1.0, "attention": 50.0, "mlp": 40.0, "norms": 4.0, "kv_write": 2.0, "output_head": 2.0, "model": 1.0}
ARTEFACTS = [("table", "7"), ("figure", "16"), *(("table", name) for name in ("waterfall", "deployment", "memory"))]
ARTEFACTS += [("figure", "waterfall"), ("figure", "layer_times")]


def breakdown(ms: Mapping[str, float], iqr: float = 0.2) -> BreakdownResult:
    total = sum(ms.values())
    inside = ("attention", "mlp", "norms", "kv_write", "decisions")
    return BreakdownResult(
        {name: Part(one, iqr) for name, one in ms.items()}, {name: [one / 4] * 4 for name, one in ms.items() if name in inside},
        total / 1.02, total, 2.0,
    )  # fmt: skip


def joules(per_token: float | Literal["below resolution"]) -> TokenEnergy:
    grams = per_token if isinstance(per_token, str) else per_token * 1e-4
    return TokenEnergy(0.02, 2e-6, per_token, grams, 0.0001, 3, 1000)


def served(step: float, p99: float | None = 9.0) -> ServingResult:
    return ServingResult(Spread(10 * step, 1.0), Percentiles(step, 1.5 * step, p99), 300, 1000 / step, 100.0)


def costs_of(
    kind: str, *, measured: bool = True, run_j: float | Literal["below resolution"] = 0.008, noise: float = 1.0
) -> dict[str, Result]:
    """What `measure=cost` finds beside what every record has."""
    ours = DENSE_MS | {"attention": 30.0, "mlp": 39.9, "decisions": 3.0, "gather_scatter": 1.0, "runtime": 1.0}
    parts: tuple[Any, ...] = (breakdown(ours), Quartiles(0.8, 0.79, 0.82), Quartiles(1.04, 1.03, 1.06))
    answered: tuple[Any, ...] = (served(6.0, None), Quartiles(1.2, 1.19, 1.21), 3)
    used, kept, saved = joules(run_j), [100, 50], [0, 40]
    if kind == "dense":
        parts, answered, used, kept, saved = (), (), None, [100, 100], [0, 0]
    method = "RAPL" if measured else "no energy counter: a guess"
    return {
        "components": ComponentsResult("prompt", noise, breakdown(DENSE_MS), *parts),
        "energy": EnergyResult(joules(0.01), method, measured, 0.36, 5.0, 0.1, 2.0, 0.1, "FRA", used),
        "deployment": DeploymentResult(served(5.0), 256, 64, 50.0, 3.0, *answered),
        "memory": MemoryResult(5000, 5000, "kernel", 80, 100, KvBytesByLayer(kept, kept, [100, 100], saved)),
    }


CONFIG = {
    "seed": 0, "model": {"name": "reference-gpt2"}, "dataset": {"name": "python-docs"},
    "measure": {"name": "cost", "components": {"repeats": 5}},
}  # fmt: skip
PROMPT = int(fakes.DENSE_FLOPS * fakes.PROMPT_SHARE)
FLOPS = {"prompt_nominal_flops": PROMPT * 60 // 100, "prompt_executed_flops": PROMPT * 75 // 100}


def records(folder: Path, **how: Any) -> dict[str, Record]:
    """A dense record and one for every other row, all alike."""
    dense = fakes.make(folder, "dense continuation", "continuation", measured=costs_of("dense", **how), config=CONFIG)
    options = {"per_token": 0.01, "faster": 0.2, "measured": costs_of("run", **how), "config": CONFIG, **FLOPS}
    keys = [row.key for row in costs.rows() if row.key != costs.DENSE]
    return {costs.DENSE: dense} | {key: fakes.make(folder, key, "continuation", **options) for key in keys}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    return records(tmp_path_factory.mktemp("records"))


def outcomes(artefact: Artefact, made: Mapping[str, Record], *, without: str = "") -> list[Outcome]:
    rows = artefact.experiment.rows()
    return [Outcome(row, *((None, None, "failed") if row.key == without else (made[row.key], made[costs.DENSE]))) for row in rows]


def built(kind: str, name: str, made: Mapping[str, Record], **how: str) -> Any:
    artefact = find(kind, name)
    return artefact.build(outcomes(artefact, made, **how), "x")


@pytest.mark.parametrize(("kind", "name"), first(ARTEFACTS))
def test_every_artefact_is_the_same_bytes_twice_and_stands_without_a_record(kind: str, name: str, usual, tmp_path: Path) -> None:
    made = [built(kind, name, usual) for _ in range(2)]
    written = [{p.name: p.read_bytes() for p in one.write(tmp_path / str(i))} for i, one in enumerate(made)]
    assert written[0] == written[1]
    assert len(written[0]) == (3 if kind == "figure" else 4)
    assert built(kind, name, usual, without=costs.JOINT).write(tmp_path / "c")
    assert "reference-gpt2" in made[0].text(120)


def test_the_nine_records_are_shared() -> None:
    asked = {row.overrides for kind, name in ARTEFACTS for row in find(kind, name).experiment.rows()}
    assert len(asked) == 9  # halting alone is the first of the steps
    assert all("measure=cost" in overrides for overrides in asked)


def test_components_within_their_noise_are_no_speedup(usual) -> None:
    made = built("table", "7", usual)
    rows = made.frame.set_index("key")
    assert rows.loc[["attention", "total"], "joint_saved_pct"].tolist() == pytest.approx([40, 20])
    assert (rows.loc["attention", "reported_speedup_pct"], rows.loc["total", "reported_dense_ms"]) == (40.2, 121)
    lines = {line.split("  ")[1].strip(): line for line in made.text(None).splitlines() if line.startswith("  ")}
    assert lines["Feed-forward network"].count("≈ 0") == 2  # a quarter of a percent
    assert lines["Self-attention"].split()[-1] == "+40.0"
    assert lines["Sum off by %"].count("+2.0%") == 3
    listed = rows[rows["section"].isin(["The paper's rows", "What the paper leaves out"])]
    assert listed["joint_ms"].sum() == pytest.approx(rows.loc["sum", "joint_ms"])


def test_the_waterfall_follows_a_saving_to_the_joules(usual) -> None:
    made = built("table", "waterfall", usual)
    row = made.frame.set_index("key").loc[costs.JOINT]
    stages = {"nominal": 40, "executed": 25, "wall": 20, "joules": 20, "kernel": 100 * (1 - 76.9 / 97)}
    assert {name: row[f"{name}_saved_pct"] for name in stages} == pytest.approx(stages)
    assert (row["policy_pct"], row["realization"]) == pytest.approx((4, 0.8))
    assert "RAPL" in made.text(None)


def test_noise_is_neither_a_saving_nor_a_ratio(tmp_path: Path) -> None:
    made = built("table", "waterfall", records(tmp_path, noise=30.0, run_j=BELOW))
    line = next(line for line in made.text(None).splitlines() if "Quantization" in line)
    assert line.count("±30") == 3  # the policy, the kernels, the clock
    assert BELOW in line
    assert made.frame["realization"].isna().all()


def test_a_table_has_one_noise_floor_below_it_and_none_in_its_rows(usual, tmp_path: Path) -> None:
    noisy = usual | {costs.BUDGET: records(tmp_path, noise=9.0)[costs.BUDGET]}
    for name in ("7", "waterfall", "deployment"):
        text = built("table", name, noisy).text(None)
        said = next(line for line in text.splitlines() if "Noise floor of the clock (A/A)" in line)
        assert "pooled over" in said
        floors = re.findall(r"noise ([\d.]+)", text.partition("Noise floor of the clock")[0])
        # Only the spread of a component of one or two milliseconds, which is no floor of the clock.
        assert name == "7" or not floors
        assert all(float(one) > float(said.split("(A/A): ")[1].split("%")[0]) for one in floors)


@pytest.mark.parametrize(
    ("time", "flops", "noise", "ratio"),
    [(20, 25, 1, 0.8), (-10, 25, 1, -0.4), (0.5, 25, 1, None), (20, 0.5, 1, None), (-30, -25, 1, None)],
)
def test_a_ratio_needs_something_to_realize(time: float, flops: float, noise: float, ratio: float | None) -> None:
    assert realization(time, flops, noise) == (None if ratio is None else pytest.approx(ratio))


def test_an_estimate_of_joules_is_drawn_as_one_and_answers_no_claim(usual, tmp_path: Path) -> None:
    guessed, answers = records(tmp_path, measured=False), find("figure", "16").answered
    for made, method, said in ((usual, "RAPL", "a counter"), (guessed, "estimate", "estimated from the clock")):
        figure = built("figure", "16", made)
        assert set(figure.frame["method"]) == {method}
        assert said in " ".join(figure.caption)
        faster = answers["f2.joint.speedup_pct"].of({one.row.key: one for one in outcomes(find("figure", "16"), made)})
        assert faster.value == pytest.approx(20)
    assert answers["f2.joint.emissions_saved_pct"].of_record(usual[costs.JOINT]) is not None
    with pytest.raises(ConfigError, match="estimated"):
        answers["f2.joint.emissions_saved_pct"].of_record(guessed[costs.JOINT])


def test_simulated_widths_have_neither_time_nor_energy(usual, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = usual[costs.JOINT].fingerprint
    monkeypatch.setattr(Record, "simulated", property(lambda record: record.fingerprint == simulated))
    row = built("figure", "16", usual).frame.set_index("key").loc[costs.JOINT]
    assert row["method"] == "simulated"
    assert row.filter(regex="_pct$|_per_token$").drop(["reported_speedup_pct", "reported_emissions_pct"]).isna().all()
    waterfall, served, parts = (built("table", name, usual) for name in ("waterfall", "deployment", "7"))
    row = waterfall.frame.set_index("key").loc[costs.JOINT]
    assert row[["nominal_saved_pct", "executed_saved_pct"]].notna().all()
    assert row[[*TIMED, "policy_pct", "realization"]].isna().all()
    assert built("figure", "waterfall", usual).finding.endswith("of the 7 combinations that have a time")
    for table, count in ((waterfall, 4), (served, 3)):
        (line,) = (line for line in table.text(None).splitlines() if "+ Quantization" in line)
        assert line.count("simulated") == count
    assert "joint_ms" not in parts.frame
    assert parts.frame["budget_ms"].notna().any()


def test_layers_are_compared_with_the_dense_pass_of_their_own_record(usual) -> None:
    made = built("figure", "layer_times", usual)
    layers = made.frame.groupby(["run", "layer"])["pct_of_dense"].sum()
    assert layers[costs.DENSE].to_numpy() == pytest.approx(100)
    assert layers[costs.BUDGET].to_numpy() == pytest.approx(100 * 78.9 / 96)  # of attention, MLP, norms, KV write, decisions
    assert costs.JOINT in layers


@pytest.mark.parametrize(("kind", "name"), [("table", "7"), ("figure", "16"), ("table", "deployment")])
def test_claims_that_are_answered_are_claims(kind: str, name: str, usual) -> None:
    artefact = find(kind, name)
    source = Source(artefact, outcomes(artefact, usual), "")
    assert source.answers  # raises where a claim or a row is not there
    for claim, answer in source.answers:
        entry, _, quantity = claim.rpartition(".")
        assert quantity in reported()[entry].quantities
        estimate = answer.of(source.panels[answer.panel]) if answer.of else answer.of_record(usual[answer.key])
        assert estimate is None or estimate.low <= estimate.value <= estimate.high


def test_deployment_prints_no_percentile_that_was_not_measured(usual) -> None:
    made = built("table", "deployment", usual)
    joint = made.frame.set_index("key").loc[costs.JOINT]
    assert (joint["saved_pct"], joint["p99_ms"]) == pytest.approx((-20, float("nan")), nan_ok=True)
    assert "a prompt of 256 tokens, 64 new ones, 50 ms a token" in " ".join(made.legend)


def test_memory_sets_the_papers_formula_beside_what_is_resident(usual) -> None:
    joint = built("table", "memory", usual).frame.set_index("key").loc[costs.JOINT]
    assert (joint["kv_saved_pct"], joint["paper_saved_pct"], joint["kv_last_layer_saved_pct"]) == pytest.approx((25, 20, 50))
    assert joint["peak_tensor_saved_pct"] == pytest.approx(20)


def test_warnings_of_the_clock_are_printed_below_every_table(tmp_path: Path) -> None:
    options = {"measured": costs_of("dense"), "config": CONFIG}
    quiet = fakes.make(tmp_path, "quiet", "continuation", **options)
    said = ["load average 5.0 before timing, …: something else runs"]
    busy = fakes.make(tmp_path, "busy", "continuation", **options, timing_warnings=said)
    one, other = (Outcome(costs.rows()[0], record, record) for record in (quiet, busy))
    assert not any("uncertain" in line for line in provenance.notes([one]))
    (line,) = [line for line in provenance.notes([one, other]) if "uncertain" in line]
    assert "something else runs (1 of 2 records)" in line
