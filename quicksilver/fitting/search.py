"""Choose a schedule: of those that save enough, the one whose answers are nearest to the dense model's on calibration text.

The rule (docs/predicted-kv.md): for every source layer a translator is at hand for, and every number of protected last tokens asked about,
the fewest dropped tokens that reach the target; of these, least KL to dense on the choosing half. No perplexity, no timing, no test text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quicksilver.fitting.continuation import continuation_log_probs, kl_nats
from quicksilver.modules.presets import Schedule
from quicksilver.modules.translators import Translator
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.ledger import LayerWork, head_flops
from quicksilver.runtime.run import apply

DROP_DEPTH = 3 / 16  # of the layers, before which old tokens are dropped
PROTECT_LAST = (8, 32)


@dataclass(frozen=True)
class Candidate:
    """A schedule and what it was found to do on the choosing text.

    Attributes:
        saved_pct: of the prompt's executed FLOPs.
        kl_nats: mean over windows, nats a token; kl_error its standard error.
    """

    schedule: Schedule
    saved_pct: float
    kl_nats: float
    kl_error: float


def saved_pct(architecture: Architecture, schedule: Schedule, prompt_tokens: int) -> float:
    """Percent of a prompt's executed FLOPs that a schedule saves, its projections, predictions and the output head included."""
    dense = [LayerWork(1, prompt_tokens, None) for _ in range(architecture.n_layers)]
    total = sum(work.flops(architecture) for work in dense) + head_flops(architecture, 1).executed
    ours = (
        sum(work.flops(architecture) for work in _work(architecture, schedule, prompt_tokens))
        + head_flops(architecture, 1).executed
    )
    return 100 * (1 - ours / total)


def _work(architecture: Architecture, schedule: Schedule, prompt_tokens: int) -> list[LayerWork]:
    n_layers, source = architecture.n_layers, schedule.predict_before
    protected = schedule.protect_first + schedule.protect_last
    dropped = min(int(prompt_tokens * schedule.drop_share + 0.5), prompt_tokens - protected)
    stopped = prompt_tokens - dropped - protected
    work = []
    for layer in range(n_layers):
        if layer < schedule.drop_before:
            work.append(LayerWork(1, prompt_tokens, None))
        elif layer < source:
            work.append(LayerWork(1, prompt_tokens - dropped, None))
        else:
            at_source = layer == source
            predicted = stopped * (n_layers - 1 - source) if at_source else 0
            translation_flops = 2 * architecture.kv_params_per_layer * predicted
            work.append(LayerWork(1, protected, protected + stopped, stopped if at_source else 0, translation_flops))
    return work


def smallest_schedule(
    architecture: Architecture, source_layer: int, protect_last: int, save: float, prompt_tokens: int
) -> Schedule | None:
    """The schedule with the fewest dropped tokens that saves the share `save`; None where none does."""
    drop_before = max(1, round(DROP_DEPTH * architecture.n_layers))
    if drop_before >= source_layer:
        return None
    for dropped in range(prompt_tokens - protect_last - 4):
        schedule = Schedule(drop_before, round(dropped / prompt_tokens, 6), source_layer, 4, protect_last)
        if saved_pct(architecture, schedule, prompt_tokens) >= 100 * save:
            return schedule
    return None


class ScheduleEvaluator:
    """Measures schedules by KL to dense on the same windows.

    Args:
        ids: (W, N) long, windows of the choosing half.
    """

    def __init__(self, architecture: Architecture, ids: torch.Tensor, prompt_tokens: int = 448, batch_size: int = 8) -> None:
        self.arch, self.prompt_tokens = architecture, prompt_tokens
        self.batches = ids.split(batch_size)
        with torch.no_grad():
            self.dense = [continuation_log_probs(architecture.model, batch, prompt_tokens).half() for batch in self.batches]

    def kl_nats(self, schedule: Schedule, translator: Translator) -> torch.Tensor:
        """Of each window, nats a token: (W,)."""
        found = []
        halting = schedule.halting(translator=translator.bound(self.arch))
        with torch.no_grad(), apply(self.arch.model, [halting]):
            for batch, dense in zip(self.batches, self.dense, strict=True):
                found.append(kl_nats(dense.float(), continuation_log_probs(self.arch.model, batch, self.prompt_tokens)))
        return torch.cat(found).cpu()


def search(
    evaluator: ScheduleEvaluator,
    translators: Sequence[Translator],
    save: float,
    protect_last: Sequence[int] = PROTECT_LAST,
    progress: Callable[[Candidate], None] | None = None,
) -> list[Candidate]:
    """Every candidate of the rule, best first.

    Args:
        save: share of the prompt's executed FLOPs, 0 to 1.

    Raises:
        ConfigError: no candidate saves so much.
    """
    found = []
    for translator in translators:
        for last in protect_last:
            schedule = smallest_schedule(evaluator.arch, translator.source_layer, last, save, evaluator.prompt_tokens)
            if schedule is None:
                continue
            kl = evaluator.kl_nats(schedule, translator)
            saved = saved_pct(evaluator.arch, schedule, evaluator.prompt_tokens)
            found.append(Candidate(schedule, saved, float(kl.mean()), float(kl.std() / len(kl) ** 0.5)))
            if progress is not None:
                progress(found[-1])
    if not found:
        layers = ", ".join(str(translator.source_layer) for translator in translators)
        raise ConfigError(
            f"No schedule with a translator from layer {layers} saves {save:g} of a prompt: ask less, or fit from an earlier layer."
        )
    return sorted(found, key=lambda candidate: candidate.kl_nats)
