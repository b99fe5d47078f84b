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
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
UV = "uv>=0.5,<1"
# The indexes of pip are all asked and the best version is taken; uv would stop at the first index that knows the name.
STRATEGY = ("--index-strategy", "unsafe-best-match")


def say(message: str) -> None:
    print(message, flush=True)


def pip_settings(listed: str) -> dict[str, list[str]]:
    """Option to its values, from what `pip config list` printed: those of everything, then of `install`, then of the environment win."""
    found: dict[str, dict[str, str]] = {}
    for line in listed.splitlines():
        name, equals, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if equals and section in ("global", "install", ":env:"):
            found.setdefault(section, {})[option] = str(ast.literal_eval(value))
    merged = {**found.get("global", {}), **found.get("install", {}), **found.get(":env:", {})}
    return {option: value.split() for option, value in merged.items()}


# What pip calls a setting -> the option of `uv pip install`, or the environment variable, that says the same.
UV_OPTIONS = {
    "index-url": "--index-url", "extra-index-url": "--extra-index-url", "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}  # fmt: skip
UV_VARIABLES = {
    "cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY", "default-timeout": "UV_HTTP_TIMEOUT", "timeout": "UV_HTTP_TIMEOUT",
}  # fmt: skip


def uv_options(settings: Mapping[str, Sequence[str]]) -> list[str]:
    """Options of `uv pip install` that say what pip's settings say."""
    options = [word for pip, uv in UV_OPTIONS.items() for value in settings.get(pip, ()) for word in (uv, value)]
    return options + ["--no-index"] * (settings.get("no-index", ["false"])[0].lower() in ("1", "true", "yes", "on"))


def uv_environment(settings: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Settings of pip that uv takes as environment variables."""
    return {uv: settings[pip][0] for pip, uv in UV_VARIABLES.items() if settings.get(pip)}


def run(*command: str | Path, env: Mapping[str, str] | None = None) -> str | None:
    """Run quietly; None, or the last line of what went wrong."""
    done = subprocess.run(
        [*map(str, command)], env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.returncode}"


def find_uv(python: Path, folder: Path) -> Path | None:
    """uv of this machine, or a copy that pip puts into `folder`; None: it cannot be had."""
    known = shutil.which("uv")
    if known is not None:
        return Path(known)
    trouble = run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", folder, UV)
    return folder / "bin" / "uv" if trouble is None else None


def by_uv(python: Path) -> str | None:
    """Install with uv; None, or why it did not do."""
    listed = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    settings = pip_settings(listed)
    options, environment = [*uv_options(settings), *STRATEGY], uv_environment(settings)
    with tempfile.TemporaryDirectory(prefix="quicksilver-uv-") as folder:
        uv = find_uv(python, Path(folder))
        if uv is None:
            return "uv cannot be had"
        install: tuple[str | Path, ...] = (uv, "pip", "install", "--quiet", "--python", python, *options)
        trouble = run(*install, "--requirement", LOCK, env=environment)
        return trouble or run(*install, "--no-deps", "--no-build-isolation", "--editable", ROOT, env=environment)


def by_pip(python: Path) -> str | None:
    """Install with pip; None, or the last line of its complaint."""
    install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    trouble = run(*install, "--requirement", LOCK)
    return trouble or run(*install, "--no-deps", "--no-build-isolation", "--editable", ROOT)


def of_another_clone(venv: Path) -> Path | None:
    """The other clone, still there, whose code this environment has."""
    for path in venv.glob("lib/python*/site-packages/quicksilver_lm-*.dist-info/direct_url.json"):
        other = Path(urlsplit(json.loads(path.read_text(encoding="utf-8"))["url"]).path)
        if other.is_dir() and other.resolve() != ROOT:
            return other
    return None


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    venv = Path(arguments[0] if arguments else ".venv")
    python = venv / "bin" / "python"
    began = time.monotonic()
    if not python.exists() or run(python, "-m", "pip", "--version") is not None:
        if venv.is_dir() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").is_file():
            say(f"{venv} is no virtual environment, and making one would remove what is in it: give another folder, make VENV=…")
            return 1
        say(f"Making {venv} …")
        trouble = run(sys.executable, "-m", "venv", "--clear", venv)
        if trouble is not None:
            say(f"{venv} cannot be made: {trouble}")
            return 1
    if (other := of_another_clone(venv)) is not None:
        say(
            f"{venv} is the environment of {other}, which would run this clone's code from now on: give another folder, make VENV=…"
        )
        return 1
    pinned = sum(1 for line in LOCK.read_text(encoding="utf-8").splitlines() if "==" in line)
    say(f"Installing the {pinned} packages of {LOCK.name} …")
    trouble = by_uv(python)
    if trouble is not None:
        say(f"Not by uv ({trouble}): pip does it, which takes minutes …")
        trouble = by_pip(python)
    if trouble is not None:
        say(f"The environment cannot be installed: {trouble}")
        return 1
    say(
        f"The environment is ready: {time.monotonic() - began:.0f} s. `source {venv.name}/bin/activate` puts its commands on your path."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
