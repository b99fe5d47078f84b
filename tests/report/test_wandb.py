"""The W&B mirror and its report: what is sent, to which groups, and what is said to who cannot send anything."""

import json
import struct
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fakes
import pandas as pd
import pytest
import wandb_report
from harness_world import make_world
from saying import unsaid

from quicksilver.report import comparison, wandb
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.figure import Figure, panels, style
from quicksilver.report.site import collection
from quicksilver.report.site.collection import Collection
from quicksilver.report.table import Panel, Table
from quicksilver.runs.tracker import curves, sync_hint

# --- W&B's own offline files, read back: what `wandb sync` would send -----------------------------------------------------------
_BLOCK, _HEADER = 32768, 7  # of a log: records in parts, each with checksum, length and whether more of it follows


def _records(content: bytes) -> list[bytes]:
    found, whole, at = [], b"", _HEADER
    while at + _HEADER <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + _HEADER])
        whole += content[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # all of it, or its last part
            found.append(whole)
            whole = b""
    return found


def read_offline(results: Path) -> dict[str, dict[str, Any]]:
    """By a run's id its `name`, `group`, `config`, `history` (a mapping a step), and its `artefacts` with the type of each."""
    from wandb.proto import wandb_internal_pb2

    runs: dict[str, dict[str, Any]] = {}
    for path in sorted(results.glob("wandb/offline-run-*/*.wandb")):
        about: dict[str, Any] = {"history": [], "artefacts": {}}
        for content in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                config = {one.key: json.loads(one.value_json) for one in record.run.config.update}
                about |= {"name": record.run.display_name, "group": record.run.run_group, "config": config}
                runs[record.run.run_id] = about
            elif kind == "history":
                items = record.history.item
                about["history"].append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items})
            elif kind == "request" and record.request.HasField("log_artifact"):
                about["artefacts"][record.request.log_artifact.artifact.name] = record.request.log_artifact.artifact.type
            elif kind == "artifact":
                about["artefacts"][record.artifact.name] = record.artifact.type
    return runs


# --- the mirror -----------------------------------------------------------------------------------------------------------------
class Sent:
    """Stands for the client: keeps what it is given."""

    def __init__(self) -> None:
        self.runs: list[dict] = []
        self.Settings, self.errors, self.__spec__ = dict, types.SimpleNamespace(Error=RuntimeError), object()

    def Table(self, dataframe):
        return "table", dataframe

    def Image(self, path, caption):
        return "image", Path(path), caption

    def init(self, **about):
        run = {**about, "logged": {}, "artefacts": [], "finished": False}
        self.runs.append(run)
        return types.SimpleNamespace(
            log=run["logged"].update,
            define_metric=lambda name, step_metric: None,
            log_artifact=lambda path, name, type: run["artefacts"].append((Path(path), name, type)),
            finish=lambda: run.update(finished=True),
        )


@pytest.fixture
def sent(monkeypatch) -> Sent:
    monkeypatch.setitem(sys.modules, "wandb", found := Sent())
    return found


@pytest.fixture
def results(tmp_path) -> Path:
    """Two halting records in a panel with the name of an experiment, a figure and a ledger."""
    dense = fakes.make(tmp_path, "dense all", label="dense")
    records = [fakes.make(tmp_path, f"halting {i} all", per_token=0.02 * i, saved=0.1 * i, label=f"halting {i}") for i in (1, 2)]
    rows = [Row("b2_halting", "", f"p{i}", f"p{i}", ()) for i in (1, 2)]
    frame = comparison.frame([Outcome(row, record, dense) for row, record in zip(rows, records, strict=True)])
    panel = Panel("b2_halting", "B.2", comparison.columns(prompt=False), ())
    Table("table_sweeps", "Sweeps of the paper", frame, (panel,)).write(tmp_path / "tables")
    with style():
        drawing, _ = panels()
    Figure("figure99", "Figure 99: none", frame[["key"]], drawing, ("A caption.",)).write(tmp_path / "figures")
    ledger = pd.DataFrame([dict(panel="a", section="", claim="a", kind="claim", verdict="partly", record="")])
    (tmp_path / "claims.json").write_bytes(Table("claims", "Claims", ledger, ()).written().json())
    return tmp_path


