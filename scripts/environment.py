"""Make the virtual environment: what requirements.lock pins, and this clone, editable.

python scripts/environment.py .venv

Where uv is installed and can reach its index it does this in seconds; else pip, with its own settings, in minutes. Standard library only: nothing
is installed yet.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"


def run(*command: str | Path) -> str | None:
    """Run quietly; None, or the last line of what went wrong."""
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return None if done.returncode == 0 else lines[-1] if lines else f"exit code {done.returncode}"


def install(*command: str | Path) -> str | None:
    """Install what is pinned, then this clone, by `command`; None, or the last line of its complaint."""
    return run(*command, "--quiet", "--requirement", LOCK) or run(
        *command, "--quiet", "--no-deps", "--no-build-isolation", "--editable", ROOT
    )


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    venv = Path(arguments[0] if arguments else ".venv")
    python, trouble = venv / "bin" / "python", None
    began = time.monotonic()
    if not python.exists() or run(python, "-m", "pip", "--version") is not None:
        if venv.is_dir() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").is_file():
            print(
                f"{venv} is no virtual environment, and making one would remove what is in it: give another folder, make VENV=…"
            )
            return 1
        print(f"Making {venv} …", flush=True)
        trouble = run(sys.executable, "-m", "venv", "--clear", venv)
    if trouble is None:
        pinned = sum("==" in line for line in LOCK.read_text(encoding="utf-8").splitlines())
        print(f"Installing the {pinned} packages of {LOCK.name} …", flush=True)
        uv = shutil.which("uv")
        trouble = "it is not installed" if uv is None else install(uv, "pip", "install", "--python", python)
        if trouble is not None:
            print(f"Not by uv ({trouble}): pip does it, which takes minutes …", flush=True)
            trouble = install(python, "-m", "pip", "install", "--disable-pip-version-check")
    if trouble is not None:
        print(f"The environment cannot be made: {trouble}")
        return 1
    print(f"The environment is ready: {time.monotonic() - began:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
