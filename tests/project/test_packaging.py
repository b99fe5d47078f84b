"""What a stranger gets with a clone: the Makefile, the lock file, the package's description, the documentation."""

import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Mapping

import pytest
import tiny
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import ROOT, blocks, git

import quicksilver
from quicksilver.runs.config import compose

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]


def pins(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


LOCK, DOCS_LOCK = pins("requirements.lock"), pins("requirements-docs.lock")


def make(*words: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "ARGS"))}
    return subprocess.run(["make", *words], cwd=ROOT, env=inherited, capture_output=True, text=True, encoding="utf-8")


# --- make ------------------------------------------------------------------------------------------------------------------
def test_make_alone_lists_every_target_with_what_it_does():
    shown = make().stdout
    declared = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
    assert [target for target in declared if not re.search(rf"^  make {target} +\S", shown, re.MULTILINE)] == []
    assert {"reproduce-table", "test", "test-all", "lint", "train-reference", "calibrate", "benchmark", "clean"} <= set(declared)


def test_make_hands_the_choices_on():
    select = ("--dry-run", "-o", ".venv/.locked", "reproduce-table")
    chosen = make(*select, "TABLE=3", "MODEL=gpt2", "DATASET=c4", "ARGS=seed=1").stdout
    assert "quicksilver reproduce table 3 model=gpt2 dataset=c4 seed=1" in chosen
    assert re.search(r"quicksilver reproduce table 11\s*$", make(*select).stdout)


@pytest.mark.parametrize("version", [None, "3.9.1"])
def test_a_missing_or_old_python_is_one_clear_line(tmp_path, version):
    python = tmp_path / "python-of-mine"
    says = "python-of-mine was not found: install"
    if version is not None:
        python.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "Python {version}" && exit 0\nexit 1\n')
        python.chmod(0o755)
        says = f"is Python {version}, and QuickSilver needs"
    answer = make("environment", f"VENV={tmp_path}/venv", f"PYTHON={python}")
    assert answer.returncode != 0
    assert f"{says} Python 3.11 or newer" in answer.stderr
    assert not (tmp_path / "venv").exists()


def test_clean_leaves_results_alone():
    removals = [line for line in make("--dry-run", "clean").stdout.splitlines() if line.startswith(("rm", "find"))]
    assert removals
    assert not [line for line in removals if "results" in line]


def test_the_workflow_calls_targets_that_are_there():
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))["jobs"]
    lines = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"]) + (ROOT / ".ci/run").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)", lines))
    assert named >= {"test", "test-processors", "lint", "docs", "dist", "reproduce-table"}
    assert named <= set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    matrix = jobs["test"]["strategy"]["matrix"]
    versions = {line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if "Python :: 3." in line}
    assert set(matrix["python"]) == versions


# --- what is installed -----------------------------------------------------------------------------------------------------
def test_the_lock_pins_exact_versions_and_names_no_host_and_no_path():
    exact = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+(; sys_platform == 'darwin')?")
    assert [line for line in (*LOCK, *DOCS_LOCK) if not exact.fullmatch(line)] == []
    ours, of_docs = ([canonicalize_name(line.split("==")[0]) for line in lock] for lock in (LOCK, DOCS_LOCK))
    assert ours == sorted(set(ours))
    assert of_docs == sorted(set(of_docs) - set(ours))


def pinned(lock: list[str], machine: Mapping[str, str] | None = None) -> dict[str, str]:
    """Name to version of what `lock` installs on `machine` (this one)."""
    wanted = (one for one in map(Requirement, lock) if one.marker is None or one.marker.evaluate(dict(machine or {})))
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in wanted}


def requirements() -> list[str]:
    # `peers` is torchao alone: importing it prints, and costs every start seconds, so `make` does not install it; nor `ray`, which is large.
    # What `lm-eval` needs contradicts the lock.
    extras = [line for name, lines in EXTRAS.items() if name not in ("peers", "docs", "lm-eval", "ray") for line in lines]
    return [*PROJECT["project"]["dependencies"], *extras, *PROJECT["build-system"]["requires"]]


