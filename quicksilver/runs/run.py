"""From configs to records: missing ones are run, the others are read.

`plan` says which runs there are, dense prerequisites included; whoever has a plan hands it on. `make` makes those of a plan that have no record:
it loads each model and text once, and writes each record in one rename. A killed `make` is resumed by the next. `ensure` is both.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from quicksilver import __version__, numerics
from quicksilver.measure.measurement import encoded
from quicksilver.models import parallel
from quicksilver.records import archive
from quicksilver.records.identity import CalibrationEntry, Confirmed, DataEntry, DenseTotals, ModelEntry
from quicksilver.records.lease import host_name
from quicksilver.records.record import CALIBRATIONS, CHECKSUM, EVENTS, SCHEMA_VERSION, TRACE, WINDOWS, Record, check_files
from quicksilver.records.store import Blocks, Draft, Store, SupersededError
from quicksilver.runs.config import RunConfig
from quicksilver.runs.context import RunContext, calibration_provenance, environment, job, timed_measurements, torch_threads
from quicksilver.runs.parts import build_measurements, build_modules
from quicksilver.runs.tracker import NotMirrored, check_tracker, mirror
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench
    from quicksilver.measure.measurement import Measurement
    from quicksilver.runtime.module import NumberFormat
    from quicksilver.runtime.run import Execution

_LOADING, _CALIBRATING = 0.03, 0.05  # rough shares of a run's time; the passes share the rest


@dataclass(frozen=True)
class Progress:
    """Where `make` is.

    Attributes:
        run, runs: number of the present run, from 0, and how many really run.
        label: what it is.
        phase: load, calibration, the name of a measurement, writing the record, or wait: another process makes this record.
        fraction: share of all runs that is done, 0 to 1; never falls.
        windows: done and in all, where they are scored one after the other; windows_per_s: of them, since that pass began here.
        left_s: until this run is done, by the share of it that was done since its first window here.
    """

    run: int
    runs: int
    label: str
    phase: str
    fraction: float
    windows: tuple[int, int] | None = None
    windows_per_s: float | None = None
    left_s: float | None = None


@dataclass(frozen=True)
class Planned:
    """One run of a plan: its config, its fingerprint, and that of its dense prerequisite (None: it is dense)."""

    config: RunConfig
    fingerprint: str
    dense: str | None

    @property
    def record(self) -> Record | None:
        """Its record, if it is there now. Raises ConfigError: it is not whole."""
        return store_of(self.config).get(self.fingerprint)

    @property
    def done(self) -> bool:
        """Whether its record is there now."""
        return self.record is not None

    @property
    def reuses_quality(self) -> bool:
        """Whether records=checked finds a committed record of it."""
        asked = build_measurements(self.config.measure)
        return self.config.records == "checked" and of_repository(self.config.results_dir, self.fingerprint, asked) is not None


@dataclass(frozen=True)
class Plan:
    """The runs behind some configs.

    Attributes:
        steps: each run once, every dense prerequisite before the first run that needs it.
        wanted: those of the configs, in their order.
    """

    steps: tuple[Planned, ...]
    wanted: tuple[Planned, ...]
    context: RunContext

    @property
    def done(self) -> bool:
        """Whether all that is wanted has its record now."""
        return all(step.done for step in self.wanted)


def joined(plans: Sequence[Plan]) -> Plan:
    """One plan of several, made with the context of the first."""
    wanted = (step for one in plans for step in one.wanted)
    return _plan_of((step for one in plans for step in one.steps), wanted, plans[0].context)


def _plan_of(steps: Iterable[Planned], wanted: Iterable[Planned], context: RunContext) -> Plan:
    unique: dict[tuple[str, str], Planned] = {}
    for step in steps:
        unique.setdefault((step.config.results_dir, step.fingerprint), step)
    return Plan(tuple(unique.values()), tuple(wanted), context)


# --- planning -------------------------------------------------------------------------------------------------------------------
def check_allowed_by_protocol(config: RunConfig) -> None:
    """Refuse, before anything is loaded, options and modules that the protocol does not take.
    Raises ConfigError: names the value and the ways out."""
    from quicksilver.measure.perplexity import check_allowed
    from quicksilver.runtime.module import check_together

    check_together(modules := build_modules(config.modules))
    # `quicksilver` is the old name of predicted_kv, which identities keep.
    names = [f"modules.{name}".replace("quicksilver", "predicted_kv") for name in sorted(config.modules)]
    check_allowed(modules, _protocol(config), names)


def _protocol(config: RunConfig) -> Any:
    from quicksilver.measure.perplexity import Protocol

    return Protocol(**dataclasses.asdict(config.protocol))


def plan(configs: Iterable[RunConfig], context: RunContext | None = None) -> Plan:
    """The runs behind `configs`. Loads no model.
    Raises ConfigError: whatever is wrong with one of them, before any of them runs; a record that is not whole."""
    context, steps, wanted = context or RunContext(), list[Planned](), list[Planned]()
    for config in configs:
        check_allowed_by_protocol(config)
        dense = Planned(config.dense(), context.fingerprint(config.dense()), None)
        own = Planned(config, context.fingerprint(config), dense.fingerprint) if config.modules else dense
        for step in (dense, own):
            _ = step.record  # one that is not whole is refused before anything runs
        steps += [dense, own]
        wanted.append(own)
    return _plan_of(steps, wanted, context)


def store_of(config: RunConfig) -> Store:
    """The records that count for this run."""
    return Store(config.results_dir, config.records)


def ensure(
    configs: Sequence[RunConfig], *, progress: Callable[[Progress], None] | None = None, context: RunContext | None = None
) -> list[Record]:
    """Records of `configs`, in their order: `plan` and `make`. The `context` of an earlier plan serves again.
    Raises ConfigError: a config that cannot be run; nothing was run then. QuickSilverError: a run failed; records finished
    before it stay."""
    return make(plan(configs, context), progress=progress)


def make(
    planned: Plan,
    *,
    progress: Callable[[Progress], None] | None = None,
    labels: Mapping[str, str] = MappingProxyType({}),
    group: str | None = None,
    failed: dict[str, Exception] | None = None,
) -> list[Record]:
    """Make the runs of a plan that have no record; the records of all that is wanted, in their order.
    Raises ConfigError: a run that cannot be made here; nothing was run then. QuickSilverError: a run failed; records finished
    before it stay.

    Args:
        progress: called often; cheap callbacks only.
        labels: by fingerprint, what runs are called in a sweep; it stands before what they are.
        group: what the tracker calls those runs together.
        failed: gets the errors by fingerprint; all runs are tried but those whose dense run failed. None: the first error is raised.
    """
    for config in (step.config for step in planned.wanted):
        check_tracker(config.tracker)
        if config.model.parallel is not None and parallel.processes() < 2:
            said = "the model is cut among the processes of torchrun, and this is one alone"
            start = "torchrun --nproc-per-node 2 -m quicksilver run …"
            raise ConfigError(f"model.parallel={config.model.parallel}: {said}: start {start}")
    for results_dir in dict.fromkeys(step.config.results_dir for step in planned.wanted):
        Store(results_dir).clean()
    missing = [step for step in planned.steps if not step.done]
    for number, step in enumerate(missing):
        place = labels.get(step.fingerprint)
        label = " | ".join(filter(None, (place, step.config.label)))
        try:
            if failed and (error := failed.get(step.dense or "")) and not isinstance(error, NotMirrored):
                raise error
            _make_one(step, planned.context, _Reporter(progress, number, len(missing), label), group if place else None)
        except Exception as error:
            if failed is None:
                raise
            failed[step.fingerprint] = error
    records = [step.record for step in planned.wanted]
    return [record for record in records if record is not None]  # all of them: each was there, or was made


@dataclass
class _Reporter:
    """Turns phases of one run into the fraction of all runs, and writes them into its draft, once a second at most and where the phase changes."""

    callback: Callable[[Progress], None] | None
    run: int
    runs: int
    label: str
    reached: float = 0.0
    draft: Draft | None = None
    _first: tuple[float, float] | None = None  # time and share of the run at its first window here
    _pass: tuple[str, float, int] = ("", 0.0, 0)  # phase, time and windows where the present pass began here
    _wrote: float = -math.inf
    _written: str = ""  # the phase that the draft says

    def __call__(self, phase: str, done: float, windows: tuple[int, int] | None = None) -> None:
        """done: share of this run, 0 to 1; windows: of this pass, done and in all."""
        self.reached, now, per_s, left_s = max(self.reached, done), time.monotonic(), None, None
        if windows is not None:
            self._first = self._first or (now, self.reached)
            if self._pass[0] != phase:
                self._pass = (phase, now, windows[0])
            if now > self._pass[1]:
                per_s = (windows[0] - self._pass[2]) / (now - self._pass[1])
        if self._first is not None and self.reached > self._first[1]:
            left_s = (1 - self.reached) * (now - self._first[0]) / (self.reached - self._first[1])
        said = Progress(self.run, self.runs, self.label, phase, (self.run + self.reached) / self.runs, windows, per_s, left_s)
        if self.callback is not None:
            self.callback(said)
        if self.draft is not None and (now - self._wrote >= 1 or phase != self._written):
            self._wrote, self._written = now, phase
            who = {"host": host_name(), "pid": os.getpid(), "job": job(), "time": _now()}
            self.draft.progress({**dataclasses.asdict(said), "run_fraction": self.reached, **who})


# --- running --------------------------------------------------------------------------------------------------------------------
def _make_one(step: Planned, context: RunContext, report: _Reporter, group: str | None) -> None:
    store, together = store_of(step.config), step.config.model.parallel is not None
    if together:
        context.model(step.config)  # from here on its processes hear each other
        if parallel.rank() > 0:
            _follow(step, context, store, report)
            return
    blocks = None if together else Blocks(store, step.fingerprint)  # its processes make all passes together

    def wait() -> None:
        report("wait", 0.0)
        if blocks is not None and not _why_alone(step.config):
            _help(step, context, store, blocks, report)

    with store.turn(step.fingerprint, waiting=wait):
        missing = store.get(step.fingerprint) is None
        if together:
            parallel.broadcast_from_rank0(missing)
        if not missing:
            return
        with store.draft(step.fingerprint) as draft:
            report.draft = draft
            record = _run(step, context, store, draft, report, blocks)
        if blocks is not None:
            blocks.remove()
    if together:
        parallel.broadcast_from_rank0(True)  # the record is there, and the others may read it
    mirror(record, step.config.tracker, store.root, name=report.label, group=group)


def parts_of(config: RunConfig) -> int:
    """How many processes may score the windows of a run; one that scores all that there are counts as one of many."""
    from quicksilver.measure.perplexity import BLOCK_WINDOWS

    if _why_alone(config):
        return 1
    windows = config.dataset.windows
    return 100 if windows is None else math.ceil(windows / max(BLOCK_WINDOWS, config.protocol.batch_size))


def _why_alone(config: RunConfig) -> str:
    """Why processes cannot share a run's windows: a clock is read, or not all windows are scored by each; empty: they can."""
    if timed := timed_measurements(config):
        return f"measure.{timed[0]} reads a clock"
    shared = config.model.parallel is None and config.records != "checked"
    return "" if shared else f"model.parallel={config.model.parallel}, records={config.records}"


