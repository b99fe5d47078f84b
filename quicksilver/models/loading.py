"""Frozen models: where their files are, what they are (digest), and loading them."""

from __future__ import annotations

import atexit
import hashlib
import math
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quicksilver.models import memory_check
from quicksilver.models.hub import fetching
from quicksilver.models.parallel import cut
from quicksilver.models.spec import ModelConfig
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import read_json

_HEAD = "classification_head"


def is_classifier(folder: Path) -> bool:
    """Whether config.json says so."""
    named = read_json(folder / "config.json").get("architectures") or []
    return any(str(name).endswith("ForSequenceClassification") for name in named)


def as_causal(name: str, classifier: Any) -> Any:
    """The causal language model around the classifier's decoder, with its head of labels beside the head of words. Raises
    ConfigError: no decoder with a `score` head, or a head of words that was not tied to the embedding and is gone.

    The head of words is the embedding, as in the model that the classifier was made of; nobody trained it with this decoder, so that a
    perplexity under it is only as good as fine-tuning left it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = classifier.config
    if not isinstance(getattr(classifier, "score", None), torch.nn.Linear):
        raise ConfigError(f"model={name} classifies sequences by another head than a decoder's `score`: take a causal model.")
    if not getattr(config, "tie_word_embeddings", False):
        raise ConfigError(
            f"model={name} classifies sequences, and its head of words (not tied to the embedding) was left out of the checkpoint; every "
            "record has a perplexity. Take a checkpoint with tie_word_embeddings, or a causal model that answers by label words."
        )
    like = {"attn_implementation": config._attn_implementation, "dtype": classifier.dtype}
    with torch.device("meta"):  # nothing of it is used but its forward
        causal: Any = AutoModelForCausalLM.from_config(config, **like)
    setattr(causal, causal.base_model_prefix, classifier.base_model)
    causal.get_output_embeddings().weight = causal.get_input_embeddings().weight
    causal.add_module(_HEAD, classifier.score)
    return causal


def classification_head(model: Any) -> Any:
    """The head of labels, a linear map from the last token's final state; None: the model has none."""
    return getattr(model, _HEAD, None)


EMBEDDED = Path(__file__).parent / "reference"
_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
# Never *.bin, *.pt or *.py: pickles and code run what they like.
_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", *_TOKENIZER)
_INDEX = "model.safetensors.index.json"
LEFT_OUT = "weights.sha256"  # in the package, of weights that it does not have; as sha256sum writes it
_FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls them
_PLACES = "Give model.path=/folder of a Hugging Face model, or a hub id."
_USED_SHARE = 0.8  # of the memory that is free: K/V and logits need theirs
_REPAIR = "Copy the model's files again, config.json and weights from one place."
_INSTALL = "The model's files are not to blame, this installation is: `quicksilver doctor` says what it lacks."


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
    """The folder with a model's files, below `root` (data.root) for `data:`, fetched from the hub where that is needed. Raises
    ConfigError: nothing there, an incomplete folder, a hub that cannot be reached. The message names the offline choices."""
    kind, _, name = config.path.partition(":")
    what = f"model={config.name}"
    if kind == "embedded":
        folder = EMBEDDED / name
        if not folder.is_dir():
            there = sorted(p.name for p in EMBEDDED.glob("*/"))
            raise ConfigError(
                f"{what}: the package has no embedded model {name} (it has {', '.join(there) or 'none'}). "
                f"In a clone `make train-reference MODEL={name}` trains it, if scripts/train_reference.py has a recipe of that name. Or take "
                "another: model=gpt2, or model=folder model.name=… model.path=/folder."
            )
        if _weights_left_out(folder):  # records of it are found all the same; what would have to load it says so
            return ModelFiles(folder, f"embedded:{name}")
        return _whole(config, folder, f"embedded:{name}")
    if kind == "data":
        if root is None:
            remedy = "give data.root=/folder (or QUICKSILVER_DATA), or model.path=/folder."
            raise ConfigError(f"{what} lies in data.root, which is not set: {remedy}")
        return _whole(config, root / name, f"folder:{root / name}")
    if not config.path.strip():
        raise ConfigError(f"{what}: model.path is empty. {_PLACES}")
    path = Path(config.path).expanduser()
    if path.is_dir():
        return _whole(config, path, f"folder:{path}")
    if path.is_absolute() or config.path.startswith((".", "~")) or config.path.count("/") > 1:
        raise ConfigError(f"{what}: there is no folder {path}. {_PLACES}")
    if root is not None and (root / config.name / "config.json").is_file():
        return _whole(config, root / config.name, f"folder:{root / config.name}")
    return _from_hub(config)


