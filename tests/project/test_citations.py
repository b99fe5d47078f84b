"""What comments, captions and messages cite is there: entries of docs/conflicts.md by number, sections of docs/design.md."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CITING = ("README.md", "conf", "docs", "experiments", "quicksilver", "scripts", "studies", "tests")
_NUMBERED = re.compile(r"^## (\d+)\. ", re.MULTILINE)

_SELF = "tests/project/test_citations.py"


def texts() -> dict[str, str]:
    """Path of every written file -> its text."""
    roots = [ROOT / name for name in CITING]
    files = [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*")))]
    written = [path for path in files if path.suffix in (".py", ".yaml", ".md", ".html", ".css", ".js")]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in written}


def numbered(page: str) -> list[int]:
    return [int(number) for number in _NUMBERED.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))]


def test_entries_and_sections_are_numbered_without_a_gap():
    assert numbered("conflicts.md") == list(range(1, 28))
    assert numbered("design.md") == list(range(1, 10))


def test_everything_cited_is_there():
    entries, sections = numbered("conflicts.md"), numbered("design.md")
    missing, cited = [], 0
    for name, text in texts().items():
        for found in re.finditer(r"conflicts\.md\s+(#\d+(?:,\s*#\d+)*)", text):
            numbers = [int(number) for number in re.findall(r"\d+", found[1])]
            cited += len(numbers)
            missing += [f"{name}: docs/conflicts.md #{number}" for number in numbers if number not in entries]
        for found in re.finditer(r"design\.md §(\d+)", text):
            cited += 1
            missing += [f"{name}: docs/design.md §{found[1]}"] if int(found[1]) not in sections else []
    assert missing == []
    assert cited > 40


def test_only_what_is_in_the_repository_is_cited():
    vague = re.compile(r"\bDESIGN\b(?!\.md)|(?<!docs/)\bconflicts\.md\s+#|\bconflicts #\d")
    found = {name: vague.findall(text) for name, text in texts().items() if name != _SELF}
    assert {name: words for name, words in found.items() if words} == {}


def test_contradictions_in_the_ledger_name_an_entry():
    listed = yaml.safe_load((ROOT / "quicksilver" / "report" / "claims" / "contradictions.yaml").read_text(encoding="utf-8"))
    numbers = {row["conflict"] for row in listed["contradictions"] if "conflict" in row}
    assert numbers <= set(numbered("conflicts.md"))
    assert len(numbers) > 20
