"""Sub-words and words meet by characters, however a tokenizer cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicksilver.data.annotation import align
from quicksilver.data.treebank import joined, sentences
from quicksilver.runtime.errors import ConfigError


def treebank(words: list[str], spaces: list[bool]):
    text = "".join(word + (" " if space else "") for word, space in zip(words, spaces, strict=True)).rstrip()
    rows = "\n".join(f"{i}\t{word}\t_\tNOUN\tNN\t_\t_\t_\t_\t_" for i, word in enumerate(words, 1))
    return joined(sentences(f"# text = {text}\n{rows}\n", "file"))


@given(st.data())
def test_a_token_belongs_to_the_word_that_it_shares_most_with(data: st.DataObject):
    words = data.draw(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=8))
    text, note = treebank(words, data.draw(st.lists(st.booleans(), min_size=len(words), max_size=len(words))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)))) - {len(text)})
    offsets = np.array(list(zip([0, *cuts], [*cuts, len(text)], strict=True)))
    found = align(note, np.zeros(len(offsets), dtype=int), offsets, np.arange(len(offsets))[None])
    for token, (low, high) in enumerate(offsets):
        shared = [max(0, min(high, end) - max(low, start)) for start, end in zip(note.start, note.end, strict=True)]
        assert found.touched[0, token] == sum(one > 0 for one in shared)
        assert found.word[0, token] == (int(np.argmax(shared)) if max(shared) else -1)
    for word in set(found.word[0]) - {-1}:
        own = found.word[0] == word
        assert found.piece[0][own].tolist() == list(range(own.sum()))
        assert (found.pieces[0][own] == own.sum()).all()
    assert (found.occurrences == len(offsets)).all()
    assert found.sentence_tokens.max() == (found.word >= 0).sum()


def test_a_word_that_no_token_touches_is_named():
    _, note = treebank(["one", "two"], [True, False])
    with pytest.raises(ConfigError, match="no token of the model is of word 1 .characters 4 to 7"):
        align(note, np.zeros(1, dtype=int), np.array([[0, 3]]), np.zeros((1, 1), dtype=int))
