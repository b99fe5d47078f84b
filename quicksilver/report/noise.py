"""One noise floor of the clock (A/A) for all rows that are compared: the few rounds of one run say little about the clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FLOOR, POOLED = "noise_floor_pct", "pooled_noise_floor_pct"


def pool(rows: Sequence[dict[str, Any]], phase: str = "") -> None:
    """Pool the rows' floors: the root mean square over their runs. A run that was noisier than that is judged by its own.

    A record that stands in several rows counts once. Rows without a time stay as they are.

    Args:
        rows: with `record` and `PHASEnoise_floor_pct`, which is replaced; `PHASEpooled_noise_floor_pct` is added.
        phase: before the names of the columns, `prompt_` for instance.
    """
    own = {row["record"]: row[f"{phase}{FLOOR}"] for row in rows if row.get(f"{phase}{FLOOR}") is not None}
    if not own:
        return
    together = root_mean_square(own.values())
    for row in rows:
        if row.get("record") in own:
            row[f"{phase}{POOLED}"] = together
            row[f"{phase}{FLOOR}"] = max(together, own[row["record"]])


def root_mean_square(floors: Iterable[float]) -> float:
    """The floor of several runs together."""
    squares = [floor**2 for floor in floors]
    return math.sqrt(sum(squares) / len(squares))


def note(rows: Iterable[Mapping[str, Any]], of: str) -> tuple[str, ...]:
    """The sentence below a panel that says its pooled floor; nothing where no run was timed.

    Args:
        rows: after `pool`.
        of: what was timed, `a batch's time`.
    """
    timed = {row["record"]: row for row in rows if _is_number(row.get(FLOOR)) and _is_number(row.get(POOLED))}
    if not timed:
        return ()
    prompt = [row for row in timed.values() if _is_number(row.get(f"prompt_{POOLED}"))]
    of_prompt = f", {prompt[0][f'prompt_{POOLED}']:.1f}% of a prompt's" if prompt else ""
    worst = max(row[name] for row in timed.values() for name in (FLOOR, f"prompt_{FLOOR}") if _is_number(row.get(name)))
    pooled = next(iter(timed.values()))[POOLED]
    return (
        f"Noise floor of the clock (A/A): {pooled:.1f}% of {of}{of_prompt}, pooled over the dense model's "
        f"differences from itself in {len(timed)} run{'s' if len(timed) > 1 else ''}; a noisier run is judged by its own (at most "
        f"{worst:.1f}%).",
    )


def _is_number(value: Any) -> bool:
    return value is not None and not math.isnan(value)
