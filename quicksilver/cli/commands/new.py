"""Files to begin with, for what somebody adds: templates, and the command that fills them in."""

from __future__ import annotations

import keyword
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import ClassVar

from quicksilver.cli.arguments import Command, key
from quicksilver.report.artefacts import experiments_folder
from quicksilver.runs.choices import choices
from quicksilver.runtime.errors import ConfigError

MODULE = '''"""What $name decides, in one sentence."""

from dataclasses import dataclass

from quicksilver.runtime import Architecture, LayerView, TokenPolicy, TokenState


@dataclass
class $Class(TokenPolicy):
    """Halt tokens whose last update was small beside their state.

    Args:
        share: halt where the norm of the update is below this share of the state's norm.
        causal: False: act in the prompt only. True: on scored and generated tokens too, for a rule that never looks ahead.
    """

    share: float = 0.16
    causal: bool = False

    def bind(self, architecture: Architecture) -> None:
        self.first_layer = architecture.n_layers // 2  # layers count from 0: half of them go before

    def acts_at(self, layer: int) -> bool:
        return layer >= self.first_layer

    def decide(self, view: LayerView, tokens: TokenState) -> None:
        # M falls as tokens halt. To compare with the layer before, keep numbers by view.index (docs/adding-a-module.md).
        update = (view.after - view.before).norm(dim=-1)  # (B, M)
        tokens.halt(tokens.active & (update < self.share * view.after.norm(dim=-1)), missing_kv="drop")
'''
MODULE_YAML = """# @package modules.$name
# Halt tokens whose last update was small beside their state.
# Options have the defaults of the class. A setting of its own is a copy of this file with another name, and its options below: share: 0.14
_target_: $name.$Class
"""
MODULE_TEST = '''"""$Class halts some tokens, and both executions give the same logits."""

from pathlib import Path

import torch
from $name import $Class
from transformers import AutoModelForCausalLM

import quicksilver
from quicksilver.models.loading import EMBEDDED
from quicksilver.runs import compose


def test_it_halts_some_tokens_and_compact_equals_masked():
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED / "reference-gpt2", dtype=torch.float32).eval()
    ids = torch.randint(0, model.config.vocab_size, (2, 256), generator=torch.Generator().manual_seed(0))
    logits = {}
    for execution in ("compact", "masked"):
        with torch.no_grad(), quicksilver.apply(model, [$Class()], execution=execution) as run:
            logits[execution] = model(ids).logits
    assert 0 < run.flops.nominal < run.flops.dense_nominal, "the method saves no operation"
    torch.testing.assert_close(logits["compact"], logits["masked"], atol=1e-4, rtol=1e-4)


def test_its_yaml_names_it():
    assert compose(["modules=[$name]"], [Path(__file__).parent]).modules["$name"]["_target_"] == "$name.$Class"
'''
DATASET_YAML = """# What $name is, and where it comes from.
name: $name
reader: text
form: raw
files:
  test: $folder/$name.txt
  calibration: $folder/${name}_calibration.txt
windows: 8
calibration_windows: 4
"""
DATASET_TEST = '''"""$name is read, and its two parts differ."""

from pathlib import Path

from quicksilver.data.text import read_text
from quicksilver.runs import compose


def test_both_parts_are_read_and_differ():
    config = compose(["dataset=$name"], [Path(__file__).parent]).dataset
    test, calibration = (read_text(config, part).text for part in ("test", "calibration"))
    assert len(test) > 1000 < len(calibration)
    assert test != calibration
'''
FAMILY = '''"""The adapter of $name models: derive from the nearest family, and override what differs (docs/adding-a-family.md)."""

from quicksilver.runtime.architecture import LlamaArchitecture


class ${Class}Architecture(LlamaArchitecture):
    """Where the parts of a $name model are, and how it projects K and V."""

    family = "$name"
    model_types = ("$name",)  # config.model_type of the models
'''
FAMILY_YAML = """# A $name model: model=$name model.path=/folder
name: $name
path: ???
adapter: $name.${Class}Architecture
"""
FAMILY_TEST = '''"""A random $name model gives the plain model's logits without modules, and those of masked execution with one."""

from pathlib import Path

import torch
from $name import ${Class}Architecture
from transformers import LlamaConfig, LlamaForCausalLM

import quicksilver
from quicksilver.modules import RandomHalting
from quicksilver.runs import compose
from quicksilver.runtime.architecture import architecture_of

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}


def test_no_module_changes_nothing_and_compact_equals_masked():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES)).eval()  # your family's model class and config
    model.config.model_type = "$name"
    assert type(architecture_of(model)) is ${Class}Architecture
    ids, halting = torch.randint(0, 64, (2, 24)), RandomHalting(rate=0.3, resume_layers=0)

    def logits(modules, execution="compact"):
        with torch.no_grad(), quicksilver.apply(model, modules, execution=execution):
            return model(ids).logits

    assert torch.equal(logits([]), model(ids).logits)
    assert not torch.equal(logits([halting]), logits([]))
    torch.testing.assert_close(logits([halting]), logits([halting], "masked"), atol=1e-5, rtol=1e-5)


def test_its_yaml_names_it():
    config = compose(["model=$name", "model.path=/folder"], [Path(__file__).parent])
    assert config.model.adapter == "$name.${Class}Architecture"
'''
TABLE = '''"""Table $name: what it compares, in one line."""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import Panel, Table

ALWAYS = ("protocol=continuation", "measure=quick")  # of every run
# Two runs as an example: key, what is printed, module. Put yours here.
RUNS = {"dense": ("Dense", "modules=[]"), "attention": ("Least attended halt", "modules=[halting_attention]")}


def rows() -> list[Row]:
    """A run for each printed row: panel, section, key, what is printed, overrides of `quicksilver run`."""
    return [Row("all", "", key, title, (*ALWAYS, modules)) for key, (title, modules) in RUNS.items()]


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """One panel with the usual columns; `comparison.columns` says which there are."""
    frame = comparison.frame(outcomes)
    panel = Panel("all", "Protocol continuation", comparison.columns(prompt=True), provenance.notes(outcomes))
    return Table(name, "What it compares", frame, (panel,), comparison.legend(frame))
'''
TABLE_TEST = '''"""The rows of table $name can be composed, and the table is printed where nothing was run."""

from pathlib import Path

from quicksilver.report.artefacts import Outcome, artefacts
from quicksilver.runs import compose


def test_its_rows_compose_and_the_table_is_printed_without_records():
    (made,) = (one for one in artefacts(Path(__file__).parent) if one.name == "table_$name")
    rows = made.experiment.rows()
    assert [compose(row.words([])).protocol.name for row in rows] == ["continuation"] * len(rows)
    text = made.build([Outcome(row, reason="not run") for row in rows], made.name).text()
    assert all(row.technique in text for row in rows)
'''
FILES = {
    "module": {"$name.py": MODULE, "modules/$name.yaml": MODULE_YAML, "test_$name.py": MODULE_TEST},
    "dataset": {"dataset/$name.yaml": DATASET_YAML, "test_$name.py": DATASET_TEST},
    "family": {"$name.py": FAMILY, "model/$name.yaml": FAMILY_YAML, "test_$name.py": FAMILY_TEST},
    "table": {"table_$name.py": TABLE, "test_table_$name.py": TABLE_TEST},
}
NEXT = {
    "module": "quicksilver run --config-dir . modules=[$name] protocol=continuation measure=quick dataset.windows=8",
    "dataset": "quicksilver run --config-dir . dataset=$name modules=[halting_attention] protocol=continuation measure=quick",
    "family": "quicksilver run --config-dir . model=$name model.path=/your/model modules=[halting_attention] protocol=continuation measure=quick",
    "table": "quicksilver reproduce table $name",
}


