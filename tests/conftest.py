"""Shared by all tests: one thread, reproducible draws, and the data folder where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

# One thread: reductions then add up in one order, and the suite leaves the other cores alone.
torch.set_num_threads(1)

# The same draws on every machine and every day: a red test can be run again by anyone. No deadline: shared machines stall.
# Without the phase that explains a failure, which takes minutes.
settings.register_profile(
    "quicksilver",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=12,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
settings.load_profile("quicksilver")


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The data folder (`QUICKSILVER_DATA`, else ../shared/data); tests that need it are skipped where it is absent."""
    import tiny  # and with it every model family: seconds that tests of tables and configs need not pay

    root = tiny.data_folder()
    if root is None:
        pytest.skip(tiny.NO_DATA)
    return root
