"""Serving one request at a time: time to the first token and for each one after it (App. J, "Deployment Simulation").

The paper's setting: a prompt of 256 tokens, batch 1, greedy decoding, against a budget of 50 ms a token. Everything goes through
transformers' own `generate()`, so whatever it can do (speculation included) can be timed the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from quicksilver.measure.latency import Alternation, LatencySamples, alternate
from quicksilver.runtime.errors import ConfigError


@dataclass
class TokenClock(BaseStreamer):
    """Notes when tokens come out of `generate(streamer=…)`.

    Attributes:
        moments_s: when each delivery came, by `time.perf_counter`; the first is that of the first new token.
        counts: how many tokens came with it: one, or several that speculation got right.
    """

    moments_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    _prompt_seen: bool = False

    def put(self, value: torch.Tensor) -> None:
        """value: (1, N) the prompt, at first; then the new tokens, on the host already."""
        if self._prompt_seen:
            self.moments_s.append(time.perf_counter())
            self.counts.append(value.numel())
        self._prompt_seen = True

    def end(self) -> None:
        """Called by `generate` after the last token; every moment is noted already."""


@dataclass(frozen=True)
class Served:
    """One request.

    Attributes:
        first_ms: from the call until the first new token was there.
        per_token_ms: for each token after it; tokens that came together share the time that they took.
        total_ms: the whole call.
        tokens: new tokens, in order.
    """

    first_ms: float
    per_token_ms: list[float]
    total_ms: float
    tokens: list[int]


def serve(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int, options: Mapping[str, Any] | None = None) -> Served:
    """Decode exactly `new_tokens` tokens greedily after `prompt` (1, N).

    Args:
        options: further arguments of `generate`, such as `{"prompt_lookup_num_tokens": 3}`.

    Raises:
        ConfigError: more than one row, or fewer than two new tokens: then there is no time per token.
    """
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
    per_token: list[float] = []
    for before, after, count in zip(clock.moments_s, clock.moments_s[1:], clock.counts[1:], strict=False):
        per_token += [1e3 * (after - before) / count] * count
    return Served(1e3 * (clock.moments_s[0] - began), per_token, 1e3 * total, output[0, prompt.shape[1] :].tolist())


@dataclass(frozen=True)
class Requests:
    """Requests of one way to serve, over all rounds.

    Attributes:
        first: time to the first token, one sample a round.
        per_token_ms: time per output token after the first, of all rounds together.
        tokens_per_s: new tokens over the whole call, prompt included; median over rounds.
        tokens: what was decoded.
    """

    first: LatencySamples
    per_token_ms: list[float]
    tokens_per_s: float
    tokens: list[int]

    @classmethod
    def of(cls, rounds: Sequence[Served]) -> Requests:
        return cls(
            LatencySamples([one.first_ms for one in rounds]),
            [ms for one in rounds for ms in one.per_token_ms],
            float(np.median([1e3 * len(one.tokens) / one.total_ms for one in rounds])),
            rounds[-1].tokens,
        )


def deployment(
    ways: Mapping[str, Callable[[], Served]], warmup: int, repeats: int, device: str | torch.device = "cpu"
) -> tuple[dict[str, Requests], Alternation]:
    """Serve the same request in several ways, in turns; the first way is also the control (A/A).

    Args:
        ways: callables by name, each one `serve` of its own model.

    Returns:
        What each way gave, and the time per token of each round as an alternation, for ratios and the noise floor.

    Raises:
        ConfigError: fewer than 3 repeats.
    """
    served: dict[str, list[Served]] = {name: [] for name in ways}

    def noted(name: str, way: Callable[[], Served]) -> Callable[[], None]:
        return lambda: served[name].append(way())

    times = alternate({name: noted(name, way) for name, way in ways.items()}, warmup, repeats, device)
    control = next(iter(ways))
    rounds = {name: all_of[warmup:] for name, all_of in served.items()}
    again = rounds[control][1::2]
    rounds[control] = rounds[control][0::2]
    steps = Alternation(
        {name: _steps(those) for name, those in rounds.items()}, control=control, control_ms=_steps(again).ms,
        load_before=times.load_before, load_after=times.load_after, seconds=times.seconds, clock_gap_s=times.clock_gap_s,
    )  # fmt: skip
    return {name: Requests.of(those) for name, those in rounds.items()}, steps


def _steps(rounds: Sequence[Served]) -> LatencySamples:
    """Mean time per token of each round: what the budget is about."""
    return LatencySamples([sum(one.per_token_ms) / len(one.per_token_ms) for one in rounds])