@dataclass
class New(Command):
    """
    quicksilver new module quiet        quiet.py, modules/quiet.yaml, test_quiet.py
    quicksilver new dataset letters     letters.txt, letters_calibration.txt, dataset/letters.yaml, test_letters.py
    quicksilver new family mine         mine.py, model/mine.yaml, test_mine.py
    quicksilver new table mine          table_mine.py, test_table_mine.py

    Existing files are never changed. Runs read the yaml with `--config-dir FOLDER`, and the file when they start in FOLDER.
    """

    most_names: ClassVar[int] = 2
    folder: str | None = key(".", "where the files go; a table goes into experiments/, where `quicksilver reproduce` finds it")

    @classmethod
    def next_names(cls, given: Sequence[str]) -> list[str]:
        return [] if given else [*FILES]

    def main(self) -> int:
        kind, name = (*self.names, "", "")[:2]
        if kind not in FILES:
            raise ConfigError(f"{kind or 'nothing'}: say what to write: quicksilver new {'|'.join(FILES)} NAME.")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
            wanted = f"a name begins with a-z and has only a-z, 0-9 and _, and is no word of Python, such as my_{kind}"
            raise ConfigError(f"{name or 'no name'}: {wanted}.")
        clone = experiments_folder().resolve().parent
        if kind == "table" and clone == Path(__file__).resolve().parents[2]:  # the installed package
            where = "a clone of the repository, where `quicksilver reproduce` finds it"
            raise ConfigError(f"A table needs {where}: git clone, then make environment.")
        if kind == "table" and self.folder is None and not Path.cwd().is_relative_to(clone):
            raise ConfigError(f"A table goes into {clone / 'experiments'}: type this in {clone}, or give folder=.")
        group = {"module": "modules", "family": "model"}.get(kind, kind)
        if name in choices(group) or (kind in ("module", "family") and find_spec(name)):
            there = f"there is a {kind} or a Python module of this name already"
            raise ConfigError(f"{name}: {there}. Take another, such as my_{name}.")
        folder = Path(self.folder or (experiments_folder() if kind == "table" else ".")).resolve()
        said = {"name": name, "Class": "".join(part.capitalize() for part in name.split("_")), "folder": str(folder)}
        files = {folder / Template(path).substitute(said): Template(text).substitute(said) for path, text in FILES[kind].items()}
        if kind == "dataset":  # pages of the Python reference, to be replaced by a text of one's own
            from pydoc_data.topics import topics

            files |= {folder / f"{name}.txt": topics["specialnames"], folder / f"{name}_calibration.txt": topics["compound"]}
        if found := [path for path in files if path.exists()]:
            raise ConfigError(f"{found[0]} is there already: take another name, or folder=.")
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(path)
        test = next(path for path in files if path.name.startswith("test_"))
        # A table's results belong below the present folder.
        steps = [] if kind == "table" or folder == Path.cwd() else [f"cd {shlex.quote(str(folder))}"]
        steps += [] if find_spec("pytest") else ["pip install pytest"]
        steps += [f"python -m pytest {shlex.quote(str(test)) if kind == 'table' else test.name}"]
        if kind == "table" and folder != experiments_folder().resolve():
            steps += [shlex.join(["mv", str(next(iter(files))), str(experiments_folder())])]  # where `reproduce` looks
        steps += [Template(NEXT[kind]).substitute(said)]
        print("\n  ".join(["\nChange them, and type", *steps]))
        return 0
