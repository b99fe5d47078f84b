"""The price of an ingredient is the rise of KL to dense for each point of time that it saves."""

from pathlib import Path

import fakes
import numpy as np
import pytest

from quicksilver.experiments.ablation import composition
from quicksilver.report import comparison
from quicksilver.report.artefacts import Outcome
from quicksilver.runs.config import compose
from quicksilver.runs.run import check_allowed_by_protocol


def test_every_row_is_a_run_that_the_protocol_takes_and_no_two_are_the_same() -> None:
    rows = composition.composition_rows()
    configs = {(row.panel, row.key): compose(row.overrides) for row in rows}
    for config in configs.values():
        check_allowed_by_protocol(config)
    assert len({str(config) for config in configs.values()}) == len(rows)
    parts = {(panel, config.dataset.part) for (panel, _), config in configs.items()}
    assert parts == {(composition.PANEL, "test"), (composition.SEARCH, "calibration")}
    modules = {key: config.modules for (panel, key), config in configs.items() if panel == composition.PANEL}
    for name in composition.ALL:  # what is left out is what is missing
        assert set(modules["all"]) - set(modules[f"out.{name}"]) == set(modules[f"add.{name}"]) - {"quicksilver"}
    assert modules["add.fusion"]["quicksilver"]["schedule"]["drop_share"] == 0
    assert modules["add.fusion"]["token_fusion"]["protect_last"] == 32


def outcome(results: Path, key: str, kl: float, **options: float) -> Outcome:
    row = next(row for row in composition.composition_rows() if row.panel == composition.PANEL and row.key == key)
    dense = fakes.make(results, "dense continuation", "continuation")
    record = fakes.make(results, key, "continuation", per_token=0.01, prompt_timed=True, noise_pct=2.0, **options)
    noise = 0.001 * np.random.default_rng(len(key)).standard_normal(fakes.WINDOW_COUNT)
    record.__dict__["windows"] = record.windows.assign(kl_nats=kl + noise)
    return Outcome(row, record, dense)


CASES = [
    (0.020, 0.60, 0.0),  # time for nothing
    (0.040, 0.60, 0.1),  # KL × 100 rises by 2 for 20 points
    (0.020, 0.41, None),
    (0.020, 0.30, None),
]


def test_a_price_is_kl_for_a_point_of_time(tmp_path: Path) -> None:
    preset = outcome(tmp_path, "preset", 0.020, saved=0.40, faster=0.40)
    for number, (kl, faster, price) in enumerate(CASES):
        there = {
            "preset": preset,
            "add.skipping": outcome(tmp_path / str(number), "add.skipping", kl, saved=0.5, faster=faster),
        }
        (said,) = composition.findings(there, comparison.frame([*there.values()]).set_index("key"))
        assert said.startswith("Skipped K/V entries. Added to the preset: operations of the prompt +10.")
        priced = said.split("], ")[1]
        if price is None:
            assert priced == "no time saved beyond the noise."
        else:
            assert float(priced.removesuffix(" for each point of time.")) == pytest.approx(price, abs=0.01)
        change = composition.kl_change(there["add.skipping"], preset)
        assert change.low < change.value < change.high
        assert change.value == pytest.approx(kl - 0.020, abs=1e-3)