def check_shared(configs: Iterable[RunConfig], why: str) -> None:
    """Refuse runs whose windows processes cannot share, `why` they would. Raises ConfigError: a clock is read, or records=checked."""
    for of in filter(None, map(_why_alone, configs)):
        raise ConfigError(f"{why}: its windows cannot be shared ({of}). Use measure=sweep and records=any, or one process.")


def _help(step: Planned, context: RunContext, store: Store, blocks: Blocks, report: _Reporter) -> None:
    """Score blocks of a run that another process makes, until none is left. Whoever has its turn next makes the record of them."""
    measurements = {name: one for name, one in build_measurements(step.config.measure).items() if one.in_blocks}
    with suppress(SupersededError), store.draft(step.fingerprint) as draft, torch_threads(step.config.threads):
        report.draft = draft
        bench, _ = bench_of(step.config, context, store)
        bench.keep = partial(blocks.of_pass, shared=True)
        measured_scalars(bench, measurements, lambda phase, share: report(phase, share, bench.scored))


def _follow(step: Planned, context: RunContext, store: Store, report: _Reporter) -> None:
    """What a process does for a run whose model it has a part of, and whose record the first process writes: the same passes."""
    if parallel.broadcast_from_rank0(False):
        with torch_threads(step.config.threads):
            bench, _ = bench_of(step.config, context, store)
            bench.keep = parallel.shared_by_replicas(str(step.config.model.parallel))
            measured_scalars(bench, build_measurements(step.config.measure), report)
        parallel.broadcast_from_rank0(False)


