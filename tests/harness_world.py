"""What the harness's tests run on: a tiny random GPT-2 with a byte tokenizer and a few kilobytes of text, made in a second."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

LAYERS = 6
WINDOW, PROMPT = 32, 24


def make_model(folder: Path, *, seed: int = 0, layers: int = LAYERS, positions: int = 64) -> Path:
    """A Hugging Face folder: GPT-2 of `layers` layers and width 16, one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<end>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", bos_token="<end>").save_pretrained(folder)
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=257, n_embd=16, n_layer=layers, n_head=2, n_positions=positions, initializer_range=0.2, bos_token_id=256,
        eos_token_id=256,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def make_text(path: Path, *, seed: int = 0, words: int = 150) -> Path:
    draw = random.Random(seed)
    path.write_text(" ".join("".join(draw.choices("abcdefgh", k=draw.randint(2, 7))) for _ in range(words)), encoding="utf-8")
    return path


def make_world(folder: Path, *, layers: int = LAYERS, window: int = WINDOW, prompt: int = PROMPT) -> list[str]:
    """A model and two texts in `folder`; the overrides that select them, quickly measured."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model", layers=layers, positions=2 * window)
    make_text(folder / "test.txt", seed=1, words=150 * window // WINDOW)
    make_text(folder / "calibration.txt", seed=2, words=150 * window // WINDOW)
    return [
        "model=folder", "model.name=tiny", f"model.path={folder / 'model'}", "dataset=file",
        f"dataset.files.test={folder / 'test.txt'}", f"dataset.files.calibration={folder / 'calibration.txt'}",
        "dataset.windows=10", "dataset.calibration_windows=4", f"protocol.window_tokens={window}",
        f"protocol.prompt_tokens={prompt}", "protocol.batch_size=4", "measure=quick", "measure.audit.probes=1", "threads=1",
    ]  # fmt: skip


TREEBANK_WORDS = {"DT": ["the", "a"], "NN": ["dog", "cat", "can't"], "VBD": ["saw", "heard"], "IN": ["in", "by"], "CC": ["and"]}
_UPOS = {"DT": "DET", "NN": "NOUN", "VBD": "VERB", "IN": "ADP", "CC": "CCONJ", ".": "PUNCT"}


def make_treebank(folder: Path, *, sentences: int = 60, seed: int = 0, space: str = " ") -> Path:
    """A folder like GUM's: two documents, one of them for calibration, of sentences "the dog saw a cat in the dog." with their trees.

    Without `space`, neighbouring words are neighbouring tokens of a byte tokenizer.
    """
    draw = random.Random(seed)
    for sub in ("dep", "const"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    (folder / "splits.md").write_text("# Splits\n\n## dev\n\n  * one\n\n## test\n\n  * two\n")
    for document in ("one", "two"):
        blocks, trees = [f"# newdoc id = {document}"], []
        for number in range(sentences):
            tags = ["DT", "NN", "VBD", "DT", "NN", *(["IN", "DT", "NN"] if draw.random() < 0.5 else [])]
            words = [draw.choice(TREEBANK_WORDS[tag]) for tag in tags]
            lines = [f"# sent_id = {document}-{number}", f"# text = {space.join(words)}."]
            for i, (word, tag) in enumerate(zip([*words, "."], [*tags, "."], strict=True), 1):
                lines.append(f"{i}\t{word}\t_\t{_UPOS[tag]}\t{tag}\t_\t_\t_\t_\t_")
            blocks.append("\n".join(lines))
            leaf = [f"({tag} {word})" for tag, word in zip(tags, words, strict=True)]
            phrase = f" (PP {leaf[5]} (NP {leaf[6]} {leaf[7]}))" if len(leaf) > 5 else ""
            trees.append(f"(ROOT (S (NP-SBJ {leaf[0]} {leaf[1]}) (VP {leaf[2]} (NP {leaf[3]} {leaf[4]}){phrase}) (. .)))")
        (folder / "dep" / f"{document}.conllu").write_text(blocks[0] + "\n" + "\n\n".join(blocks[1:]) + "\n\n")
        (folder / "const" / f"{document}.ptb").write_text("\n\n".join(trees))
    return folder
