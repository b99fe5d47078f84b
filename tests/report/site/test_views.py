"""What pages show of generated texts, of annotated text and of all runs; in a browser where one is at hand."""

import json
import re
from pathlib import Path

import fakes
import pandas as pd
import pytest
from browser import Page, started
from harness_world import TREEBANK_WORDS, make_treebank, make_world
from hypothesis import given
from hypothesis import strategies as st
from saying import unsaid

from quicksilver.measure.generation import GREEDY, TEXTS
from quicksilver.records.record import Record
from quicksilver.report import comparison
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.site import views
from quicksilver.report.site.collection import printed, varied
from quicksilver.report.site.pages import make
from quicksilver.report.site.views import generated_texts, marked, token_views
from quicksilver.report.table import Panel, Table
from quicksilver.runs.config import compose
from quicksilver.runs.run import ensure
from quicksilver.runtime.errors import ConfigError

# -- generated texts ---------------------------------------------------------------------------------------------------------------
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
    row: dict = dict(prompt=0, way=GREEDY, prompt_text="<b>once</b> " * 99, same_tokens=1, identical=False, agreement=0.5)
    row |= dict(text="a <script>alert(1)</script>", dense_text="a & b", nats=2.0, dense_nats=1.5)
    halting = {"halting": {"_target_": "quicksilver.modules.Halting"}}
    config: dict = dict(seed=0, model={}, dataset={}, measure={}, modules=halting)
    dense = fakes.make(tmp_path, "dense continuation", "continuation", config=config | {"modules": {}})
    files = {TEXTS: lambda path: pd.DataFrame([row]).to_parquet(path)}
    run = fakes.make(tmp_path, "run", "continuation", per_token=0.01, files=files, config=config)
    frame = comparison.frame([Outcome(Row("p", "", "run", "run", ()), run, dense)])
    Table("table_generation", "Texts", frame, (Panel("p", "p", comparison.columns(prompt=True), ()),)).write(tmp_path / "tables")
    return tmp_path, run, dense


def test_the_page_shows_text_as_text(results):
    folder, run, _ = results
    index, _ = make(folder)
    page = (index.parent / "texts" / f"{run.fingerprint}.html").read_text()
    assert unsaid(page, "<mark> &lt;script&gt;alert(1)&lt;/script&gt;</mark>", "<mark> &amp; b</mark>") == []
    assert "<script>alert" not in page
    assert page.count("once") == 59  # and the white space after it
    assert f"texts/{run.fingerprint}.html" in (index.parent / "texts.html").read_text()
    assert re.search(r'href="\.\./texts/[0-9a-f]+\.html"', (index.parent / "runs" / f"{run.fingerprint}.html").read_text())


def test_a_piece_of_a_character_is_a_dot_and_a_record_without_texts_has_none(results):
    assert views.readable(["caf", "\ufffd", "\ufffd", " é"]) == ["caf", "·", "·", " é"]
    _, run, dense = results
    row = pd.read_parquet(run.path / TEXTS).assign(text="half \ufffd", dense_text="half \ufffd")
    row.to_parquet(run.path / TEXTS)
    assert generated_texts(run)[GREEDY][0]["run"] == (("half ·", False),)
    assert generated_texts(dense) == {}
    (run.path / TEXTS).write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"generation\.parquet of .* cannot be read"):
        generated_texts(run)


# -- annotated text ----------------------------------------------------------------------------------------------------------------
FUSION = ("modules=[token_fusion]", "modules.token_fusion.rule=capacity", "modules.token_fusion.tau_fuse=null")
CLASSES = {"DT": "determiner", "IN": "preposition", "CC": "conjunction", "NN": "content", "VBD": "content"}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    folder = tmp_path_factory.mktemp("words")
    world = [word for word in make_world(folder, window=96, prompt=80) if not word.startswith(("dataset", "measure"))]
    bank = make_treebank(folder / "bank", sentences=40)
    more = ["dataset=gum", *(f"dataset.files.{part}={bank}" for part in ("test", "calibration")), "dataset.windows=6"]
    more += ["dataset.calibration_windows=2", "measure=words", "protocol=continuation", "measure.constituents.enabled=true"]
    more += [f"results_dir={folder / 'results'}"]
    (made,) = ensure([compose([*world, *more, *FUSION])])
    return made


@pytest.fixture(scope="module")
def view(record: Record) -> dict:
    return next(one for one in token_views(record) if one.get("words"))


def spelled(view: dict) -> list[str]:
    """The words of the window, by their numbers."""
    found = [""] * (max(view["words"]["word"]) + 1)
    for text, word in zip(view["texts"], view["words"]["word"], strict=False):
        if word >= 0:
            found[word] += text
    return [word.strip() for word in found]


def test_a_token_has_the_class_of_its_word(view: dict) -> None:
    classes = view["words"]["classes"]
    by_token = [classes["distinct"][place] for place in classes["places"]]
    of = {word: CLASSES[tag] for tag, words in TREEBANK_WORDS.items() for word in words}
    words, seen = spelled(view), set()
    for kind, word in zip(by_token, view["words"]["word"], strict=True):
        text = words[word] if word >= 0 else ""
        if text in of:
            assert kind == of[text]
            seen.add(kind)
    assert seen >= {"determiner", "content"}


