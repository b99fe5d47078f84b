"""The dense model in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.module import NumberFormat, Transform


@contextmanager
def _contiguous_input(module: nn.Module) -> Iterator[None]:
    hook = module.register_forward_pre_hook(lambda _, inputs: tuple(one.contiguous() for one in inputs))
    try:
        yield
    finally:
        hook.remove()


@dataclass(kw_only=True)
class BFloat16(Transform):
    """All weights, and so all arithmetic and the K/V cache, in bfloat16. Causal.

    Source: "A Study of BFLOAT16 for Deep Learning Training" (Kalamkar et al., arXiv 1905.12322).

    What differs: nothing; buffers (rotary frequencies) stay as they are, as transformers keeps them. Where the configuration loads
    the model in bfloat16 (`model.dtype=bfloat16`), dense means just this; as a technique beside others it is compared with the
    dtype that `model.dtype` names. The output head is given its last token as contiguous rows: of a slice, (B, 1, D) with the strides
    of the prompt, torch 2.13 makes a batched product, and copies the head's weights for each sequence. In float32 it does not.
    """

    @property
    def number_format(self) -> NumberFormat:
        return "bfloat16"

    @contextmanager
    def applied(self, architecture: Architecture) -> Iterator[None]:
        # Parameters are exchanged, not converted: the dense model that takes turns with this one shares them.
        originals: list[tuple[nn.Module, str, nn.Parameter]] = []
        made: dict[int, nn.Parameter] = {}  # tied weights stay tied
        try:
            for module in architecture.model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is None or not parameter.is_floating_point():
                        continue
                    if id(parameter) not in made:
                        made[id(parameter)] = nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=False)
                    originals.append((module, name, parameter))
                    module._parameters[name] = made[id(parameter)]
            head = architecture.model.get_output_embeddings()
            with _contiguous_input(head) if head is not None else nullcontext():
                yield
        finally:
            for module, name, parameter in originals:
                module._parameters[name] = parameter
