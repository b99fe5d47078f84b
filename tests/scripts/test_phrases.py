"""Rows kept out by sentence: nothing of a scored sentence is trained on that is its own, and an n-gram model never answers about what it saw."""

from __future__ import annotations

import numpy as np
import phrases
import pytest

SENTENCES = [f"film {i} is fine and never dull ." if i % 2 else f"film {i} is dull and never fine ." for i in range(30)]
PARTS = ["is fine", "never dull", *(f"film {i} is" for i in range(30)), "film", "  film 3   is "]


def test_a_text_belongs_to_the_sentences_that_contain_it_word_for_word() -> None:
    owned, whole = phrases.owners([*SENTENCES, *PARTS, "il"])
    numbers = [own[0] for own in owned[:30]]
    assert sorted([*numbers, owned[-1][0]]) == list(range(31))
    assert owned[30] == tuple(sorted(numbers[i] for i in range(1, 30, 2)))  # is fine
    assert owned[32 + 3] == owned[-2] == (numbers[3],)  # film 3 is, whatever its spaces; not film 13 is
    assert whole.tolist() == [True] * 30 + [False] * len(PARTS) + [True]  # a part of a word is no part of a sentence


def test_nothing_that_is_a_kept_sentence_s_alone_is_trained_on() -> None:
    texts = [*SENTENCES, *PARTS]
    scored, trained = phrases.kept_out(texts, 5, seed=0)
    kept = [texts[i] for i in np.flatnonzero(scored)]
    assert len(kept) == 3  # a tenth at most
    assert set(kept) <= set(SENTENCES)
    assert not (scored & trained).any()
    for text, is_trained in zip(texts, trained, strict=True):
        inside = [sentence for sentence in SENTENCES if f" {' '.join(text.split())} " in f" {sentence} "]
        assert is_trained == any(sentence not in kept for sentence in inside)


def test_the_n_gram_model_never_saw_the_sentence_it_answers_about() -> None:
    pytest.importorskip("sklearn")
    gold = [int("is fine" in sentence) for sentence in SENTENCES]
    answers = phrases.out_of_fold(SENTENCES, gold, seed=0)
    assert [len(one) for one in answers] == [1 + len(sentence.split()) for sentence in SENTENCES]
    assert all(np.allclose(one.sum(1), 1) for one in answers)
    assert [int(one[-1].argmax()) for one in answers] == gold  # other sentences say what decides
    # The label of one row does not move its own answer, and moves others'.
    wrong = [1 - gold[0], *gold[1:]]
    moved = phrases.out_of_fold(SENTENCES, wrong, seed=0)
    assert np.array_equal(moved[0], answers[0])
    assert any(not np.array_equal(a, b) for a, b in zip(moved[1:], answers[1:], strict=True))


def test_after_a_word_it_says_what_the_library_says() -> None:
    pytest.importorskip("sklearn")
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    gold = [int("is fine" in sentence) for sentence in SENTENCES]
    grams = TfidfVectorizer(ngram_range=(1, phrases.LONGEST), token_pattern=r"\S+", sublinear_tf=True)
    fitted = LogisticRegression(C=4.0).fit(grams.fit_transform(SENTENCES), gold)
    text = "film 3 is fine ."  # no n-gram twice
    found = phrases._after_each_word(text, grams.vocabulary_, grams.idf_, fitted.coef_[0], fitted.intercept_[0])
    assert np.allclose(found[-1], fitted.predict_proba(grams.transform([text]))[0])
    assert np.allclose(found[2], fitted.predict_proba(grams.transform(["film 3"]))[0])
