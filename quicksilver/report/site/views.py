"""What pages show of records, as small data: what happened to their tokens and texts, and the settings that a person can move through.

No model is asked for anything, and nothing is interpolated.
"""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from quicksilver.measure.audit import AuditResult
from quicksilver.measure.generation import GREEDY, SAMPLED, TEXTS
from quicksilver.measure.measurement import encoded
from quicksilver.measure.words import WORDS
from quicksilver.records.record import Record
from quicksilver.records.window_tokens import window_tokens
from quicksilver.report.site.collection import NamedRecord, varied
from quicksilver.report.sweeps import front
from quicksilver.report.table import number, numbers, signed, speedup_cell, without_folders
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

    Each has `name`, `window` (its number; absent where a text was looked into), `texts` (tokens; None with `no_texts` saying why), `states` and
    `bits` (a string of L characters a token, coded as `coded` does; `bits` None where none was set), `fusions` ([token, carrier, layer, weight or
    None]), `merges` ([layer, slot, carrier]), `evictions` ([layer, slots]), `scored` (first scored token), `prompt` (whether what comes before is
    a prompt), `signals` (name to unit and values by token and layer), `nats` (by token, run and dense) and `words` (see `_words`). Layers count
    from 1.
    Raises ConfigError: trace or signals are damaged."""
    inside = [place for place in record.texts_with_signals if not record.texts[place].name.startswith("window")]
    windows = [place for place in record.texts_with_signals if place not in inside]
    # Signals of further windows would only be more of the same.
    texts = [_from_signals(record, place) for place in sorted((*inside, *windows[:1]))]
    if record.trace_path is None or record.dense_fingerprint is None:
        return texts
    trace = Trace.load(record.trace_path)
    prompt = record.protocol.name == "continuation"
    frame = record.windows
    harm = (frame["nll_nats"] - frame["dense_nll_nats"]).set_axis(frame["window"]).sort_values(kind="stable")
    places = {len(harm) - 1: "harmed most", len(harm) // 2: "in the middle"}
    chosen = {int(harm.index[at]): f"{why}: {signed(float(harm.iloc[at]))} nats" for at, why in places.items()}
    for window, why in chosen.items():
        try:
            words: dict[str, Any] = {"texts": readable(window_tokens(record, window))}
        except (QuickSilverError, OSError) as error:
            words = {"texts": None, "no_texts": f"this text is not on the machine that made the report. {error}"}
        view = {"name": f"window {window}, {why}", "window": window, "prompt": prompt, "signals": {}, "nats": None}
        view |= {"scored": record.protocol.prompt_tokens if prompt else 1, "words": _words(record, window)}
        texts.append(view | words | _from_trace(trace, window))
    return texts


def readable(texts: Iterable[str]) -> list[str]:
    """Texts with a dot for each piece of a character: a token may hold only some of its bytes."""
    return [text.replace("\ufffd", "·") for text in texts]


def _words(record: Record, window: int) -> dict[str, Any] | None:
    """Words and constituents of an annotated window, from the record of `measure=words`: None where there is none.

    By token, `classes` (a word class as `coded` does, "" of none), `word` (number of its word, -1 of none); by word, `sentence` (its number) and
    `joints` ([label, number of words] of the smallest constituent that holds it and the next word, [“”, 0] of none).
    """
    path = record.path / WORDS
    frame = pd.read_parquet(path) if path.is_file() else pd.DataFrame({"window": []})
    frame = frame[frame["window"] == window]
    if frame.empty:
        return None
    frame = frame.sort_values("slot")
    count = int(frame["slot"].max()) + 1
    number, first = np.unique(frame["word"], return_index=True)
    classes, word = np.full(count, "", dtype=object), np.full(count, -1)
    classes[frame["slot"]], word[frame["slot"]] = frame["class"], np.searchsorted(number, frame["word"])
    own = frame.iloc[first]
    joints = [[str(label), int(words)] for label, words in zip(own["joint_label"], own["joint_words"], strict=True)]
    return {"classes": coded(classes.tolist()), "word": word.tolist(), "sentence": own["sentence"].tolist(), "joints": joints}


# --- decisions ------------------------------------------------------------------------------------------------------------------
def _from_trace(trace: Trace, window: int) -> dict[str, Any]:
    """States, bits, fusions and merges of one window; its tokens are counted over the passes that processed it."""
    first = batch = 0
    passes: list[PassTrace] = []
    for one in trace.passes:
        if one.first_column == 0:  # a pass with nothing cached begins the next batch of windows
            first, batch = first + batch, one.valid.shape[0]
        if first <= window < first + batch:
            passes.append(one.row(window - first))
    if not passes:
        raise ConfigError(f"the trace has no window {window}: it has {first + batch} windows.")
    active, entry, fused, bits = (
        torch.cat([torch.stack([ask(one, layer)[0] for layer in range(trace.n_layers)]) for one in passes], dim=1).numpy()
        for ask in (PassTrace.active, PassTrace.kv_present, lambda one, layer: one.fused_layer < layer, PassTrace.bits)
    )

    def moved(steps: str) -> Iterator[tuple[PassTrace, Any, int, int]]:
        """Pass and step of each token that goes into another."""
        each = ((one, step, enumerate(step.into[0].tolist())) for one in passes for step in getattr(one, steps))
        return ((one, step, token, into) for one, step, tokens in each for token, into in tokens if token != into)

    return {
        "states": _letters(active, entry, fused),
        "bits": _digits(bits),
        "fusions": [
            [one.first_column + token, one.first_column + into, step.layer + 1, round(float(step.weight[0, token]), 3)]
            for one, step, token, into in moved("fusions")
        ],
        "merges": [[step.layer + 1, slot, into] for _, step, slot, into in moved("merges")],
        "evictions": [[gone.layer + 1, gone.gone[0].nonzero()[:, 0].tolist()] for one in passes for gone in one.evictions],
    }


def coded(strings: list[str]) -> dict[str, list[Any]]:
    """Strings that repeat: the distinct ones, and the place of each among them. Most tokens share a fate."""
    places, distinct = pd.factorize(np.array(strings, dtype=object))
    return {"distinct": distinct.tolist(), "places": places.tolist()}


def _letters(active: np.ndarray, entry: np.ndarray, fused: np.ndarray) -> dict[str, list[Any]]:
    """(L, N) booleans -> a string of L letters a token."""
    left_out = np.cumsum(~active & ~fused, axis=0) > 0
    first, again = np.where(entry, COMPUTED, WITHOUT), np.where(entry, RESUMED, NO_ENTRY)
    letters = np.where(active, np.where(left_out, again, first), np.where(entry, KEPT, HALTED))
    return coded(["".join(column) for column in np.where(fused, FUSED, letters).T])


def _digits(bits: np.ndarray) -> dict[str, list[Any]] | None:
    """(L, N) widths -> a string of L digits a token, 0 for 16; None where all are untouched."""
    return None if (bits == 16).all() else coded(["".join(str(width % 16) for width in column) for column in bits.T.tolist()])


# --- signals --------------------------------------------------------------------------------------------------------------------
def _from_signals(record: Record, place: int) -> dict[str, Any]:
    """One text that the run looked into."""
    frame, text = record.signals(place), record.texts[place]
    count = len(text.tokens)

    def rows(column: str) -> np.ndarray:
        """(L, N) without the row before the first layer."""
        return frame[column].to_numpy().reshape(-1, count)[1:]

    view: dict[str, Any] = dict(name=text.name, texts=readable(text.tokens), prompt=False, scored=1, merges=[], evictions=[])
    view |= dict(words=None, bits=None, fusions=[], states=coded([COMPUTED * (len(frame) // count - 1)] * count))
    if "carrier" in frame:
        carrier = rows("carrier")
        fused = carrier != np.arange(count)
        view |= {"states": _letters(rows("active"), rows("kv"), fused), "bits": _digits(rows("bits"))}
        # The first layer without the token comes after the one that fused it.
        moved = ((int(token), int(fused[:, token].argmax())) for token in fused.any(axis=0).nonzero()[0])
        view["fusions"] = [[token, int(carrier[layer, token]), layer, None] for token, layer in moved]
    shown = {name: (unit, rows(column)) for column, name, unit in SIGNALS if column in frame}
    view["signals"] = {
        name: {"unit": unit, "values": [[rounded(value, 3) for value in token] for token in values.T.tolist()]}
        for name, (unit, values) in shown.items()
        if np.isfinite(values).any()
    }
    nats = {title: column for title, column in (("run", "nll_nats"), ("dense", "dense_nll_nats")) if column in frame}
    return view | {"nats": {title: [rounded(one, 3) for one in rows(column)[0].tolist()] for title, column in nats.items()}}


def rounded(value: float | None, digits: int) -> float | None:
    """To so many significant digits; None for what is no number."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.{digits}g}")


