"""A task under modules: choices by log-likelihood, equal to the plain model's; what each cost, and how deep its last token went.
A checkpoint for sequence classification answers by its own head, and one that does not fit is refused."""

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from harness_world import make_model, make_world
from tiny import refused
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2ForSequenceClassification, PreTrainedTokenizerFast

from quicksilver.data.tasks import Example
from quicksilver.measure.task import EXAMPLES, TaskResult, batches, encode
from quicksilver.runs.config import compose
from quicksilver.runs.run import ensure

ROWS = [{"text": "abc " * (2 + i % 5), "label": i % 2, "a": " left", "b": "rig"} for i in range(24)]


YAML = """name: mine
reader: task
windows: 8
calibration_windows: 4
task:
  template: "{{text}}"
  {choices}
  train: {{files: [{rows}]}}
  validation: {{files: [{rows}]}}
"""
WORDS, FIELDS = "labels: {x: ['0'], y: ['1']}", "choices: [a, b]"


def words_of(folder: Path, choices: str, rows: list[dict] = ROWS) -> list[str]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    group = folder / "mine" / "dataset"
    group.mkdir(parents=True)
    (group / "mine.yaml").write_text(YAML.format(choices=choices, rows=folder / "rows.jsonl"))
    words = [word for word in make_world(folder / "world", window=64, prompt=24) if not word.startswith(("dataset", "measure"))]
    return [
        *words, f"hydra.searchpath=[file://{folder / 'mine'}]", "dataset=mine", "measure=task", "protocol=continuation",
        "protocol.window_tokens=32", "protocol.prompt_tokens=24", "measure.task.batch_size=3", f"results_dir={folder / 'results'}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> list[str]:
    return words_of(tmp_path_factory.mktemp("task"), WORDS)


def examples(record) -> pd.DataFrame:
    return pd.read_parquet(record.path / EXAMPLES)


def plain_likelihoods(record, prompt: str, choice: str) -> float:
    """Of the plain model, prompt and choice in one pass."""
    folder = record.model.source.removeprefix("folder:")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, choice))
    ids = torch.tensor([before + after])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].log_softmax(-1)
    return float(logits.gather(1, ids[0, 1:, None])[len(before) - 1 :].sum())


def test_dense_choices_are_the_plain_model_s(tasks):
    (record,) = ensure([compose([*tasks, "modules=[]"])])
    found, frame = record.measured("task", TaskResult), examples(record)
    assert list(frame["gold"]) == [row["label"] for row in ROWS]
    for i in (0, 3, 17):
        expected = [plain_likelihoods(record, ROWS[i]["text"].strip(), word) for word in "xy"]
        assert frame["log_likelihoods"][i].tolist() == pytest.approx(expected, abs=1e-4)
        assert frame["prediction"][i] == expected.index(max(expected))
    assert found.score == pytest.approx((frame["prediction"] == frame["gold"]).mean())
    assert (found.examples, found.majority, found.metric, found.truncated) == (24, 0.5, "accuracy", 0)
    assert set(frame["deciding_depth"]) == {record.model.layers}
    assert found.executed_flops == pytest.approx(frame["executed_flops"].sum())
    assert found.signal_flops == 0
    line = dataclasses.replace(found, evaluated={"accuracy": 0.4375, "f1": 0.5}).line()
    assert line == f"{found.line()}; evaluate: accuracy 0.4375, f1 0.5"


def test_choices_of_several_tokens_follow_from_the_prompt_s_cache(tmp_path):
    (record,) = ensure([compose([*words_of(tmp_path, FIELDS), "modules=[]"])])
    frame = examples(record)
    for i in (1, 8):
        expected = [plain_likelihoods(record, ROWS[i]["text"].strip(), f" {ROWS[i][name].strip()}") for name in "ab"]
        assert frame["log_likelihoods"][i].tolist() == pytest.approx(expected, abs=1e-4)


def test_modules_save_work_the_last_token_s_depth_is_told_and_the_execution_does_not_matter(tasks):
    words = [*tasks, "modules=[static_depth]", "modules.static_depth.depth=0.5"]
    compact, masked, dense = ensure([compose(words), compose([*words, "execution=masked"]), compose([*tasks, "modules=[]"])])
    found = compact.measured("task", TaskResult)
    assert found.executed_flops < 0.9 * dense.measured("task", TaskResult).executed_flops
    ours, theirs, plain = (examples(record)["log_likelihoods"] for record in (compact, masked, dense))
    assert all(a == pytest.approx(b, abs=1e-4) for a, b in zip(ours, theirs, strict=True))
    assert any(a.tolist() != b.tolist() for a, b in zip(ours, plain, strict=True))  # halting is felt
    depths = examples(compact)["deciding_depth"]
    assert depths.max() < compact.model.layers
    assert found.deciding_depth == pytest.approx(depths.mean())


