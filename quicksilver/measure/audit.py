"""The no-lookahead audit: tokens after a few positions are replaced, and no logit before them may move (docs/design.md §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from quicksilver.measure.measurement import Measurement, Result
from quicksilver.runtime.options import Positive

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from quicksilver.measure.bench import Bench
    from quicksilver.measure.perplexity import Protocol
    from quicksilver.runtime.module import RuntimeModule
    from quicksilver.runtime.run import Execution

ROUNDING = 1e-4  # of the largest logit: more than this is no rounding of one sum


@dataclass(frozen=True)
class AuditResult(Result):
    """How far logits moved that must not move.

    Attributes:
        max_abs_logit_difference: the largest movement. Rounding leaves about 1e-5 of the largest logit, `max_abs_logit`, in float32
            (compacted shapes differ), 1e-2 in bfloat16; a leak is of the size of the logits.
        probes: how many positions there were behind which everything was replaced; `positions` are these.
        masked_max_abs_logit_difference: under `masked` execution, free of rounding, where the movement was more than rounding leaves.
    """

    max_abs_logit_difference: float
    max_abs_logit: float
    probes: int
    positions: list[int]
    masked_max_abs_logit_difference: float | None = None

    @property
    def leaks(self) -> bool:
        """Whether a later token moved an earlier logit by more than rounding does."""
        masked = self.masked_max_abs_logit_difference
        return (self.max_abs_logit_difference if masked is None else masked) > ROUNDING * self.max_abs_logit

    def line(self) -> str:
        masked = self.masked_max_abs_logit_difference
        without = "" if masked is None else f" ({masked:.2g} under masked execution, free of rounding)"
        moved = f"logits moved by {self.max_abs_logit_difference:.2g} (the largest is {self.max_abs_logit:.3g})"
        return f"{moved} at {self.probes} probes{without}"


@dataclass
class Audit(Measurement, share=0.08, windows_speak=True):
    """Audit one batch.

    Args:
        probes: positions per window behind which the tokens are replaced.
    """

    probes: Positive = 3

    def run(self, bench: Bench) -> AuditResult:
        batch, layers = bench.windows.ids[: bench.batch_windows], bench.decision_layers
        given = (bench.model, batch, bench.protocol, bench.modules)
        audited = partial(audit, *given, seed=bench.seed, n_probes=self.probes, decision_layers=layers)
        found = audited(execution=bench.execution)
        if bench.execution == "compact" and found.max_abs_logit_difference > ROUNDING * found.max_abs_logit:
            # Two causes look alike here: a leak, or coarse codes that magnify the last digits of a sum, which follow the shapes. Under
            # `masked` no shape depends on a decision: what still moves is a leak.
            return replace(found, masked_max_abs_logit_difference=audited(execution="masked").max_abs_logit_difference)
        return found


def audit(
    model: PreTrainedModel,
    windows: torch.Tensor,
    protocol: Protocol,
    modules: Sequence[RuntimeModule] = (),
    execution: Execution = "compact",
    seed: int = 0,
    *,
    n_probes: int = 3,
    decision_layers: Sequence[int] | None = None,
) -> AuditResult:
    """Replace the tokens after a few positions by random others: no logit up to there may move, decisions included.

    Under `continuation` the probes lie after the prompt: inside it foresight is allowed. The first batch of windows is audited.
    Arguments and errors are those of `score`; `seed` decides the `n_probes` positions, fewer where a window has not as many, and
    the replacing tokens.
    """
    import torch

    from quicksilver.measure.perplexity import check_allowed, check_finite, check_windows, scored_logits
    from quicksilver.runtime.architecture import architecture_of
    from quicksilver.runtime.run import apply

    check_allowed(modules, protocol)
    check_windows(model, windows, protocol)
    generator = torch.Generator().manual_seed(seed)
    batch = windows[: protocol.batch_size]
    vocabulary = architecture_of(model).vocab_size
    # A probe needs a token after it that the model is given. Under `continuation` the last token of a window is only a target.
    row_zero = protocol.first_scored - 1  # position whose logits are the first we get
    last_given = protocol.window_tokens - (1 if protocol.name == "all" else 2)
    earliest = 0 if protocol.name == "all" else min(protocol.prompt_tokens, max(row_zero, last_given - 1))
    candidates = torch.arange(earliest, max(earliest + 1, last_given))
    probes = candidates[torch.randperm(len(candidates), generator=generator)[:n_probes]].sort().values.tolist()

    worst = 0.0
    with torch.no_grad(), apply(model, modules, execution=execution, decision_layers=decision_layers) as run:

        def logits_of(tokens: torch.Tensor) -> torch.Tensor:
            run.reset()  # a module that counts passes must see each of these as the first
            calls = [logits for logits, _ in scored_logits(model, tokens.to(model.device), protocol)]
            return torch.cat(calls, dim=1).float()  # (B, S, V), for the positions from row_zero on

        original = logits_of(batch)
        check_finite(original.isfinite().all(-1), 0, protocol, model)
        for probe in probes:
            replaced = batch.clone()
            tail = replaced[:, probe + 1 :]
            shift = torch.randint(1, max(2, vocabulary), tail.shape, generator=generator)
            replaced[:, probe + 1 :] = (tail + shift) % vocabulary  # never the token that was there
            after = logits_of(replaced)[:, : probe - row_zero + 1]
            check_finite(after.isfinite().all(-1), 0, protocol, model)  # NaN is no less than any bound
            worst = max(worst, float((after - original[:, : after.shape[1]]).abs().max()))
    return AuditResult(worst, float(original.abs().max()), len(probes), probes)
