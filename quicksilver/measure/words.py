"""Measurements on gold annotation. A token has the class of its word; tokens outside of words and sentences longer than a window are left out.

    WordClasses     which words halt, by class and layer, beside what could explain it without grammar (Tables 2, 8, 12)
    WordSignals     entropy by class and layer (E.4), attention that halted tokens still get (C.1), what explains drift
    Constituents    Precision@Fusion on gold trees: are fused neighbours constituents (Tables 9 and 13, paper N)?

The nulls draw the run's own decisions anew among tokens that are alike in frequency, position, place in the word, or are the same token. The
models add these one after the other, and the class last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from quicksilver.measure import strata as stats
from quicksilver.measure.measurement import Measurement, Result, Setting
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Count, InnerShare

if TYPE_CHECKING:
    import torch

    from quicksilver.data.annotation import AnnotatedTokens
    from quicksilver.measure.bench import Bench
    from quicksilver.runtime.pass_state import TokenState
    from quicksilver.runtime.trace import Trace
    from quicksilver.runtime.view import LayerView

WORDS, SIGNALS_OF_WORDS, PAIRS = "words.parquet", "word_signals.safetensors", "pairs.parquet"
FREQUENCY_BINS = 10
# Half-open ranges of slots: the first ones are attention sinks and their neighbours, and differ one by one.
_POSITION_EDGES = np.array([1, 2, 4, 8, 16, *range(32, 4096, 32)])


# --- tokens with their words ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """What of the annotated text was looked at.

    Attributes:
        tokens, words, sentences: with at least a part in the windows (under `continuation`, in their prompts).
        cut_sentences: of them, only a part is there; long_sentences: longer than a window, and skipped.
        tokens_of_two_words: share of the tokens that touch two words or more; split_words: share of the words that are several tokens.
    """

    tokens: int
    words: int
    sentences: int
    cut_sentences: int
    long_sentences: int
    tokens_of_two_words: float
    split_words: float


def decided_tokens(bench: Bench) -> int:
    """Of each window, the tokens that modules may decide about with all that they know: all, or the prompt's."""
    return bench.protocol.prompt_tokens if bench.protocol.name == "continuation" else bench.protocol.window_tokens


def token_frame(bench: Bench, windows: int | None = None) -> tuple[pd.DataFrame, Counted]:
    """One row a token that belongs to a word, in order of windows and slots; of the first `windows`, or of all. Raises
    ConfigError: windows without annotation.

    Columns: `window`, `slot`, `token_id`, `word` and `sentence` (numbers in the text), `piece` and `pieces` (number of the token in its
    word, and how many that has), `occurrences` (of the token in the whole text), `tag`, `class`, `paper_class`; of the smallest constituent that
    holds its word and the next one, `joint_label` and `joint_words` (0: there is none).
    """
    from quicksilver.data.annotation import classes

    annotated = bench.windows.annotated
    if annotated is None:
        raise ConfigError("these windows have no gold annotation: take dataset=gum, dataset=ud-ewt or dataset=ud.")
    note, ids = annotated.annotation, bench.windows.ids[:windows].numpy()
    shown = (slice(windows), slice(decided_tokens(bench)))
    word, length = annotated.word[shown], annotated.sentence_tokens[shown]
    belongs, long = word >= 0, length > bench.protocol.window_tokens
    kept = belongs & ~long
    window, slot = np.nonzero(kept)
    mine = word[kept]
    frame = pd.DataFrame({
        "window": window, "slot": slot, "token_id": ids[window, slot], "word": mine, "sentence": note.sentence[mine],
        "piece": annotated.piece[shown][kept], "pieces": annotated.pieces[shown][kept],
        "occurrences": annotated.occurrences[shown][kept], "tag": note.tag[mine], "class": classes(note)[mine],
        "paper_class": classes(note, "paper")[mine], "joint_label": note.joint_label[mine], "joint_words": note.joint_words[mine],
    })  # fmt: skip
    sentences = frame.assign(length=length[kept]).groupby("sentence")["length"].agg(["size", "first"])
    cut, skipped = int((sentences["size"] < sentences["first"]).sum()), len(np.unique(note.sentence[word[belongs & long]]))
    of_two, split = (annotated.touched[shown][kept] > 1).mean(), (frame.loc[frame["piece"] == 0, "pieces"] > 1).mean()
    return frame, Counted(len(frame), frame["word"].nunique(), len(sentences), cut, skipped, float(of_two), float(split))


