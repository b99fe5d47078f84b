"""Prompt-lookup speculative decoding: what followed the same few tokens before is proposed, and checked in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.module import Transform
from quicksilver.runtime.options import Positive


@dataclass(kw_only=True)
class PromptLookup(Transform):
    """`generate` proposes the tokens that followed the last n-gram earlier in the text and keeps those it would have chosen itself.

    Source: speculative decoding, "Fast Inference from Transformers via Speculative Decoding" (Leviathan et al., arXiv 2211.17192),
    with the prompt in place of a draft model: https://github.com/apoorvumang/prompt-lookup-decoding, in transformers
    `prompt_lookup_num_tokens`.

    What differs: nothing; this turns it on for the length of `apply`. The output is that of greedy decoding, so there is no quality
    to lose; a pass that scores given text is the dense model's. Only `generate` of one sequence is faster.

    Args:
        tokens: proposed at a time.
        ngram: longest n-gram that is looked up.

    Raises:
        ConfigError: an option out of range.
    """

    tokens: Positive = 10
    ngram: Positive = 2
    changes_weights: ClassVar[bool] = False

    @contextmanager
    def applied(self, architecture: Architecture) -> Iterator[None]:
        config = architecture.model.generation_config
        wanted = {"prompt_lookup_num_tokens": self.tokens, "max_matching_ngram_size": self.ngram}
        before = {name: getattr(config, name, None) for name in wanted}
        try:
            for name, value in wanted.items():
                setattr(config, name, value)
            yield
        finally:
            for name in wanted:
                setattr(config, name, before[name])
