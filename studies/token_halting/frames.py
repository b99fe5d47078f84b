"""What the study found, as the frames that its tables and figures are made of: one row an evaluation, a difference, a step of a curve, a time.

A run of the harness is a language model on a text with a protocol; its record has windows, perplexity and paired nats. A detector has none of
these. Like a record the frames say what they are of: seeds, sizes, versions.

Two clocks, each with operations of its own. The `encoder`: embedded pillars in, states out; what the paper accelerates. The `whole` detector:
points in, boxes out, with features, embedding, head, decoding and suppression of overlaps, which no halting shortens. Operations are those of the
scenes that are timed.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

import quicksilver
from quicksilver.files import write_files
from quicksilver.fitting.equivalent import Derivative, equivalent_forward
from quicksilver.fitting.gates import HaltingGates
from quicksilver.measure.components import SectionClock
from quicksilver.measure.latency import alternate, shared_weight_copy
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.phases import observed
from quicksilver.runtime.run import apply

from .model import N_FEATURES, N_OUTPUTS, N_WAVES, PillarDetector, Shape, decode, detector, features
from .runs import LEARNED, PARTS, RULES, Evaluation, Key, Measured, SeedRuns, ap_difference, evaluate, gated, ruled, tasks
from .scenes import Grid, Scene, SceneMaker
from .training import Policy, Trained, detection_loss

DRAWS = 200  # of each interval
TIMED = (0.3, 0.5)  # thresholds
STEP = 1e-3  # of the finite difference of a decision
LEFT = (0.35, 0.2, 0.15)  # of the tokens after each layer, near what gates that were trained for 45% of token-layers leave
SIZES = (*((width, side, 1) for side in (24, 48) for width in (48, 96, 192, 384)), (48, 24, 8), (192, 24, 8))


def study(seeds: Sequence[SeedRuns], measured: Iterable[Sequence[Measured]]) -> dict[str, pd.DataFrame]:
    """Every frame but the one of times, by the name of its file; measured: the evaluations of each seed."""
    rows, found = evaluations([seed.seed for seed in seeds], measured)
    # Loss and tokens left by training step, of the detectors that learn which tokens to halt and of the control.
    learning = ((seed, name, entry) for seed in seeds for name in ("control", *LEARNED) for entry in seed.train(name).curve)
    curves = pd.DataFrame([{"seed": seed.seed, "detector": name, **entry} for seed, name, entry in learning])
    made = {"gradients": gradients(seeds[0]), "scene": scene(seeds[0]), "scene_boxes": boxes(seeds[0]), "about": about(seeds)}
    return {"evaluations": rows, "differences": differences(found), "curves": curves, **made}


def evaluations(seeds: Sequence[int], measured: Iterable[Sequence[Measured]]) -> tuple[pd.DataFrame, dict[Key, list[Evaluation]]]:
    """Every detector under every policy: a row a seed, and the evaluations by detector, policy and dial."""
    rows, found = [], dict[Key, list[Evaluation]]()
    for seed, of_seed in zip(seeds, measured, strict=True):
        dense = next(one for name, policy, _, one in of_seed if (name, policy) == ("control", "dense"))
        for name, policy, dial, one in of_seed:
            found.setdefault((name, policy, dial), []).append(one)
            car, pedestrian = one.ap_by_class()
            rows.append({
                "seed": seed, "detector": name, "policy": policy, "dial": dial, "tokens": one.tokens.mean(),
                "executed_flops": one.executed_flops.mean(),
                "executed_flops_saved_pct": 100 * (1 - one.executed_flops.mean() / dense.executed_flops.mean()),
                "kept_in_box": one.kept_in_box.mean(), "ap": one.ap(), "ap_loose": one.ap(strict=False),
                "ap_unrecycled": one.ap(recycled=False), "ap_unrecycled_loose": one.ap(recycled=False, strict=False),
                "ap_car": car, "ap_pedestrian": pedestrian,
            })  # fmt: skip
    return pd.DataFrame(rows), found


def differences(found: dict[Key, list[Evaluation]]) -> pd.DataFrame:
    """AP against the detectors of `compared`, mean over seeds; what has fewer of them than the rest is compared on these, the first."""
    rows = []
    for key, against, recycled, other in compared(found):
        gap = ap_difference(found[key], found[other][: len(found[key])], recycled=recycled, draws=DRAWS)
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


def scene(seed: SeedRuns) -> pd.DataFrame:
    """One validation scene from above: a row a pillar with its place, points (log), and how far it went with each kind of gates."""
    plan = seed.plan
    data = plan.validation_data.take(slice(0, 1))
    frame = pd.DataFrame(plan.maker.grid.centres(), columns=["x", "y"])
    frame = frame.assign(log_points=data.features[0, :, 0], height_m=data.features[0, :, 4], in_box=data.in_box[0])
    for name in ("box", "uniform"):
        trained = seed.train(name)
        frame[f"halt_layer_{name}"] = evaluate(trained.model, data, plan.maker.grid, gated(trained)).halt_depth[0]
    return frame


def boxes(seed: SeedRuns) -> pd.DataFrame:
    """The labelled boxes of that scene."""
    data = seed.plan.validation_data
    return pd.DataFrame(data.boxes[0], columns=["x", "y", "length", "width", "yaw"]).assign(label=data.labels[0])


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
    how: dict[str, Any] = {"index": False, "float_format": "%.6g", "lineterminator": "\n"}
    return write_files(folder, {f"{name}.csv": frame.to_csv(**how).encode() for name, frame in frames.items()})


# -- how right is the pseudo-gradient? (docs/learned-halting.md) -------------------------------------------------------------------
def effects(
    model: PreTrainedModel, loss: Callable[[], torch.Tensor], layer: int, decisions: torch.Tensor, tokens: Sequence[int]
) -> pd.DataFrame:
    """What the decisions g ∈ {0, 1} about `tokens` of the first row, taken after `layer`, do to the loss, all others as they are.

    Args:
        loss: runs the model and gives a scalar. decisions: (B, N) of 1 and 0.

    Returns:
        A row a decision. `kept`: what was decided; `true`: L(g = 1) − L(g = 0), two forward passes. The other columns estimate it: `both`, `states`
        and `attention` are dL/dg of the equivalent forward, which training uses, by what it flows through; `finite difference` is one-sided, of
        the soft mask at the decision.
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
    kept = decisions[0, list(tokens)].numpy() > 0.5
    with torch.no_grad():
        off, on = (np.array([with_decision(token, value) for token in tokens]) for value in (0.0, 1.0))
        inward = np.where(kept, -STEP, STEP)  # a mask beyond 0 or 1 would be a negative weight
        moved = np.array([with_decision(token, here + by) for token, here, by in zip(tokens, kept, inward, strict=True)])
    found: dict[str, np.ndarray] = {"kept": kept, "true": on - off}
    with torch.enable_grad():
        for name in names:
            g = decisions.clone().requires_grad_()
            (slope,) = torch.autograd.grad(run(g, name), g)
            found[name] = slope[0, list(tokens)].numpy()
    return pd.DataFrame(found | {"finite difference": (moved - np.where(kept, on, off)) / inward})


