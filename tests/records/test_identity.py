"""What a record is of (configuration, data, weights, the user's own code, the version of the numbers), and what its run was set on."""

import json
from dataclasses import replace

import fakes
import pytest

from quicksilver.models.loading import EMBEDDED
from quicksilver.modules.halting import Halting
from quicksilver.records.identity import CalibrationEntry, Identity, foreign_sources
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.runs.choices import choices
from quicksilver.runs.config import compose
from quicksilver.runs.context import THRESHOLDS, calibration_provenance, texts_of
from quicksilver.runtime.errors import ConfigError

FILES = sorted(path for path in EMBEDDED.glob("*/*/*") if path.suffix in (".yaml", ".safetensors"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(path.parts[-3:]))
def test_every_file_of_the_package_says_which_calibrating_text_it_was_made_on(path):
    texts = texts_of(path)
    assert {"python-docs"} < texts.keys() <= set(choices("dataset"))
    assert all(count > 0 for count in texts.values())


def test_files_say_on_which_texts_they_were_made_and_percentiles_are_of_the_runs_own_text(tmp_path):
    (mine := tmp_path / "mine.yaml").write_text("chosen_on:\n  windows: {novel: 3}\n")
    shipped = next(path for path in FILES if path.name == "schedules.yaml")
    files = {f"predicted_kv.quicksilver.{path.name}": path for path in (shipped, mine)} | {"calibration.halting": mine}
    found = calibration_provenance(files, "books", CalibrationEntry("books", "0" * 64, 16, [], {}))
    wanted = {"predicted_kv/schedules.yaml": texts_of(shipped), "predicted_kv/mine.yaml": {"novel": 3}}
    assert found == wanted | {THRESHOLDS: {"books": 16}}
    assert calibration_provenance(files, "books", None) == wanted


def test_a_file_that_does_not_say_has_no_texts(tmp_path):
    path = tmp_path / "schedules.yaml"
    for content in ("schedules: {}\n", "[1, 2]\n", "chosen_on: {windows: 3}\n", "a: [\n"):
        path.write_text(content)
        assert texts_of(path) == {}


def test_notes_say_it_once_for_all_rows(tmp_path):
    told = [{"thresholds": {"python-docs": 16}}, {"thresholds": {"python-docs": 40}, "predicted_kv/a.yaml": {"books": 2}}, {}]
    dense = fakes.make(tmp_path, "dense continuation", "continuation")
    records = [fakes.make(tmp_path, f"run {i}", "continuation", per_token=0.01, tuned=one) for i, one in enumerate(told)]
    outcomes = [Outcome(Row("continuation", "", str(i), str(i), ()), record, dense) for i, record in enumerate(records)]
    (said,) = [line for line in provenance.notes(outcomes) if line.startswith("Fitted on")]
    assert said == "Fitted on calibration data (windows): predicted_kv/a.yaml on books (2); thresholds on python-docs (16 or 40)."
    assert not any(line.startswith("Fitted on") for line in provenance.notes(outcomes[2:]))


# --- identity ---------------------------------------------------------------------------------------------------------------------
OF = Identity({"seed": 0, "modules": {"halting": {"tau": 1.0, "window": (0.2, 0.8)}}}, {"text": "a", "weights": "b"}, {}, 1)


def test_each_part_counts_and_spelling_does_not():
    changed = ({"config": {**OF.config, "seed": 1}}, {"digests": {**OF.digests, "weights": "c"}})
    changed += ({"sources": {"mine": "d"}}, {"numerics_version": 2})
    assert len({OF.fingerprint, *(replace(OF, **one).fingerprint for one in changed)}) == 5
    turned = Identity({"modules": {"halting": {"window": [0.2, 0.8], "tau": 1}}, "seed": 0.0}, OF.digests, {}, 1)
    assert turned.fingerprint == OF.fingerprint
    assert Identity(**json.loads(json.dumps(OF.to_json()))).fingerprint == OF.fingerprint


@pytest.mark.parametrize("module", ["staged_halting", "linear_mlp"])
def test_an_option_that_came_later_counts_only_where_it_changes_something(module):
    def found(*words):
        (entry,) = compose([f"modules=[{module}]", "protocol=continuation", *words]).identity()["modules"].values()
        return entry

    assert "protect_at_most" not in found()
    assert found(f"modules.{module}.protect_at_most=0.5") == {**found(), "protect_at_most": 0.5}


def test_the_users_own_files_count_and_the_packages_do_not(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_base.py").write_text("from quicksilver.modules.halting import Halting\n\n\nclass Base(Halting):\n    pass\n")
    (tmp_path / "own_module.py").write_text("from own_base import Base\n\n\nclass Mine(Base):\n    pass\n")
    from own_module import Mine

    assert foreign_sources([Halting]) == {}
    before = foreign_sources([Halting, Mine])
    assert set(before) == {"own_base", "own_module"}
    with (tmp_path / "own_base.py").open("a") as file:
        file.write("# changed\n")
    after = foreign_sources([Mine])
    assert after["own_module"] == before["own_module"]
    assert after["own_base"] != before["own_base"]


def test_a_class_without_a_file_is_refused():
    scope: dict = {"__name__": "nowhere"}
    exec("class Typed: pass", scope)
    with pytest.raises(ConfigError, match=r"nowhere\.Typed has no source file.*put the class into a file"):
        foreign_sources([scope["Typed"]])
