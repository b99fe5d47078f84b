"""Folders of a test: git in one, whatever the user's own settings are, and the files of one. Nothing here is a test."""

import subprocess
from pathlib import Path

_SETTINGS = ("user.name=t", "user.email=t@localhost", "commit.gpgsign=false", "core.hooksPath=/dev/null")


def git(where: Path, *words: str) -> None:
    """Run a command of git there; raises CalledProcessError where it fails."""
    settings = [word for setting in _SETTINGS for word in ("-c", setting)]
    subprocess.run(["git", *settings, *words], cwd=where, check=True, capture_output=True)


def below(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, by its path in it."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
