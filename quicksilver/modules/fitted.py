"""Files of what was fitted to one model: maps that predict K/V, lenses, gates, calibrations. Each is read, checked and refused here.

A file says what it is (a format), whose model it is of (a digest), how it was made (provenance), and holds tensors or numbers. A kind of file is a
dataclass that derives from `FittedFile`: its fields of type `torch.Tensor` are the tensors, all others go into the header.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from quicksilver.files import write_atomically
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import checks_of
from quicksilver.runtime.placement import whole_parameters
from quicksilver.runtime.reading import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quicksilver.runtime.architecture import Architecture

MODELS_FOLDER = Path(__file__).resolve().parents[1] / "models" / "reference"  # of the models that ship with the package


def model_digest(model: PreTrainedModel) -> str:
    """Digest of the architecture and of 1024 values of every parameter, evenly spread: tells models apart in milliseconds.

    Values are rounded to bfloat16 first, so that float32 weights and their bfloat16 copy share their calibration on request.
    """
    said: dict[str, bytes] = {}
    for name, parameter in whole_parameters(model):
        said[name] = f"{name} {tuple(parameter.shape)}".encode()
        if not parameter.is_meta:  # a model's shape alone
            flat = parameter.reshape(-1)
            sample = flat[:: max(1, flat.numel() // 1024)].to("cpu", torch.bfloat16)
            said[name] += sample.view(torch.int16).numpy().tobytes()
    digest = hashlib.sha256(model.config.model_type.encode())
    for _, content in sorted(said.items()):
        digest.update(content)
    return digest.hexdigest()


@dataclass(frozen=True)
class ModelShape:
    """What of a model's shape something fitted depends on."""

    model_type: str
    n_layers: int
    width: int
    n_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, architecture: Architecture) -> ModelShape:
        """The shape of a model."""
        arch = architecture
        return cls(arch.config.model_type, arch.n_layers, arch.width, arch.n_kv_heads, arch.head_dim)


