"""How far a table just made is from the committed one: quality and work only, because wall clock belongs to the machine."""

from __future__ import annotations

import io
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from quicksilver.report.comparison import MEASURED

_SAME = ("model", "weights_digest", "dtype", "data", "token_digest", "windows", "tokens", "execution")
_COMPARED = (
    ("Δppl", "delta_ppl", ""),
    ("perplexity", "ppl", ""),
    ("executed FLOPs saved", "executed_flops_saved_pct", " points"),
)
# Names of quantities that belong to the machine and the moment.
_OF_THE_MACHINE = ("_ms", "_j", "speedup", "latency", "seconds", "gco2", "noise_floor", "load_average", "memory_bytes", "record")


@dataclass(frozen=True)
class Committed:
    """The frame of a committed table and where it was read."""

    frame: pd.DataFrame
    origin: str


def committed(csv: Path) -> Committed | None:
    """The version of `csv` in git's HEAD, or, outside a git tree, the file as it stands. None: there is neither."""
    if not csv.parent.is_dir():
        return None
    if shutil.which("git") and _git(csv.parent, "rev-parse", "--is-inside-work-tree").returncode == 0:
        shown = _git(csv.parent, "show", f"HEAD:./{csv.name}")
        return Committed(pd.read_csv(io.StringIO(shown.stdout)), f"{csv} at HEAD") if shown.returncode == 0 else None
    return Committed(pd.read_csv(csv), f"{csv} as it stood") if csv.is_file() else None


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, encoding="utf-8")


def distance(made: pd.DataFrame, reference: Committed | None, name: str) -> str:
    """One sentence: how far apart, over how many rows, or why there is nothing to compare."""
    if reference is None:
        return f"There is no committed {name} to compare with."
    if {"panel", "key", "status", *_SAME, *(column for _, column, _ in _COMPARED)} <= set(made.columns):
        return _effects_distance(made, reference)
    # As text and back, because that is how the committed one was kept.
    return _free_distance(pd.read_csv(io.StringIO(made.to_csv(index=False, float_format="%.8g"))), reference)


def _free_distance(made: pd.DataFrame, reference: Committed) -> str:
    """Frames of any columns: the largest difference, quantities of this machine's clock left out."""
    there = reference.frame
    if list(made.columns) != list(there.columns) or len(made) != len(there):
        return f"Against {reference.origin}: not comparable, other rows or columns ({len(made)} rows here, {len(there)} there)."
    apart: dict[str, float] = {}
    for column in made.columns:
        if any(word in column for word in _OF_THE_MACHINE):
            continue
        here, other = made[column], there[column]
        if pd.api.types.is_numeric_dtype(here) and pd.api.types.is_numeric_dtype(other):
            apart[column] = float((here.astype(float) - other.astype(float)).abs().max())
        elif not here.astype(str).equals(other.astype(str)):
            return f"Against {reference.origin}: {column} has other entries."
    worst = max(apart, key=lambda column: apart[column], default=None)
    if worst is None or not apart[worst] > 0:
        return f"Against {reference.origin}: {len(made)} rows compared, no difference."
    return f"Against {reference.origin}: {len(made)} rows compared, at most {apart[worst]:.2g} apart ({worst})."


def _effects_distance(made: pd.DataFrame, reference: Committed) -> str:
    if not {"panel", "key", "status", *_SAME} <= set(reference.frame.columns):
        return f"Against {reference.origin}: not comparable, other columns."
    here, there = (frame[frame["status"] == MEASURED].set_index(["panel", "key"]) for frame in (made, reference.frame))
    both = here.merge(there, left_index=True, right_index=True, suffixes=("", "_committed"))
    if both.empty:
        return f"Against {reference.origin}: no row was measured in both."
    for column in _SAME:
        # As text, because a column of digests that is read back from a file may look like numbers.
        differing = both[both[column].astype(str) != both[f"{column}_committed"].astype(str)]
        if not differing.empty:
            row, other = differing.iloc[0][column], differing.iloc[0][f"{column}_committed"]
            where = " ".join(map(str, differing.index[0]))
            return f"Against {reference.origin}: not comparable, {column} is {row} here and {other} there ({where})."
    parts = [f"{len(both)} rows compared"]
    for label, column, unit in _COMPARED:
        apart = (both[column] - both[f"{column}_committed"]).abs().dropna()
        if not apart.empty:
            where = f" ({' '.join(map(str, apart.idxmax()))})" if apart.max() > 0 else ""
            parts.append(f"{label} at most {apart.max():.2g}{unit} apart{where}")
    return f"Against {reference.origin}: {', '.join(parts)}."