def strata(tokens: pd.DataFrame) -> dict[str, np.ndarray]:
    """By name of a null, the stratum of every row of `token_frame`, (n,) int: values are dealt anew within it."""
    frequency = stats.quantile_bins(np.log(tokens["occurrences"].to_numpy()), FREQUENCY_BINS)
    position = np.searchsorted(_POSITION_EDGES, tokens["slot"].to_numpy(), side="right")
    piece, pieces = tokens["piece"].to_numpy(), tokens["pieces"].to_numpy()
    return {
        "random": np.zeros(len(tokens), dtype=np.int64),
        "frequency": frequency,
        "position": position,
        "word start": np.where(pieces == 1, 0, np.where(piece == 0, 1, 2)),  # a whole word, the first of several, a later one
        "frequency × position": stats.crossed(frequency, position),
        "token": tokens["token_id"].to_numpy().astype(np.int64),
    }


def covariates(tokens: pd.DataFrame) -> dict[str, np.ndarray]:
    """What a model may explain a token by, in the order in which it is added: columns (n,) or (n, k) by name."""
    groups = strata(tokens)
    log_slot, log_count = np.log1p(tokens["slot"].to_numpy()), np.log(tokens["occurrences"].to_numpy())
    return {
        "position": np.column_stack([log_slot, log_slot**2, stats.indicators(groups["position"])]),
        "log frequency": np.column_stack([log_count, log_count**2, log_count**3]),
        "word start": stats.indicators(groups["word start"]),
        "class": stats.indicators(tokens["class"].to_numpy()),
    }


def class_members(label: np.ndarray) -> dict[str, np.ndarray]:
    """The tokens (n,) bool of every class that occurs, of `function` (the five classes of function words together) and of `all`."""
    from quicksilver.data.annotation import CLASSES, FUNCTION

    found = {name: label == name for name in CLASSES}
    found |= {"function": np.isin(label, FUNCTION), "all": np.ones(len(label), dtype=bool)}
    return {name: member for name, member in found.items() if member.any()}


def halt_layers(trace: Trace, width: int) -> np.ndarray:
    """(W, P) int, the last layer (from 0) each of the first P tokens of a window went through by decision."""
    prompts = [one for one in trace.passes if one.first_column == 0]
    return np.concatenate([one.halt_layer[:, :width].cpu().numpy() for one in prompts]).astype(int)


@dataclass
class OfWords(Measurement, of_dense="never"):
    """Base of the measurements that need annotation."""

    def check(self, setting: Setting) -> None:
        if not setting.annotated:
            raise ConfigError(
                "enabled needs annotation, and this dataset has none: take dataset=gum, dataset=ud-ewt, dataset=ud with a treebank of your own, or "
                "dataset=wikitext103-tagged, whose tags are not gold."
            )


# --- which words halt -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NullOverDepth:
    """A null by layer: what chance within strata gives, and where 95% of deals lie."""

    expected: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class ClassHalting:
    """Halting of one class; shares, 0 to 1, "halted" by the layer at `depth` unless it says by layer.

    Attributes:
        name: a class of data/word_classes.yaml, `function` or `all`: see `class_members`; reading: whose table, `ours` or `paper`.
        halted: of its tokens, with Wilson's interval clustered by sentence.
        halted_words: of its words, where a word counts by its `first`, its `last`, or `any` token.
        by_layer: halted after this layer or before, of its tokens.
        nulls: by name, at `depth`; over_depth: the same by layer, as far as figures draw it.
    """

    name: str
    reading: str
    tokens: int
    words: int
    sentences: int
    halted: stats.Share
    halted_words: dict[str, float]
    by_layer: list[float]
    nulls: dict[str, stats.AgainstNull] = field(default_factory=dict)
    over_depth: dict[str, NullOverDepth] = field(default_factory=dict)


@dataclass(frozen=True)
class Explained:
    """A logistic model of which tokens have halted: its terms, and the share of the deviance that it explains."""

    terms: list[str]
    deviance_explained: float


