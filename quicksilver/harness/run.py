"""From configs to records: what is missing is run, what is there is read.

`ensure` is the one entry: it plans (dense prerequisites included), skips what has a record, loads each model and text once, and
writes each record in one rename. Stop it however you like: the next call goes on where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quicksilver import __version__, numerics
from quicksilver.data.spec import DatasetConfig, Part
from quicksilver.data.text import Text, read_text
from quicksilver.harness.config import RunConfig
from quicksilver.harness.identity import Identity, foreign_sources
from quicksilver.harness.parts import build_measurements, build_modules, is_on, measurement_class, module_class
from quicksilver.harness.record import SCHEMA_VERSION, TRACE, WINDOWS, Record
from quicksilver.harness.store import Draft, Store
from quicksilver.harness.targets import named_class
from quicksilver.harness.tracker import check_tracker, mirror
from quicksilver.models.loading import Loaded, ModelFiles, load, locate, weights_digest
from quicksilver.models.spec import ModelConfig
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.data.windows import Windows
    from quicksilver.measure.bench import Bench
    from quicksilver.measure.measurement import Measurement
    from quicksilver.runtime.architecture import Architecture
    from quicksilver.runtime.run import Execution

_DIGESTS = "cache/digests.json"
_LOADING, _CALIBRATING = 0.03, 0.05  # rough shares of a run's time; the passes share the rest


@dataclass(frozen=True)
class Progress:
    """Where `ensure` is.

    Attributes:
        run, runs: number of the present run, from 0, and how many really run.
        label: what it is.
        phase: load, calibration, the name of a measurement, write, or wait: another process makes this record.
        fraction: share of all runs that is done, 0 to 1; never falls.
    """

    run: int
    runs: int
    label: str
    phase: str
    fraction: float


@dataclass(frozen=True)
class Planned:
    """One run of a plan: its config, its fingerprint, that of its dense prerequisite (None: it is dense), and whether its
    record is there."""

    config: RunConfig
    fingerprint: str
    dense: str | None
    done: bool


# --- what a run is of -----------------------------------------------------------------------------------------------------------


class Workplace:
    """What runs share: texts, digests and one loaded model. Believes that files do not change while it lives."""

    def __init__(self) -> None:
        self._texts: dict[str, Text] = {}
        self._files: dict[str, tuple[ModelFiles, str]] = {}
        self._loaded: tuple[str, Loaded] | None = None
        self._windows: dict[tuple[str, ...], Windows] = {}
        self._identities: dict[str, Identity] = {}

    def text(self, config: RunConfig, part: Part) -> Text:
        """The text that is scored (`test`: the part that dataset.part names) or that calibrates."""
        part = cast(Part, config.dataset.part) if part == "test" else part
        key = _key(config.dataset, config.data.root, part)
        if key not in self._texts:
            cache = Path(config.results_dir) / "cache" / "text"
            self._texts[key] = read_text(config.dataset, part, root=_root(config), cache=cache)
        return self._texts[key]

    def files(self, config: RunConfig) -> tuple[ModelFiles, str]:
        """A model's files and their digest."""
        key = _key(config.model, config.data.root)
        if key not in self._files:
            files = locate(config.model, _root(config))
            store = Store(config.results_dir)
            remembered = _read_digests(store)
            known = len(remembered)
            digest = weights_digest(files.folder, remembered)
            if len(remembered) > known:
                store.write_cache(_DIGESTS, remembered)
            self._files[key] = (files, digest)
        return self._files[key]

    def model(self, config: RunConfig) -> Loaded:
        """The model of a config; the one before it is let go first."""
        key = _key(config.model, config.data.root)
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None
            adapter = _adapter(config)
            loaded = load(config.model, self.files(config)[0])
            _check_adapter(adapter, loaded)
            self._loaded = (key, loaded)
        return self._loaded[1]

    def windows(self, config: RunConfig, part: Part) -> Windows:
        """Windows of `text`, as many as the config scores or calibrates on."""
        from quicksilver.data.windows import encode

        text = self.text(config, part)
        limit = config.dataset.windows if part == "test" else config.dataset.calibration_windows
        key = (self.files(config)[1], text.digest, str(config.protocol.window_tokens), str(limit))
        if key not in self._windows:
            try:
                self._windows[key] = encode(text.text, self.model(config).tokenizer, config.protocol.window_tokens, limit)
            except ConfigError as error:
                raise ConfigError(f"dataset={config.dataset.name}, {part} part ({text.source}): {error}") from error
        return self._windows[key]

    def fingerprint(self, config: RunConfig) -> str:
        return self.identity(config).fingerprint

    def identity(self, config: RunConfig) -> Identity:
        """What the record of a config is of."""
        key = _key(config)
        if key not in self._identities:
            self._identities[key] = self._identity(config)
        return self._identities[key]

    def _identity(self, config: RunConfig) -> Identity:
        from quicksilver.modules.translators import files_behind

        modules = build_modules(config.modules)
        digests = {"text": self.text(config, "test").digest, "weights": self.files(config)[1]}
        if any(_asks_for_calibration(module) for module in modules):
            digests["calibration_text"] = self.text(config, "calibration").digest
            if config.dataset.part == "test" and digests["calibration_text"] == digests["text"]:
                raise ConfigError(
                    f"dataset={config.dataset.name}: thresholds would be calibrated on the text that is scored "
                    f"({self.text(config, 'calibration').source}). Give another text as dataset.files.calibration, or numbers for the "
                    "thresholds; dataset.part=calibration scores the calibrating part on purpose."
                )
        for name, entry in config.modules.items():
            path = entry.get("calibration")
            if path is not None and not isinstance(path, str):
                raise ConfigError(f"modules.{name}.calibration={path!r} is no calibration: give the path of a calibration file.")
            if path is not None:
                digests[f"calibration.{name}"] = _file_digest(name, path, "calibration")
                _check_calibration(name, path)
            for path in files_behind(entry, self.files(config)[0].folder):
                digests[f"predicted_kv.{name}.{path.name}"] = _file_digest(name, str(path), "translator")
        classes: list[type] = [module_class(name, entry) for name, entry in config.modules.items()]
        classes += [measurement_class(name, entry) for name, entry in config.measure.items() if is_on(name, entry)]
        adapter = _adapter(config)
        return Identity(config.identity(), digests, foreign_sources([*classes, *([adapter] if adapter else [])]))


