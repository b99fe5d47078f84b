"""python-source: packages of the standard library of the running Python, whole files in the order of their paths.

What a name of a program means stands far back, so code shows whether a model uses its context. The text follows Python's version, as that
of python-docs does: its digest is in the record, and numbers of two versions of Python do not compare.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from quicksilver.data.spec import Part

# Packages that every Python from 3.11 on carries. Their text is removed from what the far-context models learn (scripts/reference_corpus.py).
# reference-gpt2, reference-llama and the ladder learned from docstrings of these packages, though not from their code.
PACKAGES: dict[Part, tuple[str, ...]] = {
    "test": ("concurrent", "email", "logging", "wsgiref", "xml"),
    "calibration": ("html", "http", "xmlrpc"),
}


def python_source(part: Part) -> str:
    """The files of one part, each whole; a package is wholly in one part.

    Raises:
        FileNotFoundError: this Python carries no source of its library.
    """
    return "\n\n".join(path.read_text(encoding="utf-8").strip() for path in source_files(part))


def source_files(part: Part) -> list[Path]:
    """Files of a part below the folder of the standard library, without its tests."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for package in PACKAGES[part]:
        files = sorted(path for path in (library / package).rglob("*.py") if "test" not in path.parts and path.stat().st_size)
        if not files:
            raise FileNotFoundError(f"{library / package} has no Python files: dataset=python-source needs the library's source.")
        found += files
    return found
