"""Which words halt? Halting rate by word class on gold tags, over depth, beside what could explain it without grammar.

Tables 2, 8 and 12 of the paper. A token has the class of its word. The nulls deal the run's own decisions anew among tokens that are alike
in frequency, position, place in the word, or are the same token; the model adds these one after the other, and the class last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quicksilver.measure.measurement import Measurement, Result, Setting
from quicksilver.measure.strata import AgainstNull, Share
from quicksilver.measure.words import Counted, check_annotated
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import InnerShare

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from quicksilver.measure.bench import Bench

WORDS = "words.parquet"
GROUPS = ("function", "all")  # beside the classes: the five classes of function words together, and every token


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
        name: a class of data/annotation/word_classes.yaml, or one of `GROUPS`.
        reading: `ours` or `paper`: whose table of classes.
        tokens, words, sentences: of the class.
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
    halted: Share
    halted_words: dict[str, float]
    by_layer: list[float]
    nulls: dict[str, AgainstNull] = field(default_factory=dict)
    over_depth: dict[str, NullOverDepth] = field(default_factory=dict)


@dataclass(frozen=True)
class Explained:
    """A logistic model of who has halted: its terms, and the share of the deviance that it explains."""

    terms: list[str]
    deviance_explained: float


@dataclass(frozen=True)
class WordClassesResult(Result):
    """Halting by class.

    Attributes:
        depth, layer: the fraction of the depth, and the layer (from 1) that it is after.
        counted: what was looked at.
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
        """The class of that name.

        Raises:
            ConfigError: no word of the text is of that class.
        """
        for one in self.classes:
            if (one.name, one.reading) == (name, reading):
                return one
        raise ConfigError(
            f"no word of the text is of the class {name!r}: there are {', '.join(one.name for one in self.classes)}."
        )


@dataclass
class WordClasses(Measurement):
    """Read the trace of the scoring pass, word class by word class. Writes words.parquet, a row a token, with `halt_layer` (from 1; the
    number of layers: never).

    Args:
        depth: fraction of the depth at which rates are compared (paper: layer 15 of 30).
    """

    depth: InnerShare = 0.5

    share = 0.02
    of_dense = "never"

    def check(self, setting: Setting) -> None:
        check_annotated(setting)

    def run(self, bench: Bench) -> WordClassesResult:
        from quicksilver.measure.words import decided_tokens, token_frame
        from quicksilver.modules.checks import layer_after

        assert bench.trace is not None  # quality is measured first
        tokens, counted = token_frame(bench)
        n_layers = bench.trace.n_layers
        halts = halt_layers(bench.trace, decided_tokens(bench))  # (W, P)
        tokens = tokens.assign(halt_layer=halts[tokens["window"], tokens["slot"]] + 1)
        bench.files[WORDS] = lambda path: tokens.to_parquet(path, index=False)
        layer = layer_after(self.depth, n_layers)
        return classes_of(tokens, counted, n_layers, layer, self.depth)


def halt_layers(trace: Any, width: int) -> np.ndarray:
    """(W, P) int, the last layer (from 0) each of the first P tokens of a window went through by decision."""
    import numpy as np

    prompts = [one for one in trace.passes if one.first_column == 0]
    return np.concatenate([one.halt_layer[:, :width].cpu().numpy() for one in prompts]).astype(int)


def classes_of(tokens: pd.DataFrame, counted: Counted, n_layers: int, layer: int, depth: float) -> WordClassesResult:
    """From `token_frame` with `halt_layer` to the result; `layer` from 0."""
    import numpy as np

    from quicksilver.data.annotation import CLASSES, FUNCTION
    from quicksilver.measure.strata import deviance_explained
    from quicksilver.measure.words import covariates, strata

    halted = tokens["halt_layer"].to_numpy()[:, None] <= np.arange(1, n_layers)  # (n, L-1): the last layer halts nobody
    halted = np.concatenate([halted, halted[:, -1:]], axis=1)
    nulls = strata(tokens)
    found = []
    for reading, column in (("ours", "class"), ("paper", "paper_class")):
        label = tokens[column].to_numpy()
        groups = {name: label == name for name in CLASSES}
        groups |= {"function": np.isin(label, FUNCTION), "all": np.ones(len(label), dtype=bool)}
        found += [
            _one_class(name, reading, member, tokens, halted, layer, nulls if reading == "ours" and name != "all" else {})
            for name, member in groups.items()
            if member.any()
        ]
    model = []
    columns = covariates(tokens)
    if 0 < halted[:, layer].mean() < 1:
        names = list(columns)
        for terms in (*(names[: i + 1] for i in range(len(names))), ["class"]):
            explained = deviance_explained(halted[:, layer], [columns[name] for name in terms])
            model.append(Explained(list(terms), explained))
    return WordClassesResult(depth, layer + 1, counted, found, model)


def _one_class(
    name: str,
    reading: str,
    member: np.ndarray,
    tokens: pd.DataFrame,
    halted: np.ndarray,
    layer: int,
    nulls: dict[str, np.ndarray],
) -> ClassHalting:
    from quicksilver.measure.strata import Z, against_null, expected, wilson

    own, at_depth = tokens[member], halted[:, layer]
    clusters = tokens["sentence"].to_numpy()
    over_depth: dict[str, NullOverDepth] = {}
    for null in ("random", "frequency × position"):
        if null in nulls:
            mean, spread = expected(halted, member, nulls[null])
            over_depth[null] = NullOverDepth(mean.tolist(), (mean - Z * spread).tolist(), (mean + Z * spread).tolist())
    words = own.assign(halted=at_depth[member])
    by_word = {
        "first": words.loc[words["piece"] == 0, "halted"],
        "last": words.loc[words["piece"] == words["pieces"] - 1, "halted"],
        "any": words.groupby("word")["halted"].max(),
    }
    return ClassHalting(
        name, reading, len(own), own["word"].nunique(), own["sentence"].nunique(), wilson(at_depth[member], clusters[member]),
        {rule: float(values.mean()) for rule, values in by_word.items() if len(values)}, halted[member].mean(0).tolist(),
        {null: against_null(at_depth, member, strata, clusters) for null, strata in nulls.items()}, over_depth,
    )  # fmt: skip
