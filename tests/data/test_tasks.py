"""Labelled examples: the rows of every task at hand, and one line for whatever does not fit. Metrics equal scikit-learn's, draws of a
bootstrap are scored at once; a metric of `evaluate` says what our own say, or is one clear line."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from thinning import first
from tiny import refused

from quicksilver.data import tasks
from quicksilver.data.spec import DatasetConfig, SplitConfig, TaskConfig
from quicksilver.data.tasks import f1, load_metric, read_task, scored, text_of
from quicksilver.runs.config import compose
from quicksilver.runs.run import RunContext

pytestmark = pytest.mark.filterwarnings("ignore")
LABELS = {" bad": ["0", "negative"], " good": ["1", "positive"]}
OFFICIAL = {"sst2": 872, "cola": 1043, "rte": 277, "boolq": 3270, "cb": 56, "copa": 100, "wic": 638, "wsc": 104, "multirc": 4848}
FROM_HUB = ("mnli", "mrpc", "qqp", "stsb")


def task(folder: Path, rows: list[str], **more) -> DatasetConfig:
    (folder / "rows.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n", encoding="utf-8")
    split = SplitConfig(files=["rows.tsv"])
    options = {"template": "{sentence} It was", "labels": LABELS, "train": split, "validation": split} | more
    return DatasetConfig(name="mine", reader="task", task=TaskConfig(**options))


def test_a_row_becomes_a_prompt_and_a_choice(tmp_path):
    config = task(tmp_path, ['"quoted" film \t1', "dull\tnegative"])
    first, second = read_task(config, root=tmp_path).examples
    assert (first.prompt, first.choices, first.gold, first.row) == ('"quoted" film It was', (" bad", " good"), 1, 0)
    assert (second.prompt, second.gold) == ("dull It was", 0)
    assert text_of([first, second]) == '"quoted" film It was good\n\ndull It was bad'


def test_choices_come_from_the_row_and_fields_may_be_renamed(tmp_path):
    row = {"premise": "It rained.", "question": "effect", "a": "I got wet.", "b": "I sang.", "label": 0}
    row["target"] = {"word": "rain"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = task(
        tmp_path, [], template="{word}: {premise} {question}", labels={}, choices=["a", "b"], rename={"question": {"effect": "So"}},
        validation=SplitConfig(files=["rows.jsonl"]),
    )  # fmt: skip
    (one,) = read_task(config, root=tmp_path).examples
    assert (one.prompt, one.choices, one.gold) == ("rain: It rained. So", (" I got wet.", " I sang."), 0)


def test_shots_are_balanced_and_stand_before_every_prompt(tmp_path):
    config = task(tmp_path, ["a\t1", "b\t1", "c\t0"], shots=2)
    found = read_task(config, root=tmp_path).examples
    assert [one.prompt for one in found] == [f"a It was good\n\nc It was bad\n\n{letter} It was" for letter in "abc"]
    assert len(read_task(task(tmp_path, ["a\t1"] * 10, examples=4), root=tmp_path).examples) == 4
    with refused(r"task\.shots=2: the training rows have 1 that are balanced"):
        read_task(task(tmp_path, ["a\t1", "b\t1"], shots=2), root=tmp_path)


MISTAKES = {
    "label outside": (["fine\tmaybe"], {}, r"row 0: the label 'maybe' is none of dataset\.task\.labels \(0, negative, 1, positive\)"),
    "no labels": (["fine\t-1"], {}, r"this split has no labels"),
    "no column": (["fine\t1"], {"label": "gold"}, r"row 0 has no 'gold', only label, sentence"),
    "no field": (["fine\t1"], {"template": "{text} It was"}, r"names \{text\}, and row 0 has label, sentence"),
    "empty": (["good\t1", " \t1"], {}, r"row 1 is empty"),
    "no row": (["fine\t1"], {"validation": SplitConfig(files=["rows.tsv"], first_row=5)}, r"has no row from 5 on"),
    "no template": (["fine\t1"], {"template": " "}, r"dataset\.task\.template is empty"),
    "broken template": (["fine\t1"], {"template": "{sentence"}, r"is no template"),
    "metric": (["fine\t1"], {"metrics": ["rouge"]}, r"there is no 'rouge'; there are accuracy, matthews"),
    "one label": (["fine\t1"], {"labels": {" good": ["1"]}}, r"give labels \(two or more words"),
    "no number": (["fine\tfine"], {"metrics": ["pearson_spearman"]}, r"the label 'fine' is no number"),
    "rows": (["fine\t1"], {"train": SplitConfig(first_row=3, end_row=3)}, r"rows 3 to 3 are none"),
    "broken json": ([], {"validation": SplitConfig(files=["broken.jsonl"])}, r"broken\.jsonl, line 2: a json array is no object"),
    "no file": (["fine\t1"], {"validation": SplitConfig(files=["other.tsv"])}, r"there is no file .*other\.tsv for dataset\.task\.validation"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_fit_is_said_in_one_line(tmp_path, mistake):
    rows, changes, says = MISTAKES[mistake]
    (tmp_path / "broken.jsonl").write_text('{"sentence": "a", "label": 1}\n[1]\n')
    with refused(says):
        read_task(task(tmp_path, rows, **changes), root=tmp_path)


@pytest.mark.parametrize("name", first(sorted(OFFICIAL, key=OFFICIAL.__getitem__), 3))
def test_the_official_rows_are_scored_and_never_fitted_on(name, data_root):
    config = compose([f"dataset={name}", "measure=task"]).dataset
    scored, fitted = read_task(config, root=data_root), read_task(config, "calibration", root=data_root)
    assert len(scored.examples) == OFFICIAL[name]
    assert len({one.gold for one in scored.examples}) == len(scored.task.labels or scored.task.choices)
    assert name != "sst2" or len(fitted.examples) == 67_349
    both = {(one.prompt, one.choices) for one in scored.examples} & {(one.prompt, one.choices) for one in fitted.examples}
    assert len(both) <= (18 if name == "cola" else 0)  # CoLA's own splits share textbook sentences


def test_qnli_is_divided(data_root):
    qnli = compose(["dataset=qnli", "measure=task"]).dataset
    rows = [one.row for part in ("test", "calibration") for one in read_task(qnli, part, root=data_root).examples]
    assert sorted(rows) == list(range(5463))


@pytest.mark.parametrize("name", first(FROM_HUB))
def test_what_is_not_at_hand_says_so(name, data_root, monkeypatch):
    importlib.import_module("datasets")  # it keeps what it finds at its first import
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refused(f"dataset={name}: .*unavailable offline"):
        read_task(compose([f"dataset={name}", "measure=task"]).dataset, root=data_root)
    config = compose(["dataset=sst2", "measure=task", "dataset.task.validation.files=[/not/there.tsv]"]).dataset
    with refused(r"no file /not/there\.tsv, and of the hub's nyu-mll/glue: .*give dataset\.task"):
        read_task(config)


def test_labels_are_part_of_the_identity_and_places_are_not(data_root):
    words = ["dataset=rte", "measure=task", f"data.root={data_root}"]
    place = RunContext()
    whole = place.fingerprint(compose(words))
    assert place.fingerprint(compose([*words, "dataset.task.examples=5"])) != whole
    assert place.fingerprint(compose([*words, "dataset.task.train.end_row=9"])) == whole
    assert place.fingerprint(compose([*words, "dataset.task.template='{sentence1} {sentence2}'"])) != whole
    assert "task" not in compose([]).identity()["dataset"]
    with refused(r"the reader `task` goes with dataset\.task"):
        compose(["dataset=sst2", "dataset.reader=text"])


def test_what_decides_a_score_and_is_not_in_the_text_is_part_of_the_identity(data_root, tmp_path):
    """A wrong choice, a value of a regression between two answers, who is judged together."""
    copa = {"premise": "It rained.", "question": "effect", "choice1": "I got wet.", "choice2": "I sang.", "label": 0}
    place = {"paragraph": 0, "question": 0, "answer": 0}
    multirc = {"paragraph": "It rained.", "question": "What?", "answer": "Rain.", "label": 1, "idx": place}
    for name, row, change in (
        ("copa", copa, {"choice2": "I slept."}),
        ("multirc", multirc, {"idx": place | {"question": 1}}),
        ("stsb", {"sentence1": "It rained.", "sentence2": "It poured.", "label": "3.2"}, {"label": "3.4"}),
    ):
        found = []
        for number, one in enumerate((row, row, row | change)):
            file = tmp_path / f"{name}{number}.jsonl"
            file.write_text(f"{json.dumps(one)}\n" * 40)
            config = compose(
                [f"dataset={name}", "measure=task", f"data.root={data_root}", f"dataset.task.validation.files=[{file}]"]
            )
            found.append((RunContext().text(config, "test").digest, RunContext().fingerprint(config)))
        same, again, other = found
        assert same == again
        assert (other[0], other[1] != same[1]) == (same[0], True)


# -- metrics ---------------------------------------------------------------------------------------------------------------------
def metrics() -> Any:
    return pytest.importorskip("sklearn.metrics")  # not while tests are collected


def answers(values: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    """Two arrays of one length: gold and predicted."""
    lists = st.integers(3, 40).flatmap(lambda n: st.tuples(*[st.lists(values, min_size=n, max_size=n)] * 2))
    return lists.map(lambda both: tuple(np.array(one, dtype=float) for one in both))


@given(answers(st.integers(0, 2)))
def test_scores_of_classes_are_scikit_learn_s(drawn):
    gold, predicted = drawn
    assert tasks.accuracy(gold, predicted) == pytest.approx(metrics().accuracy_score(gold, predicted))
    macro = metrics().f1_score(gold, predicted, average="macro", zero_division=0.0)
    assert tasks.f1_macro(gold, predicted) == pytest.approx(macro)
    two = gold.clip(max=1), predicted.clip(max=1)
    assert f1(*two) == pytest.approx(metrics().f1_score(*two, zero_division=0.0))
    if len({*two[0], *two[1]}) == 2:  # scikit-learn warns of a single class
        assert tasks.pearson(*two) == pytest.approx(metrics().matthews_corrcoef(*two), abs=1e-9)


@given(answers(st.integers(-9, 9)))
def test_correlations_are_scipy_s(drawn):
    x, y = drawn
    varies = x.std() != 0 and y.std() != 0
    assert tasks.pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic if varies else 0, abs=1e-9)
    assert tasks.spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic if varies else 0, abs=1e-9)


def test_many_draws_at_once_are_the_same_as_one_by_one():
    rng = np.random.default_rng(0)
    gold, predicted = (rng.integers(0, 2, (7, 30)).astype(float) for _ in range(2))
    for of in (tasks.accuracy, tasks.pearson, f1, tasks.f1_macro, tasks.spearman):
        np.testing.assert_allclose(of(gold, predicted), [of(*pair) for pair in zip(gold, predicted, strict=True)])


def test_multirc_asks_for_whole_questions():
    found = scored(["multirc", "accuracy"], [1, 0, 1, 0], [1, 0, 1, 1], ["q1", "q1", "q2", "q2"])
    assert found == {"f1a": pytest.approx(0.8), "accuracy": 0.75, "exact_match": 0.5}
    assert next(iter(scored(["matthews", "accuracy"], [0, 1], [0, 1]))) == "matthews"
    assert set(tasks.METRICS) == {"accuracy", "matthews", "f1", "f1_macro", "pearson_spearman", "multirc"}


# -- metrics of `evaluate` -------------------------------------------------------------------------------------------------------
SCRIPT = """
import datasets
import evaluate
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef


