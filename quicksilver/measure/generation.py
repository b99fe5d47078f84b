"""What a reader of generated text would notice: continuations under the run's modules beside the dense model's, of the same prompts.

Greedy, and sampled with the same random numbers for both (Gumbel-max: the token of greatest logit plus noise, which is a draw from the
softmax), so that texts part only where the predictions do. The texts stay in generation.parquet, a row a prompt and way of decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd

from quicksilver.measure.measurement import Measurement, Result, Setting
from quicksilver.runtime.errors import QuickSilverError
from quicksilver.runtime.options import Positive, at_least, check_positive

if TYPE_CHECKING:
    import torch

    from quicksilver.measure.bench import Bench

TEXTS = "generation.parquet"
GREEDY, SAMPLED = "greedy", "sampled"
REPEATED_NGRAM = 4  # tokens: longer than what any text repeats by itself
MAUVE_LEAST = 16  # texts: below it a divergence of clustered texts says nothing


@dataclass(frozen=True)
class Written:
    """Continuations of one way of decoding against the dense model's, means over prompts.

    Attributes:
        same_tokens: tokens before the first that differs; all of them where none does.
        identical: prompts whose whole continuation is the dense one.
        agreement: share of places with the same token, 0 to 1.
        edit_distance: Levenshtein distance in tokens over the length of the longer text, 0 to 1.
        repeated, dense_repeated: share of 4-grams that stood in the same continuation before, 0 to 1.
        distinct, dense_distinct: share of 2-grams that are different ones, 0 to 1.
        nats, dense_nats: negative log-likelihood a token under the dense model, of the run's and of the dense model's own continuation.
        mauve: of the two sets of texts, where the package is installed and there are at least 16 prompts.
    """

    same_tokens: float
    identical: int
    agreement: float
    edit_distance: float
    repeated: float
    dense_repeated: float
    distinct: float
    dense_distinct: float
    nats: float
    dense_nats: float
    mauve: float | None = None


@dataclass(frozen=True)
class GenerationResult(Result, section="generation"):
    """Over all prompts; each has its rows in generation.parquet.

    Attributes:
        prompts: how many, of `prompt_tokens` tokens; `new_tokens` were written after each, fewer where the text came to its end.
        executed_flops, dense_executed_flops: of the greedy continuations with their prompts.
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int
    greedy: Written
    sampled: Written | None
    executed_flops: int
    dense_executed_flops: int

    def line(self) -> str:
        found = self.greedy
        return (
            f"greedy texts part after {found.same_tokens:.1f} of {self.new_tokens} tokens, {100 * found.agreement:.0f}% of places agree; "
            f"{found.nats:.2f} nats a token under the dense model (its own {found.dense_nats:.2f})"
        )


@dataclass
class Generation(Measurement, share=0.3, of_dense="never"):  # dense is the other side of every comparison
    """Go on after the beginnings of the first windows.

    Args:
        prompts: how many windows; fewer where there are not as many.
        prompt_tokens, new_tokens: lengths of prompts and continuations.
        sampled: also draw, not only take the likeliest token.
        temperature: of the draws, above 0; without draws there is `sampled=false`.
        batch_size: prompts that are computed together; it decides nothing.
    """

    prompts: Positive = 16
    prompt_tokens: Annotated[int, at_least(2)] = 256
    new_tokens: Annotated[int, at_least(REPEATED_NGRAM)] = 64
    sampled: bool = True
    temperature: Annotated[float, check_positive] = 1.0
    batch_size: Positive = 8

    def check(self, setting: Setting) -> None:
        setting.check_prompt(self.prompt_tokens)

    def windows_passed(self, windows: int, window_tokens: int) -> float:
        written_and_read = 2 * min(self.prompts, windows) * (1 + self.sampled)
        return 2 * written_and_read * (self.prompt_tokens + self.new_tokens) / window_tokens  # by the run and by the dense model

    def run(self, bench: Bench) -> GenerationResult | None:
        if not bench.modules:
            return None
        prompts = bench.prompts("generation", self.prompts, self.prompt_tokens, self.new_tokens)
        ours, run_flops = self._written(bench, prompts, dense=False)
        theirs, dense_flops = self._written(bench, prompts, dense=True)
        with bench.apply(modules=()):
            frame = pd.DataFrame(
                _row(bench, way, number, prompts[number], *pair)
                for way in ours
                for number, pair in enumerate(zip(ours[way], theirs[way], strict=True))
            )
        bench.files[TEXTS] = lambda path: frame.to_parquet(path, index=False)
        ways = {way: _mean(rows, bench) for way, rows in frame.groupby("way", sort=False)}
        lengths = (len(prompts), prompts.shape[1], self.new_tokens)
        return GenerationResult(*lengths, ways[GREEDY], ways.get(SAMPLED), run_flops, dense_flops)

    def _written(self, bench: Bench, prompts: torch.Tensor, *, dense: bool) -> tuple[dict[str, list[list[int]]], int]:
        """Continuations of every prompt by way of decoding, and the operations executed for the greedy ones."""
        found: dict[str, list[list[int]]] = {way: [] for way in (GREEDY, SAMPLED)[: 1 + self.sampled]}
        end = getattr(bench.model.generation_config, "eos_token_id", None)
        ends = end if isinstance(end, list | tuple) else [] if end is None else [end]
        flops = 0
        for way, texts in found.items():
            for start in range(0, len(prompts), self.batch_size):
                batch = prompts[start : start + self.batch_size].to(bench.model.device)
                noise = [gumbel_noise(bench.seed, start + row) for row in range(len(batch))] if way == SAMPLED else None
                with bench.apply(modules=() if dense else None) as run:
                    texts += continued(bench.model, batch, self.new_tokens, noise, self.temperature, ends)
                    flops += run.flops.executed if way == GREEDY else 0
                done = sum(map(len, found.values())) / (len(prompts) * len(found))
                bench.progress((done + dense) / 2.5)
        return found, flops


