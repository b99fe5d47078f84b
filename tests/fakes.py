"""Hand-made records, published through the real store, for tests of what is made of records. Nothing here is a test."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from quicksilver.harness.record import SCHEMA_VERSION, WINDOWS, Record
from quicksilver.harness.store import Store

WINDOW_COUNT = 16
DENSE_FLOPS = 2_000_000_000_000
DENSE_MS = 1000.0
TOKENS = {"all": 511, "continuation": 64}


def fingerprint(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:20]


def dense_nats(protocol: str) -> np.ndarray:
    """(W,) nats of each window: about 3.4 a token, some windows harder than others."""
    return TOKENS[protocol] * (3.4 + 0.2 * np.random.default_rng(0).standard_normal(WINDOW_COUNT))


def make(
    results: Path,
    name: str,
    protocol: str = "all",
    *,
    per_token: float | None = None,
    null_per_token: float | None = None,
    saved: float = 0.0,
    faster: float = 0.0,
    noise_pct: float = 1.0,
    **changes: Any,
) -> Record:
    """A record in `results`; the dense one of `protocol` when `per_token` is None.

    Args:
        per_token, null_per_token: nats a token that the run, and its null, add to the dense ones, with a little noise by window.
        saved: share of the FLOPs that is saved in every ledger.
        faster: share of the time that is saved.
        changes: further entries of record.json.
    """
    dense = per_token is None
    tokens, nats = TOKENS[protocol], dense_nats(protocol)
    noise = np.random.default_rng(1).standard_normal((2, WINDOW_COUNT)) * 0.001 * tokens
    windows = pd.DataFrame({"window": range(WINDOW_COUNT), "tokens": tokens})
    windows["nll_nats"] = nats if per_token is None else nats + per_token * tokens + noise[0]
    if null_per_token is not None:
        windows["null_nll_nats"] = nats + null_per_token * tokens + noise[1]
    flops = {"executed": 1.0, "nominal": 1.0, "paper": 0.5} | (
        {"prompt_executed": 0.8, "prompt_paper": 0.4} if protocol == "continuation" else {}
    )
    for ledger, share in flops.items():
        windows[f"{ledger}_flops"] = DENSE_FLOPS * share * (1 - saved) / WINDOW_COUNT
    data = {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": fingerprint(name),
        "dense_fingerprint": None if dense else fingerprint(f"dense {protocol}"),
        "identity": {},
        "config": {"seed": 0, "model": {"name": "reference-gpt2"}, "dataset": {"name": "python-docs"}},
        "execution": "compact",
        "lookahead": False,
        "protocol": {"name": protocol, "window_tokens": 512, "prompt_tokens": 448, "batch_size": 8},
        "model": {
            **{"name": "reference-gpt2", "parameters": 9_000_000, "dtype": "float32", "device": "cpu"},
            "weights_digest": "a1b2c3d4" * 8,
        },
        "data": {
            **{"name": "python-docs", "form": "raw", "windows": WINDOW_COUNT},
            **{"digest": "0123abcd" * 8, "token_digest": "9876fedc" * 8},
        },
        "environment": {"cpu": "A Processor", "gpu": None, "threads": 2, "torch": "2.13.0", "transformers": "5.23.0"},
        "tokens": tokens * WINDOW_COUNT,
        "ppl": ppl(windows["nll_nats"], tokens),
        "bits_per_byte": 1.25,
        "null": None if null_per_token is None else {"kind": "shuffle", "ppl": ppl(windows["null_nll_nats"], tokens)},
        "audit": {"max_abs_logit_difference": 0.0, "probes": 4},
        "latency_ms": {"median": DENSE_MS * (1 - faster)},
        "latency_ratio": {"median": 1 - faster, "low": 0.99 - faster, "high": 1.01 - faster},
        "noise_floor_pct": noise_pct,
        "batch_windows": 4,
    }
    for ledger, share in flops.items():
        data[f"{ledger}_flops"] = int(DENSE_FLOPS * share * (1 - saved))
        if not dense:
            data[f"dense_{ledger}_flops"] = int(DENSE_FLOPS * share)
    store = Store(results)
    with store.draft(data["fingerprint"]) as draft:
        draft.write(WINDOWS, lambda path: windows.to_parquet(path, index=False))
        return store.publish(draft, data | changes)


def ppl(nats: pd.Series, tokens: int) -> float:
    return float(np.exp(nats.sum() / (tokens * WINDOW_COUNT)))
