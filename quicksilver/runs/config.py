"""Configs: their types, how they are composed from `conf/`, and what a person is told when something in them is wrong.

Every key of `conf/` is a field of a dataclass below; Hydra checks names and types against them. `modules` and `measure` are open: each
entry is the arguments of a runtime module or of a measurement and is checked against that class.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Optional, get_args

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from quicksilver.data.spec import ANNOTATED, FORMS, MADE_HERE, PARTS, READERS, DatasetConfig
from quicksilver.measure.measurement import Setting
from quicksilver.models.spec import ATTENTION, DEVICES, DTYPES, PARALLEL, ModelConfig
from quicksilver.records.identity import Execution, ProtocolName, spelled_at_first
from quicksilver.runs.choices import explain, files_stamp, suggest
from quicksilver.runs.composing import composed, quoted, searched
from quicksilver.runs.parts import build_measurements, is_on, measurement_class
from quicksilver.runtime.errors import ConfigError

_PRESET = "quicksilver.modules.PresetHalting"
MOST_THREADS = 1024  # beyond this the libraries do not refuse, they abort
GREATEST_SEED = 2**32 - 1  # what every generator takes
GREATEST_NUMBER = 2**63 - 1  # what json readers, pandas and torch hold

CHOICES: dict[str, Sequence[str]] = {
    "model.dtype": DTYPES, "model.parallel": PARALLEL, "model.attn_implementation": ATTENTION, "dataset.reader": READERS, "dataset.form": FORMS,
    "dataset.part": PARTS, "protocol.name": get_args(ProtocolName), "execution": get_args(Execution), "precision": ("fastest",),
    "records": ("any", "checked", "own"),
    "tracker.name": ("none", "wandb"), "tracker.mode": ("offline", "online", "disabled"),
}  # fmt: skip
RANGES: dict[str, tuple[int, int | None]] = {
    "dataset.windows": (1, None), "dataset.calibration_windows": (1, None), "dataset.documents": (1, None),
    "dataset.calibration_documents": (1, None), "threads": (1, MOST_THREADS), "seed": (0, GREATEST_SEED),
}  # fmt: skip

# OmegaConf 2.3 reads `Optional[int]`, not every spelling of `int | None` inside containers; the fields keep the older form.
# ruff: noqa: UP045


@dataclass
class ProtocolConfig:
    """Which positions of a window are scored; the fields of `quicksilver.measure.Protocol`."""

    name: str = MISSING
    window_tokens: int = 512
    prompt_tokens: int = 448
    batch_size: int = 8


@dataclass
class TrackerConfig:
    """Where finished records are mirrored: `none`, or `wandb` with its mode (offline | online | disabled)."""

    name: str = "none"
    project: str = "quicksilver"
    mode: str = "offline"


@dataclass
class DataRootConfig:
    """root: folder of local datasets and models (QUICKSILVER_DATA)."""

    root: Optional[str] = None


@dataclass
class RunConfig:
    """One run, resolved. `conf/run.yaml` says what each key is for."""

    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    modules: dict[str, Any] = field(default_factory=dict)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    measure: dict[str, Any] = field(default_factory=dict)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    execution: str = "compact"
    decision_layers: Optional[list[int]] = None
    precision: Optional[str] = None
    seed: int = 0
    threads: Optional[int] = None
    results_dir: str = "results"
    records: str = "any"
    data: DataRootConfig = field(default_factory=DataRootConfig)

    @property
    def label(self) -> str:
        """One line for progress bars and lists of runs."""
        modules = "+".join(self.modules).replace("quicksilver", "predicted_kv")  # its old name, which identities keep
        return " | ".join((self.model.name, self.dataset.name, modules or "dense", self.protocol.name))

    def dense(self) -> RunConfig:
        """The same run without modules: what every difference of this one is against."""
        kept = dict(self.measure)
        for name, entry in self.measure.items():
            if is_on(name, entry):
                when = measurement_class(name, entry).of_dense
                if when == "never" or (when == "alone" and self.modules):
                    del kept[name]
        # The seed draws nulls and probes; a dense run must be found again whatever the seed of the run that needs it.
        return dataclasses.replace(self, modules={}, execution="compact", decision_layers=None, seed=0, measure=kept)

    def identity(self) -> dict[str, Any]:
        """What of the config can change a result: the part that is hashed into the fingerprint.

        Left out: where results and data lie, which records count, trackers, the places a model or text comes from (their digests are hashed; that of the
        scored text differs from part to part), and measurements that are off or on which no other number depends.
        """
        model, dataset, protocol = (dataclasses.asdict(part) for part in (self.model, self.dataset, self.protocol))
        is_task = self.dataset.task is not None
        of_task = ["columns", "train", "validation"]  # what a task's splits hold is in the text's digest
        for section, idle in (
            (model, ["path", "revision", *(key for key in ("adapter", "parallel") if not model[key])]),
            (dataset["task"], of_task if is_task else []),
            (dataset, ["files", "hub", "reader", "part", "tagger", *([] if is_task else ["task"])]),
            (dataset, [] if self.modules else ["calibration_windows"]),
            (protocol, ["prompt_tokens"] if self.protocol.name == "all" else []),
        ):
            for key in idle:
                del section[key]
        on = {name: one for name, one in build_measurements(self.measure).items() if one.in_identity}
        targets = {name: one.recorded_as or self.measure[name]["_target_"] for name, one in on.items()}
        measure = {name: {"_target_": targets[name], **one.identity()} for name, one in on.items()}
        return {
            "model": model, "dataset": dataset,
            "modules": {name: spelled_at_first(_without_files(entry)) for name, entry in self.modules.items()},
            "protocol": protocol, "measure": {"batch_windows": self.measure["batch_windows"], **measure}, "execution": self.execution,
            **({} if self.decision_layers is None else {"decision_layers": sorted(set(self.decision_layers))}),
            "seed": self.seed, "threads": self.threads,
        }  # fmt: skip


def _without_files(entry: Any) -> Any:
    """A calibration and a schedule's file count by their content, wherever they lie: their digests are hashed."""
    if not isinstance(entry, Mapping):
        return entry
    kept = {key: value for key, value in entry.items() if key != "calibration" or not isinstance(value, str)}
    return {**kept, "schedule": None} if str(kept.get("schedule")).endswith(".yaml") else kept


