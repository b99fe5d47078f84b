"""Every module of the package and of experiments/ can be imported: type checking skips what it cannot find, and lists of files go stale."""

from __future__ import annotations

import importlib
from pathlib import Path

OPTIONAL = {"lm_eval", "torchao", "submitit", "ray", "optuna", "mauve", "spacy"}


def test_every_module_imports() -> None:
    names = []
    for package in map(importlib.import_module, ("quicksilver", "quicksilver.experiments", "quicksilver.studies")):
        root = Path(next(iter(package.__path__)))
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            names.append(".".join((package.__name__, *(part for part in parts if part not in ("__init__",)))))
    assert len(names) > 200
    for name in names:
        if name.endswith("__main__"):
            continue  # runs the command
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in OPTIONAL:
                raise
