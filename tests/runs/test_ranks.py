"""`model.parallel=tensor` under torchrun is a run like any other: one record, of the numbers of one process, with the ledgers of each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

from quicksilver.cli import main as console
from quicksilver.measure.flops import RanksResult
from quicksilver.measure.latency import DevicesResult
from quicksilver.records.record import load_record, record_frame
from quicksilver.runs.config import compose

ASKED = ["model=reference-llama", "modules=[static_depth]", "protocol=continuation", "measure=ranks"]
ASKED += ["dataset.windows=8", "threads=1"]


def started(*words: str, processes: int = 2, fails: bool = False) -> subprocess.CompletedProcess[str]:
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command, environment = [sys.executable, *ranks, "-m", "quicksilver", "run", *words], {**os.environ, "PYTHONPATH": str(ROOT)}
    made = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=1800)
    assert (made.returncode != 0) == fails, made.stderr[-3000:]
    return made


@pytest.fixture
def words(world) -> list[str]:
    return [*(word for word in world if word.startswith(("dataset", "protocol."))), *ASKED]


def record_of(results: Path):
    (folder,) = (one for one in (results / "runs").glob("[!.]*") if load_record(one).modules)
    return load_record(folder)


@pytest.mark.slow
def test_two_processes_make_one_record_with_the_numbers_of_one(words, tmp_path):
    made = started(*words, "model.parallel=tensor", f"results_dir={tmp_path / 'two'}")
    assert made.stdout.count("  record  ") == 1  # one of them speaks
    assert console.main(["run", *words, f"results_dir={tmp_path / 'one'}"]) == 0
    two, one = record_of(tmp_path / "two"), record_of(tmp_path / "one")
    assert len(list((tmp_path / "two" / "runs").glob("[!.]*"))) == 2  # and the dense run's
    assert two.fingerprint != one.fingerprint
    assert two.quality.ppl == pytest.approx(one.quality.ppl, rel=1e-4)
    assert two.quality.kl_nats == pytest.approx(one.quality.kl_nats, rel=1e-4, abs=1e-6)
    assert two.quality.executed_flops == one.quality.executed_flops
    of_two, of_one = two.measured("ranks", RanksResult), one.measured("ranks", RanksResult)
    assert (of_two.processes, of_one.processes) == (2, 1)
    assert of_one.executed_flops_by_rank == [of_one.executed_flops]
    assert sum(of_two.executed_flops_by_rank) == of_two.executed_flops == of_one.executed_flops
    assert max(of_two.executed_flops_by_rank) < 0.7 * of_one.executed_flops
    assert of_two.interposed_flops_by_rank == pytest.approx(of_two.executed_flops_by_rank, rel=0.01)
    assert sum(of_two.kv_bytes_resident_by_rank) == of_two.kv_bytes_resident == of_one.kv_bytes_resident > 0


@pytest.mark.slow
@pytest.mark.parametrize(("how", "processes"), [("tensor:2", 4), ("tensor:1", 2)])
def test_replicas_of_a_cut_model_share_the_windows_and_each_process_has_its_clock(words, tmp_path, how, processes):
    words = [word.replace("measure=ranks", "measure=devices") for word in words]
    made = started(*words, f"model.parallel={how}", f"results_dir={tmp_path / 'many'}", processes=processes)
    assert "tokens a second" in made.stdout
    words = [word.replace("measure=devices", "measure=ranks") for word in words]
    assert console.main(["run", *words, f"results_dir={tmp_path / 'one'}"]) == 0
    many, one = record_of(tmp_path / "many"), record_of(tmp_path / "one")
    assert many.quality.ppl == pytest.approx(one.quality.ppl, rel=1e-4)
    assert many.quality.executed_flops == one.quality.executed_flops
    assert list(many.windows["window"]) == list(one.windows["window"])
    found = many.measured("devices", DevicesResult)
    assert (found.processes, found.replicas) == (processes, 2)
    each = (found.ms_by_rank, found.dense_ms_by_rank, found.peak_memory_bytes_by_rank)
    assert all(len(by_rank) == processes and min(by_rank) > 0 for by_rank in each)
    assert found.tokens_per_s == pytest.approx(1e3 * 2 * found.tokens / max(found.ms_by_rank))


@pytest.mark.slow
@pytest.mark.parametrize(("more", "processes", "says"), [
    (["model=reference-llama", "model.parallel=tensor:2"], 3, "3 processes are no multiple of 2"),
    (["model=reference-gpt2", "model.parallel=tensor"], 2, "gpt2: transformers has no plan for tensor parallelism"),
])  # fmt: skip
def test_a_model_that_cannot_be_cut_so_is_refused_in_a_line(more, processes, says, words, tmp_path):
    words = [word for word in words if word != "model=reference-llama"]
    made = started(*words, *more, f"results_dir={tmp_path}", processes=processes, fails=True)
    said = [line for line in made.stderr.splitlines() if line.startswith("quicksilver: ")]
    assert len(said) == 1
    assert says in said[0]


@pytest.mark.slow
def test_processes_with_the_whole_model_each_share_the_windows_of_a_run(world, tmp_path):
    words = [*world, "modules=[random_halting]", "measure=sweep"]
    words += ["dataset.windows=48", "protocol.window_tokens=16", "protocol.prompt_tokens=12"]
    made = started(*words, f"results_dir={tmp_path / 'two'}")
    assert made.stdout.count("  record  ") == 1
    assert console.main(["run", *words, f"results_dir={tmp_path / 'one'}"]) == 0
    two, one = record_of(tmp_path / "two"), record_of(tmp_path / "one")
    assert two.windows.equals(one.windows)
    assert two.fingerprint == one.fingerprint
    assert two.trace_path.read_bytes() == one.trace_path.read_bytes()


@pytest.mark.slow
def test_two_processes_make_a_sweep_in_one_order_and_go_on_with_it(words, tmp_path):
    words = [word for word in words if not word.startswith("dataset.windows")]
    words += ["dataset.windows=4", "modules.static_depth.depth=0.4,0.6,0.8", "name=depths"]
    asked = ["-m", *words, "model.parallel=tensor", f"results_dir={tmp_path / 'two'}"]
    for limited, records in ((["limit=2"], 2), ([], 1), ([], 0)):  # the last time nothing is left: no model is loaded
        made = started(*asked, *limited)
        assert made.stdout.count("  record  ") == records
        assert records != 1 or "3 of 3 done" in made.stdout
    assert console.main(["run", "-m", *words, f"results_dir={tmp_path / 'one'}"]) == 0
    two, one = (record_frame(tmp_path / name).sort_values("executed_flops") for name in ("two", "one"))
    assert len(two) == len(one) == 4
    assert list(two["ppl"]) == pytest.approx(list(one["ppl"]), rel=1e-4)
    assert list(two["executed_flops"]) == list(one["executed_flops"])


@pytest.mark.parametrize(("more", "said"), [
    (["hydra/launcher=joblib"], "hydra/launcher=joblib: the processes of torchrun make the runs"),
    (["model.parallel=null"], "Run 1 of the sweep has model.parallel=null, and each of the 2 processes"),
])  # fmt: skip
def test_a_sweep_that_is_not_of_all_processes_is_refused_before_a_load(words, more, said, tmp_path, monkeypatch, refused):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    asked = [*words, "seed=0,1", f"results_dir={tmp_path / 'two'}"]
    assert said in refused("run", "-m", "model.parallel=tensor", *asked, *more)
    assert not (tmp_path / "two" / "sweeps").exists()


def test_one_process_alone_is_refused_before_anything_is_loaded(words, tmp_path, capsys):
    assert console.main(["run", *words, "model.parallel=tensor", f"results_dir={tmp_path / 'one'}"]) == 2
    assert "torchrun --nproc-per-node 2 -m quicksilver run" in capsys.readouterr().err


def test_a_record_keeps_its_name_where_no_model_is_cut():
    assert "parallel" not in compose(["model=reference-llama"]).identity()["model"]
    cut = compose(["model=reference-llama", "model.parallel=tensor", "measure=ranks"])
    assert cut.identity()["model"]["parallel"] == "tensor"
