"""Checkpoints for sequence classification: the same decoder with a head of labels, which answers a task from the last token's state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quicksilver.runtime.errors import ConfigError

_KIND = "ForSequenceClassification"
_HEAD = "classification_head"


def is_classifier(folder: Path) -> bool:
    """Whether config.json says so."""
    named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    return any(str(name).endswith(_KIND) for name in named)


def as_causal(name: str, classifier: Any) -> Any:
    """The causal language model around the classifier's decoder, with its head of labels beside the head of words.

    The head of words is the embedding, as in the model that the classifier was made of; nobody trained it with this decoder, so that a
    perplexity under it is only as good as fine-tuning left it.

    Raises:
        ConfigError: no decoder with a `score` head, or a head of words that was not tied to the embedding and is gone.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = classifier.config
    if not isinstance(getattr(classifier, "score", None), torch.nn.Linear):
        raise ConfigError(
            f"model={name} classifies sequences by another head than a decoder's `score`: take a checkpoint of a causal model."
        )
    if not getattr(config, "tie_word_embeddings", False):
        raise ConfigError(
            f"model={name} classifies sequences, and its head of words (not tied to the embedding) was left out of the checkpoint; every "
            "record has a perplexity. Take a checkpoint with tie_word_embeddings, or a causal model that answers by label words."
        )
    with torch.device("meta"):  # nothing of it is used but its forward
        causal: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation=config._attn_implementation, dtype=classifier.dtype
        )
    setattr(causal, causal.base_model_prefix, classifier.base_model)
    causal.get_output_embeddings().weight = causal.get_input_embeddings().weight
    causal.add_module(_HEAD, classifier.score)
    return causal


def classification_head(model: Any) -> Any:
    """The head of labels, a linear map from the last token's final state; None: the model has none."""
    return getattr(model, _HEAD, None)