def bench_of(config: RunConfig, context: RunContext, store: Store) -> tuple[Bench, CalibrationEntry | None]:
    """What the measurements of a run are given, and what its modules were calibrated on."""
    from quicksilver.measure.bench import Bench

    loaded, windows = context.model(config), context.windows(config, "test")
    modules, calibration = calibrated_modules(config, context, store)
    bench = Bench(
        loaded.model, windows, _protocol(config), modules, cast("Execution", config.execution), config.seed,
        config.measure["batch_windows"], loaded.tokenizer, context.examples(config), dense=context.dense(config) if config.modules else None,
        decision_layers=config.decision_layers,
    )  # fmt: skip
    return bench, calibration


def _run(step: Planned, context: RunContext, store: Store, draft: Draft, report: _Reporter, blocks: Blocks | None) -> Record:
    config, started, clock = step.config, _now(), time.monotonic()
    draft.event("started", label=report.label, pid=os.getpid())
    report("load", 0.0)
    beside = _others(store, step.fingerprint)
    with torch_threads(config.threads):
        source, windows = context.model(config).files.source, context.windows(config, "test")
        draft.event("loaded", model=source, windows=len(windows.ids))
        report("calibration", _LOADING)
        bench, calibration = bench_of(config, context, store)
        bench.keep = parallel.shared_by_replicas(str(config.model.parallel)) if blocks is None else blocks.of_pass
        if calibration is not None:
            draft.event("calibrated", signals=calibration.signals)
        scalars = _measured(bench, step, store, draft, report)
        report("writing the record", 1.0)
        draft.event("finished")
        described = _describe(step, context, bench, calibration)
        described["environment"] = encoded(environment(sorted({*beside, *_others(store, step.fingerprint)})))
        seconds = time.monotonic() - clock + (0 if blocks is None else blocks.seconds)
        return store.publish(draft, scalars | described | {"started": started, "finished": _now(), "seconds": round(seconds, 3)})


