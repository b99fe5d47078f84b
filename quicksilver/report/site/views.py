"""What happened to the tokens of one record, as small data that a page can show. No model is asked for anything.

Two sources: the trace has the decisions about every window; signals, where the run looked inside some texts, have entropy and drift
as well. Both become the same: a letter for each token and layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import pandas as pd
import torch

from quicksilver.measure.generation import GREEDY, SAMPLED, TEXTS
from quicksilver.measure.word_classes import WORDS
from quicksilver.records.record import Record
from quicksilver.records.window_tokens import window_tokens
from quicksilver.report.table import signed
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.trace import PassTrace, Trace

# One letter a state: Computed (Without an entry), Halted (Kept entry), Resumed (No entry), Fused into a neighbour.
COMPUTED, WITHOUT, HALTED, KEPT, RESUMED, NO_ENTRY, FUSED = "CWHKRNF"
# Shown of a record's signals where they are there: column, name, unit.
SIGNALS = (
    ("entropy_nats", "entropy", "nats"),
    ("drift_relative", "relative drift", "share of the state's norm"),
    ("sdi_l2", "distance to the dense state", "L2"),
)


def token_views(record: Record) -> list[dict[str, Any]]:
    """Texts of a record worth looking at: those that it looked into, then the window that the run harmed most and the one in the middle.

    Each has `name`, `window` (its number; absent where a text was looked into), `texts` (tokens; None with `no_texts` saying why), `states` and `bits` (a string of L characters a token, coded as
    `coded` does; `bits` None where none was set), `fusions` ([token, carrier, layer, weight or None]), `merges` ([layer, slot, carrier]), `evictions`
    ([layer, slots]), `scored` (first scored token), `prompt` (whether what comes before is a prompt), `signals` (name to unit and
    values by token and layer) and `nats` (by token, run and dense). Layers count from 1. A window
    of annotated text has `words`, as `_words` says; other texts have None.

    Raises:
        ConfigError: trace or signals are damaged.
    """
    texts = [_from_signals(record, number) for number in _looked_into(record)]
    if record.trace_path is None or record.dense_fingerprint is None:
        return texts
    trace = Trace.load(record.trace_path)
    prompt = record.protocol.name == "continuation"
    for window, why in _chosen(record):
        view = _from_trace(trace, window)
        try:
            words: dict[str, Any] = {"texts": window_tokens(record, window)}
        except (QuickSilverError, OSError) as error:
            words = {"texts": None, "no_texts": str(error)}
        scored = record.protocol.prompt_tokens if prompt else 1
        named = {"name": f"window {window}, {why}", "window": window, "prompt": prompt, "scored": scored}
        texts.append({**named, "signals": {}, "nats": None, "words": _words(record, window), **words, **view})
    return texts


def _words(record: Record, window: int) -> dict[str, Any] | None:
    """Words and constituents of an annotated window, from the record of `measure=words`: None where there is none.

    By token, `classes` (a word class as `coded` does, "" of none), `word` (number of its word, -1 of none); by word, `sentence` (its number) and
    `joints` ([label, number of words] of the smallest constituent that holds it and the next word, [“”, 0] of none).
    """
    path = record.path / WORDS
    if not path.is_file():
        return None
    frame = pd.read_parquet(path)
    frame = frame[frame["window"] == window].sort_values("slot")
    if frame.empty:
        return None
    count = int(frame["slot"].max()) + 1
    number, first = np.unique(frame["word"], return_index=True)
    classes, word = np.full(count, "", dtype=object), np.full(count, -1)
    slots = frame["slot"].to_numpy()
    classes[slots], word[slots] = frame["class"].to_numpy(), np.searchsorted(number, frame["word"])
    own = frame.iloc[first]
    joints = [[str(label), int(words)] for label, words in zip(own["joint_label"], own["joint_words"], strict=True)]
    return {"classes": coded(classes.tolist()), "word": word.tolist(), "sentence": own["sentence"].tolist(), "joints": joints}


def _looked_into(record: Record) -> Iterator[int]:
    """The sentences that the run looked into, and the first window: signals of further ones would only be more of the same."""
    window_seen = False
    for number in record.texts_with_signals:
        text = record.texts[number]
        is_window = text.name.startswith("window")
        if not (is_window and window_seen):
            yield number
        window_seen |= is_window


def _chosen(record: Record) -> Iterator[tuple[int, str]]:
    """The window that the run harmed most and the one in the middle, by the difference of nats to dense inference."""
    frame = record.windows
    harm = (frame["nll_nats"] - frame["dense_nll_nats"]).sort_values(kind="stable")
    places = {"harmed most": len(harm) - 1, "in the middle": len(harm) // 2}
    taken = set()
    for why, place in places.items():
        if place not in taken:
            taken.add(place)
            yield int(frame["window"][harm.index[place]]), f"{why}: {signed(float(harm.iloc[place]))} nats"


# --- decisions ------------------------------------------------------------------------------------------------------------------


def _from_trace(trace: Trace, window: int) -> dict[str, Any]:
    """States, bits, fusions and merges of one window; its tokens are counted over the passes that processed it."""
    passes = [one.row(row) for one, row in _passes_of(trace, window)]
    active, entry, fused, bits = (
        torch.cat([torch.stack([ask(one, layer)[0] for layer in range(trace.n_layers)]) for one in passes], dim=1).numpy()
        for ask in (PassTrace.active, PassTrace.kv_present, lambda one, layer: one.fused_layer < layer, PassTrace.bits)
    )
    return {
        "states": _letters(active, entry, fused),
        "bits": _digits(bits),
        "fusions": [entry for one in passes for entry in _fusions(one)],
        "merges": [entry for one in passes for entry in _merges(one)],
        "evictions": [[gone.layer + 1, gone.gone[0].nonzero()[:, 0].tolist()] for one in passes for gone in one.evictions],
    }


def _passes_of(trace: Trace, window: int) -> list[tuple[PassTrace, int]]:
    """The passes that processed a window and its row in them: a pass with nothing cached begins the next batch of windows."""
    first = batch = 0
    found: list[tuple[PassTrace, int]] = []
    for one in trace.passes:
        if one.first_column == 0:
            first, batch = first + batch, one.valid.shape[0]
        if first <= window < first + batch:
            found.append((one, window - first))
    if not found:
        raise ConfigError(f"the trace has no window {window}: it has {first + batch} windows.")
    return found


def coded(strings: list[str]) -> dict[str, list[Any]]:
    """Strings that repeat: the distinct ones, and the place of each among them. Most tokens share a fate."""
    distinct = list(dict.fromkeys(strings))
    places = {string: place for place, string in enumerate(distinct)}
    return {"distinct": distinct, "places": [places[string] for string in strings]}


def _letters(active: np.ndarray, entry: np.ndarray, fused: np.ndarray) -> dict[str, list[Any]]:
    """(L, N) booleans -> a string of L letters a token."""
    left_out = np.cumsum(~active & ~fused, axis=0) > 0
    first, again = np.where(entry, COMPUTED, WITHOUT), np.where(entry, RESUMED, NO_ENTRY)
    letters = np.where(active, np.where(left_out, again, first), np.where(entry, KEPT, HALTED))
    return coded(["".join(column) for column in np.where(fused, FUSED, letters).T])


def _digits(bits: np.ndarray) -> dict[str, list[Any]] | None:
    """(L, N) widths -> a string of L digits a token, 0 for 16; None where all are untouched."""
    if (bits == 16).all():
        return None
    return coded(["".join(str(width % 16) for width in column) for column in bits.T.tolist()])


def _fusions(one: PassTrace) -> Iterator[list[Any]]:
    for fusion in one.fusions:
        into = fusion.into[0].tolist()
        for token, carrier in enumerate(into):
            if token != carrier:
                weight = round(float(fusion.weight[0, token]), 3)
                yield [one.first_column + token, one.first_column + carrier, fusion.layer + 1, weight]


def _merges(one: PassTrace) -> Iterator[list[int]]:
    for merge in one.merges:
        for slot, carrier in enumerate(merge.into[0].tolist()):
            if slot != carrier:
                yield [merge.layer + 1, slot, carrier]


# --- signals --------------------------------------------------------------------------------------------------------------------


def _from_signals(record: Record, number: int) -> dict[str, Any]:
    """One text that the run looked into."""
    frame = record.signals(number)
    count = len(record.texts[number].tokens)

    def rows(column: str) -> np.ndarray:
        """(L, N) without the row before the first layer."""
        return frame[column].to_numpy().reshape(-1, count)[1:]

    view: dict[str, Any] = {"bits": None, "fusions": []}
    if "carrier" in frame:
        carrier = rows("carrier")
        fused = carrier != np.arange(count)
        view["states"] = _letters(rows("active"), rows("kv"), fused)
        view["bits"] = _digits(rows("bits"))
        # The first layer without the token comes after the one that fused it.
        moved = ((int(token), int(fused[:, token].argmax())) for token in fused.any(axis=0).nonzero()[0])
        view["fusions"] = [[token, int(carrier[layer, token]), layer, None] for token, layer in moved]
    else:
        layers = len(frame) // count - 1
        view["states"] = coded([COMPUTED * layers] * count)
    signals = {
        name: {"unit": unit, "values": [[_short(value) for value in token] for token in rows(column).T.tolist()]}
        for column, name, unit in SIGNALS
        if column in frame and np.isfinite(rows(column)).any()
    }
    nats = {
        title: [_short(value) for value in rows(column)[0].tolist()]
        for title, column in (("run", "nll_nats"), ("dense", "dense_nll_nats"))
        if column in frame
    }
    text = record.texts[number]
    whole = {"name": text.name, "texts": text.tokens, "prompt": False, "scored": 1, "merges": [], "evictions": [], "words": None}
    return {**whole, "signals": signals, "nats": nats, **view}


def _short(value: float) -> float | None:
    return float(f"{value:.3g}") if np.isfinite(value) else None


# --- generated texts -----------------------------------------------------------------------------------------------------------


SHOWN = 8  # prompts of each way of decoding; all are in generation.parquet
_END_OF_PROMPT = 60  # words of a prompt that are shown
_WORD = re.compile(r"\s*\S+|\s+\Z")

Piece = tuple[str, bool]  # text, and whether the other side has something else there


def generated_texts(record: Record) -> dict[str, list[dict[str, Any]]]:
    """Prompts with both continuations by way of decoding; nothing of a record that generated no text.

    Each has `prompt` (its number), `text` (the end of it, `cut` saying whether there is more before), `run` and `dense` (the continuations in
    pieces), `same_tokens` (before the first that differs), `agreement` (share of places with the same token, 0 to 1), `nats` and `dense_nats`.

    Raises:
        ConfigError: the file is damaged.
    """
    if TEXTS not in record.files:
        return {}
    try:
        frame = pd.read_parquet(record.path / TEXTS)
        return {way: [_sample(row) for _, row in frame[frame["way"] == way].head(SHOWN).iterrows()] for way in (GREEDY, SAMPLED)}
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{TEXTS} of {record.path} cannot be read: {error}.") from error


def _sample(row: pd.Series) -> dict[str, Any]:
    words = _WORD.findall(row["prompt_text"])
    run, dense = marked(row["text"], row["dense_text"])
    return {
        **{name: int(row[name]) for name in ("prompt", "same_tokens")},
        **{name: float(row[name]) for name in ("agreement", "nats", "dense_nats")},
        **{"text": "".join(words[-_END_OF_PROMPT:]).lstrip(), "cut": len(words) > _END_OF_PROMPT, "run": run, "dense": dense},
    }


def marked(one: str, two: str) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """Both texts in pieces, alternately as in the other and not; words are compared with the white space before them."""
    words, others = _WORD.findall(one), _WORD.findall(two)
    left: list[Piece] = []
    right: list[Piece] = []
    for kind, a, b, c, d in SequenceMatcher(None, words, others, autojunk=False).get_opcodes():
        for side, some in ((left, words[a:b]), (right, others[c:d])):
            if some:
                side.append(("".join(some), kind != "equal"))
    return tuple(left), tuple(right)
