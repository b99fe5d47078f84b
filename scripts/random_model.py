"""A folder with a model of random weights in the shape of a known one: a recipe is tried end to end before its weights are fetched.

    python scripts/random_model.py gpt2-large /folder --tokenizer ../shared/data/gpt2-tokenizer

Memory, disk, time and every operation are those of the real model; what it predicts is noise.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from quicksilver.runs.estimate import SHAPES
from quicksilver.runtime.errors import ConfigError


def write(name: str, folder: Path, tokenizer: Path, *, dtype: str = "float32") -> int:
    """Draw the weights of `name`, write them with the files of `tokenizer`; returns the number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    known = sorted(path.name for path in SHAPES.iterdir() if path.is_dir())
    if name not in known:
        raise ConfigError(f"{name}: its shape is not known. There are: {', '.join(known)}.")
    patterns = ("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json")
    if not (files := [path for pattern in patterns for path in tokenizer.glob(pattern)]):
        raise ConfigError(f"--tokenizer {tokenizer}: there is no tokenizer.json, tokenizer.model or vocab.json.")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} has something in it: give a folder that is not there.")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(SHAPES / name), dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    for path in files:
        shutil.copy(path, folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="gpt2-large or llama2-7b")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with the tokenizer's files")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    asked = parser.parse_args(words)
    try:
        count = write(asked.name, asked.folder, asked.tokenizer, dtype=asked.dtype)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{asked.folder}: {count:,} parameters of random weights in the shape of {asked.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
