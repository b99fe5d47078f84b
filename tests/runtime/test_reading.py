"""Files that somebody else wrote: no device, no pipe, nothing endless, nothing nested ten thousand times."""

import os
from pathlib import Path

import pytest
import yaml

import quicksilver
from quicksilver.runs.config import check_yaml
from quicksilver.runtime.reading import MOST_BYTES, parse_json, read_bytes, read_json

BOMB = "a0: &a0 x\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))


def test_what_is_no_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MOST_BYTES + 1)  # a hole: it takes no room
    (tmp_path / "link").symlink_to("/dev/zero")
    refused = {"pipe": "pipe or a device", "link": "pipe or a device", ".": "a folder", "large": "at most 2", "none": "No such"}
    for name, says in refused.items():
        with pytest.raises(OSError, match=says):
            read_bytes(tmp_path / name)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "{", "\x00", "nul"])
def test_what_is_no_json_is_a_value_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
    (tmp_path / "file").write_bytes(text.encode() or b"\xff")
    with pytest.raises(ValueError):
        read_json(tmp_path / "file")


def test_a_yaml_whose_aliases_explode_is_refused_and_one_that_uses_them_is_not(tmp_path: Path) -> None:
    (tmp_path / "bomb.yaml").write_text(BOMB)
    with pytest.raises(ValueError, match="stand for more than 100,000 values"):
        check_yaml(tmp_path / "bomb.yaml")
    (tmp_path / "plain.yaml").write_text("a: &a [1, 2]\nb: *a\nc: {d: *a}\n")
    check_yaml(tmp_path / "plain.yaml")
    (tmp_path / "torn.yaml").write_text("a: [1,")
    with pytest.raises(yaml.YAMLError):
        check_yaml(tmp_path / "torn.yaml")


def test_files_of_others_are_read_by_these_functions_alone() -> None:
    """`json.loads` elsewhere reads what this process wrote just now."""
    folder = Path(quicksilver.__file__).parent
    own = {
        "runtime/reading.py", "records/store.py", "records/archive.py", "data/windows.py", "report/site/pages.py",
        "fitting/training.py",
    }  # fmt: skip
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.py") if "json.load" in path.read_text(encoding="utf-8")}
    assert found <= own