def test_what_the_lock_of_the_docs_has_lies_in_the_declared_ranges():
    locked = pinned(DOCS_LOCK)
    for wanted in map(Requirement, EXTRAS["docs"]):
        assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)])


MACHINES = {
    f"{system}-{machine}-{python}": {
        "sys_platform": system, "platform_system": system.capitalize(), "os_name": "posix", "platform_machine": machine, "python_version": python,
        "platform_python_implementation": "CPython", "implementation_name": "cpython", "python_full_version": f"{python}.5",
    }
    for system, machine in (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
    for python in ("3.11", "3.12", "3.13")
}  # fmt: skip
GPU = re.compile(r"nvidia-(?!ml-py)|cuda-|triton$")  # torch pins those of its CUDA build


@functools.cache
def needs(name: str) -> list[Requirement]:
    """What a package says that it needs; nothing of one that is of another machine alone."""
    try:
        return [Requirement(line) for line in importlib.metadata.requires(name) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_the_lock_is_whole_on_other_machines(machine):
    """What the packages installed here say they need there, by evaluating their markers, is in the lock, in a version they accept."""
    locked = pinned(LOCK, machine)
    ask = [(Requirement(line), "pyproject.toml") for line in requirements()]
    seen: set[tuple[str, str]] = set()
    while ask:
        wanted, of = ask.pop()
        name = canonicalize_name(wanted.name)
        for extra in wanted.extras or {""}:
            if (name, extra) in seen or GPU.match(name):
                continue
            seen.add((name, extra))
            assert name in locked, f"{of} needs {wanted}, which requirements.lock does not pin"
            assert wanted.specifier.contains(locked[name], prereleases=True), f"{of} needs {wanted}, locked is {locked[name]}"
            for one in needs(name):
                if one.marker is None or any(one.marker.evaluate({**machine, "extra": which}) for which in {"", extra}):
                    ask.append((one, name))
    assert set(locked) - {name for name, _ in seen} == set()  # and nothing is pinned that nobody asks for


def test_every_package_and_every_data_file_is_shipped():
    setuptools = PROJECT["tool"]["setuptools"]
    declared = set(setuptools["packages"])
    files = (path for place in ("quicksilver", "experiments", "studies") for path in (ROOT / place).rglob("*.py"))
    on_disk = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in files}
    assert declared == {"quicksilver.conf", *(one if one.startswith("quicksilver") else f"quicksilver.{one}" for one in on_disk)}
    places = {package: ROOT / folder for package, folder in setuptools["package-dir"].items()}
    for package, patterns in setuptools["package-data"].items():
        folder = places.get(package) or ROOT.joinpath(*package.split("."))
        shipped = {path for pattern in patterns for path in folder.glob(pattern)}
        wanted = {path for path in folder.rglob("*") if path.suffix in (".yaml", ".typed", ".json", ".safetensors")}
        nearer = [ROOT.joinpath(*other.split(".")) for other in declared if other.startswith(f"{package}.")]
        assert {path for path in wanted if not any(path.is_relative_to(inner) for inner in nearer)} <= shipped
    patterns = setuptools["exclude-package-data"]["quicksilver.models"]
    left_out = [path for pattern in patterns for path in (ROOT / "quicksilver" / "models").glob(pattern)]
    assert left_out
    weights = [
        path for path in left_out if path.name == "model.safetensors"
    ]  # of a lens that is left out, a run says how to fit one
    assert all((path.parent / "weights.sha256").is_file() for path in weights)  # loading says what to do, and records are found


def test_what_an_index_page_shows_has_no_dead_link():
    page = (ROOT / PROJECT["project"]["readme"]).read_text(encoding="utf-8")
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]*)\)", page))
    assert set(blocks(ROOT / PROJECT["project"]["readme"], "python")) == set(blocks(ROOT / "README.md", "python"))