@dataclass(frozen=True)
class WordClassesResult(Result):
    """Halting by class.

    Attributes:
        depth, layer: the fraction of the depth, and the layer (from 1) that it is after.
        classes: ours, then the paper's reading.
        model: nested models; empty where all or none have halted at `depth`.
    """

    depth: InnerShare
    layer: int
    counted: Counted
    classes: list[ClassHalting]
    model: list[Explained]

    def line(self) -> str:
        rates = ", ".join(f"{100 * one.halted.value:.0f}% {one.name}" for one in self.classes if one.reading == "ours")
        return f"halted by layer {self.layer}: {rates}"

    def has(self, name: str, reading: str = "ours") -> bool:
        """Whether any word of the text is of that class."""
        return any((one.name, one.reading) == (name, reading) for one in self.classes)

    def of(self, name: str, reading: str = "ours") -> ClassHalting:
        """The class of that name; raises ConfigError where no word of the text is of it."""
        for one in self.classes:
            if (one.name, one.reading) == (name, reading):
                return one
        raise ConfigError(f"no word is of the class {name!r}: there are {', '.join(one.name for one in self.classes)}.")


@dataclass
class WordClasses(OfWords, share=0.02, recorded_as="quicksilver.measure.word_classes.WordClasses"):
    """Read the trace of the scoring pass, word class by word class. Writes words.parquet, a row a token, with `halt_layer` (from 1; the
    number of layers: never).

    Args:
        depth: fraction of the depth at which rates are compared (paper: layer 15 of 30).
    """

    depth: InnerShare = 0.5

    def run(self, bench: Bench) -> WordClassesResult:
        from quicksilver.modules.checks import layer_after

        assert bench.trace is not None  # quality is measured first
        tokens, counted = token_frame(bench)
        n_layers = bench.trace.n_layers
        halts = halt_layers(bench.trace, decided_tokens(bench))  # (W, P)
        tokens = tokens.assign(halt_layer=halts[tokens["window"], tokens["slot"]] + 1)
        bench.files[WORDS] = lambda path: tokens.to_parquet(path, index=False)
        return classes_of(tokens, counted, n_layers, layer_after(self.depth, n_layers), self.depth)


def classes_of(tokens: pd.DataFrame, counted: Counted, n_layers: int, layer: int, depth: float) -> WordClassesResult:
    """From `token_frame` with `halt_layer` to the result; `layer` from 0."""
    halted = tokens["halt_layer"].to_numpy()[:, None] <= np.arange(1, n_layers)  # (n, L-1): the last layer halts no token
    halted = np.concatenate([halted, halted[:, -1:]], axis=1)
    at_depth, clusters, groups, found = halted[:, layer], tokens["sentence"].to_numpy(), strata(tokens), []
    readings = {"ours": class_members(tokens["class"].to_numpy()), "paper": class_members(tokens["paper_class"].to_numpy())}
    for reading, name, member in ((reading, *one) for reading, members in readings.items() for one in members.items()):
        own, nulls = tokens[member].assign(halted=at_depth[member]), groups if reading == "ours" and name != "all" else {}
        over_depth = {}
        for null in ("random", "frequency × position") if nulls else ():
            mean, spread = stats.expected(halted, member, nulls[null])
            over_depth[null] = NullOverDepth(
                mean.tolist(), (mean - stats.Z * spread).tolist(), (mean + stats.Z * spread).tolist()
            )
        by_word = {
            "first": own.loc[own["piece"] == 0, "halted"],
            "last": own.loc[own["piece"] == own["pieces"] - 1, "halted"],
            "any": own.groupby("word")["halted"].max(),
        }
        by_rule = {rule: float(values.mean()) for rule, values in by_word.items() if len(values)}
        share = stats.wilson(at_depth[member], clusters[member])
        beside = {null: stats.against_null(at_depth, member, stratum, clusters) for null, stratum in nulls.items()}
        counts = (len(own), own["word"].nunique(), own["sentence"].nunique())
        by_layer = halted[member].mean(0).tolist()
        found.append(ClassHalting(name, reading, *counts, share, by_rule, by_layer, beside, over_depth))
    model = []
    if 0 < at_depth.mean() < 1:
        columns = covariates(tokens)
        names = list(columns)
        for terms in (*(names[: i + 1] for i in range(len(names))), ["class"]):
            model.append(Explained(terms, stats.deviance_explained(at_depth, [columns[name] for name in terms])))
    return WordClassesResult(depth, layer + 1, counted, found, model)


# --- what the dense model's signals follow ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Means:
    """Means by layer with their standard errors, clustered by sentence."""

    tokens: int
    mean: list[float]
    error: list[float]


@dataclass(frozen=True)
class AttentionOfHalted:
    """What tokens that a run has halted by `layer` receive in the dense model; lists are by layer.

    Attributes:
        layer: from 1.
        tokens: halted ones; token_share: of all tokens that are part of a word.
        mass_share: of the attention that all of these receive, that of the halted ones.
        against_position: the same over what tokens at the same slots receive on average; 1 is no different from others there.
    """

    layer: int
    tokens: int
    token_share: float
    mass_share: list[float]
    against_position: list[float]


