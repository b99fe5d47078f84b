"""The reference models: training is deterministic, survives a kill at any moment, and never starts over silently."""

import dataclasses
import json
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import model_card
import numpy as np
import pytest
import reference_corpus as corpus
import tiny
import torch
import train_reference as training
import training_loop
from repository import below
from saying import unsaid
from thinning import first
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("matplotlib")  # the loss curve is a picture
pytest.importorskip("jinja2")  # and the card a template

# 60 steps of 64 tokens: one checkpoint at 50, the decay from step 54 on.
RECIPE = training.Recipe(
    family="gpt2", layers=2, width=16, heads=2, kv_heads=2, mlp_width=24, vocab_size=300, context_tokens=32, stable_context_tokens=16,
    micro_batch_tokens=32, batch_tokens=64, total_tokens=60 * 64, warmup_tokens=256, decay_fraction=0.1,
)  # fmt: skip
LLAMA = dataclasses.replace(RECIPE, family="llama", kv_heads=1)
WORDS = "the cat sat on a mat while seven small dogs ran along some old river and nobody knew why it rained so much"
LIMIT_MB = 34


def sentences(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return "\n".join(" ".join(rng.choices(WORDS.split(), k=12)) + f" {seed} {i}." for i in range(count))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layout of the data folder, a few kilobytes of it."""
    root = tmp_path_factory.mktemp("data")
    files = {
        "wikitext-2/train_article_order_shuffled.txt": "\n = One = \n" + sentences(1, 40) + "\n = Two = \n" + sentences(2, 40),
        "books/books_train.txt": sentences(3, 60).replace("\n", "\n\n"), "wikitext-103/wiki.valid.tokens": sentences(4, 30),
        "wikitext-103/wiki.test.tokens": sentences(5, 5), "books/books_valid.txt": sentences(6, 5),
        "books/books_test.txt": sentences(7, 5),
    }  # fmt: skip
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def use_small_sources(patch: pytest.MonkeyPatch) -> None:
    """In place of the docstrings of every installed package, and of the language reference."""
    patch.setattr(corpus, "docstrings", lambda roots: iter(sentences(8, 60).split("\n")))
    patch.setattr(corpus, "python_docs", lambda: sentences(9, 30))


@pytest.fixture(autouse=True)
def small_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_sources(monkeypatch)
    monkeypatch.setattr(training_loop, "draw_curves", lambda path, *rest: path.touch())  # `uninterrupted` has real ones


def train(work: Path, data: Path, recipe: training.Recipe = RECIPE, name: str = "tiny") -> Path:
    """The exported folder."""
    training.train(name, recipe, data, work, work / "out", "cpu")
    return work / "out" / name


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[Path]:
    """The work folder of a run that nobody disturbed."""
    work = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patch:
        use_small_sources(patch)
        train(work, data)
    yield work


def state(work: Path) -> dict[str, Any]:
    """The last checkpoint."""
    return training_loop.load_state(work / "tiny")


def weights(work: Path) -> dict[str, torch.Tensor]:
    """In float32, from the last checkpoint."""
    return state(work)["model"]


def assert_equal_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


class Killed(Exception):
    """Stands for kill -9: nothing of ours catches it."""


def train_until(step: int, work: Path, data: Path, recipe: training.Recipe = RECIPE) -> None:
    """Break off in the middle of step `step`."""
    losses = iter(range((RECIPE.batch_tokens // RECIPE.micro_batch_tokens) * step + 1))
    real = training.step_loss

    def step_loss(*args: Any) -> torch.Tensor:
        if next(losses, None) is None:
            raise Killed
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "step_loss", step_loss)
        with pytest.raises(Killed):
            train(work, data, recipe)


# -- the same weights --------------------------------------------------------------------------------------------------------------
def test_training_changes_the_weights_and_the_loss_falls(uninterrupted):
    fresh, trained, history = training.build_model(RECIPE).state_dict(), weights(uninterrupted), state(uninterrupted)["history"]
    assert all(not torch.equal(fresh[name], trained[name]) for name in trained)
    losses = [entry["loss_nats"] for entry in history if "loss_nats" in entry]
    assert len(losses) == RECIPE.steps == 60
    assert sum(losses[-10:]) / 10 < sum(losses[:10]) / 10 - 0.5
    held_out = [entry for entry in history if "held_out_bits_per_byte" in entry]
    assert [entry["tokens"] for entry in held_out] == [RECIPE.total_tokens]
    assert set(held_out[0]["held_out_bits_per_byte"]) == {"wikitext-103-valid", "python-docs"}
    assert (uninterrupted / "tiny" / "loss_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("step", "tokens"), first([(57, 60 * 64), (3, 60 * 64), (51, 90 * 64)]),
    ids=["after the first checkpoint", "before it", "for longer, until the learning rate falls"],
)  # fmt: skip
def test_a_run_that_broke_off_ends_with_the_weights_of_one_that_did_not(tmp_path, data, uninterrupted, step, tokens):
    train_until(step, tmp_path, data, dataclasses.replace(RECIPE, total_tokens=tokens))
    assert (training_loop.load_state(tmp_path / "tiny") is None) == (step < 50)
    train(tmp_path, data)
    assert_equal_weights(weights(tmp_path), weights(uninterrupted))
    assert state(tmp_path)["history"] == state(uninterrupted)["history"]


@pytest.mark.slow
def test_a_run_may_be_shortened_from_a_step_it_has_not_passed(tmp_path, data):
    """Told at step 50 to end at 58: as if it had been told at the start."""
    short = dataclasses.replace(RECIPE, shortened=(52, 58))
    train(tmp_path / "straight", data, short)
    train_until(51, tmp_path / "told", data)
    train(tmp_path / "told", data, short)
    assert_equal_weights(weights(tmp_path / "told"), weights(tmp_path / "straight"))
    scales = [short.lr_scale(step) for step in range(short.steps)]
    assert short.steps == 58
    assert scales[:53] == [RECIPE.lr_scale(step) for step in range(53)]
    assert scales[52:] == sorted(scales[52:], reverse=True)
    assert 0 < scales[-1] < 0.25


SIGKILLED = """
import dataclasses, sys, torch
sys.path[:0] = {path!r}
import test_training as t
torch.set_num_threads(1)
t.use_small_sources(t.pytest.MonkeyPatch())
t.train(t.Path({work!r}), t.Path({data!r}))
"""


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_same_weights(tmp_path, data, uninterrupted):
    """kill -9 as soon as there is something to lose: in the corpus, before a checkpoint, while one is written."""
    code = SIGKILLED.format(path=[str(Path(__file__).parent), *(p for p in sys.path if p)], work=str(tmp_path), data=str(data))
    killed = 0
    for moment in ("corpus", "corpus/corpus.json", "tiny/.state*", f"tiny/{training_loop.STATE}"):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any(tmp_path.glob(moment)):
            time.sleep(0.001)
        process.kill()  # SIGKILL, and nothing when it has ended
        killed += process.wait() == -signal.SIGKILL
    assert killed >= 2  # the last moments may come too late
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert_equal_weights(weights(tmp_path), weights(uninterrupted))


# -- checkpoints -------------------------------------------------------------------------------------------------------------------
def save(folder: Path, step: int = 50) -> None:
    """A checkpoint."""
    model = training.build_model(RECIPE)
    optims = training.optimizers(model, RECIPE)
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    for optim in optims:
        optim.step()
    training_loop.state_file(folder, RECIPE).save(step=step, **training_loop.state_of(model, optims, [], 1.0))


@pytest.mark.parametrize("moment", ["open", "replace"])
def test_a_save_killed_at_any_moment_keeps_the_last_good_checkpoint(tmp_path, moment, monkeypatch):
    save(tmp_path / "tiny")
    with monkeypatch.context() as patch:
        patch.setattr(Path, moment, Mock(side_effect=Killed))
        with pytest.raises(Killed):
            save(tmp_path / "tiny", 100)
    assert state(tmp_path)["step"] == 50
    save(tmp_path / "tiny", 100)
    assert state(tmp_path)["step"] == 100
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == [training_loop.STATE]


@pytest.mark.parametrize(("step", "change"), [
    (50, {"width": 24}), (50, {"lr_muon": 0.5, "seed": 7}), (50, {"family": "llama"}), (50, {"mixture": (0.2, 0.2, 0.6)}),
    (60, {"total_tokens": 90 * 64}),  # the learning rate has begun to fall
    (50, {"shortened": (40, 58)}),  # from a step that is passed
])  # fmt: skip
def test_a_checkpoint_of_another_configuration_names_what_differs_and_is_left_alone(tmp_path, step, change):
    save(tmp_path / "tiny", step)
    before = below(tmp_path)
    other = dataclasses.replace(RECIPE, **change)
    model = training.build_model(other)
    fresh = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(SystemExit) as refused:
        training_loop.restore(tmp_path / "tiny", model, training.optimizers(model, other), other)
    message = str(refused.value)
    said = [json.loads(json.dumps([getattr(RECIPE, key), value])) for key, value in change.items()]
    differ = [f"{key}: checkpoint {theirs}, now {ours}" for key, (theirs, ours) in zip(change, said, strict=True)]
    # --work is where checkpoints are; --out is where the finished model goes.
    assert unsaid(message, *differ, "another configuration", "--work", "Nothing was changed") == []
    assert message.count("checkpoint ") == len(change)  # and nothing that is equal
    assert below(tmp_path) == before
    assert_equal_weights(dict(model.named_parameters()), fresh)


def test_a_checkpoint_of_another_version_is_refused_by_name(tmp_path):
    """A recipe that has gained or lost a field since."""
    recipe = dataclasses.asdict(RECIPE)
    lost = {name: value for name, value in recipe.items() if name != "mlp_width"}
    for name, other in {"mlp_width": lost, "dropout": recipe | {"dropout": 0.1}}.items():
        with pytest.raises(SystemExit, match=name):
            training_loop.check_recipe(RECIPE, {"recipe": other, "step": 50}, tmp_path)


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_checkpoint(tmp_path, data, monkeypatch):
    save(tmp_path / "tiny")
    before = below(tmp_path / "tiny")
    monkeypatch.setattr(training, "step_loss", lambda model, *rest: next(model.parameters()).sum() * torch.nan)
    with pytest.raises(SystemExit, match=r"step 50: the gradient is not finite \(loss nan\).*state is kept in .*tiny"):
        train(tmp_path, data)
    assert below(tmp_path / "tiny") == before


# -- the schedule ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", [RECIPE, *training.RECIPES.values()], ids=["tiny", *training.RECIPES])
def test_the_schedule_warms_up_stays_and_falls_to_the_end(recipe):
    scales = [recipe.lr_scale(step) for step in range(recipe.steps)]
    assert max(scales) == 1.0
    assert all(0 < scale <= 1 for scale in scales)
    top = scales.index(1.0)
    assert scales[:top] == sorted(scales[:top])
    assert scales[top:] == sorted(scales[top:], reverse=True)
    assert scales[recipe.decay_start - 1] == 1.0 > scales[recipe.decay_start + 1]
    falling_from = recipe.shortened[0] if recipe.shortened else recipe.decay_start
    assert scales[-1] <= 1 / (recipe.steps - falling_from)
    tokens = recipe.long_from_tokens
    long_from = recipe.decay_start if tokens is None else math.ceil(tokens / recipe.batch_tokens)
    contexts = [recipe.context_at(step) for step in (long_from - 1, long_from, recipe.decay_start)]
    assert contexts == [recipe.stable_context_tokens, recipe.context_tokens, recipe.context_tokens]


def test_a_batch_is_a_function_of_seed_and_step(uninterrupted):
    def batch(step: int, **changes: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        recipe = dataclasses.replace(RECIPE, **changes)
        return list(training.Batches(uninterrupted / "corpus", recipe).micro_batches(step))

    for step in (0, 7, RECIPE.decay_start):
        length = RECIPE.context_at(step)
        one, again = batch(step), batch(step)
        assert all(torch.equal(a, b) for pair in zip(one, again, strict=True) for a, b in zip(*pair, strict=True))
        assert sum(ids.numel() for ids, _ in one) == RECIPE.batch_tokens
        for ids, positions in one:
            assert ids.shape == (RECIPE.micro_batch_tokens // length, length)
            assert int(ids.max()) < RECIPE.vocab_size
            assert int(positions.max()) < RECIPE.context_tokens
    assert not torch.equal(batch(0)[0][0], batch(1)[0][0])
    assert not torch.equal(batch(0)[0][0], batch(0, seed=1)[0][0])


# -- the corpus --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_training_may_begin_with_an_exported_model_and_twice_its_context(tmp_path, family):
    short = dataclasses.replace(RECIPE, family=family)
    first = training.build_model(dataclasses.replace(short, seed=5))
    first.save_pretrained(tmp_path)
    longer = dataclasses.replace(short, context_tokens=2 * short.context_tokens, start=str(tmp_path))
    then, before = training.build_model(longer).state_dict(), first.state_dict()
    assert then.keys() == before.keys()
    for name, known in before.items():
        expected = known if known.shape == then[name].shape else torch.cat([known, known])
        assert torch.equal(then[name], expected), name
    assert ("transformer.wpe.weight" in then) == (family == "gpt2")


def text(*words: int) -> str:
    return " ".join(f"w{word}" for word in words)


def test_a_document_that_shares_thirteen_words_with_held_out_text_goes_and_one_that_shares_twelve_stays():
    held = {"valid": text(*range(100)), "test": text(*range(500, 530))}
    documents = {
        "wiki": [text(*range(900, 930)), *(text(*range(900, 905), *range(20, 20 + n), *range(905, 910)) for n in (13, 12))],
        "books": [text(*range(10, 25)).upper().replace(" ", ",  "), text(*range(515, 530))],  # case and commas do not hide it
        "docstrings": ["short", ""],
    }
    kept, report = corpus.remove_overlap(documents, held)
    assert kept == {"wiki": [documents["wiki"][0], documents["wiki"][2]], "books": [], "docstrings": ["short", ""]}
    names = ("documents", "removed", "ngrams", "shared_before", "shared_after", "by_held_out")
    assert {source: tuple(found[name] for name in names) for source, found in report.items()} == {
        "wiki": (3, 1, 18 + 11 + 10, 1, 0, {"valid": 1, "test": 0}), "books": (2, 2, 6, 6, 0, {"valid": 3, "test": 3}),
        "docstrings": (2, 0, 0, 0, 0, {"valid": 0, "test": 0}),
    }  # fmt: skip


def test_what_is_left_is_counted_again_and_not_assumed(monkeypatch):
    looks = iter([["a"], ["b"], ["a"]])  # at held-out text, at a document, at the same document again
    monkeypatch.setattr(corpus, "ngrams", lambda text: next(looks))
    _, report = corpus.remove_overlap({"wiki": ["a document"]}, {"valid": "held out"})
    assert (report["wiki"]["removed"], report["wiki"]["shared_after"]) == (0, 1)


def test_the_corpus_reports_the_overlap_it_found(tmp_path, data, monkeypatch):
    stolen = " ".join((data / "wikitext-103/wiki.test.tokens").read_text().split()[:20])
    monkeypatch.setattr(corpus, "docstrings", lambda roots: iter([*sentences(8, 60).split("\n"), f"Quoting: {stolen}"]))
    manifest = corpus.prepare(data, tmp_path, RECIPE.vocab_size)
    overlap = manifest["sources"]["docstrings"]["overlap"]
    assert overlap["removed"] == 1
    assert overlap["by_held_out"]["wikitext-103-test"] == overlap["shared_before"] > 0
    assert overlap["shared_after"] == 0
    assert json.loads((tmp_path / "corpus.json").read_text()) == manifest
    tokenizer = training.load_tokenizer(tmp_path)
    stream = torch.from_numpy(corpus.np.fromfile(tmp_path / "docstrings.bin", dtype="uint16").astype("int64"))
    assert len(stream) == manifest["sources"]["docstrings"]["tokens"]
    assert tokenizer.decode(stream).replace(corpus.END_OF_TEXT, "\n").strip() == sentences(8, 60)


def test_a_missing_data_folder_is_named_with_what_to_do_and_nothing_else(tmp_path, monkeypatch):
    folders = [f"--{name}={tmp_path / name}" for name in ("data-root", "work", "out")]
    monkeypatch.setattr(sys, "argv", ["train_reference.py", "reference-gpt2", "--threads=1", "--device=cpu", *folders])
    said = r"train_article_order_shuffled\.txt is missing.*--data-root.*QUICKSILVER_DATA"
    with pytest.raises(SystemExit, match=said):  # a text as the code: printed, and the exit code is 1
        training.main()
    assert not list((tmp_path / "out").rglob("*"))


def test_docstrings_are_collected_once_and_the_held_out_ones_never(tmp_path, monkeypatch):
    monkeypatch.undo()  # the real collector
    long = "A docstring that is long enough to be worth reading, with some words in it, and some more of them."
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text(f'"""Held out: {long}"""')
    (tmp_path / "a.py").write_text(f'"""{long}"""\ndef f():\n    """{long}"""\nclass C:\n    """Short."""\n')
    (tmp_path / "b.py").write_text(f'def g():\n    r"""\\d {long}\n\n        Indented.\n    """\n')
    (tmp_path / "c.py").write_text("this is no python (")
    assert list(corpus.docstrings([tmp_path])) == [long, f"\\d {long}\n\nIndented."]


# -- what is shipped ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", [RECIPE, LLAMA], ids=["gpt2", "llama"])
def test_the_exported_folder_is_a_plain_hugging_face_one_and_a_finished_run_is_not_trained_further(
    tmp_path, data, monkeypatch, recipe
):
    short = dataclasses.replace(recipe, total_tokens=2 * 64)
    folder, trained = train(tmp_path, data, short), weights(tmp_path)
    monkeypatch.setattr(training, "step_loss", None)  # would fail if it were called
    train(tmp_path, data, short)
    assert_equal_weights(weights(tmp_path), trained)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert_equal_weights(dict(model.named_parameters()), {name: tensor.bfloat16() for name, tensor in trained.items()})
    ids = tokenizer("the cat sat on a mat", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "the cat sat on a mat"
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()
    described = json.loads((folder / "training.json").read_text())
    assert described["recipe"] == json.loads(json.dumps(dataclasses.asdict(short)))
    assert set(described["corpus"]["sources"]) == set(corpus.SOURCES)
    assert (folder / "loss_curve.png").is_file()


def test_the_card_of_a_rung_is_of_its_own_context_and_training(uninterrupted, data):
    card = model_card.card("ladder-tiny", uninterrupted / "out" / "tiny", data)
    windows = f"Disjoint windows of {RECIPE.context_tokens} tokens"
    assert unsaid(card, windows, "a rung of the ladder of sizes", "`make train-reference MODEL=ladder-tiny`") == []
    rows = [line for line in card.splitlines() if " to " in line and line.startswith("| ") and line[2].isdigit()]
    assert rows[-1].startswith(f"| 17 to {RECIPE.context_tokens - 1} |")
    assert all(0 < float(row.split("|")[2]) < 20 for row in rows)


@pytest.mark.parametrize("name", training.RECIPES)
def test_the_real_recipes_keep_within_their_limits(name):
    recipe = training.RECIPES[name]
    model = training.build_model(recipe)
    parameters = sum({p.data_ptr(): p.numel() for p in model.parameters()}.values())
    assert 2 * parameters / 1e6 < LIMIT_MB - 1.5  # in bfloat16; the tokenizer and the card need room too
    assert recipe.context_tokens == model.config.max_position_embeddings
    assert 4096 <= recipe.vocab_size <= 8192
    assert model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    count = lambda optim: sum(p.numel() for group in optim.param_groups for p in group["params"])
    matrices, rest = map(count, training.optimizers(model, recipe))
    assert matrices + rest == parameters
    assert matrices > rest


@pytest.mark.parametrize("name", training.RECIPES)
def test_a_shipped_model_is_what_its_name_says_and_runs_under_the_runtime(name):
    folder, recipe = training.SHIPPED / name, training.RECIPES[name]
    if not (folder / "config.json").is_file():
        pytest.skip(f"{name} has not been trained yet: make train-reference MODEL={name}")
    card = (folder / "README.md").read_text(encoding="utf-8").lower()
    needed = "licen,wikitext,books,docstrings,13-grams,bits per byte,hours,train-reference,greedy sample,loss by position,limits"
    assert unsaid(card, *needed.split(","), "agreement with the last layer") == []
    first = "ladder-gpt2-1m" if name.startswith("ladder") else "reference-gpt2"
    own, shared = (json.loads((training.SHIPPED / one / "tokenizer.json").read_text("utf-8")) for one in (name, first))
    assert own["model"] == shared["model"]
    if not (folder / "model.safetensors").is_file():
        assert (folder / "weights.sha256").is_file()
        pytest.skip(f"the package has no weights of {name}: make train-reference MODEL={name}")
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) <= LIMIT_MB * 1e6
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval().float(), AutoTokenizer.from_pretrained(folder)
    assert (model.config.model_type, model.config.num_hidden_layers) == (recipe.family, recipe.layers)
    assert model.config.max_position_embeddings == recipe.context_tokens
    assert 4096 <= len(tokenizer) <= model.config.vocab_size <= 8192
    text = "The return statement leaves the current function call with the expression list as return value."
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == text
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    bits_per_byte = float(loss) * (ids.shape[1] - 1) / 0.6931 / len(text.encode())
    assert bits_per_byte < 2.6  # it was really trained: one that guesses letters needs more than 4
    # Deep and trained: half of its prompt halted, both executions agree.
    row = tuple(ids[0].tolist())
    batch = tiny.Batch((row, row[: len(row) // 2]))
    policy = tiny.Hashed(0.05, 0.05, "project", 4)
    compact, masked = (tiny.forward(model, batch, [policy], execution=e) for e in ("compact", "masked"))
    tiny.assert_close(batch.real(compact.logits), batch.real(masked.logits), atol=1e-4)
    half = recipe.layers // 2  # the last four take halted tokens in again
    assert compact.trace.active_counts()[half] < compact.trace.active_counts()[0]


def test_a_window_with_repeats_says_again_what_it_said_and_keeps_its_length():
    rng = np.random.default_rng(0)
    for length in (128, 1024):
        for _ in range(50):
            repeated = training.with_repeats(np.arange(length), rng).tolist()
            assert len(repeated) == length
            assert set(repeated) <= set(range(length))
            assert length // 32 <= length - len(set(repeated))


def test_a_window_of_whole_documents_begins_with_one_or_lies_in_one(tmp_path):
    recipe = dataclasses.replace(RECIPE, sources=("code",), mixture=(1.0,), decay_mixture=(1.0,), whole_documents=True)
    lengths = [5, 100, 12, 40, 300, 7]
    np.repeat(np.arange(len(lengths)), lengths).astype(np.uint16).tofile(tmp_path / "code.bin")
    np.save(tmp_path / "code.starts.npy", np.cumsum([0, *lengths[:-1]]))
    batches, rng = training.Batches(tmp_path, recipe), np.random.default_rng(0)
    for _ in range(200):
        window = batches._window(0, 32, rng)
        assert len(window) == 32
        begins = (window == window[0]).sum() == lengths[window[0]]
        at_the_end = window[-1] == len(lengths) - 1  # nothing comes after the last document
        assert len(set(window.tolist())) == 1 or begins or at_the_end
