"""Parts of record.json that are no measurement: protocol, model, text, machine and files. A run writes them; `Record` is read back into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from quicksilver.measure.quality import QualityResult

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


@dataclass(frozen=True)
class CalibrationEntry:
    """The text that percentiles were taken from; `provenance` is that of the calibration file.

    Attributes:
        overlap_pct: percent of the scored text's runs of 13 words that it has, too; None: not counted when the record was made.
    """

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