# --- generated texts -----------------------------------------------------------------------------------------------------------
SHOWN = 8  # prompts of each way of decoding; all are in generation.parquet
_END_OF_PROMPT = 60  # words of a prompt that are shown
_WORD = re.compile(r"\s*\S+|\s+\Z")

Piece = tuple[str, bool]  # text, and whether the other side has something else there


def generated_texts(record: Record) -> dict[str, list[dict[str, Any]]]:
    """Prompts with both continuations by way of decoding; nothing of a record that generated no text.

    Each has `prompt` (its number), `text` (the end of it, `cut` saying whether there is more before), `run` and `dense` (the continuations in
    pieces), `same_tokens` (before the first that differs), `agreement` (share of places with the same token, 0 to 1), `nats` and `dense_nats`.
    Raises ConfigError: the file is damaged."""
    if TEXTS not in record.files:
        return {}
    found: dict[str, list[dict[str, Any]]] = {GREEDY: [], SAMPLED: []}
    try:
        frame = pd.read_parquet(record.path / TEXTS)
        for way, samples in found.items():
            for row in frame[frame["way"] == way].head(SHOWN).to_dict("records"):
                words = _WORD.findall(row["prompt_text"])
                run, dense = marked(*readable([row["text"], row["dense_text"]]))
                samples.append({name: row[name] for name in ("prompt", "same_tokens", "agreement", "nats", "dense_nats")})
                samples[-1] |= {"text": "".join(words[-_END_OF_PROMPT:]).lstrip(), "cut": len(words) > _END_OF_PROMPT}
                samples[-1] |= {"run": run, "dense": dense}
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{TEXTS} of {record.path} cannot be read: {error}.") from error
    return found


