"""Fit translators: one dense pass over the text, then one solve for each source layer."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from quicksilver.fitting.regression import CONTROLS, RIDGE, NormalEquations
from quicksilver.fitting.text import FitText
from quicksilver.modules.thresholds import model_digest
from quicksilver.modules.translators import Translator
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError

SAVED_EVERY_S = 20.0
Progress = Callable[[Sequence[torch.Tensor]], Iterable[torch.Tensor]]


def fit_translators(
    architecture: Architecture,
    text: FitText,
    source_layers: Sequence[int],
    *,
    ridge: float = RIDGE,
    control: str | None = None,
    batch_size: int = 4,
    checkpoint: Path | None = None,
    progress: Progress = iter,
) -> dict[int, Translator]:
    """One translator for each source layer.

    Args:
        ridge: λ as a multiple of the mean of the diagonal of XᵀX.
        control: `shuffled` or `mean`: what a translator must beat (`NormalEquations`).
        checkpoint: the sums are kept there now and then, and taken up again by the same command; removed when it is done.
        progress: wraps the batches that are left (`tqdm.tqdm`).

    Raises:
        ConfigError: a source layer that the model lacks, an unknown control, a ridge that is no positive number, too little text.
    """
    if control is not None and control not in CONTROLS:
        raise ConfigError(f"control={control!r} is not one of {', '.join(CONTROLS)}.")
    if not 0 < ridge < float("inf"):
        raise ConfigError(
            f"ridge={ridge!r} must be a number above 0: without a penalty the constant and the state are not told apart."
        )
    digest = model_digest(architecture.model)
    sums = NormalEquations(architecture, source_layers, control)
    asked = [digest, text.digest, sorted(sums.sums), control, batch_size]
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    if checkpoint is not None:
        sums.resume(checkpoint, key)
    saved_s = time.monotonic()
    for batch in progress(text.ids[sums.windows :].split(batch_size)):
        sums.add(batch)
        if checkpoint is not None and time.monotonic() - saved_s > SAVED_EVERY_S:
            sums.save(checkpoint, key)
            saved_s = time.monotonic()
    said: dict[str, Any] = {"text": text.provenance, "text_digest": text.digest}
    found = {layer: sums.solve(layer, digest, said, ridge) for layer in sums.sums}
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return found
