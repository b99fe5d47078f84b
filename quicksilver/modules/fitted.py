"""What is fitted to one model and kept in a file: `FittedFile`, the base of all kinds, which reads, checks and refuses; `Translator` and `Lens`.

A kind is a dataclass: fields of type `torch.Tensor` are the tensors, all others go into the header.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from quicksilver.files import write_atomically
from quicksilver.runtime import ConfigError
from quicksilver.runtime.options import checks_of
from quicksilver.runtime.placement import whole_parameters
from quicksilver.runtime.reading import parse_json
from quicksilver.runtime.translation import PredictedKV

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quicksilver.runtime.architecture import Architecture

MODELS_FOLDER = Path(__file__).resolve().parents[1] / "models" / "reference"  # of the models that ship with the package
EMBEDDED = "embedded"  # as a translator in a config: the one that ships with the model
TUNED_LENS = "tuned_lens"  # as an entropy in a config, and the folder beside a model


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


def check_weights(what: str, digest: str | None, architecture: Architecture, remedy: str) -> None:
    """Raises ConfigError where `digest`, of the weights that something was fitted to, is not that of the model."""
    if digest != (found := model_digest(architecture.model)):
        raise ConfigError(f"{what} was fitted to other weights (digest {str(digest)[:12]}…, here {found[:12]}…): {remedy}.")


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
        kind: what it is called in messages. format: of its files. remedy: what to do where there is none, or a wrong one.
        folder, suffix: of the files that ship beside a model. later: fields that older files of the format lack.
        reads_states: whether its numbers are of the model's states, coordinate by coordinate.

    Attributes:
        weights_digest: `model_digest` of the model; empty: of any model of this shape.
    """

    kind: ClassVar[str]
    format: ClassVar[str]
    folder: ClassVar[str] = ""
    suffix: ClassVar[str] = ".safetensors"
    remedy: ClassVar[str]
    later: ClassVar[tuple[str, ...]] = ()
    reads_states: ClassVar[bool] = True
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
            wrong = ""
            if not tensor.is_floating_point():
                wrong = f"is of {str(tensor.dtype).removeprefix('torch.')}, where floats are needed"
            elif tuple(tensor.shape) != shape:
                wrong = f"has shape {tuple(tensor.shape)} where {shape} is needed"
            elif n := int((~torch.isfinite(tensor)).sum()):
                wrong = f"has {n} numbers that are not finite (NaN or infinite)"
            if wrong:
                raise ConfigError(f"The {name} of a {self.kind} {wrong}: {self.remedy}.")

    def check(self, architecture: Architecture) -> None:
        """Raises ConfigError where it is of another model: the first fact that differs, both values, the remedy; or of states that are rotated."""
        self.check_basis(architecture)
        for name, own in self.model_facts().items():
            there = architecture.config.model_type if name == "model_type" else getattr(architecture, name)
            if own != there:
                raise ConfigError(f"The {self.kind} is of a model with {name}={own} and this one has {there}: {self.remedy}.")
        if self.weights_digest:
            check_weights(f"The {self.kind}", self.weights_digest, architecture, self.remedy)

    @classmethod
    def check_basis(cls, architecture: Architecture) -> None:
        """Raises ConfigError where another module rotates the states that it reads."""
        if cls.reads_states and architecture.rotated_by:
            raise ConfigError(
                f"{architecture.rotated_by} rotates the states, and a {cls.kind} was fitted to them as they are: give "
                f"modules.{architecture.rotated_by}.rotate=false, or leave one out."
            )

    def save(self, path: Path | str, dtype: torch.dtype = torch.float32) -> None:
        """Write atomically: a reader sees the whole file or none. Tensors in `dtype`; what is read again is float32."""
        content: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        tensors = {name: content.pop(name) for name in _tensor_fields(type(self))}
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
            raise ConfigError(f"{path} cannot be read as a {cls.kind} ({error}): it is damaged; {cls.remedy}.") from error
        try:
            return cls._checked(facts, tensors)
        except (ConfigError, TypeError, ValueError, AttributeError) as error:
            why = str(error).rstrip(".")
            raise ConfigError(f"{path} is no {cls.kind}: {why}{'' if cls.remedy in why else f'; {cls.remedy}'}.") from error

    @classmethod
    def _checked(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Self:
        if facts.pop("content", None) not in (None, _content(tensors)):
            raise ConfigError("it is damaged, its tensors are not those that were written")
        if (said := facts.pop("format", None)) != cls.format:
            raise ConfigError(f"it has format {said!r}, and this version reads a {cls.kind} of format {cls.format!r}")
        own: dict[str, Any] = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
        optional = {*cls.later, *(name for name in _tensor_fields(cls) if own[name].default is not MISSING)}
        if not set(own) - optional <= {*facts, *tensors} <= set(own):
            raise ConfigError(f"it has {', '.join(sorted({*facts, *tensors}))} and not {', '.join(sorted(own))}")
        for name, value in facts.items():
            if isinstance(value, list) and str(own[name].type).startswith("tuple"):
                facts[name] = tuple(value)
            elif str(own[name].type) == "ModelShape":
                facts[name] = ModelShape(**value)
        for name, check in checks_of(cast(Hashable, cls)):
            if name in facts:
                check(name, facts[name])
        return cls(**facts, **{name: t.float() if t.is_floating_point() else t for name, t in tensors.items()})

    @classmethod
    def _read(cls, path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
        """The header, its format included, and the tensors; raises OSError, ValueError, SafetensorError."""
        with safe_open(str(path), framework="pt") as file:
            facts = parse_json((file.metadata() or {}).get("quicksilver", "{}"))
            return facts, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)

    def _written(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
        header = {"format": self.format, "content": _content(tensors), **facts}
        return save(tensors, {"quicksilver": json.dumps(header, sort_keys=True)})

    @classmethod
    def shipped(cls, name: str = "*") -> list[Path]:
        """The files of this kind beside the models that ship with the package."""
        return sorted(MODELS_FOLDER.glob(f"*/{cls.folder}/{name}{cls.suffix}"))

    @classmethod
    def of_model(cls, architecture: Architecture, option: str = "") -> dict[str, Self]:
        """What ships with this model, by the name of its file; raises ConfigError where an `option` asks for it and there is none."""
        cls.check_basis(architecture)
        digest = model_digest(architecture.model)
        found = {path.stem: one for path in cls.shipped() if (one := cls.load(path)).weights_digest == digest}
        if option and not found:
            there = ", ".join(sorted({path.parents[1].name for path in cls.shipped()})) or "no model"
            missing = f"one ships with {there}, none with this model (digest {digest[:12]}…)"
            raise ConfigError(f"{option}: {missing}: {cls.remedy}.")
        return found


def _content(tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names, shapes and values of tensors, as they are stored."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + values.tobytes())
    return whole.hexdigest()


def _tensor_fields(cls: type) -> list[str]:
    return [field.name for field in fields(cls) if "torch.Tensor" in str(field.type)]


# -- K and V of later layers -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Translator(FittedFile):
    """K and V of later layers from the state a token stopped with: a fitted linear map instead of the layers in between.

    Layer ℓ makes K and V of every token as it always does. For a token that stops before ℓ, each later layer j gets

        [k_j ; v_j] = [1, LN₀(h_ℓ)] · W_j

    LN₀ the norm on the way into layer ℓ without its gain, k_j before its rotation, W_j from ridge regression on calibration text
    (`quicksilver.fitting.fit`). SwiftKV (arXiv 2410.03960) projects the state itself and retrains the projections; here the weights stay frozen.

    Attributes:
        source_layer: ℓ, the layer that the tokens do not go through any more; K and V of ℓ+1 … L−1 are predicted.
        weight: (1 + D, L−1−ℓ, 2, H_kv, head_dim) float32: constant first, then the normalised state; K, then V.
        shape: of the model.
        provenance: fit text and its digest, tokens, ridge, what was left out of the text, control (if it is one).

    Raises:
        ConfigError: a weight of another shape than the model's, or one that is not finite.
    """

    source_layer: int
    weight: torch.Tensor = field(repr=False)  # an option that may be a path or this is tried as either, and a refusal prints it
    shape: ModelShape
    weights_digest: str
    provenance: dict[str, Any] = field(default_factory=dict)

    kind = "translator"
    format = "quicksilver-translator-1"
    folder = "predicted_kv"  # with schedules beside them
    remedy = "fit one for this model: quicksilver fit model=MODEL"

    def __post_init__(self) -> None:
        shape = self.shape
        if not 0 <= self.source_layer < shape.n_layers - 1:
            raise ConfigError(f"source_layer={self.source_layer} has no later layer: give one from 0 to {shape.n_layers - 2}.")
        self.check_tensors({"weight": (1 + shape.width, self.n_predicted, 2, shape.n_kv_heads, shape.head_dim)})

    def model_facts(self) -> dict[str, object]:
        return asdict(self.shape)

    @property
    def n_predicted(self) -> int:
        """Layers after the source layer."""
        return self.shape.n_layers - 1 - self.source_layer

    @cached_property
    def digest(self) -> str:
        """sha256 over what it predicts with: part of a run's identity."""
        whole = hashlib.sha256(f"{self.format} {self.source_layer} {self.shape} {self.weights_digest}".encode())
        whole.update(self.weight.contiguous().numpy().tobytes())
        return whole.hexdigest()

    def bound(self, architecture: Architecture) -> BoundTranslator:
        """As the runtime asks for it. Raises ConfigError where it is of another model (`check`)."""
        self.check(architecture)
        return BoundTranslator(self, architecture)


@dataclass(frozen=True)
class BoundTranslator:
    """A translator and the model it is of: `quicksilver.runtime.translation.KVTranslator`."""

    translator: Translator
    architecture: Architecture
    _kept: list[torch.Tensor] = field(default_factory=list, repr=False, compare=False)

    @property
    def source_layer(self) -> int:
        return self.translator.source_layer

    @property
    def flops_per_token(self) -> int:
        """Of one token, for all later layers: 4·D·d_kv each, what a K/V projection costs."""
        shape = self.translator.shape
        return 4 * shape.width * shape.n_kv_heads * shape.head_dim * self.translator.n_predicted

    def translate(self, hidden: torch.Tensor) -> PredictedKV:
        """K before its rotation, and V, of all later layers: hidden (B, M, D). One product for all."""
        own = self.translator
        normed = self.architecture.normalised_input(own.source_layer, hidden).to(hidden.dtype)
        weight = self._weight(hidden)
        flat = torch.addmm(weight[0].flatten(), normed.flatten(0, 1), weight[1:].flatten(1))
        parts = flat.view(*hidden.shape[:2], *weight.shape[1:]).permute(2, 3, 0, 4, 1, 5)
        return PredictedKV(own.source_layer + 1, parts[:, 0], parts[:, 1])

    def _weight(self, like: torch.Tensor) -> torch.Tensor:
        """This process's part of the weight, in the dtype and on the device of the states; kept, but while it is trained."""
        if not self._kept or (self._kept[0].dtype, self._kept[0].device) != (like.dtype, like.device):
            own = self.translator.weight
            weight = own[:, :, :, self.architecture.ranks.own(self.translator.shape.n_kv_heads)].to(like)
            if own.requires_grad:
                return weight
            self._kept[:] = [weight]
        return self._kept[0]


def translator_files(entry: Mapping[str, Any], model_folder: Path) -> list[Path]:
    """The files that decide what a module with these arguments predicts; none where it predicts nothing."""
    if entry.get("missing_kv") != "predict":
        return []
    source = entry.get("translator", EMBEDDED)
    if str(source) != EMBEDDED:
        return [Path(source)]
    return files_beside(model_folder, Translator.folder)


def files_beside(model_folder: Path, folder: str) -> list[Path]:
    """The files that a model finds in its `folder`: what ships with it, or with the shipped models, of which it may be a copy."""
    own = sorted((model_folder / folder).glob("*"))
    if not own and model_folder.parent != MODELS_FOLDER:  # one of these is a copy of none
        own = sorted(MODELS_FOLDER.glob(f"*/{folder}/*"))
    return [path for path in own if path.is_file()]


def translator_for(architecture: Architecture, source: str | Path | BoundTranslator, source_layer: int) -> BoundTranslator:
    """The translator that a configuration names, for tokens that stop before `source_layer`, checked against the model.

    Args:
        source: `embedded`, one that ships with the model; the path of one; or one that is bound already, to this model or a copy of it.

    Raises:
        ConfigError: none ships with this model, or none from that layer; a file that is none, or one of another model or layer.
    """
    instead = f"{Translator.remedy} layers=[{source_layer}]."
    if isinstance(source, BoundTranslator) or str(source) != EMBEDDED:
        bound = source if isinstance(source, BoundTranslator) else Translator.load(source).bound(architecture)
        if bound.architecture.model is not architecture.model:
            bound = bound.translator.bound(architecture)
        Translator.check_basis(architecture)
        if bound.source_layer != source_layer:
            predicts = f"The translator predicts for tokens that stop before layer {bound.source_layer}"
            raise ConfigError(f"{predicts}, and these stop before layer {source_layer}: stop them there, or {instead}")
        return bound
    own = {found.source_layer: found for found in Translator.of_model(architecture, "translator='embedded'").values()}
    if source_layer not in own:
        ships = f"for this model one from layer {' and '.join(map(str, sorted(own)))} ships, none from layer {source_layer}"
        raise ConfigError(f"translator='embedded': {ships}: stop tokens there, or {instead}")
    return own[source_layer].bound(architecture)


# -- the head's input, from states in the middle -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Lens(FittedFile):
    """What the model would predict from a state in the middle, by a linear map for each layer (tuned lens, arXiv 2303.08112).

    The logit lens reads a middle state as if it were the last one, which an untuned model's early states are not. Here the head is given
    [1, LN₀(h_ℓ)] · W_ℓ: LN₀ a norm without gain, W_ℓ from ridge regression of the head's own input (the paper fits by KL with SGD).

    Attributes:
        weight: (L-1, 1 + D, D) float32, of the states after each layer but the last: constant first, then the normalised state.
        provenance: text and its digest, tokens, ridge.

    Raises:
        ConfigError: a weight that is not of this shape or not finite.
    """

    weight: torch.Tensor
    weights_digest: str
    provenance: dict[str, Any] = field(default_factory=dict)

    kind = "lens"
    format = "quicksilver-lens-1"
    folder = TUNED_LENS
    remedy = "fit one: quicksilver fit lens=true model=MODEL, and put it into tuned_lens/ beside the model"

    def __post_init__(self) -> None:
        if self.weight.ndim != 3:
            raise ConfigError(f"A lens has shape {tuple(self.weight.shape)} where (layers, 1 + D, D) is needed: {self.remedy}.")
        layers, _, width = self.weight.shape
        self.check_tensors({"weight": (layers, width + 1, width)})

    def model_facts(self) -> dict[str, object]:
        return {"n_layers": len(self.weight) + 1, "width": self.weight.shape[2]}

    def head_input(self, architecture: Architecture, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """What the output head is given for states after `layer`, hidden (K, D) -> (K, D); 2·D² operations each."""
        weight = self.weight[layer].to(hidden.device)
        return torch.addmm(weight[0], architecture.normalised_input(layer, hidden), weight[1:]).to(hidden.dtype)


def lens_for(architecture: Architecture) -> Lens:
    """The lens that ships with this model; raises ConfigError where none does."""
    return next(iter(Lens.of_model(architecture, "entropy=tuned_lens").values()))


def lens_files(entry: Mapping[str, Any], model_folder: Path) -> list[Path]:
    """The files that decide what a module with these arguments reads by a lens; none where it asks for none, or the model has none."""
    asked = TUNED_LENS in (entry.get("entropy"), entry.get("source"))
    return files_beside(model_folder, TUNED_LENS) if asked else []
