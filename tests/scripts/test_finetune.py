"""Fine-tuning on label words: a killed run goes on as if nothing had been, low-rank updates stay low-rank, and the schedule is what it says."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import finetune
import numpy as np
import pytest
import torch
import training_loop
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quicksilver.data.spec import TaskConfig
from quicksilver.data.tasks import Example

pytest.importorskip("matplotlib")  # the learning curve is a picture
pytest.importorskip("jinja2")  # and the card a template

WORDS = ["<unk>", "fine", "poor", "film", "a", "It", "was", "good", "bad", "plot", "dull", "sharp"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model below `base`, and SST-2's files below `data`."""
    folder = tmp_path_factory.mktemp("finetune")
    tokenizer = Tokenizer(models.WordLevel(vocab={word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder / "base")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=24,
        max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    write_rows(folder, *(f"a {'fine' if i % 2 else 'poor'} {'film' if i % 3 else 'plot'}\t{i % 2}" for i in range(160)))
    return folder


def write_rows(folder: Path, *lines: str) -> None:
    """SST-2's files."""
    (rows := folder / "data" / "glue" / "SST-2").mkdir(parents=True)
    for name in ("train", "dev"):
        (rows / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines, ""]))


def recipe(place: Path, **changes: Any) -> finetune.Recipe:
    plain = {"base": str(place / "base"), "epochs": {"sst2": 1.0}, "lr": 5e-3, "warmup_steps": 2, "batch_tokens": 48}
    return finetune.Recipe(**{**plain, **changes})


def train(place: Path, work: Path, made: finetune.Recipe, minutes: float = 1e9) -> Path:
    torch.manual_seed(made.seed)
    finetune.train(made, place / "data", work, work / "out", minutes)
    return work / "out"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_killed_run_goes_on_where_it_was(place, tmp_path, monkeypatch):
    made = recipe(place)
    whole = weights(train(place, tmp_path / "whole", made))
    real, asked = finetune.loss_of, []

    def dies(model: Any, *rest: Any) -> Any:
        asked.extend([0] * model.training)
        if len(asked) == 10:
            raise KeyboardInterrupt
        return real(model, *rest)

    assert training_loop.load_state(tmp_path / "cut") is None
    train(place, tmp_path / "cut", made, minutes=0)  # a step, then out of time: saved
    with monkeypatch.context() as patch:
        patch.setattr(finetune, "loss_of", dies)
        with pytest.raises(KeyboardInterrupt):
            train(place, tmp_path / "cut", made)
    resumed = weights(train(place, tmp_path / "cut", made))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    history = json.loads((tmp_path / "whole" / "out" / "training.json").read_text())["history"]
    assert history[-1]["held_accuracy"]["sst2"] > 0.9  # one word decides


def test_what_is_not_heard_is_of_the_sentence_alone():
    batch = [finetune.Encoded(list(range(n)), [1, 2], 0, sentence_end=n - 2) for n in (6, 9)]
    heard = finetune.drawn(batch, 0.999999, 0, 0)
    assert heard.tolist() == [[1.0] + [0.0] * 3 + [1.0] * 5, [1.0] + [0.0] * 6 + [1.0] * 2]
    assert torch.equal(finetune.drawn(batch, 0.5, 3, 4), finetune.drawn(batch, 0.5, 3, 4))
    assert not torch.equal(finetune.drawn(batch, 0.5, 3, 4), finetune.drawn(batch, 0.5, 3, 5))


def test_whole_sentences_are_kept_out_and_the_n_gram_model_takes_its_share(place, tmp_path):
    pytest.importorskip("sklearn")
    write_rows(tmp_path, *(f"plot{i} is {'fine' if i % 2 else 'poor'}\t{i % 2}" for i in range(60)), "is fine\t1")
    (tmp_path / "base").symlink_to(place / "base")
    place, options = tmp_path, {"distil": 0.5, "whole_sentences": 1.0, "plan_dropout": 0.2}
    made = recipe(place, epochs={"sst2": 0.3}, held="sentences", **options, attention="eager")
    found = weights(train(place, tmp_path / "all", made))
    train(place, tmp_path / "cut", made, minutes=0)
    assert all(torch.equal(tensor, found[name]) for name, tensor in weights(train(place, tmp_path / "cut", made)).items())
    again = (tmp_path / "all" / "out" / "README.md").read_text()
    assert "--plan-dropout 0.2 --held sentences --distil 0.5 --whole-sentences 1 --attention eager" in again
    assert "Nothing that is in them alone was trained on" in again
    for name in options:
        other = weights(train(place, tmp_path / name, dataclasses.replace(made, **{name: 0.0})))
        assert any(not torch.equal(tensor, found[key]) for key, tensor in other.items()), name


def test_each_token_knows_how_many_words_are_read(place):
    tokenizer = AutoTokenizer.from_pretrained(place / "base")
    task = TaskConfig(template="{sentence} It was", labels={" bad": ["0"], " good": ["1"]})
    (one,) = finetune.encoded(tokenizer, task, [Example("a fine film It was", (), 1, 0)], 192)
    assert one.words_read == (1, 2, 3)
    assert one.sentence_end == 3


