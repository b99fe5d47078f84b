"""What the study found, as the frames that its tables and figures are made of: one row an evaluation, a difference, a step of a curve.

A run of the harness is a language model on a text with a protocol; its record has windows, perplexity and paired nats. A detector has none of
these. Like a record the frames say what they are of: seeds, sizes, versions.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

import quicksilver
from quicksilver.files import write_atomically
from quicksilver.fitting.equivalent import Derivative, equivalent_forward
from quicksilver.runtime.errors import ConfigError

from .evaluate import Evaluation, ap_difference, evaluate
from .model import Batch, PillarDetector
from .runs import LEARNED, RULES, Key, Measured, SeedRuns, gated
from .training import detection_loss

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
            row = {"seed": seed, "detector": detector, "policy": policy, "dial": dial, "tokens": one.tokens.mean()}
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
        gap = ap_difference(found[key], found[other][: len(found[key])], recycled=recycled, draws=draws)
        rows.append((*key, against, recycled, gap.value, gap.low, gap.high))
    return pd.DataFrame(rows, columns=["detector", "policy", "dial", "against", "recycled", "difference", "low", "high"])


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
    return pd.DataFrame([
        {"seed": seed.seed, "detector": name, **entry}
        for seed in seeds for name in ("control", *LEARNED) for entry in seed.train(name).curve
    ])  # fmt: skip


def scene(seed: SeedRuns, number: int = 0) -> pd.DataFrame:
    """One validation scene from above: a row a pillar with its place, points (log), and how far it went with each kind of gates."""
    plan = seed.plan
    data = plan.validation_data.take(slice(number, number + 1))
    frame = pd.DataFrame(plan.maker.grid.centres(), columns=["x", "y"])
    frame = frame.assign(log_points=data.features[0, :, 0], height_m=data.features[0, :, 4], in_box=data.in_box[0])
    for name in ("box", "uniform"):
        trained = seed.train(name)
        frame[f"halt_layer_{name}"] = evaluate(trained.model, data, plan.maker.grid, gated(trained)).halt_depth[0]
    return frame


def boxes(seed: SeedRuns, number: int = 0) -> pd.DataFrame:
    """The labelled boxes of that scene."""
    data = seed.plan.validation_data
    frame = pd.DataFrame(data.boxes[number], columns=["x", "y", "length", "width", "yaw"])
    return frame.assign(label=data.labels[number])


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
    paths = [folder / f"{name}.csv" for name in frames]
    for path, frame in zip(paths, frames.values(), strict=True):
        write_atomically(path, frame.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode())
    return paths


# -- how right is the pseudo-gradient? (docs/learned-halting.md) -------------------------------------------------------------------


@dataclass(frozen=True)
class Effects:
    """What decisions g ∈ {0, 1} of one forward do to the loss, all other decisions as they are.

    Attributes:
        kept: (K,) bool, the decision that was taken.
        true: (K,) L(g = 1) − L(g = 0), two forward passes.
        estimated: (K,) by name: dL/dg of the equivalent forward, which training uses, by what it flows through; `finite difference`, one-sided, of
            the soft mask at the decision.
    """

    kept: np.ndarray
    true: np.ndarray
    estimated: dict[str, np.ndarray]


def effects(
    model: PreTrainedModel, loss: Callable[[], torch.Tensor], layer: int, decisions: torch.Tensor, tokens: Sequence[int],
    step: float = 1e-3,
) -> Effects:  # fmt: skip
    """The effects of the decisions about `tokens` of the first row, taken after `layer`.

    Args:
        loss: runs the model and gives a scalar. decisions: (B, N) of 1 and 0. step: of the finite difference.

    Raises:
        ConfigError: no token.
    """
    if not tokens:
        raise ConfigError("There is no token whose decision could be turned round: give at least one.")

    def run(g: torch.Tensor, derivative: Derivative = "both") -> torch.Tensor:
        with equivalent_forward(model, lambda at, hidden, kept: g if at == layer else None, derivative):
            return loss()

    def with_decision(token: int, value: float) -> float:
        g = decisions.clone()
        g[0, token] = value
        return float(run(g))

    names: tuple[Derivative, ...] = ("both", "states", "attention")
    estimated: dict[str, np.ndarray] = {}
    with torch.enable_grad():
        for name in names:
            g = decisions.clone().requires_grad_()
            (slope,) = torch.autograd.grad(run(g, name), g)
            estimated[name] = slope[0, list(tokens)].numpy()
    kept = decisions[0, list(tokens)].numpy() > 0.5
    with torch.no_grad():
        off, on = (np.array([with_decision(token, value) for token in tokens]) for value in (0.0, 1.0))
        inward = np.where(kept, -step, step)  # a mask beyond 0 or 1 would be a negative weight
        moved = np.array([with_decision(token, here + by) for token, here, by in zip(tokens, kept, inward, strict=True)])
        estimated["finite difference"] = (moved - np.where(kept, on, off)) / inward
    return Effects(kept, on - off, estimated)


@dataclass(frozen=True)
class Accuracy:
    """How near an estimate is to the true effects: correlation, share of equal signs, mean error over mean size, and the number of decisions."""

    correlation: float
    same_sign: float
    relative_error: float
    decisions: int


def accuracy(true: np.ndarray, estimated: np.ndarray) -> Accuracy:
    """Signs are compared where the true effect is not negligible (above a hundredth of the largest)."""
    matters = np.abs(true) > 0.01 * np.abs(true).max()
    return Accuracy(
        float(np.corrcoef(true, estimated)[0, 1]),
        float((np.sign(true) == np.sign(estimated))[matters].mean()),
        float(np.abs(true - estimated).mean() / np.abs(true).mean()),
        len(true),
    )


def gradients(seed: SeedRuns, scenes: int = 3, tokens: int = 24) -> pd.DataFrame:
    """How near each estimate is to what turning a decision round does to the detection loss, by the layer it is taken after."""
    model, data = seed.train("control").model, seed.plan.validation_data
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
            loss = partial(_loss, model, batch)
            parts.append(effects(model, loss, layer, decisions, list(map(int, chosen))))
        kept, true = (np.concatenate([getattr(part, name) for part in parts]) for name in ("kept", "true"))
        for name in parts[0].estimated:
            estimated = np.concatenate([part.estimated[name] for part in parts])
            for which, mask in (("kept", kept), ("halted", ~kept)):
                one = accuracy(true[mask], estimated[mask])
                rows.append({"after_layer": layer, "taken": which, "estimate": name, **vars(one)})
    return pd.DataFrame(rows)


def _loss(model: PillarDetector, batch: Batch) -> torch.Tensor:
    return detection_loss(model(batch.features), batch)
