"""Words in the token viewer: classes by token, and the constituents that the page finds again from what joins neighbours."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files
from types import SimpleNamespace

import pandas as pd
import pytest

from quicksilver.data.annotation.trees import joints
from quicksilver.measure.word_classes import WORDS
from quicksilver.report.site import views

TREE = "(ROOT (S (NP (DT the) (NN dog)) (VP (VBD saw) (NP (DT a) (NN cat)) (PP (IN in) (NP (DT the) (NN house)))) (. .)))"
FORMS = ["the", "dog", "saw", "a", "cat", "in", "the", "house", "."]
CONSTITUENTS = {(0, 1, "NP"), (3, 4, "NP"), (6, 7, "NP"), (5, 7, "PP"), (2, 7, "VP"), (0, 8, "S")}


def test_a_window_has_classes_by_token_and_joints_by_word(tmp_path):
    rows = [  # slot, word, class; slot 2 is of no word, the third word is two tokens
        (0, 40, "determiner"), (1, 41, "content"), (3, 42, "content"), (4, 42, "content"),
    ]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["slot", "word", "class"]).assign(window=3, sentence=7, joint_label="NP", joint_words=2)
    pd.concat([frame.assign(window=1), frame]).to_parquet(tmp_path / WORDS)
    record = SimpleNamespace(path=tmp_path)
    found = views._words(record, 3)
    assert found is not None
    classes = [found["classes"]["distinct"][place] for place in found["classes"]["places"]]
    assert classes == ["determiner", "content", "", "content", "content"]
    assert found["word"] == [0, 1, -1, 2, 2]
    assert found["sentence"] == [7, 7, 7]
    assert found["joints"] == [["NP", 2]] * 3
    assert views._words(record, 5) is None
    assert views._words(SimpleNamespace(path=tmp_path / "no words"), 3) is None


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which runs the page's script")
def test_the_page_finds_the_tree_again():
    script = files("quicksilver.report.site").joinpath("templates/tokens.js").read_text(encoding="utf-8")
    found = re.search(r"function constituents.*?\n}\n", script, re.DOTALL)
    assert found is not None
    view = json.dumps({"words": {"joints": joints(TREE, FORMS, "here")}})
    program = f"const view = {view};\n{found[0]}\nconsole.log(JSON.stringify(constituents(0, {len(FORMS) - 1})));"
    said = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True, timeout=60)
    assert {tuple(one) for one in json.loads(said.stdout)} == CONSTITUENTS
