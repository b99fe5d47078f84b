"""Measure a model's drift and entropy on text, and keep their percentiles per layer.

quicksilver calibrate model=gpt2 dataset=wikitext103
quicksilver calibrate model=reference-gpt2 text=my.txt dataset.calibration_windows=32

Prints a file that serves as `calibration=FILE` wherever a threshold is a percentile, such as p25. Asked again with the same model and
text it measures nothing and names the same file. `quicksilver run` calibrates by itself and does not need it.

Keys of its own:
  text=FILE         a UTF-8 text file; default: the calibration part of the dataset
  kv=true           also the attention that halted tokens receive, for tau_kv of kv_skipping
  last_queries=16   with kv=true: queries that observe
  output=FOLDER     default: results_dir/calibration
All others are those of `quicksilver run`: model, dataset, dataset.calibration_windows, protocol.window_tokens, data.root, results_dir …
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quicksilver.cli.arguments import split
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Options, Positive

if TYPE_CHECKING:
    from quicksilver.runs.config import RunConfig


@dataclass
class Keys(Options):
    """The command's own keys, as its help has them."""

    text: str | None = None
    kv: bool = False
    last_queries: Positive = 16
    output: str | None = None


def main(words: Sequence[str]) -> int:
    """Measure, or find what was measured; print the file; returns the exit code.

    Raises:
        ConfigError: a model, text or value that cannot be had.
    """
    options, overrides = split(words, Keys, "calibrate")
    from quicksilver.runs.config import compose

    config = compose(overrides)
    if config.modules:
        raise ConfigError(f"modules=[{','.join(config.modules)}]: calibrate measures the dense model; leave modules out.")
    if options.text is not None:
        config = _of_file(config, Path(options.text))
    print(f"calibration={calibrate(config, options)}")
    return 0


def _of_file(config: RunConfig, path: Path) -> RunConfig:
    from quicksilver.data.spec import DatasetConfig, FilesConfig

    if not path.is_file():
        raise ConfigError(f"text={path}: there is no such file.")
    files = FilesConfig(test=str(path.resolve()), calibration=str(path.resolve()))
    windows = config.dataset.calibration_windows
    return dataclasses.replace(
        config, dataset=DatasetConfig(name="file", reader="text", files=files, calibration_windows=windows)
    )


def calibrate(config: RunConfig, options: Keys) -> Path:
    """The file with the calibration of the config's model and calibration text, made if need be."""
    from tqdm import tqdm

    from quicksilver.modules.calibration import SIGNALS, calibrated, calibration_path
    from quicksilver.modules.signals import AttentionReceived
    from quicksilver.runs.context import RunContext

    context = RunContext()
    text, windows = context.text(config, "calibration"), context.windows(config, "calibration").ids
    loaded = context.model(config)
    signals = [*SIGNALS, AttentionReceived(options.last_queries, "max")] if options.kv else list(SIGNALS)
    folder = Path(options.output or Path(config.results_dir) / "calibration")
    path = calibration_path(folder, loaded.model, windows, signals)
    found = path.exists()
    calibration = calibrated(
        folder,
        loaded.model,
        windows,
        signals=signals,
        batch_size=config.protocol.batch_size,
        source={"model": loaded.files.source, "text": text.source},
        progress=lambda batches: tqdm(batches, desc="calibrating", unit="batch", disable=None),
    )
    print(f"{'found' if found else 'measured'}: {len(windows)} windows of {config.protocol.window_tokens} tokens, {text.source}")
    print("layer  p25 relative drift  p25 entropy (nats)")
    rows = zip(calibration.thresholds("drift-relative", 25), calibration.thresholds("entropy-logit_lens", 25), strict=True)
    for layer, (drift, entropy) in enumerate(list(rows)[:-1]):  # after the last layer nothing halts
        print(f"{layer:5}  {drift:18.4f}  {entropy:18.3f}")
    return path