def accuracy(true: np.ndarray, estimated: np.ndarray) -> dict[str, float]:
    """How near an estimate is to the true effects: correlation, share of equal signs, mean error over mean size, and the number of decisions.

    Signs are compared where the true effect is not negligible (above a hundredth of the largest).
    """
    matters = np.abs(true) > 0.01 * np.abs(true).max()
    found = {
        "correlation": np.corrcoef(true, estimated)[0, 1],
        "same_sign": (np.sign(true) == np.sign(estimated))[matters].mean(),
        "relative_error": np.abs(true - estimated).mean() / np.abs(true).mean(),
    }
    return {**{name: float(value) for name, value in found.items()}, "decisions": len(true)}


def gradients(seed: SeedRuns) -> pd.DataFrame:
    """How near each estimate is to what turning a decision round does to the detection loss, by the layer it is taken after: of three scenes at
    most, 12 tokens in boxes and 12 of all."""
    model, data = seed.train("control").model, seed.plan.validation_data
    rng, n, rows = np.random.default_rng(0), data.features.shape[1], []
    for layer in range(model.config.num_hidden_layers - 1):
        parts = []
        for number in range(min(3, len(data))):
            batch = data.take(slice(number, number + 1))
            decisions = torch.from_numpy((rng.random((1, n)) > 0.3).astype(np.float32))
            inside = np.flatnonzero(batch.in_box[0].numpy())
            asked = ((inside, min(12, len(inside))), (n, 12))
            chosen = [int(token) for among, count in asked for token in rng.choice(among, count, replace=False)]
            loss = lambda batch=batch: detection_loss(model(batch.features), batch)
            parts.append(effects(model, loss, layer, decisions, chosen))
        found = pd.concat(parts)
        for name in found.columns.drop(["kept", "true"]):
            for which, taken in (("kept", found[found["kept"]]), ("halted", found[~found["kept"]])):
                near = accuracy(taken["true"].to_numpy(), taken[name].to_numpy())
                rows.append({"after_layer": layer, "taken": which, "estimate": name, **near})
    return pd.DataFrame(rows)


