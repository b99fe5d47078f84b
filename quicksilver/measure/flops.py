"""Executed FLOPs of one batch by interposition, beside the analytic count of the same calls: they agree within 1%."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quicksilver.measure.measurement import Measurement, Result

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench


@dataclass(frozen=True)
class FlopsResult(Result):
    """Of one batch: what operators that ran reported, and what the ledger counts."""

    section: ClassVar[str | None] = "batch_flops"

    interposed: int
    analytic: int


@dataclass
class Flops(Measurement):
    """Count one batch."""

    share = 0.04
    windows_speak = True

    def run(self, bench: Bench) -> FlopsResult:
        import torch

        from quicksilver.measure.bench import forward
        from quicksilver.measure.flop_counter import count_executed

        batch = bench.batch
        with torch.no_grad(), bench.apply() as run:
            interposed = count_executed(lambda: forward(bench.model, batch, bench.protocol))
            return FlopsResult(interposed, run.flops.executed)