@dataclass(frozen=True)
class WordSignalsResult(Result):
    """Signals of the dense model after each layer but the last, which nothing is decided after; classes are ours.

    Attributes:
        entropy_nats: of the logit lens, by class (and `function`, `all`).
        attention: None where nothing had halted.
        drift_explained: share of the variance of log relative drift, by the terms of a linear model, added one after the other; `class`
            stands alone as well, as `class alone`.
    """

    counted: Counted
    entropy_nats: dict[str, Means]
    attention: AttentionOfHalted | None
    drift_explained: dict[str, list[float]]

    def line(self) -> str:
        whole, without = self.drift_explained["class"], self.drift_explained["word start"]
        best = int(np.argmax(without))
        return f"log drift after layer {best + 1}: R² {whole[best]:.2f}, of which class adds {whole[best] - without[best]:.3f}"


@dataclass
class WordSignals(OfWords, share=0.1, recorded_as="quicksilver.measure.word_signals.WordSignals"):
    """Watch the dense model over a few windows. Writes word_signals.safetensors: `drift_relative`, `entropy_nats` and `attention_received`,
    (L-1, W, P) float16 each, rows and columns as `window` and `slot` of words.parquet.

    Args:
        windows: so many of the run's; 0: all.
        depth: a token that has halted after this fraction of the depth is "halted".
    """

    windows: Count = 32
    depth: InnerShare = 0.5

    def run(self, bench: Bench) -> WordSignalsResult:
        from safetensors.torch import save_file

        from quicksilver.measure.inside import observed
        from quicksilver.modules.checks import layer_after

        windows, width = min(self.windows or len(bench.windows.ids), len(bench.windows.ids)), decided_tokens(bench)
        tokens, counted = token_frame(bench, windows)
        seen = observed(bench, windows, width, _signals, attention=True)
        # Half precision: three digits of each, and small enough to be kept with the repository.
        halves = {name: value.half().contiguous() for name, value in seen.items()}
        bench.files[SIGNALS_OF_WORDS] = lambda path: save_file(halves, str(path))
        at = (slice(None), tokens["window"].to_numpy(), tokens["slot"].to_numpy())
        drift, entropy, received = (array.numpy()[at].astype(float) for array in seen.values())
        sentence, entropies = tokens["sentence"].to_numpy(), {}
        for name, member in class_members(tokens["class"].to_numpy()).items():
            mean, error = stats.mean_and_error(entropy[:, member], sentence[member])
            entropies[name] = Means(int(member.sum()), mean.tolist(), error.tolist())
        columns = covariates(tokens)
        nested = {name: list(columns.values())[: i + 1] for i, name in enumerate(columns)} | {"class alone": [columns["class"]]}
        log_drift = np.log(np.maximum(drift, 1e-12))
        explained = {name: [stats.r_squared(one, chosen) for one in log_drift] for name, chosen in nested.items()}
        assert bench.trace is not None  # quality is measured first
        layer = layer_after(self.depth, bench.trace.n_layers)
        halted = halt_layers(bench.trace, width)[at[1], at[2]] <= layer
        attention = None
        if 0 < halted.sum() < len(halted):
            at_slot = seen["attention_received"].numpy().mean(1)[:, tokens["slot"]]
            mass = received[:, halted].sum(1)
            shares = ((mass / whole).tolist() for whole in (received.sum(1), at_slot[:, halted].sum(1)))
            attention = AttentionOfHalted(layer + 1, int(halted.sum()), float(halted.mean()), *shares)
        return WordSignalsResult(counted, entropies, attention, explained)


def _signals(view: LayerView, tokens: TokenState) -> dict[str, torch.Tensor]:
    from quicksilver.modules.signals import AttentionReceived, Drift

    everyone = tokens.active | tokens.newly_halted
    return {
        "drift_relative": Drift("relative").score(view, tokens, everyone),
        "entropy_nats": view.logit_entropy_nats(everyone).view(everyone.shape),
        "attention_received": AttentionReceived(last_queries=None).score(view, tokens, everyone),
    }


# --- are fused neighbours constituents? -------------------------------------------------------------------------------------------

SHORT_WORDS = 6  # of random neighbours 50% share such a constituent: nearest to the paper's 48%
CLAUSES = ("S", "SBAR", "SBARQ", "SINV", "SQ", "FRAG", "ROOT", "TOP", "X", "")  # no phrases: clauses, and what has no category
_FARTHEST = 8  # tokens between the two of a pair; super-tokens of more words are rare