def test_joints_are_those_of_the_tree(view: dict) -> None:
    """ "the dog saw a cat": the dog and a cat are noun phrases of two words, "saw a" meets in the verb phrase, "dog saw" in the sentence."""
    words, joined, sentence = spelled(view), view["words"]["joints"], view["words"]["sentence"]
    checked = 0
    for first in range(1, len(words)):
        whole = sentence[first - 1] != sentence[first] and words[first : first + 6][-1:] == ["."]
        if whole and sentence[first] == sentence[first + 5] and words[first] in TREEBANK_WORDS["DT"]:
            assert joined[first] == ["NP", 2]
            assert joined[first + 3] == ["NP", 2]
            assert joined[first + 1] == ["S", 6]
            assert joined[first + 2] == ["VP", 3]
            checked += 1
    assert checked


SPANS = "return [...document.querySelectorAll('#tokens span')].map((one) => [one.style.background, one.style.opacity])"


@pytest.mark.slow
def test_classes_are_shown_and_chosen_and_a_sentence_has_its_tree_and_arcs(record: Record, tmp_path: Path) -> None:
    results = record.path.parents[1]
    Table("table_words", "Words", pd.DataFrame({"record": [record.fingerprint]}), ()).write(results / "tables")
    make(results)
    with started(tmp_path) as browser:
        page = Page(browser, results / "report" / "tokens" / f"{record.fingerprint}.html")
        page.choose("#channel", "class")
        classes = page("return view.words.classes")
        shown = page(SPANS)
        assert all(bool(background) == bool(kind) for (background, _), kind in zip(shown, classes, strict=False))
        assert len({background for background, _ in shown}) >= 4
        page.choose("#class", "determiner")
        assert {kind for (_, opacity), kind in zip(page(SPANS), classes, strict=False) if not opacity} == {"determiner"}
        fused = page(
            "return view.fusions.find(([a, b]) => view.words.word[a] >= 0 && view.words.word[b] >= 0 && view.words.word[a] !== view.words.word[b])[0]"
        )
        page("show(arguments[0])", fused)
        assert page("return document.querySelectorAll('#tree .arc').length") >= 1
        labels = page("return [...document.querySelectorAll('#tree .label')].map((one) => one.textContent)")
        assert {"S", "VP", "NP"} <= set(labels)
        for width in (1400, 500):
            browser.set_window_size(width, 900)
            assert page("return document.documentElement.scrollWidth <= innerWidth")
        assert page.errors() == []


# -- the page of runs --------------------------------------------------------------------------------------------------------------
def test_only_what_differs_is_named():
    one = {"modules": {"halting": {"tau_drift": "p10", "window": [0.2, 0.8]}}, "seed": 0}
    other = {"modules": {"halting": {"tau_drift": "p40", "window": [0.2, 0.8]}}, "seed": 0}
    assert printed(one)["modules.halting.window"] == "[0.2, 0.8]"
    assert varied([printed(one), printed(other)]) == ("modules.halting.tau_drift",)
    assert varied([printed(one)]) == ()


ROWS = [("a", "model one", "3.5", 3.5, "p10"), ("b", "model two", "12.0", 12.0, "p40"), ("c", "model two", "–", "", "p25")]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A small page with the script, in a browser."""
    import quicksilver.report.site as site

    script = (Path(site.__file__).parent / "templates" / "runs.js").read_text(encoding="utf-8")
    rows = "".join(
        f'<tr data-run="{name}" data-name="{name}" data-model="{model}"><td><input type="checkbox" name="compare"></td><th>{model}</th>'
        f'<td data-value="{value}">{shown}</td></tr>'
        for name, model, shown, value, _ in ROWS
    )
    settings = json.dumps({name: {"tau_drift": tau, "seed": "0"} for name, *_, tau in ROWS})
    path = tmp_path_factory.mktemp("page") / "runs.html"
    path.write_text(
        '<!doctype html><meta charset="utf-8"><form id="runs-tools"><input id="runs-search"><select data-filter="model"><option value="">'
        '</option><option>model one</option><option>model two</option></select><span id="runs-shown"></span></form>'
        '<div id="runs-compared"></div><table id="runs"><thead><tr><th data-unsorted>compare</th><th>run</th><th>ppl</th></tr></thead><tbody>'
        f'{rows}</tbody></table><script type="application/json" id="runs-settings">{settings}</script><script>{script}</script>',
        encoding="utf-8",
    )
    with started(tmp_path_factory.mktemp("chromium")) as browser:
        yield Page(browser, path)


SHOWN = "return [...document.querySelectorAll('#runs tbody tr:not([hidden])')].map((row) => row.dataset.run).join('')"


@pytest.mark.slow
def test_search_filter_sort_and_compare(page):
    assert page(SHOWN) == "abc"
    page.choose("#runs-search", "TWO")
    assert page(SHOWN) == "bc"
    assert page("return document.getElementById('runs-shown').textContent") == "2 of 3 shown"
    page.choose("#runs-search", "")
    page.choose("select", "model one")
    assert page(SHOWN) == "a"
    page.choose("select", "")
    page("document.querySelectorAll('button.sort')[1].click()")
    assert page(SHOWN) == "abc"
    page("document.querySelectorAll('button.sort')[1].click()")
    assert page(SHOWN) == "bac"  # 12 before 3.5, which text would sort the other way; what has no number stays last
    page("document.querySelector('tr[data-run=a]').click(); document.querySelector('tr[data-run=b]').click()")
    compared = page("return document.getElementById('comparison').innerText")
    lines = [re.split(r"\t", line) for line in compared.splitlines()]
    assert lines[0][1:3] == ["a", "b"]
    assert unsaid(lines, ["tau_drift", "p10", "p40", ""], ["ppl", "3.5", "12.0", "8.5"]) == []
    assert not any(line[0] == "seed" for line in lines)  # the same in both