def marked(one: str, two: str) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """Both texts in pieces, alternately as in the other and not; words are compared with the white space before them."""
    words, others = _WORD.findall(one), _WORD.findall(two)
    left: list[Piece] = []
    right: list[Piece] = []
    for kind, a, b, c, d in SequenceMatcher(None, words, others, autojunk=False).get_opcodes():
        for side, some in ((left, words[a:b]), (right, others[c:d])):
            side += [("".join(some), kind != "equal")] if some else []
    return tuple(left), tuple(right)


# --- from record to record: those that differ in the options of their modules only ------------------------------------------------
_INTERVALS = ("delta_ppl_pct", "null_delta_ppl_pct", "versus_null_ppl")
_NUMBERS = (
    *("executed_flops_saved_pct", "nominal_flops_saved_pct", "paper_flops_saved_pct", "prompt_executed_flops_saved_pct"),
    *("kv_bytes_saved_pct", "speedup_pct", "noise_floor_pct", "prompt_speedup_pct", "prompt_noise_floor_pct"),
)
_MIN_RECORDS = 2
_NONE = "none"
_SCALE = 3  # fewer numbers are no scale
_Compared = tuple[Record, NamedRecord]


def sweeps(panels: Iterable[tuple[str, Sequence[NamedRecord]]]) -> list[dict[str, Any]]:
    """What can be moved through: of every panel the records of the same modules on the same model, text, protocol and execution.

    Args:
        panels: a title, and records with their rows; those without intervals (too few windows) are left out. A set of records that an earlier
            panel had is not shown again.

    Returns:
        per sweep: `title`, `where` (modules, model, text, protocol), `options` (each with its `values` in order, and whether that is an order of
        numbers, `ordered`) and `records`, each with its page of tokens (`trace`), the place of its value in every option, its numbers and their intervals. Options that always
        change together are one option. What has most to move through comes first: a scale of at least three numbers, then the widest range of savings.
    """
    found, seen = [], set()
    for title, runs in panels:
        groups: dict[tuple[str, ...], list[_Compared]] = {}
        for run in runs:
            if (record := run.record) is not None and "delta_ppl" in run.row:
                modules = {name: entry["_target_"] for name, entry in record.config["modules"].items()}
                said = (json.dumps(one, sort_keys=True) for one in (modules, {**encoded(record.protocol), "batch_size": None}))
                model = record.model
                same = (record.execution, model.name, model.weights_digest, model.dtype, record.data.token_digest)
                groups.setdefault((*said, *same), []).append((record, run))
        for members in groups.values():
            names = frozenset(record.fingerprint for record, _ in members)
            if names not in seen and (sweep := _sweep(title, members)) is not None:
                seen.add(names)
                found.append(sweep)
    return sorted(found, key=_interest)