def _adapter(config: RunConfig) -> type[Architecture] | None:
    """The class of `model.adapter`, imported: from then on the runtime finds it by its model types."""
    from quicksilver.runtime.architecture import Architecture

    return named_class("model.adapter", config.model.adapter, Architecture) if config.model.adapter else None  # type: ignore[type-abstract]


def _check_adapter(adapter: type[Architecture] | None, loaded: Loaded) -> None:
    from quicksilver.runtime.architecture import architecture_of

    found = type(architecture_of(loaded.model))
    if adapter is not None and found is not adapter:
        raise ConfigError(
            f"model.adapter: {adapter.__name__} serves the model types {', '.join(adapter.model_types)}, and this model is of "
            f"{loaded.model.config.model_type}, which {found.__name__} serves. Leave model.adapter out, or name that type in the class."
        )


def _root(config: RunConfig) -> Path | None:
    return Path(config.data.root).expanduser() if config.data.root else None


def _key(config: ModelConfig | DatasetConfig | RunConfig, *more: str | None) -> str:
    return json.dumps([dataclasses.asdict(config), *more], sort_keys=True)


def _read_digests(store: Store) -> dict[str, str]:
    try:
        kept = json.loads((store.root / _DIGESTS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # a cache: without it the files are read again
    if not isinstance(kept, dict):
        return {}
    return {path: digest for path, digest in kept.items() if isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)}


def _file_digest(name: str, path: str, option: str) -> str:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"modules.{name}.{option}={path} cannot be read: {error.strerror}.") from error
    return hashlib.sha256(content).hexdigest()


def _check_calibration(name: str, path: str) -> None:
    """Refuse a damaged file before anything runs; raises ConfigError."""
    from quicksilver.modules.thresholds import Calibration

    try:
        Calibration.load(path)
    except ConfigError as error:
        raise ConfigError(f"modules.{name}.calibration: {error}") from error


def _asks_for_calibration(module: Any) -> bool:
    from quicksilver.modules.thresholds import Calibrated, Fitted

    return (isinstance(module, Calibrated) and bool(module.calibration_signals())) or (
        isinstance(module, Fitted) and not module.fitted
    )


# --- planning -------------------------------------------------------------------------------------------------------------------


def check_allowed_by_protocol(config: RunConfig) -> None:
    """Refuse, before anything is loaded, options and modules that the protocol does not take.

    Raises:
        ConfigError: names the value and the ways out.
    """
    from quicksilver.measure.perplexity import check_allowed
    from quicksilver.runtime.checks import check_together

    modules = build_modules(config.modules)
    check_together(modules)
    check_allowed(modules, _protocol(config))


def _protocol(config: RunConfig) -> Any:
    from quicksilver.measure.perplexity import Protocol

    return Protocol(**dataclasses.asdict(config.protocol))


