"""This clone and its pages; folders of a test: git in one, whatever the user's own settings are, and the files of one. Nothing here is a test."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_SETTINGS = ("user.name=t", "user.email=t@localhost", "commit.gpgsign=false", "core.hooksPath=/dev/null")


def git(where: Path, *words: str) -> None:
    """Run a command of git there; raises CalledProcessError where it fails."""
    settings = [word for setting in _SETTINGS for word in ("-c", setting)]
    subprocess.run(["git", *settings, *words], cwd=where, check=True, capture_output=True)


def below(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, by its path in it."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def blocks(page: Path, language: str) -> list[str]:
    """The code of that language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
