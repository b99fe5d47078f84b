"""The null of a run: the same budget with the choice left to chance. Whatever a mechanism is worth, it is worth beyond this."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quicksilver.measure.measurement import Measurement, Result
from quicksilver.runtime.options import Positive

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench
    from quicksilver.runtime.module import RuntimeModule
    from quicksilver.runtime.trace import Trace


@dataclass(frozen=True)
class NullResult(Result):
    """The run once more, by chance; fields as in `QualityResult`, means over the seeds where there are several.

    Attributes:
        kind: `shuffle`, `shuffle within tenths`, `random neighbours`, `random entries` or `random tokens`: see `by_chance`.
        seed_ppl: perplexity by seed; None: one seed.
    """

    section: ClassVar[str | None] = "null"

    kind: str
    ppl: float
    nll_nats: float
    executed_flops: int
    nominal_flops: int
    kl_nats: float | None = None
    top1_agreement: float | None = None
    seed_ppl: list[float] | None = None

    def line(self) -> str:
        spread = "" if self.seed_ppl is None else f"; {min(self.seed_ppl):.4g} to {max(self.seed_ppl):.4g} by seed"
        return f"{self.ppl:.4g} perplexity per token ({self.kind}{spread})"


@dataclass
class Null(Measurement):
    """Score the windows again with the run's decisions dealt to other tokens. Adds `null_…` columns to the windows.

    Args:
        seeds: how often they are dealt; each window's `null_nll_nats` is the mean over them.
        tenths: decisions stay in their tenth of the prompt, so that a rule of position alone is no better than its null.
    """

    seeds: Positive = 1
    tenths: bool = False

    share = 0.15
    windows_speak = in_blocks = True
    of_dense = "never"

    def identity(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value != getattr(Null, name)}

    def run(self, bench: Bench) -> NullResult | None:
        from quicksilver.measure.perplexity import score
        from quicksilver.measure.quality import totals

        assert bench.trace is not None  # quality is measured first
        found, kind = [], ""
        for seed in range(bench.seed, bench.seed + self.seeds):
            chosen = by_chance(bench.modules, bench.trace, seed, self.tenths)
            if chosen is None:
                return None
            kind, chance = chosen
            found.append(
                score(
                    bench.model, bench.windows.ids, bench.protocol, bench.windows.token_bytes, modules=chance, execution=bench.execution,
                    progress=bench.batches_done, dense=bench.dense.logits if bench.dense else None,
                    decision_layers=bench.decision_layers, keep=bench.keep(f"null-{seed}"),
                )
            )  # fmt: skip
        columns = [name for name in ("nll_nats", "kl_nats", "top1_agreement") if name in found[0].windows]
        means = {f"null_{name}": sum(one.windows[name] for one in found) / self.seeds for name in columns}
        bench.frame = bench.frame.assign(**means)
        kept = [totals(one) for one in found]
        ppl = math.exp(sum(one["nll_nats"] for one in kept) / sum(one["tokens"] for one in kept))
        names = ("nll_nats", "kl_nats", "top1_agreement")
        mean = {name: sum(one[name] for one in kept) / self.seeds for name in names if name in kept[0]}
        # How much chance decides differs from seed to seed only where it draws neighbours or entries, and then by a little.
        flops = {name: round(sum(one[name] for one in kept) / self.seeds) for name in ("executed_flops", "nominal_flops")}
        seed_ppl = [one["ppl"] for one in kept] if self.seeds > 1 else None
        return NullResult(kind, ppl, **mean, **flops, seed_ppl=seed_ppl)


def by_chance(
    modules: Sequence[RuntimeModule], trace: Trace, seed: int, tenths: bool = False
) -> tuple[str, list[RuntimeModule]] | None:
    """The null of a run, and what kind it is: `shuffle` deals its decisions to random tokens, of the same tenth where asked. Who is fused with whom is not one
    token's decision, so a run that fused is repeated with its fusing module's own null, `random neighbours`, the rest as it was;
    where it has none, random tokens are merged into their right neighbours. Nor can evictions be dealt: `random entries` is the
    evicting module's own null. A prompt that was cut before the first layer has no decisions: as many `random tokens` are kept.
    None: nothing was decided about tokens, or they left by rule and there is nothing to draw."""
    from quicksilver.modules.controls import Replay, shuffled
    from quicksilver.runtime.module import Transform

    transforms = [module for module in modules if isinstance(module, Transform)]
    nulls = [module.null(seed) for module in modules]
    own = [null or module for null, module in zip(nulls, modules, strict=True)]
    if len(transforms) == len(modules):
        return ("random tokens", own) if any(nulls) else None
    fused, evicted = (any(getattr(one, events) for one in trace.passes) for events in ("fusions", "evictions"))
    if evicted and not any(nulls):
        return None
    if not any(nulls) or not (fused or evicted):
        dealt = shuffled(trace, seed, parts=10 if tenths else 1)
        return f"shuffle{' within tenths' * tenths}", [*transforms, Replay(dealt, like=modules)]
    kind = "random neighbours" if fused else "random entries"
    return kind, own
