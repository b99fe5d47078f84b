"""The benchmarks run on tiny shapes and say what they found; how fast anything is, no test asserts."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import benchmark
import benchmark_gpu
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from quicksilver.baselines.number_formats import Int8Dynamic
from quicksilver.cli.commands import dev
from quicksilver.models.loading import EMBEDDED
from quicksilver.modules import PresetHalting
from quicksilver.runs import context
from quicksilver.runtime import ConfigError, apply

torch.set_num_threads(1)
GPU = "--device=cpu --shapes=tiny --sequence=12 --context=6 --new-tokens=2 --vocabulary=61 --dtype=float32 --repeats=3"
TINY = "--batch=2 --sequence=12 --layers=3 --decay-layers=4 --width=16 --heads=2 --vocabulary=31 --new-tokens=3 --repeats=3 --shapes=tiny"
SCALING = "scaling --shape tiny --sequence 8 16 32 --layers 2 3 --fixed-layers 2 --fixed-sequence 8 --repeats 3"


def findings(output: Path, words: str, run: Any = benchmark) -> list[dict[str, Any]]:
    """What a benchmark with these words writes into a file."""
    assert run.main([*words.split(), "--output", str(output)]) == 0
    return json.loads(output.read_text())["findings"]


def drawn(folder: Path, words: str) -> pd.DataFrame:
    """The data of the picture that a benchmark with these words draws."""
    assert benchmark.main([*words.split(), "--output", str(folder)]) == 0
    name = words.split()[0]
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return pd.read_csv(folder / f"{name}.csv")


@pytest.mark.slow
def test_every_section_is_measured_and_saved(tmp_path, capsys):
    output = tmp_path / "deeper" / "benchmark.json"
    found, printed = findings(output, f"runtime {TINY} --dtypes float32"), capsys.readouterr().out
    assert {f["section"] for f in found} == set(benchmark.SECTIONS)
    content = json.loads(output.read_text())
    assert (content["options"]["width"], content["environment"]["threads"]) == (16, torch.get_num_threads())
    for finding in found:
        assert finding["low"] <= finding["value"] <= finding["high"]
        assert finding["section"] in printed
        if "the same, truncated" in finding["what"]:
            assert "target" not in finding
        else:
            kind, bound = finding["target"].rsplit(" ", 1)
            within = finding["value"] - float(bound)
            assert finding["reached"] == (within >= 0 if kind == "at least" else within <= 0)
        assert all(len(samples) == 3 for samples in finding["details"].get("samples_ms", {}).values())
    assert [f["value"] for f in found if "bit-identical" in f["what"]] == [1.0]
    decay = [f["details"] for f in found if f["section"] == "decay"]
    assert [0 < details["executed_flops_saved"] < 1 for details in decay] == [True, True]
    assert [details["alpha"] for details in decay] == pytest.approx([0.63, 0.63])  # the curve of 36 layers, over 4


def test_sections_and_types_can_be_chosen(tmp_path):
    found = findings(tmp_path / "benchmark.json", f"runtime {TINY} --only none --dtypes bfloat16")
    assert {(f["section"], f["dtype"]) for f in found} == {("none", "bfloat16")}


def test_a_shipped_schedule_is_timed_with_its_linear_mlps(tmp_path):
    words = "runtime --only predicted --dtypes float32 --batch 1 --sequence 64 --new-tokens 2 --warmup 0 --repeats 3 --shapes far-gpt2"
    found = findings(tmp_path / "presets.json", words)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED / "far-gpt2").eval()
    ids = torch.randint(model.config.vocab_size, (1, 64))
    for save in (0.4, 0.5):
        with torch.no_grad(), apply(model, [PresetHalting(save=save)]) as run:
            model(ids)
        (timed,) = [f for f in found if f["what"].startswith(f"realization ratio, far-gpt2, its {100 * save:g}%")]
        saved = 1 - run.flops.executed / run.flops.dense_nominal
        assert timed["details"]["executed_flops_saved"] == pytest.approx(saved, abs=0.01)
        limit = found[found.index(timed) + 1]
        assert limit["what"].startswith("the same, truncated to")
        assert 0 <= limit["details"]["executed_flops_saved"] - saved < 0.03  # a token is 1.6% of this prompt


def test_the_fastest_plain_format_is_that_of_the_plain_model_too(tmp_path, monkeypatch):
    monkeypatch.setattr(context, "format_times_ms", lambda model, tokens: {"float32 sdpa": 10.0, "int8 blocks": 5.0})
    timed, in_turns = [], benchmark.in_turns
    monkeypatch.setattr(benchmark, "in_turns", lambda ways, *more: timed.append(ways) or in_turns(ways, *more))
    words = "runtime --dtypes fastest --batch 1 --sequence 64 --new-tokens 2 --warmup 0 --repeats 3 --shapes far-llama"
    found = findings(tmp_path / "fastest.json", f"{words} --only predicted")
    assert len(found) == 3 * 3
    assert {one["dtype"] for one in found} == {"fastest: int8 blocks"}
    for way in (way for ways in timed for way in ways.values()):
        assert (way.model.config._attn_implementation, type(way.modules[-1])) == ("blocks", Int8Dynamic)
    with pytest.raises(ConfigError, match="--dtypes fastest is measured on shipped models alone"):
        findings(tmp_path / "none.json", f"{words} --only none")


def test_every_kernel_of_this_processor_is_timed_and_models_of_both_dtypes(tmp_path):
    sizes = "--batch 2 --sequence 12 --context 6 --kernel-rows 64 --layers 2 --decode-layers 2 --width 16 --heads 2 --warmup 0 --repeats 3"
    found = findings(tmp_path / "int8.json", f"quantization {sizes} --clock cpu")
    assert {f["section"] for f in found} == set(benchmark.QUANTIZED)
    assert {f["what"] for f in {(f["section"], f["of"]): f for f in reversed(found)}.values()} == {"float32"}  # first of each
    assert all(f["low"] <= f["value"] <= f["high"] for f in found)
    assert {"bfloat16", "weight_only"} <= {f["what"] for f in found if f["section"] == "kernels"}


@pytest.mark.slow
def test_every_cell_of_the_map_is_measured_and_drawn(tmp_path, capsys):
    frame = drawn(tmp_path, "break_even --shapes tiny tiny-llama --batch 1 2 --sequence 12 --rates 0.5 --cell-seconds 60")
    assert len(frame) == 2 * 2 * 2 * 4  # shapes, phases, batches, mechanisms
    assert set(frame["mechanism"]) == {"halting 50%", "kv skipping 50%", "fusion 30%", "int8"}
    assert set(frame["verdict"]) <= {"pays", "costs", "within noise"}
    assert (frame["time_saved_pct_low"] <= frame["time_saved_pct"]).all()
    assert "tiny-llama" in capsys.readouterr().out


def test_a_cell_of_the_map_that_was_not_measured_stays_empty():
    cells = [
        ("gpt2", "decode", 1, 64, name, "measured", 20.0, verdict)
        for name, verdict in (("int8", "pays"), ("fusion 30%", "within noise"))
    ]
    cells.append(("gpt2", "decode", 8, 64, "int8", "measured", -5.0, "costs"))
    frame = pd.DataFrame(
        cells, columns=["shape", "phase", "batch", "sequence", "mechanism", "status", "time_saved_pct", "verdict"]
    )
    _, drawing, _ = benchmark.draw_break_even(frame, SimpleNamespace(layers=2))
    assert [text.get_text() for text in drawing.axes[0].texts] == ["+20", "·", "-5"]


def test_cells_that_take_too_long_are_left_out_and_said(tmp_path):
    words = "break_even --shapes tiny --sequence 12 --cell-seconds 0"
    with pytest.raises(benchmark.ConfigError, match="--cell-seconds 0"):
        benchmark.main([*words.split(), "--output", str(tmp_path)])


@pytest.mark.parametrize(("steps", "rate"), [
    ([(25, -10.0, "costs"), (50, 10.0, "pays"), (75, 30.0, "pays")], "38%"),  # halfway between 25 and 50, rounded
    ([(25, 8.0, "pays"), (50, 20.0, "pays")], "at most 25%"),
    ([(25, -9.0, "costs"), (50, 2.0, "within noise")], "none"),
    ([(25, 2.0, "within noise"), (50, 9.0, "pays")], "at most 50%"),
])  # fmt: skip
def test_where_halting_starts_to_pay_noise_does_not_count(steps, rate):
    place = {"shape": "gpt2", "phase": "prefill", "batch": 1, "sequence": 64, "status": "measured"}
    frame = pd.DataFrame(steps, columns=["at", "time_saved_pct", "verdict"]).assign(**place)
    frame["mechanism"] = [f"halting {at}%" for at in frame["at"]]
    assert [one["rate"] for one in benchmark.break_even_rates(frame)] == [rate]


@pytest.mark.slow
def test_time_against_length_and_depth_with_its_power_law(tmp_path, capsys):
    frame = drawn(tmp_path, SCALING)
    assert len(frame) == (3 + 2) * 3
    work = frame.groupby("way")["flops_of_dense"]
    assert work.min()["dense"] == 1 > work.max()["decay 0.1"]
    assert "too few points" in capsys.readouterr().out  # two depths


def test_a_power_law_is_found_and_two_points_are_none():
    found = benchmark.power_law([1, 2, 4, 8], [3, 12, 48, 192])
    assert (found["exponent"], found["r_squared"]) == (pytest.approx(2), pytest.approx(1))
    assert benchmark.power_law([1, 2], [1, 2])["exponent"] == "too few points"


def test_without_a_gpu_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(benchmark_gpu.QuickSilverError, match="no CUDA device"):
        benchmark_gpu.main([])
    assert capsys.readouterr().out == ""


def gpu(output: Path, words: str) -> list[dict[str, Any]]:
    """The rows that benchmark_gpu.py writes on the CPU with these words."""
    return findings(output, f"{GPU} --warmup 0 {words}", benchmark_gpu)


def test_the_gpu_benchmark_checks_the_invariants_first(tmp_path, capsys):
    rows = gpu(tmp_path / "deeper" / "gpu.json", "--batch 1 2 --only invariants prefill decode")
    assert [row["section"] for row in rows] == ["invariants"] * 5 + ["prefill"] * 8 + ["decode"] * 6
    assert all(row["reached"] for row in rows[:5])
    by_what = {(row["what"], row["batch"]): row for row in rows[5:]}
    assert by_what["half halted at a fifth", 1]["executed_flops_saved"] > 0.2
    assert by_what["dense", 2]["tokens_per_s"] > 0
    assert 0.2 < by_what["half depth", 1]["executed_flops_saved"] < 0.5  # of the tokens; the output head is not halved
    assert "compact = masked" in capsys.readouterr().out


def test_a_broken_invariant_stops_everything(tmp_path, monkeypatch):
    real = benchmark_gpu.invariants
    broken = lambda *asked: [row | {"reached": "masked" not in row["what"]} for row in real(*asked)]
    monkeypatch.setattr(benchmark_gpu, "invariants", broken)
    with pytest.raises(benchmark_gpu.QuickSilverError, match="tiny: compact = masked does not hold"):
        gpu(tmp_path / "gpu.json", "--batch 1")
    assert {row["section"] for row in json.loads((tmp_path / "gpu.json").read_text())["findings"]} == {"invariants"}


def test_what_cannot_be_compiled_or_captured_is_a_finding_and_fails_a_dry_run(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", Mock(side_effect=RuntimeError("not here")))
    rows = gpu(tmp_path / "gpu.json", "--batch 1 --only faster")
    failed = {row["what"]: row["failed"] for row in rows if "failed" in row}
    assert failed["dense, torch.compile"] == "RuntimeError: not here"
    assert failed["half halted, CUDA graph"] == "skipped: needs a CUDA device"
    assert [row["what"] for row in rows if "failed" not in row] == ["dense", "half halted, eager"]
    with pytest.raises(benchmark_gpu.QuickSilverError, match=r"faster, dense, torch\.compile: RuntimeError: not here"):
        benchmark_gpu.main(["--dry-run", "--shapes", "tiny", "--batch", "1", "--only", "faster"])


def test_the_dry_run_executes_every_step_and_names_what_needs_the_device(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)  # the compiler takes a minute: the slow test has it
    kept = benchmark_gpu.shared.RESULTS / "benchmark_gpu.json"
    before = kept.exists()
    assert benchmark_gpu.main(["--dry-run", "--shapes", "tiny-llama", "--batch", "2"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{part} " in said for part in benchmark_gpu.PARTS[1:])
    assert "int8 by torch, half halted" in said
    assert "Only a CUDA device can do: dense, CUDA graph, half halted, CUDA graph, int8 by torchao." in said
    assert kept.exists() == before


@pytest.mark.slow
def test_the_whole_dry_run_in_a_process_that_has_neither_hydra_nor_pandas():
    blocked = "import sys; sys.modules.update(dict.fromkeys(['hydra', 'omegaconf', 'pandas', 'wandb', 'rich', 'matplotlib'])); "
    run = f"import runpy; sys.argv = ['benchmark_gpu.py', '--dry-run']; runpy.run_path({benchmark_gpu.__file__!r}, run_name='__main__')"
    made = subprocess.run([sys.executable, "-c", blocked + run], capture_output=True, text=True, timeout=1800)
    assert made.returncode == 0, made.stderr[-2000:]
    assert "Only a CUDA device can do: dense, CUDA graph, half halted, CUDA graph, int8 by torchao." in made.stdout


@pytest.mark.slow
def test_one_prompt_by_its_length_beside_a_truncation_that_takes_no_more_operations(tmp_path):
    words = "lengths --shape tiny-llama --layers 4 --sequence 32 64 --repeats 3 --new-tokens 2 --dtype float32"
    frame = drawn(tmp_path, words).set_index(["what", "tokens", "way"]).sort_index()
    assert len(frame) == 2 * 2 * 3
    operations, times = (frame.loc["first token", column].unstack() for column in ("flops_of_dense", "time_of_dense"))
    assert (operations["truncated"] <= operations["predicted"]).all()
    assert (operations["predicted"] < operations["dense"]).all()
    assert (times["dense"] == 1).all()


@pytest.mark.slow
def test_all_benchmarks_run_one_after_another_and_are_shown(tmp_path, monkeypatch, capsys):
    asked: list[list[str]] = []

    def tiny(words: list[str], output: Path) -> int:
        asked.append(words)
        return benchmark.main([*SCALING.split(), "--output", str(output)]) if words[0] == "scaling" else 3

    monkeypatch.setattr(benchmark, "run_part", tiny)
    assert benchmark.main(["--full", "--output", str(tmp_path), "--scaling", "--batch 2"]) == 1
    assert [words[0] for words in asked] == ["runtime", "runtime", "lengths", "runtime", "quantization", "break_even", "scaling"]
    assert asked[-1][-2:] == ["--batch", "2"]
    page = (tmp_path / "README.md").read_text()
    assert "(scaling.png)" in page
    assert "decay 0.05" in page
    assert "runtime: not measured, runtime ended with exit code 3" in capsys.readouterr().err
    monkeypatch.setattr(benchmark.time, "monotonic", iter(range(0, 10**6, 600)).__next__)
    asked.clear()
    benchmark.main(["--output", str(tmp_path), "--minutes", "15"])
    assert [words[0] for words in asked] == ["runtime"]
    assert "the 15 minutes were over" in capsys.readouterr().err


def test_a_part_is_a_process_of_its_own(tmp_path, monkeypatch):
    run = Mock(return_value=subprocess.CompletedProcess([], 3))
    monkeypatch.setattr(benchmark.subprocess, "run", run)
    assert benchmark.run_part(["runtime", "--repeats", "9"], tmp_path) == 3
    (_, script, *words) = run.call_args.args[0]
    assert Path(script).is_file()
    assert words == ["runtime", "--repeats", "9", "--output", str(tmp_path)]
    assert tuple(benchmark.PARTS) == dev.PARTS  # `quicksilver dev benchmark` knows them all
    for name, *words in (said.split() for said in benchmark.PARTS.values()):  # a part's words are options that it has
        assert benchmark.shared.parsed(name, "", benchmark.BENCHMARKS[name][2], words, tmp_path).output == tmp_path


def test_committed_results_are_on_the_page():
    page, remedy = benchmark.markdown(benchmark.shared.RESULTS), "make the page again: quicksilver dev benchmark"
    assert page == (benchmark.shared.RESULTS / "README.md").read_text(encoding="utf-8"), remedy
    assert all(f"## {title}" in page for beginning, title in benchmark.TITLES.items() if beginning != "benchmark_gpu")
    assert "| none | float32 | slower than the plain model |" in page
    assert all(f"## {title}" in page for title, _, _ in benchmark.PICTURES.values())


@pytest.mark.parametrize(("place", "shown"), [
    ({"section": "none", "dtype": "float32"}, "none | float32"), ({"section": "kernels", "of": "1 x 4 x 8"}, "kernels | 1 x 4 x 8"),
    ({"section": "letters", "rounds": 5}, "letters"),
], ids=["runtime", "quantization", "lm_eval"])  # fmt: skip
def test_findings_of_each_benchmark_are_shown_with_what_they_have(tmp_path, place, shown):
    row = benchmark.shared.finding(place, "said", [2.0, 1.0, 3.0], None, noise_floor=0.01)
    (tmp_path / "benchmark.json").write_text(json.dumps({"options": {}, "findings": [row]}))
    assert f"| {shown} | said | 2 | 1 to 3 |" in benchmark.markdown(tmp_path)


@pytest.mark.parametrize(("words", "said"), [
    ("runtime --only everything", "everything"), ("runtime --new-tokens 1", "new-tokens: 1: give a number of at least 2"),
    ("runtime --repeats 2", "repeats: 2: give a number of at least 3"), ("scaling --batch many", "batch: 'many' is no whole number"),
    ("break_even --rates nan", "rates: nan: give a number"), ("all --minutes -1", "minutes: -1: give a number of at least 0"),
    ("scaling --fixed-layers 1", "fixed-layers: 1: give a number of at least 2"), ("scaling --layers 1", "layers: 1: give a number of at least 2"),
])  # fmt: skip
def test_a_bad_option_is_one_line(words, said, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(words.split())
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", ["runtime --only none", "quantization --only decode"])
def test_heads_that_do_not_divide_the_width_are_refused(tmp_path, words):
    with pytest.raises(ConfigError, match="--width 64 --heads 3: the width must be a multiple"):
        benchmark.main([*words.split(), "--width=64", "--heads=3", f"--output={tmp_path / 'found.json'}"])


def test_without_lm_eval_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"lm_eval needs lm_eval.*, which is not installed: pip install"):
        benchmark.main(["lm_eval", "--output", str(tmp_path / "found.json")])


@pytest.mark.parametrize("word", ["minutes=nan", "minutes=-1", "minutes=inf", "only=[]", "only=[nothing]"])
def test_a_bad_key_of_the_command_is_refused(word):
    with pytest.raises(benchmark.ConfigError, match=word.split("=")[0]):
        dev.Benchmark.parsed([word], "quicksilver dev benchmark").main()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_the_adapter_is_timed_against_lm_eval_s_own_model(tmp_path, capsys):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'quicksilver-lm[lm-eval]'")
    from harness_world import make_model

    folder, output = make_model(tmp_path / "tiny", positions=512), tmp_path / "found.json"
    few = ["--contexts", "4", "--words", "8", "--batch-size", "2", "--seconds", "0", "--clock", "cpu"]
    assert benchmark.main(["lm_eval", "--model", str(folder), *few, "--output", str(output)]) == 0
    found = {one["section"]: one for one in json.loads(output.read_text())["findings"]}
    assert found.keys() == benchmark.LM_CALLS.keys()
    assert all(one["value"] > 0 and one["largest difference"] < 1e-3 for one in found.values())
    assert all(one["rounds"] == benchmark.LEAST_ROUNDS for one in found.values())  # there is time for no more
    assert "time over HFLM's" in capsys.readouterr().out


@pytest.mark.slow  # importing lm-eval takes seconds
def test_answers_that_differ_are_seen():
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'quicksilver-lm[lm-eval]'")
    assert benchmark.apart("letters", [(-1.0, True), (-2.5, False)], [(-1.0, True), (-2.0, False)]) == 0.5
    assert benchmark.apart("letters", [(-1.0, True)], [(-1.0, False)]) == math.inf
    assert benchmark.apart("rolling", [-1.0], [-1.25]) == 0.25
    assert benchmark.apart("generate", ["a"], ["b"]) == math.inf
