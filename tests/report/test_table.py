"""A frame becomes text, Markdown, CSV, LaTeX and JSON: the same bytes for the same numbers, all of the JSON comes back, and damage is said."""

import csv
import dataclasses
import io
import json
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicksilver.report import table as tables
from quicksilver.report.table import Column, Heading, Panel, PrintedPanel, PrintedRow, Section, Table, Written, markdown, read
from quicksilver.runtime.errors import ConfigError

ONE, TWO = "0123456789abcdef0123", "fedcba98765432100000"
FRAME = pd.DataFrame(
    {
        "panel": ["a", "a", "a", "b"],
        "section": ["", "One & two", "One & two", ""],
        "name": ["dense", "50% | half_way", "*star* <x>", "{braces} ~ ^ \\ # $"],
        "value": [1.0, 1 / 3, float("nan"), 123456789.123],
        "record": [ONE, None, TWO, None],
        "ratio": [np.inf, 1.0, 1.0, 1.0],
        "count": np.array([1, 2, 3, 4], dtype=np.int64),
        "lookahead": [True, False, None, None],
    }
)
COLUMNS = (
    Column("", "name", lambda row: (row["name"],), align="left"),
    Column("a long heading over one", "v", lambda row: (f"{row['value']:.2f}", "second line"), expendable=1),
    Column("", "w", lambda row: ("x" * 30,), expendable=2),
)
PANELS = (Panel("a", "Panel a", COLUMNS, ("note: 100%",)), Panel("b", "Panel b", COLUMNS))
TABLE = Table("t", "T & more", FRAME, PANELS, ("legend",), claims=("c",))


def test_the_same_frame_gives_the_same_bytes_and_nothing_else_is_left_behind(tmp_path):
    first = {path.name: path.read_bytes() for path in TABLE.write(tmp_path)}
    again = dataclasses.replace(TABLE, frame=FRAME.copy())
    assert {path.name: path.read_bytes() for path in again.write(tmp_path)} == first
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(first) == ["t.csv", "t.json", "t.md", "t.tex"]
    assert all(b"\r" not in content and content.endswith(b"\n") for content in first.values())
    digits = [row["value"] for row in csv.DictReader(io.StringIO(TABLE.contents()["csv"]))]
    assert digits == ["1", "0.33333333", "", "1.2345679e+08"]  # those that matter, and none for what is missing


def test_markdown_rows_have_one_cell_a_column():
    text = TABLE.contents()["md"]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 * 2 + len(FRAME) + 1  # heading and rule of two panels, rows, one section
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {len(COLUMNS) + 1}
    assert "0.33<br>second line" in text
    assert "\\*star\\* &lt;x>" in text


def test_latex_escapes_and_balances():
    source = TABLE.contents()["tex"]
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


@pytest.mark.parametrize("width", [40, 60, 72, 200])
def test_a_narrow_terminal_loses_the_least_important_columns_and_says_so(width):
    text = TABLE.text(width)
    assert max(map(len, text.splitlines())) <= width
    assert ("Narrow terminal: left out" in text) == (width < 200)
    assert text.replace("\n", "").count("x" * 30) == len(FRAME) * (width == 200)
    assert ("second line" in text) == (width >= 50)


# --- what is written, as data -----------------------------------------------------------------------------------------------------
fingerprints = st.text("0123456789abcdef", min_size=20, max_size=20)
file_names = st.from_regex(r"\w[\w.+-]{0,9}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
cells = st.lists(st.lists(texts, max_size=2).map(tuple), max_size=3).map(tuple)
rows = st.builds(PrintedRow, st.integers(0, 9), cells)
sections = st.builds(Section, texts, st.lists(rows, max_size=2).map(tuple))
headings = st.builds(Heading, texts, texts, st.sampled_from(["left", "right"]))
word_lists = st.lists(texts, max_size=3).map(tuple)
drawn_panels = st.builds(
    PrintedPanel, texts, texts, st.lists(headings, max_size=2).map(tuple), st.lists(sections, max_size=2).map(tuple), word_lists
)
plain = st.one_of(st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False), texts)


@st.composite
def artefacts(draw):
    columns = draw(word_lists)
    frame = draw(st.lists(st.tuples(*[plain] * len(columns)), max_size=3).map(tuple))
    words = {name: draw(word_lists) for name in ("legend", "caption", "claims")}
    words["records"], words["pictures"] = draw(st.lists(fingerprints).map(tuple)), draw(st.lists(file_names).map(tuple))
    panels = tuple(draw(st.lists(drawn_panels, max_size=2)))
    return Written(draw(st.sampled_from(["table", "figure"])), draw(file_names), draw(texts), columns, frame, panels, **words)


