"""Train learned halting, measure it, and write what was found: `python scripts/train_halting.py detection`.

`detection`: the study of docs/learned-halting.md. Every training is resumable: run the same command again after a kill. What is finished in
`--checkpoints` is not repeated; `--only` trains the parts that are named and measures nothing, so that seeds can be trained side by side.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from quicksilver.detection import measured
from quicksilver.detection.study import LEARNED, RULES, Plan, Seed
from quicksilver.runtime.errors import QuickSilverError

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("dense", "no_layers", "control", *LEARNED, *RULES, "wide_control", "wide_box")


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["detection"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=PARTS, help="train these and measure nothing")
    parser.add_argument("--no-wide", action="store_true", help="leave the wider detector out")
    parser.add_argument("--checkpoints", type=Path, default=ROOT / "outputs" / "detection")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "detection")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scenes", type=int, default=Plan().scenes)
    parser.add_argument("--validation", type=int, default=Plan().validation)
    parser.add_argument("--steps", type=int, default=Plan().steps)
    parser.add_argument("--tuning-steps", type=int, default=Plan().tuning_steps)
    parser.add_argument("--tokens", type=float, default=Plan().tokens, help="share of token-layers that gates are trained for")
    return parser.parse_args(arguments)


def progress(name: str, steps: range) -> Iterable[int]:
    return tqdm(steps, desc=name, initial=steps.start, total=steps.stop, mininterval=5.0, leave=False)


def train_part(seed: Seed, part: str) -> None:
    """One detector of one seed, and whatever it starts from."""
    wide, name = part.startswith("wide_"), part.removeprefix("wide_")
    if name == "dense":
        seed.dense()
    elif name == "no_layers":
        seed.without_layers()
    elif name == "control":
        seed.control(wide)
    elif name in LEARNED:
        seed.learned(name, wide)
    else:
        seed.ruled(name)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    torch.set_num_threads(options.threads)
    plan = Plan(
        scenes=options.scenes, validation=options.validation, steps=options.steps, tuning_steps=options.tuning_steps,
        tokens=options.tokens, seeds=tuple(options.seeds),
    )  # fmt: skip
    seeds = [Seed(plan, seed, options.checkpoints, progress) for seed in options.seeds]
    wide = not options.no_wide
    for seed in seeds:
        for part in options.only or PARTS:
            if wide or not part.startswith("wide_"):
                train_part(seed, part)
    if options.only:
        return 0
    rows, found = measured.evaluations(seeds, wide, print)
    frames = {
        "evaluations": rows,
        "differences": measured.differences(found, len(seeds)),
        "curves": measured.curves(seeds),
        "gradients": measured.gradients(seeds[0]),
        "scene": measured.scene(seeds[0]),
        "scene_boxes": measured.boxes(seeds[0]),
        "timing": measured.timing(seeds[0], wide),
        "about": measured.about(seeds),
    }
    print("Written: " + ", ".join(map(str, measured.write(frames, options.output))))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QuickSilverError as error:
        sys.exit(f"train_halting: {error}")
