"""The tokens of a run's windows with the words they belong to: what every measurement on gold annotation begins with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from quicksilver.measure.strata import crossed, indicators, quantile_bins
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench
    from quicksilver.measure.measurement import Setting

FREQUENCY_BINS = 10
# Half-open ranges of slots: the first ones are attention sinks and their neighbours, and differ one by one.
_POSITION_EDGES = np.array([1, 2, 4, 8, 16, *range(32, 4096, 32)])


@dataclass(frozen=True)
class Counted:
    """What of the annotated text was looked at.

    Attributes:
        tokens, words, sentences: with at least a part in the windows (under `continuation`, in their prompts).
        cut_sentences: of them, only a part is there.
        long_sentences: longer than a window; they were skipped.
        tokens_of_two_words: share of the tokens that touch two words or more; split_words: share of the words that are several tokens.
    """

    tokens: int
    words: int
    sentences: int
    cut_sentences: int
    long_sentences: int
    tokens_of_two_words: float
    split_words: float


def check_annotated(setting: Setting) -> None:
    """Raises ConfigError where the dataset has no annotation."""
    if not setting.annotated:
        raise ConfigError(
            "enabled needs annotation, and this dataset has none: take dataset=gum, dataset=ud-ewt, dataset=ud with a treebank of your own, or "
            "dataset=wikitext103-tagged, whose tags are not gold."
        )


def decided_tokens(bench: Bench) -> int:
    """Of each window, the tokens that modules may decide about with all that they know: all, or the prompt's."""
    return bench.protocol.prompt_tokens if bench.protocol.name == "continuation" else bench.protocol.window_tokens


def token_frame(bench: Bench, windows: int | None = None) -> tuple[pd.DataFrame, Counted]:
    """One row a token that belongs to a word, in order of windows and slots; of the first `windows`, or of all.

    Columns: `window`, `slot`, `token_id`, `word` and `sentence` (numbers in the text), `piece` and `pieces` (number of the token in its
    word, and how many that has), `occurrences` (of the token in the whole text), `tag`, `class`, `paper_class`; of the smallest constituent that
    holds its word and the next one, `joint_label` and `joint_words` (0: there is none).

    Raises:
        ConfigError: windows without annotation.
    """
    from quicksilver.data.annotation import classes

    annotated = bench.windows.annotated
    if annotated is None:
        raise ConfigError("these windows have no gold annotation: take dataset=gum, dataset=ud-ewt or dataset=ud.")
    note, ids = annotated.annotation, bench.windows.ids[:windows].numpy()
    width = decided_tokens(bench)
    window, slot = np.indices((len(ids), width))
    word = annotated.word[:windows, :width]
    sentence = np.where(word >= 0, note.sentence[word], -1)
    length = annotated.sentence_tokens[:windows, :width]
    belongs, long = word >= 0, length > bench.protocol.window_tokens
    kept = belongs & ~long
    frame = pd.DataFrame(
        {
            "window": window[kept], "slot": slot[kept], "token_id": ids[:, :width][kept], "word": word[kept], "sentence": sentence[kept],
            "piece": annotated.piece[:windows, :width][kept], "pieces": annotated.pieces[:windows, :width][kept],
            "occurrences": annotated.occurrences[:windows, :width][kept], "tag": note.tag[word[kept]],
            "class": classes(note)[word[kept]], "paper_class": classes(note, "paper")[word[kept]],
            "joint_label": note.joint_label[word[kept]], "joint_words": note.joint_words[word[kept]],
        }
    )  # fmt: skip
    there = frame.groupby("sentence").size()
    whole = pd.Series(length[kept], index=sentence[kept]).groupby(level=0).first()
    first = frame[frame["piece"] == 0]
    counted = Counted(
        len(frame), frame["word"].nunique(), len(there), int((there < whole).sum()), len(np.unique(sentence[belongs & long])),
        float((annotated.touched[:windows, :width][kept] > 1).mean()), float((first["pieces"] > 1).mean()),
    )  # fmt: skip
    return frame, counted


def strata(tokens: pd.DataFrame) -> dict[str, np.ndarray]:
    """By name of a null, the stratum of every row of `token_frame`, (n,) int: values are dealt anew within it."""
    frequency = quantile_bins(np.log(tokens["occurrences"].to_numpy()), FREQUENCY_BINS)
    position = np.searchsorted(_POSITION_EDGES, tokens["slot"].to_numpy(), side="right")
    piece, pieces = tokens["piece"].to_numpy(), tokens["pieces"].to_numpy()
    start = np.where(pieces == 1, 0, np.where(piece == 0, 1, 2))  # a whole word, the first of several, a later one
    return {
        "random": np.zeros(len(tokens), dtype=np.int64),
        "frequency": frequency,
        "position": position,
        "word start": start,
        "frequency × position": crossed(frequency, position),
        "token": tokens["token_id"].to_numpy().astype(np.int64),
    }


def covariates(tokens: pd.DataFrame) -> dict[str, np.ndarray]:
    """What a model may explain a token by, in the order in which it is added: columns (n,) or (n, k) by name."""
    groups = strata(tokens)
    log_slot = np.log1p(tokens["slot"].to_numpy())
    log_count = np.log(tokens["occurrences"].to_numpy())
    return {
        "position": np.column_stack([log_slot, log_slot**2, indicators(groups["position"])]),
        "log frequency": np.column_stack([log_count, log_count**2, log_count**3]),
        "word start": indicators(groups["word start"]),
        "class": indicators(tokens["class"].to_numpy()),
    }
