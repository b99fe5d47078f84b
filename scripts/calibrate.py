"""Measure a model's drift and entropy on text, and keep their percentiles per layer.

`python scripts/calibrate.py --model gpt2 --text my.txt` names a file that serves as `calibration=FILE` wherever a threshold is a
percentile, such as p25. Run again with the same model and text it measures nothing and names the same file.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from omegaconf import OmegaConf
from tqdm import tqdm

from quicksilver.data.spec import DatasetConfig, FilesConfig
from quicksilver.data.text import read_text
from quicksilver.data.windows import encode
from quicksilver.models.loading import load, locate
from quicksilver.models.spec import DTYPES, ModelConfig
from quicksilver.modules.calibration import SIGNALS, calibrated, calibration_path
from quicksilver.modules.signals import AttentionReceived
from quicksilver.runtime.errors import ConfigError, QuickSilverError

CONF = Path(__file__).resolve().parent.parent / "conf"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference-gpt2", help="a name in conf/model, a folder, or a hub id")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", type=Path, help="a UTF-8 text file")
    text.add_argument(
        "--dataset", default="python-docs", help="a name in conf/dataset: its calibration part (default: %(default)s)"
    )
    parser.add_argument("--windows", type=int, default=16, help="at most this many, spread over the text (default: %(default)s)")
    parser.add_argument("--window-tokens", type=int, default=512, help="default: %(default)s")
    parser.add_argument(
        "--kv", action="store_true", help="also the attention that halted tokens receive, for KVSkipping's tau_kv"
    )
    parser.add_argument("--last-queries", type=int, default=16, help="with --kv: queries that observe (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--device-map", default="cpu", help="cpu, cuda:0, auto (default: %(default)s)")
    root = os.environ.get("QUICKSILVER_DATA")
    parser.add_argument("--data-root", type=Path, default=root and Path(root), help="default: $QUICKSILVER_DATA")
    parser.add_argument("--output", type=Path, default=Path("results/calibration"), help="folder (default: %(default)s)")
    return parser.parse_args(argv)


def model_config(args: argparse.Namespace) -> ModelConfig:
    known = CONF / "model" / f"{args.model}.yaml"
    config = OmegaConf.structured(ModelConfig)
    given = OmegaConf.load(known) if known.is_file() else {"name": Path(args.model).name, "path": args.model}
    return OmegaConf.to_object(OmegaConf.merge(config, given, {"dtype": args.dtype, "device_map": args.device_map}))


def dataset_config(args: argparse.Namespace) -> DatasetConfig:
    if args.text is not None:
        return DatasetConfig(name="file", reader="text", files=FilesConfig(calibration=str(args.text.resolve())))
    known = CONF / "dataset" / f"{args.dataset}.yaml"
    if not known.is_file():
        there = ", ".join(sorted(p.stem for p in known.parent.glob("*.yaml")))
        raise ConfigError(
            f"--dataset {args.dataset} is not in conf/dataset. There are: {there}. A file of your own: --text FILE."
        )
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DatasetConfig), OmegaConf.load(known)))


def main(argv: list[str] | None = None) -> Path:
    """Returns the file with the calibration."""
    args = arguments(argv)
    wanted_model, wanted_text = model_config(args), dataset_config(args)
    text = read_text(wanted_text, "calibration", root=args.data_root)
    loaded = load(wanted_model, locate(wanted_model, args.data_root))
    windows = encode(text.text, loaded.tokenizer, args.window_tokens, args.windows).ids
    signals = [*SIGNALS, AttentionReceived(args.last_queries, "max")] if args.kv else list(SIGNALS)
    path = calibration_path(args.output, loaded.model, windows, signals)
    found = path.exists()
    calibration = calibrated(
        args.output,
        loaded.model,
        windows,
        signals=signals,
        batch_size=args.batch_size,
        source={"model": loaded.files.source, "text": text.source},
        progress=lambda batches: tqdm(batches, desc="calibrating", unit="batch"),
    )
    print(f"{'found' if found else 'measured'}: {len(windows)} windows of {args.window_tokens} tokens, {text.source}")
    print("layer  p25 relative drift  p25 entropy (nats)")
    rows = zip(calibration.thresholds("drift-relative", 25), calibration.thresholds("entropy-logit_lens", 25), strict=True)
    for layer, (drift, entropy) in enumerate(list(rows)[:-1]):  # after the last layer nothing halts
        print(f"{layer:5}  {drift:18.4f}  {entropy:18.3f}")
    print(f"calibration={path}")
    return path


if __name__ == "__main__":
    try:
        main()
    except QuickSilverError as error:
        sys.exit(f"error: {error}")
