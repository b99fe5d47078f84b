"""Words stop by class: what is a word is read from its tokens, and everything else goes on."""

from __future__ import annotations

import pytest
import tiny
import torch
from harness_world import make_world

from quicksilver.data.annotation import TOKEN_SETS, word_classes
from quicksilver.modules import WordClassHalting
from quicksilver.runs.config import compose
from quicksilver.runs.context import RunContext
from quicksilver.runs.parts import build_modules
from quicksilver.runtime import ConfigError, apply

# A vocabulary: ids 1 to 8 of the tiny model.
WORDS = {1: "The", 2: " cat", 3: " sat", 4: " on", 5: " inter", 6: "in", 7: ".", 8: " it"}
SETS = {
    option: [number for number, text in WORDS.items() if TOKEN_SETS[name](text)]
    for option, name in (
        ("function_ids", "@function_words"), ("letter_ids", "@with_letters"),
        ("begin_ids", "@begins_with_a_letter"), ("end_ids", "@ends_with_a_letter"),
    )
}  # fmt: skip
TEXT = (1, 2, 3, 4, 5, 6, 7, 8, 2)  # The cat sat on inter|in . it cat


def stopped(text: tuple[tuple[int, ...], ...] = (TEXT,), extra: int = 0, **options: object) -> list[list[int]]:
    """Places of each row's tokens that do not reach the last layer."""
    module = WordClassHalting(depth=0.4, **{"protect_first": 0, "protect_last": None, **SETS, **options})
    batch = tiny.Batch(text, extra)
    run = tiny.forward(tiny.load("llama"), batch, [module]).trace.passes[0]
    gone = ~run.active(run.n_layers - 1)
    return [row.nonzero()[:, 0].tolist() for row in batch.real(gone)]


def test_the_classes_are_those_of_the_words() -> None:
    texts = [WORDS[one] for one in TEXT]
    assert word_classes(texts) == [
        "function", "content", "content", "function", "content", "content", "other", "function", "content",
    ]  # fmt: skip
    assert stopped() == [[0, 3, 7]]
    assert stopped(halted="content") == [[1, 2, 4, 5]]  # the last token decides, and does not stop; a point is no word
    assert stopped(halted="content", protect_last=0) == [[1, 2, 4, 5, 8]]


def test_a_row_s_words_do_not_depend_on_its_batch() -> None:
    short = (4, 2, 6, 2)  # `in` follows a letter here: it is a part of a word
    assert stopped((TEXT, short), extra=2) == [[0, 3, 7], [0]]


def test_the_null_stops_as_many_of_each_row() -> None:
    one = stopped((TEXT, TEXT[:6]), at_random=True)
    assert [len(row) for row in one] == [3, 2]
    drawn = {tuple(stopped(at_random=True, seed=seed)[0]) for seed in range(6)}
    assert len(drawn) > 1
    assert all(8 not in places for places in drawn)


def test_it_stops_where_it_is_told() -> None:
    module = WordClassHalting(depth=0.6, **SETS, protect_first=0, protect_last=None)
    with torch.no_grad(), apply(tiny.load("llama"), [module]) as run:
        tiny.load("llama")(torch.tensor([TEXT]))
    (one,) = run.trace.passes
    active = [int(one.active(layer).sum()) for layer in range(tiny.LAYERS)]
    assert active[:3] == [9, 9, 9]
    assert active[3:] == [6, 6]
    assert not module.causal


def test_the_sets_are_named_in_the_config(tmp_path) -> None:
    world = [
        *make_world(tmp_path),
        f"results_dir={tmp_path / 'results'}",
        "modules=[word_class_halting]",
        "protocol=continuation",
    ]
    config = compose(world)
    tokenizer = RunContext().model(config).tokenizer
    (module,) = build_modules(config.modules, tokenizer)
    assert [tokenizer.decode([one]) for one in sorted(module.function_ids)] == ["A", "I", "a", "i"]  # a token a byte
    assert not set(module.letter_ids) & set(tokenizer(" .,;!")["input_ids"])
    with pytest.raises(ConfigError, match=r"function_ids: .*@function_words"):
        build_modules(compose([*world, "modules.word_class_halting.function_ids=['@function_word']"]).modules, tokenizer)
