"""The benchmarks run on tiny shapes and say what they found; how fast anything is, no test asserts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import benchmark
import benchmark_gpu
import pandas as pd
import pytest
import torch
from benchmarking import parsed

from quicksilver.cli.commands import dev

torch.set_num_threads(1)
GPU = [
    "--device=cpu",
    "--shapes=tiny",
    "--sequence=12",
    "--context=6",
    "--new-tokens=2",
    "--vocabulary=61",
    "--dtype=float32",
    "--repeats=3",
]
TINY = "--batch=2 --sequence=12 --layers=3 --decay-layers=4 --width=16 --heads=2 --vocabulary=31 --new-tokens=3 --repeats=3 --warmup=1 --shapes=tiny"
SCALING = [
    "--shape",
    "tiny",
    "--sequence",
    "8",
    "16",
    "32",
    "--layers",
    "2",
    "3",
    "--fixed-layers",
    "2",
    "--fixed-sequence",
    "8",
    "--repeats",
    "3",
]


def findings(output: Path, words: str) -> list[dict[str, Any]]:
    """What `benchmark.py` with these words writes into a file."""
    assert benchmark.main([*words.split(), "--output", str(output)]) == 0
    return json.loads(output.read_text())["findings"]


@pytest.mark.slow
def test_every_section_is_measured_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "deeper" / "benchmark.json"
    found, printed = findings(output, f"runtime {TINY} --dtypes float32"), capsys.readouterr().out
    assert {f["section"] for f in found} == set(benchmark.SECTIONS)
    content = json.loads(output.read_text())
    assert (content["options"]["width"], content["environment"]["threads"]) == (16, torch.get_num_threads())
    for finding in found:
        assert finding["low"] <= finding["value"] <= finding["high"]
        assert finding["section"] in printed
        bound = float(finding["target"].split()[-1])
        holds = finding["value"] >= bound if finding["target"].startswith("at least") else finding["value"] <= bound
        assert finding["reached"] == holds
        assert all(len(samples) == 3 for samples in finding["details"].get("samples_ms", {}).values())
    (identical,) = [f for f in found if "bit-identical" in f["what"]]
    assert identical["value"] == 1.0
    decay = [f["details"] for f in found if f["section"] == "decay"]
    assert len(decay) == 2
    assert all(0 < details["executed_flops_saved"] < 1 for details in decay)
    assert all(details["alpha"] == pytest.approx(0.63) for details in decay)  # the curve of 36 layers, over 4


def test_sections_and_types_can_be_chosen(tmp_path: Path) -> None:
    found = findings(tmp_path / "benchmark.json", f"runtime {TINY} --only none --dtypes bfloat16")
    assert {(f["section"], f["dtype"]) for f in found} == {("none", "bfloat16")}


def test_every_kernel_of_this_processor_is_timed_and_models_of_both_dtypes(tmp_path: Path) -> None:
    sizes = "--batch 2 --sequence 12 --context 6 --kernel-rows 64 --layers 2 --decode-layers 2 --width 16 --heads 2 --repeats 3"
    found = findings(tmp_path / "int8.json", f"quantization {sizes} --clock cpu")
    assert {f["part"] for f in found} == set(benchmark.QUANTIZED)
    first = {(f["part"], f["what"]): f["name"] for f in reversed(found)}
    assert set(first.values()) == {"float32"}
    assert all(f["low"] <= f["speedup"] <= f["high"] for f in found)
    assert {"bfloat16", "weight_only"} <= {f["name"] for f in found if f["part"] == "kernels"}


@pytest.mark.slow
def test_every_cell_of_the_map_is_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "break_even --shapes tiny tiny-llama --batch 1 2 --sequence 12 --rates 0.5 --cell-seconds 60"
    assert benchmark.main([*words.split(), "--output", str(tmp_path)]) == 0
    frame = pd.read_csv(tmp_path / "break_even.csv")
    assert len(frame) == 2 * 2 * 2 * 4  # shapes, phases, batches, mechanisms
    assert set(frame["mechanism"]) == {"halting 50%", "kv skipping 50%", "fusion 30%", "int8"}
    assert set(frame["verdict"]) <= {"pays", "costs", "within noise"}
    assert (frame["time_saved_pct_low"] <= frame["time_saved_pct"]).all()
    assert (tmp_path / "break_even.png").read_bytes().startswith(b"\x89PNG")
    assert "tiny-llama" in capsys.readouterr().out


def test_cells_that_take_too_long_are_left_out_and_said(tmp_path: Path) -> None:
    words = "break_even --shapes tiny --sequence 12 --cell-seconds 0"
    with pytest.raises(benchmark.ConfigError, match="--cell-seconds 0"):
        benchmark.main([*words.split(), "--output", str(tmp_path)])


def cells(*steps: tuple[int, float, str]) -> pd.DataFrame:
    place = {"shape": "gpt2", "phase": "prefill", "batch": 1, "sequence": 64, "status": "measured"}
    return pd.DataFrame(
        [place | {"mechanism": f"halting {rate}%", "time_saved_pct": saved, "verdict": verdict} for rate, saved, verdict in steps]
    )


@pytest.mark.parametrize(
    ("steps", "rate"),
    [
        ([(25, -10.0, "costs"), (50, 10.0, "pays"), (75, 30.0, "pays")], "38%"),  # halfway between 25 and 50, rounded
        ([(25, 8.0, "pays"), (50, 20.0, "pays")], "at most 25%"),
        ([(25, -9.0, "costs"), (50, 2.0, "within noise")], "none"),
        ([(25, 2.0, "within noise"), (50, 9.0, "pays")], "at most 50%"),
    ],
)
def test_where_halting_starts_to_pay_noise_does_not_count(steps: list[tuple[int, float, str]], rate: str) -> None:
    assert benchmark.break_even_rates(cells(*steps))["rate"].to_list() == [rate]


@pytest.mark.slow
def test_time_against_length_and_depth_with_its_power_law(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["scaling", *SCALING, "--output", str(tmp_path)]) == 0
    frame = pd.read_csv(tmp_path / "scaling.csv")
    assert len(frame) == (3 + 2) * 3
    assert (frame.loc[frame["way"] == "dense", "flops_of_dense"] == 1).all()
    assert (frame.loc[frame["way"] == "decay 0.1", "flops_of_dense"] < 1).all()
    assert (tmp_path / "scaling.png").is_file()
    assert "too few points" in capsys.readouterr().out  # two depths


def test_a_power_law_is_found_and_two_points_are_none() -> None:
    exponent, r_squared = benchmark.power_law([1, 2, 4, 8], [3, 12, 48, 192])
    assert exponent == pytest.approx(2)
    assert r_squared == pytest.approx(1)
    assert math.isnan(benchmark.power_law([1, 2], [1, 2])[0])


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark_gpu.main([]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "no CUDA device" in captured.err


def gpu(output: Path, words: str, code: int = 0) -> list[dict[str, Any]]:
    """The rows that benchmark_gpu.py writes on the CPU with these words."""
    assert benchmark_gpu.main([*GPU, *words.split(), "--output", str(output)]) == code
    return json.loads(output.read_text())["rows"]


def test_the_gpu_benchmark_checks_the_invariants_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = gpu(tmp_path / "deeper" / "gpu.json", "--batch 1 2 --warmup 0 --only invariants prefill decode")
    assert [row["part"] for row in rows] == ["invariants"] * 5 + ["prefill"] * 8 + ["decode"] * 6
    assert all(row["holds"] for row in rows[:5])
    by_what = {(row["what"], row["batch"]): row for row in rows[5:13]}
    assert by_what["half halted at a fifth", 1]["executed_flops_saved_pct"] > 20
    assert by_what["dense", 2]["tokens_per_s"] > 0
    halves = [row["executed_flops_saved_pct"] for row in rows if row["what"] == "half depth"]
    assert all(20 < saved < 50 for saved in halves)  # of the tokens alone; the output head is not halved
    assert "holds" in capsys.readouterr().out


def test_a_broken_invariant_stops_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = benchmark_gpu._invariants

    def one_off(*arguments: Any) -> list[dict[str, Any]]:
        rows = real(*arguments)
        rows[1] |= {"difference": 1.0, "holds": False}
        return rows

    monkeypatch.setattr(benchmark_gpu, "_invariants", one_off)
    assert {row["part"] for row in gpu(tmp_path / "gpu.json", "--batch 1", code=1)} == {"invariants"}
    assert "compact = masked does not hold" in capsys.readouterr().err


def refuses(*_: Any, **__: Any) -> None:
    raise RuntimeError("not here")


def test_what_cannot_be_compiled_or_captured_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", refuses)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = gpu(tmp_path / "gpu.json", "--batch 1 --warmup 0 --only faster")
    failed = {row["what"]: row["failed"] for row in rows if "failed" in row}
    assert failed["dense, torch.compile"] == "RuntimeError: not here"
    assert failed["half halted, CUDA graph"] == "skipped: needs a CUDA device"
    assert [row["what"] for row in rows if "failed" not in row] == ["dense", "half halted, eager"]


def test_the_dry_run_executes_every_step_and_names_what_needs_the_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)  # the compiler takes a minute: the slow test has it
    kept = benchmark_gpu.RESULTS / "benchmark_gpu.json"
    before = kept.exists()
    assert benchmark_gpu.main(["--dry-run", "--shapes", "tiny-llama", "--batch", "2"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert {line.split()[0] for line in said.out.splitlines() if not line.startswith(" ")} == {*benchmark_gpu.PARTS, "Dry"}
    assert "int8 by torch, half halted" in said.out
    assert said.out.count(benchmark_gpu.NEEDS_CUDA) == 3
    assert "Only a CUDA device can do: dense, CUDA graph, half halted, CUDA graph, int8 by torchao." in said.out
    assert kept.exists() == before
    monkeypatch.setattr(benchmark_gpu, "Int8Dynamic", refuses)  # a step that fails, fails the dry run
    assert benchmark_gpu.main(["--dry-run", "--shapes", "tiny", "--batch", "1", "--only", "int8"]) == 1
    assert "int8, int8 by torch: RuntimeError: not here" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_dry_run_in_a_process_that_has_neither_hydra_nor_pandas() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['hydra', 'omegaconf', 'pandas', 'wandb', 'rich', 'matplotlib'])); "
    run = f"import runpy; sys.argv = ['benchmark_gpu.py', '--dry-run']; runpy.run_path({benchmark_gpu.__file__!r}, run_name='__main__')"
    made = subprocess.run([sys.executable, "-c", blocked + run], capture_output=True, text=True, timeout=1800)
    assert made.returncode == 0, made.stderr[-2000:]
    assert "Only a CUDA device can do: dense, CUDA graph, half halted, CUDA graph, int8 by torchao." in made.stdout


@pytest.mark.slow
def test_all_benchmarks_run_one_after_another_and_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def tiny(part: str, output: Path, more: list[str]) -> str | None:
        asked.append([part, *more])
        if part == "scaling":
            benchmark.main(["scaling", *SCALING, "--output", str(output)])
            return None
        return "it broke"

    monkeypatch.setattr(benchmark, "run_part", tiny)
    assert benchmark.main(["--output", str(tmp_path), "--scaling", "--repeats 3"]) == 1
    assert asked == [["runtime"], ["prediction"], ["quantization"], ["break_even"], ["scaling", "--repeats", "3"]]
    page = (tmp_path / "README.md").read_text()
    assert "![scaling](scaling.png)" in page
    assert "decay 0.05" in page
    assert "- runtime: not measured, it broke" in page
    monkeypatch.setattr(benchmark.time, "monotonic", iter(range(0, 10**6, 600)).__next__)
    benchmark.main(["--output", str(tmp_path), "--minutes", "15"])
    assert "the 15 minutes were over" in (tmp_path / "README.md").read_text()


def test_a_part_is_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    class Done:
        returncode = 3

    monkeypatch.setattr(benchmark.subprocess, "run", lambda command, cwd: commands.append(command) or Done())
    assert benchmark.run_part("runtime", tmp_path, ["--repeats", "9"]) == "runtime ended with exit code 3"
    (command,) = commands
    assert Path(command[1]).is_file()
    assert command[-4:] == ["--repeats", "9", "--output", str(tmp_path / "benchmark.json")]
    assert tuple(benchmark.PARTS) == dev.PARTS  # `quicksilver dev benchmark` knows them all
    for (name, *words), _ in benchmark.PARTS.values():  # a part's words are options that it has
        assert parsed(name, "", benchmark.BENCHMARKS[name][2], words, tmp_path).output == tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runtime", "--only", "everything"], "everything"),
        (["runtime", "--new-tokens", "1"], "new-tokens: 1: give a number of at least 2"),
        (["runtime", "--repeats", "2"], "repeats: 2: give a number of at least 3"),
        (["scaling", "--batch", "many"], "batch: 'many' is no whole number"),
        (["break_even", "--rates", "nan"], "rates: nan: give a number"),
        (["all", "--minutes", "-1"], "minutes: -1: give a number of at least 0"),
    ],
)
def test_a_bad_option_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(words)
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", [["minutes=nan"], ["minutes=-1"], ["minutes=inf"], ["only=[]"], ["only=[nothing]"]])
def test_a_bad_key_of_the_command_is_refused(words: list[str]) -> None:
    with pytest.raises(benchmark.ConfigError, match=words[0].split("=")[0]):
        dev.benchmark(words)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_the_adapter_is_timed_against_lm_eval_s_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'quicksilver[lm-eval]'")
    from harness_world import make_model

    folder, output = make_model(tmp_path / "tiny", positions=512), tmp_path / "found.json"
    few = ["--contexts", "4", "--words", "8", "--batch-size", "2", "--seconds", "0", "--clock", "cpu"]
    assert benchmark.main(["lm_eval", "--model", str(folder), *few, "--output", str(output)]) == 0
    findings = {one["part"]: one for one in json.loads(output.read_text())["findings"]}
    assert findings.keys() == set(benchmark.LM_PARTS)
    assert all(one["ratio"] > 0 and one["hflm_ms"] > 0 and one["apart"] < 1e-3 for one in findings.values())
    assert all(one["rounds"] == benchmark.LEAST_ROUNDS for one in findings.values())  # there is time for no more
    assert "quicksilver without modules over HFLM" in capsys.readouterr().out
    (tmp_path / "benchmark.json").write_text(output.read_text())
    page = benchmark.markdown(tmp_path, {}, {})
    assert "## lm-evaluation-harness" in page
    assert all(f"| {part} | 5 |" in page for part in benchmark.LM_PARTS)


@pytest.mark.slow  # importing lm-eval takes seconds
def test_answers_that_differ_are_seen() -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'quicksilver[lm-eval]'")
    assert benchmark.apart("letters", [(-1.0, True), (-2.5, False)], [(-1.0, True), (-2.0, False)]) == 0.5
    assert benchmark.apart("letters", [(-1.0, True)], [(-1.0, False)]) == math.inf
    assert benchmark.apart("rolling", [-1.0], [-1.25]) == 0.25
    assert benchmark.apart("generate", ["a"], ["b"]) == math.inf