class OfTasks(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="-", citation="-", inputs_description="-", features=features)

    def _compute(self, predictions, references):
        two = references, predictions
        return {"accuracy": accuracy_score(*two), "f1": f1_score(*two), "matthews": matthews_corrcoef(*two)}
"""


@pytest.fixture
def evaluate():
    """A second to import: not while tests are collected."""
    return pytest.importorskip("evaluate", reason="evaluate is not installed: pip install 'quicksilver-lm[tasks]'")


def test_a_script_at_hand_says_what_our_own_metrics_say_and_answers_that_it_refuses_are_named(evaluate, tmp_path):
    pytest.importorskip("sklearn")
    (tmp_path / "of_tasks.py").write_text(SCRIPT)
    draw = np.random.default_rng(0)
    gold, predicted = draw.integers(0, 2, 80).astype(float), draw.integers(0, 2, 80).astype(float)
    metric = load_metric(str(tmp_path / "of_tasks.py"))
    assert metric(gold, predicted) == pytest.approx(scored(["accuracy", "f1", "matthews"], gold, predicted))
    with refused(r"of_tasks\.py refuses these answers"):
        metric([0.0, 1.0, 2.0], [2.0, 1.0, 0.0])  # F1 is of two classes


def test_a_metric_that_cannot_be_had_is_one_line_with_the_remedy(evaluate, tmp_path, monkeypatch):
    unreachable = Mock(side_effect=ConnectionError("Couldn't reach the hub\nand a long trace of requests"))
    monkeypatch.setattr(evaluate, "load", unreachable)
    with refused(r"glue/sst2 cannot be loaded \(ConnectionError: Couldn't reach the hub\)\. Without a network"):
        load_metric("glue/sst2")
    with refused("there is no such file"):
        load_metric(str(tmp_path / "none.py"))
    monkeypatch.setitem(sys.modules, "evaluate", None)
    with refused(r"pip install '.+\[tasks\]'"):
        load_metric("accuracy")