def plan(configs: Iterable[RunConfig], workplace: Workplace | None = None) -> list[Planned]:
    """The runs behind `configs`, each once, every dense prerequisite before the first run that needs it. Loads no model.

    Raises:
        ConfigError: whatever is wrong with one of them, before any of them runs; a record that is not whole.
    """
    workplace = workplace or Workplace()
    planned: dict[tuple[str, str], Planned] = {}
    for config in configs:
        check_allowed_by_protocol(config)
        dense = workplace.fingerprint(config.dense())
        steps: list[tuple[RunConfig, str, str | None]] = [(config.dense(), dense, None)]
        if config.modules:
            steps.append((config, workplace.fingerprint(config), dense))
        for step, found, needs in steps:
            done = Store(step.results_dir).get(found) is not None
            planned.setdefault((step.results_dir, found), Planned(step, found, needs, done))
    return list(planned.values())


def is_done(config: RunConfig) -> bool:
    """Whether the record of a config is there. Loads no model."""
    return Store(config.results_dir).get(Workplace().fingerprint(config if config.modules else config.dense())) is not None


def ensure(
    configs: Sequence[RunConfig], *, progress: Callable[[Progress], None] | None = None, workplace: Workplace | None = None
) -> list[Record]:
    """Records of `configs`, in their order; runs what has none.

    Args:
        progress: called often; cheap callbacks only.
        workplace: of an earlier `plan` or `ensure`, whose texts, digests and loaded model serve again.

    Raises:
        ConfigError: a config that cannot be run; nothing was run then.
        QuickSilverError: a run failed; records finished before it stay.
    """
    workplace = workplace or Workplace()
    for config in configs:
        check_tracker(config.tracker)
    for results_dir in dict.fromkeys(config.results_dir for config in configs):
        Store(results_dir).clean()
    planned = plan(configs, workplace)
    missing = [step for step in planned if not step.done]
    for number, step in enumerate(missing):
        _ensure_one(step, workplace, _Reporter(progress, number, len(missing), step.config.label))
    records = []
    for config in configs:
        record = Store(config.results_dir).get(workplace.fingerprint(config if config.modules else config.dense()))
        assert record is not None  # planned, hence made
        records.append(record)
    return records


@dataclass
class _Reporter:
    """Turns phases of one run into the fraction of all runs."""

    callback: Callable[[Progress], None] | None
    run: int
    runs: int
    label: str
    reached: float = 0.0

    def __call__(self, phase: str, done: float) -> None:
        """done: share of this run, 0 to 1."""
        self.reached = max(self.reached, done)
        if self.callback is not None:
            self.callback(Progress(self.run, self.runs, self.label, phase, (self.run + self.reached) / self.runs))


# --- running --------------------------------------------------------------------------------------------------------------------


def _ensure_one(step: Planned, workplace: Workplace, report: _Reporter) -> Record:
    store = Store(step.config.results_dir)
    with store.turn(step.fingerprint, waiting=lambda: report("wait", 0.0)):
        made_meanwhile = store.get(step.fingerprint)
        if made_meanwhile is not None:
            return made_meanwhile
        with store.draft(step.fingerprint) as draft:
            record = _run(step, workplace, store, draft, report)
    mirror(record, step.config.tracker, store.root)
    return record


def _run(step: Planned, workplace: Workplace, store: Store, draft: Draft, report: _Reporter) -> Record:
    import torch

    from quicksilver.measure.bench import Bench

    config, started, clock = step.config, _now(), time.monotonic()
    draft.event("started", label=config.label, pid=os.getpid())
    report("load", 0.0)
    threads_before = torch.get_num_threads()
    try:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        loaded = workplace.model(config)
        windows = workplace.windows(config, "test")
        draft.event("loaded", model=loaded.files.source, windows=len(windows.ids))
        report("calibration", _LOADING)
        modules, calibration = calibrated_modules(config, workplace, store)
        if calibration is not None:
            draft.event("calibrated", signals=calibration["signals"])
        bench = Bench(
            loaded.model, windows, _protocol(config), modules, cast("Execution", config.execution), config.seed,
            config.measure["batch_windows"], loaded.tokenizer,
        )  # fmt: skip
        scalars = _measure(bench, config, draft, report)
        dense = store.get(step.dense) if step.dense is not None else None
        if dense is not None:
            _put_dense_beside(scalars, bench, dense)
        report("write", 1.0)
        draft.event("measured")
        draft.write(WINDOWS, lambda path: bench.frame.to_parquet(path, index=False))
        if modules and bench.trace is not None:
            draft.write(TRACE, bench.trace.save)
        for name, write in bench.files.items():
            draft.write(name, write)
        draft.event("finished")
        described = _describe(step, workplace, loaded, windows, modules, calibration)
        finished = {"started": started, "finished": _now(), "seconds": round(time.monotonic() - clock, 3)}
        return store.publish(draft, described | finished | scalars)
    finally:
        torch.set_num_threads(threads_before)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _measure(bench: Bench, config: RunConfig, draft: Draft, report: _Reporter) -> dict[str, Any]:
    """Every measurement of the config; returns what goes into record.json."""
    before, seen = _LOADING + _CALIBRATING, set()

    def tell(phase: str, share: float) -> None:
        if phase not in seen:
            seen.add(phase)
            draft.event(phase)
        report(phase, before + (1 - before) * share)

    return measured_scalars(bench, build_measurements(config.measure), tell)