def _others(store: Store, mine: str) -> list[str]:
    """Fingerprints of the runs that other processes make on this machine now."""
    making = store.in_the_making()
    own = making.pop(mine, None)
    return [other for other, who in making.items() if own is not None and who.machine == own.machine]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _measured(bench: Bench, step: Planned, store: Store, draft: Draft, report: _Reporter) -> dict[str, Any]:
    """What goes into record.json of measurements, and the files behind it. records=checked reuses committed quality
    results after checking the first windows here."""
    measurements, before, seen = build_measurements(step.config.measure), _LOADING + _CALIBRATING, set[str]()

    def tell(phase: str, share: float) -> None:
        if phase not in seen:
            seen.add(phase)
            draft.event(phase)
        report(phase, before + (1 - before) * share, bench.scored)

    checked, found = step.config.records == "checked", None
    if there := of_repository(step.config.results_dir, step.fingerprint, measurements) if checked else None:
        draft.event("confirm")
        report("confirm", before)
        found = confirm(there, bench)
    if there and found and found.agrees:
        timed = {name: one for name, one in measurements.items() if one.timed}
        scalars = copy_committed_results(there, draft) | measured_scalars(bench, timed, tell)
    else:
        scalars = measured_scalars(bench, measurements, tell)
        if dense := store.get(step.dense) if step.dense is not None else None:
            # What every table compares with, so that a record can be read alone; no times: dense was timed in the same run.
            scalars |= {f"dense_{name}": value for name, value in encoded(DenseTotals.of(dense.quality)).items()}
            nats = dense.windows.set_index("window")["nll_nats"]
            bench.frame = bench.frame.assign(dense_nll_nats=bench.frame["window"].map(nats))
        draft.write(WINDOWS, lambda path: bench.frame.to_parquet(path, index=False))
        if bench.modules and bench.trace is not None:
            draft.write(TRACE, bench.trace.save)
        for name, write in bench.files.items():
            draft.write(name, write)
    draft.event("measured")
    return scalars if found is None else scalars | {"confirmed": dataclasses.asdict(found)}


