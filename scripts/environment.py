"""Make the virtual environment: what requirements.lock pins, and this clone, editable.

python scripts/environment.py .venv

uv installs it in seconds; it does not read pip's configuration, so pip's indexes, links and certificate are handed on. Where uv cannot be
had or fails, pip does the same in minutes. Standard library only: nothing is installed yet.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
UV = "uv>=0.5,<1"
# The indexes of pip are all asked and the best version is taken; uv would stop at the first index that knows the name.
STRATEGY = ("--index-strategy", "unsafe-best-match")


def say(message: str) -> None:
    print(message, flush=True)


def pip_settings(listed: str) -> dict[str, list[str]]:
    """Option to its values, from what `pip config list` printed: those of everything, then of `install`, then of the environment win."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        name, equals, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if equals and section in found:
            found[section][option] = str(ast.literal_eval(value))
    return {option: value.split() for section in found.values() for option, value in section.items()}


# What pip calls a setting -> the option of `uv pip install`, or the environment variable, that says the same.
UV_NAMES = {
    "index-url": "--index-url", "extra-index-url": "--extra-index-url", "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host", "cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT", "timeout": "UV_HTTP_TIMEOUT",
}  # fmt: skip


def uv_takes(settings: Mapping[str, Sequence[str]]) -> tuple[list[str], dict[str, str]]:
    """Options and environment variables of `uv pip install` that say what pip's settings say."""
    given = [(uv, settings[pip]) for pip, uv in UV_NAMES.items() if settings.get(pip)]
    options = [word for uv, values in given if uv.startswith("--") for value in values for word in (uv, value)]
    options += ["--no-index"] * (settings.get("no-index", ["false"])[0].lower() in ("1", "true", "yes", "on"))
    return options, {uv: values[0] for uv, values in given if not uv.startswith("--")}


def run(*command: str | Path, env: Mapping[str, str] | None = None) -> str | None:
    """Run quietly; None, or the last line of what went wrong."""
    words, given = [*map(str, command)], {**os.environ, **(env or {})}
    done = subprocess.run(words, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.returncode}"


def by_uv(python: Path) -> str | None:
    """Install with uv of this machine, or with a copy that pip fetches; None, or why it did not do."""
    listed = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    options, environment = uv_takes(pip_settings(listed))
    with tempfile.TemporaryDirectory(prefix="quicksilver-uv-") as folder:
        uv = shutil.which("uv")
        if uv is None and run(*pip(python), "--no-deps", "--target", folder, UV) is not None:
            return "uv cannot be had"
        command = (uv or f"{folder}/bin/uv", "pip", "install", "--quiet", "--python", str(python))
        return installed((*command, *options, *STRATEGY), environment)


def pip(python: Path) -> tuple[str | Path, ...]:
    return python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"


def installed(install: Sequence[str | Path], env: Mapping[str, str] | None = None) -> str | None:
    """Install what is pinned, then this clone; None, or the last line of the complaint."""
    trouble = run(*install, "--requirement", LOCK, env=env)
    return trouble or run(*install, "--no-deps", "--no-build-isolation", "--editable", ROOT, env=env)


def of_another_clone(venv: Path) -> Path | None:
    """The other clone, still there, whose code this environment has."""
    for path in venv.glob("lib/python*/site-packages/quicksilver_lm-*.dist-info/direct_url.json"):
        other = Path(unquote(urlsplit(json.loads(path.read_text(encoding="utf-8"))["url"]).path))
        if other.is_dir() and other.resolve() != ROOT:
            return other
    return None


def main(arguments: Sequence[str]) -> int:
    venv = Path(arguments[0] if arguments else ".venv")
    python = venv / "bin" / "python"
    began = time.monotonic()
    if not python.exists() or run(python, "-m", "pip", "--version") is not None:
        if venv.is_dir() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").is_file():
            say(f"{venv} is no virtual environment, and making one would remove what is in it: give another folder, make VENV=…")
            return 1
        say(f"Making {venv} …")
        if (trouble := run(sys.executable, "-m", "venv", "--clear", venv)) is not None:
            say(f"{venv} cannot be made: {trouble}")
            return 1
    if (other := of_another_clone(venv)) is not None:
        risk = "which would run this clone's code from now on"
        say(f"{venv} is the environment of {other}, {risk}: give another folder, make VENV=…")
        return 1
    pinned = sum("==" in line for line in LOCK.read_text(encoding="utf-8").splitlines())
    say(f"Installing the {pinned} packages of {LOCK.name} …")
    if (trouble := by_uv(python)) is not None:
        say(f"Not by uv ({trouble}): pip does it, which takes minutes …")
        trouble = installed(pip(python))
    if trouble is not None:
        say(f"The environment cannot be installed: {trouble}")
        return 1
    took, how = f"{time.monotonic() - began:.0f} s", f"`source {venv.name}/bin/activate` puts its commands on your path"
    say(f"The environment is ready: {took}. {how}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
