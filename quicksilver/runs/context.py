"""What the runs of a process share: texts, digests, one loaded model, what each record is of, and what it says of the machine.

Kernels round differently, so which ones are fastest must be known before a record is looked for. They are measured when a run is planned, the
first time that a model meets a machine (processor, torch, number of threads), kept in the results folder, and part of a run's identity.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import yaml

from quicksilver import numerics
from quicksilver.data.overlap import NGRAM_WORDS, shared_pct
from quicksilver.data.spec import DatasetConfig, Part
from quicksilver.data.tasks import TaskExamples, read_task
from quicksilver.data.text import Text, read_text
from quicksilver.measure.measurement import Mistyped, decoded, encoded
from quicksilver.models.loading import Loaded, ModelFiles, load, locate, weights_digest
from quicksilver.models.spec import ATTENTION, ModelConfig
from quicksilver.records.identity import CalibrationEntry, EnvironmentEntry, Identity, foreign_sources
from quicksilver.records.store import Store, read_object
from quicksilver.runs.config import RunConfig
from quicksilver.runs.parts import build_measurements, build_modules, is_on, measurement_class, module_class, named_class
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.reading import parse_json, read_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quicksilver.data.windows import Windows
    from quicksilver.measure.perplexity import DensePasses
    from quicksilver.runtime.architecture import Architecture
    from quicksilver.runtime.quantized.kernels import Choices

T = TypeVar("T")

MOST_OVERLAP_PCT = 20.0  # GLUE's RTE has 6%: its prompts share a template
_DIGESTS, _KERNELS = "cache/digests.json", "cache/kernels.json"
_DIGEST = re.compile("[0-9a-f]{64}")


class RunContext:
    """What runs share: texts, digests and one loaded model. Files that change after they were read are not read again."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], Any] = {}
        self._loaded: tuple[str, Loaded] | None = None
        self._dense: tuple[str, DensePasses] | None = None

    def _once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What `make` gave when it was first asked for this key."""
        if key not in self._found:
            self._found[key] = make()
        return cast(T, self._found[key])

    def text(self, config: RunConfig, part: Part) -> Text:
        """The text that is scored (`test`: the part that dataset.part names) or that calibrates."""
        part = cast(Part, config.dataset.part) if part == "test" else part
        key = ("text", _key(config.dataset), config.data.root, part)
        return self._once(key, lambda: read_text(config.dataset, part, **_folders(config)))

    def examples(self, config: RunConfig) -> TaskExamples | None:
        """The labelled examples that are scored; None: the dataset is no task."""
        if config.dataset.task is None:
            return None
        key = ("examples", _key(config.dataset), config.data.root, config.dataset.part)
        return self._once(key, lambda: read_task(config.dataset, cast(Part, config.dataset.part), **_folders(config)))

    def files(self, config: RunConfig) -> tuple[ModelFiles, str]:
        """A model's files and their digest."""

        def found() -> tuple[ModelFiles, str]:
            files, store = locate(config.model, _folders(config)["root"]), Store(config.results_dir)
            kept = read_object(store.root / _DIGESTS)
            remembered = {path: digest for path, digest in kept.items() if _DIGEST.fullmatch(str(digest))}
            known, digest = len(remembered), weights_digest(files.folder, remembered)
            if len(remembered) > known:
                store.write_cache(_DIGESTS, remembered)
            return files, digest

        return self._once(("files", _key(config.model), config.data.root), found)

    def model(self, config: RunConfig) -> Loaded:
        """The model of a config; the one before it is let go first."""
        key = _key(config.model) + str(config.data.root)
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = self._dense = None
            adapter = _adapter(config)
            loaded = load(config.model, self.files(config)[0])
            if adapter is not None:
                _check_adapter(adapter, loaded)
            self._loaded = (key, loaded)
        return self._loaded[1]

    def overlap_pct(self, config: RunConfig) -> float:
        """Percent of the scored text's runs of 13 words that the calibration text has, too.
        Raises ConfigError: more than `MOST_OVERLAP_PCT`: thresholds would be calibrated on what is scored."""
        scored, other = self.text(config, "test"), self.text(config, "calibration")
        found = self._once(("overlap", scored.digest, other.digest), lambda: shared_pct(scored.text, other.text))
        if found > MOST_OVERLAP_PCT and config.dataset.part == "test":
            same = f"({other.source}) has {found:.0f}% of the scored text's runs of {NGRAM_WORDS} words"
            most = f"and at most {MOST_OVERLAP_PCT:g}% are let through: give dataset.files.calibration=… another text."
            raise ConfigError(f"dataset={config.dataset.name}: the calibration text {same}, {most}")
        return found

    def dense(self, config: RunConfig) -> DensePasses:
        """What passes of the dense model over the scored windows gave; of the latest model, text and protocol alone."""
        from quicksilver.measure.perplexity import DensePasses, Protocol

        windows, scored = self.windows(config, "test"), dataclasses.asdict(config.protocol)
        key = json.dumps([windows.token_digest, len(windows.ids), config.measure["batch_windows"], config.threads, scored])
        loaded = self.model(config)
        if self._dense is None or self._dense[0] != key:
            self._dense = None
            self._dense = (key, DensePasses(loaded.model, Protocol(**scored)))
        return self._dense[1]

    def windows(self, config: RunConfig, part: Part) -> Windows:
        """Windows of `text`, as many as the config scores or calibrates on."""
        from quicksilver.data.windows import encode

        text, size = self.text(config, part), config.protocol.window_tokens
        limit = config.dataset.windows if part == "test" else config.dataset.calibration_windows
        annotated = text.annotation.digest if text.annotation is not None else ""
        key = ("windows", self.files(config)[1], text.digest, annotated, size, limit)
        try:
            return self._once(key, lambda: encode(text.text, self.model(config).tokenizer, size, limit, text.annotation))
        except ConfigError as error:
            raise ConfigError(f"dataset={config.dataset.name}, {part} part ({text.source}): {error}") from error

    def kernel_choices(self, config: RunConfig) -> Choices:
        """Which kernels are fastest for this model on this machine: as kept in the results folder, else measured."""
        from quicksilver.runtime.architecture import architecture_of, linears_of
        from quicksilver.runtime.quantized.kernels import KERNELS, Choices, choose, machine

        def is_whole(kept: Any) -> bool:
            with suppress(Mistyped):
                return set(decoded(Choices, kept).by_kind.values()) <= set(KERNELS)
            return False  # this version has other kernels: they are chosen again

        def chosen() -> dict[str, Any]:
            found = choose(linears_of(architecture_of(self.model(config).model).layers))
            print(f"Kernels for {config.model.name} on {machine()}: {found.line()}", file=sys.stderr, flush=True)
            return encoded(found)

        def kept() -> Choices:
            with torch_threads(config.threads):
                store = Store(config.results_dir)
                return decoded(Choices, store.on_this_machine(_KERNELS, machine(), " ".join(of), is_whole, chosen))

        of = (self.files(config)[1], config.model.dtype, config.model.device_map)
        return self._once(("kernels", *of, config.threads, config.results_dir), kept)

    def fingerprint(self, config: RunConfig) -> str:
        return self.identity(config).fingerprint

    def identity(self, config: RunConfig) -> Identity:
        """What the record of a config is of."""
        return self._once(("identity", _key(config)), lambda: self._identity(config))

    def _identity(self, config: RunConfig) -> Identity:
        from quicksilver.modules.calibration import Calibration
        from quicksilver.runtime.quantized.kernels import ChoosesKernels

        modules, text = build_modules(config.modules), self.text(config, "test")
        digests = {"text": text.digest, "weights": self.files(config)[1]}
        if text.annotation is not None:
            digests["annotation"] = text.annotation.digest
        if (examples := self.examples(config)) is not None and examples.digest is not None:
            digests["examples"] = examples.digest
        if any(map(asks_for_calibration, modules)):
            calibrating = self.text(config, "calibration")
            digests["calibration_text"] = calibrating.digest
            if config.dataset.part == "test" and calibrating.digest == text.digest:
                said = f"thresholds would be calibrated on the text that is scored ({calibrating.source})"
                ways = "Give another text as dataset.files.calibration, or numbers for the thresholds"
                purpose = "dataset.part=calibration scores the calibrating part on purpose."
                raise ConfigError(f"dataset={config.dataset.name}: {said}. {ways}; {purpose}")
        for key, path in self.files_read(config).items():
            option, name = key.split(".")[:2]
            try:
                digests[key] = hashlib.sha256(read_bytes(path)).hexdigest()
                if option == "calibration":
                    Calibration.load(path)  # a damaged file is refused before anything runs
            except OSError as error:
                raise ConfigError(f"modules.{name}.{option}={path} cannot be read: {error.strerror}.") from error
            except ConfigError as error:
                raise ConfigError(f"modules.{name}.calibration: {error}") from error
        for name, module in zip(sorted(config.modules), modules, strict=True):
            if isinstance(module, ChoosesKernels) and module.measures:
                digests[f"kernels.{name}"] = self.kernel_choices(config).digest
        classes: list[type] = [module_class(name, entry) for name, entry in config.modules.items()]
        classes += [measurement_class(name, entry) for name, entry in config.measure.items() if is_on(name, entry)]
        classes += filter(None, [_adapter(config)])
        return Identity(config.identity(), digests, foreign_sources(classes), numerics.VERSION)

    def files_read(self, config: RunConfig) -> dict[str, Path]:
        """The files that modules and measurements read: calibrations, maps, schedules, gates, lenses. By the names that their digests have in an
        identity, such as `predicted_kv.NAME.schedules.yaml`. As they were when first asked for."""
        return self._once(("files read", _key(config)), lambda: self._files_read(config))

    def _files_read(self, config: RunConfig) -> dict[str, Path]:
        from quicksilver.modules.fitted import lens_files
        from quicksilver.modules.learned_halting import gate_files
        from quicksilver.modules.linear_mlp import mlp_map_files
        from quicksilver.modules.staged_halting import schedule_files

        found, folder = dict[str, Path](), self.files(config)[0].folder
        read = {"predicted_kv": schedule_files, "tuned_lens": lens_files, "gates": gate_files, "linear_mlp": mlp_map_files}
        for name, entry in config.modules.items():
            if (path := entry.get("calibration")) is not None:
                found[f"calibration.{name}"] = Path(path)
            found |= {f"{kind}.{name}.{path.name}": path for kind, files in read.items() for path in files(entry, folder)}
        for name, measurement in build_measurements(config.measure).items():
            for beside in measurement.reads:
                found |= {f"{beside}.{name}.{path.name}": path for path in sorted((folder / beside).glob("*.safetensors"))}
        return found