def is_hub_id(path: str) -> bool:
    """Whether it is written as a model's id on the hub: name or owner/name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    with suppress(HFValidationError):
        validate_repo_id(path)
        return True
    return False


def _from_hub(config: ModelConfig) -> ModelFiles:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not is_hub_id(config.path):
        nowhere = f"model.path={config.path!r} is no folder that is there, and a hub id is written owner/name"
        raise ConfigError(f"model={config.name}: {nowhere}. {_PLACES}")
    snapshot = partial(snapshot_download, config.path, revision=config.revision, allow_patterns=list(_FILES))
    cached = None
    with suppress(LocalEntryNotFoundError):
        cached = Path(snapshot(local_files_only=True))
    if cached is None or _what_is_missing(cached):
        offline = (
            "model.path=/folder of a Hugging Face model", f"a folder {config.name} below data.root",
            "HF_HOME=/cache that holds it", "model=far-gpt2 (embedded)",
        )  # fmt: skip
        with fetching(f"model={config.name}", config.path, "model", offline):
            cached = Path(snapshot())
    return _whole(config, cached, f"hub:{config.path}", cached.name)


def _weights_left_out(folder: Path) -> dict[str, str]:
    """sha256 by name of weights that the package has records of and leaves out to stay small; empty: none, or they are there."""
    path = folder / LEFT_OUT
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {name: digest for digest, name in map(str.split, lines) if not (folder / name).is_file()}


def _whole(config: ModelConfig, folder: Path, source: str, commit: str | None = None) -> ModelFiles:
    if missing := _what_is_missing(folder):
        must = "It must be a Hugging Face model folder with safetensors weights and its tokenizer."
        raise ConfigError(f"model={config.name}: {folder} has {missing}. {must}")
    return ModelFiles(folder, source, commit)


def _what_is_missing(folder: Path) -> str | None:
    if not (folder / "config.json").is_file():
        return "no config.json"
    if (folder / _INDEX).is_file():
        try:
            shards = {str(name) for name in _json_object(folder / _INDEX)["weight_map"].values()}
        except (OSError, ValueError, KeyError, AttributeError) as error:
            return f"an unreadable {_INDEX} ({type(error).__name__}: {error})"
        absent = sorted(name for name in shards if not (folder / name).is_file())
        if absent:
            return f"no {absent[0]}, which {_INDEX} names"
    elif not any(folder.glob("*.safetensors")):
        return "no *.safetensors"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return "no tokenizer.json, tokenizer.model or vocab.json"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            try:
                _json_object(folder / name)
            except (OSError, ValueError) as error:
                return f"an unreadable {name} ({error})"
    return None


def _json_object(path: Path) -> dict[str, Any]:
    """The content of a json file; raises OSError or ValueError where it cannot be read or is no object, or for a number that no model
    can have, which torch would find in the middle of a pass."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"a json {type(content).__name__} where an object is needed")
    for name, value in content.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
        if "drop" in name and isinstance(value, int | float) and not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}, and no share from 0 to 1")
    return content