def measured_scalars(
    bench: Bench, measurements: Mapping[str, Measurement], report: Callable[[str, float], None]
) -> dict[str, Any]:
    """The results of measurements as record.json has them."""
    from quicksilver.measure.bench import run_measurements

    scalars: dict[str, Any] = {"batch_windows": len(bench.batch)}
    for name, result in run_measurements(bench, measurements, report).items():
        section = name if result.section is None else result.section
        scalars |= {section: result.to_json()} if section else result.to_json()
    return scalars


def _put_dense_beside(scalars: dict[str, Any], bench: Bench, dense: Record) -> None:
    """Copy what every table compares with, so that a record can be read alone. Times are not copied: dense was timed in the
    same run."""
    names = ("ppl", "bits_per_byte", "nll_nats")
    flops = [name for name in dense.data if name.endswith("_flops") and isinstance(dense[name], int)]
    for name in (*names, *flops):
        scalars[f"dense_{name}"] = dense[name]
    scalars["dense_kv_bytes"] = dense["kv_bytes_resident"]
    nats = dense.windows.set_index("window")["nll_nats"]
    bench.frame = bench.frame.assign(dense_nll_nats=bench.frame["window"].map(nats))


def calibrated_modules(config: RunConfig, workplace: Workplace, store: Store) -> tuple[list[Any], dict[str, Any] | None]:
    """The modules of a run, percentiles resolved on the calibration part of the dataset; and what the record says of that."""
    from quicksilver.modules.calibration import calibrate_modules

    modules = build_modules(config.modules, workplace.model(config).tokenizer)
    if not any(_asks_for_calibration(module) for module in modules):
        return modules, None
    windows, text = workplace.windows(config, "calibration"), workplace.text(config, "calibration")
    folder = store.root / "calibration"
    source = {"model": config.model.name, "dataset": config.dataset.name, "text": text.source}
    with store.writing():
        calibration = calibrate_modules(
            modules, folder, workplace.model(config).model, windows.ids, batch_size=config.protocol.batch_size, source=source
        )
    assert calibration is not None  # asked for
    return modules, {
        "text_source": text.source,
        "text_digest": text.digest,
        "windows": len(windows.ids),
        "signals": sorted(calibration.percentiles),
        "provenance": calibration.provenance,
    }


def _describe(
    step: Planned,
    workplace: Workplace,
    loaded: Loaded,
    windows: Windows,
    modules: Sequence[Any],
    calibration: dict[str, Any] | None,
) -> dict[str, Any]:
    """Everything in record.json that is not a measurement."""
    from quicksilver.modules.thresholds import thresholds_of

    config, model = step.config, loaded.model
    text = workplace.text(config, "test")
    return {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": step.fingerprint,
        "dense_fingerprint": step.dense,
        "label": config.label,
        "modules": list(config.modules),
        "execution": config.execution,
        "protocol": dataclasses.asdict(config.protocol),
        "lookahead": any(module.lookahead and not module.causal for module in modules),
        "model": {
            "name": config.model.name,
            "source": loaded.files.source,
            "commit": loaded.files.commit,
            "family": model.config.model_type,
            "layers": model.config.num_hidden_layers,
            "parameters": sum(p.numel() for p in model.parameters()),
            "weights_digest": workplace.files(config)[1],
            "dtype": config.model.dtype,
            "device": str(model.device),
            "attn_implementation": config.model.attn_implementation,
        },
        "data": {
            "name": config.dataset.name,
            "source": text.source,
            "part": config.dataset.part,
            "form": config.dataset.form,
            "digest": text.digest,
            "token_digest": windows.token_digest,
            "windows": len(windows.ids),
            "windows_available": windows.available,
            "text_tokens": windows.tokens,
            "text_bytes": len(text.text.encode()),
            "no_bytes_because": windows.why_no_bytes,
        },
        "calibration": calibration,
        "thresholds": {name: thresholds_of(module) for name, module in zip(sorted(config.modules), modules, strict=True)},
        # Of modules that can compute in more than one way, how they did: an integer product may have fallen back to floats.
        "kernels": {
            name: module.kernel for name, module in zip(sorted(config.modules), modules, strict=True) if module.kernel is not None
        },
        "config": dataclasses.asdict(config),
        "identity": workplace.identity(config).to_json(),
        "package": {"version": __version__, "numerics_version": numerics.VERSION},
        "environment": environment(),
    }


def environment() -> dict[str, Any]:
    """The machine and the libraries, for the record."""
    import psutil
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
