"""Imports run downward only (docs/design.md §7): what stands higher is known by no file below it. And every module can be imported."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT

FLOORS = "runtime < modules baselines data models < measure < fitting < records < runs < report experiments < cli < studies"
FLOOR = {package: number for number, packages in enumerate(FLOORS.split("<")) for package in packages.split()}


def files() -> Iterator[tuple[str, Path]]:
    """Every file of a package that has a floor, with the package."""
    for package in FLOOR:
        root = ROOT / package if package in ("experiments", "studies") else ROOT / "quicksilver" / package
        for path in sorted(root.rglob("*.py")):
            yield package, path


def imported(path: Path) -> Iterator[str]:
    """The packages of quicksilver that a file imports, anywhere in it."""
    for place, names in re.findall(
        r"^ *(?:from|import) quicksilver(?:\.(\w+)| import (.*))", path.read_text(encoding="utf-8"), re.M
    ):
        yield from [place] if place else re.findall(r"\w+", names)


def test_every_package_has_a_floor() -> None:
    packages = {path.parent.name for path in (ROOT / "quicksilver").glob("*/__init__.py")}
    assert packages <= set(FLOOR)


def test_imports_run_downward_only() -> None:
    seen = {(package, path.relative_to(ROOT), name) for package, path in files() for name in imported(path) if name in FLOOR}
    assert len(seen) > 300
    assert {(str(path), name) for package, path, name in seen if FLOOR[name] > FLOOR[package]} == set()


def from_elsewhere(package: str) -> set[str]:
    """The packages of others that the files of a floor import."""
    paths = (path for name, path in files() if name == package)
    found = (re.findall(r"^ *(?:from (\w+)\S* import|import (\w+))", path.read_text(encoding="utf-8"), re.M) for path in paths)
    return {name for pairs in found for pair in pairs for name in pair} - sys.stdlib_module_names - {"", "quicksilver"}


def test_the_runtime_stands_on_its_own_and_hydra_reaches_no_floor_below_the_harness() -> None:
    assert from_elsewhere("runtime") == {"torch", "transformers", "safetensors", "numpy"}
    for package in ("modules", "measure"):
        assert "torch" in from_elsewhere(package)
        assert not from_elsewhere(package) & {"hydra", "omegaconf"}


OPTIONAL = {"lm_eval", "torchao", "submitit", "ray", "optuna", "mauve", "spacy"}


def test_every_module_imports() -> None:
    """Type checking skips what it cannot find, and lists of files go stale."""
    names = []
    for package in map(importlib.import_module, ("quicksilver", "quicksilver.experiments", "quicksilver.studies")):
        root = Path(next(iter(package.__path__)))
        for path in sorted(root.rglob("*.py")):
            name = ".".join((package.__name__, *path.relative_to(root).with_suffix("").parts))
            names.append(name.removesuffix(".__init__"))
    assert len(names) > 150
    for name in (name for name in names if not name.endswith("__main__")):  # which runs the command
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in OPTIONAL:
                raise
