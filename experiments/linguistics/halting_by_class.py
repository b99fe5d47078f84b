"""Halting by part of speech on gold tags, beside what explains it without grammar: Tables 2, 8 and 12, over depth, and the signals behind it.

The paper prints the same numbers three times. Here they are one measurement: what is left of a class's rate beyond words of the same frequency,
position or spelling, and what a model of position and frequency explains before it is told the class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import NDArray

from quicksilver.measure.strata import against_null
from quicksilver.measure.words import SIGNALS_OF_WORDS, WORDS, Means, WordClassesResult, WordSignalsResult
from quicksilver.records.record import Record
from quicksilver.records.stats import MIN_WINDOWS, bootstrap
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, artefact
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate, reported
from quicksilver.report.figure import GREY, PALETTE, Figure, legend_below, panels, percent_of_shares, style
from quicksilver.report.table import ENDS, Column, Panel, Table, interval_columns, with_ends

from .. import drawing as draw
from . import fusion_and_constituents as runs

# class here -> what is printed, entry of reported_tasks.yaml
CLASSES: dict[str, tuple[str, str | None]] = {
    "determiner": ("Determiners (DT)", "table2.determiners"),
    "preposition": ("Prepositions (IN)", "table2.prepositions"),
    "conjunction": ("Conjunctions (CC)", "table2.conjunctions"),
    "pronoun": ("Pronouns (PRP, PRP$)", "table2.pronouns"),
    "auxiliary": ("Auxiliaries", "table2.auxiliaries"),
    "content": ("Content words", "table2.content_words"),
    "other": ("Others, marks", None),
    "all": ("All", None),
}
MATCHED = "frequency × position"
NULLS = {
    "random": "any token",
    "frequency": "as frequent",
    "position": "at the same place",
    "word start": "as whole a word",
    MATCHED: "as frequent, same place",
    "token": "the same token",
}
_DEPTHS = {25: 0.25, 50: 0.5, 75: 0.75}
# What the logistic model is told, from left to right.
_STEPS = {"position": "position", "frequency": "+ log frequency", "start": "+ word start", "class": "+ class"}


def result(record: Record) -> WordClassesResult:
    """What was measured."""
    return record.measured("word_classes", WordClassesResult)


# --- claims -----------------------------------------------------------------------------------------------------------------------
_EARLY = ("determiner", "preposition", "conjunction")
_OF_THE_PAPER = tuple(one for one, (_, claim) in CLASSES.items() if claim)
*_FUNCTION, _CONTENT = _OF_THE_PAPER
_COUNTED = np.array([reported()[claim].values["tokens"] for _, claim in CLASSES.values() if claim])  # (C,) by Table 12
_answered = partial(AnsweredBy, runs.HALTING, runs.MAIN)


def _answer(*names: str, note: str = "") -> AnsweredBy:
    """The lowest rate of these classes by the paper's tags, in percent, and how far it is from that of any tokens of the paper's classes."""

    def lowest(record: Record) -> Any:
        return min((result(record).of(name, "paper") for name in names), key=lambda one: one.halted.value)

    def beyond(record: Record) -> Estimate:
        tokens = pd.read_parquet(record.path / WORDS, columns=["paper_class", "halt_layer", "sentence"])
        tokens = tokens[tokens["paper_class"].isin(_OF_THE_PAPER)]
        halted, member = tokens["halt_layer"] <= result(record).layer, tokens["paper_class"] == lowest(record).name
        null = against_null(halted.to_numpy(), member.to_numpy(), np.zeros(len(tokens), int), tokens["sentence"].to_numpy())
        return Estimate.of(null.beyond, 100)

    said = "; ".join(filter(None, ("drift and entropy at p42, half of the depth", note)))
    return _answered(of_record=lambda record: Estimate.of(lowest(record).halted, 100), beyond_chance=beyond, note=said)


def _by_window(record: Record) -> NDArray[np.float64]:
    """(C, 2, W): by class of the paper and by its tags, window by window, the tokens and those of them that halted by half of the depth."""
    tokens = pd.read_parquet(record.path / WORDS, columns=["paper_class", "halt_layer", "window"])
    halted, classes = tokens["halt_layer"] <= result(record).layer, [tokens["paper_class"] == one for one in _OF_THE_PAPER]
    return np.array([[np.bincount(tokens["window"], weights=one) for one in (mine, mine & halted)] for mine in classes])


def _rates(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """(C, …): share of each class that halted; sums (C, 2, …, W) as `_by_window` has them."""
    tokens, halted = np.moveaxis(sums.sum(-1), 1, 0)
    return np.asarray(halted / np.maximum(tokens, 1))


def _halt_layers(record: Record, *kinds: list[str]) -> Estimate:
    """Mean layer of 30 after which the first kind of words halts, of those that do; less that of the second, if any."""
    tokens = pd.read_parquet(record.path / WORDS, columns=["paper_class", "halt_layer", "window"])
    sums = []
    for classes in kinds:
        halted = tokens["paper_class"].isin(classes) & (tokens["halt_layer"] < record.model.layers)
        layers = halted * tokens["halt_layer"] * 30 / record.model.layers
        sums += [np.bincount(tokens["window"], weights=one) for one in (halted, layers)]

    def layer(n: Any, layers: Any, *others: Any) -> Any:
        mean = layers.sum(-1) / n.sum(-1)
        return mean - layer(*others) if others else mean

    return Estimate.of(bootstrap(layer, *sums))


def _by_paper_counts(record: Record, of: Callable[[Any], Any]) -> Estimate:
    """`of` the halted tokens of each class, its rate times Table 12's count of it, as another text mixes them otherwise."""
    return Estimate.of(bootstrap(lambda drawn: of((_rates(drawn).T * _COUNTED).T), _by_window(record)))


