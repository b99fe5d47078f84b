"""`generate` under modules: only what the user gave is a prompt, neither drafts of speculative decoding nor a first chunk of several.

transformers checks the first drafts in the pass that also processes the prompt. A module that looks ahead inside prompts would take them
for part of it. So the first pass is given no draft: drafts come from the second pass on, where such modules do not act.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import EvictionPolicy, MergePolicy, RuntimeModule, TokenPolicy, Transform
from quicksilver.runtime.placement import replaced

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_REMEDY = "or leave the module out"
_DRAFTS = "speculative decoding (assistant_model, prompt_lookup_num_tokens)"


@contextmanager
def user_prompts_only(model: PreTrainedModel, modules: Sequence[RuntimeModule]) -> Iterator[None]:
    """Let `model.generate` tell prompts from drafts while the context is open.

    Raises (from `generate`):
        ConfigError: drafts beside a module that would decide by them: one that looks ahead outside prompts, or that merges or evicts
            entries of the cache; chunks of a prompt beside a module that needs the whole of it.
    """
    if not hasattr(model, "_get_candidate_generator") or not modules:
        yield
        return
    whose: Any = model
    made, prefill = whose._get_candidate_generator, whose._prefill

    def generator(*args: Any, **kwargs: Any) -> Any:
        _check_drafts(modules)
        made_one = made(*args, **kwargs)
        if getattr(made_one, "assistant_model", None) is model:
            raise ConfigError(
                "The model drafts for itself (assistant_early_exit, or as its own assistant_model), and its drafts would be decided about "
                "as text: give another assistant_model, or use it without modules."
            )
        return _AfterTheFirstPass(made_one)

    def whole(input_ids: torch.Tensor, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        _check_chunks(modules, generation_config.prefill_chunk_size, input_ids.shape[1])
        return prefill(input_ids, generation_config, *args, **kwargs)

    with replaced(model, _get_candidate_generator=generator, _prefill=whole):
        yield


class _AfterTheFirstPass:
    """A candidate generator whose first answer is no candidate; all else is the generator's own."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._is_first = True

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Candidates after input_ids (B, N): none before the prompt was processed."""
        # Asked in the first pass too, for nothing: an assistant reads the prompt in its first call.
        candidates, logits = self._generator.get_candidates(input_ids, **kwargs)
        if self._is_first:
            self._is_first = False
            return input_ids, None
        return candidates, logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def _check_drafts(modules: Sequence[RuntimeModule]) -> None:
    for module in modules:
        name = type(module).__name__
        if isinstance(module, TokenPolicy) and module.lookahead and not module.causal:
            raise ConfigError(
                f"{name}(lookahead=True) would decide by drafts that are not verified: use it without {_DRAFTS}, {_REMEDY}."
            )
        if isinstance(module, Transform) and not module.causal:
            raise ConfigError(
                f"{name} cuts the prompt, and speculative decoding counts its tokens (assistant_model, prompt_lookup_num_tokens): use one of "
                f"them, {_REMEDY}."
            )
        evicts = isinstance(module, EvictionPolicy) and module.evicts_cache
        if evicts or (isinstance(module, MergePolicy) and module.merges_cache):
            raise ConfigError(
                f"{name} changes the cache after each pass, drafts that are rejected later included: use it without {_DRAFTS}, {_REMEDY}."
            )


def _check_chunks(modules: Sequence[RuntimeModule], chunk: int | None, tokens: int) -> None:
    if chunk is None or chunk >= tokens:
        return
    for module in modules:
        if isinstance(module, TokenPolicy | Transform) and not module.causal:
            raise ConfigError(
                f"{type(module).__name__} decides about a prompt by all of it, and prefill_chunk_size={chunk} gives it {tokens} tokens in parts: "
                f"leave out prefill_chunk_size, {_REMEDY}."
            )
