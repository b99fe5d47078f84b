"""Does a model use its context? `python scripts/context_use.py FOLDER` (a run's, such as `…/far-gpt2`, or an exported model's).

What a model that uses its context must show: cutting the oldest 40% of a prompt must cost something, the same tokens must be cheaper after a
long context than after a short one, and what stands further back must be answered.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import reference_corpus as corpus
import torch
import torch.nn.functional as F

from quicksilver.data.made_here import far_context, python_docs, python_source
from quicksilver.data.spec import FarContext, Part
from quicksilver.data.windows import encode
from quicksilver.models.loading import locate
from quicksilver.models.spec import ModelConfig
from quicksilver.runtime.errors import ConfigError

SCORED_TOKENS, SHORT_TOKENS, SEEN_TOKENS = 64, 128, 8
_FACT = re.compile(r"Where is the ([\w ]+)\? In the (\w+)\.")


@torch.no_grad()
def _nats(model: Any, rows: torch.Tensor) -> float:
    """Mean nats of the last 64 tokens of rows (B, N)."""
    logits = (model(row[None], use_cache=False).logits[0, -SCORED_TOKENS - 1 : -1].float() for row in rows)
    losses = [F.cross_entropy(one, row[-SCORED_TOKENS:]) for one, row in zip(logits, rows, strict=True)]
    return torch.stack(losses).mean().item()


@torch.no_grad()
def _answered(model: Any, tokenizer: Any, kind: FarContext, length: int, count: int, part: Part) -> float:
    """Share of right first guesses: tokens that follow 8 tokens seen before (copy), places of facts said before (recall)."""
    right = asked = 0
    for row in encode(far_context(kind, part), tokenizer, length, count).ids:
        hit = [None, *(model(row[None], use_cache=False).logits[0, :-1].argmax(-1) == row[1:]).tolist()]
        ids = row.tolist()
        if kind == "copy":
            seen: dict[tuple[int, ...], int] = {}
            for i in range(SEEN_TOKENS, len(ids)):
                before = tuple(ids[i - SEEN_TOKENS : i])
                if seen.get(before) == ids[i]:
                    asked, right = asked + 1, right + bool(hit[i])
                seen[before] = ids[i]
            continue
        pieces = [tokenizer.decode([i]) for i in ids]
        ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0).tolist()
        said: dict[str, str] = {}
        for fact in _FACT.finditer("".join(pieces)):
            if said.get(fact[1]) == fact[2]:
                of = [i for i, end in enumerate(ends) if end > fact.start(2) and end - len(pieces[i]) < fact.end(2)]
                asked, right = asked + 1, right + all(hit[i] for i in of)
            said[fact[1]] = fact[2]
    return right / max(asked, 1)


def context_use(model: Any, tokenizer: Any, data_root: Path, windows: int, part: Part = "test") -> dict[str, float]:
    """By name: costs in %, nats, shares. The model comes back in the mode it was in. Training looks at the calibration part."""
    training, longest = model.training, min(1024, model.config.max_position_embeddings)
    model.eval()
    books = data_root / "books" / {"test": "books_test.txt", "calibration": "books_valid.txt"}[part]
    texts = {"source": python_source(part), "docs": python_docs(part), "books": corpus.read_text(books)}
    found = {}
    prompts = [prompt for prompt in (448, 960) if prompt + SCORED_TOKENS <= longest]
    for (name, text), prompt in product(texts.items(), prompts):
        rows = encode(text, tokenizer, prompt + SCORED_TOKENS, windows).ids
        whole = _nats(model, rows)
        found[f"{name}_cut_{prompt}_pct"] = 100 * math.expm1(_nats(model, rows[:, round(0.4 * prompt) :]) - whole)
        found[f"{name}_{prompt}_against_{SHORT_TOKENS}_nats"] = _nats(model, rows[:, -SHORT_TOKENS - SCORED_TOKENS :]) - whole
    kinds: tuple[FarContext, ...] = ("copy", "recall")
    for kind in kinds:
        found[f"far_{kind}_answered"] = _answered(model, tokenizer, kind, longest, windows, part)
    model.train(training)
    return found


def measured(folder: Path, windows: int, data_root: Path) -> dict[str, float | None]:
    """What is printed of a folder. Raises ConfigError or FileNotFoundError: something that it needs is missing."""
    from train_reference import Recipe, bits_per_byte, build_model, corpus_name, load_tokenizer
    from training_loop import load_state
    from transformers import AutoModelForCausalLM

    if windows < 1:
        raise ConfigError(f"--windows {windows}: give a number of at least 1.")
    wikitext = corpus.read_text(data_root / "wikitext-103/wiki.valid.tokens")
    if (state := load_state(folder)) is not None:
        recipe = Recipe.from_saved(state["recipe"])
        model = build_model(recipe)
        model.load_state_dict(state["model"], strict=False)
        tokenizer = load_tokenizer(folder.parent / corpus_name(recipe), recipe.context_tokens)
    elif (folder / "config.json").is_file():
        model = AutoModelForCausalLM.from_pretrained(whole(folder), dtype=torch.float32)
        tokenizer = load_tokenizer(folder)
    else:
        raise ConfigError(f"{folder} has no training state and no config.json: give a run's folder, or an exported model.")
    found: dict[str, float | None] = {**context_use(model.eval(), tokenizer, data_root, windows)}
    length = min(512, model.config.max_position_embeddings)  # as the cards have it
    for name, text in {"python_docs": python_docs("test"), "wikitext_valid": wikitext}.items():
        found[f"{name}_bits_per_byte"] = bits_per_byte(model, tokenizer, text, length, 24)
    return found


def whole(folder: Path) -> Path:
    """The folder of a model. Raises ConfigError: its weights or its tokenizer are missing."""
    return locate(ModelConfig(folder.resolve().name, str(folder.resolve()))).folder


def main() -> None:
    from train_reference import DATA

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--data-root", type=Path, default=DATA)
    args = parser.parse_args()
    try:
        print(json.dumps(measured(args.folder, args.windows, args.data_root), indent=1))
    except (FileNotFoundError, ConfigError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
