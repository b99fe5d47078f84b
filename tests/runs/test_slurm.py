"""A sweep on a real Slurm of this machine: a worker and the head are killed, and every run has its record once."""

from __future__ import annotations

import pytest
import try_slurm


@pytest.mark.slow
def test_a_sweep_on_slurm_survives_the_death_of_a_worker_and_of_its_head(tmp_path):
    reason = try_slurm.missing()
    if reason is not None:
        pytest.skip(reason)
    found = try_slurm.trial(tmp_path / "trial", runs=8)
    assert found["runs"] == 8
    assert 0 < found["done_when_the_head_was_killed"] <= 8
    assert found["looks_at_the_status"] > 1
