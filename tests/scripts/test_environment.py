"""The environment: pip's settings reach uv, pip takes over where uv fails, and nothing here names an index. Nothing is installed."""

from pathlib import Path

import environment
import pytest

LISTED = """:env:.cert='/etc/certs.crt'
:env:.find-links='/wheels /more wheels'
global.extra-index-url='https://one.example/simple https://two.example/simple'
global.find-links='/not this'
install.index-url='https://main.example/simple'
freeze.timeout='10'
"""


def test_pip_s_settings_reach_uv():
    options, variables = environment.uv_takes(environment.pip_settings(LISTED))
    assert options == [
        "--index-url", "https://main.example/simple", "--extra-index-url", "https://one.example/simple",
        "--extra-index-url", "https://two.example/simple", "--find-links", "/wheels", "--find-links", "/more", "--find-links", "wheels",
    ]  # fmt: skip
    assert variables == {"SSL_CERT_FILE": "/etc/certs.crt"}
    assert environment.uv_takes(environment.pip_settings("")) == ([], {})
    assert environment.uv_takes(environment.pip_settings("global.no-index='true'\n")) == (["--no-index"], {})


class Machine:
    """Remembers commands; those that contain a word of `broken` fail."""

    def __init__(self, *broken: str) -> None:
        self.broken, self.ran = broken, list[str]()

    def run(self, *command: object, env: object = None) -> str | None:
        line = " ".join(map(str, command))
        self.ran.append(line)
        return next((f"no {word}" for word in self.broken if word in line), None)


@pytest.mark.parametrize(("broken", "code", "said", "last"), [
    ((), 0, "is ready", "--editable"),
    (("--target",), 0, "Not by uv (uv cannot be had)", "--editable"),
    (("--index-strategy",), 0, "Not by uv (no --index-strategy)", "--editable"),
    (("--requirement",), 1, "cannot be installed: no --requirement", "-m pip install"),
    (("-m venv",), 1, "cannot be made: no -m venv", "-m venv"),
])  # fmt: skip
def test_pip_takes_over_where_uv_fails(broken, code, said, last, tmp_path: Path, monkeypatch, capsys):
    machine = Machine(*broken)
    monkeypatch.setattr(environment, "run", machine.run)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    monkeypatch.setattr(environment.subprocess, "run", lambda *a, **k: environment.subprocess.CompletedProcess([], 0, LISTED))
    assert environment.main([str(tmp_path / "venv")]) == code
    assert said in capsys.readouterr().out
    assert last in machine.ran[-1]
    by_pip = [line for line in machine.ran if "-m pip install" in line and "--requirement" in line]
    assert bool(by_pip) == (said.startswith("Not by uv") or "cannot be installed" in said)


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


def test_the_environment_of_another_clone_is_not_taken_over(tmp_path):
    (other := tmp_path / "other clone").mkdir()
    about = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages" / "quicksilver_lm-1.0.0.dist-info"
    about.mkdir(parents=True)
    for url, found in ((other, other), (tmp_path / "gone", None), (environment.ROOT, None)):
        (about / "direct_url.json").write_text(f'{{"url": "{url.as_uri()}", "dir_info": {{"editable": true}}}}')
        assert environment.of_another_clone(tmp_path / ".venv") == found
