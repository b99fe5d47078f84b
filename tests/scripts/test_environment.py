"""The environment: pip takes over where uv fails, and nothing here names an index. Nothing is installed."""

from __future__ import annotations

from pathlib import Path

import environment
import pytest


class Machine:
    """Remembers commands; those that contain a word of `broken` fail."""

    def __init__(self, *broken: str) -> None:
        self.broken, self.ran = broken, list[str]()

    def run(self, *command: object) -> str | None:
        line = " ".join(map(str, command))
        self.ran.append(line)
        return next((f"no {word}" for word in self.broken if word in line), None)


@pytest.mark.parametrize(
    ("uv", "broken", "code", "said", "last"),
    [
        ("/bin/uv", (), 0, "is ready", "/bin/uv pip install"),
        (None, (), 0, "Not by uv (it is not installed)", "-m pip install"),
        ("/bin/uv", ("/bin/uv",), 0, "Not by uv (no /bin/uv)", "-m pip install"),
        (None, ("--requirement",), 1, "cannot be made: no --requirement", "-m pip install"),
        (None, ("-m venv",), 1, "cannot be made: no -m venv", "-m venv"),
    ],
)
def test_pip_takes_over_where_uv_fails(uv, broken, code, said, last, tmp_path: Path, monkeypatch, capsys):
    machine = Machine(*broken)
    monkeypatch.setattr(environment, "run", machine.run)
    monkeypatch.setattr(environment.shutil, "which", lambda name: uv)
    assert environment.main([str(tmp_path / "venv")]) == code
    assert said in capsys.readouterr().out
    assert last in machine.ran[-1]
    assert ("--editable" in machine.ran[-1]) == (code == 0)


def test_a_folder_that_is_no_environment_is_not_cleared(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "thesis.tex").write_text("mine")
    monkeypatch.setattr(environment, "run", (machine := Machine()).run)
    assert environment.main([str(tmp_path)]) == 1
    assert f"{tmp_path} is no virtual environment" in capsys.readouterr().out
    assert machine.ran == []


def test_what_went_wrong_is_its_last_line():
    assert environment.run("sh", "-c", "echo first; echo last; exit 3") == "last"
    assert environment.run("sh", "-c", "exit 3") == "exit code 3"
    assert environment.run("true") is None
