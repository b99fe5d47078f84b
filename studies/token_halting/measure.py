"""What the detection study found, as frames that are written beside each other: what the study's tables and figures are made of.

A run of the harness is a language model on a text with a protocol; its record has windows, perplexity and paired nats. A detector has none of
these, so its study keeps frames of its own: one row an evaluation, one a difference, one a step of a curve. Like a record they say what they are
of: seeds, sizes, versions.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import quicksilver
from quicksilver.files import write_atomically

from .evaluate import Evaluation, ap_difference, evaluate
from .model import PillarDetector
from .pillars import Batch
from .pseudo_gradient import accuracy, effects
from .runs import LEARNED, RULES, Measured, SeedRuns, gated
from .training import detection_loss

Key = tuple[str, str, float]  # detector, policy, dial
DRAWS = 200  # of each interval


def study(seeds: Sequence[SeedRuns], measured: Iterable[Sequence[Measured]]) -> dict[str, pd.DataFrame]:
    """Every frame but the one of times, by the name of its file; measured: the evaluations of each seed."""
    rows, found = evaluations([seed.seed for seed in seeds], measured)
    return {
        "evaluations": rows,
        "differences": differences(found),
        "curves": curves(seeds),
        "gradients": gradients(seeds[0]),
        "scene": scene(seeds[0]),
        "scene_boxes": boxes(seeds[0]),
        "about": about(seeds),
    }


def evaluations(seeds: Sequence[int], measured: Iterable[Sequence[Measured]]) -> tuple[pd.DataFrame, dict[Key, list[Evaluation]]]:
    """Every detector under every policy: a row a seed, and the evaluations by detector, policy and dial."""
    rows: list[dict[str, object]] = []
    found: dict[Key, list[Evaluation]] = {}
    for seed, of_seed in zip(seeds, measured, strict=True):
        dense = next(one for name, policy, _, one in of_seed if (name, policy) == ("control", "dense"))
        for detector, policy, dial, one in of_seed:
            found.setdefault((detector, policy, dial), []).append(one)
            row: dict[str, object] = {
                "seed": seed,
                "detector": detector,
                "policy": policy,
                "dial": dial,
                "tokens": one.tokens.mean(),
            }
            row["executed_flops"] = one.executed_flops.mean()
            row["executed_flops_saved_pct"] = 100 * (1 - one.executed_flops.mean() / dense.executed_flops.mean())
            row["kept_in_box"] = one.kept_in_box.mean()
            for recycled in (True, False):
                for strict in (True, False):
                    name = f"ap{'' if recycled else '_unrecycled'}{'' if strict else '_loose'}"
                    row[name] = one.ap(recycled=recycled, strict=strict)
            row["ap_car"], row["ap_pedestrian"] = one.ap_by_class()
            rows.append(row)
    return pd.DataFrame(rows), found


def differences(found: dict[Key, list[Evaluation]], draws: int = DRAWS) -> pd.DataFrame:
    """AP against the detectors of `compared`, mean over seeds; what has fewer of them than the rest is compared on these, the first."""
    rows = []
    for key, against, recycled, other in compared(found):
        ours = found[key]
        theirs = found[other][: len(ours)]
        gap = ap_difference(ours, theirs, recycled=recycled, draws=draws)
        rows.append(
            dict(zip(("detector", "policy", "dial"), key, strict=True))
            | {"against": against, "recycled": recycled, "difference": gap.value, "low": gap.low, "high": gap.high}
        )
    return pd.DataFrame(rows)


def compared(found: Collection[Key]) -> list[tuple[Key, str, bool, Key]]:
    """Which evaluations are compared: ours, what the other is called, with recycling or without, the other. All against the dense control; against
    random halting at the same rates, with and without; those trained longer against the dense detector that was, too."""
    dense, longer = ("control", "dense", 0.0), ("longer", "dense", 0.0)
    pairs: list[tuple[Key, str, bool, Key]] = []
    for key in found:
        detector, policy, dial = key
        if key == dense:
            continue
        pairs.append((key, "dense control", True, dense))
        random = ("random", "random", dial)
        if policy in ("learned", "norm") and detector in ("box", "uniform", *RULES) and random in found:
            pairs += [(key, "random", True, random), (key, "random", False, random)]
        if detector in ("gentle", "taught", "wide_gentle") and longer in found:
            pairs.append((key, "longer control", True, longer))
        if (detector, policy) == ("box", "learned") and random in found:
            rivals = {"uniform": ("uniform", "learned", dial), "norm": ("norm", "norm", dial)}
            pairs += [(key, name, recycled, theirs) for name, theirs in rivals.items() for recycled in (True, False)]
    return pairs


def curves(seeds: Sequence[SeedRuns]) -> pd.DataFrame:
    """Loss and tokens left by training step, of the detectors that learn whom to halt and of the control."""
    rows = []
    for seed in seeds:
        for name in ("control", *LEARNED):
            trained = seed.control() if name == "control" else seed.learned(name)
            rows += [{"seed": seed.seed, "detector": name, **entry} for entry in trained.curve]
    return pd.DataFrame(rows)


def scene(seed: SeedRuns, number: int = 0) -> pd.DataFrame:
    """One validation scene from above: a row a pillar with its place, points (log), and how far it went with each kind of gates."""
    plan = seed.plan
    data = plan.validation_data.take(slice(number, number + 1))
    centres = plan.maker.grid.centres()
    frame = pd.DataFrame({"x": centres[:, 0], "y": centres[:, 1], "log_points": data.features[0, :, 0].numpy()})
    frame["height_m"] = data.features[0, :, 4].numpy()
    frame["in_box"] = data.in_box[0].numpy()
    for name in ("box", "uniform"):
        found = evaluate(seed.learned(name).model, data, plan.maker.grid, gated(seed.learned(name)))
        frame[f"halt_layer_{name}"] = found.halt_depth[0]
    return frame


def boxes(seed: SeedRuns, number: int = 0) -> pd.DataFrame:
    """The labelled boxes of that scene."""
    data = seed.plan.validation_data
    frame = pd.DataFrame(data.boxes[number], columns=["x", "y", "length", "width", "yaw"])
    return frame.assign(label=data.labels[number])


def gradients(seed: SeedRuns, scenes: int = 3, tokens: int = 24) -> pd.DataFrame:
    """How near each estimate is to what turning a decision round does to the detection loss, by the layer it is taken after."""
    model, data = seed.control().model, seed.plan.validation_data
    rng = np.random.default_rng(0)
    n = data.features.shape[1]
    rows = []
    for layer in range(model.config.num_hidden_layers - 1):
        parts = []
        for number in range(scenes):
            batch = data.take(slice(number, number + 1))
            decisions = torch.from_numpy((rng.random((1, n)) > 0.3).astype(np.float32))
            inside = np.flatnonzero(batch.in_box[0].numpy())
            chosen = [
                *rng.choice(inside, min(tokens // 2, len(inside)), replace=False),
                *rng.choice(n, tokens // 2, replace=False),
            ]
            parts.append(effects(model, partial(_loss, model, batch), layer, decisions, list(map(int, chosen))))
        kept = np.concatenate([part.kept for part in parts])
        true = np.concatenate([part.true for part in parts])
        estimates = {name: np.concatenate([part.estimated[name] for part in parts]) for name in parts[0].estimated}
        estimates["finite difference"] = np.concatenate([part.finite for part in parts])
        for name, estimated in estimates.items():
            for which, chosen_mask in (("kept", kept), ("halted", ~kept)):
                one = accuracy(true[chosen_mask], estimated[chosen_mask])
                rows.append({"after_layer": layer, "taken": which, "estimate": name, **vars(one)})
    return pd.DataFrame(rows)


def _loss(model: PillarDetector, batch: Batch) -> torch.Tensor:
    return detection_loss(model(batch.features), batch)


def about(seeds: Sequence[SeedRuns]) -> pd.DataFrame:
    """What the study is of: one row a fact."""
    plan = seeds[0].plan
    facts = {
        "data": "made scenes" if plan.folder is None else plan.folder.name, "seeds": ", ".join(str(seed.seed) for seed in seeds), "width": plan.shape.width, "wide": plan.wide.width, "layers": plan.shape.layers,
        "pillars": plan.maker.grid.n_pillars, "scenes": plan.scenes, "validation_scenes": plan.validation, "steps": plan.steps,
        "tuning_steps": plan.tuning_steps, "target_tokens": plan.tokens, "quicksilver": quicksilver.__version__,
        "torch": str(torch.__version__), "threads": torch.get_num_threads(), "machine": platform.machine(),
    }  # fmt: skip
    return pd.DataFrame({"fact": list(facts), "value": [str(value) for value in facts.values()]})


def write(frames: dict[str, pd.DataFrame], folder: Path) -> list[Path]:
    """One CSV a frame, each whole or not at all."""
    paths = []
    for name, frame in frames.items():
        paths.append(folder / f"{name}.csv")
        write_atomically(paths[-1], frame.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode())
    return paths
