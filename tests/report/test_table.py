"""A frame becomes text, Markdown, CSV and LaTeX: the same bytes for the same numbers, and nothing that breaks in the format."""

from __future__ import annotations

import csv
import io
import re

import pandas as pd
import pytest

from quicksilver.report.table import Column, Panel, Table

FRAME = pd.DataFrame(
    {
        "panel": ["a", "a", "a", "b"],
        "section": ["", "One & two", "One & two", ""],
        "name": ["dense", "50% | half_way", "*star* <x>", "{braces} ~ ^ \\ # $"],
        "value": [1.0, 1 / 3, float("nan"), 123456789.123],
    }
)
COLUMNS = (
    Column("", "name", lambda row: (row["name"],), align="left"),
    Column("a long heading over one", "v", lambda row: (f"{row['value']:.2f}", "second line"), expendable=1),
    Column("", "w", lambda row: ("x" * 30,), expendable=2),
)
TABLE = Table(
    "t", "Title & more", FRAME, (Panel("a", "Panel a", COLUMNS, ("note: 100%",)), Panel("b", "Panel b", COLUMNS)), ("legend",)
)


def copy() -> Table:
    return Table("t", "Title & more", FRAME.copy(), TABLE.panels, TABLE.legend)


def test_the_same_frame_gives_the_same_bytes(tmp_path):
    first = {path.name: path.read_bytes() for path in TABLE.write(tmp_path / "1")}
    second = {path.name: path.read_bytes() for path in copy().write(tmp_path / "2")}
    assert first == second
    assert sorted(first) == ["t.csv", "t.json", "t.md", "t.tex"]
    assert all(b"\r" not in content and content.endswith(b"\n") for content in first.values())


def test_writing_leaves_nothing_else_behind(tmp_path):
    TABLE.write(tmp_path)
    TABLE.write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv", "t.json", "t.md", "t.tex"]


def test_csv_keeps_the_digits_and_empties_what_is_missing():
    rows = list(csv.DictReader(io.StringIO(TABLE.csv())))
    assert [row["value"] for row in rows] == ["1", "0.33333333", "", "1.2345679e+08"]


def test_markdown_rows_have_one_cell_a_column():
    rows = [line for line in TABLE.markdown().splitlines() if line.startswith("|")]
    assert len(rows) == 2 * 2 + len(FRAME) + 1  # heading and rule of two panels, rows, one section
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {len(COLUMNS) + 1}
    assert "0.33<br>second line" in TABLE.markdown()
    assert "\\*star\\* &lt;x>" in TABLE.markdown()


def test_latex_escapes_and_balances():
    source = TABLE.latex()
    assert r"50\% \textbar{} half\_way" in source
    assert r"\{braces\} \textasciitilde{} \textasciicircum{} \textbackslash{} \# \$" in source
    bare = re.sub(r"\\.", "", source)  # without commands and escapes
    assert bare.count("{") == bare.count("}")
    assert source.count(r"\begin{table*}") == source.count(r"\end{table*}") == 2
    rows = [line for line in source.splitlines() if line.endswith((r"\\", r"\\[2pt]")) and "multicolumn" not in line]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(COLUMNS) - 1}


def test_text_lines_up():
    lines = TABLE.text().splitlines()
    rule = next(line for line in lines if set(line) == {"-"} and len(line) > len("Panel a"))
    heading = lines[lines.index(rule) - 1]
    row = next(line for line in lines if line.startswith("dense"))
    assert len(heading) == len(row) == len(rule)
    assert row.index("1.00") + len("1.00") == heading.index(" v ") + 2
    assert "  50% | half_way" in TABLE.text()  # set in under its section
    assert all(len(line) <= 150 for line in lines)


@pytest.mark.parametrize("width", [40, 60, 72])
def test_a_narrow_terminal_loses_the_least_important_columns_and_says_so(width):
    text = TABLE.text(width)
    assert max(map(len, text.splitlines())) <= width
    assert "Narrow terminal: left out" in text
    assert "x" * 30 not in text
    assert ("second line" in text) == (width >= 50)


def test_a_wide_terminal_loses_nothing():
    assert TABLE.text(200).replace("\n", "").count("x" * 30) == len(FRAME)
    assert "left out" not in TABLE.text(200)