def _share_of_halted(halted: NDArray[np.float64]) -> Any:
    """Function words among the halted tokens, percent."""
    return 100 * halted[:-1].sum(0) / np.maximum(halted.sum(0), 1e-9)


def _more_than_content_words(halted: NDArray[np.float64]) -> Any:
    """Rate of function words less that of content words, in points."""
    return 100 * (halted[:-1].sum(0) / _COUNTED[:-1].sum() - halted[-1] / _COUNTED[-1])


def _lower(record: Record) -> Estimate | None:
    """The lowest rate of determiners, prepositions and conjunctions, less the higher of pronouns' and auxiliaries', in points."""
    sums = _by_window(record)[:-1]

    def apart(drawn: NDArray[np.float64]) -> Any:
        rates = 100 * _rates(drawn)
        return rates[: len(_EARLY)].min(0) - rates[len(_EARLY) :].max(0)

    return None if (sums[:, 0].sum(-1) < MIN_WINDOWS).any() else Estimate.of(bootstrap(apart, sums))


_LOWEST = _answer(*_EARLY, note="the lowest of determiners, prepositions and conjunctions")
_ANSWERS = {f"{claim}.halted_share_pct": _answer(name) for name, (_, claim) in CLASSES.items() if claim is not None}
_ANSWERS |= {f"{entry}.function_words.halted_share_pct": _LOWEST for entry in ("section2", "s1")}
_ANSWERS["m.content_words.halted_share_pct"] = _answer(_CONTENT)
_ANSWERS["section2.predominantly"] = _answered(
    of_record=partial(_by_paper_counts, of=_share_of_halted),
    beyond_chance=partial(_by_paper_counts, of=lambda halted: _share_of_halted(halted) - _share_of_halted(_COUNTED)),
    note="of the tokens of the paper's classes that halt by half of the depth, weighted by Table 12's own counts",
)
_ANSWERS["m.pronouns_and_auxiliaries"] = _answered(of_record=_lower, note="the lowest of DT, IN, CC less the higher of the two")
_ANSWERS["m.function_words.higher_rate_points"] = _answered(
    of_record=partial(_by_paper_counts, of=_more_than_content_words),
    note="function words weighted by Table 12's own counts, by half of the depth; halting at p42",
)
_HALTS = _answered(
    of_record=lambda record: _halt_layers(record, _FUNCTION),
    beyond_chance=lambda record: _halt_layers(record, _FUNCTION, [_CONTENT]),
    note="of function words that halt, at p42; no token halts before layer 5.6 of 30 here; content words ought to halt a tenth later",
)
_ANSWERS |= {f"{entry}.function_words.halt_layer_of_30": _HALTS for entry in ("b6", "figure22")}


