"""Are fused neighbours constituents? Precision@Fusion on gold trees, by three definitions, beside chance (paper N, Tables 9 and 13).

"Some constituent holds both" is true of every two words of a sentence, because the root holds them all. So a pair counts as inside a
constituent where the smallest one that holds both is a phrase and no clause (`phrase`), has at most six words (`short`), or is an NP or a VP
(`np_vp`). Pairs of tokens inside one word are left out and counted, and so are pairs of two sentences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quicksilver.measure.measurement import Measurement, Result, Setting
from quicksilver.measure.strata import AgainstNull, Share
from quicksilver.measure.words import Counted, check_annotated
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import InnerShare

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import torch

    from quicksilver.measure.bench import Bench
    from quicksilver.runtime.pass_state import TokenState
    from quicksilver.runtime.view import LayerView

PAIRS = "pairs.parquet"
DEFINITIONS = ("phrase", "short", "np_vp", "any")
SHORT_WORDS = 6  # of random neighbours 50% share such a constituent: nearest to the paper's 48%
NULLS = ("random", "words apart", "same tags")
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
    precision: dict[str, Share]
    nulls: dict[str, dict[str, AgainstNull]]


@dataclass(frozen=True)
class ConstituentsResult(Result):
    """Precision@Fusion.

    Attributes:
        counted: what was looked at.
        share: of all neighbours that are "closest".
        closest: by layer of the dense model, the closest neighbours (state distance, L2).
        fused: by layer in which the run fused, the neighbours where two super-tokens were joined.
        grouped: the same layers, all pairs of tokens that were joined, up to eight tokens apart.
    """

    counted: Counted
    share: float
    closest: list[Fused]
    fused: list[Fused]
    grouped: list[Fused]

    def line(self) -> str:
        shown = self.fused or self.closest
        return ", ".join(
            f"{100 * one.precision['short'].value:.0f}% (random {100 * one.nulls['short']['random'].expected:.0f}%) after layer {one.layer}"
            for one in shown
            if one.precision
        )


@dataclass
class Constituents(Measurement):
    """Read the fusions of the trace, and the distances of neighbours in every layer of the dense model. Writes pairs.parquet: a row a pair
    of neighbours, with its constituent, the layer after which the run fused it (0: never), and its rank by distance after each layer of
    the dense model (1: the closest of all).

    Args:
        closest_share: of all neighbours, the closest in each layer of the dense model (paper D.3: the 15th percentile).
    """

    closest_share: InnerShare = 0.15

    share = 0.05
    of_dense = "never"

    def check(self, setting: Setting) -> None:
        check_annotated(setting)

    def run(self, bench: Bench) -> ConstituentsResult:
        import numpy as np

        from quicksilver.measure.observed import observed
        from quicksilver.measure.words import decided_tokens, token_frame

        annotated = bench.windows.annotated
        if annotated is None or not annotated.annotation.has_trees:
            raise ConfigError("measure.constituents needs gold trees, and this treebank has none: take dataset=gum.")
        width, windows = decided_tokens(bench), len(bench.windows.ids)
        _, counted = token_frame(bench)
        pairs = neighbours(annotated, windows, width, bench.protocol.window_tokens)
        distances = observed(bench, windows, width, _look)["distance"].numpy()  # (L', W, P-1)
        by_layer = distances[:, pairs["window"], pairs["slot"]]
        closest = []
        for layer, row in enumerate(by_layer):
            chosen = row <= sorted(row)[max(0, int(self.closest_share * len(row)) - 1)]
            closest.append(precision_of(pairs, chosen, layer + 1))
        fused, grouped, fused_after = [], [], np.zeros(len(pairs), dtype=np.int64)
        for layer, before, after in _groups(bench.trace):
            new = (after[:, :-1] == after[:, 1:]) & (before[:, :-1] != before[:, 1:])
            chosen = new[pairs["window"], pairs["slot"]]
            fused_after[chosen] = layer + 1
            fused.append(precision_of(pairs, chosen, layer + 1))
            every = neighbours(annotated, windows, width, bench.protocol.window_tokens, farthest=_FARTHEST)
            place = (every["window"].to_numpy(), every["slot"].to_numpy(), (every["slot"] + every["apart"]).to_numpy())
            joined = (after[place[0], place[1]] == after[place[0], place[2]]) & (
                before[place[0], place[1]] != before[place[0], place[2]]
            )
            grouped.append(precision_of(every, joined, layer + 1))
        bench.files[PAIRS] = lambda path: _kept(pairs, fused_after, by_layer).to_parquet(path, index=False)
        return ConstituentsResult(counted, self.closest_share, closest, fused, grouped)


def _look(view: LayerView, tokens: TokenState) -> dict[str, torch.Tensor]:
    return {"distance": (view.after[:, 1:] - view.after[:, :-1]).float().norm(dim=-1)}


def _kept(pairs: pd.DataFrame, fused_after: np.ndarray, by_layer: np.ndarray) -> pd.DataFrame:
    """What pairs.parquet holds. Ranks say who is closest as well as distances do, in half the bytes."""
    from scipy.stats import rankdata

    ranks = {f"rank_{layer + 1}": rankdata(row, method="min").astype("int32") for layer, row in enumerate(by_layer)}
    return pairs.assign(fused_after=fused_after, **ranks)


def neighbours(annotated: Any, windows: int, width: int, window_tokens: int, farthest: int = 1) -> pd.DataFrame:
    """One row a pair of tokens at most `farthest` apart in the first `width` tokens of each window.

    Columns: `window`, `slot` of the first, `apart` (tokens), `words_apart`, `sentence`, `kind` (`two words`, `within word`, `across
    sentences`, `no word`), `tags` (of both words), `label` and `words` of the smallest constituent that holds both words.

    Args:
        annotated: `AnnotatedTokens` of the windows.
        window_tokens: sentences of more tokens have no pairs.
    """
    import numpy as np
    import pandas as pd

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
        kind = np.select(
            [nowhere, across, same, size > 0], ["no word", "across sentences", "within word", "two words"], "no tree"
        )
        tags = np.char.add(np.char.add(note.tag[one], " "), note.tag[two])
        frames.append(
            pd.DataFrame(
                {
                    "window": window, "slot": slot, "apart": apart, "words_apart": between, "sentence": note.sentence[one], "kind": kind,
                    "tags": tags, "label": label, "words": size,
                }
            )[~skipped]
        )  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def inside(pairs: pd.DataFrame) -> dict[str, np.ndarray]:
    """By definition, whether the two words of a pair are inside one constituent, (n,) bool."""
    label, words = pairs["label"], pairs["words"]
    return {
        "phrase": (~label.isin(CLAUSES)).to_numpy(),
        "short": ((words > 0) & (words <= SHORT_WORDS)).to_numpy(),
        "np_vp": label.isin(("NP", "VP")).to_numpy(),
        "any": (words > 0).to_numpy(),
    }


def precision_of(pairs: pd.DataFrame, chosen: np.ndarray, layer: int) -> Fused:
    """Precision of the chosen (n,) bool of `neighbours`, beside chance."""
    from quicksilver.measure.strata import against_null, crossed, wilson

    kind = pairs["kind"][chosen].value_counts()
    two_words = (pairs["kind"] == "two words").to_numpy()
    rest, member = pairs[two_words], chosen[two_words]
    sentence = rest["sentence"].to_numpy()
    precision, nulls = {}, {}
    if member.any():
        tags, apart = (rest[name].astype("category").cat.codes.to_numpy().astype(int) for name in ("tags", "words_apart"))
        groups = {"random": apart * 0, "words apart": apart, "same tags": crossed(apart, tags)}
        for name, values in inside(rest).items():
            precision[name] = wilson(values[member], sentence[member])
            nulls[name] = {null: against_null(values, member, strata, sentence) for null, strata in groups.items()}
    within, across, nowhere = (int(kind.get(name, 0)) for name in ("within word", "across sentences", "no word"))
    return Fused(layer, int(chosen.sum()), within, across, nowhere, int(member.sum()), precision, nulls)


def _groups(trace: Any) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Of every layer (from 0) that a prompt was fused after: carriers (W, P) of all tokens before and after it."""
    import numpy as np

    prompts = [one for one in trace.passes if one.first_column == 0]
    layers = sorted({fusion.layer for one in prompts for fusion in one.fusions})
    carriers = [np.indices(one.valid.shape)[1] for one in prompts]
    found = []
    for layer in layers:
        before = np.concatenate(carriers)
        for i, one in enumerate(prompts):
            for fusion in one.fusions:
                if fusion.layer == layer:
                    carriers[i] = np.take_along_axis(fusion.into.cpu().numpy(), carriers[i], axis=1)
        found.append((layer, before, np.concatenate(carriers)))
    return found
