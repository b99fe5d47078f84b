"""Texts side by side: what differs is marked, what a model writes is text and never markup."""

from __future__ import annotations

import re

import fakes
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicksilver.measure.generation import GREEDY, TEXTS
from quicksilver.report import comparison
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.site.pages import make
from quicksilver.report.site.views import generated_texts, marked
from quicksilver.report.table import Panel, Table
from quicksilver.runtime.errors import ConfigError

WORDS = st.text("ab \n<", max_size=20)


@given(WORDS, WORDS)
def test_the_pieces_are_the_texts_and_what_is_not_marked_is_common(one, two):
    left, right = marked(one, two)
    assert "".join(text for text, _ in left) == one
    assert "".join(text for text, _ in right) == two
    assert [text for text, differs in left if not differs] == [text for text, differs in right if not differs]
    if one == two:
        assert not any(differs for _, differs in left)
    assert marked("the cat sat on", "the cat lay on")[0] == (("the cat", False), (" sat", True), (" on", False))


@pytest.fixture
def results(tmp_path):
    row: dict = {"prompt": 0, "way": GREEDY, "prompt_text": "<b>once</b> " * 99, "same_tokens": 1, "identical": False}
    row |= {"text": "a <script>alert(1)</script>", "dense_text": "a & b", "agreement": 0.5, "nats": 2.0, "dense_nats": 1.5}
    halting = {"halting": {"_target_": "quicksilver.modules.Halting"}}
    config: dict = {"seed": 0, "model": {}, "dataset": {}, "measure": {}, "modules": halting}
    dense = fakes.make(tmp_path, "dense continuation", "continuation", config=config | {"modules": {}})
    files = {TEXTS: lambda path: pd.DataFrame([row]).to_parquet(path)}
    run = fakes.make(tmp_path, "run", "continuation", per_token=0.01, files=files, config=config)
    outcomes = [Outcome(Row("p", "", "run", "run", ()), run, dense)]
    frame = comparison.frame(outcomes)
    Table("table_generation", "Texts", frame, (Panel("p", "p", comparison.columns(prompt=True), ()),)).write(tmp_path / "tables")
    return tmp_path, run, dense


def test_the_page_shows_text_as_text(results):
    folder, run, _ = results
    index, _ = make(folder)
    page = (index.parent / "texts" / f"{run.fingerprint}.html").read_text()
    assert "<mark> &lt;script&gt;alert(1)&lt;/script&gt;</mark>" in page
    assert "<mark> &amp; b</mark>" in page
    assert "<script>alert" not in page
    assert page.count("once") == 59  # and the white space after it
    assert f"texts/{run.fingerprint}.html" in (index.parent / "texts.html").read_text()
    assert re.search(r'href="\.\./texts/[0-9a-f]+\.html"', (index.parent / "runs" / f"{run.fingerprint}.html").read_text())


def test_records_without_texts_have_no_page(results):
    _, run, dense = results
    assert generated_texts(dense) == {}
    (run.path / TEXTS).write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"generation\.parquet of .* cannot be read"):
        generated_texts(run)
