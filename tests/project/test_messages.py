"""What a message of the package names is there: files, commands, make's targets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quicksilver.runs.choices import choices

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("quicksilver", "experiments", "scripts", "studies")
COMMAND = re.compile(r"(?:(?<=`)|^)quicksilver (?P<word>[a-z_]+)|quicksilver (?P<with_options>[a-z_]+) [a-z_]+=", re.MULTILINE)
TARGET = re.compile(r"(?:(?<=`)|(?<=\())make (?P<target>[a-z]+(?:-[a-z]+)*)|make (?P<with_options>[a-z-]+) [A-Z]+=")
PLACE = re.compile(r"(?<![\w/.{}~-])(?:conf|docs|experiments|quicksilver|scripts|studies|tests)/[\w./…*-]+[\w…*]")
MODULES = re.compile(r"modules=\[(?P<names>[\w,]+)\]")


def strings() -> Iterator[tuple[str, str]]:
    """Every string of the source with where it stands; what is filled in when it is said reads as `…`."""
    inside: set[int] = set()  # parts of a string that is told whole
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if id(node) in inside:
                continue
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield where, node.value
            elif isinstance(node, ast.JoinedStr):
                inside |= {id(part) for part in node.values}
                yield where, "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


STRINGS = list(strings())


def commands() -> set[str]:
    """The words that may follow `quicksilver`."""
    from quicksilver.cli import main as console

    return set(console.commands())


def found(pattern: re.Pattern[str], *, group: bool = False) -> Iterator[tuple[str, str]]:
    for where, text in STRINGS:
        for match in pattern.finditer(text):
            yield where, next(filter(None, match.groups()), "") if group else match.group()


def test_every_file_that_is_named_is_there() -> None:
    named = [(where, name.rstrip(".")) for where, name in found(PLACE) if name != "quicksilver/conf"]  # of an installed package
    assert len(named) > 20
    missing = [(where, name) for where, name in named if not (ROOT / name).exists() and not re.search(r"…|[A-Z]{4}|\*", name)]
    assert missing == []


def test_every_command_that_is_named_is_one() -> None:
    named = list(found(COMMAND, group=True))
    assert len(named) > 20
    words = {*commands(), "without"}  # "quicksilver without modules" is the harness
    assert [(where, name) for where, name in named if name not in words] == []


def test_every_target_of_make_that_is_named_is_one() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = list(found(TARGET, group=True))
    assert len(named) > 5
    assert [(where, name) for where, name in named if name not in targets] == []


def test_every_module_that_is_named_has_a_yaml() -> None:
    named = [
        (where, name)
        for where, names in found(MODULES, group=True)
        for name in names.split(",")
        if name not in ("NAME", "module")
    ]
    assert len(named) > 20
    assert [(where, name) for where, name in named if name not in choices("modules")] == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(PLACE, "a file of scripts/calibrate.py."), (COMMAND, "run `quicksilver calibrat`"), (TARGET, "or `make calibrat`.")],
)
def test_what_is_gone_would_be_found(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.search(text)
