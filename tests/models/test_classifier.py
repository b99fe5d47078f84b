"""A checkpoint for sequence classification answers a task by its own head, under modules too; a head that does not fit is refused."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch
from harness_world import make_model, make_text
from transformers import AutoTokenizer, GPT2Config, GPT2ForSequenceClassification

from quicksilver.measure.task import EXAMPLES, TaskResult
from quicksilver.runs.config import compose
from quicksilver.runs.run import ensure
from quicksilver.runtime.errors import ConfigError

ROWS = [{"text": "abc " * (2 + i % 5) + "xyz"[i % 3], "label": i % 3} for i in range(12)]
LABELS = "{x: ['yes'], y: ['1'], z: ['2']}"
YAML = """name: mine
reader: task
windows: 8
calibration_windows: 4
task:
  template: "{{text}}"
  labels: {labels}
  metrics: [accuracy]
  train: {{files: [{rows}]}}
  validation: {{files: [{rows}]}}
"""


def classifier(folder, **changes):
    """A tiny GPT-2 with a head of three labels; the first has a name, which is not the first of the task."""
    make_model(folder)  # the tokenizer
    torch.manual_seed(7)
    labels = {"id2label": {0: "2", 1: "Yes", 2: "1"}, "label2id": {"2": 0, "Yes": 1, "1": 2}}
    config = GPT2Config(
        vocab_size=257, n_embd=16, n_layer=4, n_head=2, n_positions=64, initializer_range=0.3, bos_token_id=256, eos_token_id=256,
        num_labels=3, pad_token_id=256, **labels | changes,
    )  # fmt: skip
    GPT2ForSequenceClassification(config).save_pretrained(folder)
    return folder


def words_of(tmp_path, labels=LABELS, **changes):
    folder = classifier(tmp_path / "model", **changes)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row | {"label": "yes" if not row["label"] else row["label"]}) + "\n" for row in ROWS)
    )
    group = tmp_path / "mine" / "dataset"
    group.mkdir(parents=True, exist_ok=True)
    (group / "mine.yaml").write_text(YAML.format(labels=labels, rows=tmp_path / "rows.jsonl"))
    make_text(tmp_path / "text.txt")
    return [
        *(
            "model=folder",
            "model.name=tiny",
            f"model.path={folder}",
            f"hydra.searchpath=[file://{tmp_path / 'mine'}]",
            "dataset=mine",
        ),
        *(
            "measure=task",
            "protocol=continuation",
            "protocol.window_tokens=24",
            "protocol.prompt_tokens=16",
            "protocol.batch_size=2",
        ),
        *("dataset.windows=2", f"results_dir={tmp_path / 'results'}"),
    ]


def test_its_own_head_answers(tmp_path):
    words = words_of(tmp_path)
    (record,) = ensure([compose([*words, "modules=[]"])])
    frame = pd.read_parquet(record.path / EXAMPLES)
    folder = tmp_path / "model"
    plain, tokenizer = GPT2ForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    for i in (0, 3, 11):
        with torch.no_grad():
            logits = plain(**tokenizer(ROWS[i]["text"], return_tensors="pt")).logits[0].log_softmax(-1)
        # The task's order: yes, 1, 2.
        assert frame["log_likelihoods"][i].tolist() == pytest.approx([float(logits[k]) for k in (1, 2, 0)], abs=1e-5)
    found = record.measured("task", TaskResult)
    assert (found.examples, found.metric) == (12, "accuracy")
    halted = ensure([compose([*words, "modules=[halting_attention]", "modules.halting.halted_share=0.6"])])[0]
    other = pd.read_parquet(halted.path / EXAMPLES)
    assert halted.measured("task", TaskResult).executed_flops < found.executed_flops
    assert any(a.tolist() != b.tolist() for a, b in zip(frame["log_likelihoods"], other["log_likelihoods"], strict=True))


MISTAKES = {
    "number": ("{x: ['yes'], y: ['1']}", {}, r"the model's head has 3 labels \(2, yes, 1\), and dataset\.task\.labels has 2"),
    "name": (
        "{x: ['yes'], y: ['1'], z: ['two']}",
        {},
        r"dataset\.task\.labels \(yes, 1, two\) are not the model's labels \(2, yes, 1\)",
    ),
    "untied": (LABELS, {"tie_word_embeddings": False}, "its head of words"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_head_that_does_not_fit_is_one_clear_line(tmp_path, mistake):
    labels, changes, says = MISTAKES[mistake]
    rows = [*words_of(tmp_path, labels, **changes), "modules=[]"]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": "abc", "label": label}) + "\n" for label in ("yes", "1") * 4)
    )
    with pytest.raises(ConfigError, match=says) as caught:
        ensure([compose(rows)])
    assert "\n" not in str(caught.value)
