"""Records: everything one run produced, as one directory that pandas alone can read.

results/runs/<fingerprint>/
    record.json         config, environment, protocol, all scalars with their units in the names
    windows.parquet     per window: tokens, bytes, nll_nats, FLOPs …
    trace.safetensors   every decision (absent in a dense record)
    signals.safetensors what happened to each token of a few texts, layer by layer (with measure.signals)
    events.jsonl        what happened when

Of committed records (results/records, archive.py) record.json and windows.parquet lie in two files for all; further files are there where
something reads them, safetensors files packed by xz. `load_record` and `Record` read both kinds. What is read is checked: record.json against its
checksum, other files against their digests, values against their types, totals against each other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import lzma
import math
import os
import re
import shutil
import tempfile
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quicksilver.files import fingerprint_of, plain_name
from quicksilver.measure.measurement import Mistyped, Result, decoded
from quicksilver.measure.quality import QualityResult
from quicksilver.measure.signals import LookedInto, SignalsResult
from quicksilver.records import archive
from quicksilver.records import identity as entries
from quicksilver.records.identity import DenseTotals, Execution, Identity
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import parse_json

if TYPE_CHECKING:  # a second to import, which no refusal should wait for
    import pandas as pd

R = TypeVar("R", bound=Result)

SCHEMA_VERSION = 4
RECORD, WINDOWS, TRACE, EVENTS = "record.json", "windows.parquet", "trace.safetensors", "events.jsonl"
PACKED = ".xz"  # suffix of safetensors files in records that the repository keeps
PACKED_TRACE = TRACE + PACKED
SIGNALS = "signals.safetensors"
CHECKSUM = "checksum"
CALIBRATIONS = "calibration"  # a folder of results, and one beside the repository's records
# A run may execute more than dense inference (signals, drafts that are thrown away), but no mechanism here does so twenty times over, and
# none leaves out all but a thousandth: embedding and output head alone are more.
_MOST_TIMES_DENSE, _LEAST_OF_DENSE = 20.0, 1e-3
_NO_RESULTS = ("config", "identity", "tuned", "calibration")
_AMOUNT = re.compile(
    r"(^|_)(bytes|ms|s|flops|tokens|windows|positions|parameters|cores|threads|samples|seconds|repeats|kl_nats)$"
)
_SHARE = re.compile(r"(^|_)(agreement|share|accuracy|distinct|repeated)$")
_ROUNDING = 1e-6
# Of the paper's count on scored tokens: what keys that left the prompt take off at most, where texts differ in length.
_SEEN_SHARE = 5e-3


@dataclass(frozen=True, kw_only=True)
class Record:
    """One finished run, read only.

    What describes the run is an attribute (`record.model.layers`), and so is what every run measures (`record.quality.ppl`) and what it is
    compared with (`record.dense`). Further measurements are asked for by name and class: `record.measured("energy", EnergyResult)`.

    Attributes:
        fingerprint: hash of `identity`, and name of the record's folder.
        dense_fingerprint: the record every difference of this one is against; None: this is a dense record.
        lookahead: a module read tokens that it is asked to predict.
        tuned: what was set before the text was scored, and on how many windows of which text (`calibration_provenance`).
        thresholds: by module and option, one number a layer.
        kernels: of modules that can compute in more than one way, how they did.
        config: the run's configuration, resolved.
        started, finished: ISO 8601, UTC; `seconds` between them.
        batch_windows: windows in the batch that was audited, counted, timed and weighed.
        confirmed: set where the run was compared with a committed record (records=checked).
        path: the directory. Of a committed record it is there only where the record has further files.
        content: record.json as json has it, for what shows all of it; whoever wants a value reads an attribute.
    """

    schema_version: int
    fingerprint: str
    dense_fingerprint: str | None
    label: str
    modules: list[str]
    execution: Execution
    protocol: entries.ProtocolEntry
    lookahead: bool
    model: entries.ModelEntry
    data: entries.DataEntry
    calibration: entries.CalibrationEntry | None
    tuned: dict[str, dict[str, int]]
    thresholds: dict[str, dict[str, list[float]]]
    kernels: dict[str, str]
    config: Mapping[str, Any]
    identity: Identity
    package: entries.PackageEntry
    environment: entries.EnvironmentEntry
    files: dict[str, entries.FileEntry]
    started: str
    finished: str
    seconds: float
    batch_windows: int
    confirmed: entries.Confirmed | None = None
    path: Path
    content: Mapping[str, Any]

    @property
    def simulated(self) -> bool:
        """Whether float products stand in for quantised ones: its quality and ledgers count, its time says nothing."""
        return any(how.startswith("float products") for how in self.kernels.values())

    def measured(self, name: str, result: type[R]) -> R:
        """What the measurement of that name in the config found, as the class of its result.
        Raises ConfigError: it was not measured in this run, or what is there is not what the class says."""
        found = self.found(name, result)
        if found is None:
            asked = f"it was not measured in this run (measure={self.config['measure']['name']})"
            raise ConfigError(f"{self.path / RECORD} has no {name!r}: {asked}.")
        return found

    def found(self, name: str, result: type[R]) -> R | None:
        """`measured`, or None where it was not measured in this run.
        Raises ConfigError: what is there is not what the class says."""
        if (name, result) in self._results:
            return typing.cast("R | None", self._results[name, result])
        section = name if result.section is None else result.section
        content = self.content if section == "" else self.content.get(section)
        optional = (dataclasses.MISSING, dataclasses.MISSING)
        always = {one.name for one in dataclasses.fields(result) if (one.default, one.default_factory) == optional}
        if content is None or (section == "" and not content.keys() & always):
            return None
        try:
            self._results[name, result] = decoded(result, content)
        except Mistyped as error:
            raise _corrupt(self.path, f"{RECORD}, {section or name}: {error}") from error
        return typing.cast("R", self._results[name, result])

    @cached_property
    def _results(self) -> dict[tuple[str, type[Result]], Result]:
        """What `found` has read: a ledger asks for it again and again."""
        return {}

    @cached_property
    def quality(self) -> QualityResult:
        """What every run measures: perplexity and the ledgers."""
        return self.measured("quality", QualityResult)

    @cached_property
    def dense(self) -> DenseTotals | None:
        """Totals of the dense run that this one is compared with; None: this is a dense record."""
        if self.dense_fingerprint is None:
            return None
        totals = {key.removeprefix("dense_"): value for key, value in self.content.items() if key.startswith("dense_")}
        try:
            return decoded(DenseTotals, totals, "dense")
        except Mistyped as error:
            raise _corrupt(self.path, f"{RECORD}: {error}") from error

    def flops(self, ledger: str) -> int | None:
        """Operations in a ledger: `executed`, `nominal`, `paper` or `signal`, each with `prompt_` before it under `continuation`; None: the
        protocol has no prompt."""
        return typing.cast("int | None", getattr(self.quality, f"{ledger}_flops"))

    def flops_saved_pct(self, ledger: str) -> float | None:
        """Percent of the dense run's operations that are gone; None in a dense record, and of a prompt where the protocol has none."""
        count, dense = self.flops(ledger), None if self.dense is None else getattr(self.dense, f"{ledger}_flops")
        return 100 * (1 - count / dense) if count is not None and dense else None

    @property
    def acts_on_scored(self) -> bool | None:
        """Whether layers were left out for scored tokens too, not only for the prompt's; None: dense, or the protocol has no prompt.
        The paper's ledger tells: keys that left the prompt take little off it (`_seen_share`), a layer left out takes more."""
        whole, prompt, dense = self.flops("paper"), self.flops("prompt_paper"), self.dense
        if dense is None or whole is None or prompt is None or dense.prompt_paper_flops is None:
            return None
        return whole - prompt < (1 - self._seen_share(dense)) * (dense.paper_flops - dense.prompt_paper_flops)

    def _seen_share(self, dense: DenseTotals) -> float:
        """What scored tokens save at most in the paper's ledger where they see none of the prompt's keys. App. J charges each of n tokens
        a + b · log(keys seen), as do the prompt's: two equations for a and b. The last token is scored, and not processed."""
        n_prompt, n_all = self.protocol.prompt_tokens, self.protocol.window_tokens - 1
        n = n_all - n_prompt
        if n < 1 or self.quality.tokens != self.data.windows * (n + 1):  # a task's examples
            return _SEEN_SHARE
        each = (dense.paper_flops - (dense.prompt_paper_flops or 0)) / n
        b = (each - (dense.prompt_paper_flops or 0) / n_prompt) / math.log(n_all / n_prompt)
        return 1.01 * b * math.log(n_all / n) / each

    @property
    def is_kept(self) -> bool:
        """Whether it is the repository's."""
        return archive.ENTRY in self.content

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """The record as a directory with all its files: its own, or one that is there within the block."""
        if not self.is_kept:
            yield self.path
            return
        with tempfile.TemporaryDirectory() as place:
            if self.path.is_dir():
                shutil.copytree(self.path, place, dirs_exist_ok=True)
            (Path(place) / RECORD).write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
            self.windows.to_parquet(Path(place) / WINDOWS, index=False)
            yield Path(place)

    @property
    def timing_warnings(self) -> list[str]:
        """Why times of this run may be worth less than they look, from every measurement that reads a clock."""
        sections = (self.content, *(one for one in self.content.values() if isinstance(one, Mapping)))
        lists = (entry for section in sections for key, entry in section.items() if str(key).endswith("timing_warnings"))
        found = [entry for entry in lists if isinstance(entry, list)]
        beside = len(self.environment.other_runs) if found else 0
        shared = [f"{beside} other run{'s were' if beside > 1 else ' was'} made on this machine meanwhile"] if beside else []
        return list(dict.fromkeys([*(str(warning) for entry in found for warning in entry), *shared]))

    @cached_property
    def texts(self) -> list[LookedInto]:
        """The texts that the run looked into; empty: it looked into none."""
        found = self.found("signals", SignalsResult)
        return [] if found is None else found.texts

    @cached_property
    def trace_path(self) -> Path | None:
        """Where the decisions are; None in a dense record. Raises ConfigError: the file is damaged."""
        return next((self._checked(name) for name in (TRACE, PACKED_TRACE) if name in self.files), None)

    @cached_property
    def windows(self) -> pd.DataFrame:
        """windows.parquet. Raises ConfigError: the file is damaged, or its sums are not those of record.json."""
        frame: pd.DataFrame
        if self.is_kept:
            frame = archive.windows(self.path.parent, self.fingerprint, self.content[archive.ENTRY])
        else:
            import pyarrow.parquet as pq

            # As pandas.read_parquet, in half its time: a ledger of claims reads hundreds.
            frame = pq.ParquetFile(self._checked(WINDOWS)).read().to_pandas()
        for column in ("tokens", "nll_nats", "executed_flops"):
            total = getattr(self.quality, column)
            if column not in frame or not math.isclose(float(frame[column].sum()), float(total or 0), rel_tol=1e-6):
                raise _corrupt(self.path, f"{column} of {WINDOWS} does not add up to {total} in {RECORD}")
        return frame

    @cached_property
    def _whole(self) -> bool:
        """True, or the ConfigError of `check_files`; read once, as `load_record` gives another object for files that changed."""
        for name in self.files:
            self._checked(name)
        if self.is_kept:
            _ = self.windows  # against the digest of its rows
        return True

    def _checked(self, name: str) -> Path:
        path = self.path / name
        if name not in self.files or hashlib.sha256(path.read_bytes()).hexdigest() != self.files[name].sha256:
            raise _corrupt(self.path, f"{name} is not the file that was recorded")
        return path

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of one of its safetensors files, packed or not; of a record that the repository keeps, those that something reads.
        Raises ConfigError: it has no such file, or the file is damaged."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        there = next((one for one in (name, name + PACKED) if one in self.files), None)
        if there is None:
            raise ConfigError(f"{self.path} has no {name}. Where the repository lacks it: make the run with records=own.")
        content = self._checked(there).read_bytes()
        try:
            return dict(load(lzma.decompress(content) if there.endswith(PACKED) else content))
        except (SafetensorError, EOFError, OSError, lzma.LZMAError) as error:
            raise _corrupt(self.path, f"{there} is damaged: {error}") from error

    @property
    def texts_with_signals(self) -> list[int]:
        """Numbers of the texts that `signals` has something of: all of `texts`, but in a record that the repository keeps."""
        if not {SIGNALS, SIGNALS + PACKED} & set(self.files):
            return []
        return sorted({int(name.partition(".")[0]) for name in self.arrays(SIGNALS)})

    def signals(self, text: int = 0) -> pd.DataFrame:
        """What happened inside one of the record's texts (`record.texts`): a row a layer and token.

        Columns: `layer` (0: before the first), `slot`, `token`, then the signals of `measure.inside.Inside`: those of the run under their
        own names, those of the dense model as `dense_…`, the components as `pca_0` …; of a dense record, its own. `active` and `kv` are
        booleans, `bits` and `carrier` whole numbers. `nll_nats` and `dense_nll_nats` repeat in every layer. A record that the repository
        keeps may have fewer columns.
        Raises ConfigError: the run looked into no text, not into that many, or the file is damaged."""
        import pandas as pd

        texts = self.texts
        if not texts:
            raise ConfigError(f"{self.path} has no signals: make the run with measure=signals.")
        if not 0 <= text < len(texts):
            raise ConfigError(f"{self.path} looked into {len(texts)} texts; there is no text {text}.")
        prefix = f"{text}."
        arrays = {name.removeprefix(prefix): array for name, array in self.arrays(SIGNALS).items() if name.startswith(prefix)}
        if not arrays:
            raise ConfigError(f"{self.path} is kept without the signals of text {text}: make the run with records=own.")
        tokens = texts[text].tokens
        rows = next(len(array) for array in arrays.values() if array.ndim == 2)
        columns: dict[str, Any] = {
            "layer": np.repeat(np.arange(rows), len(tokens)),
            "slot": np.tile(np.arange(len(tokens)), rows),
            "token": np.tile(np.array(tokens, dtype=object), rows),
        }
        of_run = any(name.startswith("run.") for name in arrays)
        for name, array in sorted(arrays.items()):
            variant, signal = name.split(".")
            column = signal if variant == "run" or not of_run else f"dense_{signal}"
            if array.ndim == 3:
                columns |= {f"{column}_{i}": array[..., i].reshape(-1) for i in range(array.shape[-1])}
            else:
                columns[column] = np.broadcast_to(array, (rows, len(tokens))).reshape(-1)
        kinds = {"active": bool, "kv": bool, "bits": int, "carrier": int}
        return pd.DataFrame(columns).astype({name: kind for name, kind in kinds.items() if name in columns})


