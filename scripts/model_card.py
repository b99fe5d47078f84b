"""Evaluate a reference model and write its card: `python scripts/model_card.py reference-gpt2`.

Everything in the card is computed here or read from `training.json`, which the training wrote: bits per byte with 512-token windows,
loss by position, logit-lens loss and agreement with the last layer by depth, and a greedy sample.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import reference_corpus as corpus
import torch
import torch.nn.functional as F
import training_loop
from context_use import whole
from train_reference import DATA, SHIPPED, Recipe, bits_per_byte, load_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from quicksilver.data.windows import encode
from quicksilver.models.loading import LEFT_OUT
from quicksilver.runtime import ConfigError, architecture_of

CONTEXT_TOKENS = 512  # of a window, or fewer where the model takes no more
POSITIONS = (1, 17, 65, 129, 257, 385, 512)  # at which the loss by position is cut
# label, text, windows (None: all of it)
EVALUATIONS = (
    ("WikiText-103 validation", "wikitext-103-valid", None),
    ("WikiText-103 test, 200 windows evenly spread", "wikitext-103-test", 200),
    ("python-docs", "python-docs", None),
    ("books, validation, 200 windows evenly spread", "books-valid", 200),
)
PROMPT = "The language reference describes the syntax of"
SAMPLED_TOKENS = 16
LICENCES = {
    "wiki": ("WikiText-2 train (article order shuffled)", "CC BY-SA 3.0"), "books": ("public-domain books", "public domain"),
    "docstrings": ("docstrings of the installed Python packages and standard library", "each package's own, mostly BSD, MIT, Apache-2.0, PSF"),
    "code": ("source files of the same packages", "each package's own, as above"),
    "recall": ("facts, passages and questions, by a fixed seed", "Apache-2.0"),
}  # fmt: skip


@torch.no_grad()
def depth_profile(model: PreTrainedModel, windows: torch.Tensor) -> tuple[list[float], list[float], torch.Tensor]:
    """How far the residual stream is from its end; windows (W, N) long.

    Returns:
        By layer the logit-lens loss in nats, and the share of tokens whose lens argmax is the last layer's; nats by position (N-1,).
    """
    arch = architecture_of(model)
    lens, agree = torch.zeros(2, arch.n_layers, dtype=torch.float64)
    position = torch.zeros(windows.shape[1] - 1, dtype=torch.float64)
    for row in windows:
        out = model(row[None], output_hidden_states=True, use_cache=False)
        final, targets = out.logits[0, :-1], row[1:]
        position += F.cross_entropy(final, targets, reduction="none").double()
        # The last entry of hidden_states is already normed: the last layer's lens is the model's own output.
        states = [*out.hidden_states[1:-1], None]
        for layer, hidden in enumerate(states):
            logits = final if hidden is None else arch.logits(hidden[0, :-1])
            lens[layer] += F.cross_entropy(logits, targets).double()
            agree[layer] += (logits.argmax(-1) == final.argmax(-1)).double().mean()
    n = len(windows)
    return (lens / n).tolist(), (agree / n).tolist(), position / n


def card(name: str, folder: Path, data_root: Path) -> str:
    """The card as markdown, by model_card.md.jinja; takes minutes. Raises ConfigError or FileNotFoundError: no weights, or no text."""
    text = corpus.held_out_texts(data_root)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(whole(folder), dtype=torch.float32).eval(), load_tokenizer(folder)
    training = json.loads((folder / "training.json").read_text())
    recipe = Recipe.from_saved(training["recipe"])
    context = min(CONTEXT_TOKENS, recipe.context_tokens)
    lens_nats, agreement, nats_by_position = depth_profile(model, encode(text["python-docs"], tokenizer, context).ids[::20])
    prompt = tokenizer(PROMPT, return_tensors="pt", truncation=True, max_length=context - SAMPLED_TOKENS)["input_ids"]
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=SAMPLED_TOKENS, do_sample=False)
    sample = tokenizer.batch_decode(generated[:, prompt.shape[1] :])[0].strip()
    # Of each row of the loss by position, the first and one after the last; a window's first token is not scored.
    ends = [*(end for end in POSITIONS if end < context), context]
    return training_loop.filled(
        "model_card.md.jinja", name=name, recipe=recipe, training=training, corpus=training["corpus"], context=context, licences=LICENCES,
        parameters=sum(p.numel() for p in model.parameters()), weights_left_out=(folder / LEFT_OUT).is_file(),
        size_mb=sum(p.stat().st_size for p in folder.iterdir() if p.name != "README.md") / 1e6,
        scores=[(label, bits_per_byte(model, tokenizer, text[key], context, windows)) for label, key, windows in EVALUATIONS],
        by_layer=zip(lens_nats, agreement, strict=True),
        by_position=[(lo, hi - 1, nats_by_position[lo - 1 : hi - 1].mean().item()) for lo, hi in pairwise(ends)],
        sample=f"`{PROMPT}` → `{sample!r}`" if "`" not in sample else f"{PROMPT!r} → {sample!r}",
        falling_steps=recipe.steps - min(recipe.decay_start, *(recipe.shortened or (recipe.steps,))),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--folder", type=Path, default=SHIPPED)
    parser.add_argument("--data-root", type=Path, default=DATA)
    args = parser.parse_args()
    folder = args.folder / args.name
    if not (folder / "training.json").is_file():
        raise SystemExit(f"{folder} has no training.json: train it first, with scripts/train_reference.py {args.name}.")
    try:
        (folder / "README.md").write_text(card(args.name, folder, args.data_root))
    except (FileNotFoundError, ConfigError) as error:
        raise SystemExit(str(error)) from None
    print(folder / "README.md")


if __name__ == "__main__":
    main()
