"""Configs: their types, how they are composed from `conf/`, and what a person is told when something in them is wrong.

Every key of `conf/` is a field of a dataclass below; Hydra checks names and types against them. `modules` and `measure` are open: each
entry is the arguments of a runtime module or of a measurement and is checked against that class.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Optional, get_args

import yaml
from hydra import compose as hydra_compose
from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from quicksilver.data.spec import ANNOTATED, FORMS, MADE_HERE, PARTS, READERS, DatasetConfig
from quicksilver.measure.measurement import Setting
from quicksilver.models.spec import ATTENTION, DEVICES, DTYPES, PARALLEL, ModelConfig
from quicksilver.records.identity import Execution, ProtocolName, spelled_at_first
from quicksilver.runs.choices import GROUPS, choices, config_dir, explain, files_stamp, no_such_choice, suggest
from quicksilver.runs.parts import build_measurements, is_on, measurement_class, module_entry
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import read_bytes

_PRESET = "quicksilver.modules.PresetHalting"
MOST_THREADS = 1024  # beyond this the libraries do not refuse, they abort
GREATEST_SEED = 2**32 - 1  # what every generator takes
GREATEST_NUMBER = 2**63 - 1  # what json readers, pandas and torch hold
MOST_NODES = 100_000  # values of a yaml
_OF_NULL = (AssertionError, AttributeError)  # OmegaConf's, of a key in a section that is null
_OF_A_SECTION = re.compile(r"[+~]*dataset\.(task|tagger)(\.|=\{)")
REFUSALS = (HydraException, OmegaConfBaseException, yaml.YAMLError)

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


# --- Hydra's part of composing: words and the files of conf/ become one config, not yet typed or checked --------------------------
# Hydra merges every yaml anew for each run, a tenth of a second and more. So what the groups give (`model=gpt2-large`) is composed once and
# remembered. The entries of `modules=[halting,kv_skipping]`, in which most runs differ, are read from their files into it, and words that only
# give a value (`modules.halting.tau_drift=p10`) are set afterwards, as Hydra does. Whatever fails, Hydra composes from the start: its errors
# are then of these very words.


@contextmanager
def hydra_started(extra_dirs: Sequence[Path] = ()) -> Iterator[Hydra]:
    """Inside the block, Hydra composes from conf/ and from folders of the user's own; a Hydra that ran before is back after it.
    Raises ConfigError: a folder that is not there, or a file in it that is no yaml."""
    for folder in extra_dirs:
        _check_folder(folder)
    Plugins.instance()  # finds the launchers that are installed
    # Their entries know neither `workers` nor `exclusive`: the files of conf/hydra stand in for those of the same name.
    store = ConfigStore.instance().repo.get("hydra", {})
    for file in (config_dir() / "hydra").glob("*/*.yaml"):
        store.get(file.parent.name, {}).pop(file.name, None)
    path = create_config_search_path(str(config_dir()))
    for folder in extra_dirs:
        path.prepend("command-line", f"file://{folder.absolute()}", anchor="schema")  # which stays last
    version.setbase("1.3")
    outer = GlobalHydra.instance().hydra  # a launcher's worker is started by a Hydra of its own
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2(task_name="quicksilver", config_search_path=path)
    finally:
        GlobalHydra.instance().hydra = outer


def composed(overrides: Sequence[str], extra_dirs: Sequence[Path] = ()) -> DictConfig:
    """The config of one run as Hydra composes it of words that `quoted` made, without the section `hydra`; the caller's own copy. Folders of the user's
    own are searched before conf/. Raises ConfigError: an unknown key or choice (with a suggestion), a value of the wrong type."""
    folders, stamp = tuple(extra_dirs), files_stamp(extra_dirs)
    try:
        values = [override for override in map(parsed, overrides) if _is_value(override)]
        groups = tuple(text for text in overrides if not _is_value(parsed(text)))
        cfg: DictConfig = pickle.loads(_of_groups(groups, folders, stamp))
        for override in values:
            OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
        return cfg
    except (*REFUSALS, *_OF_NULL):
        return by_hydra(overrides, folders)


def by_hydra(overrides: Sequence[str], extra_dirs: Sequence[Path] = ()) -> DictConfig:
    """All words in one go. Raises ConfigError: as `composed`."""
    with hydra_started(extra_dirs):
        cfg = with_settings(overrides, extra_dirs)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def with_settings(overrides: Sequence[str], extra_dirs: Sequence[Path]) -> DictConfig:
    """The same with the section `hydra`, within `hydra_started`. Hydra calls nothing while it composes, so what it would call is checked here.
    Raises ConfigError: as `composed`, or a class in the section `hydra` that is not Hydra's own."""
    check_words(overrides, extra_dirs)
    try:
        cfg = hydra_compose("run", list(overrides), return_hydra_config=True)
    except REFUSALS as error:
        raise ConfigError(explain(error, overrides, extra_dirs)) from error
    except _OF_NULL as error:
        inside = {word: found[1] for word in overrides if (found := _OF_A_SECTION.match(word))}
        others = [word for word in overrides if word not in inside]
        dataset: Any = with_settings(others, extra_dirs).dataset if inside else None
        for word, section in inside.items():
            if dataset[section] is None:
                other = {"task": "sst2", "tagger": "wikitext103-tagged"}[section]
                remedy = f"Leave it out, or choose one that has, dataset={other}"
                raise ConfigError(f"{word}: the dataset {dataset.name} has no {section}. {remedy}.") from error
        raise
    for key, target in _called(OmegaConf.to_container(cfg.hydra, resolve=False), "hydra"):
        if target.split(".")[0] not in ("hydra", "hydra_plugins", "logging", "colorlog"):
            raise ConfigError(f"{key}={target} is not called: only what comes with Hydra may stand there.")
    return cfg


