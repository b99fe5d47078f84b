"""From a config to a record, on a tiny model: what is missing is run once, what changed is run again, what fails says why."""

import math
import sys
from shutil import copytree
from typing import get_args

import fakes
import numpy as np
import pytest
import torch
from harness_world import LAYERS, PROMPT, WINDOW, make_text
from safetensors.torch import load_file, save_file
from thinning import first

from quicksilver.measure import Protocol, score
from quicksilver.measure.audit import AuditResult
from quicksilver.measure.flops import FlopsResult
from quicksilver.measure.latency import LatencyResult
from quicksilver.measure.memory import MemoryResult
from quicksilver.measure.quality import NullResult
from quicksilver.modules.controls import Replay
from quicksilver.records.identity import Execution, ProtocolName
from quicksilver.records.record import load_record, record_frame
from quicksilver.records.stats import paired_records
from quicksilver.records.store import Store
from quicksilver.runs import run as harness
from quicksilver.runs.config import CHOICES, compose
from quicksilver.runs.context import RunContext
from quicksilver.runs.parts import build_modules
from quicksilver.runs.run import ensure, plan
from quicksilver.runs.tracker import differences, scalars
from quicksilver.runtime import EXECUTIONS, Trace
from quicksilver.runtime.errors import ConfigError, QuickSilverError

CAPACITY = ["modules=[halting_attention]", "protocol=continuation", "modules.halting.halted_share=0.5"]
THRESHOLD = ["modules=[halting,kv_skipping]", "modules.halting.tau_drift=p60", "modules.halting.tau_entropy=null"]
THRESHOLD += ["modules.halting.resume_layers=1"]
UNFITTED = ["modules.halting.tau_entropy=null", "modules.halting.resume_layers=0"]
HALTED = ["modules=[halting]", "modules.halting.tau_drift=p60", *UNFITTED]


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory):
    """One fully measured run per protocol, made once for all tests that only read: (results folder, records by protocol)."""
    results = tmp_path_factory.mktemp("shared") / "results"
    words = [*world, f"results_dir={results}", "measure=default", "measure.latency.repeats=3", "measure.batch_windows=2"]
    words.append("measure.emissions.enabled=false")  # finding out what the machine can read takes seconds
    both = [compose([*words, *THRESHOLD]), compose([*words, *CAPACITY])]
    records = ensure(both)
    return results, dict(zip(("all", "continuation"), records, strict=True))


# -- a record -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("protocol", first(["continuation", "all"]))
def test_a_record_has_every_pass_and_they_agree(finished, protocol):
    results, records = finished
    record = records[protocol]
    dense = Store(results).dense_of(record)
    frame = record.windows
    scored = WINDOW - (1 if protocol == "all" else PROMPT)
    assert list(frame["window"]) == list(range(10))
    assert record.quality.tokens == record.quality.bytes == frame["bytes"].sum() == 10 * scored  # one token a byte
    assert record.quality.bits_per_byte == pytest.approx(record.quality.nll_nats / np.log(2) / record.quality.bytes)
    for ledger in ("executed_flops", "nominal_flops", "paper_flops", "signal_flops"):
        assert getattr(record.quality, ledger) == frame[ledger].sum()
        assert getattr(record.dense, ledger) == getattr(dense.quality, ledger)
    assert record.quality.nominal_flops < record.dense.nominal_flops
    counted = record.measured("flops", FlopsResult)
    assert counted.interposed == pytest.approx(counted.analytic, rel=0.01)
    assert record.dense.ppl == dense.quality.ppl != record.quality.ppl
    assert record.quality.kv_bytes_billed == record.quality.kv_bytes_resident <= record.dense.kv_bytes
    assert list(frame["dense_nll_nats"]) == list(dense.windows["nll_nats"])
    audit, latency = record.measured("audit", AuditResult), record.measured("latency", LatencyResult)
    assert audit.max_abs_logit_difference < 1e-4 * max(1, audit.max_abs_logit)
    assert len(latency.latency_ms.samples) == len(latency.dense_latency_ms.samples) == 3
    assert record.measured("memory", MemoryResult).peak_memory_bytes > 0
    prompts = (record.flops("prompt_executed"), record.flops_saved_pct("prompt_executed"), latency.timing(prompt=True))
    assert all((one is not None) == (protocol == "continuation") for one in prompts)
    assert (record.environment.torch, record.environment.threads) == (torch.__version__, 1)
    assert (record.data.windows, record.lookahead) == (10, False)