def _adapter(config: RunConfig) -> type[Architecture] | None:
    """The class of `model.adapter`, imported: from then on the runtime finds it by its model types."""
    from quicksilver.runtime.architecture import Architecture

    return named_class("model.adapter", config.model.adapter, Architecture) if config.model.adapter else None  # type: ignore[type-abstract]


def _check_adapter(adapter: type[Architecture], loaded: Loaded) -> None:
    from quicksilver.runtime.architecture import architecture_of

    if (found := type(architecture_of(loaded.model))) is not adapter:
        of = f"{loaded.model.config.model_type}, which {found.__name__} serves. Leave model.adapter out, or name that type in the class."
        types = ", ".join(adapter.model_types)
        raise ConfigError(f"model.adapter: {adapter.__name__} serves the model types {types}, and this model is of {of}")


def _folders(config: RunConfig) -> dict[str, Any]:
    root = Path(config.data.root).expanduser() if config.data.root else None
    return {"root": root, "cache": Path(config.results_dir) / "cache" / "text"}


def _key(config: ModelConfig | DatasetConfig | RunConfig) -> str:
    return json.dumps(dataclasses.asdict(config), sort_keys=True)


def timed_measurements(config: RunConfig) -> list[str]:
    """Names of the measurements of a run that read a clock."""
    return [name for name, measurement in build_measurements(config.measure).items() if measurement.timed]


