"""An attention function of ours in place of transformers' own, for the length of a context.

transformers finds attention by the name that stands in a model's configuration. Whatever is registered under a name has to bring the builder of
masks along: without one transformers hands over no mask, and a sliding window would see everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def register(name: str, function: Callable[..., Any]) -> None:
    """`function` may now be asked for by that name; it gets the masks that sdpa gets."""
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def sdpa(*arguments: Any, **options: Any) -> Any:
    """transformers' own, for whatever a function of ours leaves to it."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"](*arguments, **options)


@contextmanager
def attention_function(model: PreTrainedModel, name: str) -> Iterator[None]:
    """All layers of the model attend by the function of that name."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation_internal = name  # transformers' own setter asks whether a kernel of that name can be downloaded
    try:
        yield
    finally:
        config._attn_implementation_internal = before
