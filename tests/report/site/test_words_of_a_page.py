"""The viewer of a run on gold annotation: words with their classes, the tree of a sentence, and its fused pairs as arcs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from browser import Page, started
from harness_world import TREEBANK_WORDS, make_treebank, make_world

from quicksilver.records.record import Record
from quicksilver.report.site.pages import make
from quicksilver.report.site.views import token_views
from quicksilver.report.table import Table
from quicksilver.runs.config import compose
from quicksilver.runs.run import ensure

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