def test_batches_are_equally_long_and_hold_every_example_once(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path))
    given = [Example("a" * (1 + i % 4), ("x", "y" if i % 3 else "yy"), 0, i) for i in range(20)]
    made = list(batches(encode(given, tokenizer, 32), 3))
    assert sorted(one.number for batch in made for one in batch) == list(range(20))
    assert all(len({len(one.prompt) for one in batch}) == 1 and len(batch) <= 3 for batch in made)
    assert all(len(batch) == 1 for batch in made if not all(one.is_one_word for one in batch))
    cut = encode([Example("a" * 40 + "b", ("x", "yy"), 0, 0)], tokenizer, 16)[0]
    assert (cut.truncated, len(cut.prompt)) == (True, 15)
    assert tokenizer.decode(list(cut.prompt)).endswith("ab")
    for choices, says in ((("x", "x"), "do not differ"), (("x" * 20, "y"), "its choices have 20 tokens and the context 16")):
        with refused(f"row 0: .*{says}"):
            encode([Example("a", choices, 0, 0)], tokenizer, 16)


def test_a_choice_has_the_tokens_it_has_behind_its_prompt() -> None:
    """A tokenizer as Llama 2's, which begins every text with a space: a choice alone would have two."""
    made = Tokenizer(models.BPE(vocab={one: n for n, one in enumerate("▁abyesno")}, merges=[]))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    one = encode([Example("ab a", (" yes", " no"), 0, 0)], tokenizer, 32)[0]
    assert [tokenizer.convert_ids_to_tokens(list(choice)) for choice in one.choices] == [["▁", *"yes"], ["▁", *"no"]]
    # A token that crosses the border is none of the choice: here it has those that it has alone.
    made = Tokenizer(models.BPE(vocab={one: n for n, one in enumerate(("a", "b", "ab"))}, merges=[("a", "b")]))
    one = encode([Example("ba", ("b", "a"), 0, 0)], PreTrainedTokenizerFast(tokenizer_object=made), 32)[0]
    assert one.choices == ((1,), (0,))


def test_a_text_without_labels_is_refused(words):
    with refused("measure=task needs labelled examples"):
        ensure([compose([*words, "measure=task"])])


OF_THREE = [{"text": "abc " * (2 + i % 5) + "xyz"[i % 3], "label": i % 3 or "yes"} for i in range(12)]
LABELS = "labels: {x: ['yes'], y: ['1'], z: ['2']}"


def with_a_head(folder: Path, choices: str = LABELS, rows: list[dict] = OF_THREE, **changes) -> list[str]:
    """A tiny GPT-2 with a head of three labels; the first has a name, which is not the first of the task."""
    make_model(folder / "model")  # the tokenizer
    torch.manual_seed(7)
    labels = {"id2label": {0: "2", 1: "Yes", 2: "1"}, "label2id": {"2": 0, "Yes": 1, "1": 2}}
    config = GPT2Config(
        vocab_size=257, n_embd=16, n_layer=4, n_head=2, n_positions=64, initializer_range=0.3, bos_token_id=256, eos_token_id=256,
        num_labels=3, pad_token_id=256, **labels | changes,
    )  # fmt: skip
    GPT2ForSequenceClassification(config).save_pretrained(folder / "model")
    return [*words_of(folder, choices, rows), f"model.path={folder / 'model'}"]


def test_its_own_head_answers(tmp_path):
    words = with_a_head(tmp_path)
    dense, halted = ensure([compose([*words, "modules=[]"]), compose([*words, "modules=[halting_attention]"])])
    ours, theirs = (examples(record)["log_likelihoods"] for record in (dense, halted))
    plain = GPT2ForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for i in (0, 3, 11):
        with torch.no_grad():
            logits = plain(**tokenizer(OF_THREE[i]["text"], return_tensors="pt")).logits[0].log_softmax(-1)
        assert ours[i].tolist() == pytest.approx([float(logits[k]) for k in (1, 2, 0)], abs=1e-5)  # the task's order: yes, 1, 2
    found = dense.measured("task", TaskResult)
    assert (found.examples, found.metric) == (12, "accuracy")
    assert halted.measured("task", TaskResult).executed_flops < found.executed_flops
    assert any(a.tolist() != b.tolist() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("labels", "changes", "says"), [
    ("labels: {x: ['yes'], y: ['1']}", {}, r"the model's head has 3 labels \(2, yes, 1\), and dataset\.task\.labels has 2"),
    (LABELS.replace("'2'", "two"), {}, r"dataset\.task\.labels \(yes, 1, two\) are not the model's labels \(2, yes, 1\)"),
    (LABELS, {"tie_word_embeddings": False}, "its head of words"),
])  # fmt: skip
def test_a_head_that_does_not_fit_is_one_clear_line(tmp_path, labels, changes, says):
    rows = [{"text": "abc", "label": label} for label in ("yes", "1") * 4]
    with refused(says):
        ensure([compose([*with_a_head(tmp_path, labels, rows, **changes), "modules=[]"])])