@given(artefacts())
def test_everything_comes_back(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("written") / "x.json"
    path.write_bytes(written.json())
    assert read(path) == written
    assert read(path).json() == written.json()


def test_cells_stand_beside_their_values():
    written = TABLE.written()
    first, second = written.panels[0].sections
    assert (first.title, second.title) == ("", "One & two")
    assert [(row.row, row.cells[:2]) for row in second.rows] == [
        (1, (("50% | half_way",), ("0.33", "second line"))), (2, (("*star* <x>",), ("nan", "second line")))
    ]  # fmt: skip
    assert written.entries[1]["value"] == 0.33333333
    assert [type(value) for value in written.rows[1]] == [str, str, str, float, type(None), float, int, bool]
    assert (written.entries[2]["value"], written.entries[0]["ratio"]) == (None, None)  # JSON has no such numbers


def test_records_are_those_of_the_frame_and_those_it_was_built_from():
    assert TABLE.written().records == (ONE, TWO)
    more = dataclasses.replace(TABLE, records=("9" * 20, ONE))
    assert more.written().records == (ONE, "9" * 20, TWO)
    assert more.written().claims == ("c",)
    assert TABLE.written().records_of_panels() == {"a": [ONE, TWO], "b": []}
    frame = pd.DataFrame({"dense_record": [ONE], "token_digest": [TWO], "records": [f"{TWO} {TWO}"]})
    assert set(tables.named_records(frame)) == {ONE, TWO}
    assert set(tables.named_records(frame[["token_digest"]])) == set()  # a digest of a text is no record


def test_the_markdown_is_that_of_the_table_at_any_depth(tmp_path):
    TABLE.write(tmp_path)
    written = read(tmp_path / "t.json")
    assert markdown(written) == (tmp_path / "t.md").read_text(encoding="utf-8")
    deeper = markdown(written, level=4)
    assert deeper.startswith("#### T & more\n\n##### Panel a\n")
    assert deeper.replace("#### T & more", "## T & more").replace("##### ", "### ") == markdown(written)


@pytest.mark.parametrize("name", ["![x](https://example.org/x.png)", "[a](b) <img src=x>", "a\n\n# b\r\n![x](y)", "a|b *c*"])
def test_no_words_of_a_record_become_markup(name):
    table = dataclasses.replace(TABLE, title=name, legend=(name,), panels=(Panel("a", name, COLUMNS, (name,)),))
    text = markdown(table.written())
    assert "](" not in text
    assert "<img" not in text
    assert len([line for line in text.splitlines() if line.startswith("#")]) == 2


@pytest.mark.parametrize("damage", [
    {"schema_version": 2}, {"rows": [[1]]}, {"legend": "words"}, {"title": None}, {"panels": None}, {"panels": [{"key": 1}]}, [],
    {"kind": "../victims"}, {"name": "../victim"}, {"records": ["../../../victim"]}, {"records": ["0123456789ABCDEF0123"]},
    {"pictures": ["/etc/passwd"]}, {"pictures": ["../mine.png"]},
])  # fmt: skip
def test_damage_is_one_message_with_the_file(tmp_path, damage):
    path = tmp_path / "t.json"
    whole = json.loads(TABLE.written().json())
    path.write_text(json.dumps(whole | damage if damage else []))
    with pytest.raises(ConfigError, match=r"t\.json.*Make it again") as said:
        read(path)
    assert "\n" not in str(said.value)
    del whole["panels"]
    for content, why in (("{", "damaged"), (json.dumps(whole), "no panels")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=why):
            read(path)
    with pytest.raises(ConfigError, match="not there"):
        read(tmp_path / "other.json")


def test_plain_values_of_every_kind():
    whole = pd.Series([1, None], dtype="Int64")
    frame = pd.DataFrame({"a": whole, "b": [pd.NaT, np.float32(0.5)], "c": [("x",), np.bool_(True)]})
    assert tables.values(frame) == ((1, None, "('x',)"), (None, 0.5, True))


def test_a_column_that_says_nothing_in_any_row_is_not_printed():
    columns = (Column("", "name", "{key}", align="left"), Column("", "said", "{a:.1f}"), Column("", "silent", "{b:.1f}"))
    panels = (Panel("one", "One", columns), Panel("two", "Two", columns))
    rows = [("one", "x", 1.0, None), ("one", "y", None, None), ("two", "z", 1.0, 2.0)]
    table = Table("t", "T", pd.DataFrame(rows, columns=["panel", "key", "a", "b"]).assign(section=""), panels)
    printed = [[one.header for one in panel.columns] for panel in table.written().panels]
    assert printed == [["name", "said"], ["name", "said", "silent"]]
    assert "silent" not in table.text().split("Two")[0]
