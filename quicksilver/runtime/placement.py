"""Where a model's weights are: whole and in place, elsewhere until a layer needs them (accelerate), or cut among processes (tensor parallelism).
Also: attributes of an instance that are replaced for a while.

Tensor parallelism is transformers' (`DistributedConfig(tp_plan="auto")` under torchrun): every process, a rank, has the same states and some of
the heads. What is summed over heads is summed over ranks too, so that all of them decide the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from quicksilver.runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Ranks:
    """The processes among which the heads of a model are cut.

    Args:
        size: their number; 1: this process has all heads.
        rank: of this process, 0-based.
        group: of torch.distributed; None where there is one process.
    """

    def __init__(self, size: int = 1, rank: int = 0, group: Any = None) -> None:
        self.size, self.rank, self.group = size, rank, group

    def reduced(self, states: torch.Tensor, operation: Literal["SUM", "MAX"]) -> torch.Tensor:
        """The sum, or elementwise the largest, of what each rank has, any shape; the same on all ranks."""
        if self.size == 1:
            return states
        from torch import distributed

        states = states.contiguous()
        distributed.all_reduce(states, op=getattr(distributed.ReduceOp, operation), group=self.group)
        return states

    def all_heads(self, states: torch.Tensor) -> torch.Tensor:
        """(B, heads of this rank, M, head_dim) -> (B, heads of all ranks, M, head_dim), in the model's order."""
        if self.size == 1:
            return states
        from torch import distributed

        parts = [torch.empty_like(states, memory_format=torch.contiguous_format) for _ in range(self.size)]
        distributed.all_gather(parts, states.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)

    def own(self, heads: int) -> slice:
        """Which of `heads` heads this rank has."""
        each = heads // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


def ranks_of(model: PreTrainedModel) -> Ranks:
    """The processes that `model` was cut among when it was loaded.

    Raises:
        UnsupportedModelError: a plan that leaves every rank all heads, heads that the ranks cannot share evenly.
    """
    size = int(getattr(model, "_tp_size", None) or 1)
    if size == 1:
        return Ranks()
    name, config = type(model).__name__, model.config
    heads = config.num_attention_heads
    check_heads(name, heads, getattr(config, "num_key_value_heads", None) or heads, size)
    plan = dict(model.tp_plan)
    keys = {style for rule, style in plan.items() if rule.rpartition(".")[2] in ("k_proj", "qkv_proj", "query_key_value")}
    if keys != {"colwise"}:
        raise UnsupportedModelError(
            f"{name}: transformers' plan for tensor parallelism gives every rank all heads ({', '.join(sorted(keys)) or 'no rule for keys'}), "
            "and the ledgers would count them once: spread its layers over the devices instead (model.device_map=auto)."
        )
    mesh: Any = model._device_mesh
    mesh = mesh if mesh.ndim == 1 else mesh["tp"]
    return Ranks(size, mesh.get_local_rank(), mesh.get_group())


def check_heads(name: str, heads: int, kv_heads: int, size: int) -> None:
    """
    Args:
        heads, kv_heads: of a layer; size: number of ranks.

    Raises:
        UnsupportedModelError: the ranks cannot share them evenly.
    """
    uneven = next((f"{count} {kind} heads" for count, kind in ((heads, "attention"), (kv_heads, "K/V")) if count % size), None)
    if uneven is not None:
        fits = ", ".join(str(n) for n in range(1, kv_heads + 1) if heads % n == 0 and kv_heads % n == 0)
        raise UnsupportedModelError(f"{name} has {uneven}, which {size} ranks cannot share evenly: start {fits} processes.")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a weight."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def replaced(owner: object, **attributes: Any) -> Iterator[None]:
    """Within, the instance has these attributes; afterwards those of its own that it had before, or none."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                own[name] = before[name]
            else:
                del own[name]


@contextmanager
def weights_present(*modules: nn.Module) -> Iterator[None]:
    """Within, the weights of `modules` themselves (not of their parts) are there, where accelerate keeps them elsewhere between calls."""
    hooks = [(module, hook) for module in modules if (hook := getattr(module, "_hf_hook", None)) is not None]
    with ExitStack() as after:
        for module, hook in hooks:
            hook.pre_forward(module)
            after.callback(hook.post_forward, module, None)
        yield


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter by name, those that are tied once, whole, one after the other: fetched where accelerate keeps it elsewhere, gathered
    where ranks share it."""
    seen: set[int] = set()
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for prefix, module in model.named_modules():
        names = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters(recurse=False)]
        if not names or all(name in tied for name in names):
            continue
        with weights_present(module):
            for name, (_, parameter) in zip(names, list(module.named_parameters(recurse=False)), strict=True):
                if name in tied or id(parameter) in seen:
                    continue
                if not parameter.is_meta and not hasattr(module, "_hf_hook"):
                    seen.add(id(parameter))
                yield name, (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()