def _interest(sweep: Mapping[str, Any]) -> tuple[bool, float]:
    """Key that puts first what a person can learn from: several numbers of one option with different outcomes, then a wide range of savings."""
    scale = any(option["ordered"] and len(option["values"]) >= _SCALE for option in sweep["options"])
    outcomes = {(record["executed_flops_saved_pct"], record["delta_ppl_pct"][0]) for record in sweep["records"]}
    saved = [one for one, _ in outcomes if one is not None] or [0.0]
    return not (scale and len(outcomes) >= _SCALE), min(saved) - max(saved)


def _sweep(title: str, members: Sequence[_Compared]) -> dict[str, Any] | None:
    distinct: dict[str, _Compared] = {}
    # Two records of one setting differ in how much was measured: the timed one says more.
    for record, run in sorted(members, key=lambda one: "speedup_pct" not in one[1].row):
        distinct.setdefault(json.dumps(record.config["modules"], sort_keys=True), (record, run))
    rows = sorted(distinct.values(), key=lambda one: one[0].fingerprint)
    if len({(run.row.get("executed_flops_saved_pct"), run.row["delta_ppl_pct"]) for _, run in rows}) < _MIN_RECORDS:
        return None  # one outcome, whatever is set: there is nothing to move through
    options = _options([settings(record) for record, _ in rows])
    first = rows[0][0]
    return {
        "title": title,
        "where": ", ".join((" + ".join(first.modules), first.model.name, first.data.name, first.protocol.name, first.execution)),
        "options": [{key: value for key, value in option.items() if key != "places"} for option in options],
        "records": [
            {"fingerprint": run.fingerprint, "trace": run.trace, "at": [option["places"][place] for option in options]}
            | {name: rounded(number(run.row, name), 5) for name in _NUMBERS}
            | {name: [rounded(value, 5) for value in numbers(run.row, name)] for name in _INTERVALS}
            for place, (_, run) in enumerate(rows)
        ],
    }


def settings(record: Record) -> dict[str, str]:
    """The options of a record's modules, `halting.tau_drift`, in words."""
    options = ((module, name, value) for module, entry in record.config["modules"].items() for name, value in entry.items())
    return {f"{module}.{name}": _named(value) for module, name, value in options if name != "_target_"}


