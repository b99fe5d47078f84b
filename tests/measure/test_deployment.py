"""One request at a time: the tokens are those of greedy decoding, and every one of them has a time. How long, no test asserts."""

from __future__ import annotations

import pytest
import torch
from tiny import load

from quicksilver.measure.deployment import Percentiles, Served, ServingResult, deployment, serve
from quicksilver.modules import StaticDepth
from quicksilver.runtime import apply

PROMPT = torch.tensor([[5, 9, 2, 33, 7, 5, 9, 2, 33, 7, 5, 9, 2]])
NEW = 9


def greedy(model: torch.nn.Module) -> list[int]:
    ids = PROMPT
    for _ in range(NEW):
        logits = model(ids, use_cache=False).logits[:, -1]
        logits[:, model.generation_config.eos_token_id] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids[0, PROMPT.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@torch.no_grad()
def test_served_tokens_are_those_of_greedy_decoding(family: str) -> None:
    model = load(family)
    served = serve(model, PROMPT, NEW)
    assert served.tokens == greedy(model)
    assert len(served.per_token_ms) == NEW - 1
    assert served.first_ms > 0
    assert served.first_ms + sum(served.per_token_ms) <= served.total_ms


@torch.no_grad()
def test_speculation_delivers_the_same_tokens_several_at_a_time() -> None:
    model = load("gpt2")
    served = serve(model, PROMPT, NEW, {"prompt_lookup_num_tokens": 3})
    assert served.tokens == greedy(model)
    assert len(served.per_token_ms) <= NEW - 1  # what came with the first token has no time of its own


@torch.no_grad()
def test_a_run_is_served_under_its_modules() -> None:
    model = load("gpt2")
    with apply(model, [StaticDepth(depth=0.2, missing_kv="drop")]) as run:
        tokens = serve(model, PROMPT, NEW).tokens
        assert len(run.trace.passes) == NEW
    assert tokens != greedy(model)


def served(step_ms: float, tokens: int = 5) -> Served:
    steps = [step_ms] * (tokens - 1)
    return Served(10.0, steps, 10.0 + sum(steps), list(range(tokens)))


def test_ways_take_turns_and_the_first_is_its_own_control() -> None:
    order: list[str] = []
    steps = {"dense": iter([9.0, 40.0, 44.0, 40.0, 40.0, 40.0, 40.0]), "run": iter([9.0, 60.0, 60.0, 80.0])}

    def way(name: str) -> Served:
        order.append(name)
        return served(next(steps[name]))

    found, times = deployment({"dense": lambda: way("dense"), "run": lambda: way("run")}, warmup=1, repeats=3)
    assert order == ["dense", "run"] + ["dense", "run", "dense"] * 3
    assert times["dense"].ms == [40, 40, 40]
    assert times.control_ms == [44, 40, 40]
    assert times.ratio("run", to="dense").median == pytest.approx(1.5)
    assert times.noise_floor == pytest.approx(0.05)
    run = ServingResult.of(found["run"], 50.0)
    assert run.per_token_ms == Percentiles(60, 80, None)  # twelve tokens have no 99th percentile
    assert run.within_budget_pct == 0
    assert ServingResult.of(found["dense"], 50.0).within_budget_pct == 100


def test_a_hundred_tokens_have_a_99th_percentile() -> None:
    many = ServingResult.of([served(float(ms), 51) for ms in (40, 60)], budget_ms=50.0)
    assert many.tokens_timed == 100
    assert many.per_token_ms.p99 == 60
    assert many.within_budget_pct == 50
    assert many.tokens_per_s == pytest.approx((51 / 2.010 + 51 / 3.010) / 2)