class FittedFile:
    """What was fitted to one model, and its file.

    Class attributes:
        kind: what it is called in messages. format: of its files. folder: beside a model, with the files that ship with it.
        remedy: what to do where there is none, or a wrong one.

    Attributes:
        weights_digest: `model_digest` of the model; empty: of any model of this shape.
    """

    kind: ClassVar[str]
    format: ClassVar[str]
    folder: ClassVar[str] = ""
    remedy: ClassVar[str]
    weights_digest: str

    def model_facts(self) -> dict[str, object]:
        """What is known of the model, by the names of `ModelShape`."""
        return {}

    def check_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ConfigError for a tensor that has another shape than the one wanted, is not of floats, or is not finite."""
        for name, shape in shapes.items():
            tensor: torch.Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            wrong = f"The {name} of a {self.kind} "
            if not tensor.is_floating_point():
                raise ConfigError(
                    f"{wrong}is of {str(tensor.dtype).removeprefix('torch.')}, where floats are needed: {self.remedy}."
                )
            if tuple(tensor.shape) != shape:
                raise ConfigError(f"{wrong}has shape {tuple(tensor.shape)} where {shape} is needed: {self.remedy}.")
            if n := int((~torch.isfinite(tensor)).sum()):
                raise ConfigError(f"{wrong}has {n} numbers that are not finite (NaN or infinite): {self.remedy}.")

    def check(self, architecture: Architecture) -> None:
        """Raises ConfigError where it is of another model: the first fact that differs, both values, the remedy."""
        for name, own in self.model_facts().items():
            there = architecture.config.model_type if name == "model_type" else getattr(architecture, name)
            if own != there:
                raise ConfigError(f"The {self.kind} is of a model with {name}={own} and this one has {there}: {self.remedy}.")
        if self.weights_digest and self.weights_digest != (found := model_digest(architecture.model)):
            raise ConfigError(
                f"The {self.kind} was fitted to other weights (digest {self.weights_digest[:12]}…, this model's is {found[:12]}…): {self.remedy}."
            )

    def save(self, path: Path | str, dtype: torch.dtype = torch.float32) -> None:
        """Write atomically: a reader sees the whole file or none. Tensors in `dtype`; what is read again is float32."""
        content: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        tensors = {name: content.pop(name) for name in tensor_fields(type(self))}
        facts = {name: asdict(value) if isinstance(value, ModelShape) else value for name, value in content.items()}
        write_atomically(path, self._written(facts, {n: t.to(dtype).contiguous() for n, t in tensors.items() if t is not None}))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """The file's content; raises ConfigError: a missing or torn file, one of another format, content that does not fit."""
        try:
            facts, tensors = cls._read(Path(path))
        except FileNotFoundError:
            raise ConfigError(f"There is no {cls.kind} {path}: {cls.remedy}.") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigError(
                f"{path} cannot be read as a {cls.kind} ({error}): it is cut short or damaged; {cls.remedy}."
            ) from error
        content = facts.pop("content", None) if isinstance(facts, dict) else None
        if content not in (None, _content(tensors)):
            raise ConfigError(f"{path} is damaged: its tensors are not those that were written; {cls.remedy}.")
        said = facts.pop("format", None) if isinstance(facts, dict) else type(facts).__name__
        if said != cls.format:
            raise ConfigError(
                f"{path} has format {said!r}, and this version reads a {cls.kind} of format {cls.format!r}: {cls.remedy}."
            )
        own: dict[str, Any] = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
        optional = {name for name in tensor_fields(cls) if own[name].default is not MISSING}
        if set(facts) != set(own) - set(tensor_fields(cls)) or not set(tensor_fields(cls)) - optional <= set(tensors) <= set(
            tensor_fields(cls)
        ):
            raise ConfigError(
                f"{path} is no {cls.kind}: it has {', '.join(sorted({*facts, *tensors}))} and not {', '.join(sorted(own))}; {cls.remedy}."
            )
        try:
            facts |= {
                name: tuple(value)
                for name, value in facts.items()
                if isinstance(value, list) and str(own[name].type).startswith("tuple")
            }
            facts |= {name: ModelShape(**value) for name, value in facts.items() if str(own[name].type) == "ModelShape"}
            for name, check in checks_of(cast(Hashable, cls)):
                if name in facts:
                    check(name, facts[name])
            return cls(**facts, **{name: t.float() if t.is_floating_point() else t for name, t in tensors.items()})
        except (ConfigError, TypeError, ValueError, AttributeError) as error:
            why = str(error).rstrip(".")
            raise ConfigError(f"{path} is no {cls.kind}: {why}{'' if cls.remedy in why else f'; {cls.remedy}'}.") from error

    @classmethod
    def _read(cls, path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
        """The header, its format included, and the tensors."""
        with safe_open(str(path), framework="pt") as file:
            facts = parse_json((file.metadata() or {}).get("quicksilver", "{}"))
            return facts, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)

    def _written(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
        header = {"format": self.format, "content": _content(tensors), **facts}
        return save(tensors, {"quicksilver": json.dumps(header, sort_keys=True)})

    @classmethod
    def shipped(cls, name: str = "*") -> list[Path]:
        """The files of this kind beside the models that ship with the package."""
        return sorted(MODELS_FOLDER.glob(f"*/{cls.folder}/{name}.safetensors"))

    @classmethod
    def of_model(cls, architecture: Architecture) -> dict[str, Self]:
        """What ships with this model, by the name of its file."""
        digest = model_digest(architecture.model)
        return {
            path.stem: one for path, one in ((path, cls.load(path)) for path in cls.shipped()) if one.weights_digest == digest
        }

    @classmethod
    def none_ships(cls, option: str, architecture: Architecture) -> ConfigError:
        """What is said where an option asks for a file of this model and it has none."""
        there = ", ".join(sorted({path.parents[1].name for path in cls.shipped()})) or "no model"
        digest = model_digest(architecture.model)
        return ConfigError(f"{option}: one ships with {there}, none with this model (digest {digest[:12]}…): {cls.remedy}.")


def _content(tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names, shapes and values of tensors, as they are stored."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(
            f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
            + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return whole.hexdigest()


def tensor_fields(cls: type) -> list[str]:
    """The fields of a dataclass that are tensors."""
    return [field.name for field in fields(cls) if "torch.Tensor" in str(field.type)]
