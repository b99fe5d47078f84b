"""Quality: perplexity, bits per byte and how far predictions are from the dense model's, with the ledgers of the same forward passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quicksilver.measure.measurement import Measurement, Result

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench
    from quicksilver.measure.perplexity import Scores


@dataclass(frozen=True)
class QualityResult(Result):
    """Sums over the scored windows; perplexity divides once, at the end.

    Attributes:
        ppl: per token.
        bits_per_byte: None where the tokenizer loses bytes.
        nll_nats: of all scored tokens.
        tokens, bytes: scored.
        executed_flops, nominal_flops, paper_flops: the three ledgers; `signal_flops` of what decides. `prompt_…` under `continuation`.
        kv_bytes_billed, kv_bytes_resident: at the end of every batch, summed over the batches; 0 under `all`.
        kl_nats: KL(dense‖run) per scored token; None in a dense run.
        top1_agreement: share of scored positions whose likeliest token is the dense model's, 0 to 1; None in a dense run.
    """

    section: ClassVar[str | None] = ""

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

    def line(self) -> str:
        per_byte = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4g} bits per byte"
        return f"{self.ppl:.4g} perplexity per token{per_byte}"


@dataclass
class Quality(Measurement):
    """Score every window; every decision goes into the trace."""

    share = 0.25
    windows_speak = in_blocks = True
    of_ranks = True

    def run(self, bench: Bench) -> QualityResult:
        from quicksilver.measure.fidelity import DensePasses
        from quicksilver.measure.perplexity import score

        if bench.modules and bench.dense is None:
            bench.dense = DensePasses(bench.model, bench.protocol)
        scores = score(
            bench.model, bench.windows.ids, bench.protocol, bench.windows.token_bytes, modules=bench.modules,
            execution=bench.execution, progress=bench.batches_done, dense=bench.dense.logits if bench.dense and bench.modules else None, decision_layers=bench.decision_layers,
            keep=bench.keep("quality"),
        )  # fmt: skip
        bench.frame, bench.trace = scores.windows, scores.trace
        return QualityResult(**totals(scores))


def totals(scores: Scores) -> dict[str, Any]:
    """The fields of `QualityResult`."""
    frame = scores.windows
    sums = {name: int(frame[name].sum()) for name in frame.columns if name.endswith("_flops")}
    has_bytes = not frame["bytes"].isna().any()
    # Windows have equally many scored tokens: the mean over windows is the mean over tokens.
    means = {name: float(frame[name].mean()) for name in ("kl_nats", "top1_agreement") if name in frame}
    return {
        "ppl": scores.ppl,
        "bits_per_byte": scores.bits_per_byte,
        "nll_nats": scores.nll_nats,
        "tokens": scores.tokens,
        "bytes": int(frame["bytes"].sum()) if has_bytes else None,
        **sums,
        "kv_bytes_billed": scores.kv_bytes_billed,
        "kv_bytes_resident": scores.kv_bytes_resident,
        **means,
    }