# --- Tables 2, 8 and 12 -----------------------------------------------------------------------------------------------------------
LEGEND = (
    "A token has the class of its word, by gold tags; auxiliary: what the treebank's universal tag calls AUX. by the paper's tags: the same tokens "
    "classed as its table says, DT, IN, CC, PRP and PRP$, MD with VBZ and VBP, NN with VB, JJ and RB. Intervals: Wilson's at the "
    "number of independent tokens that sentences leave (design effect).",
    "first, last, any: words instead of tokens, a word halting with its first, its last, or any of its tokens. The paper's percentages are at layer "
    "15 of 30; 25%, 75%: the same of other depths.",
    "Chance is computed exactly: the same counts, on random tokens that are as frequent (ten bins), at the same place of the window, as whole a word "
    "(whole, first or later part), both, or of the same spelling, where only words of two classes can differ.",
)
COLUMNS = [
    *("panel", "section", "key", "class", "reported_pct", "reported_tokens"),
    *(f"{name}{end}" for name in ("halted_pct", "paper_tags_pct") for end in ENDS),
    *(f"{name}_pct" for name in ("first", "last", "any", *(f"at_{depth}" for depth in _DEPTHS))),
    *("tokens", "words", "sentences", *(f"{null}{end}" for null in NULLS for end in (*ENDS, "_expected"))),
    *(*(f"{step}_explained" for step in _STEPS), "class_adds", "class_alone", "record"),
]
_RATES = (
    Column("", "class", "{class}", align="left"),
    Column("the paper", "halted", "{reported_pct:,.1f}"),
    Column("the paper", "tokens", "{reported_tokens:,.0f}", expendable=1),
    Column("measured", "halted", with_ends("halted_pct")),
    Column("measured", "by the paper's tags", with_ends("paper_tags_pct"), expendable=2),
    *(Column("as words", rule, f"{{{rule}_pct:,.1f}}", expendable=4) for rule in ("first", "last", "any")),
    *(Column("at depth", f"{depth}%", f"{{at_{depth}_pct:,.1f}}", expendable=3) for depth in _DEPTHS),
    Column("", "tokens", "{tokens:,.0f}", expendable=1),
)
_BEYOND = (
    *(Column("", "class", "{class}", align="left"), Column("", "halted", "{halted_pct:,.1f}")),
    *(Column("points beyond", said, with_ends(null, runs.SIGNED), expendable=i) for i, (null, said) in enumerate(NULLS.items())),
)
_MODEL = (
    Column("", "rule", "{class}", align="left"),
    *(Column("deviance explained", said, f"{{{step}_explained:,.3f}}") for step, said in _STEPS.items()),
    Column("", "class adds", "{class_adds:,.3f}"),
    Column("", "class alone", "{class_alone:,.3f}"),
)


@artefact(runs.halting, (*runs.WORD_BY_WORD, WORDS), _ANSWERS)  # all of the words: notebook 4 deals the decisions anew
def table02_08_12_halting_by_class(outcomes: Sequence[Outcome], name: str) -> Table:
    """Tables 2, 8 and 12: halting by part of speech on gold tags, beside what explains it without grammar."""
    frame = pd.DataFrame([row for one in outcomes for row in _rows(one)], columns=COLUMNS)
    notes = (*runs.whose_tags(outcomes), *runs.failed(outcomes), *provenance.notes(outcomes))
    for one, record in [(one, one.record) for one in outcomes if one.record is not None][:1]:
        counted, layer = result(record).counted, result(record).layer
        said = (
            f"{one.row.technique}: {counted.sentences} sentences ({counted.cut_sentences} cut by a window's end, {counted.long_sentences} longer "
            f"than a window and skipped), {counted.words} words, {counted.tokens} tokens; {100 * counted.split_words:.0f}% of the words are several "
            f"tokens, {100 * counted.tokens_of_two_words:.1f}% of the tokens touch two words. Halted by layer {layer}."
        )
        notes = (said, *notes)
    beyond = "Percentage points above or below what chance gives among tokens that are alike"
    explained = "Share of the deviance of “has halted” that a logistic model explains"
    made = (
        Panel("rates", "Tokens halted by half of the depth, %", _RATES, notes),
        Panel("nulls", beyond, _BEYOND, ("Each with its 95% interval, clustered by sentence.",)),
        Panel("model", explained, _MODEL, ("Terms are added from left to right; what class adds is the last step.",)),
    )
    return Table(name, "Tables 2, 8 and 12: halting by part of speech", frame, made, LEGEND)


