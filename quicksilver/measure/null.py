"""The null of a run: the same budget with the choice left to chance. Whatever a mechanism is worth, it is worth beyond this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quicksilver.measure.measurement import Measurement, Result

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench
    from quicksilver.runtime.module import RuntimeModule
    from quicksilver.runtime.trace import Trace


@dataclass(frozen=True)
class NullResult(Result):
    """The run once more, by chance; fields as in `QualityResult`.

    Attributes:
        kind: `shuffle`, `random neighbours` or `random entries`: see `by_chance`.
    """

    section: ClassVar[str | None] = "null"

    kind: str
    ppl: float
    nll_nats: float
    executed_flops: int
    nominal_flops: int
    kl_nats: float | None = None
    top1_agreement: float | None = None

    def line(self) -> str:
        return f"{self.ppl:.4g} perplexity per token ({self.kind})"


@dataclass
class Null(Measurement):
    """Score the windows again with the run's decisions dealt to other tokens. Adds `null_…` columns to the windows."""

    share = 0.15
    of_dense = "never"

    def run(self, bench: Bench) -> NullResult | None:
        from quicksilver.measure.perplexity import score
        from quicksilver.measure.quality import totals

        assert bench.trace is not None  # quality is measured first
        chosen = by_chance(bench.modules, bench.trace, bench.seed)
        if chosen is None:
            return None
        kind, chance = chosen
        null = score(
            bench.model, bench.windows.ids, bench.protocol, bench.windows.token_bytes, modules=chance, execution=bench.execution,
            progress=bench.batches_done, dense=bench.dense.logits if bench.dense else None, decision_layers=bench.decision_layers,
        )  # fmt: skip
        columns = ("nll_nats", "kl_nats", "top1_agreement")
        bench.frame = bench.frame.assign(**{f"null_{name}": null.windows[name] for name in columns if name in null.windows})
        kept = totals(null)
        names = ("ppl", "nll_nats", "executed_flops", "nominal_flops", "kl_nats", "top1_agreement")
        return NullResult(kind, **{name: kept[name] for name in names if name in kept})


def by_chance(modules: Sequence[RuntimeModule], trace: Trace, seed: int) -> tuple[str, list[RuntimeModule]] | None:
    """The null of a run, and what kind it is: `shuffle` deals its decisions to random tokens. Who is fused with whom is not one
    token's decision, so a run that fused is repeated with its fusing module's own null, `random neighbours`, the rest as it was;
    where it has none, random tokens are merged into their right neighbours. Nor can evictions be dealt: `random entries` is the
    evicting module's own null. None: nothing was decided about tokens, or they left by rule and there is nothing to draw."""
    from quicksilver.modules.controls import Replay, shuffled
    from quicksilver.runtime.module import Transform

    transforms = [module for module in modules if isinstance(module, Transform)]
    if len(transforms) == len(modules):
        return None
    nulls = [module.null(seed) for module in modules]
    fused, evicted = (any(getattr(one, events) for one in trace.passes) for events in ("fusions", "evictions"))
    if evicted and not any(nulls):
        return None
    if not any(nulls) or not (fused or evicted):
        return "shuffle", [*transforms, Replay(shuffled(trace, seed), like=modules)]
    kind = "random neighbours" if fused else "random entries"
    return kind, [null or module for null, module in zip(nulls, modules, strict=True)]
