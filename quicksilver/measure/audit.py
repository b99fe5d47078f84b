"""The no-lookahead audit: tokens after a few positions are replaced, and no logit before them may move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicksilver.measure.measurement import Measurement, Result
from quicksilver.runtime.options import Positive

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench

ROUNDING = 1e-4  # of the largest logit: more than this is no rounding of one sum


@dataclass(frozen=True)
class AuditResult(Result):
    """How far logits moved that must not move.

    Attributes:
        max_abs_logit_difference: the largest movement; `max_abs_logit` is the largest logit, for scale.
        probes: positions behind which everything was replaced; `positions` are these.
        masked_max_abs_logit_difference: under `masked` execution, free of rounding, where the movement was more than rounding leaves.
    """

    max_abs_logit_difference: float
    max_abs_logit: float
    probes: int
    positions: list[int]
    masked_max_abs_logit_difference: float | None = None

    def line(self) -> str:
        masked = self.masked_max_abs_logit_difference
        return f"logits moved by {self.max_abs_logit_difference:.2g} of {self.max_abs_logit:.3g} at {self.probes} probes" + (
            "" if masked is None else f" ({masked:.2g} under masked execution, free of rounding)"
        )


@dataclass
class Audit(Measurement):
    """Audit one batch.

    Args:
        probes: positions per window behind which the tokens are replaced.
    """

    probes: Positive = 3

    share = 0.08
    windows_speak = True

    def run(self, bench: Bench) -> AuditResult:
        from quicksilver.measure.perplexity import audit

        windows = bench.windows.ids[: bench.batch_windows]
        audited = audit(
            bench.model, windows, bench.protocol, bench.modules, bench.execution, seed=bench.seed, n_probes=self.probes,
            decision_layers=bench.decision_layers,
        )  # fmt: skip
        masked = None
        if bench.execution == "compact" and audited.max_abs_logit_difference > ROUNDING * audited.max_abs_logit:
            # Two causes look alike here: a leak, or coarse codes that magnify the last digits of a sum, which follow the shapes. Under
            # `masked` no shape depends on a decision: what still moves is a leak.
            exact = audit(
                bench.model, windows, bench.protocol, bench.modules, "masked", seed=bench.seed, n_probes=self.probes,
                decision_layers=bench.decision_layers,
            )  # fmt: skip
            masked = exact.max_abs_logit_difference
        return AuditResult(
            audited.max_abs_logit_difference, audited.max_abs_logit, len(audited.probes), list(audited.probes), masked
        )
