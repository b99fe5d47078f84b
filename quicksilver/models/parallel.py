"""A model cut among several processes: tensor parallelism by transformers' own plan, under torchrun."""

from __future__ import annotations

import os
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
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from quicksilver.runtime.architecture import architecture_of

    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2 or "RANK" not in os.environ:
        raise ConfigError("A model is cut among the processes of torchrun: torchrun --nproc-per-node 2 script.py starts two.")
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: give the folder of a Hugging Face model.")
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    check_plan(AutoConfig.from_pretrained(folder, **local), size)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attn_implementation, use_safetensors=True,
        distributed_config=DistributedConfig(tp_size=size, tp_plan="auto"), **local,
    )  # fmt: skip
    model.eval().requires_grad_(False)
    architecture_of(model)  # a family or a plan that does not go is refused here
    return model


def check_plan(config: Any, size: int) -> None:
    """Whether a model of this config can be cut among `size` processes; nothing is loaded.

    Raises:
        UnsupportedModelError: there is no plan, or the heads cannot be shared evenly.
    """
    from quicksilver.runtime.placement import check_heads

    name = getattr(config, "model_type", type(config).__name__)
    if not getattr(config, "base_model_tp_plan", None):
        raise UnsupportedModelError(
            f"{name}: transformers has no plan for tensor parallelism of this family (base_model_tp_plan): spread its layers over the devices "
            "instead (model.device_map=auto)."
        )
    heads = config.num_attention_heads
    check_heads(name, heads, getattr(config, "num_key_value_heads", None) or heads, size)
