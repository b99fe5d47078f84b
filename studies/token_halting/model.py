"""The detector: pillars embedded one by one, a bidirectional transformer encoder among them, one linear head on each; and the encoder's adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NoReturn, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quicksilver.runtime.architecture import Architecture, Parts, Rotary
from quicksilver.runtime.errors import ConfigError, UnsupportedModelError

from .scenes import CLASSES, Grid, Scene, inside_boxes, keep_by_nms

SUB = 4  # a pillar's own little grid
BINS_M = np.array([0.15, 0.5, 0.9, 1.3, 1.8])  # edges between bins of height
N_MEASURED = 7 + len(BINS_M) + 1 + 2 * SUB**2
N_WAVES = 32
N_FEATURES = N_MEASURED + N_WAVES
N_REGRESSED = 6  # offset of the centre (m), log length and log width (of m), sine and cosine of twice the yaw
N_OUTPUTS = len(CLASSES) + N_REGRESSED
MAX_BOXES = 16
_SPREAD_M = (0.9, 0.6)  # of the heat around a centre, by class


def features(scene: Scene, grid: Grid) -> np.ndarray:
    """(N, F) float32: of each pillar the count, means, heights, a histogram of heights, its 4 × 4 cells, and where it is.

    What PointPillars (arXiv 1812.05784) learns from points is given by hand here: the experiment is about the layers behind it.
    """
    n = grid.n_pillars
    pillar = grid.pillar_of(scene.points[:, :2])
    points, pillar = scene.points[pillar >= 0], pillar[pillar >= 0]
    centres = grid.centres()
    offset = (points[:, :2] - centres[pillar]) / grid.size_m
    z = points[:, 2].astype(np.float64)
    count = np.bincount(pillar, minlength=n).astype(np.float64)
    mean = lambda values: np.bincount(pillar, values, minlength=n) / np.maximum(count, 1)
    highest, lowest = np.zeros((2, n))
    np.maximum.at(highest, pillar, z)
    np.minimum.at(lowest, pillar, z)
    spread = np.sqrt(np.maximum(mean(z**2) - mean(z) ** 2, 0))
    bins = np.bincount(pillar * (len(BINS_M) + 1) + np.digitize(z, BINS_M), minlength=n * (len(BINS_M) + 1)).reshape(n, -1)
    cell = np.clip(((offset + 0.5) * SUB).astype(np.int64), 0, SUB - 1)
    cell_index = pillar * SUB**2 + cell[:, 0] * SUB + cell[:, 1]
    cells = np.bincount(cell_index, z > 0.25, minlength=n * SUB**2).reshape(n, -1)
    tops = np.zeros(n * SUB**2)
    np.maximum.at(tops, cell_index, z)
    single = (np.log1p(count), mean(offset[:, 0]), mean(offset[:, 1]), mean(z), highest, lowest, spread)
    several = (np.log1p(bins), np.log1p(cells), tops.reshape(n, -1), position_waves(grid))
    return np.column_stack([*single, *several]).astype(np.float32)


@cache
def position_waves(grid: Grid) -> np.ndarray:
    """(N, 32): random Fourier features of the pillar's place (Rahimi and Recht 2007), half of them of a few pillars' reach, half of the
    grid's. Their inner product falls with distance, so attention can be local from the start."""
    draws = np.random.default_rng(0).normal(size=(N_WAVES // 2, 2))
    draws[: N_WAVES // 4] /= 1.5 * grid.size_m
    draws[N_WAVES // 4 :] /= 6.0 * grid.size_m
    phase = grid.centres() @ draws.T
    return np.concatenate([np.sin(phase), np.cos(phase)], axis=1).astype(np.float32)


@dataclass(frozen=True)
class Batch:
    """Scenes side by side.

    Attributes:
        features: (B, N, F). heat: (B, N, C), 1 at the centre of a box. regression: (B, N, 6), of the box whose heat is largest.
        near: (B, N) float, how much a pillar's regression counts. in_box: (B, N) bool, pillars that a labelled box touches.
        boxes: by scene (K, 5); labels: by scene (K,).
    """

    features: torch.Tensor
    heat: torch.Tensor
    regression: torch.Tensor
    near: torch.Tensor
    in_box: torch.Tensor
    boxes: list[np.ndarray]
    labels: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.boxes)

    def take(self, which: torch.Tensor | slice) -> Batch:
        chosen = torch.arange(len(self))[which]
        parts: list[Any] = [one[chosen] for one in (self.features, self.heat, self.regression, self.near, self.in_box)]
        return Batch(*parts, *([every[i] for i in chosen.tolist()] for every in (self.boxes, self.labels)))


def batch_of(scenes: list[Scene], grid: Grid) -> Batch:
    """Features and targets of scenes; each is checked (`Scene.check`)."""
    checked = [scene.check(grid, f"scene {number}") for number, scene in enumerate(scenes)]
    columns = zip(*((features(scene, grid), *targets(scene, grid)) for scene in checked), strict=True)
    given, heat, regression, near, in_box = (torch.from_numpy(np.stack(column)) for column in columns)
    return Batch(given, heat, regression, near, in_box, [scene.boxes for scene in scenes], [scene.labels for scene in scenes])


def targets(scene: Scene, grid: Grid) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Heat (N, C), regression (N, 6), its weight (N,) and pillars in a box (N,) bool, as CenterPoint has them (arXiv 2006.11275)."""
    centres = grid.centres()
    heat, regression = (np.zeros((grid.n_pillars, columns), dtype=np.float32) for columns in (len(CLASSES), N_REGRESSED))
    near = np.zeros(grid.n_pillars, dtype=np.float32)
    for (x, y, length, width, yaw), label in zip(scene.boxes, scene.labels, strict=True):
        offset = np.array([x, y]) - centres
        own = np.exp(-(offset**2).sum(1) / (2 * (_SPREAD_M[label] * grid.size_m) ** 2)).astype(np.float32)
        own[grid.pillar_of(np.array([[x, y]]))[0]] = 1.0
        heat[:, label] = np.maximum(heat[:, label], own)
        closer = own > near
        shape = [np.log(length), np.log(width), np.sin(2 * yaw), np.cos(2 * yaw)]
        regression[closer] = np.concatenate([offset, np.broadcast_to(shape, (len(offset), 4))], axis=1)[closer]
        near = np.maximum(near, own)
    near = np.where(near > 0.4, near, 0.0).astype(np.float32)
    # A pillar belongs to a box that touches it: boxes are grown by half a pillar on each side.
    grown = scene.boxes + np.array([0, 0, grid.size_m, grid.size_m, 0], dtype=np.float32)
    return heat, regression, near, np.asarray(inside_boxes(centres, grown).any(1))


@dataclass(frozen=True)
class Detections:
    """Boxes (K, 5), labels (K,) and scores (K,) of one scene, best first."""

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray


def decode(outputs: torch.Tensor, grid: Grid, *, score_above: float = 0.05, overlap: float = 0.15) -> list[Detections]:
    """Boxes of the head's outputs (B, N, C + 6): peaks of the heat among their eight neighbours, then non-maximum suppression."""
    batch, n_classes = len(outputs), len(CLASSES)
    heat = outputs[..., :n_classes].sigmoid().transpose(1, 2).reshape(batch, n_classes, grid.side, grid.side)
    peak = (heat == F.max_pool2d(heat, 3, stride=1, padding=1)) & (heat > score_above)
    centres = torch.from_numpy(grid.centres())
    found = []
    for row in range(batch):
        label, x, y = peak[row].nonzero(as_tuple=True)
        best = heat[row][peak[row]].argsort(descending=True, stable=True)[: 3 * MAX_BOXES]
        label, pillar, scores = label[best], (x * grid.side + y)[best], heat[row][peak[row]][best]
        said = outputs[row, pillar, n_classes:].double()
        size = said[:, 2:4].clamp(-2, 3).exp()
        yaw = torch.atan2(said[:, 4], said[:, 5]) / 2
        boxes = torch.cat([centres[pillar] + said[:, :2], size, yaw[:, None]], dim=1).numpy()
        kept = keep_by_nms(boxes, label.numpy(), overlap)[: 2 * MAX_BOXES]
        found.append(Detections(boxes[kept], label.numpy()[kept], scores.numpy()[kept]))
    return found


RARE = -math.log(99)  # heat of one in a hundred: the focal loss starts from few centres


class EncoderConfig(PreTrainedConfig):
    """Shape of an encoder: `hidden_size` D, `num_hidden_layers`, `num_attention_heads`, `intermediate_size` of the feed-forward part."""

    model_type = "torch_encoder"
    hidden_size: int = 32
    num_hidden_layers: int = 4
    num_attention_heads: int = 2
    intermediate_size: int = 64


class EncoderAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention`'s weights behind transformers' attention functions, K and V handed to a port first where there is one."""

    is_causal = False
    num_key_value_groups = 1

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads, batch_first=True)
        self.config = config
        self.scaling = self.head_dim**-0.5

    def heads(self, hidden: torch.Tensor, first: int, n: int) -> list[torch.Tensor]:
        """`n` of the projections q, k, v from the `first` on: hidden (B, M, D) -> n of (B, H, M, head_dim)."""
        rows = slice(first * self.embed_dim, (first + n) * self.embed_dim)
        projected = nn.functional.linear(hidden, self.in_proj_weight[rows], self.in_proj_bias[rows])
        parts = projected.view(*hidden.shape[:-1], n, self.num_heads, self.head_dim).unbind(-3)
        return [part.transpose(1, 2) for part in parts]

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None, past_key_values: Any = None
    ) -> torch.Tensor:
        query, key, value = self.heads(hidden, 0, 3)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        attended, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0)
        return self.out_proj(attended.reshape(*hidden.shape[:2], self.embed_dim))


class EncoderLayer(nn.TransformerEncoderLayer):
    """`nn.TransformerEncoderLayer` with the norm first and GELU, called as a decoder layer is: its weights are that layer's, name by
    name."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(
            config.hidden_size, config.num_attention_heads, config.intermediate_size, dropout=0.0, activation="gelu",
            batch_first=True, norm_first=True,
        )  # fmt: skip
        self.self_attn: EncoderAttention = EncoderAttention(config)

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, past_key_values: Any = None
    ) -> torch.Tensor:
        """hidden_states (B, M, D) -> (B, M, D); attention_mask (B, 1, M, K), bool or additive."""
        hidden = hidden_states + self.self_attn(self.norm1(hidden_states), attention_mask, past_key_values)
        return hidden + self.linear2(self.activation(self.linear1(self.norm2(hidden))))


class _AsTorchDrawsIt(PreTrainedModel):
    config_class = EncoderConfig
    base_model_prefix = "encoder"
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        """torch's own initialisation stays."""


class Encoder(_AsTorchDrawsIt):
    """A stack of `EncoderLayer`s."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None = None) -> BaseModelOutput:
        """inputs_embeds (B, N, D), attention_mask (B, N) of 1 for tokens and 0 for padding -> last_hidden_state (B, N, D), before the
        final norm: who reads it may have to know which states are frozen.
        """
        hidden, mask = inputs_embeds, attention_mask
        if mask is not None:
            if mask.shape != hidden.shape[:2]:
                raise ConfigError(f"attention_mask has shape {tuple(mask.shape)}; give (B, N) = {tuple(hidden.shape[:2])}.")
            mask = mask.bool()[:, None, None, :]
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask)
        return BaseModelOutput(last_hidden_state=hidden)


class EncoderArchitecture(Architecture):
    """A model whose `encoder` is an `Encoder` and whose output head is one linear map of its normed states."""

    family = "torch_encoder"
    model_types: ClassVar[tuple[str, ...]] = ("torch_encoder",)
    parts = Parts(
        layers="layers", final_norm="norm", embeddings=(), attention="self_attn", input_norm="norm1", readers=None,
        writers=("self_attn.out_proj", "linear2"),
    )  # fmt: skip
    causal = False

    def __init__(self, model: PreTrainedModel) -> None:
        if not isinstance(model.base_model, Encoder):
            raise UnsupportedModelError(f"{type(model).__name__} has no encoder of the token-halting study as its base model.")
        super().__init__(model)
        if self.attention_implementation != "sdpa":
            given = f"attn_implementation={self.attention_implementation!r}"
            raise UnsupportedModelError(f"{given}: a torch_encoder has 'sdpa' alone; leave it out of the config.")
        # The fused projection of nn.MultiheadAttention is a bare parameter, which no nn.Linear holds.
        self.linear_params_per_layer += self._layer(0).self_attn.in_proj_weight.numel()
        self.dense_linear_params_per_layer = self.linear_params_per_layer

    def mlp(self, layer: int) -> NoReturn:
        raise UnsupportedModelError("A torch encoder layer has no module for its feed-forward part, only linear1 and linear2.")

    def residual_readers(self, layer: int) -> NoReturn:
        raise UnsupportedModelError("torch_encoder's norms take the mean off: it cannot be rotated. Leave channel_sparsity out.")

    def project_kv(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._layer(layer).self_attn.heads(self.input_norm(layer)(hidden), 1, 2)
        return keys, values

    def project_q(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        return self._layer(layer).self_attn.heads(self.input_norm(layer)(hidden), 0, 1)[0]


class PillarDetector(_AsTorchDrawsIt):
    """Features of pillars (B, N, F) -> outputs (B, N, C + 6): heat logits by class, then the regressed box (`N_REGRESSED`).

    The head looks at one pillar alone. What a centre must know of its neighbours has to come through the encoder's attention.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed = nn.Sequential(nn.Linear(N_FEATURES, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.place = nn.Linear(N_WAVES, width, bias=False)
        self.encoder = Encoder(config)
        self.head = nn.Linear(width, N_OUTPUTS)
        with torch.no_grad():
            self.head.bias[: len(CLASSES)] = RARE
            for layer in self.encoder.layers:  # keys start as queries: a pillar looks at its like, and at its neighbours
                fused = cast(EncoderLayer, layer).self_attn.in_proj_weight
                fused[width : 2 * width] = fused[:width]
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    @property
    def shape(self) -> Shape:
        return Shape(self.config.hidden_size, self.config.num_hidden_layers, self.config.num_attention_heads)

    def embedded(self, features: torch.Tensor) -> torch.Tensor:
        """(B, N, F) -> (B, N, D), as the encoder takes them."""
        return self.embed(features) + self.place(features[..., N_MEASURED:])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder.norm(self.encoder(inputs_embeds=self.embedded(features)).last_hidden_state))


@dataclass(frozen=True)
class Shape:
    """Of a detector. The feed-forward part is twice as wide."""

    width: int = 48
    layers: int = 4
    heads: int = 3


def detector(shape: Shape, seed: int) -> PillarDetector:
    """A fresh one, drawn by `seed`."""
    sizes: dict[str, Any] = {"num_hidden_layers": shape.layers, "num_attention_heads": shape.heads}
    torch.manual_seed(seed)
    return PillarDetector(EncoderConfig(hidden_size=shape.width, intermediate_size=2 * shape.width, **sizes)).eval()