ConfigStore.instance().store("run_schema", RunConfig)


# --- composing ------------------------------------------------------------------------------------------------------------------
def compose(overrides: Sequence[str] = (), extra_dirs: Sequence[Path] = ()) -> RunConfig:
    """Compose one run from overrides, `["model=gpt2", "modules=[halting]", "modules.halting.resume_layers=4"]`.

    Args:
        overrides: words in Hydra's grammar.
        extra_dirs: folders of the user's own that are searched beside conf/ (`--config-dir`).

    Raises:
        ConfigError: an unknown key or choice (with a suggestion), a value of the wrong type or out of range.
    """
    if isinstance(overrides, str) or not isinstance(overrides, Sequence) or not all(isinstance(word, str) for word in overrides):
        raise ConfigError(f"overrides={overrides!r:.80} is no list of words: give one, such as ['model=reference-gpt2'].")
    folders, readable = searched(quoted(overrides))
    extra_dirs = [*extra_dirs, *folders]
    try:
        config = _one(readable, extra_dirs)
    except ConfigError as error:
        raise ConfigError(_faults(readable, extra_dirs, str(error))) from error
    for entry in config.modules.values():
        if isinstance(entry, dict) and entry.get("_target_") == _PRESET and entry.get("schedule") is None:
            entry |= _own_schedule(config)
    if config.precision is not None:
        from quicksilver.runs.context import in_fastest_precision

        return in_fastest_precision(config)
    return config