def weights_digest(folder: Path, remembered: MutableMapping[str, str] | None = None) -> str:
    """sha256 over the names and contents of everything that decides what the model answers: weights, architecture, tokenizer.
    Raises ConfigError: a file of the hub's cache is not what the hub publishes.

    `remembered` has digests of files by path, size, inode and both times of change; it is read and added to, so that gigabytes
    are read once. The time of last status change and the inode tell a replaced file whose size and modification time were kept
    (cp -p, rsync -t).
    """
    remembered = {} if remembered is None else remembered
    whole = hashlib.sha256()
    left_out = _weights_left_out(folder)
    names = {p.name for p in folder.glob("*.safetensors")} | {"config.json", _INDEX, *_TOKENIZER} | left_out.keys()
    for name in sorted(names):
        path, digest = folder / name, left_out.get(name)
        if path.is_file():
            status = path.stat()
            key = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
            if key not in remembered:
                with path.open("rb") as file:
                    remembered[key] = hashlib.file_digest(file, "sha256").hexdigest()
            digest = remembered[key]
            _check_published(path, digest)
        if digest is not None:
            whole.update(f"{name} {digest}\n".encode())
    return whole.hexdigest()


def _check_published(path: Path, digest: str) -> None:
    """Remove a large file of the hub's cache that is not what the hub publishes: the cache keeps it under its published sha256."""
    kept = path.resolve()
    if kept.parent.name != "blobs" or not re.fullmatch("[0-9a-f]{64}", kept.name) or kept.name == digest:
        return
    try:
        path.unlink()
        kept.unlink()
        remedy = "It was removed"
    except OSError:
        remedy = "Remove it"
    damaged = f"the hub publishes sha256 {kept.name[:12]}…, and the file has {digest[:12]}…: it is damaged"
    raise ConfigError(f"{path}: {damaged}. {remedy}: the same command fetches it again.")