def _called(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """What Hydra, and the logging that it configures, would call."""
    for name, child in node.items() if isinstance(node, Mapping) else ():
        if name in ("_target_", "class", "()") and isinstance(child, str):
            yield f"{key}.{name}", child
        yield from _called(child, f"{key}.{name}")


@lru_cache(maxsize=512)
def _of_groups(groups: tuple[str, ...], extra_dirs: tuple[Path, ...], stamp: int) -> bytes:
    """What Hydra composes of these groups, pickled: that is read six times as fast as a config is copied. `stamp`: changed files are read anew."""
    names = () if extra_dirs else _listed_modules(groups)
    if not names:
        return pickle.dumps(by_hydra(groups, extra_dirs))
    check_words(groups)
    rest = tuple(text for text in groups if parsed(text).key_or_group != "modules")
    cfg: DictConfig = pickle.loads(_of_groups(rest, extra_dirs, stamp))
    with open_dict(cfg.modules):
        cfg.modules.update(dict(map(module_entry, names)))
    return pickle.dumps(cfg)


def _listed_modules(groups: Sequence[str]) -> list[str]:
    """The names of `modules=[…]` where only groups are chosen beside it and none of them says anything about modules; else none."""
    read = [parsed(text) for text in groups]
    plain = all(one.type == OverrideType.CHANGE and one.package is None and one.key_or_group in GROUPS for one in read)
    lists = [one.value() for one in read if one.key_or_group == "modules"]
    if not plain or any(one.key_or_group == "experiment" for one in read) or len(lists) != 1 or not isinstance(lists[0], list):
        return []
    names = [str(name) for name in lists[0]]
    return names if len(set(names)) == len(names) and set(choices("modules")).issuperset(names) else []


# --- words ----------------------------------------------------------------------------------------------------------------------
# As a shell hands them on; Hydra's grammar knows no é, ~, # or apostrophe outside of quotes.

_KEY_AND_VALUE = re.compile(r"([+~]{0,2}[A-Za-z_][\w./@]*)=(.+)", re.DOTALL)
_TEMPLATE = re.compile(r"\{\w+(\[\w+\])?\}")  # a text that begins with a field: no mapping


def quoted(overrides: Sequence[str]) -> list[str]:
    """`overrides`, with the value of those in quotes that Hydra could not read without: `results_dir=/tmp/é` as `results_dir='/tmp/é'`.
    The keys of predicted_kv are those of its old name, which records have.

    Lists, mappings and interpolations stay as they are, but for a template, `{sentence} It was`; and so does what is no key=value.
    Raises ConfigError: a value without a key."""
    for override in overrides:
        if override.startswith("="):
            raise ConfigError(f"{override!r} is not an override: write key=value, for instance model=gpt2.")
    return [_readable(re.sub(r"^([+~]*modules)\.predicted_kv\b", r"\1.quicksilver", override)) for override in overrides]


def searched(overrides: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The folders of `hydra.searchpath=[file:///folder]`, and all other words.
    Raises ConfigError: no list of folders that are there."""
    folders, rest = list[Path](), list[str]()
    for word in overrides:
        if not word.startswith("hydra.searchpath="):
            rest.append(word)
            continue
        value: Any = None
        with suppress(HydraException):
            value = parsed(word).value()
        for place in value if isinstance(value, list) else [value]:
            folder = Path(str(place).removeprefix("file://"))
            if not isinstance(value, list) or "://" in str(folder) or not folder.is_dir():
                raise ConfigError(f"{word}: takes a list of folders that are there, [file:///folder]; or --config-dir /folder.")
            folders.append(folder.absolute())
    return folders, rest


def _readable(override: str) -> str:
    try:
        parsed(override)
    except HydraException:
        match = _KEY_AND_VALUE.fullmatch(override)
        if match is None or "${" in match[2] or (match[2].lstrip()[0] in "[{\"'" and not _TEMPLATE.match(match[2].lstrip())):
            return override
        # In quotes, a backslash means something before a quote alone, and at the end, where a quote follows.
        value = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), match[2])
        return f"{match[1]}='{value}'"
    return override


@lru_cache(maxsize=4096)
def parsed(override: str) -> Override:
    """The override as Hydra reads it; nobody changes it. Raises HydraException where it is none."""
    return OverridesParser.create().parse_override(override)


def is_swept(override: str) -> bool:
    """Whether it gives several values, or says how to draw them; of what Hydra cannot read, composing says what is wrong."""
    try:
        return parsed(override).is_sweep_override()
    except HydraException:
        return False


def _is_value(override: Override) -> bool:
    """Whether it gives a value to a key that is there, and chooses nothing."""
    key = override.key_or_group
    plain = override.type == OverrideType.CHANGE and override.package is None and "/" not in key
    return plain and key not in GROUPS and not key.startswith("hydra.")


def check_words(overrides: Sequence[str], extra_dirs: Sequence[Path] = ()) -> None:
    """Refuse words that Hydra answers with a traceback (a group that is given a number or nothing) or wrongly (two modules with one key, which
    it would merge into one). Raises ConfigError: names the word."""
    for text in overrides:
        try:
            override = parsed(text)
        except HydraException:
            continue  # explained with all others
        group, given = override.key_or_group, override._value
        if group not in GROUPS or override.is_delete():
            continue
        for value in given if isinstance(given, list) else [given]:
            if value is None or isinstance(value, int | float):
                raise ConfigError(no_such_choice(group, None if value is None else str(value), extra_dirs))
        if group == "modules":
            for value in override.sweep_iterator() if override.is_sweep_override() else [override.value()]:
                names = value if isinstance(value, list) else str(value).strip("[]").split(",")
                _check_selected([str(name).strip() for name in names], [config_dir(), *extra_dirs])


def modules_of(words: Sequence[str], extra_dirs: Sequence[Path] = ()) -> set[str] | None:
    """The keys that the last `modules=[…]` of a run's words fills, such as `halting`; None: no word chooses modules."""
    chosen = [one.value() for one in map(parsed, words) if one.key_or_group == "modules"]
    if not chosen:
        return None
    names = chosen[-1] if isinstance(chosen[-1], list) else chosen[-1:]
    return {_filled_by(str(name), [config_dir(), *extra_dirs]) for name in names}


def _filled_by(name: str, folders: Sequence[Path]) -> str:
    path = next((path for folder in folders if (path := folder / "modules" / f"{name}.yaml").is_file()), None)
    header = path and re.search(r"^#\s*@package\s+modules\.(\S+)", path.read_text("utf-8", "replace"), re.MULTILINE)
    return header[1] if header else name


def _check_selected(selected: Sequence[str], folders: Sequence[Path]) -> None:
    """Refuse modules that fill the same key: what the yaml's `# @package` says, else its name."""
    names: dict[str, str] = {}
    for name, key in ((name, _filled_by(name, folders)) for name in selected):
        if selected.count(name) > 1:
            raise ConfigError(f"modules=[{','.join(selected)}] names {name} twice: name it once.")
        if names.setdefault(key, name) != name:
            both = f"modules=[{names[key]},{name}]: both are modules.{key}, so one would overwrite the other"
            two = "for two at once, copy one to a yaml of your own with `# @package modules.ANOTHER_NAME`"
            raise ConfigError(f"{both}. Select one of them and change it with modules.{key}.OPTION=…; {two}.")


# --- files of the user's own ----------------------------------------------------------------------------------------------------
def _check_folder(folder: Path) -> None:
    """Check the yaml files of a folder of the user's own before Hydra reads them.
    Raises ConfigError: there is no such folder, or a file in it is no yaml."""
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {folder}: there is no such folder.")
    for path in sorted((*folder.rglob("*.yaml"), *folder.rglob("*.yml"))):
        if why := _wrong_with(path, folder):
            raise ConfigError(f"{path}{why}. Mend the file, or take it out of --config-dir.")


def _wrong_with(path: Path, folder: Path) -> str:
    """What is wrong with a yaml of a person's own, as it follows the path in a sentence; "": nothing."""
    try:
        check_yaml(path)
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, ValueError) as error:
        return f" cannot be read: {error}"
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        return f"{where} is no yaml: {getattr(error, 'problem', None) or str(error).splitlines()[0]}"
    if isinstance(content, dict) and not isinstance(content.get("defaults", []), list):
        return ": its `defaults` are no list"
    if why := _of_no_use(path, folder, content):
        return f": {why}"
    return "" if isinstance(content, dict) else ": it is a list, not keys with values"


def _of_no_use(path: Path, folder: Path, content: Any) -> str:
    """Why Hydra would leave a file of a person's own unread, or take it for another; "": it would not."""
    group = path.parent.relative_to(folder).as_posix()
    if group not in GROUPS or folder.resolve() == config_dir().resolve():
        return ""
    known = choices(group)
    if path.stem in known:
        return f"the package has {group}={path.stem}, which would be taken: give the file another name"
    if isinstance(content, dict) and group in ("model", "dataset") and content.get("name") in known:
        return f"its name: {content['name']} is that of a {group} of the package: give it another"
    if not content:
        return f"it is empty but for comments; a module has _target_: {path.stem}.Class" if group == "modules" else "it is empty"
    has_header = re.search(r"^#\s*@package\s+", path.read_text("utf-8", "replace"), re.MULTILINE)
    needs_header = group == "modules" and isinstance(content, dict) and not has_header
    return f"it lacks its first line: # @package modules.{path.stem}" if needs_header else ""


def check_yaml(path: Path) -> None:
    """Refuse a yaml whose aliases stand for more than it has: a few lines may stand for terabytes.
    Raises OSError: as `read_bytes`. YAMLError, ValueError: it is no yaml in UTF-8, or far larger than it looks."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 0  # of what has itself in it
            inside = node.value if isinstance(node, yaml.CollectionNode) else ()
            sizes[id(node)] = 1 + sum(map(size, chain.from_iterable(inside) if isinstance(node, yaml.MappingNode) else inside))
        return sizes[id(node)]

    root = yaml.compose(read_bytes(path).decode("utf-8"), Loader=yaml.SafeLoader)  # an alias and what it stands for are one node
    if root is not None and size(root) > MOST_NODES:
        raise ValueError(f"its aliases stand for more than {MOST_NODES:,} values")


# --- one run --------------------------------------------------------------------------------------------------------------------
def compose(overrides: Sequence[str] = (), extra_dirs: Sequence[Path] = ()) -> RunConfig:
    """Compose one run from overrides, `["model=gpt2", "modules=[halting]", "modules.halting.resume_layers=4"]`.
    Raises ConfigError: an unknown key or choice (with a suggestion), a value of the wrong type or out of range.

    Args:
        overrides: words in Hydra's grammar.
        extra_dirs: folders of the user's own that are searched beside conf/ (`--config-dir`).
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
    return run_config(composed(words, extra_dirs), words)


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
