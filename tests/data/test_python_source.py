"""python-source: whole files of the running Python, parts that share no package."""

from __future__ import annotations

import ast

import pytest

from quicksilver.data import made_here as source
from quicksilver.data.text import read_text
from quicksilver.runs.config import compose
from quicksilver.runtime.errors import ConfigError


def test_a_part_is_whole_files_of_its_packages_and_parts_share_none():
    parts = {part: source.source_files(part) for part in source.PACKAGES}
    assert not set(parts["test"]) & set(parts["calibration"])
    for part, files in parts.items():
        text = source.python_source(part)
        assert len(text) > 300_000
        assert "test" not in {name for path in files for name in path.parts[-3:-1]}
        assert files[0].read_text(encoding="utf-8").strip() in text
        ast.parse(files[-1].read_text(encoding="utf-8"))


def test_the_dataset_reads_it_and_takes_no_file():
    config = compose(["dataset=python-source"]).dataset
    assert read_text(config, "calibration").text == source.python_source("calibration")


def test_a_python_without_source_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(source.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match="has no Python files: dataset=python-source needs the library's source"):
        read_text(compose(["dataset=python-source"]).dataset)