def asks_for_calibration(module: Any) -> bool:
    from quicksilver.modules.calibration import Calibrated, Fitted

    asks = isinstance(module, Calibrated) and bool(module.calibration_signals())
    return asks or (isinstance(module, Fitted) and not module.fitted)


# --- what was set before a run, and on which texts --------------------------------------------------------------------------------
THRESHOLDS = "thresholds"
Texts = dict[str, int]  # name of a text -> windows of its calibrating part


def calibration_provenance(files: Mapping[str, Path], dataset: str, calibration: CalibrationEntry | None) -> dict[str, Texts]:
    """What was set -> on which texts; empty: nothing was.

    Args:
        files: `RunContext.files_read`; every fitted one says what it was made on.
        dataset: name of the run's text, whose calibrating part percentiles are taken from.
        calibration: None: the run was not calibrated.

    Returns:
        Files under their names (`predicted_kv/schedules.yaml`), percentiles and what is fitted when a run begins under `thresholds`.
    """
    kinds = {key: key.partition(".")[0] for key in sorted(files)}
    found = {f"{kind}/{files[key].name}": texts_of(files[key]) for key, kind in kinds.items() if kind != "calibration"}
    return found if calibration is None else {**found, THRESHOLDS: {dataset: calibration.windows}}


def texts_of(path: Path) -> Texts:
    """The texts that a file of maps, schedules, gates or a lens was made on, with how many windows of each; of one that does not say, or is gone, none."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".yaml":
            windows = yaml.safe_load(path.read_text(encoding="utf-8"))["chosen_on"]["windows"]
            return {str(name): int(count) for name, count in windows.items()}
        with safe_open(path, framework="np") as file:
            provenance = parse_json(file.metadata()["quicksilver"])["provenance"]
        texts = (provenance if "texts" in provenance else provenance["text"])["texts"]
        return {str(name): int(entry["windows"]) for name, entry in texts.items()}
    except (KeyError, TypeError, AttributeError, ValueError, OSError, SafetensorError, yaml.YAMLError):
        return {}


# --- precision=fastest: the plain number format and attention in which a prompt of this model takes least time on this machine ----------
# Measured on the model itself, kept in the results folder by processor, and written into the config. So a record names what was chosen, and
# equals that of a run which asks for the same by name.
FORMATS = {"float32": None, "bfloat16": "bfloat16", "int8": "int8_dynamic"}  # and the module that computes in it
PLAIN = "float32 sdpa"
CANDIDATES = [f"{number_format} {attention}" for number_format in FORMATS for attention in ATTENTION]
GAIN = 1.05  # a later one must be so much faster: it rounds more, or takes more memory
BATCH, ROUNDS = 2, 3  # prompts of a pass; passes of each candidate
_FORMATS = "cache/precision.json"
_said: set[str] = set()


def in_fastest_precision(config: RunConfig) -> RunConfig:
    """The config, which asks for it, in the fastest plain format.
    Raises ConfigError: a module fixes the format or the attention, the model is cut among processes, or its checkpoint is
    quantised."""
    from quicksilver.runtime.quantized.kernels import machine

    runs, prompt = RunContext(), config.protocol.prompt_tokens
    files, digest = runs.files(config)
    _check_precision(config, read_object(files.folder / "config.json"))
    plain = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="float32", attn_implementation="sdpa"))
    key = f"{digest} {config.model.device_map} {BATCH}x{prompt} {','.join(ATTENTION)}"
    with torch_threads(config.threads):
        store = Store(config.results_dir)
        times_ms = store.on_this_machine(
            _FORMATS, machine(), key, _are_times, lambda: format_times_ms(runs.model(plain).model, prompt)
        )
    chosen = fastest_format(times_ms)
    said = ", ".join(f"{name} {times_ms[name]:.1f} ms" for name in sorted(times_ms, key=lambda name: times_ms[name]))
    dtype, attention, modules = of_format(chosen)
    care = " Time saved is against dense in float32, as int8 is a module." if modules else ""
    if (line := f"precision=fastest: {chosen} for {config.model.name}. {BATCH} prompts take: {said}.{care}") not in _said:
        _said.add(line)
        print(line, file=sys.stderr, flush=True)
    model = dataclasses.replace(config.model, dtype=dtype, attn_implementation=attention)
    return dataclasses.replace(config, model=model, modules={**modules, **config.modules}, precision=None)


def of_format(candidate: str) -> tuple[str, str, dict[str, Any]]:
    """A candidate as a config has it: dtype, attention, and the modules that compute in it."""
    from quicksilver.runs.parts import module_entry

    number_format, attention = candidate.split()
    if number_format == "int8":
        return "float32", attention, dict([module_entry("int8_dynamic")])
    return number_format, attention, {}


def fastest_format(times_ms: Mapping[str, float]) -> str:
    """The candidate that `GAIN` leaves, of those that were timed; `PLAIN` is among them."""
    chosen = PLAIN
    for name in sorted(times_ms, key=CANDIDATES.index):
        chosen = name if times_ms[name] * GAIN < times_ms[chosen] else chosen
    return chosen


def _check_precision(config: RunConfig, of_checkpoint: Mapping[str, object]) -> None:
    asked = f"precision={config.precision}"
    for name, module in zip(sorted(config.modules), build_modules(config.modules), strict=True):
        if module.number_format != "float32" or name == "block_attention":
            fixes = "the attention" if name == "block_attention" else f"the number format ({module.number_format})"
            raise ConfigError(f"{asked}: modules.{name} fixes {fixes}. Leave one of the two out.")
    if (parallel := config.model.parallel) is not None:
        raise ConfigError(f"{asked}: one process measures, and model.parallel={parallel}. Give model.dtype=bfloat16.")
    if "quantization_config" in of_checkpoint:
        raise ConfigError(f"{asked}: the checkpoint of model={config.model.name} is quantised already. Leave {asked} out.")


def _are_times(found: object) -> bool:
    """Whether the file, which anybody may have edited, holds times of candidates."""
    if not isinstance(found, dict) or PLAIN not in found or not set(CANDIDATES).issuperset(found):
        return False
    return all(isinstance(ms, float) and math.isfinite(ms) and ms > 0 for ms in found.values())


def format_times_ms(model: PreTrainedModel, prompt_tokens: int) -> dict[str, float]:
    """Median milliseconds of a pass over `BATCH` prompts by candidate, `float32 sdpa` …; what does not run here is left out.
    Raises ConfigError: not even float32 with sdpa runs."""
    import torch

    from quicksilver.measure.latency import alternate, shared_weight_copy
    from quicksilver.runs.parts import module_entry
    from quicksilver.runtime import apply
    from quicksilver.runtime.block_attention import attention_function

    most = getattr(model.config, "max_position_embeddings", None) or prompt_tokens
    size = (BATCH, min(prompt_tokens, most))
    ids = torch.randint(model.config.vocab_size, size, generator=torch.Generator().manual_seed(0)).to(model.device)
    steps = {}
    with ExitStack() as opened, torch.inference_mode():
        for name in CANDIDATES:
            number_format, attention = name.split()
            module, copy = FORMATS[number_format], shared_weight_copy(model)
            try:
                opened.enter_context(attention_function(copy, attention))
                opened.enter_context(apply(copy, build_modules(dict([module_entry(module)])) if module else []))
                copy(ids)
            except (QuickSilverError, RuntimeError, NotImplementedError) as error:  # no such kernel on this device
                if name == PLAIN:
                    raise ConfigError(f"precision=fastest: the model does not run in {PLAIN}: {error}") from error
                continue
            steps[name] = partial(copy, ids)
        timed = alternate(steps, warmup=1, repeats=ROUNDS, device=model.device, control=False)
    return {name: samples.median for name, samples in timed.items()}


# --- the machine ---------------------------------------------------------------------------------------------------------------
def environment(other_runs: Sequence[str] = ()) -> EnvironmentEntry:
    """The machine and the libraries, for the record, with the runs that were made on this machine meanwhile."""
    import psutil
    import torch
    import transformers

    from quicksilver.runtime.quantized.kernels import processor

    return EnvironmentEntry(
        platform.python_version(), torch.__version__, transformers.__version__, platform.platform(), processor(),
        cores=os.cpu_count(), threads=torch.get_num_threads(), memory_bytes=psutil.virtual_memory().total, load_average=os.getloadavg()[0],
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None, other_runs=list(other_runs), job=job(),
    )  # fmt: skip


def job() -> str | None:
    """`slurm 17_3 on node5, 4 of 64 cores`; the whole node is said to be one."""
    if (job := os.environ.get("SLURM_JOB_ID")) is None:
        return None
    cores = os.environ.get("SLURM_CPUS_ON_NODE", "")
    whole = cores.isdecimal() and int(cores) >= (os.cpu_count() or 1)
    share = "the whole node" if whole else f"{cores or '?'} of {os.cpu_count()} cores"
    return f"slurm {job} on {os.environ.get('SLURMD_NODENAME', platform.node())}, {share}"


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Within, torch has so many; None: as many as it has."""
    import torch

    before = torch.get_num_threads()
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)
