"""Quality: perplexity, bits per byte and how far predictions are from the dense model's, with the ledgers of the same forward passes; and its
null, the same budget with the choice left to chance. A mechanism is worth what it wins beyond that."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quicksilver.measure.measurement import Measurement, Result
from quicksilver.runtime.options import Positive

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench
    from quicksilver.measure.perplexity import Scores
    from quicksilver.runtime.module import RuntimeModule
    from quicksilver.runtime.trace import Trace


@dataclass(frozen=True)
class QualityResult(Result, section=""):
    """Sums over the scored windows; perplexity divides once, at the end.

    Attributes:
        ppl: per token; nll_nats, tokens, bytes: of all that is scored; bits_per_byte: None where the tokenizer loses bytes.
        executed_flops, nominal_flops, paper_flops: the three ledgers; `signal_flops` of what decides. `prompt_…` under `continuation`.
        kv_bytes_billed, kv_bytes_resident: at the end of every batch, summed over the batches; 0 under `all`.
        kl_nats: KL(dense‖run) per scored token; None in a dense run.
        top1_agreement: share of scored positions whose likeliest token is the dense model's, 0 to 1; None in a dense run.
    """

    ppl: float
    bits_per_byte: float | None
    nll_nats: float
    tokens: int
    bytes: int | None
    executed_flops: int
    nominal_flops: int
    paper_flops: int
    signal_flops: int
    kv_bytes_billed: int
    kv_bytes_resident: int
    prompt_executed_flops: int | None = None
    prompt_nominal_flops: int | None = None
    prompt_paper_flops: int | None = None
    prompt_signal_flops: int | None = None
    kl_nats: float | None = None
    top1_agreement: float | None = None

    @classmethod
    def of(cls, scores: Scores) -> QualityResult:
        """Totals of a pass."""
        frame = scores.windows
        sums: dict[str, Any] = {name: int(frame[name].sum()) for name in frame.columns if name.endswith("_flops")}
        # Windows have equally many scored tokens: the mean over windows is the mean over tokens.
        means: dict[str, Any] = {name: float(frame[name].mean()) for name in ("kl_nats", "top1_agreement") if name in frame}
        scored_bytes = None if frame["bytes"].isna().any() else int(frame["bytes"].sum())
        return cls(
            scores.ppl, scores.bits_per_byte, scores.nll_nats, scores.tokens, scored_bytes, kv_bytes_billed=scores.kv_bytes_billed,
            kv_bytes_resident=scores.kv_bytes_resident, **sums, **means,
        )  # fmt: skip

    def line(self) -> str:
        per_byte = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4g} bits per byte"
        return f"{self.ppl:.4g} perplexity per token{per_byte}"


def _scored(bench: Bench, modules: Sequence[RuntimeModule], name: str) -> Scores:
    """Every window scored under these modules; blocks are kept under that name."""
    from quicksilver.measure.perplexity import score

    return score(
        bench.model, bench.windows.ids, bench.protocol, bench.windows.token_bytes, modules=modules, execution=bench.execution,
        progress=bench.batches_done, dense=bench.dense.logits if bench.dense and modules else None,
        decision_layers=bench.decision_layers, keep=bench.keep(name),
    )  # fmt: skip


@dataclass
class Quality(Measurement, share=0.25, windows_speak=True, in_blocks=True, of_ranks=True):
    """Score every window; every decision goes into the trace."""

    def run(self, bench: Bench) -> QualityResult:
        from quicksilver.measure.perplexity import DensePasses

        if bench.modules and bench.dense is None:
            bench.dense = DensePasses(bench.model, bench.protocol)
        scores = _scored(bench, bench.modules, "quality")
        bench.frame, bench.trace = scores.windows, scores.trace
        return QualityResult.of(scores)


@dataclass(frozen=True)
class NullResult(Result, section="null"):
    """The run once more, by chance; fields as in `QualityResult`, means over the seeds where there are several.

    Attributes:
        kind: `shuffle`, `shuffle within tenths`, `random neighbours`, `random entries` or `random tokens`: see `by_chance`.
        seed_ppl: perplexity by seed; None: one seed.
    """

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
class Null(Measurement, share=0.15, windows_speak=True, in_blocks=True, of_dense="never"):
    """Score the windows again, with the same counts on random tokens. Adds `null_…` columns to the windows.

    Args:
        seeds: how many random draws; each window's `null_nll_nats` is the mean over them.
        tenths: decisions stay in their tenth of the prompt, so that a rule of position alone is no better than its null.
    """

    seeds: Positive = 1
    tenths: bool = False

    recorded_as = "quicksilver.measure.null.Null"

    def identity(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value != getattr(Null, name)}

    def run(self, bench: Bench) -> NullResult | None:
        assert bench.trace is not None  # quality is measured first
        found, kind = [], ""
        for seed in range(bench.seed, bench.seed + self.seeds):
            if (chosen := by_chance(bench.modules, bench.trace, seed, self.tenths)) is None:
                return None
            kind, chance = chosen
            found.append(_scored(bench, chance, f"null-{seed}"))
        names = [name for name in ("nll_nats", "kl_nats", "top1_agreement") if name in found[0].windows]
        columns = {f"null_{name}": sum(one.windows[name] for one in found) / self.seeds for name in names}
        bench.frame = bench.frame.assign(**columns)
        totals = [QualityResult.of(one) for one in found]
        ppl = math.exp(sum(one.nll_nats for one in totals) / sum(one.tokens for one in totals))
        flops = ("executed_flops", "nominal_flops")
        means = {name: sum(getattr(one, name) for one in totals) / self.seeds for name in (*names, *flops)}
        # How much chance decides differs from seed to seed only where it draws neighbours or entries, and then by a little.
        means |= {name: round(means[name]) for name in flops}
        return NullResult(kind, ppl, **means, seed_ppl=[one.ppl for one in totals] if self.seeds > 1 else None)


def by_chance(
    modules: Sequence[RuntimeModule], trace: Trace, seed: int, tenths: bool = False
) -> tuple[str, list[RuntimeModule]] | None:
    """The null of a run and its kind; None: nothing was decided about tokens, or they left by rule and there is nothing to draw.

    shuffle              its decisions on random tokens, `within tenths` of the prompt where asked
    random neighbours    of a run that fused: its fusing module's own null, the rest as it was. Without one, random tokens are merged
                         into their right neighbours, because one token alone does not decide that it is fused
    random entries       of a run that evicted: the evicting module's own null
    random tokens        of a prompt that was cut before the first layer: as many tokens are kept
    """
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
    return "random neighbours" if fused else "random entries", own
