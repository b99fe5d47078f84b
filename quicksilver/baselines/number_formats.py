"""The dense model in other number formats: bfloat16, and int8 with inputs quantised as they come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from quicksilver.modules.kernels import exchange, replaced_linears
from quicksilver.runtime import Architecture, ConfigError, Transform
from quicksilver.runtime.errors import KernelError, installing
from quicksilver.runtime.quantized.kernels import DYNAMIC_INT8, Product, weight_of
from quicksilver.runtime.quantized.linear import where_it_runs


@dataclass(kw_only=True)
class BFloat16(Transform):
    """All weights, and so all arithmetic and the K/V cache, in bfloat16. Causal.

    Source: "A Study of BFLOAT16 for Deep Learning Training" (Kalamkar et al., arXiv 1905.12322).

    What differs: nothing; buffers (rotary frequencies) stay as they are. Under `model.dtype=bfloat16` dense means just this.
    """

    number_format = "bfloat16"

    @contextmanager
    def applied(self, architecture: Architecture) -> Iterator[None]:
        # Parameters are exchanged, not converted: the dense model that takes turns with this one shares them.
        made: dict[int, nn.Parameter] = {}  # tied weights stay tied
        with ExitStack() as stack:
            # Of a slice, (B, 1, D) with the strides of the prompt, torch 2.13 makes a batched product and copies the weights for each sequence.
            if (head := architecture.model.get_output_embeddings()) is not None:
                stack.enter_context(head.register_forward_pre_hook(lambda _, args: tuple(x.contiguous() for x in args)))
            for module in architecture.model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is None or not parameter.is_floating_point():
                        continue
                    if id(parameter) not in made:
                        made[id(parameter)] = nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=False)
                    exchange(stack, module, name, made[id(parameter)])
            yield


@dataclass(kw_only=True)
class Int8Dynamic(Transform):
    """The linear layers of all decoder layers multiply integers: 8-bit weights, and inputs quantised as they come. Causal.

    Source: "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale" (Dettmers et al., arXiv 2208.07339) has one scale a
    token and one an output channel; as a recipe it is torchao's `Int8DynamicActivationInt8WeightConfig`.

    What differs: LLM.int8() keeps outlier dimensions in 16 bits, this (like torchao's recipe) does not. Codes are symmetric; embeddings,
    norms and output head stay as they are.

    Args:
        backend: `torch`: products by `torch._int_mm`. Where that is not exact, by what `torch.ao` quantizes dynamically with:
            fbgemm with inputs of 7 bits (`reduce_range`) on x86, QNNPACK on ARM; inputs have one scale a token all the same.
            `torchao`: torchao's own recipe and tensor types, where it is installed. `kernel` says which it was.

    Raises:
        ConfigError: an unknown backend; `torchao` without torchao.
        KernelError: by `apply`, no exact integer product on this machine.
        UnsupportedModelError: weights that are offloaded.
    """

    backend: Literal["torch", "torchao"] = "torch"
    number_format = "integer"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend == "torchao":
            _torchao()
        self._ran: dict[str, None] = {}

    @property
    def kernel(self) -> str:
        return " and ".join(self._ran) or "not run yet"

    def applied(self, architecture: Architecture) -> AbstractContextManager[None]:
        return replaced_linears(architecture, self._product)

    def _product(self, linear: nn.Module) -> Product:
        weight, by_torchao = weight_of(linear), self.backend == "torchao"
        refusals = []
        for kernel in DYNAMIC_INT8[:1] if by_torchao else DYNAMIC_INT8:  # torchao's recipe is on torch._int_mm
            refusal = kernel.refusal(weight, 2)
            if refusal is None:
                by = f"torchao by {kernel.name}" if by_torchao else kernel.name
                self._ran[f"{by} on {where_it_runs(weight.device.type)}"] = None
                return _torchao_product(linear) if by_torchao else kernel.prepare(linear)
            refusals.append(refusal)
        raise KernelError(
            f"int8_dynamic: no exact int8 product here: {'; '.join(refusals)}.",
            "Measure it on another machine, or see what the widths do to quality with modules=[adaptive_quantization_uniform8].",
        )


def _torchao_product(linear: nn.Module) -> Product:
    quantize_, recipe = _torchao()
    weight = weight_of(linear)
    made = nn.Linear(weight.shape[1], weight.shape[0], linear.bias is not None, device=weight.device, dtype=weight.dtype)
    made.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    made.bias = linear.bias  # type: ignore[assignment]
    quantize_(made, recipe())
    return made


def _torchao() -> tuple:
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError as error:
        raise ConfigError(
            f"int8_dynamic: backend='torchao' needs torchao, which cannot be imported ({error}): {installing('peers')}, "
            "or take backend='torch', the same recipe."
        ) from None
    return quantize_, Int8DynamicActivationInt8WeightConfig
