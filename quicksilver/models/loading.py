"""Frozen models: where their files are, what they are (digest), and loading them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quicksilver.models.hub import require_hub
from quicksilver.models.spec import ModelConfig
from quicksilver.runtime.errors import ConfigError

EMBEDDED = Path(__file__).parent / "reference"
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# Never *.bin, *.pt or *.py: pickles and code run what they like.
_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", *_TOKENIZER)
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelFiles:
    """A local folder with a model, and where it came from.

    Attributes:
        source: `embedded`, `folder` or `hub`, with the name, for the record.
        commit: of the hub's snapshot; None for folders.
    """

    folder: Path
    source: str
    commit: str | None = None


@dataclass(frozen=True)
class Loaded:
    """A model ready to run: in eval mode, without gradients."""

    model: Any
    tokenizer: Any
    files: ModelFiles


def locate(config: ModelConfig, root: Path | None = None) -> ModelFiles:
    """The folder with a model's files, fetched from the hub where that is needed.

    Args:
        root: data.root.

    Raises:
        ConfigError: nothing there, an incomplete folder, a hub that cannot be reached. The message names the offline choices.
    """
    kind, _, name = config.path.partition(":")
    if kind == "embedded":
        folder = EMBEDDED / name
        if not folder.is_dir():
            there = sorted(p.name for p in EMBEDDED.glob("*/")) if EMBEDDED.is_dir() else []
            raise ConfigError(
                f"model={config.name}: the package has no embedded model {name} (it has {', '.join(there) or 'none'}). "
                "Train it with scripts/train_reference.py, or take another: model=gpt2, or model=folder model.name=… "
                "model.path=/folder."
            )
        return ModelFiles(_complete(config, folder), f"embedded:{name}")
    if kind == "data":
        if root is None:
            raise ConfigError(
                f"model={config.name} lies in data.root, which is not set: give data.root=/folder (or QUICKSILVER_DATA), or "
                f"model.path=/folder."
            )
        return ModelFiles(_complete(config, root / name), f"folder:{root / name}")
    path = Path(config.path).expanduser()
    if path.is_dir():
        return ModelFiles(_complete(config, path), f"folder:{path}")
    if path.is_absolute() or config.path.startswith((".", "~")) or config.path.count("/") > 1:
        raise ConfigError(
            f"model={config.name}: there is no folder {path}. Give model.path=/folder of a Hugging Face model, or a hub id."
        )
    if root is not None and (root / config.name / "config.json").is_file():
        return ModelFiles(_complete(config, root / config.name), f"folder:{root / config.name}")
    return _from_hub(config)


def _from_hub(config: ModelConfig) -> ModelFiles:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(local_only: bool) -> Path:
        return Path(
            snapshot_download(config.path, revision=config.revision, allow_patterns=list(_FILES), local_files_only=local_only)
        )

    try:
        cached = snapshot(local_only=True)
    except LocalEntryNotFoundError:
        cached = None
    if cached is None or _what_is_missing(cached):
        offline = (
            "model.path=/folder of a Hugging Face model",
            f"a folder {config.name} below data.root",
            "HF_HOME=/cache that holds it",
            "model=reference-gpt2 (embedded)",
        )
        require_hub(f"model={config.name}", config.path, "model", offline)
        try:
            cached = snapshot(local_only=False)
        except OSError as error:
            raise ConfigError(
                f"model={config.name}: {config.path} cannot be fetched from the hub: {str(error).splitlines()[0]}"
            ) from error
    return ModelFiles(_complete(config, cached), f"hub:{config.path}", cached.name)


def _complete(config: ModelConfig, folder: Path) -> Path:
    missing = _what_is_missing(folder)
    if missing:
        raise ConfigError(
            f"model={config.name}: {folder} has {missing}. It must be a Hugging Face model folder with safetensors weights "
            f"and its tokenizer."
        )
    return folder


def _what_is_missing(folder: Path) -> str | None:
    if not (folder / "config.json").is_file():
        return "no config.json"
    if (folder / _INDEX).is_file():
        try:
            shards = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError) as error:
            return f"an unreadable {_INDEX} ({type(error).__name__}: {error})"
        absent = sorted(name for name in shards if not (folder / name).is_file())
        if absent:
            return f"no {absent[0]}, which {_INDEX} names"
    elif not any(folder.glob("*.safetensors")):
        return "no *.safetensors"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return "no tokenizer.json, tokenizer.model or vocab.json"
    return None


def weights_digest(folder: Path, remembered: MutableMapping[str, str] | None = None) -> str:
    """sha256 over the names and contents of everything that decides what the model answers: weights, architecture, tokenizer.

    Args:
        remembered: digests of files by path, size and time of change; read and added to, so that gigabytes are read once.
    """
    remembered = {} if remembered is None else remembered
    whole = hashlib.sha256()
    names = {p.name for p in folder.glob("*.safetensors")} | {"config.json", _INDEX, *_TOKENIZER}
    for name in sorted(names):
        path = folder / name
        if not path.is_file():
            continue
        status = path.stat()
        key = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
        if key not in remembered:
            with path.open("rb") as file:
                remembered[key] = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{name} {remembered[key]}\n".encode())
    return whole.hexdigest()


def load(config: ModelConfig, files: ModelFiles) -> Loaded:
    """Load model and tokenizer from local files: safetensors only, no code of the folder is run, no network is asked.

    Raises:
        ConfigError: damaged weights, a device that is not there, an architecture transformers does not know.
        UnsupportedModelError: a family without an adapter in the runtime.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from quicksilver.runtime.architecture import architecture_of

    logging.disable_progress_bar()  # there is one bar, of the runs
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(files.folder, **local)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model={config.name}: {files.folder} has no tokenizer that transformers reads: {_first_line(error)}"
        ) from error
    try:
        model = AutoModelForCausalLM.from_pretrained(
            files.folder,
            dtype=getattr(torch, config.dtype),
            attn_implementation=config.attn_implementation,
            use_safetensors=True,
            device_map=_device_map(config),
            **local,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model={config.name}: {files.folder} cannot be loaded: {_first_line(error)}") from error
    model.eval().requires_grad_(False)
    architecture_of(model)  # an unknown family is refused here, before anything is computed
    return Loaded(model, tokenizer, files)


def _device_map(config: ModelConfig) -> str:
    import torch

    if config.device_map == "auto" and torch.cuda.device_count() < 2:
        # What accelerate would answer, without its hooks on every layer.
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if config.device_map.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"model.device_map={config.device_map}: this machine has no CUDA device. Use model.device_map=cpu or auto."
        )
    return config.device_map


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
