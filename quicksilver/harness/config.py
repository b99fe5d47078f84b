"""Configs: their types, how they are composed from `conf/`, and what a person is told when something in them is wrong.

Every key of `conf/` is a field of a dataclass below; Hydra checks names and types against them. `modules` is open: each entry
is the arguments of a runtime module and is checked against that class.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from quicksilver.data.spec import FORMS, PARTS, READERS, DatasetConfig
from quicksilver.harness.hydra_section import check_hydra, check_selected
from quicksilver.harness.overrides import quoted
from quicksilver.harness.targets import target_class
from quicksilver.models.spec import ATTENTION, DEVICES, DTYPES, ModelConfig
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.runtime.module import RuntimeModule

EXECUTIONS = ("compact", "masked", "decide")
NULLS = ("shuffle", "none")
MOST_THREADS = 1024  # beyond this the libraries do not refuse, they abort
GREATEST_SEED = 2**32 - 1  # what every generator takes
GREATEST_NUMBER = 2**63 - 1  # what json readers, pandas and torch hold
_OVERRIDE = "write key=value, for instance model=gpt2 or modules.halting.resume_layers=4."
GROUPS = ("model", "dataset", "modules", "protocol", "measure", "tracker", "experiment")

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
class MeasureConfig:
    """What is measured beside quality.

    Args:
        null_control: `shuffle` replays the run's decisions on random tokens at the same budget; `none`.
        probes: positions per window behind which the no-lookahead audit replaces the tokens.
        flops: count the executed FLOPs of one batch by interposition as well (the analytic count is always there).
        latency: wall clock of one batch, alternated with the dense model: `warmup` untimed rounds, then `repeats`.
        memory: peak memory of one batch.
        batch_windows: windows in the batch that is audited, counted, timed and weighed.
        signals: look inside a few texts: drift, entropy, attention, decisions of every token in every layer. The texts are `sentences`, each a
            prompt of its own, and the first `signal_windows` windows (of each its prompt, under `continuation`).
        attribution: gradients of the loss in these texts as well.
    """

    name: str = MISSING
    null_control: str = "shuffle"
    probes: int = 3
    flops: bool = True
    latency: bool = True
    warmup: int = 1
    repeats: int = 5
    memory: bool = True
    batch_windows: int = 4
    components: bool = False
    energy: bool = False
    energy_window_s: float = 3.0
    energy_rounds: int = 3
    country_iso_code: Optional[str] = None
    deployment: bool = False
    deployment_prompt_tokens: int = 256
    deployment_new_tokens: int = 64
    budget_ms: float = 50.0
    signals: bool = False
    sentences: list[str] = field(default_factory=list)
    signal_windows: int = 0
    attribution: bool = False


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
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    execution: str = "compact"
    seed: int = 0
    threads: Optional[int] = None
    results_dir: str = "results"
    data: DataRootConfig = field(default_factory=DataRootConfig)

    @property
    def label(self) -> str:
        """One line for progress bars and lists of runs."""
        return " | ".join((self.model.name, self.dataset.name, "+".join(self.modules) or "dense", self.protocol.name))

    def dense(self) -> RunConfig:
        """The same run without modules: what every difference of this one is against."""
        measure = dataclasses.replace(self.measure, null_control="none")
        if self.modules:  # a look inside shows the dense model as well
            measure = dataclasses.replace(measure, signals=False, sentences=[], signal_windows=0, attribution=False)
        # The seed draws nulls and probes; a dense run must be found again whatever the seed of the run that needs it.
        return dataclasses.replace(self, modules={}, execution="compact", seed=0, measure=measure)

    def identity(self) -> dict[str, Any]:
        """What of the config can change a result: the part that is hashed into the fingerprint.

        Left out: where results and data lie, trackers, and the places a model or text comes from (their digests are hashed;
        that of the scored text differs from part to part).
        """
        model, dataset = dataclasses.asdict(self.model), dataclasses.asdict(self.dataset)
        protocol, measure = dataclasses.asdict(self.protocol), dataclasses.asdict(self.measure)
        idle = [
            *([] if self.model.adapter else [(model, "adapter")]),
            (model, "path"),
            (model, "revision"),
            (dataset, "files"),
            (dataset, "hub"),
            (dataset, "reader"),
            (measure, "name"),
            (dataset, "part"),
        ]
        if not self.modules:
            idle.append((dataset, "calibration_windows"))
        if self.protocol.name == "all":
            idle.append((protocol, "prompt_tokens"))
        # A pass that is off leaves no trace here: whoever measures without it finds the same record whatever it would have done.
        if not (self.measure.latency or self.measure.components or self.measure.deployment):
            idle += [(measure, "warmup"), (measure, "repeats")]
        for on, keys in _PASS_KEYS.items():
            if not getattr(self.measure, on):
                idle += [(measure, key) for key in (on, *keys)]
        for section, key in idle:
            del section[key]
        return {
            "model": model,
            "dataset": dataset,
            "modules": dict(self.modules),
            "protocol": protocol,
            "measure": measure,
            "execution": self.execution,
            "seed": self.seed,
            "threads": self.threads,
        }


_PASS_KEYS = {  # a pass that may be off, and the keys that only it reads
    "components": (),
    "energy": ("energy_window_s", "energy_rounds", "country_iso_code"),
    "deployment": ("deployment_prompt_tokens", "deployment_new_tokens", "budget_ms"),
    "signals": ("sentences", "signal_windows", "attribution"),
}


ConfigStore.instance().store("run_schema", RunConfig)


# --- where conf/ is, and what is in it ------------------------------------------------------------------------------------------


def config_dir() -> Path:
    """The folder of yaml files: `quicksilver/conf` in an installed package, `conf` beside the package in a clone.

    Raises:
        ConfigError: neither is there; the installation is incomplete.
    """
    package = Path(__file__).resolve().parents[1]
    places = (package / "conf", package.parent / "conf")
    found = next((place for place in places if (place / "run.yaml").is_file()), None)
    if found is None:
        raise ConfigError(
            f"the configuration is missing: neither {places[0]} nor {places[1]} has a run.yaml; install quicksilver again."
        )
    return found


def choices(group: str, extra_dirs: Sequence[Path] = ()) -> list[str]:
    """Names that may follow `group=`, sorted: the yaml files of that group."""
    return sorted({path.stem for root in (config_dir(), *extra_dirs) for path in (root / group).glob("*.yaml")})


def sweep_jobs(experiment: str) -> list[tuple[str, ...]]:
    """The jobs of `quicksilver run -m experiment=NAME`, each as overrides, in Hydra's order.

    Raises:
        ConfigError: there is no such experiment, or it sweeps nothing.
    """
    path = config_dir() / "experiment" / f"{experiment}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"experiment={experiment}: there is no such experiment. {_suggest(experiment, choices('experiment'), 'Choices')}"
        )
    params = OmegaConf.select(OmegaConf.load(path), "hydra.sweeper.params") or {}
    parser = OverridesParser.create()
    axes = []
    for key, values in params.items():
        override = parser.parse_override(f"{key}={values}")
        swept = override.sweep_string_iterator() if override.is_sweep_override() else [override.get_value_element_as_str()]
        axes.append([f"{key}={value}" for value in swept])
    if not axes:
        raise ConfigError(f"{path} sweeps nothing: it has no hydra.sweeper.params.")
    return [(f"experiment={experiment}", *job) for job in itertools.product(*axes)]


# --- composing ------------------------------------------------------------------------------------------------------------------


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """Compose one run from overrides, `["model=gpt2", "modules=[halting]", "modules.halting.resume_layers=4"]`.

    Raises:
        ConfigError: an unknown key or choice (with a suggestion), a value of the wrong type or out of range.
    """
    overrides = quoted(overrides)
    return run_config(_compose_raw(overrides), overrides)


def _compose_raw(overrides: list[str]) -> DictConfig:
    check_words(overrides)
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            cfg = hydra_compose("run", overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(explain(error, overrides)) from error
    check_hydra(cfg.hydra)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def check_words(overrides: Sequence[str], extra_dirs: Sequence[Path] = ()) -> None:
    """Refuse words over which Hydra itself stumbles: a group that is given a number or nothing; and modules that would become one.

    Raises:
        ConfigError: names the word.
    """
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            continue  # explained with all others
        values = override._value if isinstance(override._value, list) else [override._value]
        unnamed = any(value is None or isinstance(value, int | float) for value in values) and not override.is_delete()
        if override.key_or_group in GROUPS and unnamed:
            raise ConfigError(explain(ConfigError(text), [text], extra_dirs))
        if override.key_or_group == "modules" and not override.is_delete():
            for value in override.sweep_iterator() if override.is_sweep_override() else [override.value()]:
                names = value if isinstance(value, list) else str(value).strip("[]").split(",")
                check_selected([str(name).strip() for name in names], [config_dir(), *extra_dirs])


def run_config(cfg: DictConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """The typed, checked config of a composed one.

    Raises:
        ConfigError: keys added with `+` that mean nothing, a missing value, a value out of range.
    """
    try:
        _refuse_unknown_keys(cfg, RunConfig())
        OmegaConf.resolve(cfg)
        missing = sorted(OmegaConf.missing_keys(cfg))
        if missing:
            name = f"{missing[0].split('.')[0]}={OmegaConf.select(cfg, missing[0].split('.')[0] + '.name', default='…') or '…'}"
            raise ConfigError(f"{missing[0]} has no value: {name} needs {missing[0]}=…")
        config = OmegaConf.to_object(cfg)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value: give {error.full_key}=…") from error
    except OmegaConfBaseException as error:
        raise ConfigError(_explain_value(error, overrides)) from error
    assert isinstance(config, RunConfig)
    check(config)
    return config


def _refuse_unknown_keys(node: DictConfig, schema: Any, prefix: str = "") -> None:
    """`+key=value` adds to a config whatever its type: only what the schema has means something."""
    known = {f.name: getattr(schema, f.name) for f in dataclasses.fields(schema)}
    for key in map(str, node):
        if key not in known:
            raise ConfigError(f"{prefix}{key}: there is no such key. {_suggest(key, list(known), 'Keys')}")
        if dataclasses.is_dataclass(known[key]):
            _refuse_unknown_keys(node[key], known[key], f"{prefix}{key}.")


def check(config: RunConfig) -> None:
    """Ranges and choices of the values that no class of ours checks by itself.

    Raises:
        ConfigError: names the key, the value and what is allowed.
    """
    if not DEVICES.fullmatch(config.model.device_map):
        raise ConfigError(
            f"model.device_map={config.model.device_map}: no device is called so. Use cpu, cuda, cuda:1 …, mps or auto."
        )
    _choice("model.dtype", config.model.dtype, DTYPES)
    _choice("model.attn_implementation", config.model.attn_implementation, ATTENTION)
    _choice("dataset.reader", config.dataset.reader, READERS)
    _choice("dataset.form", config.dataset.form, FORMS)
    _choice("dataset.part", config.dataset.part, PARTS)
    _choice("protocol.name", config.protocol.name, ("all", "continuation"))
    _choice("measure.null_control", config.measure.null_control, NULLS)
    _choice("execution", config.execution, EXECUTIONS)
    _choice("tracker.name", config.tracker.name, ("none", "wandb"))
    _choice("tracker.mode", config.tracker.mode, ("offline", "online", "disabled"))
    _at_least("dataset.windows", config.dataset.windows, 1)
    _at_least("dataset.calibration_windows", config.dataset.calibration_windows, 1)
    _at_least("dataset.documents", config.dataset.documents, 1)
    _at_least("dataset.calibration_documents", config.dataset.calibration_documents, 1)
    _at_least("measure.probes", config.measure.probes, 1)
    _at_least("measure.batch_windows", config.measure.batch_windows, 1)
    _at_least("measure.warmup", config.measure.warmup, 0)
    _at_least("measure.repeats", config.measure.repeats, 3)
    _at_least("measure.signal_windows", config.measure.signal_windows, 0)
    if config.measure.signals and not (config.measure.sentences or config.measure.signal_windows):
        raise ConfigError(
            "measure.signals=true has no text to look into: give measure.sentences=['A sentence.'] or measure.signal_windows=1."
        )
    _within("threads", config.threads, 1, MOST_THREADS)
    _within("seed", config.seed, 0, GREATEST_SEED)
    if config.dataset.reader != "pydoc" and config.dataset.files.test is None and config.dataset.hub.id is None:
        raise ConfigError(
            f"dataset.files.test has no value: dataset={config.dataset.name} needs dataset.files.test=/path/of/a/text."
        )
    timed = [name for name in ("latency", "components", "energy", "deployment") if getattr(config.measure, name)]
    if timed and config.execution == "masked":
        off = " ".join(f"measure.{name}=false" for name in timed)
        raise ConfigError(
            f"execution=masked computes everything and undoes it, so it has no {timed[0]} worth a record: add {off}."
        )
    _check_numbers("", dataclasses.asdict(config))
    _check_passes(config)
    if not config.results_dir.strip():
        raise ConfigError("results_dir is empty: give the folder that holds the records, for instance results_dir=results.")


def _check_passes(config: RunConfig) -> None:
    measure = config.measure
    if measure.energy:
        if measure.country_iso_code is None:
            raise ConfigError(
                "measure.country_iso_code has no value: energy needs the country whose electricity it is, such as DEU."
            )
        _at_least("measure.energy_rounds", measure.energy_rounds, 2)
        if measure.energy_window_s < 1:
            raise ConfigError(
                f"measure.energy_window_s={measure.energy_window_s:g} is out of range: counters need at least 1 second."
            )
    if measure.budget_ms <= 0:
        raise ConfigError(f"measure.budget_ms={measure.budget_ms:g} is out of range: more than 0 milliseconds a token.")
    if measure.deployment:
        _at_least("measure.deployment_prompt_tokens", measure.deployment_prompt_tokens, 2)
        _at_least("measure.deployment_new_tokens", measure.deployment_new_tokens, 2)
        if measure.deployment_prompt_tokens > config.protocol.window_tokens:
            raise ConfigError(
                f"measure.deployment_prompt_tokens={measure.deployment_prompt_tokens}: the prompt is the beginning of a window, and a "
                f"window has protocol.window_tokens={config.protocol.window_tokens}."
            )


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


def _choice(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={value}: {_suggest(value, allowed, 'Choices')}")


def _at_least(key: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{key}={value} is out of range: at least {least}.")


def _within(key: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise ConfigError(f"{key}={value} is out of range: from {least} to {most}.")


# --- modules --------------------------------------------------------------------------------------------------------------------


def module_class(name: str, entry: Any) -> type[RuntimeModule]:
    """The class behind `modules.NAME`, named by its `_target_`; nothing is built.

    Raises:
        ConfigError: no `_target_`, or no runtime module there.
    """
    from quicksilver.runtime.module import RuntimeModule

    return target_class(f"modules.{name}", entry, RuntimeModule)


def build_modules(entries: Mapping[str, Any], tokenizer: Any = None) -> list[Any]:
    """The runtime modules of a config, by name.

    Args:
        tokenizer: makes token ids of the words in options called `…_ids`; None leaves words out, which is enough to check the rest.

    Raises:
        ConfigError: an argument that the class does not have (with a suggestion), a value of the wrong type, a word that is no token,
            or whatever the class refuses.
    """
    built = []
    # All are checked before the first is built. Sorted: whatever order they were selected in must not decide anything.
    classes = {name: module_class(name, entry) for name, entry in sorted(entries.items())}
    for name, cls in classes.items():
        entry = entries[name]
        arguments = {k: v for k, v in entry.items() if k != "_target_"}
        known = list(inspect.signature(cls).parameters)
        for key in arguments:
            if key not in known:
                raise ConfigError(f"modules.{name}.{key}: {cls.__name__} has no such option. {_suggest(key, known, 'Options')}")
            if key.endswith("_ids") and isinstance(arguments[key], list):
                arguments[key] = _token_ids(f"modules.{name}.{key}", arguments[key], tokenizer)
        try:
            built.append(cls(**arguments))
        except ConfigError as error:
            raise ConfigError(f"modules.{name}: {error}") from error
        except (TypeError, ValueError) as error:
            shown = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
            raise ConfigError(f"modules.{name} cannot be built from {shown}: {error}") from error
    return built


def _token_ids(key: str, value: list[Any], tokenizer: Any) -> list[Any]:
    """`value` with every word replaced by the ids of the tokens that read like it, with or without a space around."""
    words = {entry.strip() for entry in value if isinstance(entry, str)}
    ids = [entry for entry in value if not isinstance(entry, str)]
    if not words or tokenizer is None:
        return ids
    found = [(number, tokenizer.decode([number]).strip()) for number in range(len(tokenizer))]
    missing = sorted(words - {text for _, text in found})
    if missing:
        raise ConfigError(f"{key}: {missing[0]!r} is no single token of this model. Give words that are, or token ids.")
    return ids + [number for number, text in found if text in words]


# --- what to tell a person ------------------------------------------------------------------------------------------------------


def explain(error: Exception, overrides: Sequence[str], extra_dirs: Sequence[Path] = ()) -> str:
    """One readable message for what Hydra or OmegaConf raised while composing `overrides`."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException:
            return f"{text!r} is not an override: {_OVERRIDE}"
    parsed = [o for o in parsed if not o.key_or_group.startswith("hydra")]
    for override in parsed:
        if override.key_or_group in GROUPS:
            group = override.key_or_group
            known = choices(group, extra_dirs)
            chosen = _chosen(override)
            if not chosen and (group != "modules" or override._value is None):
                return f"{override.input_line} names nothing. Choices: {', '.join(known)}."
            unknown = [c for c in chosen if c not in known]
            if unknown:
                return (
                    f"{group}={unknown[0]}: there is no such {group.removesuffix('s')}. {_suggest(unknown[0], known, 'Choices')}"
                )
    return _explain_keys(parsed, extra_dirs) or _explain_value(error, overrides)