def load_record(folder: Path | str) -> Record:
    """Read one record directory, or the record of that name that the archive beside it has; the same object again while no file has changed.
    Raises ConfigError: it is not a whole record of this schema, or what it says cannot be so; the message names the path and
    the remedy. Nothing is changed on disk."""
    folder = Path(folder)
    try:
        files = sorted((name, archive.state(folder / name)) for name in os.listdir(folder))
    except OSError:
        files = []  # what is wrong there, reading says
    return _loaded(folder, tuple(files), tuple(archive.state(folder.parent / one) for one in (archive.RECORDS, archive.WINDOWS)))


@lru_cache(maxsize=2048)
def _loaded(folder: Path, files: tuple[tuple[str, Any], ...], archived: tuple[Any, ...]) -> Record:
    """`files`, `archived`: what the folder and the archive have, so that a file that changes is read again."""
    try:
        content = parse_json(_text(folder), parse_constant=_finite, parse_float=_finite)
    except ValueError as error:
        raise _corrupt(folder, f"{RECORD} is damaged: {error}") from error
    except OSError as error:
        raise ConfigError(f"{folder / RECORD} cannot be read: {error.strerror}.") from error
    if not isinstance(content, dict) or "schema_version" not in content:
        raise _corrupt(folder, f"{RECORD} has no schema_version")
    if content["schema_version"] != SCHEMA_VERSION:
        said = f"of schema {content['schema_version']} and this version of QuickSilver reads schema {SCHEMA_VERSION}"
        ways = "Move that folder away to have the run made again, or read it with the version that wrote it."
        raise ConfigError(f"{folder} is a record {said}. {ways}")
    record = record_of(folder, content)
    if record.fingerprint != folder.name:
        raise _corrupt(folder, f"{RECORD} belongs to the run {record.fingerprint}")
    return record