def test_the_null_spends_the_same_on_other_tokens(finished):
    for record in finished[1].values():
        null = record.measured("null", NullResult)
        assert null.kind == "shuffle"
        assert null.nominal_flops == pytest.approx(record.quality.nominal_flops, rel=0.02)
        assert null.nll_nats == pytest.approx(record.windows["null_nll_nats"].sum())
        assert null.ppl != record.quality.ppl


def test_the_trace_of_a_record_gives_the_run_again(finished, world):
    _, records = finished
    record = records["all"]
    trace = Trace.load(record.trace_path)
    assert trace.n_layers == LAYERS
    context, config = RunContext(), compose([*world, *THRESHOLD])
    windows = context.windows(config, "test")
    again = score(context.model(config).model, windows.ids, Protocol("all", WINDOW, PROMPT, 4), modules=[Replay(trace)])
    assert again.nll_nats == pytest.approx(record.quality.nll_nats, rel=1e-6)


def test_a_percentile_is_calibrated_on_the_other_part_of_the_text_which_can_be_scored(finished, words):
    results, records = finished
    calibration = records["all"].calibration
    assert calibration.windows == 4
    assert calibration.text_digest != records["all"].data.digest
    assert "drift-relative" in calibration.signals
    assert len(list((results / "calibration").rglob("*.json"))) == 1
    assert records["continuation"].calibration is None
    (record,) = ensure([compose([*words, "dataset.part=calibration"])])
    # As many windows as dataset.windows says.
    assert (record.data.part, record.data.digest, record.data.windows) == ("calibration", calibration.text_digest, 10)
    assert not plan([compose(words)]).done


@pytest.mark.processor
@pytest.mark.filterwarnings("ignore:cpu has no exact int8 matrix product")
def test_a_record_says_what_multiplied_its_integers(words):
    quantized = [*words, "modules=[adaptive_quantization_uniform8]"]
    floats, integers = ensure([compose(quantized), compose([*quantized, "modules.adaptive_quantization.execution=int8"])])
    assert floats.kernels == {"adaptive_quantization": "float products of dequantised values"}
    (kernel,) = integers.kernels.values()
    assert kernel.split(" on cpu (")[0] in ("torch._int_mm", "float products of the codes")
    assert torch.backends.cpu.get_cpu_capability() in kernel


def test_records_pair_with_their_dense_run_and_their_null(finished):
    results, records = finished
    record = records["all"]
    paired = paired_records(record, Store(results).dense_of(record), resamples=200)
    assert paired.windows == 10
    assert paired.ppl == pytest.approx(record.quality.ppl)
    assert paired.baseline_ppl == pytest.approx(record.dense.ppl)
    null = paired_records(record, record, baseline_column="null_nll_nats", resamples=200)
    assert null.baseline_ppl == pytest.approx(record.measured("null", NullResult).ppl)
    with pytest.raises(ConfigError, match="do not pair"):
        paired_records(record, records["continuation"])
    with pytest.raises(ConfigError, match="no column nats"):
        paired_records(record, record, column="nats")


def test_events_tell_what_happened_in_order(finished):
    passes = "quality null_control audit flops latency memory"
    assert " ".join(fakes.events(finished[1]["all"])) == f"started loaded calibrated {passes} measured finished"


# -- once -----------------------------------------------------------------------------------------------------------------------
def test_a_finished_run_is_found_not_repeated_and_dense_runs_are_shared(words, monkeypatch):
    configs = [compose([*words, *THRESHOLD, f"modules.halting.tau_drift={tau}"]) for tau in ("p40", "p60")]
    assert [step.done for step in plan(configs).steps] == [False] * 3
    assert not plan([configs[0]]).done
    first = ensure(configs)
    assert first[0].dense_fingerprint == first[1].dense_fingerprint
    assert len(record_frame(configs[0].results_dir)) == 3
    assert [step.done for step in plan(configs).steps] == [True] * 3
    assert plan([configs[0]]).done
    monkeypatch.setattr("quicksilver.runs.context.load", None)  # no model is loaded
    assert [r.fingerprint for r in ensure(list(reversed(configs)))] == [r.fingerprint for r in reversed(first)]
    (damaged := first[0].path / "record.json").write_text("{")
    with pytest.raises(ConfigError, match=r"is not a whole record.*Move that folder away"):
        ensure(configs)
    assert damaged.read_text() == "{"


