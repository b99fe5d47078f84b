"""The ledgers of each of the processes that a model is cut among, beside those of all together. One batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicksilver.measure.measurement import Measurement, Result

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench


@dataclass(frozen=True)
class RanksResult(Result):
    """Of one batch. Lists have one entry a process, in the order of their ranks.

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
class RankLedgers(Measurement):
    """Count one batch in every process."""

    share = 0.05
    of_ranks = True

    def run(self, bench: Bench) -> RanksResult:
        import torch

        from quicksilver.measure.bench import forward
        from quicksilver.measure.flop_counter import count_executed

        batch = bench.batch
        with torch.no_grad(), bench.apply() as run:
            interposed = count_executed(lambda: forward(bench.model, batch, bench.protocol))
            own = [run.flops_of_rank, interposed, run.kv_bytes_of_rank.billed, run.kv_bytes_of_rank.resident]
            ranks, total, kv = run.arch.ranks, run.flops.executed, run.kv_bytes
            # (4, processes): each process has its own column, and zeros in the others.
            column = torch.zeros(4, ranks.size, dtype=torch.int64, device=batch.device)
            column[:, ranks.rank] = torch.tensor(own, device=batch.device)
            executed, counted, billed, resident = ranks.sum(column).tolist()
        return RanksResult(ranks.size, total, executed, counted, kv.billed, kv.resident, billed, resident)
