"""What the harness's tests run on: a tiny random GPT-2 with a byte tokenizer and a few kilobytes of text, made in a second."""

from __future__ import annotations

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
        vocab_size=257,
        n_embd=16,
        n_layer=layers,
        n_head=2,
        n_positions=positions,
        initializer_range=0.2,
        bos_token_id=256,
        eos_token_id=256,
    )
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
        "model=folder",
        "model.name=tiny",
        f"model.path={folder / 'model'}",
        "dataset=file",
        f"dataset.files.test={folder / 'test.txt'}",
        f"dataset.files.calibration={folder / 'calibration.txt'}",
        "dataset.windows=10",
        "dataset.calibration_windows=4",
        f"protocol.window_tokens={window}",
        f"protocol.prompt_tokens={prompt}",
        "protocol.batch_size=4",
        "measure=quick",
        "measure.audit.probes=1",
        "threads=1",
    ]
