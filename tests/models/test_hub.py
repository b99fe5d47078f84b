"""The hub, by its real clients: what is fetched and kept, and one line with the remedy for whatever goes wrong there."""

import gzip
import io
import json
import shutil
import time
from functools import partial

import pandas as pd
import pytest
from harness_world import make_model
from imitation_hub import GATED
from tiny import refused

from quicksilver.cli import main as console
from quicksilver.data.tasks import read_task
from quicksilver.data.text import read_text
from quicksilver.models import hub as hub_module
from quicksilver.models.loading import locate, weights_digest
from quicksilver.runs.config import compose

MODEL = ["model=gpt2-large"]
WIKITEXT = ["dataset=wikitext103"]
C4 = ["dataset=c4", "dataset.documents=3", "dataset.calibration_documents=2"]
QQP = ["dataset=qqp", "measure=task"]
LINES = ["", " = Title = \n", "", *[f" a line of words number {number} . \n" for number in range(60)]]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("gpt2-large"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def filled(hub, weights):
    """With a model under gpt2-large's name, WikiText-103, the beginning of C4 and a task."""

    def card(name: str, **paths: str) -> bytes:
        files = "".join(f"  - split: {split}\n    path: {path}\n" for split, path in paths.items())
        return f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n".encode()

    def parquet(**columns) -> bytes:
        pd.DataFrame(columns).to_parquet(content := io.BytesIO())
        return content.getvalue()

    def documents(word: str) -> bytes:
        return gzip.compress("".join(json.dumps({"text": f"{word} {i}"}) + "\n" for i in range(9)).encode())

    name = "wikitext-103-v1"
    hub.repositories |= {
        "model:gpt2-large": dict(weights),
        "dataset:Salesforce/wikitext": {
            "README.md": card(name, test=f"{name}/test-*", validation=f"{name}/validation-*"),
            f"{name}/test-00000-of-00001.parquet": parquet(text=LINES),
            f"{name}/validation-00000-of-00001.parquet": parquet(text=LINES[:3]),
        },
        "dataset:allenai/c4": {
            "README.md": card("en", train="en/c4-train.*.json.gz", validation="en/c4-validation.*.json.gz"),
            "en/c4-train.00000-of-01024.json.gz": documents("training"),
            "en/c4-validation.00000-of-00008.json.gz": documents("document"),
        },
        "dataset:nyu-mll/glue": {
            "README.md": card("qqp", validation="qqp/validation-*"),
            "qqp/validation-00000-of-00001.parquet": parquet(question1=["a?"] * 3, question2=["b?"] * 3, label=[1] * 3),
        },
    }
    return hub


def read(words, **more):
    """Fetch what the words name: a model's files with their digest, a text, or a task's examples."""
    if words is MODEL:
        files = locate(compose(words).model)
        return files, weights_digest(files.folder)
    return (read_task if words is QQP else read_text)(compose(words).dataset, **more)


def refusal(words, **more) -> str:
    with refused() as caught:
        read(words, **more)
    return str(caught.value)


def test_a_run_of_a_model_and_a_text_of_the_hub(filled, tmp_path):
    words = [
        *MODEL, *WIKITEXT, "dataset.windows=8", "dataset.calibration_windows=2", "protocol.window_tokens=32", "protocol.prompt_tokens=24",
        "measure=sweep", f"results_dir={tmp_path / 'results'}", "model.device_map=cpu",
    ]  # fmt: skip
    assert console.main(["run", *words]) == 0
    (path,) = (tmp_path / "results" / "runs").glob("*/record.json")
    record = json.loads(path.read_text())
    assert (record["model"]["source"], record["data"]["windows"]) == ("hub:gpt2-large", 8)
    asked = len(filled.asked)
    assert console.main(["run", *words]) == 0
    assert len(filled.asked) == asked  # what was fetched is kept: a resumed run asks no network


def test_a_plan_fetches_a_shape_at_most(filled, weights, tmp_path, prints):
    words = [f"results_dir={tmp_path / 'results'}", "plan=true", "dataset.windows=64"]
    assert "Weights: 2.88 GiB." in prints("reproduce", "table", "7", *MODEL, *WIKITEXT, *words).out
    assert filled.asked == []
    filled.repositories["model:me/mine"] = weights
    mine = ["model=folder", "model.name=mine", "model.path=me/mine"]
    assert "mine | wikitext103 | dense" in prints("run", *mine, *WIKITEXT, *words).out
    assert [filled.fetched(name) for name in ("config.json", "safetensors", "parquet")] == [1, 0, 0]


def test_what_takes_hours_is_said_before_its_weights_are_fetched(filled, tmp_path, monkeypatch, prints):
    monkeypatch.delenv("QUICKSILVER_DATA", raising=False)
    monkeypatch.setattr("quicksilver.runs.estimate.measured_flops_per_s", lambda *_: 1e9)
    said = prints("reproduce", "table", "11", *MODEL, *WIKITEXT, f"results_dir={tmp_path / 'results'}", code=2)
    assert "runs: about " in said.out
    assert "hours: add yes=true to start it" in said.err
    assert [filled.fetched(name) > 0 for name in ("safetensors", "parquet")] == [False, True]


def test_texts_and_tasks_of_the_hub_are_fetched_once_and_kept(filled, tmp_path):
    assert read(WIKITEXT).text.startswith(" \n = Title = \n \n a line of words")  # as the distributed file is
    text = read(C4, cache=tmp_path)
    assert text.text == "document 0\n\ndocument 1\n\ndocument 2"
    assert read(C4, part="calibration", cache=tmp_path).text == "document 3\n\ndocument 4"
    task = read(QQP, cache=tmp_path)
    assert (task.examples[0].prompt, task.source) == ("a?\nb?\nThe same:", "hub:nyu-mll/glue/qqp@main:validation")
    asked = len(filled.asked)
    assert read(C4, cache=tmp_path) == text
    assert read(QQP, cache=tmp_path) == task
    assert len(filled.asked) == asked


@pytest.mark.parametrize(
    "words", [MODEL, C4, *(pytest.param(words, marks=pytest.mark.slow) for words in (WIKITEXT, QQP))],
    ids=["model", "c4", "wikitext", "task"],
)  # fmt: skip
@pytest.mark.parametrize(("where", "fault", "says"), [
    ("/resolve/", GATED, "is gated. Accept its licence there and set HF_TOKEN."),
    ("/api/", GATED, "is gated. Accept its licence there and set HF_TOKEN."),
    ("/api/", (404, "RepoNotFound"), "does not exist, or is private"),
    ("/api/", (401, None), "Set HF_TOKEN"),
    ("/api/", (500, None), "answers with status 500. Try again later."),
    ("/resolve/", (500, None), "500"),
    (r"(safetensors|parquet|gz)$", "cut", "cannot be read ("),
])  # fmt: skip
def test_what_goes_wrong_is_one_line_and_nothing_of_it_is_kept(filled, tmp_path, capfd, words, where, fault, says):
    filled.faults[where] = fault
    more = {} if words is MODEL else {"cache": tmp_path / "text"}
    message = refusal(words, **more)
    assert says in message
    assert filled.endpoint in message
    assert "Without a network: " in message
    said = capfd.readouterr()
    assert "Retrying" not in said.out + said.err
    filled.faults.clear()
    whole = read(words, **more)
    filled.asked.clear()
    assert read(words, **more) == whole
    assert filled.asked == []


@pytest.mark.parametrize(("limit", "seconds", "where", "fault", "words", "says"), [
    ("PATIENCE_S", -1, "parquet$", (500, None), WIKITEXT, "HTTP Error 500 thrown while requesting GET"),
    ("ANSWER_WITHIN_S", 2.1, ".", "silent", MODEL, "cannot be read ("),
])  # fmt: skip
def test_a_hub_that_fails_again_and_again_or_does_not_answer_is_given_up(
    filled, monkeypatch, limit, seconds, where, fault, words, says
):
    monkeypatch.setattr(hub_module, limit, seconds)
    filled.faults[where] = fault
    assert says in refusal(words)


def test_an_unknown_id_and_a_closed_port_are_told_with_the_offline_choices(hub, monkeypatch):
    assert "does not exist, or is private" in refusal(MODEL)
    began = time.monotonic()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "Without a network: model.path=/folder of a Hugging Face model; a folder gpt2-large" in refusal(MODEL)
    assert time.monotonic() - began < 9


def test_files_that_are_not_what_the_hub_publishes_are_fetched_again(filled):
    filled.faults["safetensors$"] = "changed"
    assert "the hub publishes sha256" in refusal(MODEL)
    filled.faults.clear()
    files, digest = read(MODEL)
    path = files.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9] + bytes(9))  # of the same length
    assert "It was removed: the same command fetches it again." in refusal(MODEL)
    assert read(MODEL) == (files, digest)


def test_half_a_cache_is_not_believed_offline(filled, monkeypatch):
    files, digest = read(MODEL)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert read(MODEL) == (files, digest)
    for lose in ((files.folder / "model.safetensors").unlink, partial(shutil.rmtree, files.folder)):
        lose()
        assert "it is not whole on this machine, and HF_HUB_OFFLINE is set." in refusal(MODEL)


def test_a_row_without_text_names_the_field(filled):
    assert "name another with dataset.hub.text_field=…" in refusal([*C4, "dataset.hub.text_field=body"])


def test_a_local_file_wins_over_the_hub(filled, tmp_path):
    (tmp_path / "c4").mkdir()
    (tmp_path / "c4" / "c4_en_train_first1000.jsonl").write_text('{"text": "local"}\n')
    assert read(C4, root=tmp_path).text == "local"
    assert filled.asked == []
