"""What is done to a prompt without looking into the model: truncation, and prompt-lookup speculative decoding."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from quicksilver.modules.signals import lowest, slot_draw
from quicksilver.runtime import Architecture, ConfigError, Transform
from quicksilver.runtime.options import Count, Positive, check_count, check_number
from quicksilver.runtime.placement import replaced


@dataclass(kw_only=True)
class PromptLookup(Transform):
    """`generate` proposes the tokens that followed the last n-gram earlier in the text and keeps those it would have chosen itself.

    Source: speculative decoding, "Fast Inference from Transformers via Speculative Decoding" (Leviathan et al., arXiv 2211.17192),
    with the prompt as draft model: https://github.com/apoorvumang/prompt-lookup-decoding; transformers' `prompt_lookup_num_tokens`.

    What differs: nothing; this turns it on for the length of `apply`. The output is that of greedy decoding, and a pass that scores given
    text is the dense model's. Only `generate` of one sequence is faster.

    Args:
        tokens: proposed at a time.
        ngram: longest n-gram that is looked up.
    """

    tokens: Positive = 10
    ngram: Positive = 2
    changes_weights: ClassVar[bool] = False

    def applied(self, architecture: Architecture) -> AbstractContextManager[None]:
        config = architecture.model.generation_config
        return replaced(config, prompt_lookup_num_tokens=self.tokens, max_matching_ngram_size=self.ngram)


@dataclass(kw_only=True)
class PromptTruncation(Transform):
    """The model is given a shorter prompt; the kept tokens take the positions 0, 1, 2 … as in a prompt of that length. Not causal.

    Source: common practice; `which="ends"` is the truncation of LongBench (Bai et al., arXiv 2308.14508), which keeps both ends.

    No layer sees the tokens that are cut, so every saving is exact. It is the first baseline for a method that saves work in prompts: on a
    model that does not use its context, truncation costs nothing. The base model returns states (B, N, D) for the whole prompt, NaN where cut.

    Args:
        keep: share of each row's real tokens (float), or their number (int); rows with fewer tokens are left whole.
        which: `last` keeps the newest tokens, `ends` half of them from the start, `random` the last token and others by chance.
        seed: of `random`.

    Raises:
        ConfigError: in a run, a number that no row reaches, an attention mask that is no padding mask.
    """

    keep: int | float = 0.6
    which: Literal["last", "ends", "random"] = "last"
    seed: Count = 0
    changes_weights: ClassVar[bool] = False
    causal = False  # whether a token is cut depends on the prompt's length

    def __post_init__(self) -> None:
        if isinstance(self.keep, int) and not isinstance(self.keep, bool):
            check_count("keep", self.keep, 1)
        elif check_number("keep", self.keep, 0.0, 1.0) == 0:
            raise ConfigError(f"keep={self.keep!r} leaves no prompt: give a share such as 0.6, or a number of tokens.")
        super().__post_init__()

    def null(self, seed: int) -> PromptTruncation:
        return replace(self, which="random", seed=seed)

    def kept(self, valid: torch.Tensor, input_ids: torch.Tensor | None) -> torch.Tensor:
        """Which tokens of a prompt stay: valid (B, N) bool, ids (B, N) long or None -> (B, N) bool. Raises ConfigError: `keep` is
        a number of tokens that no row has."""
        n, slots = valid.sum(1, keepdim=True), valid.long().cumsum(1) - 1
        if isinstance(self.keep, int):
            if int(n.max()) < self.keep:
                raise ConfigError(f"keep={self.keep} is more than the prompt's {int(n.max())} tokens: give fewer, or a share.")
            m = n.clamp(max=self.keep)
        else:
            m = (n * self.keep + 0.5).floor().long().clamp(min=1)
        if self.which == "random":
            last = valid & (slots == n - 1)
            return last | lowest(slot_draw(self.seed, 0, slots, input_ids), valid & ~last, m - 1)
        head = m // 2 if self.which == "ends" else torch.zeros_like(m)
        return valid & ((slots < head) | (slots >= n - (m - head)))

    @contextmanager
    def applied(self, architecture: Architecture) -> Iterator[None]:
        base = architecture.base
        cut = _Cut(self, inspect.signature(base.forward))
        before, after = base.register_forward_pre_hook(cut.before, with_kwargs=True), base.register_forward_hook(cut.after)
        with before, after:
            yield


class _Cut:
    """The two hooks of one context, and what they know of the prompt in the cache."""

    def __init__(self, module: PromptTruncation, signature: inspect.Signature) -> None:
        self._module, self._signature = module, signature
        self._columns: torch.Tensor | None = None  # (B, M) columns of the prompt that a shortened pass was given
        self._given: torch.Tensor | None = None  # (B, M) bool, which of them are tokens
        self._n = 0  # columns of the prompt before it was cut

    def before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with a shorter prompt, or with a mask and positions that fit a cache of a shortened one."""
        call = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        call |= call.pop("kwargs", {})
        tokens = call["input_ids"] if call.get("input_ids") is not None else call["inputs_embeds"]
        cache, mask, (batch, n) = call.get("past_key_values"), call.get("attention_mask"), tokens.shape[:2]
        seen = 0 if cache is None else cache.get_seq_length()
        self._columns = None
        if seen == 0:
            self._given = None
            if n > 1:
                self._shorten(call, self._padding(mask, (batch, n), 0, tokens))
        elif self._given is not None:
            later = seen - self._given.shape[1] + n
            valid = self._padding(mask, (batch, self._n + later), self._n, tokens)
            self._place(call, torch.cat([self._given, valid], dim=1), seen)
        return (), call

    def _padding(self, mask: torch.Tensor | None, shape: tuple[int, int], first: int, tokens: torch.Tensor) -> torch.Tensor:
        """(B, n - first) bool, which columns from `first` on are tokens, by a padding mask of that shape or by none."""
        if mask is None:
            return torch.ones(shape[0], shape[1] - first, dtype=torch.bool, device=tokens.device)
        if tuple(mask.shape) != shape:
            raise ConfigError(f"attention_mask of shape {tuple(mask.shape)}: truncation needs a padding mask, {shape}.")
        return mask[:, first:].bool()

    def _shorten(self, call: dict[str, Any], valid: torch.Tensor) -> None:
        kept, n = self._module.kept(valid, call.get("input_ids")), valid.shape[1]
        width = int(kept.sum(1).max())
        # Kept columns in their order, to the right; columns to the left of a row with fewer are padding.
        columns = torch.sort(kept.long(), dim=1, stable=True).indices[:, n - width :]
        self._columns, self._n, self._given = columns, n, kept.gather(1, columns)
        for name in ("input_ids", "inputs_embeds", "token_type_ids"):
            if call.get(name) is not None:
                index = columns if call[name].ndim == 2 else columns[:, :, None].expand(-1, -1, call[name].shape[2])
                call[name] = call[name].gather(1, index)
        self._place(call, self._given, 0)

    def _place(self, call: dict[str, Any], valid: torch.Tensor, seen: int) -> None:
        """Mask and positions of a call, for valid (B, seen + N) bool."""
        call["attention_mask"] = None if bool(valid.all()) else valid.long()
        call["position_ids"] = (valid.long().cumsum(1) - 1).clamp(min=0)[:, seen:]
        if call.get("cache_position") is not None:
            call["cache_position"] = torch.arange(seen, valid.shape[1], device=valid.device)

    def after(self, _: Any, args: tuple[Any, ...], output: Any) -> Any:
        """The output with states in the columns that the caller knows."""
        if self._columns is not None and self._given is not None:
            short = output.last_hidden_state  # (B, M, D)
            states = short.new_full((short.shape[0], self._n, short.shape[2]), torch.nan)
            kept = torch.where(self._given[:, :, None], short, torch.nan)
            output.last_hidden_state = states.scatter(1, self._columns[:, :, None].expand_as(kept), kept)
        return output