def test_progress_runs_from_nothing_to_all_and_never_back(words):
    seen = []
    ensure([compose([*words, *THRESHOLD])], progress=seen.append)
    fractions = [p.fraction for p in seen]
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] < 0.1
    assert fractions[-1] == 1.0
    assert {(p.run, p.runs) for p in seen} == {(0, 2), (1, 2)}
    assert {"load", "calibration", "quality", "null_control", "audit", "writing the record"} <= {p.phase for p in seen}
    assert seen[-1].label == "tiny | file | halting+kv_skipping | all"


def test_threads_are_put_back_whatever_happens(words, monkeypatch):
    before = torch.get_num_threads()

    def fail(*_):
        assert torch.get_num_threads() == before + 1
        raise QuickSilverError("it failed")

    monkeypatch.setattr(harness, "_measured", fail)
    with pytest.raises(QuickSilverError, match="it failed"):
        ensure([compose([*words, f"threads={before + 1}"])])
    assert torch.get_num_threads() == before


def test_weights_that_are_not_finite_give_no_number(world, tmp_path):
    model = copytree(next(w.split("=")[1] for w in world if w.startswith("model.path")), tmp_path / "nan")
    weights = load_file(model / "model.safetensors")
    weights["transformer.ln_f.weight"][0] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = compose([*world, f"model.path={model}", f"results_dir={tmp_path / 'results'}"])
    with pytest.raises(QuickSilverError, match="NaN or infinite"):
        ensure([config])
    assert len(record_frame(config.results_dir)) == 0


def test_what_a_protocol_refuses_is_refused_before_anything_runs(words):
    good, bad = compose(words), compose([*words, "modules=[halting_attention]"])
    with pytest.raises(ConfigError, match=r"protocol=continuation.*lookahead=true"):
        ensure([good, bad])
    assert len(record_frame(good.results_dir)) == 0
    (marked,) = ensure([compose([*words, "modules=[halting_attention]", "modules.halting.lookahead=true"])])
    assert marked.lookahead is True


# -- the fingerprint ------------------------------------------------------------------------------------------------------------
def fingerprint_of(*words: str) -> str:
    return RunContext().fingerprint(compose(words))


def test_what_can_change_a_number_changes_the_fingerprint_and_nothing_else_does(words, tmp_path):
    base = fingerprint_of(*words, *THRESHOLD)
    free = ["tracker=wandb", f"results_dir={tmp_path / 'x'}", "measure.latency.repeats=9", "modules.halting.resume_layers=1"]
    for word in (*free, "protocol.prompt_tokens=7"):
        assert fingerprint_of(*words, *THRESHOLD, word) == base
    other = ["seed=1", "modules.halting.tau_drift=p61", "dataset.windows=9", "model.dtype=bfloat16", "threads=2"]
    other += ["execution=decide", "protocol.batch_size=2", "dataset.calibration_windows=3", "measure.null_control.enabled=false"]
    other += ["protocol.window_tokens=16", "modules=[halting]"]
    found = [fingerprint_of(*words, *THRESHOLD, word) for word in other]
    assert len({base, *found}) == len(found) + 1


ELSEWHERE = "execution protocol.name model.parallel dataset.reader tracker.name tracker.mode"  # tested with what they need
ACCEPTED = [
    *([*HALTED, f"execution={one}", f"protocol={other}"] for one in get_args(Execution) for other in get_args(ProtocolName)),
    *([f"{key}={value}"] for key, values in CHOICES.items() if key not in ELSEWHERE.split() for value in values[1:] or values),
]  # the first value of a key is the default, which all other runs have; precision has none


@pytest.mark.parametrize("chosen", ACCEPTED, ids=lambda chosen: " ".join(chosen[-2:]))
def test_every_value_that_is_accepted_gives_a_record_that_reads(words, chosen):
    assert get_args(Execution) == EXECUTIONS  # none that the runtime has is left out
    config = compose([*words, *chosen, "dataset.windows=2", "measure.audit.enabled=false"])
    (record,) = ensure([config])
    assert (record.execution, record.protocol.name) == (config.execution, config.protocol.name)
    assert load_record(record.path) == record
    assert math.isfinite(record.quality.ppl)


