"""What became of the tokens of a run, window by window and layer by layer, counted from its trace."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from quicksilver.records.record import Record
from quicksilver.records.stats import bootstrap
from quicksilver.report.claims.reported import Estimate
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.trace import PassTrace, Trace

WIDTHS = (2, 4, 8)


def by_layer(record: Record) -> pd.DataFrame:
    """Tokens of each window (`window`), part (`prompt`, `continuation`, or `all`) and layer (from 1).

    Columns: `tokens`; `active`, that took part in the layer; `halted` and `carried` (by a neighbour that they were fused with), that did
    not; `kv`, with an entry there; `bits_2`, `bits_4`, `bits_8`, active ones held at that width.

    Raises:
        ConfigError: the record has no trace.
    """
    rows = []
    for window, part, one in _passes(record):
        for layer in range(one.n_layers):
            active, carried, bits = one.active(layer), one.valid & (one.fused_layer < layer), one.bits(layer)
            counts = {
                **{"tokens": one.valid, "active": active, "halted": one.valid & ~active & ~carried, "carried": carried},
                **{"kv": one.kv_present(layer), **{f"bits_{width}": active & (bits == width) for width in WIDTHS}},
            }
            sums = {name: mask.sum(1).tolist() for name, mask in counts.items()}
            rows += [
                {"window": window + i, "part": part, "layer": layer + 1, **{k: v[i] for k, v in sums.items()}}
                for i in range(len(active))
            ]
    keys = ["window", "part", "layer"]
    return pd.DataFrame(rows).groupby(keys, sort=False, as_index=False).sum()


def by_branch(record: Record) -> pd.DataFrame:
    """Tokens of each window and part by what was decided first: `tokens`, `halted`, `merged`, `full`; `halted_layers`, the layers that the
    halted ones went through before, and `merged_layers`, summed over tokens.

    Raises:
        ConfigError: the record has no trace.
    """
    rows = []
    for window, part, one in _passes(record):
        last = one.n_layers - 1
        merged = one.valid & (one.fused_layer < last)
        halted = one.valid & (one.halt_layer < last) & ~merged
        counts = {
            **{"tokens": one.valid, "halted": halted, "merged": merged, "full": one.valid & ~halted & ~merged},
            **{"halted_layers": halted * (one.halt_layer.long() + 1), "merged_layers": merged * (one.fused_layer.long() + 1)},
        }
        sums = {name: values.sum(1).tolist() for name, values in counts.items()}
        rows += [{"window": window + i, "part": part, **{k: v[i] for k, v in sums.items()}} for i in range(len(merged))]
    return pd.DataFrame(rows).groupby(["window", "part"], sort=False, as_index=False).sum()


def _passes(record: Record) -> Iterator[tuple[int, str, PassTrace]]:
    """(first window, part, pass); a pass with nothing cached begins the next batch of windows."""
    if record.trace_path is None:
        raise ConfigError(f"{record.path} has no trace: nothing was decided in it.")
    whole = record.protocol.name == "all"
    first, batch = 0, 0
    for one in Trace.load(record.trace_path).passes:
        begins = one.first_column == 0
        if begins:
            first, batch = first + batch, one.valid.shape[0]
        yield first, "all" if whole else "prompt" if begins else "continuation", one


def share_pct(counts: pd.Series, of: pd.Series) -> Estimate:
    """100 · Σ counts / Σ of over windows, with a bootstrap interval."""
    return Estimate(*map(float, bootstrap(lambda part, whole: 100 * part.sum(-1) / whole.sum(-1), counts, of)))


def decay_per_layer(layers: pd.DataFrame, until: int) -> tuple[Estimate, float]:
    """α of N_ℓ = N·e^(−α·ℓ) (App. K), fitted by least squares to log shares of active tokens in layers 1 to `until`, and its R².

    The line goes through N at layer 0; the interval is bootstrapped over windows.
    """
    kept = layers[layers["layer"] <= until]
    active = kept.pivot(index="layer", columns="window", values="active").to_numpy(float)
    tokens = kept.pivot(index="layer", columns="window", values="tokens").to_numpy(float)
    depth = np.arange(1, until + 1)

    def alpha(active: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return -np.tensordot(depth, np.log(active.sum(-1) / tokens.sum(-1)), axes=1) / (depth**2).sum()

    fitted = Estimate(*map(float, bootstrap(alpha, active, tokens)))
    logs = np.log(active.sum(1) / tokens.sum(1))
    spread = ((logs - logs.mean()) ** 2).sum()
    return fitted, float(1 - ((logs + fitted.value * depth) ** 2).sum() / spread) if spread else float("nan")


def first_resumed_layer(record: Record) -> int:
    """The first layer (from 1) that halted tokens take part in again; one beyond the last where they never do."""
    import torch  # seconds, which who only asks for the rows must not wait for

    last = record.model.layers
    firsts = [int(torch.where(one.halt_layer < last - 1, one.resume_layer, last).min()) for _, _, one in _passes(record)]
    return min(firsts) + 1
