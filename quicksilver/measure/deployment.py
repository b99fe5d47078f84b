"""One prompt served alone, greedily, run and dense in turns: time to the first token and for each one after it (App. J).

The paper's setting: a prompt of 256 tokens against a budget of 50 ms a token. Everything goes through transformers' own `generate()`, so
whatever it can do (speculation included) is timed the same way.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from quicksilver.measure.latency import Alternation, InTurns, LatencySamples, Rounds, Step, alternate, time_saved
from quicksilver.measure.measurement import Quartiles, Result, Setting, Spread
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import at_least, check_positive

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from quicksilver.measure.bench import Bench, Side

MIN_FOR_P99 = 100  # tokens: below it the 99th percentile is the slowest token


@dataclass
class TokenClock:
    """Notes when tokens come out of `generate(streamer=…)`.

    Attributes:
        deliveries: when each came, by `time.perf_counter`, and how many tokens, several where speculation got them right; first the prompt.
    """

    deliveries: list[tuple[float, int]] = field(default_factory=list)

    def put(self, value: torch.Tensor) -> None:
        """value: (1, N) the prompt, at first; then the new tokens, on the host already."""
        self.deliveries.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        """Called by `generate` after the last token; every moment is noted already."""


@dataclass(frozen=True)
class Served:
    """One request.

    Attributes:
        first_ms: from the call until the first new token was there; total_ms: the whole call.
        per_token_ms: for each token after the first; tokens that came together share the time that they took.
        tokens: new tokens, in order.
    """

    first_ms: float
    per_token_ms: list[float]
    total_ms: float
    tokens: list[int]


def serve(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int, options: Mapping[str, Any] | None = None) -> Served:
    """Decode exactly `new_tokens` tokens greedily after `prompt` (1, N). `options` are further arguments of `generate`, such as
    `{"prompt_lookup_num_tokens": 3}`. Raises ConfigError: more than one row, or fewer than two new tokens."""
    import torch

    if prompt.ndim != 2 or prompt.shape[0] != 1:
        raise ConfigError(f"serve() takes one prompt (1, N); got {tuple(prompt.shape)}.")
    if new_tokens < 2:
        raise ConfigError(f"new_tokens={new_tokens}: at least 2, the time per token lies between two of them.")
    clock = TokenClock()
    began = time.perf_counter()
    output = model.generate(  # type: ignore[operator]
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, num_beams=1, max_new_tokens=new_tokens,
        min_new_tokens=new_tokens, pad_token_id=0, streamer=clock, **(options or {}),
    )  # fmt: skip
    if prompt.is_cuda:
        torch.cuda.synchronize(prompt.device)
    total = time.perf_counter() - began
    new = clock.deliveries[1:]
    per_token: list[float] = []
    for (before, _), (after, count) in itertools.pairwise(new):
        per_token += [1e3 * (after - before) / count] * count
    return Served(1e3 * (new[0][0] - began), per_token, 1e3 * total, output[0, prompt.shape[1] :].tolist())


def deployment(
    ways: Mapping[str, Callable[[], Served]], warmup: int, repeats: int, device: str | torch.device = "cpu"
) -> tuple[dict[str, list[Served]], Alternation]:
    """Serve the same request in several ways, in turns, each a `serve` of its own model; the first is also the control (A/A).
    Gives the requests of each way, one a round, and the time per token of each round as an alternation, for ratios and the noise
    floor. Raises ConfigError: fewer than 3 repeats."""
    served: dict[str, list[Served]] = {name: [] for name in ways}
    steps: dict[str, Step] = {name: lambda name=name, way=way: served[name].append(way()) for name, way in ways.items()}  # type: ignore[misc]
    times = alternate(steps, warmup, repeats, device)
    rounds = {name: all_of[warmup:] for name, all_of in served.items()}
    control = next(iter(ways))
    again, rounds[control] = rounds[control][1:], rounds[control][:-1]
    per_token = {name: LatencySamples([fmean(one.per_token_ms) for one in those]) for name, those in rounds.items()}
    return rounds, dataclasses.replace(times, data=per_token, control_ms=[fmean(one.per_token_ms) for one in again])


@dataclass(frozen=True)
class Percentiles:
    """Milliseconds; `p99` is None where there are too few tokens for one."""

    p50: float
    p95: float
    p99: float | None


@dataclass(frozen=True)
class ServingResult:
    """Requests of one way to serve.

    Attributes:
        per_token_ms: after the first token, over all rounds; `tokens_timed` of them.
        tokens_per_s: new tokens over the whole call, prompt included; median over rounds.
        within_budget_pct: tokens that came within `budget_ms`.
    """

    first_token_ms: Spread
    per_token_ms: Percentiles
    tokens_timed: int
    tokens_per_s: float
    within_budget_pct: float

    @classmethod
    def of(cls, rounds: Sequence[Served], budget_ms: float) -> ServingResult:
        """The requests of all rounds."""
        first, times = LatencySamples([one.first_ms for one in rounds]), np.concatenate([one.per_token_ms for one in rounds])
        p50, p95, p99 = np.percentile(times, [50, 95, 99]).tolist()
        per_token = Percentiles(p50, p95, p99 if len(times) >= MIN_FOR_P99 else None)
        per_s, within = median(1e3 * len(one.tokens) / one.total_ms for one in rounds), float(np.mean(times <= budget_ms))
        return cls(Spread(first.median, first.iqr), per_token, len(times), per_s, 100 * within)


@dataclass(frozen=True)
class DeploymentResult(Result):
    """Dense and run.

    Attributes:
        per_token_ratio: time per token of the run over the dense one, round by round; None in a dense run.
        same_first_tokens: how many tokens both decode alike before they part.
    """

    dense: ServingResult
    prompt_tokens: int
    new_tokens: int
    budget_ms: float
    noise_floor_pct: float
    run: ServingResult | None = None
    per_token_ratio: Quartiles | None = None
    same_first_tokens: int | None = None
    timing_warnings: list[str] = field(default_factory=list)

    @property
    def ours(self) -> ServingResult:
        """Of the run; in a dense run, of the dense model."""
        return self.run or self.dense

    def line(self) -> str:
        served, than = self.ours, ""
        if self.per_token_ratio is not None:
            than = f"\n{' ' * 15}" + time_saved(self.per_token_ratio, self.noise_floor_pct, " of a token's")
        return (
            f"{served.first_token_ms.median:.1f} ms to the first token, {served.per_token_ms.p50:.1f} ms a token "
            f"(p95 {served.per_token_ms.p95:.1f}), {served.within_budget_pct:.0f}% within {self.budget_ms:g} ms{than}"
        )


@dataclass
class Deployment(InTurns, share=0.05):
    """Serve the beginning of the first window, greedily.

    Args:
        prompt_tokens, new_tokens: lengths of prompt and answer.
        budget_ms: for a token (App. J: 50).
    """

    prompt_tokens: Annotated[int, at_least(2)] = 256
    new_tokens: Annotated[int, at_least(2)] = 64
    budget_ms: Annotated[float, check_positive] = 50.0
    repeats: Rounds = 5

    def check(self, setting: Setting) -> None:
        setting.check_prompt(self.prompt_tokens)

    def run(self, bench: Bench) -> DeploymentResult:
        prompt = bench.prompts("deployment", 1, self.prompt_tokens, self.new_tokens).to(bench.model.device)

        def request(side: Side) -> Served:
            side.reset()
            return serve(side.model, prompt, self.new_tokens)

        with bench.sides() as sides:
            ways = {name: partial(request, side) for name, side in sides.items()}
            rounds, times = deployment(ways, self.warmup, self.repeats, bench.model.device)
        found: dict[str, Any] = {name: ServingResult.of(those, self.budget_ms) for name, those in rounds.items()}
        if "run" in rounds:
            equal = (a == b for a, b in zip(rounds["run"][-1].tokens, rounds["dense"][-1].tokens, strict=True))
            found["same_first_tokens"] = len(list(itertools.takewhile(bool, equal)))
            found["per_token_ratio"] = times.ratio("run", to="dense")
        return DeploymentResult(
            **found, prompt_tokens=prompt.shape[1], new_tokens=self.new_tokens, budget_ms=self.budget_ms,
            noise_floor_pct=times.noise_floor_pct, timing_warnings=times.warnings,
        )  # fmt: skip