# -- time --------------------------------------------------------------------------------------------------------------------------
class Timed(ExitStack):
    """A detector under one policy, ready to be timed. A context manager: the policy acts inside.

    Args:
        scenes: their points. a_pass: how many of them go through the encoder at once.

    Attributes:
        embedded: the scenes as the encoder takes them, a pass each: (B, N, D).
    """

    def __init__(self, model: Any, policy: Policy | None, scenes: Sequence[Scene], grid: Grid, a_pass: int = 1) -> None:
        super().__init__()
        self.model = cast(PillarDetector, shared_weight_copy(model))  # one that no other run acts on
        self.policy, self.scenes, self.grid = policy, scenes, grid
        with torch.inference_mode():
            self.embedded = torch.cat([self.model.embedded(self.given(scene)) for scene in scenes]).split(a_pass)

    def __enter__(self) -> Timed:
        self.run = self.enter_context(apply(self.model, [] if self.policy is None else self.policy(0)))
        return self

    def given(self, scene: Scene) -> torch.Tensor:
        """(1, N, F) of its points."""
        return torch.from_numpy(features(scene, self.grid))[None]

    def encoder(self) -> None:
        """Every pass through the encoder alone."""
        with torch.inference_mode():
            for hidden in self.embedded:
                self.run.reset()
                self.model.encoder(inputs_embeds=hidden)

    def whole(self) -> None:
        """Every scene from its points to its boxes, one a pass."""
        with torch.inference_mode():
            for scene in self.scenes:
                self.run.reset()
                decode(self.model(self.given(scene)), self.grid)

    def flops(self, clock: str) -> float:
        """Executed operations of a pass, mean: of what the clock of that name covers, as far as it is products, attention and gates. The run's
        trace is that of all passes then."""
        self.run.reset()
        with torch.inference_mode():
            for hidden in self.embedded:
                self.model.encoder(inputs_embeds=hidden)
        encoder, n, width = self.run.flops.executed / len(self.embedded), self.grid.n_pillars, self.model.config.hidden_size
        beside = 2 * n * (N_FEATURES * 2 * width + 2 * width * width + N_WAVES * width + width * N_OUTPUTS)
        return encoder if clock == "encoder" else encoder + beside


def timing(seed: SeedRuns, more: Sequence[str] = (), repeats: int = 15, scenes: int = 8) -> pd.DataFrame:
    """Wall clock of one scene a pass, in turns with the dense control; one sample is a round of `scenes`. Two rows, one a clock, for each detector,
    policy and dial: every threshold of the gates that halts some tokens and leaves some, and random halting at the rates of box weights."""
    runs: dict[Key, tuple[PillarDetector, Policy | None]] = {}
    taught, wide = ("taught",) if "taught" in more else (), ("wide_control", "wide_gentle") if "wide" in more else ()
    for name in ("control", "longer", *LEARNED, "random", *taught, *wide):
        one = seed.train(name)
        if name == "random":
            runs[name, "random", 0.5] = one.model, ruled("random", seed.rates)
        elif one.gates is None:
            runs[name, "dense", 0.0] = one.model, None
        else:
            runs |= {(name, "learned", threshold): (one.model, gated(one, threshold)) for threshold in TIMED}
    rows, made, grid = [], seed.plan.validation_scenes(scenes), seed.plan.maker.grid
    with ExitStack() as stack:
        ready = {key: stack.enter_context(Timed(*run, made, grid)) for key, run in runs.items()}
        names = {key: " ".join(map(str, key)) for key in ready}
        dense = next(iter(ready))
        for clock in ("encoder", "whole"):
            times = alternate({names[key]: getattr(one, clock) for key, one in ready.items()}, 2, repeats)
            flops = {key: one.flops(clock) for key, one in ready.items()}
            for key, name in names.items():
                place = dict(zip(("detector", "policy", "dial"), key, strict=True)) | {"clock": clock}
                share = _against(times, name, names[dense], flops[key] / flops[dense])
                rows.append(place | {"latency_ms": times[name].median / scenes} | share)
    return pd.DataFrame(rows)