@dataclass(frozen=True)
class Fused:
    """Pairs chosen in one layer.

    Attributes:
        layer: from 1.
        pairs: chosen; within_word, across_sentences: of them, left out; no_word: of them with a token that is part of no word.
        eligible: of them, of two words of one sentence with a tree; what the precisions are of.
        precision: share of the eligible, by definition, with Wilson's interval clustered by sentence.
        nulls: by definition and null: `random` pairs, pairs of as many words apart (`words apart`), pairs of the same two tags.
    """

    layer: int
    pairs: int
    within_word: int
    across_sentences: int
    no_word: int
    eligible: int
    precision: dict[str, stats.Share]
    nulls: dict[str, dict[str, stats.AgainstNull]]


@dataclass(frozen=True)
class ConstituentsResult(Result):
    """Precision@Fusion.

    Attributes:
        closest: by layer of the dense model, the closest neighbours (state distance, L2): `share` of all.
        fused: by layer in which the run fused, the neighbours where two super-tokens were joined.
        grouped: the same layers, all pairs of tokens that were joined, up to eight tokens apart.
    """

    counted: Counted
    share: float
    closest: list[Fused]
    fused: list[Fused]
    grouped: list[Fused]

    def line(self) -> str:
        return ", ".join(
            f"{100 * one.precision['short'].value:.0f}% (random {100 * one.nulls['short']['random'].expected:.0f}%) after layer {one.layer}"
            for one in self.fused or self.closest
            if one.precision
        )


@dataclass
class Constituents(OfWords, recorded_as="quicksilver.measure.constituents.Constituents"):
    """Read the fusions of the trace, and the distances of neighbours in every layer of the dense model. Writes pairs.parquet: a row a pair
    of neighbours, with its constituent, the layer after which the run fused it (0: never), and its rank by distance after each layer of
    the dense model (1: the closest of all).

    Args:
        closest_share: of all neighbours, the closest in each layer of the dense model (paper D.3: the 15th percentile).
    """

    closest_share: InnerShare = 0.15

    def run(self, bench: Bench) -> ConstituentsResult:
        from scipy.stats import rankdata

        from quicksilver.measure.inside import observed

        annotated = bench.windows.annotated
        if annotated is None or not annotated.annotation.has_trees:
            raise ConfigError("measure.constituents needs gold trees, and this treebank has none: take dataset=gum.")
        width, windows = decided_tokens(bench), len(bench.windows.ids)
        _, counted = token_frame(bench)
        pairs, every = (neighbours(annotated, windows, width, bench.protocol.window_tokens, far) for far in (1, _FARTHEST))
        distances = observed(bench, windows, width, _distance)["distance"].numpy()  # (L', W, P-1)
        by_layer = distances[:, pairs["window"], pairs["slot"]]
        last = max(0, int(self.closest_share * len(pairs)) - 1)
        closest = [precision_of(pairs, row <= sorted(row)[last], layer) for layer, row in enumerate(by_layer, 1)]
        fused, grouped, fused_after = [], [], np.zeros(len(pairs), dtype=np.int64)
        for layer, before, after in _groups(bench.trace):
            chosen = _joined(pairs, before, after)
            fused_after[chosen] = layer + 1
            fused.append(precision_of(pairs, chosen, layer + 1))
            grouped.append(precision_of(every, _joined(every, before, after), layer + 1))
        # Ranks say who is closest as well as distances do, in half the bytes.
        ranks = {f"rank_{layer + 1}": rankdata(row, method="min").astype("int32") for layer, row in enumerate(by_layer)}
        kept = pairs.assign(fused_after=fused_after, **ranks)
        bench.files[PAIRS] = lambda path: kept.to_parquet(path, index=False)
        return ConstituentsResult(counted, self.closest_share, closest, fused, grouped)


def _distance(view: LayerView, tokens: TokenState) -> dict[str, torch.Tensor]:
    return {"distance": (view.after[:, 1:] - view.after[:, :-1]).float().norm(dim=-1)}


