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
from train_reference import DATA, SHIPPED, Recipe, bits_per_byte, load_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from quicksilver.models.loading import LEFT_OUT
from quicksilver.runtime import architecture_of

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
WITHOUT_WEIGHTS = "Its weights are not in the package, to keep it small: `make train-reference MODEL={name}` makes them, and then this loads it:"
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
    """The card as markdown; takes minutes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    purpose = "It exists so that token-level adaptivity can be measured on a really trained, deep enough model without a network."
    if name.startswith("ladder-"):
        purpose = "It is a rung of the ladder of sizes below reference-gpt2 (`make reproduce-figure FIGURE=ladder`)."
    elif name.endswith("-seed43"):
        purpose = "It is reference-gpt2 trained a second time, from another seed (`make reproduce-figure FIGURE=ladder`)."
    tokenizer = load_tokenizer(folder)
    training = json.loads((folder / "training.json").read_text())
    recipe, text = training["recipe"], corpus.held_out_texts(data_root)
    context = min(CONTEXT_TOKENS, recipe["context_tokens"])
    scores = [(label, bits_per_byte(model, tokenizer, text[key], context, windows, "cpu")) for label, key, windows in EVALUATIONS]
    ids = torch.tensor(tokenizer(text["python-docs"], add_special_tokens=False)["input_ids"])
    lens_nats, agreement, nats_by_position = depth_profile(model, ids[: len(ids) // context * context].view(-1, context)[::20])
    prompt = tokenizer(PROMPT, return_tensors="pt", truncation=True, max_length=context - SAMPLED_TOKENS)["input_ids"]
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=SAMPLED_TOKENS, do_sample=False)
    (sample,) = tokenizer.batch_decode(generated[:, prompt.shape[1] :])
    # Of each row of the loss by position, the first and one after the last; a window's first token is scored by nobody.
    ends = [*(end for end in POSITIONS if end < context), context]
    parameters = sum(p.numel() for p in model.parameters())
    size_mb = sum(p.stat().st_size for p in folder.iterdir() if p.name != "README.md") / 1e6

    rows = [
        f"# {name}", "",
        f"A {recipe['family'].upper() if recipe['family'] == 'gpt2' else 'Llama'}-architecture language model of {parameters / 1e6:.2f} M parameters, "
        f"trained {'' if recipe.get('start') else 'from scratch '}for QuickSilver. It has {recipe['layers']} layers, width {recipe['width']}, {recipe['heads']} heads"
        + (f" ({recipe['kv_heads']} key-value heads, SwiGLU)" if recipe["family"] == "llama" else "")
        + f", and a context of {recipe['context_tokens']} tokens. Its byte-level BPE has {recipe['vocab_size']} entries; embeddings are tied. "
        f"It is stored in bfloat16 ({size_mb:.1f} MB).",
        f"{purpose} It is no assistant.", "",
        *((WITHOUT_WEIGHTS.format(name=name), "") if (folder / LEFT_OUT).is_file() else ()),
        "```python", f'AutoModelForCausalLM.from_pretrained("quicksilver/models/reference/{name}")', "```", "",
        "## Evaluation", "", f"Disjoint windows of {context} tokens; every position but the first of a window is scored. Arithmetic is float32 on the stored bfloat16 weights.", "",
        "| text (kept out of training) | bits per byte |", "|---|---|", *(f"| {label} | {value:.3f} |" for label, value in scores), "",
        "![loss curve](loss_curve.png)", "",
        "### Where tokens settle", "", f"python-docs, {context}-token windows. Logit lens: final norm and output head on the state after a layer. "
        "Agreement: share of tokens whose most likely next token is already the last layer's.", "",
        "| layer | logit-lens loss (nats) | agreement with the last layer |", "|---|---|---|",
        *(f"| {i + 1} | {v:.3f} | {a:.1%} |" for i, (v, a) in enumerate(zip(lens_nats, agreement, strict=True))), "",
        "### Loss by position", "", "| positions | nats per token |", "|---|---|",
        *(f"| {lo} to {hi - 1} | {nats_by_position[lo - 1 : hi - 1].mean().item():.3f} |" for lo, hi in pairwise(ends)), "",
        "### Greedy sample", "", f"`{PROMPT}` → `{sample.strip()!r}`" if "`" not in sample else f"{PROMPT!r} → {sample.strip()!r}", "",
        "## Data and licences", "", "| source | documents | bytes | tokens | share of training (stable, decay) | licence |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for i, (source, info) in enumerate(training["corpus"]["sources"].items()):
        label, licence = LICENCES[source]
        shares = f"{recipe['mixture'][i]:.0%}, {recipe['decay_mixture'][i]:.0%}"
        rows.append(f"| {label} | {info['documents']:,} | {info['bytes']:,} | {info['tokens']:,} | {shares} | {licence} |")
    more = ", the packages of python-source" if "code" in recipe["sources"] else ""
    rows += [
        "", f"Kept out: WikiText-103 validation and test, books validation and test, `pydoc_data.topics`{more}. Every training document that shares {training['corpus']['ngram_words']} "
        "consecutive words with them was removed, and the rest counted again:", "",
        "| source | 13-grams | shared before | documents removed | shared after |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for source, info in training["corpus"]["sources"].items():
        o = info["overlap"]
        removed = f"{o['removed']} of {o['documents']:,}"
        rows.append(f"| {LICENCES[source][0]} | {o['ngrams']:,} | {o['shared_before']:,} | {removed} | {o['shared_after']} |")
    trained = Recipe.from_saved(recipe)
    steps, decay = trained.steps, trained.steps - min(trained.decay_start, *(trained.shortened or (trained.steps,)))
    windows = f"Windows have {recipe['stable_context_tokens']} tokens while the learning rate is constant, and {recipe['context_tokens']} while it falls (the last {decay} steps)."
    if trained.long_from_tokens == 0:
        windows = f"Windows have {recipe['context_tokens']} tokens. The learning rate falls in the last {decay} steps."
    begun = f" It goes on from {trained.start}." if trained.start else ""
    rows += [
        "", "## Training", "",
        f"{steps * recipe['batch_tokens'] / 1e6:.1f} M tokens in {steps} steps of {recipe['batch_tokens']:,}. {windows}"
        f"{begun} Muon ({recipe['lr_muon']}) for the layers' matrices, AdamW ({recipe['lr_adamw']}) for the rest, bfloat16 autocast, seed {recipe['seed']}.",
        f"{training['hours']:.1f} hours on {training['threads']} thread(s) of {training['device'].upper()}, shared with other work; torch {training['torch']}. A compute-limited model: the curve was still falling.", "",
        f"Again: `make train-reference MODEL={name}` (needs the text, see `--data-root`). The same seed, machine and packages give the same weights. The docstrings are those of the installed packages. Other versions give a similar corpus, not the same.", "",
        "## Limits", "", "English and Python documentation only; a few million training tokens; no instruction tuning, no safety work. Facts it states are not to be believed.", "",
    ]  # fmt: skip
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--folder", type=Path, default=SHIPPED)
    parser.add_argument("--data-root", type=Path, default=DATA)
    args = parser.parse_args()
    folder = args.folder / args.name
    if not (folder / "training.json").is_file():
        raise SystemExit(f"{folder} has no training.json: train it first, with scripts/train_reference.py {args.name}.")
    (folder / "README.md").write_text(card(args.name, folder, args.data_root))
    print(folder / "README.md")


if __name__ == "__main__":
    main()