def _one(words: Sequence[str], extra_dirs: Sequence[Path]) -> RunConfig:
    return run_config(composed(words, extra_dirs, files_stamp(extra_dirs)), words)


def _faults(words: Sequence[str], extra_dirs: Sequence[Path], first: str) -> str:
    """What is wrong, a line each: the word that a message is about is left out, with what it chooses, and the others are tried again. A message that
    is about none of them follows from what was left out."""
    said, left = [first], list(words)
    while found := _next_fault(left, extra_dirs, said[-1]):
        said.append(found[0])
        left = found[1]
    return "\n".join(said)


def _next_fault(words: Sequence[str], extra_dirs: Sequence[Path], said: str) -> tuple[str, list[str]] | None:
    key_of = {word: word.partition("=")[0].lstrip("+~") for word in words}
    for word in sorted((word for word in words if word in said or key_of[word] in said), key=lambda word: word not in said):
        about = (f"{key_of[word]}=", f"{key_of[word]}.") if "=" in word else (word,)  # a choice, with what is said of it
        without = [other for other in words if not other.startswith(about)]
        try:
            _one(without, extra_dirs)
            return None
        except ConfigError as error:
            if (message := str(error)) != said:
                begins = tuple(f"{key_of[other]}{sign}" for other in without for sign in "=: ")
                return (message, without) if message.startswith(begins) else None
    return None


def _own_schedule(config: RunConfig) -> dict[str, str]:
    """The file of `quicksilver schedule` that lies beside the model or with the results, where none ships; {}: there is none."""
    from quicksilver.modules.staged_halting import shipped_with_schedules

    if config.model.name in shipped_with_schedules():
        return {}
    beside = sorted(Path(config.model.path).expanduser().glob("*.schedules.yaml")) if config.model.path else []
    return next(({"schedule": str(path)} for path in (*beside, schedules_file(config)) if path.is_file()), {})


def schedules_file(config: RunConfig) -> Path:
    """Where `quicksilver schedule` writes for a model, and where a run looks for it."""
    return Path(config.results_dir) / "translators" / f"{config.model.name}.schedules.yaml"


def run_config(cfg: DictConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """Make what Hydra composed a `RunConfig`, and check it.
    Raises ConfigError: keys added with `+` that mean nothing, a missing value, a value out of range."""
    try:
        _refuse_unknown_keys(cfg, RunConfig())
        config = OmegaConf.to_object(cfg)
    except MissingMandatoryValue as error:
        group = str(error.full_key).partition(".")[0]
        chosen = OmegaConf.select(cfg, f"{group}.name", default=None)
        needs = f"{group}={chosen} needs" if chosen else "give"
        raise ConfigError(f"{error.full_key} has no value: {needs} {error.full_key}=…") from error
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, overrides)) from error
    assert isinstance(config, RunConfig)
    check(config)
    return config


def _refuse_unknown_keys(node: DictConfig, schema: Any, prefix: str = "") -> None:
    """`+key=value` adds to a config whatever its type: only what the schema has means something."""
    known = {f.name: getattr(schema, f.name) for f in dataclasses.fields(schema)}
    for key in map(str, node):
        if key not in known:
            raise ConfigError(f"{prefix}{key}: there is no such key. {suggest(key, list(known), 'Keys')}")
        if dataclasses.is_dataclass(known[key]):
            _refuse_unknown_keys(node[key], known[key], f"{prefix}{key}.")