def _chosen(override: Override) -> list[str]:
    """Names that a group override, swept or not, picks."""
    values = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
    flat: list[str] = []
    for value in values:
        # sweep_iterator gives a list of names as the text "[a,b]"
        text = ",".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
        flat += [part.strip() for part in text.strip("[]").split(",") if part.strip()]
    return flat


def _explain_keys(parsed: Sequence[Override], extra_dirs: Sequence[Path]) -> str | None:
    groups = [o for o in parsed if o.key_or_group in GROUPS]
    selected = [
        f"{o.key_or_group}=[{','.join(_chosen(o))}]" if o.key_or_group == "modules" else f"{o.key_or_group}={_chosen(o)[0]}"
        for o in groups
        if _chosen(o)
    ]
    if extra_dirs:
        selected.append(f"hydra.searchpath=[{','.join(f'file://{d}' for d in extra_dirs)}]")
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        base = hydra_compose("run", [word for word in selected if "${" not in word])
    for override in parsed:
        if override in groups or override.is_add() or override.is_force_add():
            continue
        node: Any = base
        parts = override.key_or_group.split(".")
        for depth, part in enumerate(parts):
            here = list(node) if OmegaConf.is_dict(node) else []
            if part in here:
                node = OmegaConf.select(node, part, throw_on_missing=False)
                continue
            where = ".".join(parts[:depth])
            if where == "modules":
                known = choices("modules", extra_dirs)
                if part in known:
                    wanted = ",".join([*here, part])
                    return f"{override.key_or_group}: the module {part} is not selected. Add it: modules=[{wanted}]."
                return f"{override.key_or_group}: there is no module {part}. {_suggest(part, known, 'Choices')}"
            if not here:
                return f"{override.key_or_group}: {where} is a value, not a section."
            prefix, of = (f"{where}.", f" of {where}") if where else ("", "")
            close = " or ".join(prefix + key for key in _close(part, [str(key) for key in here]))
            hint = f"Did you mean {close}? " if close else ""
            return f"{prefix}{part}: there is no such key. {hint}Keys{of}: {', '.join(map(str, here))}."
    return None


_TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "str": "text"}


def _explain_value(error: Exception, overrides: Sequence[str]) -> str:
    said = _explain_type(error) or _plain(error)
    interpolated = next((text for text in overrides if "${" in text), None)
    if interpolated is not None and "nterpolation" in said:
        return f"{interpolated}: {said}. ${{…}} stands for another key, ${{model.name}}, or for a variable, ${{oc.env:NAME,otherwise}}."
    return said


def _explain_type(error: Exception) -> str | None:
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if not isinstance(cause, OmegaConfBaseException) or not cause.full_key:
        return None
    text = str(cause).splitlines()[0]
    converted = re.match(r"Value '(.*)' of type '.*' could not be converted to (\w+)", text)
    if converted:
        return f"{cause.full_key}={converted[1]}: needs {_TYPES.get(converted[2], converted[2])}."
    if "is not a valid bool" in text:
        return f"{cause.full_key}={text.split(chr(39))[1]}: needs true or false."
    if "is not in struct" in text:
        return f"{cause.full_key}: there is no such key in at least one job of this sweep; sweep those jobs apart."
    if "is not Optional" in text:
        return f"{cause.full_key}=null: needs a value."
    return f"{cause.full_key}: {text}"


def _plain(error: Exception) -> str:
    lines = [str(error).splitlines()[0]]
    if error.__cause__ is not None:
        lines.append(str(error.__cause__).splitlines()[0])
    return " ".join(lines)


def _close(word: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(word, known, n=2, cutoff=0.6)


def _suggest(word: str, known: Sequence[str], noun: str) -> str:
    close = _close(word, known)
    return (f"Did you mean {' or '.join(close)}? " if close else "") + f"{noun}: {', '.join(known)}."
