"""Measure what the package ships for its reference models: percentiles of their signals.

python scripts/ship_calibrations.py                      all embedded models with weights, a few minutes each
python scripts/ship_calibrations.py reference-llama

Writes quicksilver/modules/calibrations/NAME.json. With it `Halting(tau_drift="p25")` needs no file
of one's own. To be run again when a reference model was trained again.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from quicksilver.models.loading import EMBEDDED
from quicksilver.modules.calibration import SHIPPED_CALIBRATIONS, calibrate
from quicksilver.runs.config import compose
from quicksilver.runs.context import RunContext
from quicksilver.runtime.errors import QuickSilverError


def main(arguments: Sequence[str]) -> int:
    for name in arguments or sorted({weights.parent.name for weights in EMBEDDED.glob("*/*.safetensors")}):
        config, place = compose([f"model={name}", "dataset=python-docs"]), RunContext()
        text, windows = place.text(config, "calibration"), place.windows(config, "calibration").ids
        found = calibrate(place.model(config).model, windows, source={"model": name, "text": text.source})
        path = SHIPPED_CALIBRATIONS / f"{name}.json"
        # Five digits, which is more than a percentile of a few thousand tokens has.
        digits = lambda row: None if row is None else [float(f"{value:.5g}") for value in row]
        percentiles = {key: [*map(digits, rows)] for key, rows in found.percentiles.items()}
        dataclasses.replace(found, percentiles=percentiles).save(path)
        path.chmod(0o644)  # it is shipped
        print(f"{path}: {', '.join(percentiles)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except QuickSilverError as error:
        sys.exit(f"ship_calibrations: {error}")