def test_records_are_runs_in_their_sweep_and_tables_and_figures_are_one(results, sent, capsys, monkeypatch):
    places = {fakes.fingerprint(f"halting {i} all"): f"depths [{i}/2] depth=0.{i}" for i in (1, 2)}
    monkeypatch.setattr(collection, "labels", lambda _: places)
    assert wandb.main([f"results_dir={results}", "tracker.project=mine"]) == 1  # tables of experiments/ that are not here
    runs = {run["id"]: run for run in sent.runs}
    one = runs[fakes.fingerprint("halting 1 all")]
    assert (one["project"], one["mode"], one["group"], one["tags"]) == ("mine", "offline", "sweep b2_halting", ["table_sweeps"])
    assert one["logged"]["executed_flops_saved_pct"] == pytest.approx(10)
    assert one["logged"]["ppl"] > one["logged"]["dense_ppl"]
    assert one["artefacts"] == [(results / "runs" / one["id"], f"record-{one['id']}", "record")]
    assert runs[fakes.fingerprint("dense all")]["group"] == "reference-gpt2 | python-docs | all"
    assert all(run["finished"] for run in sent.runs)
    assert [runs[name]["name"] for name in places] == [f"{place} | halting {i}" for i, place in enumerate(places.values(), 1)]
    said = capsys.readouterr()
    assert unsaid(said.out, "3 records, 2 tables and figures: project mine, offline", "wandb sync") == []
    assert "quicksilver reproduce table 11" in said.err
    (pieces,) = [run for run in sent.runs if run["name"] == wandb.TABLES_AND_FIGURES]
    assert set(pieces["logged"]) == {"table_sweeps", "figure99", "claims"}
    assert pieces["logged"]["figure99"][1] == results / "figures" / "figure99.png"
    assert len(pieces["logged"]["table_sweeps"][1]) == 2
    sent_files = {path.name for path, _, _ in pieces["artefacts"]}
    assert sent_files >= {"table_sweeps.md", "table_sweeps.csv", "figure99.json", "figure99.csv"}
    first, sent.runs = sent.runs, []
    wandb.publish(results, wandb.TrackerConfig(name="wandb"))
    assert [one["id"] for one in sent.runs] == [one["id"] for one in first]  # mirrored twice, the same runs


@pytest.mark.slow
def test_an_ad_hoc_sweep_by_w_and_b_itself(tmp_path):
    """What `wandb sync` would send: when the sweep is made, and when its folder is mirrored."""
    pytest.importorskip("wandb")
    results = tmp_path / "results"
    words = [
        *make_world(tmp_path / "world"), f"results_dir={results}", "measure=sweep", "dataset.windows=9", "name=depths",
        "modules=[static_depth]", "modules.static_depth.depth=0.2,0.5", "tracker=wandb", "tracker.mode=offline",
    ]  # fmt: skip
    python = [sys.executable, "-m"]
    made = subprocess.run([*python, "quicksilver", "run", "-m", *words], capture_output=True, text=True, timeout=900)
    assert made.returncode == 0, made.stderr
    assert f"W&B has them offline. To send: wandb sync {results}/wandb/offline-run-*" in made.stderr
    page = (results / "sweeps" / "depths" / "index.html").read_text()
    first = read_offline(results)
    assert len(first) == 3  # with the dense run
    again = [*python, "quicksilver.report.wandb", f"results_dir={results}"]
    assert subprocess.run(again, capture_output=True, timeout=900).returncode == 0
    for number, depth in ((1, 0.2), (2, 0.5)):
        label = f"[{number}/2] depth={depth}"
        assert label in made.stdout.splitlines()
        assert f"<td>{depth}</td>" in page
        (name,) = [name for name, run in first.items() if run["name"].startswith(f"{label} | tiny")]
        run, mirrored = first[name], read_offline(results)[name]
        assert mirrored["name"].startswith(f"depths {label} | tiny")
        for one in (run, mirrored):
            assert one["group"] == "sweep depths"
            assert one["config"]["modules"]["static_depth"]["depth"] == depth
            assert one["artefacts"] == {f"record-{name}": "record", f"run-{name}-by_window": "run_table"}
            curve = [step for step in one["history"] if "so_far/windows" in step]
            assert [step["so_far/windows"] for step in curve] == [*range(1, 10)]
            numbers = one["history"][-1]
            assert curve[-1]["so_far/ppl"] == pytest.approx(numbers["ppl"])
            assert curve[-1]["so_far/delta_ppl_pct"] == pytest.approx(numbers["delta_ppl_pct"])


def test_a_curve_ends_with_the_numbers_of_its_record(results):
    record = next(run.record for run in Collection(results).runs.values() if run.record and run.record.dense)
    for blocks in (3, 1000):
        found = curves(record, blocks)
        assert len(found) == min(blocks, len(record.windows))
        assert found.iloc[-1]["so_far/windows"] == len(record.windows)
        assert found.iloc[-1]["so_far/ppl"] == pytest.approx(record.quality.ppl)


