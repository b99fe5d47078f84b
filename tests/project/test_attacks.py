"""What was thrown at it and must be answered in one line that says what is wrong and what to do: never a traceback, never a number.

The first of each kind go through the command line, in this process, the others straight to the harness behind it, which composes them from
what it has read. A fault that is not refused would be measured, on a model of six tiny layers.
"""

import errno
import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from saying import refused_in_a_line, unsaid
from thinning import first

from quicksilver.cli import main as console
from quicksilver.files import write_files
from quicksilver.modules.calibration import Calibration
from quicksilver.runs.config import compose
from quicksilver.runs.jobs import RecordIndex
from quicksilver.runs.parts import named_class
from quicksilver.runs.run import ensure
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.module import RuntimeModule

HALTING = ["modules=[halting]", *(f"modules.halting.{word}" for word in ("tau_entropy=null", "tau_drift=0.3", "resume_layers=0"))]
TWO_RULES = ["modules=[halting,halting_paper_b2]"]
TEXT = "abc def " * 40
PROGRESS = re.compile(r"This needs \d+ run|\[\d+/\d+\] ")


@pytest.fixture
def refused(request, world, tmp_path, prints) -> Callable[..., str]:
    """Gives the words to `quicksilver run`, or to the harness behind it where the parameter says so; returns the one line of the refusal."""

    def by_the_command(words: list[str]) -> str:
        out, err = prints("run", *words, code=2)
        assert out == ""
        (line,) = (line for line in err.splitlines() if not PROGRESS.match(line))
        return line.removeprefix("quicksilver: ")

    def by_the_harness(words: list[str]) -> str:
        with refused_in_a_line(kind=QuickSilverError) as caught:
            ensure([compose(words)])
        assert "layer -" not in str(caught.value)  # no layer has a negative number
        return str(caught.value)

    def ask(*words: str) -> str:
        given = any(word.startswith("results_dir=") for word in words)
        results = tmp_path / "results"
        said = door([*world, *([] if given else [f"results_dir={results}"]), *words])
        # Nothing was measured: the dense run before it may be there.
        assert all(json.loads(path.read_text())["modules"] == [] for path in (results / "runs").glob("[!.]*/record.json"))
        return said

    door = by_the_harness if getattr(request, "param", "command") == "harness" else by_the_command
    return ask


def door_first(attacks: Collection[str], n: int = 1, quick: int | None = None) -> pytest.MarkDecorator:
    """The attacks, the first `n` through the command line; those after the first `quick` are left to `make test-all`."""
    made = [(attack, "command" if i < n else "harness") for i, attack in enumerate(attacks)]
    return pytest.mark.parametrize(
        ("attack", "refused"), first(made, len(made) if quick is None else quick), indirect=["refused"]
    )


# -- words of the command line ----------------------------------------------------------------------------------------------------
WORDS: dict[str, tuple[list[str], list[str]]] = {
    "a threshold that is no number": ([*HALTING, "modules.halting.tau_drift=nan"], ["tau_drift=nan", "finite"]),
    "a budget that is no number": (["measure.deployment.budget_ms=nan"], ["measure.deployment.budget_ms=nan is not finite"]),
    "no budget": (["measure.deployment.enabled=true", "measure.deployment.budget_ms=0"], ["measure.deployment.budget_ms=0", "above 0"]),
    "a seed that generators refuse": ([*HALTING, "seed=18446744073709551616"], ["seed=18446744073709551616", "4294967295"]),
    "more threads than any machine has": (["threads=100000"], ["threads=100000", "1024"]),
    "the device of tensors without data": (["model.device_map=meta"], ["model.device_map=meta", "cpu"]),
    "a core as a device": (["model.device_map=cpu:99"], ["model.device_map=cpu:99", "cpu"]),
    "a path with a space": (["model.path='my model'"], ["model.path='my model'", "owner/name", "model.path=/folder"]),
    "an empty path": (["model.path=''"], ["model.path is empty", "model.path=/folder"]),
    "no key": (["=3"], ["'=3' is not an override", "key=value"]),
    "a number as a model": (["model=3"], ["model=3", "reference-gpt2"]),
    "a number as a module": (["modules=[3]"], ["modules=3", "halting"]),
    "nothing as modules": (["modules=null"], ["modules=null", "halting"]),
    "an unknown interpolation": (["model.name=${nope}"], ["model.name=${nope}", "'nope' not found", "${oc.env:NAME"]),
    "interpolations in a circle": (["model.name=${model.path}", "model.path=${model.name}"], ["ecursive", "${model.path}"]),
    "a variable that is not set": (["model.path=${oc.env:NOPE_NOPE}"], ["NOPE_NOPE", "otherwise"]),
    "resuming more layers than there are": ([*HALTING, "modules.halting.resume_layers=90"], ["resume_layers=90", "the model has 6 layers", "at most 4"]),
    "two rules of one module": (TWO_RULES, ["modules=[halting,halting_paper_b2]", "both are modules.halting", "modules.halting.OPTION=…"]),
    "skipping what halts where nothing halts": (
        ["modules=[kv_skipping]"],
        ["KVSkipping", "no module here halts", "modules=[halting,…]", "criterion=attention"],
    ),
    "a token id beyond the vocabulary": ([*HALTING, "modules.halting.full_ids=[257]"], ["full_ids", "257", "the model has 257 tokens"]),
}  # fmt: skip