def _named(value: Any) -> str:
    """A value as words: `off`, `0.27 to 0.8`, `and, to, by`; numbers and text as they are."""
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_named(one)}" for key, one in value.items()) or _NONE
    if isinstance(value, list):
        numbers = len(value) == 2 and all(isinstance(one, int | float) and not isinstance(one, bool) for one in value)
        return (" to " if numbers else ", ").join(map(_named, value)) or _NONE
    return f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _options(rows: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """What differs between `rows`: each option with its sorted values and the place of every row among them."""
    rows = [defaultdict(lambda: _NONE, row) for row in rows]
    together: dict[tuple[int, ...], list[str]] = {}
    for name in sorted({name for row in rows for name in row}):
        values = [row[name] for row in rows]
        seen = list(dict.fromkeys(values))
        if len(seen) > 1:
            together.setdefault(tuple(map(seen.index, values)), []).append(name)
    options = []
    for members in together.values():
        # The member that reads as numbers gives the order; the others follow it.
        name = min(members, key=lambda one: sum(_order(row[one])[0] for row in rows))
        values = sorted({row[name] for row in rows}, key=_order)
        first = [next(row for row in rows if row[name] == value) for value in values]
        also = [{"name": other, "values": [row[other] for row in first]} for other in members if other != name]
        option = {"name": name, "also": also, "values": values, "places": [values.index(row[name]) for row in rows]}
        options.append(option | {"ordered": all(_order(value)[0] == 0 for value in values)})
    return sorted(options, key=lambda option: (-len(option["values"]), option["name"]))


def _order(value: str) -> tuple[int, float, str]:
    """Numbers (`0.3`, `p25`) before words, in their order."""
    match = re.fullmatch(r"p?(-?\d+(?:\.\d+)?(?:e-?\d+)?)", value)
    return (0, float(match[1]), value) if match else (1, 0.0, value)


# --- the leaderboard: records of any method on the same model and text, their work against their KL to dense ----------------------
FAR = "far-recall"  # the text whose answers depend on distant context
_OWN = ("far-",)  # texts made for that question: no board of their own
SAVED, COST = "prompt_executed_flops_saved_pct", "kl_nats"
FRONT_WINDOWS = 32  # fewer are too few to say that a method beats another
ON_FRONT, BEATEN, UNSEEN = "on the front", "beaten", "not compared"
_LEAST_PCT = 0.5  # of the prompt's work: what saves less decided hardly anything
_MOST_CHARACTERS = 90  # of the options of one row; its page has all of them


class Entry(NamedTuple):
    """A record on a board: its modules, the options in which it differs from others of the same, whether another record beats it there, and the
    record of the same settings on `FAR`, if any."""

    run: NamedRecord
    method: str
    options: str
    place: str
    far: NamedRecord | None

    @property
    def time(self) -> str:
        """The prompt's time saved, in percent."""
        return speedup_cell(self.run.row, "prompt_speedup_pct")[0]


class Board(NamedTuple):
    """The records of one model, text and prompt length, the least KL first, and what its chart shows of them. beaten: how many settings are left out,
    since another of the same method beats them; beaten_timed: so many of these were timed."""

    model: str
    text: str
    prompt: str
    entries: list[Entry]
    beaten: int
    beaten_timed: int

    @property
    def chart(self) -> dict[str, Any]:
        """Columns for the chart: the method, percent of the prompt's work saved, KL × 100, what the legend calls it."""
        return {
            "method": [f"{one.method} {one.options}".strip() for one in self.entries],
            "saved": [round(one.run.row[SAVED], 3) for one in self.entries],
            "kl": [round(100 * one.run.row[COST], 5) for one in self.entries],
            "place": [one.place for one in self.entries],
        }


def boards(runs: Iterable[NamedRecord]) -> list[Board]:
    """A board for each model, number format, text and length of prompt and window, the fullest first.

    A record is on it if it scores test text under protocol continuation without look-ahead, executes what it says (`compact`), saves half a percent of
    the prompt's work, and has its KL to dense. Of one method those settings are shown that no other of its settings beats; of two records with the same settings the
    timed one, then the one of more windows.
    """
    far: dict[str, NamedRecord] = {}
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run in runs:
        if (record := run.record) is None or not _counts(record, run.row):
            continue
        setting, text = _setting(record), record.data.name
        if text == FAR:
            far[setting] = max(far.get(setting, run), run, key=_windows)
        elif not text.startswith(_OWN):
            options = settings(record)
            if sources := "".join(record.identity.sources.values()):  # the user's files: an edited method is another one
                options |= {"code": hashlib.sha256(sources.encode()).hexdigest()[:6]}
            method = " + ".join(name.replace("quicksilver", "predicted_kv") for name in record.modules)
            entry = dict(run=run, method=method, options=options, setting=setting, saved=run.row[SAVED], cost=run.row[COST])
            made_by, protocol = record.model, record.protocol
            prompt = f"prompts of {protocol.prompt_tokens} tokens, then {protocol.window_tokens - protocol.prompt_tokens} scored"
            prompt += "" if made_by.dtype == "float32" else f", {made_by.dtype}"
            key = (str(without_folders(made_by.name)), text, prompt, made_by.weights_digest, record.data.digest)
            groups.setdefault(key, []).append(entry)
    found = []
    for (model, text, prompt, *_), members in groups.items():
        timed = sorted(members, key=lambda one: ("prompt_speedup_pct" in one["run"].row, one["run"].record.data.windows))
        frame = pd.DataFrame({one["setting"]: one for one in timed}.values())
        own = pd.concat([front(mine["saved"], mine["cost"]) for _, mine in frame.groupby("method")]).sort_index()
        beaten = [one.row for one in frame[~own]["run"]]
        frame = frame[own].sort_values(["cost", "saved"], ascending=[True, False], kind="stable")
        enough = frame["run"].map(_windows) >= FRONT_WINDOWS
        compared = enough & (enough.sum() > 1)
        best = front(frame["saved"].where(compared), frame["cost"])
        frame["place"] = [ON_FRONT if at else BEATEN if seen else UNSEEN for at, seen in zip(best, compared, strict=True)]
        # The options that differ, those first that take the most values: a row has room for a few.
        keys = {
            method: sorted(varied(mine["options"]), key=lambda key: -len({one.get(key) for one in mine["options"]}))
            for method, mine in frame.groupby("method")
        }
        entries = []
        for one in frame.to_dict("records"):
            classes = (str(module.get("_target_", "")) for module in one["run"].record.config["modules"].values())
            ours = all(
                path.startswith("quicksilver.") for path in classes
            )  # nobody knows another's defaults: all options are said
            said_of = keys[one["method"]] or ([] if ours else one["options"])
            own_options = ((key.rpartition(".")[2], one["options"].get(key)) for key in said_of)
            said = ", ".join(f"{key}={value}" for key, value in own_options if value is not None)
            said = str(without_folders(textwrap.shorten(said, _MOST_CHARACTERS, placeholder=" …")))
            entries.append(Entry(one["run"], one["method"], said, one["place"], far.get(one["setting"])))
        found.append(Board(model, text, prompt, entries, len(beaten), sum("prompt_speedup_pct" in row for row in beaten)))
    return sorted(found, key=lambda board: (-len(board.entries), board.model, board.text, board.prompt))


def _counts(record: Record, row: Mapping[str, Any]) -> bool:
    if record.protocol.name != "continuation" or record.execution != "compact" or record.lookahead or record.data.part != "test":
        return False
    audit = record.found("audit", AuditResult)
    return row.get(COST) is not None and (row.get(SAVED) or 0.0) >= _LEAST_PCT and not (audit is not None and audit.leaks)


def _windows(run: NamedRecord) -> int:
    return 0 if run.record is None else run.record.data.windows


def _setting(record: Record) -> str:
    """Model, modules with all options and the user's code, and lengths of prompt and window: all but the text."""
    model, protocol = record.model, {**encoded(record.protocol), "batch_size": None}
    own = record.config["modules"], dict(record.identity.sources)
    return json.dumps([model.weights_digest, model.dtype, protocol, *own], sort_keys=True)


# --- charts, drawn by Bokeh in the browser (templates/charts.js) -----------------------------------------------------------------
def bokeh_script() -> bytes:
    """BokehJS itself with its drawing functions, one file for the whole site."""
    folder = files("bokeh").joinpath("server", "static", "js")
    return b"\n".join(folder.joinpath(f"bokeh{part}.min.js").read_bytes() for part in ("", "-api"))


def windows_chart(record: Record) -> dict[str, Any]:
    """By window: nats a token more than dense, of the run and of its null; of a dense record, nats a token."""
    frame = record.windows
    columns = {"run": "nll_nats", "null": "null_nll_nats"} if "dense_nll_nats" in frame else {"dense": "nll_nats"}
    base = frame.get("dense_nll_nats", 0.0)
    series = {name: ((frame[column] - base) / frame["tokens"]).round(5) for name, column in columns.items() if column in frame}
    return {"window": frame["window"].tolist(), "series": {name: values.tolist() for name, values in series.items()}}