def test_a_folder_of_runs_alone_is_mirrored(tmp_path, sent, capsys):
    assert wandb.main([f"results_dir={tmp_path}"]) == 1
    assert "has no record, table, figure or claim yet" in capsys.readouterr().err
    fakes.make(tmp_path, "dense all", label="dense")
    fakes.make(tmp_path, "halting 1 all", label="halting 1")
    assert wandb.main([f"results_dir={tmp_path}"]) == 0
    said = capsys.readouterr()
    assert (said.out.splitlines()[0], said.err) == ("2 records, 0 tables and figures: project quicksilver, offline.", "")
    assert len(sent.runs) == 2
    assert wandb_report.main([f"results_dir={tmp_path}", "list=true"]) == 0


def test_the_hint_says_what_is_waiting(tmp_path):
    config = wandb.TrackerConfig(name="wandb", mode="offline")
    folders = [tmp_path / "wandb" / f"offline-run-20260101_00000{i}-{'ab'[i]}" for i in (0, 1)]
    for folder in folders:
        folder.mkdir(parents=True)
    assert sync_hint(config, tmp_path, ["a"]).endswith(f"wandb sync {folders[0]}")
    assert sync_hint(config, tmp_path, ["a", "b"]).endswith(f"wandb sync {tmp_path}/wandb/offline-run-*")
    assert "1 of 2 records were there before" in sync_hint(config, tmp_path, ["a", "c"])
    assert sync_hint(wandb.TrackerConfig(name="none"), tmp_path, ["a"]) == ""


def test_a_refusal_is_said_and_harms_nothing(results, sent, capsys):
    sent.init = Mock(side_effect=RuntimeError("no login"))
    assert wandb.main([f"results_dir={results}", "tracker.mode=online"]) == 1
    said = capsys.readouterr().err
    assert unsaid(said, "is finished, but W&B refused it: no login", "tracker.mode=offline") == []


# --- the report -------------------------------------------------------------------------------------------------------------------
def test_the_report_has_the_panels_the_sweeps_and_every_piece(results):
    sections = {section.title: section for section in wandb_report.outline(Collection(results))}
    assert sections["Sweep b2_halting"].sweep == "sweep b2_halting"  # the group that the mirror gives
    assert sections["Figure 99: none"].panels[0].keys == ("figure99",)
    assert "| technique |" in sections["Sweeps of the paper"].text
    logged = {name for row in (run.row for run in Collection(results).runs.values()) for name in row}
    drawn = {key for spec in wandb_report.RUNS.panels for key in spec.keys if spec.kind != "lines"}
    # Nothing is drawn that no run would have; these records have neither a cache nor a null.
    assert drawn - logged == {"kv_bytes_saved_pct", "null_delta_ppl_pct"}


def test_the_report_is_built_from_blocks(results):
    names = "TableOfContents H1 MarkdownBlock PanelGrid Runset ScatterPlot BarPlot MediaBrowser LinePlot Report"
    fake = types.SimpleNamespace(**{name: lambda name=name, **about: (name, about) for name in names.split()})
    _, report = wandb_report.build("mine", "me", Collection(results), fake)
    assert (report["project"], report["entity"]) == ("mine", "me")
    grids = [about for name, about in report["blocks"] if name == "PanelGrid"]
    assert len(grids) == 3
    filters = [runset["filters"] for _, runset in (grid["runsets"][0] for grid in grids) if "filters" in runset]
    assert filters == ['Metric("group") == "sweep b2_halting"']


@pytest.mark.parametrize(
    ("word", "says"), [("--list", "write list=VALUE"), ("list=maybe", "list="), ("projekt=a", "Did you mean project?")]
)
def test_words_that_the_report_does_not_take_are_refused(capsys, word, says):
    assert wandb_report.main([word]) == 1
    assert says in capsys.readouterr().err


def test_who_is_not_logged_in_is_told_what_is_missing(results, tmp_path, monkeypatch, capsys):
    there: set[str] = {"wandb"}
    monkeypatch.setattr(wandb_report.importlib.util, "find_spec", lambda name: object() if name in there else None)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_report.main([f"results_dir={results}"]) == 1
    said = capsys.readouterr().err
    assert unsaid(said, "pip install wandb-workspaces", "wandb login", "make report") == []
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password a-secret\n")
    there.add("wandb_workspaces")
    assert wandb_report.missing() == []
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "unset it" in wandb_report.missing()[0]
    monkeypatch.setenv("WANDB_API_KEY", "another-secret")
    there.clear()
    wandb_report.main([f"results_dir={results}"])
    said = capsys.readouterr()
    assert "secret" not in said.out + said.err