def measured_scalars(
    bench: Bench, measurements: Mapping[str, Measurement], report: Callable[[str, float], None]
) -> dict[str, Any]:
    """The results of measurements as record.json has them."""
    from quicksilver.measure.bench import run_measurements

    scalars: dict[str, Any] = {"batch_windows": len(bench.batch)}
    for name, result in run_measurements(bench, measurements, report).items():
        section = name if result.section is None else result.section
        scalars |= {section: encoded(result)} if section else encoded(result)
    return scalars


def calibrated_modules(config: RunConfig, context: RunContext, store: Store) -> tuple[list[Any], CalibrationEntry | None]:
    """The modules of a run, percentiles resolved on the calibration part of the dataset; and what the record says of that."""
    from quicksilver.modules.calibration import calibrate_modules
    from quicksilver.runs.context import asks_for_calibration
    from quicksilver.runtime.quantized.kernels import ChoosesKernels

    modules = build_modules(config.modules, context.model(config).tokenizer)
    for module in modules:
        if isinstance(module, ChoosesKernels) and module.measures:
            module.choices = context.kernel_choices(config)
    if not any(asks_for_calibration(module) for module in modules):
        return modules, None
    windows, text = context.windows(config, "calibration"), context.text(config, "calibration")
    overlap_pct = context.overlap_pct(config)
    source = {"model": config.model.name, "dataset": config.dataset.name, "text": text.source}
    with store.writing():
        calibration = calibrate_modules(
            modules, store.root / CALIBRATIONS, context.model(config).model, windows.ids,
            batch_size=config.protocol.batch_size, source=source, made_before=store.kept_calibrations,
        )  # fmt: skip
    assert calibration is not None  # asked for
    signals = sorted(calibration.percentiles)
    return modules, CalibrationEntry(text.source, text.digest, len(windows.ids), signals, calibration.provenance, overlap_pct)


def _describe(step: Planned, context: RunContext, bench: Bench, calibration: CalibrationEntry | None) -> dict[str, Any]:
    """Everything in record.json that is not a measurement."""
    from quicksilver.modules.calibration import thresholds_of

    config, model, windows = step.config, bench.model, bench.windows
    text, (files, weights_digest) = context.text(config, "test"), context.files(config)
    modules = dict(zip(sorted(config.modules), bench.modules, strict=True))
    described_model = ModelEntry(
        config.model.name, files.source, files.commit, model.config.model_type, layers=model.config.num_hidden_layers,
        parameters=sum(p.numel() for p in model.parameters()), weights_digest=weights_digest, dtype=config.model.dtype,
        device=str(model.device), attn_implementation=config.model.attn_implementation,
    )  # fmt: skip
    described_data = DataEntry(
        config.dataset.name, text.source, config.dataset.part, config.dataset.form, text.digest, token_digest=windows.token_digest,
        windows=len(windows.ids), windows_available=windows.available, text_tokens=windows.tokens, text_bytes=len(text.text.encode()),
        no_bytes_because=windows.why_no_bytes,
    )  # fmt: skip
    return {
        "schema_version": SCHEMA_VERSION, "fingerprint": step.fingerprint, "dense_fingerprint": step.dense, "label": config.label,
        "modules": list(config.modules), "execution": config.execution, "protocol": dataclasses.asdict(config.protocol),
        "lookahead": any(module.lookahead and not module.causal for module in modules.values()),
        "model": encoded(described_model), "data": encoded(described_data), "calibration": None if calibration is None else encoded(calibration),
        "tuned": calibration_provenance(context.files_read(config), config.dataset.name, calibration),
        "thresholds": {name: thresholds_of(module) for name, module in modules.items()},
        # Of modules that can compute in more than one way, how they did: an integer product may have fallen back to floats.
        "kernels": {name: module.kernel for name, module in modules.items() if module.kernel is not None},
        "config": dataclasses.asdict(config), "identity": context.identity(config).to_json(),
        "package": {"version": __version__, "numerics_version": numerics.VERSION},
    }  # fmt: skip


# --- records=checked -------------------------------------------------------------------------------------------------------------
#
# The first batch of windows is scored again; where it comes out as in the committed record, only times are measured here. Identity says that
# weights, text and options are the same; the batch says that this machine and these libraries compute as before.