def check(config: RunConfig) -> None:
    """Check ranges and choices of the values that no class of ours checks by itself.
    Raises ConfigError: names the key, the value and what is allowed."""
    dataset, model = config.dataset, config.model
    for key, allowed in CHOICES.items():
        value = attrgetter(key)(config)
        if value not in allowed and not (value is None and key in ("model.parallel", "precision")):
            raise ConfigError(f"{key}={value}: {suggest(value, allowed, 'Choices')}")
    for key, (least, most) in RANGES.items():
        _within(key, attrgetter(key)(config), least, most)
    if dataset.task is not None:
        _within("dataset.task.shots", dataset.task.shots, 0)
        _within("dataset.task.examples", dataset.task.examples, 1)
    layers, places = config.decision_layers, (dataset.task, dataset.files.test, dataset.hub.id)
    has_text = dataset.reader in MADE_HERE or any(place is not None for place in places)
    _require({
        f"model.device_map={model.device_map}: no device is called so. Use cpu, cuda, cuda:1 …, mps or auto.": DEVICES.fullmatch(model.device_map),
        f"decision_layers={layers}: give one or more layers, counted from 0, or null for all of them.": layers is None or min(layers, default=-1) >= 0,
        f"dataset.reader={dataset.reader}: the reader `task` goes with dataset.task, and with it alone.":
            (dataset.reader == "task") == (dataset.task is not None),
        f"dataset.reader={dataset.reader}: the reader `tagged` goes with dataset.tagger, and with it alone (dataset=wikitext103-tagged).":
            (dataset.reader == "tagged") == (dataset.tagger is not None),
        f"dataset.files.test has no value: dataset={dataset.name} needs dataset.files.test=/path/of/a/text.": has_text,
        "results_dir is empty: give the folder that holds the records, for instance results_dir=results.": config.results_dir.strip(),
    })  # fmt: skip
    _check_numbers("", dataclasses.asdict(config))
    _check_measurements(config)


def _require(rules: Mapping[str, object]) -> None:
    """Raises ConfigError with the first message whose condition does not hold."""
    for said, holds in rules.items():
        if not holds:
            raise ConfigError(said)


def _check_measurements(config: RunConfig) -> None:
    batch, measurements = config.measure.get("batch_windows"), build_measurements(config.measure)
    timed = [name for name, measurement in measurements.items() if measurement.timed]
    off = " ".join(f"measure.{name}.enabled=false" for name in timed)
    alone = next((name for name, measurement in measurements.items() if not measurement.of_ranks), None)
    parallel, masked = config.model.parallel, config.execution == "masked"
    _require({
        "measure.batch_windows has no value: the windows of the batch that is audited, counted, timed and weighed.": batch is not None,
        f"measure.batch_windows={batch}: needs a whole number.": isinstance(batch, int) and not isinstance(batch, bool),
        "measure.quality is what every record has, and the first of its measurements: it cannot be switched off.":
            next(iter(measurements), None) == "quality",
        f"execution=masked computes everything and undoes it, so it has no {', '.join(timed[:1])} worth a record: add {off}.":
            not (timed and masked),
        f"model.parallel={parallel}: measure.{alone} is of one process alone. Measure quality and the ledgers of each process: measure=ranks.":
            parallel is None or alone is None,
        "records=checked compares with a record in one process: give records=own with model.parallel.":
            parallel is None or config.records != "checked",
    })  # fmt: skip
    _within("measure.batch_windows", batch, 1)
    protocol, annotated = config.protocol, config.dataset.reader in ANNOTATED
    setting = Setting(protocol.name, protocol.window_tokens, protocol.prompt_tokens, config.execution, annotated)
    for name, measurement in measurements.items():
        try:
            measurement.check(setting)
        except ConfigError as error:
            raise ConfigError(f"measure.{name}.{error}") from error


def _check_numbers(key: str, value: Any) -> None:
    """Refuse numbers that no file of a record can hold, wherever they stand."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            _check_numbers(f"{key}.{name}" if key else str(name), entry)
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            _check_numbers(f"{key}[{i}]", entry)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value!r} is not finite; give a finite number.")
    elif isinstance(value, int) and abs(value) > GREATEST_NUMBER:
        raise ConfigError(f"{key}={value} is out of range: no more than {GREATEST_NUMBER}.")


def _within(key: str, value: int | None, least: int, most: int | None = None) -> None:
    if value is not None and (value < least or (most is not None and value > most)):
        raise ConfigError(f"{key}={value} is out of range: {f'at least {least}' if most is None else f'from {least} to {most}'}.")
