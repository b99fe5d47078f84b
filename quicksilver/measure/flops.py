"""Executed FLOPs of one batch by interposition, beside the analytic count of the same calls: they agree within 1%."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicksilver.measure.measurement import Measurement, Result

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench
    from quicksilver.runtime.run import Run


def _counted(bench: Bench) -> tuple[Run, int]:
    """One pass of the batch, and the operations that its operators reported."""
    from quicksilver.measure.bench import forward
    from quicksilver.measure.flop_counter import count_executed

    batch = bench.batch
    with bench.apply() as run:
        return run, count_executed(lambda: forward(bench.model, batch, bench.protocol))


@dataclass(frozen=True)
class FlopsResult(Result, section="batch_flops"):
    """Of one batch: what operators that ran reported, and what the ledger counts."""

    interposed: int
    analytic: int


@dataclass
class Flops(Measurement, share=0.04, windows_speak=True):
    """Count one batch."""

    def run(self, bench: Bench) -> FlopsResult:
        run, interposed = _counted(bench)
        return FlopsResult(interposed, run.flops.executed)


@dataclass(frozen=True)
class RanksResult(Result):
    """Of one batch, in each of the processes that a model is cut among. Lists have one entry a process, in the order of their ranks.

    Attributes:
        executed_flops: of all processes together, as the ledger counts them; what each does for itself counts as often as it is done.
        executed_flops_by_rank: as the ledger counts them. interposed_flops_by_rank: as the operators that ran reported them.
        kv_bytes_billed, kv_bytes_resident: of the cache, in all processes together; 0 where the protocol writes none.
    """

    processes: int
    executed_flops: int
    executed_flops_by_rank: list[int]
    interposed_flops_by_rank: list[int]
    kv_bytes_billed: int
    kv_bytes_resident: int
    kv_bytes_billed_by_rank: list[int]
    kv_bytes_resident_by_rank: list[int]

    def line(self) -> str:
        shares = ", ".join(f"{flops / max(self.executed_flops, 1):.0%}" for flops in self.executed_flops_by_rank)
        return f"{self.processes} processes, which execute {shares} of the FLOPs"


@dataclass
class RankLedgers(Measurement, share=0.05, of_ranks=True, recorded_as="quicksilver.measure.ranks.RankLedgers"):
    """Count one batch in every process."""

    def run(self, bench: Bench) -> RanksResult:
        import torch

        run, interposed = _counted(bench)
        ranks, kv, own = run.arch.ranks, run.kv_bytes, run.kv_bytes_of_rank
        # (4, processes): each process has its own column, and zeros in the others.
        column = torch.zeros(4, ranks.size, dtype=torch.int64, device=bench.model.device)
        column[:, ranks.rank] = torch.tensor([run.flops_of_rank, interposed, own.billed, own.resident], device=column.device)
        executed, counted, billed, resident = ranks.reduced(column, "SUM").tolist()
        return RanksResult(ranks.size, run.flops.executed, executed, counted, kv.billed, kv.resident, billed, resident)