def _rows(outcome: Outcome) -> Iterator[dict[str, Any]]:
    if outcome.record is None:
        return
    found, section = result(outcome.record), outcome.row.technique
    shared = {"section": section, "record": outcome.record.fingerprint}
    for name, (title, claim) in CLASSES.items():
        if not found.has(name) or (name != "all" and not found.model):
            continue  # where all tokens halted, or none, the classes have nothing to say
        one = found.of(name)
        row: dict[str, Any] = {**shared, "panel": "rates", "key": f"{outcome.row.key}.{name}", "class": title}
        if claim is not None:
            values = reported()[claim].values
            row |= {"reported_pct": values["halted_share_pct"], "reported_tokens": values["tokens"]}
        row |= interval_columns("halted_pct", one.halted, 100)
        if found.has(name, "paper"):
            row |= interval_columns("paper_tags_pct", found.of(name, "paper").halted, 100)
        row |= {f"{rule}_pct": 100 * share for rule, share in one.halted_words.items()}
        layers = len(one.by_layer)
        row |= {f"at_{name}_pct": 100 * one.by_layer[max(0, round(depth * layers) - 1)] for name, depth in _DEPTHS.items()}
        yield row | {"tokens": one.tokens, "words": one.words, "sentences": one.sentences}
        if one.nulls and found.model:
            row = {**row, "panel": "nulls"}
            for null, against in one.nulls.items():
                row |= {**interval_columns(null, against.beyond, 100), f"{null}_expected": 100 * against.expected}
            yield row
    if found.model:
        explained = {tuple(one.terms): one.deviance_explained for one in found.model}
        ordered = sorted((terms for terms in explained if terms[0] == "position"), key=len)
        steps = {f"{step}_explained": explained[terms] for step, terms in zip(_STEPS, ordered, strict=True)}
        adds = steps["class_explained"] - steps["start_explained"]
        row = {**shared, "panel": "model", "section": "", "key": outcome.row.key, "class": section, **steps}
        yield row | {"class_adds": adds, "class_alone": explained["class",]}


# --- over depth -------------------------------------------------------------------------------------------------------------------
DRAWN = tuple(CLASSES)[:6]
_CHANCE = {MATCHED: (PALETTE[3], "-", "tokens as frequent, at the same place"), "random": (GREY, ":", "any tokens")}


