"""One prompt served alone, run and dense in turns: time to the first token and for each one after it (App. J)."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from quicksilver.measure.measurement import Measurement, Quartiles, Result, Setting, Spread
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Count, at_least, check_positive

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench
    from quicksilver.measure.serving import Requests, Served

MIN_FOR_P99 = 100  # tokens: below it the 99th percentile is the slowest token, whatever it is called


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
        served = self.ours
        return (
            f"{served.first_token_ms.median:.1f} ms to the first token, {served.per_token_ms.p50:.1f} ms a token "
            f"(p95 {served.per_token_ms.p95:.1f}), {served.within_budget_pct:.0f}% within {self.budget_ms:g} ms"
        )


@dataclass
class Deployment(Measurement):
    """Serve the beginning of the first window, greedily.

    Args:
        prompt_tokens, new_tokens: lengths of prompt and answer.
        budget_ms: for a token (App. J: 50).
        warmup: untimed rounds.
        repeats: timed rounds, at least 3.
    """

    prompt_tokens: Annotated[int, at_least(2)] = 256
    new_tokens: Annotated[int, at_least(2)] = 64
    budget_ms: Annotated[float, check_positive] = 50.0
    warmup: Count = 1
    repeats: Annotated[int, at_least(3)] = 5

    share = 0.05
    timed = True

    def check(self, setting: Setting) -> None:
        if self.prompt_tokens > setting.window_tokens:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens}: the prompt is the beginning of a window, and a window has "
                f"protocol.window_tokens={setting.window_tokens}."
            )

    def run(self, bench: Bench) -> DeploymentResult:
        import torch

        from quicksilver.measure.latency import shared_weight_copy
        from quicksilver.measure.serving import deployment, serve

        model, new = bench.model, self.new_tokens
        prompt = bench.windows.ids[:1, : self.prompt_tokens].to(model.device)
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is not None and prompt.shape[1] + new > positions:
            raise ConfigError(
                f"measure.deployment: prompt_tokens={prompt.shape[1]} and new_tokens={new} are more than the model's {positions} "
                "positions."
            )
        dense = shared_weight_copy(model)
        with torch.no_grad(), ExitStack() as stack:
            ways = {"dense": lambda: serve(dense, prompt, new)}
            if bench.modules:
                run = stack.enter_context(bench.apply())

                def ours() -> Served:
                    run.reset()
                    return serve(model, prompt, new)

                ways["run"] = ours
            found, steps = deployment(ways, self.warmup, self.repeats, model.device)
        ratio = same = None
        if bench.modules:
            quartiles = steps.ratio("run", to="dense")
            ratio = Quartiles(quartiles.median, quartiles.low, quartiles.high)
            equal = (a == b for a, b in zip(found["run"].tokens, found["dense"].tokens, strict=True))
            same = sum(1 for _ in itertools.takewhile(bool, equal))
        return DeploymentResult(
            dense=self._of(found["dense"]),
            run=self._of(found["run"]) if bench.modules else None,
            prompt_tokens=prompt.shape[1],
            new_tokens=new,
            budget_ms=self.budget_ms,
            noise_floor_pct=100 * (steps.noise_floor or 0.0),
            per_token_ratio=ratio,
            same_first_tokens=same,
            timing_warnings=steps.warnings,
        )

    def _of(self, requests: Requests) -> ServingResult:
        import numpy as np

        times = np.asarray(requests.per_token_ms)
        p50, p95, p99 = (float(value) for value in np.percentile(times, [50, 95, 99]))
        return ServingResult(
            first_token_ms=Spread(requests.first.median, requests.first.iqr),
            per_token_ms=Percentiles(p50, p95, p99 if len(times) >= MIN_FOR_P99 else None),
            tokens_timed=len(times),
            tokens_per_s=requests.tokens_per_s,
            within_budget_pct=100 * float(np.mean(times <= self.budget_ms)),
        )