OF_THE_LINE_ITSELF = (
    "no key", "a number as a module", "an unknown interpolation", "interpolations in a circle", "a variable that is not set",
)  # fmt: skip


@door_first([*OF_THE_LINE_ITSELF, *(attack for attack in WORDS if attack not in OF_THE_LINE_ITSELF)], len(OF_THE_LINE_ITSELF) + 1)
def test_words_that_make_no_sense(attack, refused):
    words, says = WORDS[attack]
    assert unsaid(refused(*words), *says) == []


# -- programs in a config ---------------------------------------------------------------------------------------------------------
TARGETS = {
    "subprocess.Popen": "is not imported",
    "torch.nn.Linear": "no subclass of quicksilver.runtime.module.RuntimeModule",
    "quicksilver.runtime.module.TokenPolicy": "is abstract: it lacks decide",
    "quicksilver.modules.nothing": "cannot be imported",
    "'a b.C'": "is no name of a class",
    "this.c": "is not imported",  # importing it prints a poem
    "builtins.dict": "is not imported",
    "quicksilver.records.store.Store": "no subclass of quicksilver.runtime.module.RuntimeModule",
    "quicksilver.runtime.module.RuntimeModule": "is abstract",
    "quicksilver.modules": "is no",
    "Halting": "is no name of a class",
    ".a.B": "is no name of a class",
}


@door_first(TARGETS, 2, quick=6)
def test_a_target_that_is_no_module_is_not_called(attack, refused, tmp_path):
    touched = tmp_path / "touched"
    said = refused(f"+modules.x._target_={attack}", f"+modules.x.args=[touch,{touched}]")
    assert unsaid(said, f"modules.x._target_={attack.strip(chr(39))}", TARGETS[attack]) == []
    assert not touched.exists()