def test_another_recipe_is_refused(place, tmp_path):
    train(place, tmp_path, recipe(place), minutes=0)
    with pytest.raises(SystemExit, match="made by another configuration"):
        train(place, tmp_path, recipe(place, lr=1e-3), minutes=0)
    train(place, tmp_path, recipe(place, falls=((3, 4),)), minutes=0)  # takes effect later


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for what it has renamed
def test_low_rank_updates_are_low_rank_and_merged(place, tmp_path):
    pytest.importorskip("peft", reason="peft is not installed: pip install 'quicksilver-lm[peft]'")
    out = train(place, tmp_path, recipe(place, lora=2, lr=2e-2))
    base, found = weights(place / "base"), weights(out)
    assert base.keys() == found.keys()
    changed = 0
    for name, tensor in found.items():
        before, difference = base[name], tensor.float() - base[name].to(torch.bfloat16).float()
        if tensor.ndim == 2 and "layers." in name:
            sizes = torch.linalg.svdvals(difference)
            # bfloat16 leaves a little beyond the rank.
            assert sizes[2] < 0.25 * sizes[0] + 0.02 * before.norm(), name
            changed += int(sizes[0] > 0)
        else:
            assert torch.equal(tensor, before.to(torch.bfloat16)), name
    assert changed > 4
    assert AutoModelForCausalLM.from_pretrained(out)(torch.tensor([[1, 2]])).logits.isfinite().all()
    assert "low-rank updates of rank 2" in (out / "README.md").read_text()


def test_the_schedule_warms_up_and_falls():
    made = finetune.Recipe("base", {"sst2": 1.0}, warmup_steps=10, falls=((50, 60),))
    scales = [made.lr_scale(step, 100) for step in range(100)]
    assert [scales[step] for step in (0, 10, 59, 60, 99)] == pytest.approx([0.1, 0.9, 0.5 / 10, 0.4, 0.01])


@pytest.mark.parametrize(("words", "says"), [(["sst3=1"], "sst3"), (["sst2=much"], "TASK=EPOCHS"), (["sst2"], "TASK=EPOCHS")])
def test_a_mistake_is_one_line(place, tmp_path, monkeypatch, words, says):
    command = ["finetune.py", str(place / "base"), "--tasks", *words, "--work", str(tmp_path), "--data-root", str(place / "data")]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit, match=says) as caught:
        finetune.main()
    assert "\n" not in str(caught.value)


# -- rows kept out by sentence
SENTENCES = [f"film {i} is fine and never dull ." if i % 2 else f"film {i} is dull and never fine ." for i in range(30)]
PARTS = ["is fine", "never dull", *(f"film {i} is" for i in range(30)), "film", "  film 3   is "]


def test_a_text_belongs_to_the_sentences_that_contain_it_word_for_word():
    owned, whole = finetune.owners([*SENTENCES, *PARTS, "il"])
    numbers = [own[0] for own in owned[:30]]
    assert sorted([*numbers, owned[-1][0]]) == list(range(31))
    assert owned[30] == tuple(sorted(numbers[i] for i in range(1, 30, 2)))  # is fine
    assert owned[32 + 3] == owned[-2] == (numbers[3],)  # film 3 is, whatever its spaces; not film 13 is
    assert whole.tolist() == [True] * 30 + [False] * len(PARTS) + [True]  # a part of a word is no part of a sentence


def test_nothing_that_is_a_kept_sentence_s_alone_is_trained_on():
    texts = [*SENTENCES, *PARTS]
    scored, trained = finetune.kept_out(texts, 5, seed=0)
    kept = [texts[i] for i in np.flatnonzero(scored)]
    assert len(kept) == 3  # a tenth at most
    assert set(kept) <= set(SENTENCES)
    assert not (scored & trained).any()
    for text, is_trained in zip(texts, trained, strict=True):
        inside = [sentence for sentence in SENTENCES if f" {' '.join(text.split())} " in f" {sentence} "]
        assert is_trained == any(sentence not in kept for sentence in inside)


def test_the_n_gram_model_never_saw_the_sentence_it_answers_about():
    pytest.importorskip("sklearn")
    gold = [int("is fine" in sentence) for sentence in SENTENCES]
    answers = finetune.out_of_fold(SENTENCES, gold, seed=0)
    assert [len(one) for one in answers] == [1 + len(sentence.split()) for sentence in SENTENCES]
    assert all(np.allclose(one.sum(1), 1) for one in answers)
    assert [int(one[-1].argmax()) for one in answers] == gold  # other sentences say what decides
    # The label of one row does not move its own answer, and moves others'.
    wrong = [1 - gold[0], *gold[1:]]
    moved = finetune.out_of_fold(SENTENCES, wrong, seed=0)
    assert np.array_equal(moved[0], answers[0])
    assert any(not np.array_equal(a, b) for a, b in zip(moved[1:], answers[1:], strict=True))


def test_after_a_word_it_says_what_the_library_says():
    pytest.importorskip("sklearn")
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    gold = [int("is fine" in sentence) for sentence in SENTENCES]
    grams = TfidfVectorizer(ngram_range=(1, finetune.LONGEST), token_pattern=r"\S+", sublinear_tf=True)
    fitted = LogisticRegression(C=4.0).fit(grams.fit_transform(SENTENCES), gold)
    text = "film 3 is fine ."  # no n-gram twice
    found = finetune._after_each_word(text, grams.vocabulary_, grams.idf_, fitted.coef_[0], fitted.intercept_[0])
    assert np.allclose(found[-1], fitted.predict_proba(grams.transform([text]))[0])
    assert np.allclose(found[2], fitted.predict_proba(grams.transform(["film 3"]))[0])