def _text(folder: Path) -> str:
    """What record.json says, of a directory or of the archive beside it."""
    try:
        return (folder / RECORD).read_text(encoding="utf-8")
    except FileNotFoundError:
        found = archive.text(folder.parent, folder.name)
        if found is None:
            raise _corrupt(folder, f"it has no {RECORD}") from None
        return found


def record_of(folder: Path, content: Mapping[str, Any]) -> Record:
    """The record that `folder` is with this content of record.json.
    Raises ConfigError: the content was changed after it was written, is not what its types say, contradicts itself, or a file
    is missing or cut short."""
    if content.get(CHECKSUM) != checksum(content):
        raise _corrupt(folder, f"{RECORD} is not as it was written: its checksum is another")
    try:
        record = decoded(Record, {**content, "path": folder, "content": content})
        for name in filter(None, (record.fingerprint, record.dense_fingerprint)):
            fingerprint_of(name)
        for name in (*record.files, record.data.token_digest):
            plain_name(name, "a file or digest")
    except (Mistyped, ConfigError) as error:
        raise _corrupt(folder, f"{RECORD}: {error}") from error
    for name, described in record.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != described.bytes:
            raise _corrupt(folder, f"{name} is {'cut short or changed' if path.is_file() else 'missing'}")
    why = _contradiction(record)
    if why is not None:
        raise _corrupt(folder, f"{RECORD}: {why}")
    return record