def _groups(trace: Any) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Of every layer (from 0) that a prompt was fused after: carriers (W, P) of all tokens before and after it."""
    from quicksilver.measure.inside import carriers

    def carried(by: int) -> np.ndarray:
        return np.concatenate([carriers(one, by).numpy() for one in prompts])

    prompts = [one for one in trace.passes if one.first_column == 0]
    layers = sorted({fusion.layer for one in prompts for fusion in one.fusions})
    return [(layer, carried(layer), carried(layer + 1)) for layer in layers]


def _joined(pairs: pd.DataFrame, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Pairs (n,) bool whose tokens have one carrier (W, P) after a fusion and had two before it."""
    window, slot, other = (column.to_numpy() for column in (pairs["window"], pairs["slot"], pairs["slot"] + pairs["apart"]))
    return (after[window, slot] == after[window, other]) & (before[window, slot] != before[window, other])


def neighbours(annotated: AnnotatedTokens, windows: int, width: int, window_tokens: int, farthest: int = 1) -> pd.DataFrame:
    """One row a pair of tokens at most `farthest` apart in the first `width` tokens of each window; none in sentences of more than
    `window_tokens`.

    Columns: `window`, `slot` of the first, `apart` (tokens), `words_apart`, `sentence`, `kind` (`two words`, `within word`, `across
    sentences`, `no word`), `tags` (of both words), `label` and `words` of the smallest constituent that holds both words.
    """
    note = annotated.annotation
    word = annotated.word[:windows, :width]
    long = annotated.sentence_tokens[:windows, :width] > window_tokens
    frames = []
    for apart in range(1, farthest + 1):
        one, two = word[:, :-apart], word[:, apart:]
        window, slot = (index.reshape(-1) for index in np.indices(one.shape))
        one, two, skipped = one.reshape(-1), two.reshape(-1), long[:, :-apart].reshape(-1)
        nowhere = (one < 0) | (two < 0)
        across = ~nowhere & (note.sentence[one] != note.sentence[two])
        same = ~nowhere & (one == two)
        between = np.where(nowhere | across | same, 0, two - one)
        label, size = np.full(len(one), "", dtype=note.joint_label.dtype), np.zeros(len(one), dtype=int)
        for step in range(int(between.max(initial=0))):
            inside = between > step
            joint = one[inside] + step
            larger = note.joint_words[joint] > size[inside]
            place = np.flatnonzero(inside)[larger]
            label[place], size[place] = note.joint_label[joint][larger], note.joint_words[joint][larger]
        kinds = {"no word": nowhere, "across sentences": across, "within word": same, "two words": size > 0}
        columns = {
            "window": window, "slot": slot, "apart": apart, "words_apart": between, "sentence": note.sentence[one],
            "kind": np.select(list(kinds.values()), list(kinds), "no tree"),
            "tags": np.char.add(np.char.add(note.tag[one], " "), note.tag[two]), "label": label, "words": size,
        }  # fmt: skip
        frames.append(pd.DataFrame(columns)[~skipped])
    return pd.concat(frames, ignore_index=True)


def inside(pairs: pd.DataFrame) -> dict[str, np.ndarray]:
    """By definition, whether the two words of a pair are inside one constituent, (n,) bool.

    "Some constituent holds both" (`any`) is true of every two words of a sentence, because the root holds them all. So the smallest one that
    holds both must be a phrase and no clause (`phrase`), have at most six words (`short`), or be an NP or a VP (`np_vp`).
    """
    label, words = pairs["label"], pairs["words"]
    return {
        "phrase": (~label.isin(CLAUSES)).to_numpy(),
        "short": ((words > 0) & (words <= SHORT_WORDS)).to_numpy(),
        "np_vp": label.isin(("NP", "VP")).to_numpy(),
        "any": (words > 0).to_numpy(),
    }


def precision_of(pairs: pd.DataFrame, chosen: np.ndarray, layer: int) -> Fused:
    """Precision of the chosen (n,) bool of `neighbours`, beside chance."""
    kind = pairs["kind"][chosen].value_counts()
    two_words = (pairs["kind"] == "two words").to_numpy()
    rest, member = pairs[two_words], chosen[two_words]
    sentence = rest["sentence"].to_numpy()
    precision, nulls = {}, {}
    if member.any():
        tags, apart = (rest[name].astype("category").cat.codes.to_numpy().astype(int) for name in ("tags", "words_apart"))
        groups = {"random": apart * 0, "words apart": apart, "same tags": stats.crossed(apart, tags)}
        for name, values in inside(rest).items():
            precision[name] = stats.wilson(values[member], sentence[member])
            nulls[name] = {null: stats.against_null(values, member, group, sentence) for null, group in groups.items()}
    within, across, nowhere = (int(kind.get(name, 0)) for name in ("within word", "across sentences", "no word"))
    return Fused(layer, int(chosen.sum()), within, across, nowhere, int(member.sum()), precision, nulls)
