"""Hand-made records, whole and published through the real store, for tests of what is made of records. Nothing here is a test."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from quicksilver import numerics
from quicksilver.measure.audit import AuditResult
from quicksilver.measure.generation import GREEDY, SAMPLED, TEXTS, GenerationResult, Written
from quicksilver.measure.latency import LatencyResult
from quicksilver.measure.measurement import Quartiles, Result, Spread, encoded
from quicksilver.measure.quality import NullResult, QualityResult
from quicksilver.records import stats
from quicksilver.records.identity import (
    DataEntry,
    DenseTotals,
    EnvironmentEntry,
    Identity,
    ModelEntry,
    PackageEntry,
    ProtocolEntry,
)
from quicksilver.records.record import EVENTS, SCHEMA_VERSION, WINDOWS, Record
from quicksilver.records.store import Store
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.runs.choices import config_dir

WINDOW_COUNT = 16
DENSE_FLOPS = 2_000_000_000_000
DENSE_MS = 1000.0
TOKENS = {"all": 511, "continuation": 64}
TEXT_DIGEST, TOKEN_DIGEST, WEIGHTS_DIGEST = "0123abcd" * 8, "9876fedc" * 8, "a1b2c3d4" * 8
LEDGERS = {"executed": 1.0, "nominal": 1.0, "paper": 0.5, "signal": 0.0}  # share of DENSE_FLOPS
PROMPT_SHARE = 0.8
MODEL = ("reference-gpt2", "embedded:reference-gpt2", None, "gpt2", 16, 9_000_000)
DATA = (
    "python-docs", "pydoc_data.topics", "test", "raw", TEXT_DIGEST, TOKEN_DIGEST, WINDOW_COUNT, WINDOW_COUNT, 512 * WINDOW_COUNT,
    2000 * WINDOW_COUNT, None,
)  # fmt: skip
MACHINE = ("3.12", "2.13.0", "5.23.0", "an operating system", "A Processor", 2, 2, 8 * 2**30, 0.1, None)
CONFIG = {"model": "reference-gpt2", "dataset": "python-docs", "measure": "default"}


@pytest.fixture(autouse=True, scope="module")
def fewer_draws() -> Iterator[None]:
    """Intervals of 1,000 resamples instead of 10,000, which is most of the time that a table of hand-made records takes."""
    whole, signs = stats._bootstrap, stats._sign_flip_p
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "_bootstrap", lambda f, samples, n, *rest: whole(f, samples, min(n, 1000), *rest))
        patch.setattr(stats, "_sign_flip_p", lambda differences, n, seed: signs(differences, min(n, 1000), seed))
        yield


def identity(name: str) -> Identity:
    return Identity({"name": name}, {"text": TEXT_DIGEST, "weights": WEIGHTS_DIGEST}, {}, numerics.VERSION)


def fingerprint(name: str) -> str:
    return identity(name).fingerprint


def dense_nats(protocol: str) -> np.ndarray:
    """(W,) nats of each window: about 3.4 a token, some windows harder than others."""
    return TOKENS[protocol] * (3.4 + 0.2 * np.random.default_rng(0).standard_normal(WINDOW_COUNT))


def described(name: str, protocol: str = "all", dense_name: str | None = None) -> dict[str, Any]:
    """The entries of record.json that are not measured; `dense_name` is that of the dense record, None: it is one."""
    prompt = TOKENS["continuation"]
    return {
        "schema_version": SCHEMA_VERSION, "fingerprint": fingerprint(name),
        "dense_fingerprint": None if dense_name is None else fingerprint(dense_name),
        "label": f"reference-gpt2 | python-docs | {name}", "modules": [] if dense_name is None else ["halting"],
        "execution": "compact", "protocol": encoded(ProtocolEntry(protocol, 512, 512 - prompt, 8)), "lookahead": False,
        "model": encoded(ModelEntry(*MODEL, WEIGHTS_DIGEST, "float32", "cpu", "sdpa")), "data": encoded(DataEntry(*DATA)),
        "calibration": None, "tuned": {}, "thresholds": {}, "kernels": {},
        "config": {"seed": 0, **{part: {"name": name} for part, name in CONFIG.items()}}, "identity": identity(name).to_json(),
        "package": encoded(PackageEntry("0.1.0", 1)), "environment": encoded(EnvironmentEntry(*MACHINE)),
        "started": "2026-01-01T10:00:00.000+00:00", "finished": "2026-01-01T10:00:09.000+00:00", "seconds": 9.0, "batch_windows": 4,
    }  # fmt: skip


def quality(windows: pd.DataFrame, protocol: str = "all", share: float = 1.0) -> QualityResult:
    """Of a frame with `tokens` and `nll_nats`; every ledger is `share` of the dense one."""
    nats, tokens = float(windows["nll_nats"].sum()), int(windows["tokens"].sum())
    flops = {f"{ledger}_flops": round(DENSE_FLOPS * part * share) for ledger, part in LEDGERS.items()}
    if protocol == "continuation":
        flops |= {f"prompt_{name}": round(PROMPT_SHARE * count) for name, count in flops.items()}
    return QualityResult(np.exp(nats / tokens), 1.25, nats, tokens, 4 * tokens, kv_bytes_billed=0, kv_bytes_resident=0, **flops)


def ratio(middle: float, around: float = 0.01) -> Quartiles:
    return Quartiles(middle, middle - around, middle + around)


def latency(faster: float, noise_pct: float, *, prompt: bool = False, samples: int | None = None) -> LatencyResult:
    """A run that takes `faster` less of the dense time, of the batch and, with `prompt`, of its prompt."""
    run, dense = (Spread(ms, 2.0, None if samples is None else [ms] * samples) for ms in (DENSE_MS * (1 - faster), DENSE_MS))
    alike = ratio(1 - faster)
    return LatencyResult(
        run, dense, alike, noise_pct, {"before": 0.1, "after": 0.1}, [], *((run, dense, alike, noise_pct) if prompt else ())
    )


def put(content: dict[str, Any], name: str, result: Result) -> None:
    """Add what a measurement found to the entries of record.json."""
    section = name if result.section is None else result.section
    content |= {section: encoded(result)} if section else encoded(result)


def make(
    results: Path, name: str, protocol: str = "all", *, per_token: float | None = None, null_per_token: float | None = None, saved: float = 0.0,
    faster: float = 0.0, noise_pct: float = 1.0, prompt_timed: bool = False, without: Sequence[str] = (), spread: float = 1.0,
    measured: Mapping[str, Result] = {}, files: Mapping[str, Callable[[Path], object]] = {}, columns: Mapping[str, Any] = {},
    **changes: Any,
) -> Record:  # fmt: skip
    """A whole record in `results`; the dense one of `protocol` when `per_token` is None.

    Args:
        per_token, null_per_token: nats a token that the run, and its null, add to the dense ones, with a little noise by window.
        saved: share of the FLOPs that is saved in every ledger.
        faster: share of the time that is saved; `prompt_timed`: of the prompt as well.
        spread: how far apart the windows of a run are in what it adds, as a multiple of the usual.
        without: measurements that were not made, of `latency` and `audit`.
        measured: what further ones found, by name.
        files: further files by name; each is given its path.
        columns: further ones of windows.parquet.
        changes: other entries of record.json.
    """
    dense = per_token is None
    tokens, nats = TOKENS[protocol], dense_nats(protocol)
    noise = np.random.default_rng(1).standard_normal((2, WINDOW_COUNT)) * 0.001 * spread * tokens
    windows = pd.DataFrame({"window": range(WINDOW_COUNT), "tokens": tokens, "nll_nats": nats, **columns})
    base = quality(windows, protocol)
    if per_token is not None:
        windows["nll_nats"] = nats + per_token * tokens + noise[0]
    if null_per_token is not None:
        windows["null_nll_nats"] = nats + null_per_token * tokens + noise[1]
    found = quality(windows, protocol, 1 - saved)
    for ledger, count in encoded(found).items():
        if ledger.endswith("_flops"):
            windows[ledger] = count / WINDOW_COUNT
    content = described(name, protocol, None if dense else f"dense {protocol}")
    asked = OmegaConf.to_container(OmegaConf.load(config_dir() / "measure" / "default.yaml"))
    content["config"]["measure"] |= {name: entry | {"enabled": True} for name, entry in asked.items() if name in measured}
    results_of: dict[str, Result] = {
        "quality": found,
        "audit": AuditResult(0.0, 10.0, 4, [1, 2, 3, 4]),
        "latency": latency(faster, noise_pct, prompt=prompt_timed),
    }
    if null_per_token is not None:
        null = float(windows["null_nll_nats"].sum())
        results_of["null"] = NullResult("shuffle", np.exp(null / found.tokens), null, found.executed_flops, found.nominal_flops)
    for measurement, result in (results_of | dict(measured)).items():
        if measurement not in without:
            put(content, measurement, result)
    if not dense:
        content |= {f"dense_{key}": value for key, value in encoded(DenseTotals.of(base)).items()}
    return publish(results, content | changes, windows, files)


def publish(
    results: Path, content: Mapping[str, Any], windows: pd.DataFrame, files: Mapping[str, Callable[[Path], object]] = {}
) -> Record:
    """A record of these entries, windows and further files, through the store."""
    store = Store(results)
    with store.draft(content["fingerprint"]) as draft:
        draft.write(WINDOWS, lambda path: windows.to_parquet(path, index=False))
        for name, write in files.items():
            draft.write(name, write)
        return store.publish(draft, content)


def events(record: Record) -> list[str]:
    """What events.jsonl of a record says, in order."""
    return [json.loads(line)["event"] for line in (record.path / EVENTS).read_text().splitlines()]


def generated(agreement: float = 0.25) -> dict[str, Any]:
    """Options for `make`: greedy texts that repeat half as much again as the dense ones and agree with that share of them, sampled texts that
    are the dense ones."""
    repeated = np.random.default_rng(0).uniform(0.1, 0.3, WINDOW_COUNT)
    frames = []
    for way, same in ((GREEDY, False), (SAMPLED, True)):
        measured = {
            **{"same_tokens": 64 if same else range(WINDOW_COUNT), "identical": same, "agreement": 1.0 if same else agreement},
            **{"edit_distance": 0.5, "repeated": repeated * (1 if same else 1.5), "dense_repeated": repeated},
            **{"distinct": 0.9, "dense_distinct": 0.9, "nats": 2.0, "dense_nats": 1.5},
        }
        frames.append(pd.DataFrame({"prompt": range(WINDOW_COUNT), "way": way, "text": "a", "dense_text": "b", **measured}))
    one = Written(7.5, 0, 0.25, 0.5, 0.3, 0.2, 0.9, 0.9, 2.0, 1.5)
    found, texts = GenerationResult(WINDOW_COUNT, 448, 64, one, one, 60, 100), pd.concat(frames)
    return {"measured": {"generation": found}, "files": {TEXTS: lambda path: texts.to_parquet(path)}}


def outcomes(results: Path, rows: Sequence[Row], made: Callable[[Row], Mapping[str, Any] | str]) -> list[Outcome]:
    """An outcome for each row: the dense record of its protocol where it has no module, else a record of the options that `made` answers with
    (see `make`), or none, for the reason that it answers with."""
    found, dense = [], {}
    for row in rows:
        protocol = "all" if "protocol=all" in row.overrides else "continuation"
        if protocol not in dense:
            dense[protocol] = make(results, f"dense {protocol}", protocol)
        if "modules=[]" in row.overrides:
            found.append(Outcome(row, dense[protocol], dense[protocol]))
        elif isinstance(options := made(row), str):
            found.append(Outcome(row, reason=options))
        else:
            found.append(Outcome(row, make(results, f"{row.panel} {row.key}", protocol, **options), dense[protocol]))
    return found