def test_the_version_and_the_licence_are_said_once():
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "quicksilver.__version__"}
    releases = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert next(name for name in releases if name != "Unreleased") == quicksilver.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert "version" not in citation
    assert citation["license"] == PROJECT["project"]["license"] == "Apache-2.0"


def test_hooks_and_checks_are_the_projects_own():
    """Nothing is fetched before a commit, and what runs is what `make lint` and `make test` run."""
    (source,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert source["repo"] == "local"
    assert {hook["language"] for hook in source["hooks"]} == {"system"}
    for program in [*(hook["entry"].split()[0] for hook in source["hooks"]), ".ci/run"]:
        assert program == ".venv/bin/python" or os.access(ROOT / program, os.X_OK)
    commands = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert {"set -euo pipefail", "make test"} <= set(commands)


def test_the_check_of_files_refuses_what_is_unclean_or_large_outside_of_results(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "results").mkdir()
    for name, content, says in (
        ("a.py", "x = 1\n", None), ("results/table.md", "a line with a space \n" + "x" * 2**21, None), ("b.txt", "x = 1 \n", "trailing whitespace"),
        ("b.txt", "x" * (2**20 + 1), "b.txt: 1048577 bytes"),
    ):  # fmt: skip
        (tmp_path / name).write_text(content)
        git(tmp_path, "add", name)
        answer = subprocess.run([ROOT / ".ci" / "check-files"], cwd=tmp_path, capture_output=True, text=True)
        assert (answer.returncode == 0) == (says is None)
        assert says is None or says in answer.stdout + answer.stderr


# --- what is written -------------------------------------------------------------------------------------------------------
def test_the_readmes_runs_compose():
    lines = re.findall(r"^quicksilver run (.*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert lines
    for line in lines:
        swept = re.search(r"(?<==)p10,\S+", line)
        for value in swept[0].split(",") if swept else [""]:
            words = line.replace(swept[0], value) if swept else line
            assert compose([word for word in words.split() if word != "-m"]).modules


def test_the_readmes_script_runs_on_what_comes_with_the_package(tmp_path, monkeypatch):
    page = ROOT / "README.md"
    (script,) = blocks(page, "python")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(script, page.name, "exec"), names)
    assert names["run"].flops.executed < names["run"].flops.dense_nominal
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    assert text.splitlines()[0] == "# QuickSilver (independent reproduction, not by the paper's authors)"


@pytest.mark.parametrize("of_each_row", [False, True])
def test_the_documented_module_is_one(tmp_path, monkeypatch, of_each_row):
    page = ROOT / "docs" / "adding-a-module.md"
    source, remembering, share_of_row = blocks(page, "python")
    (halts,) = (line for line in source.splitlines() if "tokens.halt(" in line)
    shown = share_of_row if of_each_row else f"{remembering}{halts.strip()}"
    source = source.replace(halts, textwrap.indent(shown, " " * 8))
    (described,) = blocks(page, "yaml")
    (tmp_path / "quiet_tokens.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    entry = yaml.safe_load(described)
    assert described.startswith("# @package modules.quiet_tokens\n")
    from quicksilver.runs.parts import build_modules

    (module,) = build_modules({"quiet_tokens": entry | {"share": 0.6}})
    model, ids = tiny.build("llama"), torch.randint(1, tiny.VOCABULARY, (2, 16))
    logits = {}
    for execution in ("compact", "masked"):
        with torch.no_grad(), quicksilver.apply(model, [module], execution=execution) as run:
            logits[execution] = model(ids).logits
    halted = run.trace.passes[0].halt_layer < tiny.LAYERS - 1
    assert 0 < halted.sum() < halted.numel()
    torch.testing.assert_close(logits["compact"], logits["masked"], atol=1e-5, rtol=1e-5)
    sys.modules.pop("quiet_tokens", None)