def test_a_file_of_one_s_own_is_imported_only_for_a_class_that_it_has(refused, tmp_path, monkeypatch):
    (tmp_path / "someones_file.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\nclass Other: pass\n")
    package = tmp_path / "someones_package"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import Mine as Theirs\n")
    (package / "inner.py").write_text("from quicksilver.modules import Halting\n\nclass Mine(Halting): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("Mine", "Other"):
        assert "is not imported" in refused(f"+modules.x._target_=someones_file.{name}")
    assert not (tmp_path / "imported").exists()
    assert issubclass(named_class("modules.x._target_", "someones_package.Theirs", RuntimeModule), RuntimeModule)


@pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils")  # where an earlier test imported that
def test_no_program_of_an_installed_package_is_imported():
    """`python -m package` runs `package/__main__.py`, and so would an import of it, whatever classes it has or imports."""
    programs = [path for path in Path(sysconfig.get_path("purelib")).glob("*/__main__.py") if path.parent.name.isidentifier()]
    assert programs
    for path in programs:
        module = f"{path.parent.name}.__main__"
        for name in {"main", *re.findall(r"\b[A-Z]\w*", path.read_text(encoding="utf-8"))}:
            with pytest.raises(ConfigError, match=r"is not imported|is no subclass|is no name|is not a class"):
                named_class("modules.x._target_", f"{module}.{name}", RuntimeModule)
        assert module not in sys.modules


ADAPTER = """
from quicksilver.runtime.architecture import GPT2Architecture

class Mine(GPT2Architecture):
    family = "mine"
    model_types = ("attacks_own",)

class Other:
    model_types = ("gpt2",)
"""


def test_an_adapter_of_one_s_own_is_taken_for_its_model_types_alone(refused, tmp_path, monkeypatch):
    (tmp_path / "attacks_family.py").write_text(ADAPTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    for name in ("subprocess.Popen", "attacks_family.Other"):
        assert f"model.adapter={name} is not imported" in refused(f"model.adapter={name}")
    said = refused("model.adapter=attacks_family.Mine")
    assert "Mine serves the model types attacks_own, and this model is of gpt2, which GPT2Architecture serves" in said


@pytest.mark.parametrize("word", ["+hydra.callbacks.x._target_=subprocess.Popen", "hydra.sweeper._target_=subprocess.Popen"])
def test_hydra_calls_nothing_but_its_own(word, refused):
    said = refused(word)
    assert unsaid(said, word.lstrip("+"), "only what comes with Hydra") == []


YAMLS = {
    "a program": (
        "# @package modules.bad\n_target_: subprocess.Popen\nargs: [touch, HERE]\n",
        "_target_=subprocess.Popen is not imported",
    ),
    "a program for Hydra": (
        "# @package _global_\nhydra:\n  callbacks:\n    x:\n      _target_: subprocess.Popen\n      args: [touch, HERE]\n",
        "hydra.callbacks.x._target_=subprocess.Popen is not called",
    ),
    "a Python object": ("window: !!python/object/apply:os.system ['touch HERE']\n", "line 1, column 9 is no yaml"),
    "broken": ("_target_: [\n a: b: c", "bad.yaml, line 2, column 6 is no yaml"),
    "a list": ("- 3\n", "it is a list"),
    "defaults of a wrong type": ("defaults: 3\n", "its `defaults` are no list"),
    "a key twice": ("a: 1\na: 2\n", "duplicate key a"),
    "no text": ("\udcff", "cannot be read"),
}


@pytest.mark.parametrize("attack", YAMLS)
def test_a_yaml_that_is_none_or_names_a_program(attack, refused, tmp_path):
    content, says = YAMLS[attack]
    folder = tmp_path / "conf" / "modules"
    folder.mkdir(parents=True)
    (folder / "bad.yaml").write_bytes(content.replace("HERE", str(tmp_path / "touched")).encode("utf-8", "surrogateescape"))
    assert says in refused("--config-dir", str(tmp_path / "conf"), "modules=[bad]")
    assert not (tmp_path / "touched").exists()


# -- texts --------------------------------------------------------------------------------------------------------------------------
LINES = {
    "a null": ('{"text": null}', 'line 1: its "text" is a json null'),
    "a number as text": ('{"text": 3}', 'line 1: its "text" is a json number'),
    "a bare number": ("3", "line 1: a json number is no object"),
    "a bare string": ('"abc"', "line 1: a json string is no object"),
    "a list": ('["abc"]', "line 1: a json array is no object"),
    "no number": ("NaN", "line 1: a json number is no object"),
    "another field": ('{"words": "abc"}', 'line 1: it has no "text"'),
    "torn": ('{"text": ', "line 1: Expecting value"),
    "very deep": ("[" * 100_000, "line 1: it is nested too deeply"),
    "a number of 5000 digits": ('{"text": ' + "9" * 5000 + "}", "line 1: Exceeds the limit"),
    "half of a pair": ('{"text": "\\ud800 abc"}', "surrogates not allowed"),
}


@door_first(LINES)
def test_a_line_that_is_no_document(attack, refused, tmp_path):
    content, says = LINES[attack]
    (tmp_path / "lines").write_text(content + "\n", encoding="utf-8")
    said = refused("dataset.reader=documents", f"dataset.files.test={tmp_path / 'lines'}")
    assert unsaid(said, says, '{"text": "…"}') == []


def test_separators_inside_a_string_are_text(world, tmp_path):
    from quicksilver.data.text import read_text

    texts = [f"{TEXT}\u2028{TEXT}\u0085{TEXT}", TEXT]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    config = compose([*world, "dataset.reader=documents", f"dataset.files.test={tmp_path / 'lines'}"])
    assert read_text(config.dataset).text == "\n\n".join(texts)


def test_thresholds_are_not_calibrated_on_what_is_scored(refused, world, tmp_path):
    scored = next(word.partition("=")[2] for word in world if word.startswith("dataset.files.test="))
    copy = Path(shutil.copy(scored, tmp_path / "copy.txt"))
    said = refused("modules=[halting]", f"dataset.files.calibration={copy}")
    assert unsaid(said, str(copy), "the text that is scored", "dataset.files.calibration") == []
    words = Path(scored).read_text().split()
    for other in ([*words, "\n", "\n"], ["Before", *words, "behind."], words[: len(words) // 2]):
        copy.write_text(" ".join(other * 3))
        said = refused("modules=[halting]", f"dataset.files.calibration={copy}")
        assert re.search(r"has (4\d|50|100)% of the scored text's runs of 13 words, and at most 20% are let through", said)


# -- models ---------------------------------------------------------------------------------------------------------------------------
def edit(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def write(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


FC = "transformer.h.3.mlp.c_fc.weight"
MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a tensor is missing": (weights(lambda t: t.pop(FC)), f"no tensor for {FC}."),
    "a tensor too many": (weights(lambda t: t.update({"transformer.h.3.lora": torch.zeros(3)})), "no place for the tensor transformer.h.3.lora"),
    "a tensor of another shape": (weights(lambda t: t.update({FC: torch.zeros(16, 63)})), f"another shape for {FC}"),
    "integers for weights": (weights(lambda t: t.update({FC: t[FC].to(torch.int8)})), f"{FC} is stored as I8"),
    "no head": (edit(n_head=0), "cannot be loaded: ZeroDivisionError"),
    "a list of families": (edit(model_type=["gpt2"]), "unhashable"),
    "a torn config": (write("config.json", "{"), "an unreadable config.json"),
    "empty weights": (write("model.safetensors", ""), "cannot be loaded: SafetensorError"),
    "the tied tensor is missing": (weights(lambda t: t.pop("transformer.wte.weight")), "no tensor for lm_head.weight and 1 more"),
    "more layers than weights": (edit(n_layer=7), "no tensor for transformer.h.6.attn.c_attn.bias and 11 more"),
    "no layer": (edit(n_layer=0), "no place for the tensor transformer.h.0"),
    "a smaller vocabulary": (edit(vocab_size=256), "another shape for transformer.wte.weight"),
    "a word for a number": (edit(n_layer="six"), "n_layer"),
    "a config that is a list": (write("config.json", "[]"), "an unreadable config.json (a json list where an object is needed)"),
    "a tokenizer that is a list": (write("tokenizer.json", "[]"), "an unreadable tokenizer.json"),
    "a tokenizer's config that is a list": (write("tokenizer_config.json", "[]"), "an unreadable tokenizer_config.json"),
    "an index that is a list": (write("model.safetensors.index.json", "[]"), "an unreadable model.safetensors.index.json"),
    "an index of a wrong type": (write("model.safetensors.index.json", '{"weight_map": []}'), "an unreadable model.safetensors.index.json"),
}  # fmt: skip


@door_first(MODELS, quick=8)
def test_a_model_that_is_not_whole(attack, refused, world, tmp_path):
    change, says = MODELS[attack]
    source = next(word.partition("=")[2] for word in world if word.startswith("model.path="))
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    change(folder)
    said = refused(f"model.path={folder}")
    assert unsaid(said, says, str(folder)) == []


# -- calibration files -----------------------------------------------------------------------------------------------------------------
GOOD: dict[str, Any] = {
    "schema": Calibration.format, "n_layers": 6, "grid": [1, 99], "percentiles": {"drift-relative": [[0.1, 0.9]] * 5 + [None]}, "provenance": {},
}  # fmt: skip
CALIBRATIONS: dict[str, Any] = {
    "a list": [],
    "another schema": GOOD | {"schema": "other"},
    "no layers": {"schema": Calibration.format},
    "a word for the layers": GOOD | {"n_layers": "six"},
    "a number for the grid": GOOD | {"grid": 3},
    "a grid from above": GOOD | {"grid": [99, 1]},
    "a number for the percentiles": GOOD | {"percentiles": 3},
    "a number for a layer": GOOD | {"percentiles": {"drift-relative": [3] * 6}},
    "words for values": GOOD | {"percentiles": {"drift-relative": [["a", "b"]] * 6}},
    "a value too few": GOOD | {"percentiles": {"drift-relative": [[0.1]] * 6}},
    "a layer too few": GOOD | {"percentiles": {"drift-relative": [[0.1, 0.9]] * 5}},
    "a value that is no number": GOOD | {"percentiles": {"drift-relative": [[0.1, float("nan")]] * 6}},
    "a list for the provenance": GOOD | {"provenance": []},
}


@door_first(CALIBRATIONS)
def test_a_calibration_file_of_wrong_types(attack, refused, tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(CALIBRATIONS[attack]))
    said = refused(*HALTING, "modules.halting.tau_drift=p25", f"modules.halting.calibration={path}")
    assert unsaid(said, str(path), "quicksilver calibrate") == []


def test_a_calibration_that_is_no_path(refused):
    for value in ("3", "[3]", "{a: 3}"):
        said = refused(*HALTING, "modules.halting.tau_drift=p25", f"modules.halting.calibration={value}")
        assert "must be a Calibration or a path or null" in said


# -- folders and caches ------------------------------------------------------------------------------------------------------------------
PLACES = {
    "file": "is no folder", "file/below": "Not a directory", "loop": "Too many levels of symbolic links", "nowhere": "is a link to",
    "loop/below": "Too many levels of symbolic links", "x" * 300: "File name too long",
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_results_folder_that_cannot_be_one(place, refused, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nowhere").symlink_to(tmp_path / "is" / "not")
    word = f"results_dir={tmp_path / place}"
    assert unsaid(refused(word), word, PLACES[place], "Give another folder") == []


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory) -> Path:
    """A results folder with a dense record."""
    results = tmp_path_factory.mktemp("finished") / "results"
    assert console.main(["run", *world, f"results_dir={results}"]) == 0
    return results


def test_a_damaged_cache_is_no_cache(finished, world):
    before, config = sorted((finished / "runs").glob("[!.]*")), compose([*world, f"results_dir={finished}"])
    stamp = json.dumps(RecordIndex(finished)._stamp)
    wrong = [f'{{"stamp": {stamp}, "answers": {answers}}}' for answers in ("3", "[]", '{"a": 3}', '{"a": {"fingerprint": 3}}')]
    for content in ("[]", "3", "null", '{"a": 3}', "\udcff\udcfe", "{", "[" * 100_000, *wrong):
        for name in ("digests.json", "answers.json"):
            (finished / "cache" / name).write_bytes(content.encode("utf-8", "surrogateescape"))
        (record,) = ensure([config])
        assert record.quality.ppl > 1
        assert sorted((finished / "runs").glob("[!.]*")) == before  # it was found, not made again
        assert RecordIndex(finished)._known == {}


def test_a_digest_in_the_cache_that_is_no_digest_is_not_believed(finished, world):
    path, config = finished / "cache" / "digests.json", compose([*world, f"results_dir={finished}"])
    for _ in range(2):
        ensure([config])
        path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), "not a digest")))
    assert len(list((finished / "runs").glob("[!.]*"))) == 1


def test_a_finished_run_in_a_folder_that_is_only_to_be_read_is_shown(finished, world, prints, monkeypatch):
    (finished / "cache" / "digests.json").unlink(missing_ok=True)
    read_only(monkeypatch, finished)
    assert "perplexity" in prints("run", *world, f"results_dir={finished}").out


def read_only(monkeypatch, folder: Path) -> None:
    """Whatever writes below `folder` fails, as on a read-only disk (permissions do not stop root)."""

    def guarded(write: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(path).startswith(str(folder)) and writes(*args, **kwargs):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return write(path, *args, **kwargs)

        return call

    monkeypatch.setattr(Path, "open", guarded(Path.open, lambda mode="r", *_, **__: bool(set(mode) & set("wax+"))))
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **more: mode != os.W_OK and may(path, mode, **more))
    for name in ("mkdir", "rename", "replace"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name), lambda *_, **__: True))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_table_on_a_full_or_read_only_disk_leaves_nothing_behind(number, tmp_path, monkeypatch):
    write_files(tmp_path, {"before.md": b"kept"})
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError(number, os.strerror(number))))
    with refused_in_a_line(os.strerror(number), "results_dir=…", kind=QuickSilverError):
        write_files(tmp_path, {"table.md": b"content"})
    assert [path.name for path in tmp_path.iterdir()] == ["before.md"]