def _row(bench: Bench, way: str, number: int, prompt: torch.Tensor, ours: list[int], dense: list[int]) -> dict[str, Any]:
    decode = bench.tokenizer.decode
    return {
        "prompt": number, "way": way, "prompt_text": decode(prompt), "text": decode(ours), "dense_text": decode(dense), "tokens": ours,
        "dense_tokens": dense, **compared(ours, dense), "nats": _nats_a_token(bench.model, prompt, ours),
        "dense_nats": _nats_a_token(bench.model, prompt, dense),
    }  # fmt: skip


def continued(
    model: Any,
    prompts: torch.Tensor,
    new_tokens: int,
    noise: Sequence[torch.Generator] | None = None,
    temperature: float = 1.0,
    ends: Sequence[int] = (),
) -> list[list[int]]:
    """At most `new_tokens` tokens after each of prompts (P, N), up to the first of `ends`, which is not among them. `noise` is
    one generator a prompt, of the draws; None: the likeliest token. Raises QuickSilverError: logits that are not finite."""
    import torch

    given, cache = prompts, None
    columns: list[torch.Tensor] = []
    for _ in range(new_tokens):
        output = model(given, use_cache=True, past_key_values=cache, logits_to_keep=1)
        logits, cache = output.logits[:, -1].float(), output.past_key_values  # (P, V)
        if not bool(logits.isfinite().all()):
            damaged = f"The logits after {prompts.shape[1] + len(columns)} tokens are NaN or infinite (dtype={model.dtype})."
            raise QuickSilverError(f"{damaged} Check the weights, or use model.dtype=float32.")
        if noise is not None:
            drawn = torch.stack([torch.rand(logits.shape[1], generator=one, dtype=torch.float64) for one in noise])
            gumbel = -(-drawn.clamp(min=1e-300).log()).clamp(min=1e-300).log()
            logits = logits.double() / temperature + gumbel.to(logits.device)
        given = logits.argmax(-1, keepdim=True)  # (P, 1)
        columns.append(given)
    found = torch.cat(columns, dim=1).tolist()
    return [row[: next((i for i, token in enumerate(row) if token in ends), len(row))] for row in found]


def gumbel_noise(seed: int, prompt: int) -> torch.Generator:
    """Of one prompt, whatever it is batched with."""
    import torch

    return torch.Generator().manual_seed((seed * 1_000_003 + prompt) % 2**63)


def compared(one: Sequence[int], dense: Sequence[int]) -> dict[str, float]:
    """How far two continuations of one prompt are from each other, and how much each repeats itself; fields as in `Written`."""
    longer = max(len(one), len(dense), 1)
    equal = [a == b for a, b in zip(one, dense, strict=False)]
    return {
        "same_tokens": [*equal, False].index(False),
        "identical": list(one) == list(dense),
        "agreement": sum(equal) / longer if one or dense else 1.0,
        "edit_distance": edit_distance(one, dense) / longer,
        "repeated": 1 - distinct(one, REPEATED_NGRAM),
        "dense_repeated": 1 - distinct(dense, REPEATED_NGRAM),
        "distinct": distinct(one, 2),
        "dense_distinct": distinct(dense, 2),
    }


def edit_distance(one: Sequence[int], two: Sequence[int]) -> int:
    """Levenshtein: the fewest insertions, deletions and replacements that make one of the other."""
    row = list(range(len(two) + 1))
    for i, a in enumerate(one, 1):
        above = row
        row = [i]
        for j, b in enumerate(two, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
    return row[-1]


def distinct(tokens: Sequence[int], n: int) -> float:
    """Share of n-grams that are different ones (distinct-n, Li et al. 2016), 1 where there is none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _nats_a_token(model: Any, prompt: torch.Tensor, tokens: Sequence[int]) -> float:
    """Mean negative log-likelihood of a continuation of prompt (N,); 0 for an empty one."""
    import torch

    if not tokens:
        return 0.0
    ids = torch.cat([prompt, torch.tensor(tokens)])[None].to(model.device)
    logits = model(ids[:, :-1], use_cache=False, logits_to_keep=len(tokens)).logits[0].float()  # (C, V)
    return float(torch.nn.functional.cross_entropy(logits, ids[0, -len(tokens) :]))


def _mean(rows: pd.DataFrame, bench: Bench) -> Written:
    means = {name: float(rows[name].mean()) for name in Written.__dataclass_fields__ if name not in ("identical", "mauve")}
    return Written(**means, identical=int(rows["identical"].sum()), mauve=_mauve(rows, bench))


def _mauve(rows: pd.DataFrame, bench: Bench) -> float | None:
    """MAUVE (Pillutla et al. 2021) of the run's texts against the dense model's, by the dense model's last states."""
    import torch

    if len(rows) < MAUVE_LEAST or find_spec("mauve") is None:
        return None
    import mauve

    @torch.no_grad()
    def feature(tokens: Sequence[int]) -> np.ndarray:  # (D,) float32
        ids = torch.tensor([list(tokens) or [0]], device=bench.model.device)
        return bench.model.base_model(ids, use_cache=False).last_hidden_state[0, -1].float().cpu().numpy()

    ours, dense = (np.stack([feature(text) for text in rows[name]]) for name in ("tokens", "dense_tokens"))
    return float(mauve.compute_mauve(p_features=ours, q_features=dense, seed=bench.seed, verbose=False).mauve)