def test_texts_and_calibration_files_count_by_content(words, finished, tmp_path):
    base, dense = fingerprint_of(*words, *THRESHOLD), fingerprint_of(*words)
    copied, other = make_text(tmp_path / "the same.txt", seed=1), make_text(tmp_path / "other.txt", seed=9)
    assert fingerprint_of(*words, *THRESHOLD, f"dataset.files.test={copied}") == base
    assert fingerprint_of(*words, *THRESHOLD, f"dataset.files.test={other}") != base
    assert fingerprint_of(*words, *THRESHOLD, f"dataset.files.calibration={other}") != base
    assert fingerprint_of(*words, f"dataset.files.calibration={other}") == dense  # nothing is calibrated there

    def calibrated(path):
        return fingerprint_of(*words, *THRESHOLD, f"modules.halting.calibration={path}")

    (path,) = (finished[0] / "calibration").rglob("*.json")
    copy = tmp_path / "copy.json"
    copy.write_bytes(path.read_bytes())
    given = calibrated(path)
    assert calibrated(copy) == given != base
    copy.write_text(path.read_text().replace('"provenance": {', '"provenance": {"note": "another file", '))
    assert calibrated(copy) != given
    with pytest.raises(ConfigError, match=r"calibration=/nowhere cannot be read"):
        calibrated("/nowhere")


# -- trackers -------------------------------------------------------------------------------------------------------------------
def test_wandb_is_imported_only_where_asked_for_and_one_that_is_not_there_is_told_before_anything_runs(words, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would fail
    ensure([compose(words)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tracker=wandb needs the package wandb.*tracker=none"):
        ensure([compose([*words, "tracker=wandb"])])


def test_a_mirror_gets_the_differences_to_dense(finished):
    results, records = finished
    record = records["all"]
    assert differences(record)["delta_ppl_pct"] == pytest.approx(100 * (record.quality.ppl / record.dense.ppl - 1))
    assert "prompt_executed_flops_saved_pct" in differences(records["continuation"])
    assert differences(Store(results).dense_of(record)) == {}
    numbers = scalars(record)
    assert numbers["audit/probes"] == record.content["audit"]["probes"]
    assert not any(name.startswith(("config", "identity")) for name in numbers)


def test_modules_are_asked_behind_the_decision_layers_only(words):
    every, few = (compose([*words, *THRESHOLD, *more]) for more in ([], ["decision_layers=[2,1]"]))
    wherever, there = ensure([every, few])
    assert "decision_layers" not in every.identity()
    assert few.identity()["decision_layers"] == [1, 2]
    assert wherever.dense_fingerprint == there.dense_fingerprint
    traces = (Trace.load(record.trace_path).passes for record in (wherever, there))
    anywhere, after = (set(torch.cat([one.halt_layer.flatten() for one in passes]).tolist()) for passes in traces)
    never = max(anywhere)
    assert anywhere - {never} > after - {never}
    assert after <= {1, 2, never}
    with pytest.raises(ConfigError, match="decision_layers="):
        ensure([compose([*words, *THRESHOLD, "decision_layers=[99]"])])


# -- options called `…_ids` take words: they become the ids of the model at hand, whatever its tokenizer ---------------------------
def test_words_become_the_ids_of_every_token_that_reads_so_and_one_that_is_no_token_is_named(words):
    config = compose([*words, *HALTED, "modules.halting.full_ids=[b,3]"])
    tokenizer = RunContext().model(config).tokenizer
    (module,), (unresolved,) = build_modules(config.modules, tokenizer), build_modules(config.modules)
    assert sorted(module.full_ids) == sorted([3, *tokenizer("b")["input_ids"]])
    assert unresolved.full_ids == (3,)
    config = compose([*words, *HALTED, "modules.halting.forced_ids=[b,word]"])
    with pytest.raises(ConfigError, match="modules.halting.forced_ids: 'word'"):
        build_modules(config.modules, tokenizer)


def test_forced_words_halt_first_and_full_words_never(words):
    asked = ["measure.signals.enabled=true", "measure.signals.sentences=[abcabcd]"]
    record = ensure([compose([*words, *HALTED, *asked, "modules.halting.forced_ids=[b]", "modules.halting.full_ids=[c]"])])[0]
    frame = record.signals()
    active = frame.groupby("token", sort=False)["active"]
    assert active.all()["c"]
    first = frame[~frame["active"]].groupby("token")["layer"].min()
    assert first["b"] == first.min()
    assert set(record.thresholds["halting"]) == {"tau_drift"}
    assert len(record.thresholds["halting"]["tau_drift"]) == record.model.layers