# By number format, ascending: nats a scored token in any window, and share of the work (a token at its threshold may fall to either side).
# Three times what scripts/measure_rounding.py found on three emulated processors (docs/identity.md).
BOUNDS: dict[NumberFormat, tuple[float, float]] = {"float32": (1e-4, 1e-3), "bfloat16": (0.1, 1e-3), "integer": (0.1, 1e-3)}
_UNNAMED = {"int8_dynamic": "int_mm"}  # what computed records that were made before they said so


def of_repository(results_dir: str, fingerprint: str, measurements: Mapping[str, Measurement]) -> Record | None:
    """The record to compare with; None: there is none that is whole, or a batch of windows does not speak for all that was measured."""
    if not all(one.timed or one.windows_speak for one in measurements.values()):
        return None
    try:
        record = Store(results_dir).get(fingerprint)
        if record is None or not record.is_kept:
            return None
        check_files(record)
        return record
    except ConfigError:
        return None  # it is damaged: the run is made as if it were not there


def format_of(bench: Bench) -> NumberFormat:
    """The coarsest format that a run computes in: its model's, or one of its modules'."""
    of_model: NumberFormat = "float32" if next(bench.model.parameters()).dtype.itemsize >= 4 else "bfloat16"
    return max([of_model, *(one.number_format for one in bench.modules)], key=list(BOUNDS).index)


def confirm(record: Record, bench: Bench) -> Confirmed:
    """Score the first batch as the run does, and compare it window by window with the record."""
    (nats, work), number_format, other = compare(record, bench), format_of(bench), _other_kernels(record, bench)
    most_nats, most_work = BOUNDS[number_format]
    if other is not None:
        said = f"{record.fingerprint}: {other}; measured here as a whole. records=any reads it as it is."
        print(said, file=sys.stderr, flush=True)
    windows = min(bench.protocol.batch_size, len(bench.windows.ids))
    agrees = other is None and nats <= most_nats and work <= most_work
    return Confirmed(windows, len(record.windows), nats, agrees, number_format)


def _other_kernels(record: Record, bench: Bench) -> str | None:
    """That the record was made by a kernel that is not used here, a clause; None: by the same ones."""

    def names(kernels: Iterable[str]) -> set[str]:  # `torch._int_mm` of `torch._int_mm on cpu (AVX512)`
        return {how.partition(" on ")[0].rstrip("; ") for how in kernels}

    there = {_UNNAMED[name] for name in record.config["modules"] if name in _UNNAMED and name not in record.kernels}
    there |= names(record.kernels.values())
    here = names(one.kernel for one in bench.modules if one.kernel is not None)
    if here <= there:
        return None
    gone = "; ".join(sorted(there - here)) or "a kernel that it does not name"
    return f"the repository's record was made by {gone}, which is not exact or not here, and this machine takes {'; '.join(sorted(here - there))}"


def compare(record: Record, bench: Bench) -> tuple[float, float]:
    """How far the first batch is from the record: the largest difference of a window in nats a token, and that of the work as a share."""
    from quicksilver.measure.perplexity import score

    count = min(bench.protocol.batch_size, len(bench.windows.ids))
    scores = score(
        bench.model, bench.windows.ids[:count], bench.protocol, bench.windows.token_bytes, modules=bench.modules,
        execution=bench.execution, progress=bench.batches_done, dense=bench.dense.logits if bench.dense and bench.modules else None, decision_layers=bench.decision_layers,
    )  # fmt: skip
    here, there = scores.windows, record.windows.iloc[:count]
    by = {"nll_nats": here["tokens"].to_numpy(float), "kl_nats": 1.0}
    columns = [column for column in by if column in here and column in there]
    apart = [np.abs(here[one].to_numpy(float) / by[one] - there[one].to_numpy(float) / by[one]) for one in columns]
    done, before = (float(frame["executed_flops"].sum()) for frame in (here, there))
    return float(np.max(apart)), abs(done / before - 1)  # NaN, of which nothing agrees, stays


def copy_committed_results(record: Record, draft: Draft) -> dict[str, Any]:
    """What the record measured, for a record of this machine; its files are copied into the draft."""
    for name in record.files:
        if name != EVENTS:
            draft.write(name, partial(shutil.copyfile, record.path / name))
    draft.write(WINDOWS, lambda path: record.windows.to_parquet(path, index=False))
    return {key: entry for key, entry in record.content.items() if key not in (CHECKSUM, "files", "confirmed", archive.ENTRY)}
