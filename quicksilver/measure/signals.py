"""A look inside a few texts: drift, entropy, attention and the decisions of every token in every layer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quicksilver.measure.measurement import Measurement, Result, Setting
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Count

if TYPE_CHECKING:
    import torch

    from quicksilver.measure.bench import Bench

SIGNALS = "signals.safetensors"


@dataclass(frozen=True)
class LookedInto:
    """One text.

    Attributes:
        name: `sentence 0` …, `window 0` …
        tokens: what each adds to the text; `ids` are theirs.
        pca_explained: share of the variance behind each component of `pca`.
    """

    name: str
    tokens: list[str]
    ids: list[int]
    pca_explained: list[float]


@dataclass(frozen=True)
class SignalsResult(Result, section=""):
    """The texts; their signals are in signals.safetensors, by the number of the text."""

    texts: list[LookedInto]


@dataclass
class Signals(Measurement, of_dense="alone"):  # a look inside a run shows the dense model as well
    """Look inside texts. Under `continuation` a window is looked into up to the end of its prompt.

    Args:
        sentences: texts of one's own, each a prompt of its own.
        windows: the first windows of the run, after the sentences.
        attribution: gradients of the loss as well.
    """

    sentences: list[str] = field(default_factory=list)
    windows: Count = 0
    attribution: bool = False

    def check(self, setting: Setting) -> None:
        if not (self.sentences or self.windows):
            raise ConfigError("sentences has no text to look into: give sentences=['A sentence.'] or windows=1.")

    def run(self, bench: Bench) -> SignalsResult:
        from safetensors.torch import save_file

        from quicksilver.measure.inside import look_inside

        texts, found = self._texts(bench), []
        arrays: dict[str, torch.Tensor] = {}
        for number, (name, ids) in enumerate(texts):
            bench.progress(number / len(texts))
            inside = look_inside(
                bench.model, ids, bench.modules, execution=bench.execution, attribution=self.attribution,
                decision_layers=bench.decision_layers,
            )  # fmt: skip
            found.append(LookedInto(name, token_texts(bench.tokenizer, ids.tolist()), ids.tolist(), list(inside.explained)))
            arrays |= {f"{number}.{name}": array for name, array in inside.arrays.items()}
        bench.files[SIGNALS] = lambda path: save_file(arrays, str(path))
        return SignalsResult(found)

    def _texts(self, bench: Bench) -> list[tuple[str, torch.Tensor]]:
        """The texts to look inside of, by name: token ids (N,) long each."""
        import torch

        if self.windows > len(bench.windows.ids):
            raise ConfigError(f"measure.signals.windows={self.windows}: the run has {len(bench.windows.ids)} (dataset.windows).")
        found = []
        for i, text in enumerate(self.sentences):
            ids = torch.tensor(bench.tokenizer(text, add_special_tokens=False)["input_ids"])
            if len(ids) < 2:
                raise ConfigError(f"measure.signals.sentences: {text!r} has {len(ids)} token for this model: give at least 2.")
            found.append((f"sentence {i}", ids))
        end = bench.protocol.prompt_tokens if bench.protocol.name == "continuation" else None
        return found + [(f"window {i}", bench.windows.ids[i, :end]) for i in range(self.windows)]


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """What each token adds to the text. Alone, a token of a SentencePiece vocabulary loses the space before it."""

    def read(*some: int) -> str:
        return str(tokenizer.decode(list(some), clean_up_tokenization_spaces=False))

    texts = [read(*ids[:1])]
    for before, number in itertools.pairwise(ids):
        alone, both = read(before), read(before, number)
        texts.append(both[len(alone) :] if both.startswith(alone) else read(number))  # or they share a character's bytes
    return texts
