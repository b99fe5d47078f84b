"""Train learned halting, on a detector or on a language model (docs/learned-halting.md).

python scripts/train_halting.py detection
python scripts/train_halting.py language --model reference-gpt2 --gates 2 5 8 11 --name drop
python scripts/train_halting.py language --gates 2 5 9 --predict 9 --text far-recall far-copy --name predict-far

`detection` trains every detector of the study, measures them and writes what was found; what is finished in `--checkpoints` is not repeated,
`--processes 2` uses two cores, and `--only` trains the parts that are named and measures nothing. `language` trains the gates of a frozen language model at a budget and writes one
file. Either is resumable: run the same command again after a kill.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch
from tqdm import tqdm
from training_loop import add_options

from quicksilver.fitting.gates import GateRecipe
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.studies.token_halting import frames, runs
from quicksilver.studies.token_halting.runs import MORE, PARTS, Plan, SeedRuns

ROOT = Path(__file__).resolve().parent.parent
HELD_WINDOWS = 32
PLANNED = ("scenes", "validation", "steps", "tuning_steps", "tokens")  # sizes of the study
DECIDED = ("steps", "batch_size", "learning_rate", "seed")  # of the gates of a language model


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    detection = what.add_parser("detection", help="the study of made scenes")
    ask = detection.add_argument
    ask("--seeds", type=int, nargs="+", default=[0, 1, 2])
    ask("--only", nargs="+", choices=(*PARTS, *sum(MORE.values(), ())), help="train these and measure nothing")
    ask("--more", nargs="+", choices=tuple(MORE), default=[], help="a detector taught by a dense one, and the wider one, too")
    ask("--processes", type=int, default=1, help="that train side by side, each with --threads")
    mode = detection.add_mutually_exclusive_group().add_argument
    mode("--no-timing", action="store_true", help="do not time: for a machine that does other work")
    mode("--timing-only", action="store_true", help="time the finished detectors and write nothing else")
    mode("--sizes-only", action="store_true", help="time detectors of drawn weights by size and write nothing else")
    mode("--cost-only", action="store_true", help="time a few steps of each training in --processes at once, write what all cost")
    ask("--checkpoints", type=Path, default=ROOT / "outputs" / "detection")
    ask("--output", type=Path, default=ROOT / "results" / "detection")
    ask("--folder", type=Path, help="of KITTI or nuScenes, instead of made scenes (give --checkpoints and --output, too)")
    add_options(detection, Plan, PLANNED, {"tokens": "share of token-layers that gates are trained for"})
    language = what.add_parser("language", help="gates of a frozen language model")
    ask = language.add_argument
    ask("--model", default="far-gpt2", help="a choice of conf/model")
    ask("--gates", type=int, nargs="+", required=True, help="layers after which tokens may halt, from 0")
    ask("--predict", type=int, nargs="*", default=[], help="those where later K/V are predicted; others drop")
    ask("--text", nargs="+", default=["python-docs", "wikitext103"], help="datasets; their calibrating part is read")
    ask("--windows", type=int, default=96, help="of 512 tokens, at most")
    ask("--saves", type=float, default=40.0, help="percent of the prompt's executed FLOPs")
    add_options(language, GateRecipe, DECIDED, {"batch_size": "windows a step"})
    ask("--start-from", choices=("oldest", "random"), default="oldest", help="which tokens halt before training")
    ask("--name", required=True, help="of the file")
    ask("--output", type=Path, help="folder of the file; default: results/gates/MODEL")
    ask("--data", help="folder of datasets (data.root)")
    for one in (detection, language):
        one.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


def progress(name: str, steps: range) -> Iterable[int]:
    return tqdm(steps, desc=name, initial=steps.start, total=steps.stop, mininterval=5.0, leave=False)


def detection(options: argparse.Namespace) -> None:
    plan = Plan(**{name: getattr(options, name) for name in PLANNED}, folder=options.folder)
    if options.processes < 1:
        raise ConfigError(f"processes={options.processes}: give at least 1.")
    finished = options.timing_only or options.cost_only
    seeds = [SeedRuns(plan, seed, options.checkpoints, progress, may_train=not finished) for seed in options.seeds]
    more, parts = options.more, options.only or [*PARTS, *(part for name in options.more for part in MORE[name])]
    found = {}
    with runs.workers(plan, options.checkpoints, options.processes, options.threads) as pool:
        if options.sizes_only:
            found["sizes"] = frames.sizes()
        elif options.cost_only:
            found["cost"] = pd.concat(runs.of_each_seed(pool, frames.cost, options.seeds), ignore_index=True)
        elif not options.timing_only:
            if alone := options.processes == 1:
                for number, part in runs.tasks(options.seeds, parts):
                    seeds[options.seeds.index(number)].train(part)
            else:
                runs.train_side_by_side(pool, options.seeds, parts, print)
            if options.only:
                return
            of_all = (runs.measured(seed, more) for seed in seeds)
            found = frames.study(seeds, of_all if alone else runs.of_each_seed(pool, runs.measured, options.seeds, more))
    if not (options.no_timing or options.sizes_only or options.cost_only):
        found |= {"timing": frames.timing(seeds[0], more), "parts": frames.parts(seeds[0])}
    print("Written: " + ", ".join(map(str, frames.write(found, options.output))))


def language(options: argparse.Namespace) -> None:
    from quicksilver.cli.commands.search import calibration_half
    from quicksilver.fitting.gates import card, choose, train_gates
    from quicksilver.runs.config import compose
    from quicksilver.runs.context import RunContext
    from quicksilver.runtime.architecture import architecture_of

    recipe = GateRecipe(
        layers=tuple(options.gates), predicts=tuple(options.predict), saves_pct=options.saves, start_from=options.start_from,
        **{name: getattr(options, name) for name in DECIDED},
    )  # fmt: skip
    config = compose([f"model={options.model}", *([f"data.root={options.data}"] if options.data else [])])
    loaded = RunContext().model(config)
    arch = architecture_of(loaded.model)
    fit, other = (calibration_half(config, options.text, loaded, half, options.windows) for half in ("fit", "choose"))
    folder = options.output or ROOT / "results" / "gates" / options.model
    found = train_gates(
        arch, fit.ids, recipe, checkpoint=folder / f".{options.name}.training.safetensors",
        progress=lambda steps: progress(f"{options.model}, {options.name}", steps),
    )  # fmt: skip
    chosen = choose(arch, found.candidates, other.ids[:: max(1, len(other.ids) // HELD_WINDOWS)], recipe)
    path = folder / f"{options.name}.safetensors"
    provenance = {
        "datasets": options.text, "text": fit.provenance, "text_digest": fit.digest, "recipe": vars(recipe), "kept": chosen.name, "added_to_biases": chosen.shift,
        "saved_pct_on_the_other_half": chosen.saved_pct, "kl_nats_on_the_other_half": chosen.kl_nats,
        "kl_nats_at_the_start": chosen.compared["start"], "compared_kl_nats": chosen.compared,
        "curve": found.curve[:: max(1, options.steps // 20)],
    }  # fmt: skip
    replace(chosen.gates, provenance=provenance).save(path)
    (folder / "README.md").write_text(card(folder, options.model), encoding="utf-8")
    kl, saved = (fmean(one[name] for one in found.curve[-10:]) for name in ("kl_nats", "saved_pct"))
    each = ", ".join(f"{name} {kl:.4f}" for name, kl in chosen.compared.items())
    print(f"{path}: {path.stat().st_size / 1e3:.1f} kB; last steps: KL {kl:.4f} nats at {saved:.1f}% saved;", end=" ")
    print(f"on the other half: kept {chosen.name} at {chosen.saved_pct:.1f}%, KL of each: {each}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    torch.set_num_threads(options.threads)
    (detection if options.what == "detection" else language)(options)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QuickSilverError as error:
        sys.exit(f"train_halting: {error}")
