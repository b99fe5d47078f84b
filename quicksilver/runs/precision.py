"""`precision=fastest`: the plain number format and attention in which a prompt of this model takes least time on this machine.

They are measured on the model itself, kept in the results folder by processor, and written into the config. So a record names what was
chosen, and equals that of a run which asks for the same by name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from quicksilver.records.store import Store, read_object
from quicksilver.runs.context import RunContext, torch_threads
from quicksilver.runs.parts import build_modules, module_entry
from quicksilver.runtime.errors import ConfigError, QuickSilverError

if TYPE_CHECKING:
    from quicksilver.models.loading import Loaded
    from quicksilver.runs.config import RunConfig

FORMATS = {"float32": None, "bfloat16": "bfloat16", "int8": "int8_dynamic"}  # and the module that computes in it
PLAIN = "float32 sdpa"
GAIN = 1.05  # another format must be so much faster than float32: it rounds more
BATCH, ROUNDS = 2, 3  # prompts of a pass; passes of each candidate
_KEPT = "cache/precision.json"
_said: set[str] = set()


def resolved(config: RunConfig) -> RunConfig:
    """The config, which asks for it, in the fastest plain format.
    Raises ConfigError: a module fixes the format or the attention, the model is cut among processes, or its checkpoint is
    quantised."""
    from quicksilver.runtime.quantized.kernels import machine

    context, prompt = RunContext(), config.protocol.prompt_tokens
    files, digest = context.files(config)
    _check(config, read_object(files.folder / "config.json"))
    plain = replace(config, model=replace(config.model, dtype="float32", attn_implementation="sdpa"))
    key = f"{digest} {config.model.device_map} {BATCH}x{prompt}"
    with torch_threads(config.threads):
        times_ms: dict[str, float] = Store(config.results_dir).on_this_machine(
            _KEPT, machine(), key, _is_whole, lambda: measured(context.model(plain), prompt)
        )
    fastest, *_ = ranked = sorted(times_ms, key=lambda name: times_ms[name])
    chosen = fastest if times_ms[fastest] * GAIN < times_ms[PLAIN] else PLAIN
    said = ", ".join(f"{name} {times_ms[name]:.1f} ms" for name in ranked)
    if (line := f"precision=fastest: {chosen} for {config.model.name}. {BATCH} prompts take: {said}.") not in _said:
        _said.add(line)
        print(line, file=sys.stderr, flush=True)
    number_format, attention = chosen.split()
    integer = number_format == "int8"
    model = replace(config.model, dtype="float32" if integer else number_format, attn_implementation=attention)
    modules = dict([module_entry("int8_dynamic")]) if integer else {}
    return replace(config, model=model, modules={**modules, **config.modules}, precision=None)


def _check(config: RunConfig, of_checkpoint: Mapping[str, object]) -> None:
    asked = f"precision={config.precision}"
    for name, module in zip(sorted(config.modules), build_modules(config.modules), strict=True):
        if module.number_format != "float32" or name == "block_attention":
            fixes = "the attention" if name == "block_attention" else f"the number format ({module.number_format})"
            raise ConfigError(f"{asked}: modules.{name} fixes {fixes}. Leave one of the two out.")
    if (parallel := config.model.parallel) is not None:
        raise ConfigError(f"{asked}: one process measures, and model.parallel={parallel}. Give model.dtype=bfloat16.")
    if "quantization_config" in of_checkpoint:
        raise ConfigError(f"{asked}: the checkpoint of model={config.model.name} is quantised already. Leave {asked} out.")


def _is_whole(found: object) -> bool:
    """Whether the file, which anybody may have edited, holds times of candidates."""
    names = {f"{number_format} {attention}" for number_format in FORMATS for attention in ("sdpa", "eager")}
    if not isinstance(found, dict) or PLAIN not in found or not names.issuperset(found):
        return False
    return all(isinstance(ms, float) and math.isfinite(ms) and ms > 0 for ms in found.values())


def measured(loaded: Loaded, prompt_tokens: int) -> dict[str, float]:
    """Median milliseconds of a pass over `BATCH` prompts by candidate, `float32 sdpa` …; what does not run here is left out.
    Raises ConfigError: not even float32 with sdpa runs."""
    import torch

    from quicksilver.measure.latency import alternate, shared_weight_copy
    from quicksilver.models.spec import ATTENTION
    from quicksilver.runtime import apply
    from quicksilver.runtime.block_attention import attention_function

    model = loaded.model
    most = getattr(model.config, "max_position_embeddings", None) or prompt_tokens
    size = (BATCH, min(prompt_tokens, most))
    ids = torch.randint(model.config.vocab_size, size, generator=torch.Generator().manual_seed(0)).to(model.device)
    steps = {}
    with ExitStack() as opened, torch.inference_mode():
        for number_format, module in FORMATS.items():
            for attention in ATTENTION:
                copy = shared_weight_copy(model)
                try:
                    opened.enter_context(attention_function(copy, attention))
                    opened.enter_context(apply(copy, build_modules(dict([module_entry(module)])) if module else []))
                    copy(ids)
                except (QuickSilverError, RuntimeError, NotImplementedError) as error:  # no such kernel on this device
                    if f"{number_format} {attention}" == PLAIN:
                        raise ConfigError(f"precision=fastest: the model does not run in {PLAIN}: {error}") from error
                    continue
                steps[f"{number_format} {attention}"] = partial(copy, ids)
        timed = alternate(steps, warmup=1, repeats=ROUNDS, device=model.device, control=False)
    return {name: samples.median for name, samples in timed.items()}