@artefact(lambda: runs.halting(runs.MAIN))
def figure_halting_by_class(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Halting over depth by word class, the paper's rule against two nulls: any tokens, and tokens as frequent at the same place."""
    (outcome,), (record,) = outcomes, runs.records(outcomes)
    found = result(record)
    lines, frames = [], []
    with style():
        drawing, axes = panels(2, 3, size=(9.6, 5.2), sharex=True, sharey=True)
        for axis, kind in zip(axes.flat, DRAWN, strict=True):
            if not found.has(kind):
                axis.set_axis_off()
                continue
            frames.append(_over_depth(axis, found, kind))
            beyond = Estimate.of(found.of(kind).nulls[MATCHED].beyond, 100)
            lines.append(f"{kind} {beyond.value:+.0f} [{beyond.low:+.0f} {beyond.high:+.0f}]")
        for axis in axes[1]:
            axis.set_xlabel("layer")
        for axis in axes[:, 0]:
            axis.set_ylabel("halted, %")
        axes[0, 0].xaxis.get_major_locator().set_params(integer=True)
        legend_below(drawing, axes[0, 0].get_legend_handles_labels()[0], ncols=4)
    caption = (
        f"{outcome.row.technique}. Bands: 95% range of the same counts, on random tokens; bar: 95% interval at layer {found.layer}, "
        "clustered by sentence; star: the paper. Halted tokens take part again in the last layers, which is not drawn.",
        f"Points beyond chance among tokens as frequent at the same place, at layer {found.layer}: {', '.join(lines)}.",
        *runs.whose_tags(outcomes),
        *provenance.notes(outcomes),
    )
    finding = f"Halted, in points beyond chance among tokens as frequent: {', '.join(lines[:3])}"
    return Figure(name, "Halting over depth by word class", pd.concat(frames), drawing, caption, finding=finding)


def _over_depth(axis: Axes, found: WordClassesResult, kind: str) -> pd.DataFrame:
    (title, claim), one = CLASSES[kind], found.of(kind)
    depth, rate = np.arange(1, len(one.by_layer) + 1), 100 * np.array(one.by_layer)
    frame = pd.DataFrame({"class": kind, "layer": depth, "halted_pct": rate})
    for null, (colour, dash, label) in _CHANCE.items():
        over, short = one.over_depth[null], null.replace(" × ", "_")
        low, high, middle = (percent_of_shares(values) for values in (over.low, over.high, over.expected))
        axis.fill_between(depth, low, high, color=colour, alpha=0.3, linewidth=0, label=f"chance among {label}")
        draw.line(axis, depth, middle, color=colour, linestyle=dash, linewidth=1)
        frame = frame.assign(**{f"{short}_pct": middle, f"{short}_pct_low": low, f"{short}_pct_high": high})
    draw.line(axis, depth, rate, color=PALETTE[1], marker="o", markersize=2.5, label="halted")
    at, share = depth[found.layer - 1], interval_columns("", one.halted, 100)
    draw.intervals(axis, [at], share, "", color=PALETTE[1], capsize=3, linewidth=1.2)
    if claim is not None:
        star: dict[str, Any] = {"marker": "*", "markersize": 9, "color": "black", "label": "the paper, layer 15 of 30"}
        draw.points(axis, [at], [reported()[claim].values["halted_share_pct"]], **star)
    axis.set(title=f"{title}: {one.tokens:,} tokens", ylim=(-3, 103))
    return frame


# --- signals of the dense model ---------------------------------------------------------------------------------------------------
_SIGNAL_READS = (
    *(f"{WORDS}:{column}" for column in ("window", "slot", "halt_layer")),
    *(f"{SIGNALS_OF_WORDS}:{signal}" for signal in ("attention_received", "drift_relative")),  # drift for notebook 4
)
Z = 1.96
TERMS = {"position": "position", "log frequency": "+ log frequency", "word start": "+ word start", "class": "+ class"}


def _deepened(one: Means) -> Estimate:
    """Mean entropy at two thirds of the depth, less that at a third, as Appendix O and Figure 19 look: layers 10 and 20 of 30, of a model whose
    last layer is not looked at. As if the two were of different sentences, which is wider than they are."""
    first, last = (round(layer / 30 * (len(one.mean) + 1)) - 1 for layer in (10, 20))
    change, error = one.mean[last] - one.mean[first], float(np.hypot(one.error[last], one.error[first]))
    return Estimate(change, change - Z * error, change + Z * error)


def _deepening(words: str) -> AnsweredBy:
    note = f"{words} words, logit lens of the dense model, from layer 10 to 20 of 30; table lenses says what that lens knows"
    return _answered(of_record=lambda record: _deepened(_signals(record).entropy_nats[words]), note=note)


def _signals(record: Record) -> WordSignalsResult:
    return record.measured("word_signals", WordSignalsResult)


def _decay(record: Record) -> Estimate | None:
    """What halted tokens get over what others get at the same place: mean of the layers after they halted, over that of the layer by which they
    had; bootstrap over windows."""
    found = _signals(record).attention
    if found is None:
        return None
    received = record.arrays(SIGNALS_OF_WORDS)["attention_received"].astype(float)
    tokens = pd.read_parquet(record.path / WORDS)
    tokens = tokens[(tokens["halt_layer"] <= found.layer) & (tokens["window"] < received.shape[1])]
    at_place, half = received.mean(1), found.layer - 1
    window, slot = tokens["window"].to_numpy(), tokens["slot"].to_numpy()
    of_tokens = (
        *(received[half + 1 :, window, slot].mean(0), at_place[half + 1 :, slot].mean(0)),
        *(received[half, window, slot], at_place[half, slot]),
    )
    sums = [np.bincount(window, weights=values, minlength=received.shape[1]) for values in of_tokens]
    return Estimate.of(bootstrap(lambda a, b, c, d: (a.sum(-1) / b.sum(-1)) / (c.sum(-1) / d.sum(-1)), *sums))


_KEPT = "over what others get at the same place, in the dense model: layers after half of the depth"
_SIGNAL_ANSWERS: dict[str, AnsweredBy | tuple[AnsweredBy, ...]] = {
    "e4.collapse.entropy_change_nats": _deepening("function"),
    "o.entropy.entropy_change_nats": _deepening("all"),
    "c1.decay.attention_kept_ratio": _answered(of_record=_decay, note=_KEPT),
}


@artefact(lambda: runs.halting(runs.MAIN), _SIGNAL_READS, _SIGNAL_ANSWERS)
def figure_word_signals(outcomes: Sequence[Outcome], name: str) -> Figure:
    """Signals of the dense model by word class: entropy over depth (E.4), attention to halted tokens (C.1), and what explains drift."""
    (record,) = runs.records(outcomes)
    found = _signals(record)
    with style():
        drawing, axes = panels(1, 3, size=(11.4, 4.2))
        parts = [part for panel, axis in zip((_entropy, _attention, _drift), axes[0], strict=True) for part in panel(axis, found)]
    caption = (*_said(found), *runs.whose_tags(outcomes), *provenance.notes(outcomes))
    frame = pd.concat(parts, ignore_index=True)
    change = _deepened(found.entropy_nats["function"])
    finding = f"The entropy of function words changes by {change.value:+.2f} nats from a third to two thirds of the depth; the paper says that it collapses"
    return Figure(name, "Signals of the dense model by word class", frame, drawing, caption, finding=finding)


def _by_layer(what: str, of: str, value: Any, **more: Any) -> pd.DataFrame:
    return pd.DataFrame({"what": what, "of": of, "layer": np.arange(1, len(value) + 1), "value": value, **more})


_BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13)}


