"""A model cut among several processes, or whole in each of them, under torchrun: tensor parallelism by transformers' own plan, and replicas."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quicksilver.runtime.errors import ConfigError, UnsupportedModelError


def load_parallel(folder: Path | str, *, dtype: str = "float32", attn_implementation: str = "sdpa") -> Any:
    """The model in `folder`, its heads and words cut among the processes that torchrun started; in eval mode, without gradients.

    Every process calls this, and then everything else, with the same arguments. `quicksilver.apply` is used as with any model; its ledgers
    are of all processes together, `flops_of_rank` and `kv_bytes_of_rank` of this one.

    Args:
        folder: a Hugging Face folder with safetensors.

    Raises:
        ConfigError: not started by torchrun, or no config.json there.
        UnsupportedModelError: transformers has no plan for the family, or the processes cannot share its heads evenly.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from quicksilver.runtime.architecture import architecture_of

    if processes() < 2:
        raise ConfigError("A model is cut among the processes of torchrun: torchrun --nproc-per-node 2 script.py starts two.")
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: give the folder of a Hugging Face model.")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attn_implementation, use_safetensors=True, local_files_only=True,
        trust_remote_code=False, **cut(Path(folder)),
    )  # fmt: skip
    model.eval().requires_grad_(False)
    architecture_of(model)  # a family or a plan that does not go is refused here
    return model


def processes() -> int:
    """How many torchrun started; 1: it did not start this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def take_device() -> None:
    """Of several processes with the whole model each, give this one the CUDA device of its number, where there are devices."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def rank() -> int:
    """Which of them this is, from 0."""
    return int(os.environ.get("RANK", "0")) if processes() > 1 else 0


def cut(folder: Path, how: str = "tensor") -> dict[str, Any]:
    """Arguments of `from_pretrained` that cut the model in `folder` as `model.parallel` says. Of several replicas, each has all
    of the model. Raises ConfigError: the number of processes is no multiple of those that share a model. Raises
    UnsupportedModelError: transformers has no plan for the family, or the processes cannot share its heads evenly."""
    import torch
    from torch import distributed
    from transformers import AutoConfig
    from transformers.distributed import DistributedConfig

    class Replicas(DistributedConfig):
        dp_size = 1  # transformers would cut the weights of replicas, too, and gather them for every layer

    size = cut_among(how)
    if processes() % size:
        raise ConfigError(f"model.parallel={how}: {processes()} processes are no multiple of {size}: start as many.")
    if size > 1:
        check_plan(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False), size)
        return {"distributed_config": Replicas(tp_size=size, tp_plan="auto", dp_replicate_size=processes() // size)}
    take_device()
    gpu = torch.cuda.is_available()
    if processes() > 1 and not distributed.is_initialized():
        distributed.init_process_group("nccl" if gpu else "gloo")
    return {"device_map": f"cuda:{torch.cuda.current_device()}" if gpu else "cpu"}


def cut_among(how: str) -> int:
    """How many processes share one model: 2 of `tensor:2`, all of `tensor`."""
    return int(how.partition(":")[2] or processes())


def shared_by_replicas(how: str) -> Callable[[str], Callable[[Sequence[range], Callable[[range, int], Any]], Iterator[Any]]]:
    """Of a pass over all windows, by its name: replicas of the model compute a block each, and get those of the others."""

    def keep(blocks: Sequence[range], compute: Callable[[range, int], Any]) -> Iterator[Any]:
        size = cut_among(how)
        replicas, me = processes() // size, rank() // size
        for first in range(0, len(blocks), replicas):
            given = blocks[first : first + replicas]
            mine = compute(given[me], blocks[first].start) if me < len(given) else None
            yield from gathered(mine)[: size * len(given) : size]

    return lambda name: keep


def gathered(mine: Any) -> list[Any]:
    """What every process has, in the order of their ranks."""
    from torch import distributed

    if processes() == 1:
        return [mine]
    every: list[Any] = [None] * processes()
    distributed.all_gather_object(every, mine)
    return every


def broadcast_from_rank0(answer: int) -> int:
    """What the first process answers (a number, a yes or a no), in all of them, once a model is cut: each waits for it."""
    import torch
    from torch import distributed

    said = torch.tensor([int(answer)], device="cuda" if distributed.get_backend() == "nccl" else "cpu")
    distributed.broadcast(said, src=0)
    return int(said)


def check_plan(config: Any, size: int) -> None:
    """Whether a model of this config can be cut among `size` processes; nothing is loaded. Raises UnsupportedModelError: there is
    no plan, or the heads cannot be shared evenly."""
    from quicksilver.runtime.placement import check_heads

    name = getattr(config, "model_type", type(config).__name__)
    if not getattr(config, "base_model_tp_plan", None):
        without = "transformers has no plan for tensor parallelism of this family (base_model_tp_plan)"
        raise UnsupportedModelError(f"{name}: {without}: spread its layers over the devices instead (model.device_map=auto).")
    heads = config.num_attention_heads
    check_heads(name, heads, getattr(config, "num_key_value_heads", None) or heads, size)
