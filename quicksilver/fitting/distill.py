"""Train a translator by what it does to the model's answers: KL to the dense logits after prompts whose tokens stopped.

The ridge solution is the start. The model stays frozen; W alone is trained (Adam), on the text that it was fitted on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from quicksilver.fitting.continuation import continuation_log_probs, kl_nats
from quicksilver.modules.presets import Schedule
from quicksilver.modules.translators import BoundTranslator, Translator
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.run import apply

Steps = Callable[[range], Iterable[int]]


def distill(
    architecture: Architecture,
    translator: Translator,
    ids: torch.Tensor,
    schedules: Sequence[Schedule],
    *,
    steps: int = 120,
    prompt_tokens: int = 448,
    batch_size: int = 4,
    learning_rate: float = 5e-4,
    seed: int = 0,
    progress: Steps = iter,
) -> Translator:
    """`translator` after so many steps of Adam on KL(dense ‖ predicted), in nats a token of the continuation.

    Args:
        ids: (W, N) long, the windows of the fit; a step takes `batch_size` of them, in an order drawn by `seed`.
        schedules: what is trained for, in turn; all predict before the translator's source layer.
        progress: wraps the numbers of the steps.

    Raises:
        ConfigError: no steps, windows no longer than the prompt, a schedule that predicts from another layer.
        QuickSilverError: the loss is not finite.
    """
    if steps < 1 or ids.shape[1] <= prompt_tokens + 1:
        raise ConfigError(
            f"steps={steps}, windows of {ids.shape[1]} tokens: give at least one step and windows longer than {prompt_tokens + 1}."
        )
    wrong = [str(schedule) for schedule in schedules if schedule.predict_before != translator.source_layer]
    if wrong or not schedules:
        raise ConfigError(
            f"schedules {', '.join(wrong) or 'none'}: give some that predict before layer {translator.source_layer}."
        )
    model = architecture.model
    weight = translator.weight.to(model.device).clone().requires_grad_()
    trained = _with_weight(translator, weight)
    optimiser = torch.optim.Adam([weight], lr=learning_rate, betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(ids), generator=generator) for _ in range(-(-steps * batch_size // len(ids)))])
    bound = BoundTranslator(trained, architecture)
    for step in progress(range(steps)):
        batch = ids[order[step * batch_size : (step + 1) * batch_size]]
        for group in optimiser.param_groups:
            # Ten steps up, then half a cosine down: without the way down the last steps are as noisy as the first.
            group["lr"] = learning_rate * min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / steps))
        with torch.no_grad():
            dense = continuation_log_probs(model, batch, prompt_tokens)
        halting = schedules[step % len(schedules)].halting(translator=bound)
        with torch.enable_grad(), apply(model, [halting]):
            loss = kl_nats(dense, continuation_log_probs(model, batch, prompt_tokens)).mean()
        if not bool(torch.isfinite(loss)):
            raise QuickSilverError(f"The loss of step {step} is not finite: give a smaller learning rate than {learning_rate:g}.")
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    said = translator.provenance | {
        "distilled": {
            "steps": steps,
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "seed": seed,
            "schedules": [str(s) for s in schedules],
        }
    }
    return dataclasses.replace(translator, weight=weight.detach().cpu(), provenance=said)


def _with_weight(translator: Translator, weight: torch.Tensor) -> Translator:
    return dataclasses.replace(translator, weight=weight)