def _entropy(axis: Axes, found: WordSignalsResult) -> Iterator[pd.DataFrame]:
    for place, kind in enumerate(kind for kind in DRAWN if kind in found.entropy_nats):
        mean, error = np.array(found.entropy_nats[kind].mean), Z * np.array(found.entropy_nats[kind].error)
        part = _by_layer("entropy_nats", kind, mean, low=mean - error, high=mean + error)
        axis.plot(part["layer"], mean, label=kind, **draw.look(place, markersize=2.5))
        axis.fill_between(part["layer"], part["low"], part["high"], color=PALETTE[place], alpha=0.2, linewidth=0)
        yield part
    axis.set(title="Entropy of the logit lens", xlabel="layer", ylabel="nats")
    axis.set_ylim(bottom=0)
    axis.legend(ncols=3, **_BELOW)


def _attention(axis: Axes, found: WordSignalsResult) -> Iterator[pd.DataFrame]:
    halted = found.attention
    title = f"Attention to tokens halted by layer {halted.layer if halted else '-'}"
    axis.set(title=title, xlabel="layer", ylabel="share or ratio")
    if halted is None:
        return
    drawn = {"share of all attention": halted.mass_share, "÷ what others get at the same place": halted.against_position}
    for place, (label, got) in enumerate(drawn.items()):
        part = _by_layer(f"attention of halted, {label}", "halted", got)
        axis.plot(part["layer"], got, label=label, **draw.look(place, markersize=2.5))
        yield part
    draw.horizontal(axis, 1, linewidth=0.7, label="1: as much as others at the same place")
    share = {"color": PALETTE[0], "linestyle": ":", "label": "their share of the tokens"}
    draw.horizontal(axis, halted.token_share, linewidth=0.7, **share)
    draw.vertical(axis, halted.layer, color=GREY, linewidth=0.7, linestyle="--", label="the layer by which they halted")
    axis.set_ylim(bottom=0)
    axis.legend(**_BELOW)


def _drift(axis: Axes, found: WordSignalsResult) -> Iterator[pd.DataFrame]:
    below = np.zeros(len(found.drift_explained["class"]))
    for colour, (term, label) in zip((0, 3, 6, 1), TERMS.items(), strict=True):
        height = np.array(found.drift_explained[term])
        part = _by_layer("drift_explained", label, height)
        axis.bar(part["layer"], height - below, bottom=below, color=PALETTE[colour], width=0.8, label=label)
        yield part
        below = height
    axis.set(title="Variance of log relative drift explained", xlabel="layer", ylabel="R²", ylim=(0, 1))
    axis.legend(ncols=2, **_BELOW)


def _said(found: WordSignalsResult) -> Iterator[str]:
    function, content = found.entropy_nats["function"], found.entropy_nats["content"]
    explained = found.drift_explained
    added = np.array(explained["class"]) - np.array(explained["word start"])
    strongest = int(np.argmax(explained["position"]))
    yield (
        f"Bands: 95% intervals clustered by sentence; {found.counted.tokens} tokens of {found.counted.sentences} sentences. Change of the entropy from "
        f"a third to two thirds of the depth: function words {_change(function)}, content words {_change(content)} nats."
    )
    yield f"Drift: position alone explains up to {explained['position'][strongest]:.2f} (layer {strongest + 1}); class adds {added.min():.3f} to {added.max():.3f}."
    if found.attention is not None:
        half, ratio = found.attention.layer - 1, found.attention.against_position
        yield (
            f"Attention to halted tokens over that of others at the same place: {ratio[half]:.2f} in layer {half + 1}, {ratio[-1]:.2f} in the last that "
            "is looked at; the paper says that it decays."
        )


def _change(one: Means) -> str:
    change = _deepened(one)
    return f"{change.value:+.2f} [{change.low:+.2f} {change.high:+.2f}]"
