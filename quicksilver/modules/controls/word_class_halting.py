"""One class of words stops at one depth and all others go on: what a class is worth there (paper 2.1, Figures 3 and 18)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from quicksilver.modules.checks import check_choice, check_known_ids, check_number, check_token_ids
from quicksilver.modules.halting import HaltingPolicy
from quicksilver.modules.signals import lowest, make_signal
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.pass_state import MissingKV, TokenState
from quicksilver.runtime.view import LayerView

WORD_CLASSES = ("function", "content")


@dataclass(kw_only=True)
class WordClassHalting(HaltingPolicy):
    """All tokens of a prompt's function words stop after one layer, or all of its content words.

    A function word is one token of a closed list that is a whole word; any other token with letters belongs to a content word; what has no
    letters never stops. It reads the token after each, so it acts in prompts only.

    Args:
        halted: function or content.
        depth: fraction of the layers after which they stop.
        at_random: as many tokens of each row stop, drawn from all that may: the null of the class.
        seed: of the draw.
        function_ids: tokens that read like a function word, or the name of a set, as on the command line. letter_ids: tokens with a letter.
        begin_ids, end_ids: tokens that begin with a letter, and that end with one: where one follows the other, a word goes on.

    Raises:
        ConfigError: an option out of range; in a run, a model that was given embeddings.
    """

    halted: Literal["function", "content"] = "function"
    depth: float = 0.5
    at_random: bool = False
    seed: int = 0
    function_ids: Sequence[int | str] = ("@function_words",)
    letter_ids: Sequence[int | str] = ("@with_letters",)
    begin_ids: Sequence[int | str] = ("@begins_with_a_letter",)
    end_ids: Sequence[int | str] = ("@ends_with_a_letter",)
    missing_kv: MissingKV = "drop"
    protect_first: int = 1
    protect_last: int | None = 1
    window: tuple[float, float] = field(default=(0.5, 0.5), init=False)

    def __post_init__(self) -> None:
        check_choice("halted", self.halted, WORD_CLASSES)
        check_number("depth", self.depth, 0.0, 1.0)
        for name in ("function_ids", "letter_ids", "begin_ids", "end_ids"):
            if not self._sets(name):
                setattr(self, name, check_token_ids(name, getattr(self, name)))
        self.window = (self.depth, self.depth)
        super().__post_init__()

    @property
    def chooses_causally(self) -> bool:
        return False

    def bind(self, architecture: Architecture) -> None:
        super().bind(architecture)
        self._tables = {}
        for name in ("function_ids", "letter_ids", "begin_ids", "end_ids"):
            if sets := self._sets(name):
                raise ConfigError(
                    f"{name} names the set {sets[0]}, which only a tokenizer knows: give ids, such as token_set({sets[0]!r}, tokenizer) of "
                    "quicksilver.data.annotation.function_words."
                )
            ids = list(getattr(self, name))
            check_known_ids(name, ids, architecture.vocab_size)
            table = torch.zeros(architecture.vocab_size, dtype=torch.bool)
            table[ids] = True
            self._tables[name] = table

    def _sets(self, name: str) -> list[str]:
        """Sets of words that an option names in place of ids; `quicksilver run` puts the ids of the model's tokenizer there."""
        return [entry for entry in getattr(self, name) if isinstance(entry, str) and entry.startswith("@")]

    def choose(self, view: LayerView, tokens: TokenState, eligible: torch.Tensor) -> torch.Tensor:
        function, content = self.classes(view)
        mask = eligible & (function if self.halted == "function" else content).gather(1, view.index)
        if not self.at_random:
            return mask
        scores = make_signal({"name": "random", "seed": self.seed})(view, tokens, eligible)
        return lowest(scores, eligible, mask.sum(1, keepdim=True))

    def classes(self, view: LayerView) -> tuple[torch.Tensor, torch.Tensor]:
        """Which tokens of the pass are function words and which belong to content words: (B, N) bool each."""
        ids = view.pass_ids
        if ids is None:
            raise ConfigError(
                "WordClassHalting knows words by token ids, but the model was given embeddings: call it with input_ids."
            )
        real = ids >= 0
        function, letter, begins, ends = (table.to(ids.device)[ids.clamp(min=0)] & real for table in self._tables.values())
        goes_on = torch.zeros_like(real)
        goes_on[:, 1:] = begins[:, 1:] & ends[:, :-1]  # this token continues the word before it
        whole = ~goes_on
        whole[:, :-1] &= ~goes_on[:, 1:]
        function = function & whole
        return function, letter & ~function