def load(config: ModelConfig, files: ModelFiles) -> Loaded:
    """Load model and tokenizer from local files: safetensors only, no code of the folder is run, no network is asked.

    A checkpoint for sequence classification becomes a causal model that has its head of labels beside that of words.

    Raises:
        ConfigError: damaged weights, weights that are not those of config.json (missing, unexpected or of another shape: transformers
            would draw them at random, or leave them out), more of them than memory and disk hold, a device that is not there, an
            architecture transformers does not know.
        UnsupportedModelError: a family without an adapter in the runtime.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from quicksilver.runtime.architecture import architecture_of

    if _weights_left_out(files.folder):
        name = files.folder.name
        raise ConfigError(
            f"model={config.name}: its weights are left out of the installed package, to keep it small. In a clone, type the same; or give "
            f"model.path=/clone/quicksilver/models/reference/{name}. If the clone has none either, `make train-reference MODEL={name}` "
            "makes them there, in hours."
        )
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    placement = _placement(config, files.folder)
    with _quiet():
        # Any exception: a damaged folder makes transformers stumble wherever it happens to (TypeError, ZeroDivisionError, …).
        try:
            tokenizer = AutoTokenizer.from_pretrained(files.folder, **local)
        except Exception as error:
            remedy = _INSTALL if isinstance(error, ImportError) else _REPAIR
            without = f"{files.folder} has no tokenizer that transformers reads"
            raise ConfigError(f"model={config.name}: {without}: {_first_line(error)} {remedy}") from error
        classifies = is_classifier(files.folder)
        if classifies and config.parallel:
            cuts = f"model.parallel={config.parallel} cuts a language model, and this one classifies"
            raise ConfigError(f"model={config.name}: {cuts}: leave it out.")
        kind: Any = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
        try:
            # Mismatched sizes are refused below, with the tensor's name.
            model, info = kind.from_pretrained(
                files.folder, dtype=getattr(torch, config.dtype), attn_implementation=config.attn_implementation,
                use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **placement, **local,
            )  # fmt: skip
        except torch.OutOfMemoryError as error:
            full = f"does not fit into the memory of {placement.get('device_map', 'each process')}: {_first_line(error)}"
            raise ConfigError(f"model={config.name} {full} Use model.dtype=bfloat16, or model.device_map=auto or cpu.") from error
        except Exception as error:
            eager = "attention implementation" in str(error) and config.attn_implementation != "eager"
            remedy = "Use model.attn_implementation=eager." if eager else _INSTALL if isinstance(error, ImportError) else _REPAIR
            raise ConfigError(f"model={config.name}: {files.folder} cannot be loaded: {_first_line(error)} {remedy}") from error
    if wrong := "; ".join(_loaded_wrongly(info, files.folder)):
        raise ConfigError(
            f"model={config.name}: the weights in {files.folder} are not those of its config.json: {wrong}. {_REPAIR}"
        )
    if classifies:
        model = as_causal(config.name, model)
    model.eval().requires_grad_(False)
    if "offload_folder" in placement:  # empty unless the dtype was changed; gone with the model
        weakref.finalize(model, shutil.rmtree, placement["offload_folder"], ignore_errors=True)
    architecture_of(model)  # an unknown family is refused here, before anything is computed
    return Loaded(model, tokenizer, files)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bars and load reports: there is one bar, of the runs, and what is wrong is said in one message."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _loaded_wrongly(info: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """What means that the model is not the one in the files: transformers' loading info, in which tied weights are not; and weights
    kept as integers or 8-bit floats: without the scales of their format, casting them gives other weights."""
    kinds = {
        "missing_keys": "no tensor for ",
        "unexpected_keys": "no place for the tensor ",
        "mismatched_keys": "another shape for ",
    }
    for kind, words in {**kinds, "error_msgs": ""}.items():
        entries = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info.get(kind) or ())
        if entries:
            more = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
            yield words + entries[0].splitlines()[0] + more
    for heads in memory_check.heads(folder):
        stored = {name: head.get_dtype() for name, head in heads.items() if name.endswith((".weight", ".bias"))}
        if wrong := min((name for name, dtype in stored.items() if dtype not in _FLOATS), default=None):
            yield f"{wrong} is stored as {stored[wrong]}, and only {', '.join(_FLOATS)} are read"


def check_fits(config: ModelConfig, folder: Path) -> int:
    """Refuse, before anything is loaded, a model that this machine does not hold, or whose parts its processes cannot share.
    Returns the bytes of its weights; 0 where it is cut, or where damaged files do not say.

    Raises:
        ConfigError: a device that is not there, more weights than memory (`auto`: and disk) hold.
        UnsupportedModelError: see `parallel.cut`.
    """
    import torch

    if config.device_map.startswith("cuda"):
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        asked = int(config.device_map.partition(":")[2] or 0)
        if asked >= there:
            has = f"{there} CUDA devices, counted from 0" if there else "no CUDA device"
            raise ConfigError(f"model.device_map={config.device_map}: this machine has {has}. Use model.device_map=cpu or auto.")
    if config.parallel:
        cut(folder, config.parallel)
        return 0
    try:
        needed = memory_check.weights_bytes(folder, getattr(torch, config.dtype).itemsize)
    except Exception:
        return 0  # loading says what is wrong with them
    if config.device_map in ("cpu", "auto"):
        memory_check.check_room(needed, config.name, folder if config.device_map == "auto" else None)
    return needed


def _placement(config: ModelConfig, folder: Path) -> dict[str, Any]:
    """Where the weights go, as arguments of `from_pretrained`. Raises as `check_fits`."""
    import torch

    needed = check_fits(config, folder)
    if config.parallel:
        return cut(folder, config.parallel)
    if config.device_map != "auto":
        return {"device_map": config.device_map}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # What accelerate would answer, without its hooks on every layer.
    if gpus == 1 and needed <= _USED_SHARE * torch.cuda.get_device_properties(0).total_memory:
        return {"device_map": "cuda:0"}
    free = int(_USED_SHARE * memory_check.free_memory_bytes())
    if gpus == 0 and needed <= free:
        return {"device_map": "cpu"}
    limits = {device: int(_USED_SHARE * torch.cuda.mem_get_info(device)[0]) for device in range(gpus)}
    # Weights in the dtype of their files are read from there, layer by layer; others are written here first.
    offload = tempfile.mkdtemp(prefix="quicksilver-weights-")
    atexit.register(shutil.rmtree, offload, ignore_errors=True)  # loading may fail
    return {"device_map": "auto", "max_memory": {**limits, "cpu": free}, "offload_folder": offload}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return line if line.endswith((".", "!")) else f"{line}."
