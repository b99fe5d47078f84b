"""What of a run was set before its text was scored, and on which texts: percentiles, fitted maps, schedules, trained gates, lenses.

Every file that a module reads carries what it was made on, and a record carries the digests of these files. So the texts are known of each
record whose files are in the package, or beside the model that the run had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from quicksilver.models.loading import EMBEDDED
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.reading import parse_json

BESIDE = ("predicted_kv", "learned_halting", "tuned_lens")  # folders beside a model
_OF_FILES = ("predicted_kv", "gates", "tuned_lens")  # what digests of an identity begin with
THRESHOLDS = "thresholds"
Texts = dict[str, int]  # name of a text -> windows of its calibrating part


def calibration_provenance(
    digests: Mapping[str, str], dataset: str, calibration: Mapping[str, Any] | None, folders: Iterable[Path] = ()
) -> dict[str, Texts]:
    """What was set -> on which texts; empty: nothing was.

    Args:
        digests: of the run's identity.
        dataset: name of the run's text, whose calibrating part percentiles are taken from.
        calibration: the record's entry; None: the run was not calibrated.
        folders: further models' folders with such files; those of the package are always looked into.

    Returns:
        Files under their names (`predicted_kv/schedules.yaml`), percentiles and what is fitted when a run begins under `thresholds`. A file that is
        nowhere any more has no texts.
    """
    known = dict(_of_package()) | _by_digest(folders)
    found: dict[str, Texts] = {}
    for key, digest in sorted(digests.items()):
        kind, _, rest = key.partition(".")
        if kind in _OF_FILES:
            found[f"{kind}/{rest.partition('.')[2]}"] = texts_of(known[digest]) if digest in known else {}
    if calibration is not None:
        found[THRESHOLDS] = {dataset: int(calibration["windows"])}
    return found


def texts_of(path: Path) -> Texts:
    """The texts that a file of maps, schedules, gates or a lens was made on, with how many windows of each.

    Raises:
        ConfigError: the file does not say.
    """
    try:
        if path.suffix == ".yaml":
            windows = yaml.safe_load(path.read_text(encoding="utf-8"))["chosen_on"]["windows"]
            return {str(name): int(count) for name, count in windows.items()}
        from safetensors import safe_open

        with safe_open(path, framework="np") as file:
            provenance = parse_json(file.metadata()["quicksilver"])["provenance"]
        texts = (provenance if "texts" in provenance else provenance["text"])["texts"]
        return {str(name): int(entry["windows"]) for name, entry in texts.items()}
    except (KeyError, TypeError, AttributeError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} does not say which text it was made on ({type(error).__name__}: {error}).") from error


@cache
def _of_package() -> tuple[tuple[str, Path], ...]:
    return tuple(_by_digest(path for path in EMBEDDED.glob("*") if path.is_dir()).items())


def _by_digest(folders: Iterable[Path]) -> dict[str, Path]:
    paths = (path for folder in folders for beside in BESIDE for path in sorted((folder / beside).glob("*")))
    return {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in paths if path.suffix in (".yaml", ".safetensors")}
