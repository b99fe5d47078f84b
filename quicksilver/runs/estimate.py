"""What runs would take, before anything is loaded: hours, memory and disk, from the model's shape and this machine's measured speed.

The shape is built without weights (torch's meta device), its operations are those of the ledgers, and the speed is that of a matrix product
that is repeated for a second. A range is printed: small kernels are slower than that product, and what a module saves is not known before.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicksilver.models.hub import fetching, nothing_fetched
from quicksilver.models.memory_check import gibibytes, memory_bytes
from quicksilver.models.spec import ModelConfig
from quicksilver.runs.config import RunConfig
from quicksilver.runs.context import RunContext
from quicksilver.runs.parts import build_measurements, build_modules
from quicksilver.runtime.errors import ConfigError, QuickSilverError

if TYPE_CHECKING:
    from quicksilver.runtime.architecture import Architecture

SHAPES = Path(__file__).resolve().parents[1] / "models" / "shapes"
_MATMUL_SHARE = 0.45  # of the speed of a large product: 0.3 to 0.7 in six runs of the reference models
_START_S = 4.0  # of a command: imports, weights and text
_RUN_S = 1.0  # of each run: its record and its first, slower pass
_FASTER, _SLOWER = 0.7, 1.5  # the range that is printed
_TRACE_BYTES = 6  # a token and layer of a record, at most
_BYTES_PER_TOKEN = 4  # of English
_SLOWEST = 1e10  # floating-point operations a second: less than any machine that is used for this
_SAMPLES, _SAMPLE_S = 4, 0.25  # of the speed, with pauses: a shared processor gave 95 and 280 GFLOP/s within seconds
_VARIANTS = 2  # that take turns while time is taken: dense and the run; dense ends the last round too


@dataclass(frozen=True)
class Estimate:
    """What one run takes: operations and calls of all its passes, weights alone and all memory (with the largest batch's logits, states and K/V),
    and the disk of its record. Seconds at risk are what a kill costs at most: a block of windows, or all passes that have none. `calibrates`: a
    threshold is a percentile."""

    label: str
    flops: int
    calls: int
    seconds: float
    seconds_at_risk: float
    calibrates: bool
    weights_bytes: int
    memory_bytes: int
    disk_bytes: int


def shape_of(config: ModelConfig, root: Path | None = None) -> Architecture:
    """A model's adapter over tensors without memory.
    Raises ConfigError: its config.json is nowhere, and it is no model whose shape the package knows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from quicksilver.runtime.architecture import architecture_of

    folder = _config_folder(config, root)
    try:
        described = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        described._attn_implementation = config.attn_implementation
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(described, dtype=getattr(torch, config.dtype))
    except Exception as error:  # of transformers, whatever a damaged file does
        line = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError(f"model={config.name}: {folder} describes no model: {line}") from error
    return architecture_of(model)


def _config_folder(config: ModelConfig, root: Path | None) -> Path:
    from quicksilver.models.loading import EMBEDDED, is_hub_id

    kind, _, name = config.path.partition(":")
    beside = [] if root is None else [root / (name if kind == "data" else config.name)]
    elsewhere = [Path(config.path).expanduser(), *beside, SHAPES / config.name]
    for place in [EMBEDDED / name] if kind == "embedded" else elsewhere:
        if (place / "config.json").is_file():
            return place
    if kind not in ("embedded", "data") and is_hub_id(config.path):
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        cached = try_to_load_from_cache(config.path, "config.json", revision=config.revision)
        if not isinstance(cached, str):
            with fetching(f"model={config.name}", config.path, "model", ("model.path=/folder with its config.json",)):
                cached = hf_hub_download(config.path, "config.json", revision=config.revision)
        return Path(cached).parent
    known = ", ".join(sorted(path.name for path in SHAPES.iterdir() if path.is_dir()))
    gone = f"its shape is not known here: there is no config.json in {config.path}"
    give = "Give model.path=/folder with that file (weights are not needed for plan=true)"
    raise ConfigError(f"model={config.name}: {gone}. {give}. Known without: {known}.")


def measured_flops_per_s(dtype: str, device_map: str) -> float:
    """Floating-point operations a second of a product of two matrices of 1024 x 1024 numbers, eight times as wide on a GPU: the median of short
    samples."""
    import torch

    device = "cuda" if torch.cuda.is_available() and device_map != "cpu" else "cpu"
    size = 8 * 1024 if device == "cuda" else 1024
    one = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    took_s = []
    for _ in range(_SAMPLES):
        began, calls = time.perf_counter(), 0
        while time.perf_counter() - began < _SAMPLE_S:
            one @ one
            if device == "cuda":
                torch.cuda.synchronize()
            calls += 1
        took_s.append((time.perf_counter() - began) / calls)
        time.sleep(_SAMPLE_S)
    return 2 * size**3 / statistics.median(took_s)


def window_flops(arch: Architecture, tokens: int) -> int:
    """A dense pass over one window, the output head on every token included."""
    from quicksilver.runtime.ledger import LayerWork, head_flops

    return arch.n_layers * LayerWork(1, tokens, None).flops(arch) + head_flops(arch, tokens).executed


def estimate(config: RunConfig, arch: Architecture, flops_per_s: float, windows: int) -> Estimate:
    """What one run takes, at that speed of large products; `windows`: how many it scores. A pass over the calibration text is not counted."""
    import torch

    from quicksilver.measure.perplexity import BLOCK_WINDOWS
    from quicksilver.modules.calibration import Calibrated

    protocol, passed = config.protocol, windows_passed(config, windows)
    calls = round(passed / protocol.batch_size * (2 if protocol.name == "continuation" else 1))
    flops = round(passed * window_flops(arch, protocol.window_tokens))
    element = torch.empty((), dtype=getattr(torch, config.model.dtype)).element_size()
    weights = sum(parameter.numel() for parameter in arch.model.parameters()) * element
    tokens = min(protocol.batch_size, windows) * protocol.window_tokens
    kv = 2 * arch.n_layers * arch.n_kv_heads * arch.head_dim * tokens * element
    # Logits of the run and of the dense model, in float32 while they are compared.
    logits = (2 if config.modules else 1) * tokens * arch.vocab_size * 4
    states = 8 * tokens * arch.width * 4
    record = windows * protocol.window_tokens * arch.n_layers * _TRACE_BYTES if config.modules else 0
    seconds = flops / (_MATMUL_SHARE * flops_per_s)
    block = min(windows, max(BLOCK_WINDOWS, protocol.batch_size)) * (2 if config.modules else 1)
    at_risk = seconds / passed * max(block, passed - windows_passed(config, windows, in_blocks=True)) + _RUN_S
    calibrates = any(isinstance(one, Calibrated) and one.calibration_signals() for one in build_modules(config.modules))
    memory = weights + kv + logits + states
    return Estimate(config.label, flops, calls, seconds + _RUN_S, at_risk, calibrates, weights, memory, record + 200_000)


def windows_passed(config: RunConfig, windows: int, *, in_blocks: bool = False) -> float:
    """How many windows go through the model in all passes of a run; a pass over a batch counts its windows. `in_blocks`: in those passes only that
    go on behind their last block after a kill.

    Scoring is counted, and so are the rounds of what is timed; of other passes their share of a run's time, beside scoring's, is taken.
    """
    measurements = build_measurements(config.measure)
    batch = min(int(config.measure["batch_windows"]), windows)
    scored = windows * (2 if config.modules else 1)  # the dense model's predictions stand beside
    total = float(scored)
    for name, measurement in measurements.items():
        rounds: Any = getattr(measurement, "repeats", None)
        if name == "quality" or (in_blocks and not measurement.in_blocks):
            continue
        if isinstance(rounds, int):
            warmup: Any = getattr(measurement, "warmup", 0)
            total += ((rounds + (warmup if isinstance(warmup, int) else 0)) * _VARIANTS + 1) * batch
        elif name == "null_control":
            total += windows
        elif (own := measurement.windows_passed(windows, config.protocol.window_tokens)) is not None:
            total += own
        else:
            total += measurement.share / measurements["quality"].share * batch * 4
    return total


# --- of several runs ------------------------------------------------------------------------------------------------------------
def without_record(configs: Sequence[RunConfig]) -> tuple[list[RunConfig], list[str]]:
    """Those that would run, and the models and texts among theirs that are not on this machine, `dataset=gum`: of these nothing can have been run."""
    from quicksilver.runs.run import plan

    left, absent, context = list[RunConfig](), dict[str, None](), RunContext()
    for config in configs:
        try:
            with nothing_fetched():
                if plan([config], context).done:
                    continue
        except QuickSilverError as error:
            name = str(error).partition(":")[0]
            absent |= {one: None for one in (f"model={config.model.name}", f"dataset={config.dataset.name}") if one == name}
        left.append(config)
    return left, [*absent]


def estimates(
    configs: Sequence[RunConfig], flops_per_s: float | None = None, *, fetch: bool = False, differing: Sequence[str] = ()
) -> list[Estimate]:
    """What each run takes, the dense runs they are compared with included. Raises ConfigError: a shape that is not known, options
    or a protocol that the run would refuse, or a text that is to be scored whole and is not at hand.

    Args:
        flops_per_s: of large products on this machine; None: it is measured.
        fetch: a text may be fetched, to know how long it is.
        differing: for each config, the options in which it differs from the others: they stand before its label.
    """
    from quicksilver.runs.run import check_allowed_by_protocol

    said = {id(config): words for config, words in zip(configs, differing, strict=False) if words}
    predicted, calibrated = set[str](), set[str]()
    shapes: dict[str, Architecture] = {}
    rate, context, found = cache(measured_flops_per_s), RunContext(), list[Estimate]()
    both = [step for config in configs for step in (config.dense(), *([config] if config.modules else []))]
    steps = {json.dumps([step.identity(), step.model.path], sort_keys=True, default=str): step for step in both}  # each once
    dense, _ = without_record([step for step in steps.values() if not step.modules])
    for config in (step for step in steps.values() if step.modules or step in dense):
        check_allowed_by_protocol(config)
        model, root = config.model, Path(config.data.root).expanduser() if config.data.root else None
        if (key := f"{model.name} {model.path} {model.dtype}") not in shapes:
            shapes[key] = shape_of(model, root)
        windows = config.dataset.windows or _whole(config, context, fetch)
        if config.dataset.reader not in ("task", "far-copy", "far-recall"):
            with suppress(QuickSilverError):
                there = _whole(config, context, fetch=False)
                windows = there if windows > 2 * there else windows  # else it may be the number of bytes a token that is wrong
        one = estimate(config, shapes[key], flops_per_s or rate(model.dtype, model.device_map), windows)
        if config.modules:  # what the first run of a text finds, the next ones of the same process take
            text, each = f"{key} {config.dataset.name}", (one.seconds - _RUN_S) / windows_passed(config, windows)
            if text in predicted:
                one = replace(one, seconds=one.seconds - each * windows)
            if one.calibrates and text not in calibrated:
                one = replace(one, seconds=one.seconds + each * config.dataset.calibration_windows)
                calibrated.add(text)
            predicted.add(text)
        found.append(replace(one, label=" | ".join(filter(None, (said.get(id(config)), one.label)))))
    return found


def _whole(config: RunConfig, context: RunContext, fetch: bool) -> int:
    """About how many windows the whole text has."""
    try:
        with nullcontext() if fetch else nothing_fetched():
            text = context.text(config, "test").text
    except ConfigError as error:
        said = f"{error} How long the whole text takes is unknown before it is read: give dataset.windows=256."
        raise ConfigError(said) from error
    return max(1, len(text.encode()) // (_BYTES_PER_TOKEN * config.protocol.window_tokens))


def check_time(configs: Sequence[RunConfig], yes: bool, times: int = 1) -> None:
    """Print what runs would take that take long, and refuse them unless that was agreed to. Of models of the package, which are small, nothing
    is asked; of what cannot be known before, nothing is said; `times`: so many runs like these. Raises ConfigError: more than an hour without
    `yes`."""
    asked = [config for config in configs if not config.model.path.startswith("embedded:")]
    hours = 0.0
    with suppress(ConfigError):
        most = times * sum(one.seconds for one in estimates(asked, _SLOWEST, fetch=True))
        if most / 3600 > 1 and (left := without_record(asked)[0]):
            found = estimates(left, fetch=True)
            print(table(found), flush=True)
            hours = times * sum(one.seconds for one in found) / 3600
    if hours > 1 and not yes:
        raise ConfigError(f"This takes about {hours:,.1f} hours: add yes=true to start it, or score less (dataset.windows=64).")


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def table(found: Sequence[Estimate], absent: Sequence[str] = (), workers: int = 1, elsewhere: bool = False) -> str:
    """One line a run and their sum, for a terminal; absent: models and texts that are not on this machine; workers: how many will make them; elsewhere: on other hardware
    than this processor, whose speed is all that is known."""
    if not found:
        return "Every run has its record: nothing would run."
    room = (shutil.get_terminal_size().columns if sys.stdout.isatty() else 150) - 40
    wide = max(20, min(room, max(len(one.label) for one in found)))
    lines = [f"{'run':<{wide}} {'PFLOP':>8} {'time':>8} {'memory':>10} {'record ≤':>10}"]
    for one in found:
        work = f"{one.flops / 1e15:>8.3g} {duration(one.seconds):>8}"
        label = one.label if len(one.label) <= wide else f"{one.label[: wide - 1]}…"
        lines.append(f"{label:<{wide}} {work} {gibibytes(one.memory_bytes):>10} {gibibytes(one.disk_bytes):>10}")

    def between(seconds: float) -> str:  # with the start of the command
        return f"{duration(_START_S + _FASTER * seconds)} to {duration(_START_S + _SLOWER * seconds)}"

    how = f"{_FASTER} to {_SLOWER} times the sum at the speed measured now, and {_START_S:.0f} s of start"
    if elsewhere:
        how = "on this machine's processor: the speed of a GPU or of other machines, and their start, is not known here"
    seconds = sum(one.seconds for one in found)
    shared = f" by one worker, {between(seconds / min(workers, len(found)))} by {workers}" if workers > 1 else ""
    memory, disk, here = max(one.memory_bytes for one in found), sum(one.disk_bytes for one in found), memory_bytes()
    # What does not fit is read anew in every call.
    traffic = sum(one.calls * min(one.weights_bytes, max(0, one.memory_bytes - here)) for one in found)
    notes = {
        f"{len(found)} run{'s' * (len(found) > 1)}: about {between(seconds)}{shared} ({how}), {gibibytes(memory)} of memory, at most "
        f"{gibibytes(disk)} of records on disk. Weights: {gibibytes(max(one.weights_bytes for one in found))}.": True,
        f"If a run is killed, about {duration(max(one.seconds_at_risk for one in found))} of its work are made again at most.": True,
        "Thresholds by percentile first need a pass over the calibration text, unless it was made. It is counted here, once.":
            any(one.calibrates for one in found),
        f"Not on this machine: {', '.join(absent)}. A run looks below the folder given as data.root, then asks the hub.": bool(absent),
        f"That is more than the {gibibytes(here)} of memory that this machine has: model.device_map=auto leaves the rest on disk, "
        f"and is as slow as the disk: about {gibibytes(traffic)} are read from it.": memory > here,
    }  # fmt: skip
    return "\n".join([*lines, *(note for note, holds in notes.items() if holds)])