def _against(times: Any, name: str, dense: str, flops: float) -> dict[str, float]:
    """Time of one run as a share of the dense one's; `flops`: the same share of operations."""
    ratio = times.ratio(name, dense)
    return {
        "latency_ratio": ratio.median, "latency_ratio_low": ratio.low, "latency_ratio_high": ratio.high,
        "flops_saved_pct": 100 * (1 - flops), "noise_floor_pct": 100 * (times.noise_floor or 0.0), "load_average": times.load_before,
    }  # fmt: skip


# -- share by share --------------------------------------------------------------------------------------------------------------
def parts(seed: SeedRuns, repeats: int = 15, scenes: int = 8) -> pd.DataFrame:
    """Where a scene's time goes, dense and halted at the paper's threshold: milliseconds (of each scene its least of `repeats`, mean over scenes) of
    every part, operations where the ledger has them, tokens where it is a layer."""
    learned, made = seed.train("gentle"), seed.plan.validation_scenes(scenes)
    rows: list[dict[str, object]] = []
    for said, model, policy in (("dense", seed.train("control").model, None), ("halted", learned.model, gated(learned))):
        taken, tokens = defaultdict(list), defaultdict(list)
        with Timed(model, policy, made, seed.plan.maker.grid) as timed:
            for scene in made:
                each = [_taken(timed, scene) for _ in range(repeats)]
                for part in each[0]:
                    taken[part].append(min(one[part] for one in each))
                (trace,) = timed.run.trace.passes
                for layer in range(trace.n_layers):
                    tokens[f"layer {layer}"].append(float(trace.active(layer).sum()))
        for part, values in taken.items():
            n, width = np.array(tokens.get(part, [np.nan])), model.config.hidden_size
            flops = (16 * width**2 * n + 4 * width * n**2).mean()
            rows.append({"run": said, "part": part, "latency_ms": float(np.mean(values)), "tokens": n.mean(), "flops": flops})
    return pd.DataFrame(rows)


def _taken(timed: Timed, scene: Scene) -> dict[str, float]:
    """Milliseconds of one scene by part."""
    watch, model = SectionClock("cpu"), timed.model
    timed.run.reset()
    with ExitStack() as stack:
        for place, layer in enumerate(model.encoder.layers):
            stack.callback(layer.register_forward_pre_hook(lambda *_, place=place: watch.enter("layer", place)).remove)
            stack.callback(layer.register_forward_hook(lambda *_: watch.leave()).remove)
        stack.enter_context(observed(watch))
        stack.enter_context(torch.inference_mode())
        with watch.section("features of the points"):
            given = timed.given(scene)
        with watch.section("embedding"):
            hidden = model.embedded(given)
        with watch.section("a pass's begin and end"):
            hidden = model.encoder(inputs_embeds=hidden).last_hidden_state
        with watch.section("norm and head"):
            said = model.head(model.encoder.norm(hidden))
        with watch.section("boxes and suppression"):
            decode(said, timed.grid)
    found = defaultdict[str, float](float)
    for (name, number), ms in watch.times_ms().items():
        found[f"layer {number}" if name == "layer" else name] += ms
    return found


