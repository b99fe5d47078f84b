"""Shared by all tests: one thread, reproducible draws, and the data folder where there is one."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import imitation_hub
import pytest
import thinning
from hypothesis import Phase, settings


def pytest_configure(config: pytest.Config) -> None:
    os.environ["HF_ENDPOINT"] = imitation_hub.HUB.endpoint  # no test reaches the real one
    os.fsync = lambda descriptor: None  # no test cuts the power, and thousands of small files wait for the disk
    if getattr(config, "cache", None):  # proofs of this processor's kernels: once for all processes, not in the user's folder
        os.environ["QUICKSILVER_CACHE"] = str(config.cache.mkdir("kernels"))
    thinning.whole = config.option.markexpr != "not slow"
    # The same draws on every machine and every day: a red test can be run again by anyone. No deadline: shared machines stall.
    # Without the phase that explains a failure, which takes minutes.
    phases = [Phase.explicit, Phase.generate, Phase.shrink]
    settings.register_profile(
        "quicksilver", deadline=None, derandomize=True, database=None, max_examples=thinning.draws(12), phases=phases
    )
    settings.load_profile("quicksilver")
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):  # who hands tests out needs no torch
        import torch

        # One thread: reductions then add up in one order, and the suite leaves the other cores alone.
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first: at the end one worker would wait for the other."""
    items.sort(
        key=lambda item: (
            not item.nodeid.startswith(("tests/test_golden.py", "tests/cli/test_new.py", "tests/cli/test_calibrate.py"))
        )
    )


def pytest_collection_finish() -> None:
    """Thousands of tests and the libraries behind them stay: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def data_root() -> Path:
    import tiny  # and with it every model family: seconds that tests of tables and configs need not pay

    return tiny.data_folder()


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[imitation_hub.Hub]:
    """An imitation of the hub, empty, and an empty cache; clients do not wait before they try again."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("time.sleep", lambda _: None)
    with imitation_hub.HUB.serving() as serving:
        yield serving
    huggingface_hub.close_session()
    huggingface_hub.HfFileSystem.clear_instance_cache()


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> list[str]:
    """Overrides of a quick dense run on a tiny model; nobody changes its files."""
    from harness_world import make_world

    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def words(world, tmp_path) -> list[str]:
    """The same with a results folder of its own."""
    return [*world, f"results_dir={tmp_path / 'results'}"]


@pytest.fixture
def prints(capsys, monkeypatch) -> Callable[..., Any]:
    """Gives words to the command line, which must end with this exit code; returns what this command printed, `out` and `err`."""
    monkeypatch.setattr("quicksilver.runs.estimate._SAMPLE_S", 0.02)
    from quicksilver.cli import main as console

    def ask(*words: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert console.main([*words]) == code
        return capsys.readouterr()

    return ask


@pytest.fixture
def refused(prints) -> Callable[..., str]:
    """Gives words to the command line, which must refuse them with exit code 2 and print nothing else; returns the one line it says."""

    def ask(*words: str) -> str:
        out, err = prints(*words, code=2)
        assert (out, err.count("\n")) == ("", 1), err
        assert err.startswith("quicksilver: ")
        return err

    return ask