def checksum(content: Mapping[str, Any]) -> str:
    """sha256 of record.json's entries, its checksum left out, in one spelling."""
    entries = {key: entry for key, entry in content.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _contradiction(record: Record) -> str | None:
    """Why its numbers cannot all be true; None: nothing speaks against them."""
    identity, quality, dense = record.identity, record.quality, record.dense
    if identity.fingerprint != record.fingerprint:
        return "identity is not that of its fingerprint"
    for name, digest in (("weights", record.model.weights_digest), ("text", record.data.digest)):
        if identity.digests.get(name) != digest:
            return f"the digest of its {name} is not the one in its identity"
    if quality.tokens < 1 or record.data.windows < 1:
        return f"it scored {quality.tokens} tokens in {record.data.windows} windows"
    of_dense = [("dense_ppl", dense.ppl, dense.nll_nats)] if dense else []
    for name, ppl, nats in (("ppl", quality.ppl, quality.nll_nats), *of_dense):
        # `exp` of more than 700 nats a token is no float.
        if nats < 0 or nats / quality.tokens > 700 or not math.isclose(ppl, math.exp(nats / quality.tokens), rel_tol=1e-6):
            return f"{name} is {ppl:g}, which {nats:g} nats over {quality.tokens} tokens do not give"
    for name in (name for name in DenseTotals.__dataclass_fields__ if name.endswith("_flops")):
        count, whole = getattr(quality, name), None if dense is None else getattr(dense, name)
        if (count or 0) < 0 or (whole or 0) < 0 or (name == "executed_flops" and not count):
            return f"{name} is {count}"
        if name.endswith("executed_flops") and whole and not _LEAST_OF_DENSE < count / whole < _MOST_TIMES_DENSE:
            return f"{name} is {count}, of {whole} of the dense run"
    if quality.kv_bytes_billed < 0 or quality.kv_bytes_resident < 0:
        return "bytes of the KV cache are negative"
    return _impossible({k: v for k, v in record.content.items() if k not in _NO_RESULTS})


def _impossible(node: Any, key: str = "") -> str | None:
    """A number of a result whose name says that it cannot be so: a length, a time or a count below 0, a share outside of 0 to 1."""
    for name, entry in node.items() if isinstance(node, dict) else ((key, one) for one in node):
        if isinstance(entry, dict | list):
            if why := _impossible(entry, str(name)):
                return why
        elif type(entry) in (int, float) and not 0 <= entry <= 1:
            if _SHARE.search(name) and not -_ROUNDING <= entry <= 1 + _ROUNDING:
                return f"{name} is {entry:g}, and no share from 0 to 1"
            if entry < -_ROUNDING and _AMOUNT.search(name):
                return f"{name} is {entry:g}, and below 0"
    return None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is {'not a finite' if text[-1].isdigit() else 'no'} number")
    return number


def check_files(record: Record) -> None:
    """Compare every file of a record with the digest that was written with it.
    Raises ConfigError: one is not the file that was recorded."""
    _ = record._whole


def _corrupt(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"{folder} is not a whole record: {why}. Move that folder away (or remove it) to have the run made again.")


def record_frame(results_dir: Path | str) -> pd.DataFrame:
    """All records below `results_dir`, one row each, by fingerprint, in order of their start.

    Nested entries are joined with dots (`latency_ms.median`, `config.model.name`); lists and `identity` are left out.
    Raises ConfigError: a directory there is not a whole record."""
    runs, kept = Path(results_dir) / "runs", Path(results_dir) / "records"
    found = {p.name: p for p in runs.glob("[!.]*") if p.is_dir()} | {name: kept / name for name in archive.names(kept)}
    return frame_of([load_record(found[name]) for name in sorted(found)])


def frame_of(records: Sequence[Record]) -> pd.DataFrame:
    """`record_frame` of these."""
    import pandas as pd

    contents = (record.content for record in records)
    rows = [flat({k: v for k, v in one.items() if k not in ("identity", archive.ENTRY, CHECKSUM)}) for one in contents]
    rows = [{k: v for k, v in row.items() if not isinstance(v, list | dict)} for row in rows]
    if not rows:
        return pd.DataFrame(index=pd.Index([], name="fingerprint"))
    return pd.DataFrame(rows).sort_values("started", kind="stable").set_index("fingerprint")


def flat(entries: Mapping[str, Any], separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """The entries with nested ones under joined names, `modules.halting.tau_drift`; lists, and what has no entry, are values."""
    found: dict[str, Any] = {}
    for key, value in entries.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, separator, f"{prefix}{key}{separator}") if nested else {f"{prefix}{key}": value}
    return found
