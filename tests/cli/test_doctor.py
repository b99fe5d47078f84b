"""`quicksilver doctor`: what it prints is true of this machine, and a missing thing comes with its cost."""

import importlib.metadata
import platform

import pytest
import torch
from repository import ROOT

from quicksilver.cli.commands import doctor
from quicksilver.runtime import errors


def topics(printed: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in printed.splitlines():
        if topic := line[:10].strip():
            found[topic] = []
        found[topic or list(found)[-1]].append(line[10:])
    return found


def test_it_prints_processor_kernels_versions_disk_data_and_packages(prints, tmp_path):
    printed = topics(prints("doctor", f"results_dir={tmp_path}", f"data.root={tmp_path}").out)
    assert printed["data"][0] == f"data.root: {tmp_path}"
    assert list(printed) == ["versions", "machine", "kernels", "disk", "data", "packages"]
    assert any(line.startswith(f"torch {torch.__version__}") for line in printed["versions"])
    assert platform.machine() in printed["machine"][0]
    assert {line.partition(":")[0] for line in printed["kernels"]} >= {"bfloat16", "int_mm", "qlinear", "qnnpack"}
    assert all("agrees with float64" in line or "not offered: " in line for line in printed["kernels"])
    assert printed["disk"][0].startswith(f"results: {tmp_path}")


def test_texts_that_a_folder_has_are_at_hand(tmp_path):
    (tmp_path / "books").mkdir()
    for part in ("test", "valid"):
        (tmp_path / "books" / f"books_{part}.txt").write_text("text")
    for root, begins in ((None, "needs a file"), (tmp_path, "at hand")):
        assert "books" in next(line for line in doctor._data(root) if line.startswith(begins))
    assert "is no folder: give another one" in next(doctor._data(tmp_path / "none"))


def test_a_missing_package_comes_with_its_cost(monkeypatch):
    there = importlib.metadata.version

    def version(name: str) -> str:
        if name == "wandb":
            raise importlib.metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    line = next(line for line in doctor._packages() if "wandb" in line)
    assert "no tracker=wandb" in line
    assert "[tracking]" in line


@pytest.mark.parametrize(
    ("clone", "here", "says"),
    [(True, True, "'.[plots]'"), (True, False, "'{}[plots]'"), (False, True, "'quicksilver-lm[plots]'")],
)
def test_a_clone_is_installed_from_its_folder_and_a_package_by_its_name(clone, here, says, tmp_path, monkeypatch):
    (root := tmp_path / "qs").mkdir()
    if clone:
        (root / "pyproject.toml").touch()
    monkeypatch.setattr(errors, "_CLONE", root)
    monkeypatch.chdir(root if here else tmp_path)
    assert errors.installing("plots") == f"pip install {says.format(root)}"


def test_the_versions_it_names_are_those_of_the_lock():
    locked = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    assert {f"{name}=={version}" for name, version in doctor.RUN_WITH.items()} <= {line.split(" ")[0] for line in locked}
