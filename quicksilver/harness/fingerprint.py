"""The fingerprint of a run: a hash of everything that decides its result, and of nothing else.

    config        the parts that influence a number (RunConfig.identity)
    text          sha256 of the scored text, and of the calibrating text where something is calibrated on it
    weights       sha256 of weights, architecture and tokenizer files
    code          package version, and a digest of the source files that compute: a changed formula must not find yesterday's
        record

The code digest is taken over syntax trees without docstrings, so comments, formatting and prose cost nobody a rerun. It covers
the files
that the passes import and the files of the modules that this run uses: a new mechanism in a new file leaves all other records
valid.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quicksilver import __version__

PASSES = ("quicksilver.harness.passes", "quicksilver.modules.calibration")
_PACKAGE = Path(__file__).resolve().parents[1]
DIGITS = 20  # hexadecimal: 80 bits


def fingerprint(identity: Mapping[str, Any], digests: Mapping[str, Any], classes: Iterable[type]) -> str:
    """Hash of a run.

    Args:
        identity: the config's part (`RunConfig.identity`).
        digests: of texts, weights and files.
        classes: the runtime modules' classes.
    """
    content = {"config": identity, "digests": digests, "package": __version__, "source": source_digest(classes)}
    return hashlib.sha256(json.dumps(_canonical(content), sort_keys=True, allow_nan=False).encode()).hexdigest()[:DIGITS]


def _canonical(value: Any) -> Any:
    """The same value in one spelling: 1.0 as 1, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(k): _canonical(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def source_digest(classes: Iterable[type] = ()) -> str:
    """Digest of the code that computes a run: the passes, the files of `classes`, and what of this package they import."""
    whole = hashlib.sha256()
    for name, path in sorted(source_files({*PASSES, *(cls.__module__ for cls in classes)}).items()):
        whole.update(f"{name} {_parse(path, name, path.stat().st_mtime_ns).digest}\n".encode())
    return whole.hexdigest()[:DIGITS]


def source_files(roots: Iterable[str]) -> dict[str, Path]:
    """Files by module name: `roots`, and all of this package that they import, directly or not.

    `from package import name` follows the package's `__init__`, `from package.file import name` that file alone.
    """
    found: dict[str, Path] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        path = _source_of(name)
        if name not in found and path is not None:
            found[name] = path
            waiting += _parse(path, name, path.stat().st_mtime_ns).imports
    return found


def _source_of(name: str) -> Path | None:
    first, *rest = name.split(".")
    if first == _PACKAGE.name:  # by path: asking importlib would import the parents, torch with them
        stem = _PACKAGE.joinpath(*rest)
        return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)
    file = getattr(sys.modules.get(name), "__file__", None)  # a user's own mechanism: its class was imported to get here
    return Path(file) if file is not None else None


@dataclass(frozen=True)
class _Source:
    digest: str
    imports: tuple[str, ...]


@cache
def _parse(path: Path, name: str, changed_ns: int) -> _Source:
    """One file as a syntax tree without docstrings; `changed_ns` is part of the question so that an edit is seen."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imports: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        elif isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (parent, node.module) if part)
            imports += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    ours = tuple(module for module in imports if module.split(".")[0] == _PACKAGE.name)
    return _Source(hashlib.sha256(ast.dump(tree).encode()).hexdigest(), ours)