# -- by size ---------------------------------------------------------------------------------------------------------------------
def sizes(shapes: Sequence[tuple[int, int, int]] = SIZES, repeats: int = 7) -> pd.DataFrame:
    """How much of the saved operations of the encoder its time saves, by width, pillars and scenes a pass. Weights are drawn, and gates too, whose
    biases leave `LEFT` of each scene's tokens: time does not depend on what was learnt."""
    rows = []
    for width, side, batch in shapes:
        grid = Grid(side=side, size_m=24 / side)
        model = detector(Shape(width, 4, max(1, width // 16) if width < 96 else width // 32), 0)
        scenes = [SceneMaker(grid=grid).scene(number) for number in range(max(batch, 2))]
        with Timed(model, None, scenes, grid, batch) as dense:
            gates = _gates_that_leave(model, torch.cat(dense.embedded))
            with Timed(model, gated(Trained(model, gates, [], 0)), scenes, grid, batch) as halted:
                flops = halted.flops("encoder") / dense.flops("encoder")
                shares = [float(p.active(layer).float().mean()) for p in halted.run.trace.passes for layer in range(p.n_layers)]
                times = alternate({"dense": dense.encoder, "halted": halted.encoder}, 2, repeats)
        rows.append(
            {"width": width, "pillars": grid.n_pillars, "scenes_a_pass": batch, "tokens": float(np.mean(shares)),
             "dense_ms": times["dense"].median / len(scenes), "halted_ms": times["halted"].median / len(scenes)}
            | _against(times, "halted", "dense", flops) | {"threads": torch.get_num_threads()}
        )  # fmt: skip
    return pd.DataFrame(rows)


def _gates_that_leave(model: PillarDetector, hidden: torch.Tensor) -> HaltingGates:
    """Gates after every layer but the last, with biases at which the mean scene of hidden (B, N, D) has `LEFT` of its tokens left."""
    width, last = model.config.hidden_size, model.config.num_hidden_layers - 1
    gates = HaltingGates(width, range(last)).requires_grad_(False)
    gates.weight.copy_(torch.randn(last, width, generator=torch.Generator().manual_seed(0)) / width**0.5)
    gates.bias.zero_()

    def gate(layer: int, states: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        logits = gates.logits(layer, states)  # (B, N)
        left = round(LEFT[min(layer, len(LEFT) - 1)] * kept.numel())
        gates.bias[layer] = -logits[kept > 0.5].sort(descending=True).values[left - 1 : left + 1].mean()
        return (logits + gates.bias[layer] >= 0).to(states.dtype)

    with torch.no_grad(), equivalent_forward(model, gate):
        model.encoder(inputs_embeds=hidden)
    return gates


# -- the study itself ------------------------------------------------------------------------------------------------------------
def cost(runs: SeedRuns, steps: int = 12, scenes: int = 4) -> pd.DataFrame:
    """What the study takes of one process for one seed: a row for making the scenes, one for each training, one for its evaluations and one for its
    part of the intervals. A few of each are timed, from nothing; the rest is their number. Finished detectors are evaluated: one that has learnt
    nothing finds nothing to suppress."""
    plan, seed = runs.plan, runs.seed
    few = dataclasses.replace(plan, scenes=48, validation=scenes)
    rows: list[dict[str, Any]] = []

    def timed(what: str, count: float, n: int, do: Callable[[], object]) -> None:
        began = time.perf_counter()
        do()
        rows.append({"seed": seed, "what": what, "count": count, "seconds_each": (time.perf_counter() - began) / n})

    timed("scenes", plan.scenes + plan.validation, 48 + scenes, lambda: (few.training_data, few.validation_data))
    short = dataclasses.replace(few, steps=steps, tuning_steps=steps)
    short.__dict__["training_data"] = few.training_data
    with tempfile.TemporaryDirectory() as place:
        trial = SeedRuns(short, seed, Path(place))
        for _, part in tasks([seed], PARTS):
            count = plan.steps if part in ("dense", "no_layers") else plan.tuning_steps
            timed(part, count, steps, partial(trial.train, part))
    found: dict[Key, list[Evaluation]] = {}
    finished = dataclasses.replace(runs, plan=few, may_train=False)
    timed("evaluations", plan.validation, scenes, lambda: found.update({one[:3]: [one[3]] for one in finished.evaluations()}))
    rows[-1]["what"] = f"{len(found)} evaluations"
    dense = evaluate(finished.train("control").model, plan.validation_data, plan.maker.grid)
    draws = 40
    ap_difference([dense], [dense], draws=2)  # what is paid once
    timed("intervals", DRAWS * len(compared(found)), draws, lambda: ap_difference([dense], [dense], draws=draws))
    frame = pd.DataFrame(rows).assign(seconds=lambda rows: rows["count"] * rows["seconds_each"])
    return frame.assign(load_average=os.getloadavg()[0], threads=torch.get_num_threads())
