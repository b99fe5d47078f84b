"""What the runtime must know of a model family: where its layers are, and how to project K, V and Q alone.

A family is one subclass of `Architecture`; `architecture_of` finds it by `config.model_type`. How to add one: docs/adding-a-family.md."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from quicksilver.runtime.block_attention import BLOCK, BLOCKS
from quicksilver.runtime.errors import UnsupportedModelError
from quicksilver.runtime.placement import local, ranks_of, weights_present
from quicksilver.runtime.visibility import Span

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Rotary = tuple[torch.Tensor, torch.Tensor]  # (cos, sin), each (B, M, rotary_dim)


@dataclass(frozen=True)
class Parts:
    """Where the parts of a family's models are, as dotted names.

    Attributes:
        layers, final_norm, embeddings: of the base model; `embeddings` are the tables whose rows are added up to the first states.
        attention, input_norm: of a layer; the norm is what states pass on their way into the attention.
        readers: of a layer, each norm of the residual stream with the linear maps that read what it gives; None: a norm stands between
            the sublayers and the stream.
        writers: of a layer, the linear maps whose output is added to the residual stream.
    """

    layers: str
    final_norm: str
    embeddings: tuple[str, ...]
    attention: str
    input_norm: str
    readers: Mapping[str, tuple[str, ...]] | None
    writers: tuple[str, ...]


def linears_of(modules: Iterable[nn.Module]) -> list[Any]:
    """The linear layers within, in order."""
    return [part for module in modules for part in module.modules() if isinstance(part, (nn.Linear, Conv1D))]


def linear_params(module: nn.Module) -> int:
    """Weights of the matrix products within."""
    return sum(linear.weight.numel() for linear in linears_of([module]))


class Architecture(ABC):
    """One model, seen through its family's adapter.

    Args:
        model: a Hugging Face causal language model of this family.

    Attributes:
        ranks: the processes that share the model's heads. Numbers of heads and weights are those of all of them together; states of heads,
            as `project_kv` gives them and a cache holds them, are those of this process.
    """

    family: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    parts: ClassVar[Parts]
    cache_argument: ClassVar[str] = "past_key_values"  # the layer's name for the cache
    shares: int = 1  # into how many equal parts the products are cut that `of_rank` has one of
    causal: ClassVar[bool] = True  # a token sees those before it; False: all of its pass

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config
        # Attention in blocks takes the masks of sdpa, and leaves one query to it.
        in_blocks = model.config._attn_implementation == BLOCKS
        self.attention_implementation: str = "sdpa" if in_blocks else model.config._attn_implementation
        self.base: Any = model.base_model  # torch types what a module has as Tensor | Module
        self.layers: list[nn.Module] = list(attrgetter(self.parts.layers)(self.base))
        self.n_layers = len(self.layers)
        if not self.layers:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no decoder layer (num_hidden_layers=0): there is nothing to run."
            )
        self.width: int = self.config.hidden_size
        self.n_heads: int = self.config.num_attention_heads
        self.n_kv_heads: int = getattr(self.config, "num_key_value_heads", None) or self.n_heads
        self.head_dim: int = getattr(self.config, "head_dim", None) or self.width // self.n_heads
        self.ranks = ranks_of(model)
        self.own_kv_heads = self.n_kv_heads // self.ranks.size
        self.output_head: Any = model.get_output_embeddings()
        self.vocab_size: int = self.output_head.weight.shape[0]
        self.spans: list[Span | None] = [None] * self.n_layers  # what modules leave in sight, set for the length of a run
        self.rotated_by = ""  # the module that turns the basis of the states, for the length of a run
        self.causal_block = BLOCK if in_blocks else 1  # queries of a causal product that visit as many keys as the last of them
        self.layer_signature = inspect.signature(type(self.layers[0]).forward)
        # Every family here has identical layers; weights of matrix products only (norms and biases are not products).
        linear = [m.weight for m in linears_of([self.layers[0]])]
        self.linear_params_per_layer = sum(weight.numel() for weight in linear)  # of this run; a transform may leave some out
        self.dense_linear_params_per_layer = self.linear_params_per_layer
        self.mlp_params_per_layer = 0
        with suppress(UnsupportedModelError):  # an encoder has none
            self.mlp_params_per_layer = linear_params(self.mlp(0))
        self._own_linear_params_per_layer = sum(local(weight).numel() for weight in linear)
        self.kv_params_per_layer = 2 * self.width * self.n_kv_heads * self.head_dim
        # Weights that `project_kv` and `project_q` really multiply by: more than their own where a fused projection cannot be cut.
        self.projection_params_per_layer = self.kv_params_per_layer
        self.query_params_per_layer = self.width * self.n_heads * self.head_dim

    @cached_property
    def of_rank(self) -> Architecture:
        """The same with the numbers of heads and weights that this process has: for its ledger."""
        if self.ranks.size == 1:
            return self
        own, size = copy.copy(self), self.ranks.size
        own.shares = size
        own.linear_params_per_layer = own.dense_linear_params_per_layer = self._own_linear_params_per_layer
        own.n_heads, own.n_kv_heads = self.n_heads // size, self.own_kv_heads
        for name in ("kv_params_per_layer", "query_params_per_layer", "projection_params_per_layer"):
            setattr(own, name, getattr(self, name) // size)
        own.vocab_size = local(self.output_head.weight).shape[0]
        return own

    @property
    def final_norm(self) -> nn.Module:
        return attrgetter(self.parts.final_norm)(self.base)

    def attention(self, layer: int) -> nn.Module:
        """The attention module of a layer."""
        return attrgetter(self.parts.attention)(self.layers[layer])

    def mlp(self, layer: int) -> nn.Module:
        """The feed-forward module of a layer; every family here calls it `mlp`."""
        return self._layer(layer).mlp

    def mlp_readers(self, layer: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor | None]], nn.Module]:
        """The maps that read what a feed-forward module is given, as (weight (F, D), bias (F,)) each, and the activation of the first one;
        of two the second is multiplied with it."""
        mlp: Any = self.mlp(layer)
        *readers, _ = linears_of([mlp])
        with weights_present(*readers):
            found = [((m.weight.T if isinstance(m, Conv1D) else m.weight).detach(), m.bias) for m in readers]
        return [*found], next(getattr(mlp, name) for name in ("act", "act_fn", "activation_fn") if hasattr(mlp, name))

    def mlp_writer(self, layer: int) -> torch.Tensor:
        """What each neuron of a feed-forward module writes: (F, D)."""
        writer = linears_of([self.mlp(layer)])[-1]
        with weights_present(writer):
            return writer.weight.detach() if isinstance(writer, Conv1D) else writer.weight.detach().T

    @abstractmethod
    def project_kv(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of layer `layer` for states entering it: hidden (B, M, D) -> two of (B, H_kv, M, head_dim)."""

    def input_norm(self, layer: int) -> nn.Module:
        """The norm that states pass on their way into a layer's attention."""
        return attrgetter(self.parts.input_norm)(self.layers[layer])

    @property
    def embeddings(self) -> list[nn.Module]:
        """The tables whose rows are added up to the first states."""
        return [attrgetter(name)(self.base) for name in self.parts.embeddings]

    def residual_readers(self, layer: int) -> list[tuple[nn.Module, list[nn.Module]]]:
        """Each norm of a layer's residual stream with the linear maps that read what it gives.

        Raises:
            UnsupportedModelError: a norm stands between the sublayers and the stream.
        """
        if self.parts.readers is None:
            raise UnsupportedModelError(
                f"The weights of {self.family} cannot be changed: a norm stands between its sublayers and the residual stream. Leave "
                "channel_sparsity and channel_pruning out."
            )
        of = self.layers[layer]
        return [(attrgetter(norm)(of), [attrgetter(name)(of) for name in maps]) for norm, maps in self.parts.readers.items()]

    def residual_writers(self, layer: int) -> list[nn.Module]:
        """The linear maps of a layer whose output is added to the residual stream."""
        return [attrgetter(name)(self.layers[layer]) for name in self.parts.writers]

    def normalised_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """What that norm gives before its gain and bias: hidden (..., D) -> (..., D), in float32."""
        norm = self.input_norm(layer)
        if isinstance(norm, nn.LayerNorm):
            return functional.layer_norm(hidden.float(), (self.width,), eps=norm.eps)
        return functional.rms_norm(hidden.float(), (self.width,), eps=norm.variance_epsilon)  # type: ignore[arg-type]

    def project_kv_unrotated(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `project_kv`, K before its rotation (after its norm, where it has one)."""
        return self.project_kv(layer, hidden, None)

    def rotates(self, layer: int) -> bool:
        """Whether the layer rotates Q and K where the model hands it rotary factors; all layers that do rotate alike."""
        return True

    def rotate_keys(self, layer: int, keys: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """K as the layer stores it, from K before its rotation: keys (B, H_kv, M, head_dim), rotary of the same M tokens.

        Every family here turns the first half of the rotated channels against the second. transformers' own function takes more passes over
        memory for it, and rounds each product. A family that rotates otherwise overrides this.
        """
        if rotary is None or not self.rotates(layer):
            return keys
        cos, sin = (factor[:, None] for factor in rotary)  # (B, 1, M, rotary_dim)
        keys, turning = keys.contiguous(), cos.shape[-1]  # predicted keys of one layer lie far apart, and are read twice
        half = turning // 2
        turned = keys[..., :turning] * cos
        turned[..., :half].addcmul_(keys[..., half:turning], sin[..., :half], value=-1)
        turned[..., half:].addcmul_(keys[..., :half], sin[..., half:])
        turned = turned.to(keys.dtype)  # OLMo 2 keeps cos and sin in float32
        return turned if turned.shape == keys.shape else torch.cat([turned, keys[..., turning:]], dim=-1)

    @abstractmethod
    def project_q(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Q of layer `layer`: hidden (B, M, D) -> (B, H, M, head_dim)."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logit lens (nostalgebraist 2020): final norm, then output head; hidden (..., D) -> (..., V)."""
        return self.output_head(self.final_norm(hidden))

    def scaling(self, layer: int) -> float:
        """Factor on q·k before the softmax (GPT-2's `scale_attn_weights` may be off)."""
        scaling = getattr(self.attention(layer), "scaling", None)
        return float(scaling) if scaling is not None else self.head_dim**-0.5

    def score_cap(self, layer: int) -> float | None:
        """Cap c of the scores before the softmax, c·tanh(score / c); None: not capped."""
        return None

    def attention_window(self, layer: int) -> int | None:
        """Sliding-window size in tokens, None for full attention."""
        return None

    def _layer(self, layer: int) -> Any:
        return self.layers[layer]

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        """(B, M, H·head_dim) -> (B, H, M, head_dim), H the heads that are there: of a rank, its own."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class GPT2Architecture(Architecture):
    family = "gpt2"
    model_types = ("gpt2",)
    parts = Parts(
        layers="h", final_norm="ln_f", embeddings=("wte", "wpe"), attention="attn", input_norm="ln_1",
        readers={"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",)}, writers=("attn.c_proj", "mlp.c_proj"),
    )  # fmt: skip

    def _columns(self, layer: int, hidden: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Columns [start, stop) of the fused q, k, v projection (Conv1D keeps its weight as (in, out))."""
        fused = self._layer(layer).attn.c_attn
        normed = self._layer(layer).ln_1(hidden)
        with weights_present(fused):
            return normed @ fused.weight[:, start:stop] + fused.bias[start:stop]

    def project_kv(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._columns(layer, hidden, self.width, 3 * self.width).split(self.width, dim=-1)
        return self._heads(keys), self._heads(values)

    def project_q(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        return self._heads(self._columns(layer, hidden, 0, self.width))


class LlamaArchitecture(Architecture):
    """Pre-norm, rotary, grouped-query attention; Qwen3 norms q and k, SmolLM3 leaves rotary out of some layers."""

    family = "llama"
    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
    parts: ClassVar[Parts] = Parts(
        layers="layers", final_norm="norm", embeddings=("embed_tokens",), attention="self_attn", input_norm="input_layernorm",
        readers={
            "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
        },
        writers=("self_attn.o_proj", "mlp.down_proj"),
    )  # fmt: skip

    def rotates(self, layer: int) -> bool:
        return getattr(self.attention(layer), "use_rope", True)

    def _rotate(self, layer: int, states: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply_rotary

        if rotary is None or not self.rotates(layer):
            return states
        # It rotates two; of the other there is nothing. OLMo 2 keeps cos and sin in float32 and casts what it rotated.
        return apply_rotary(states, states[..., :0, :, :], *rotary)[0].to(states.dtype)

    def _normed_heads(self, attention: Any, name: str, states: torch.Tensor) -> torch.Tensor:
        """Q or K, as `name` says, before its rotation."""
        heads = getattr(attention, f"{name}_proj")(states).unflatten(-1, (-1, self.head_dim))
        norm = getattr(attention, f"{name}_norm", None)
        return (heads if norm is None else norm(heads)).transpose(1, 2)

    def project_kv(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, torch.Tensor]:
        attention, normed = self._layer(layer).self_attn, self.input_norm(layer)(hidden)
        keys = self._rotate(layer, self._normed_heads(attention, "k", normed), rotary)
        return keys, self._heads(attention.v_proj(normed))

    def project_q(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        heads = self._normed_heads(self._layer(layer).self_attn, "q", self.input_norm(layer)(hidden))
        return self._rotate(layer, heads, rotary)

    def attention_window(self, layer: int) -> int | None:
        attention = self._layer(layer).self_attn
        # Mistral keeps the window in its config for every layer, Qwen on each attention module.
        if hasattr(attention, "sliding_window"):
            return attention.sliding_window
        return getattr(self.config, "sliding_window", None) if self.config.model_type == "mistral" else None


class GPTNeoXArchitecture(Architecture):
    """Pythia: q, k, v interleaved by head, rotary on part of each head, parallel residual."""

    family = "gpt_neox"
    model_types = ("gpt_neox",)
    parts = Parts(
        layers="layers", final_norm="final_layer_norm", embeddings=("embed_in",), attention="attention", input_norm="input_layernorm",
        readers={"input_layernorm": ("attention.query_key_value",), "post_attention_layernorm": ("mlp.dense_h_to_4h",)},
        writers=("attention.dense", "mlp.dense_4h_to_h"),
    )  # fmt: skip
    cache_argument = "layer_past"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.projection_params_per_layer = self.query_params_per_layer = 3 * self.width * self.n_heads * self.head_dim

    def _rotated_qkv(
        self, layer: int, hidden: torch.Tensor, rotary: Rotary | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as apply_partial_rotary

        # The fused weight interleaves q, k and v of each head: a slice would copy it, so the whole product is taken.
        fused = self._layer(layer).attention.query_key_value(self._layer(layer).input_layernorm(hidden))
        q, k, v = fused.unflatten(-1, (-1, 3 * self.head_dim)).transpose(1, 2).chunk(3, dim=-1)
        if rotary is not None:
            q, k = apply_partial_rotary(q, k, *rotary)
        return q, k, v

    def project_kv(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rotated_qkv(layer, hidden, rotary)[1:]

    def project_q(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        return self._rotated_qkv(layer, hidden, rotary)[0]


# Asked for, looked at, and why there is no adapter.
_WHY_NOT = {
    "gptj": "its attention makes the rotary factors itself, from position_ids, and knows no sdpa kernel: K/V of a halted token could not be "
    "projected from outside",
    "bloom": "its mask holds ALiBi distances between columns, which are wrong once tokens are left out",
    "mpt": "its mask holds ALiBi distances between columns, which are wrong once tokens are left out",
    "mixtral": "its layers choose among experts, and the ledgers count layers of matrix products that are all alike",
    "qwen3_moe": "its layers choose among experts, and the ledgers count layers of matrix products that are all alike",
    "mamba": "it keeps a recurrent state instead of K/V, so no token can be left out of a layer",
    "gemma3": "it reads images too; its language model alone is Gemma3ForCausalLM (model type gemma3_text)",
}


def families() -> dict[str, type[Architecture]]:
    """Adapters by model type: of all subclasses of `Architecture`, their subclasses included, each for the types that it names itself.

    Where two name the same type, the one that was defined last is taken: a file of one's own comes after those of the package.
    """
    found: dict[str, type[Architecture]] = {}
    waiting = Architecture.__subclasses__()
    for cls in waiting:
        found |= dict.fromkeys(vars(cls).get("model_types", ()), cls)
        waiting += cls.__subclasses__()  # the loop goes on with them
    return found


def architecture_of(model: PreTrainedModel) -> Architecture:
    """The adapter of `model`.

    Raises:
        UnsupportedModelError: no family knows `config.model_type`, or the model is not a causal language model.
    """
    from transformers import PreTrainedModel

    known, name = families(), type(model).__name__
    model_type = getattr(getattr(model, "config", None), "model_type", name)
    held = getattr(model, "model", None)
    if isinstance(held, PreTrainedModel) and held.get_output_embeddings() is not None:
        raise UnsupportedModelError(
            f"{name} holds a model: apply to that, apply(pipe.model, …), and call the {name} inside the context."
        )
    if model_type in known:
        if model.get_output_embeddings() is None:
            raise UnsupportedModelError(f"{name} has no output head; load it with AutoModelForCausalLM.")
        return known[model_type](model)
    why = f": {_WHY_NOT[model_type]}" if model_type in _WHY_NOT else ""
    raise UnsupportedModelError(
        f"Model type {model_type!r} has no adapter{why}. There are: {', '.join(sorted(known))}. How to add one: docs/adding-a-family.md."
    )


class Olmo2Architecture(LlamaArchitecture):
    """OLMo 2: no norm before attention but behind it; q and k are normed over all heads together."""

    family = "olmo2"
    model_types: ClassVar[tuple[str, ...]] = ("olmo2",)
    parts = replace(LlamaArchitecture.parts, readers=None)

    def input_norm(self, layer: int) -> nn.Module:
        return nn.Identity()

    def normalised_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float()

    def _normed_heads(self, attention: Any, name: str, states: torch.Tensor) -> torch.Tensor:
        return self._heads(getattr(attention, f"{name}_norm")(getattr(attention, f"{name}_proj")(states)))


class Phi3Architecture(LlamaArchitecture):
    """Phi-3 and Phi-4: q, k and v in one projection, in that order; rotary on the first part of each head where it is partial."""

    family = "phi3"
    model_types: ClassVar[tuple[str, ...]] = ("phi3",)
    parts = replace(
        LlamaArchitecture.parts,
        readers={"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": ("mlp.gate_up_proj",)},
    )

    def _rows(self, layer: int, hidden: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of the fused projection's weight, which is (out, in)."""
        normed, fused = self.input_norm(layer)(hidden), self._layer(layer).self_attn.qkv_proj
        with weights_present(fused):
            return functional.linear(normed, fused.weight[start:stop])

    def _rotate(self, layer: int, states: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_leading_rotary

        return states if rotary is None else apply_leading_rotary(states, states, *rotary)[0]

    def project_kv(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, torch.Tensor]:
        first, each = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        keys, values = self._rows(layer, hidden, first, first + 2 * each).split(each, dim=-1)
        return self._rotate(layer, self._heads(keys), rotary), self._heads(values)

    def project_q(self, layer: int, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        return self._rotate(layer, self._heads(self._rows(layer, hidden, 0, self.n_heads * self.head_dim)), rotary)

    def mlp_readers(self, layer: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor | None]], nn.Module]:
        ((weight, _),), activation = super().mlp_readers(layer)
        return [(part, None) for part in weight.chunk(2)], activation

    def attention_window(self, layer: int) -> int | None:
        return self.config.sliding_window


class GemmaArchitecture(LlamaArchitecture):
    """Gemma 2 and 3: norms before and behind each sublayer, gains counted from one, sliding and full layers in turn.

    Gemma 2 caps the scores of attention and the logits by tanh (arXiv 2408.00118); Gemma 3 norms q and k, and has rotary factors for
    sliding and others for full layers, which each layer is handed by the model.

    Raises:
        UnsupportedModelError: attention that looks ahead (embedding models), or a cap that sdpa would leave out.
    """

    family = "gemma"
    model_types: ClassVar[tuple[str, ...]] = ("gemma2", "gemma3_text")
    parts = replace(LlamaArchitecture.parts, readers=None)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if getattr(self.config, "use_bidirectional_attention", None):
            raise UnsupportedModelError(
                "This Gemma attends to what follows (use_bidirectional_attention): it is no causal model."
            )
        if self.score_cap(0) is not None and self.attention_implementation != "eager":
            raise UnsupportedModelError(
                f"attn_implementation={self.attention_implementation!r} leaves out the cap that this Gemma puts on the scores of its "
                "attention: load it with attn_implementation='eager' (model.attn_implementation=eager)."
            )

    def normalised_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden.float(), (self.width,), eps=self.input_norm(layer).eps)  # type: ignore[arg-type]

    def score_cap(self, layer: int) -> float | None:
        return getattr(self.attention(layer), "attn_logit_softcapping", None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, cap = super().logits(hidden), getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)
