"""The identity of a run, and the other parts of its record that are no measurement. The identity says what the record is of, and nothing about the
code that made it. Its hash, the fingerprint, names the record.

    config        the parts that influence a number (RunConfig.identity)
    digests       sha256 of the scored text and of what else scores a task, of weights, architecture and tokenizer files, and of what calibrates the modules
    sources       sha256 of the files of modules that are not this package's own
    numerics      the version of the numbers that this package computes (`quicksilver.numerics`), guarded by the golden run

Files of this package are in none of them: they may be moved and rewritten, and as long as the golden run gives the same numbers
every record stays what it is.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from quicksilver.measure.quality import QualityResult
from quicksilver.runtime.errors import ConfigError

DIGITS = 20  # hexadecimal: 80 bits
_LATER = {"protect_at_most": 1.0}  # options that the first records lack, with the value that does what they did
_PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class Identity:
    """What decides the result of a run: its config's part, digests of texts, weights and calibration files, sources of the user's modules by module
    name, and the version of the numbers."""

    config: Mapping[str, Any]
    digests: Mapping[str, str]
    sources: Mapping[str, str]
    numerics_version: int

    def to_json(self) -> dict[str, Any]:
        """As record.json has it."""
        found: dict[str, Any] = canonical(vars(self))
        return found

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True, allow_nan=False).encode()).hexdigest()[:DIGITS]


def spelled_at_first(entry: Any) -> Any:
    """The options of a module as the first records have them, whatever they are called now and wherever the class has moved: a share to save
    was a percentage, and a class stood in a file of its name. What was added since is left out where it changes nothing."""
    if not isinstance(entry, Mapping) or not str(entry.get("_target_", "")).startswith(f"{_PACKAGE}."):
        return entry
    found = {key: value for key, value in entry.items() if key not in _LATER or value != _LATER[key]}
    room, *file, name = str(found["_target_"]).removeprefix(f"{_PACKAGE}.").split(".")
    if file:
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        found["_target_"] = f"{_PACKAGE}.{room}.{snake}.{name}"
    if "save" in found:
        save = found.pop("save")
        found["saves_pct"] = round(100 * save, 6) if isinstance(save, int | float) else save
    return found


def canonical(value: Any) -> Any:
    """The same value in one spelling: 1.0 as 1, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(k): canonical(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def foreign_sources(classes: Iterable[type]) -> dict[str, str]:
    """sha256 of the files that define `classes` and what they inherit from, by module name, this package's and Python's own left out.
    Raises ConfigError: a class without source, typed at a prompt for instance."""
    found = {}
    for cls in dict.fromkeys(base for one in classes for base in one.__mro__):
        top = cls.__module__.partition(".")[0]
        if top == _PACKAGE or (top in sys.stdlib_module_names and top != "__main__"):
            continue
        try:
            content = Path(inspect.getfile(cls)).read_bytes()
        except (OSError, TypeError):
            try:
                content = inspect.getsource(cls).encode()  # of a notebook's cell
            except (OSError, TypeError):
                why = "so its records could not be told from those of another version: put the class into a file."
                raise ConfigError(f"{cls.__module__}.{cls.__qualname__} has no source file, {why}") from None
        found[cls.__module__] = hashlib.sha256(content).hexdigest()
    return dict(sorted(found.items()))


# --- what record.json says of a run: `Record` is read back into these ---------------------------------------------------------------
Execution = Literal["compact", "masked", "decide"]
Ledger = Literal["executed", "nominal", "paper", "prompt_executed", "prompt_nominal", "prompt_paper"]
ProtocolName = Literal["all", "continuation"]


@dataclass(frozen=True)
class ProtocolEntry:
    """What was scored, and in which batches."""

    name: ProtocolName
    window_tokens: int
    prompt_tokens: int
    batch_size: int


@dataclass(frozen=True)
class ModelEntry:
    """The frozen model.

    Attributes:
        source: the repository, or `embedded:NAME`; a folder where the model is the user's own.
        commit: of a repository; None: there is none.
        family: `model_type` of the checkpoint's config.
        weights_digest: sha256 of weights, architecture and tokenizer files.
    """

    name: str
    source: str
    commit: str | None
    family: str
    layers: int
    parameters: int
    weights_digest: str
    dtype: str
    device: str
    attn_implementation: str


@dataclass(frozen=True)
class DataEntry:
    """The scored text.

    Attributes:
        form: `raw`, or how the text was changed.
        digest: sha256 of the text.
        token_digest: sha256 of the tokens of the scored windows.
        windows_available: windows that the whole text has.
        no_bytes_because: why there are no bits per byte; None: there are.
    """

    name: str
    source: str
    part: str
    form: str
    digest: str
    token_digest: str
    windows: int
    windows_available: int
    text_tokens: int
    text_bytes: int
    no_bytes_because: str | None

    @property
    def shown_form(self) -> str:
        """Its form, and whether thresholds may have been chosen on it."""
        return self.form + ", the calibrating part" * (self.part == "calibration")


@dataclass(frozen=True)
class CalibrationEntry:
    """The text that percentiles were taken from; `provenance` is that of the calibration file. `overlap_pct`: percent of the scored
    text's runs of 13 words that it has, too; None: not counted when the record was made."""

    text_source: str
    text_digest: str
    windows: int
    signals: list[str]
    provenance: Mapping[str, Any]
    overlap_pct: float | None = None


@dataclass(frozen=True)
class EnvironmentEntry:
    """The machine and the libraries.

    Attributes:
        load_average: of the last minute.
        other_runs: fingerprints of runs that other processes made on this machine meanwhile, in the same results folder.
        job: of a cluster's scheduler, and whether the node was this job's alone; None: there was none.
    """

    python: str
    torch: str
    transformers: str
    platform: str
    cpu: str
    cores: int | None
    threads: int
    memory_bytes: int
    load_average: float
    gpu: str | None
    other_runs: list[str] = field(default_factory=list)
    job: str | None = None


@dataclass(frozen=True)
class PackageEntry:
    """This package, when the run was made."""

    version: str
    numerics_version: int


@dataclass(frozen=True)
class FileEntry:
    """One further file of the record."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Confirmed:
    """How a run compares with the record that the repository has of it.

    Attributes:
        windows, of: how many were scored again, of how many.
        largest_difference_nats: of any of these windows, in nats a scored token: of its likelihood or its KL to dense.
        agrees: quality results are the committed ones, and only times are measured here. False: everything was measured here.
        number_format: the coarsest that the run computes in: it says how far two processors may differ. None: an older record.
    """

    windows: int
    of: int
    largest_difference_nats: float
    agrees: bool
    number_format: str | None = None


@dataclass(frozen=True)
class DenseTotals:
    """Totals of the dense run that differences are against, as `QualityResult` has them; in record.json with `dense_` before each name."""

    ppl: float
    bits_per_byte: float | None
    nll_nats: float
    executed_flops: int
    nominal_flops: int
    paper_flops: int
    signal_flops: int
    kv_bytes: int
    prompt_executed_flops: int | None = None
    prompt_nominal_flops: int | None = None
    prompt_paper_flops: int | None = None
    prompt_signal_flops: int | None = None

    @classmethod
    def of(cls, dense: QualityResult) -> Self:
        """From what the dense run measured."""
        flops = {name: getattr(dense, name) for name in cls.__dataclass_fields__ if name.endswith("_flops")}
        return cls(dense.ppl, dense.bits_per_byte, dense.nll_nats, kv_bytes=dense.kv_bytes_resident, **flops)
