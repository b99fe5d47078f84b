"""Is what stands once in a prompt still found, wherever it stands?

A passage of another window takes the place of tokens of the prompt, at one depth after another. The prompt ends with the passage's first tokens; the
rest is to follow. It is the needle in a haystack (Kamradt 2023) for models that were not taught to answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from quicksilver.measure.measurement import Measurement, Result, Setting
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Positive, at_least

if TYPE_CHECKING:
    import torch

    from quicksilver.measure.bench import Bench

ABSENT = "absent"  # instead of a depth: the prompt has no needle


def column(what: str, depth: int | str) -> str:
    """Of windows.parquet: `answered` (share of the needle's tokens, 0 to 1) or `nats` (a token) at one depth; empty for further windows."""
    return f"needle_{what}_{depth}"


@dataclass(frozen=True)
class NeedleResult(Result):
    """Means over windows.

    Attributes:
        prompt_tokens, asked_tokens: lengths of a prompt, and of what is to follow.
        depths: what share of the prompt stands before the needle, 0 to 1.
        answered: share of the asked tokens that are the likeliest prediction after the true ones before them, by depth, 0 to 1.
        nats: negative log-likelihood of an asked token, by depth.
        absent_answered, absent_nats: where the prompt has no needle: the text after its first tokens can be guessed.
    """

    windows: int
    prompt_tokens: int
    asked_tokens: int
    depths: list[float]
    answered: list[float]
    nats: list[float]
    absent_answered: float
    absent_nats: float

    def line(self) -> str:
        shares = " ".join(f"{100 * share:.0f}" for share in self.answered)
        return f"{shares}% of a passage is found, by its depth in {self.windows} prompts; {100 * self.absent_answered:.0f}% where it is not there"


@dataclass
class Needle(Measurement, share=0.5):
    """Prompts of the protocol's length, of the first windows.

    Args:
        windows: how many, fewer where there are not as many; each has the beginning of another one as its needle.
        depths: how many places, evenly from the prompt's beginning to its cue.
        needle_tokens: length of the passage.
        cue_tokens: of them the first, with which the prompt ends.
    """

    windows: Annotated[int, at_least(2)] = 32
    depths: Positive = 10
    needle_tokens: Annotated[int, at_least(2)] = 32
    cue_tokens: Positive = 8

    def check(self, setting: Setting) -> None:
        prompt, needle, cue = setting.prompt_tokens, self.needle_tokens, self.cue_tokens
        if prompt > setting.window_tokens:
            short = f"windows={self.windows}: windows of {setting.window_tokens} tokens are shorter than the prompt"
            raise ConfigError(f"{short}: give a smaller protocol.prompt_tokens than {prompt}.")
        if not cue < needle:
            raise ConfigError(f"cue_tokens={cue}: it must be less than needle_tokens={needle}.")
        if needle + cue >= prompt:
            raise ConfigError(
                f"needle_tokens={needle} and cue_tokens={cue} fill the prompt (protocol.prompt_tokens={prompt}): make it longer."
            )

    def windows_passed(self, windows: int, window_tokens: int) -> float:
        return min(self.windows, windows) * (self.depths + 1)

    def run(self, bench: Bench) -> NeedleResult:
        import torch

        asked = self.needle_tokens - self.cue_tokens
        of = "protocol.prompt_tokens={} and needle_tokens - cue_tokens={}"
        prompts = bench.prompts("needle", self.windows, bench.protocol.prompt_tokens, asked, of)  # (W, P)
        if len(prompts) < 2:
            raise ConfigError(
                "measure.needle: one window is scored, and a needle is a passage of another: give dataset.windows=2 or more."
            )
        needles = prompts.roll(len(prompts) // 2, 0)[:, : self.needle_tokens]
        hay = prompts[:, : -self.cue_tokens]
        places: Sequence[int | str] = (*range(self.depths), ABSENT)
        starts = [round((k + 0.5) / self.depths * (hay.shape[1] - self.needle_tokens)) for k in range(self.depths)]
        found: dict[str, torch.Tensor] = {}  # column -> (W,)
        for done, place in enumerate(places):
            bench.progress(done / len(places))
            filled = hay.clone()
            if isinstance(place, int):
                filled[:, starts[place] : starts[place] + self.needle_tokens] = needles
            both = _found(bench, torch.cat([filled, needles], dim=1))
            found |= dict(zip((column("answered", place), column("nats", place)), both, strict=True))
        by_window = {name: bench.frame["window"].map(dict(enumerate(values.tolist()))) for name, values in found.items()}
        bench.frame = bench.frame.assign(**by_window)
        answered, nats = ([float(found[column(what, place)].mean()) for place in places] for what in ("answered", "nats"))
        depths = [start / prompts.shape[1] for start in starts]
        return NeedleResult(len(prompts), prompts.shape[1], asked, depths, answered[:-1], nats[:-1], answered[-1], nats[-1])


def _found(bench: Bench, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows (W, P + C), whose last C tokens are asked: share of them that is predicted, and nats a token; both (W,) float64."""
    import torch

    from quicksilver.measure.perplexity import Protocol, check_finite, scored_logits

    found = []
    size = bench.protocol.batch_size
    for start, part in zip(range(0, len(rows), size), rows.split(size), strict=True):
        asked = Protocol("continuation", rows.shape[1], bench.protocol.prompt_tokens, len(part))
        with bench.apply():
            calls = [*scored_logits(bench.model, part.to(bench.model.device), asked)]
        logits, tokens = (torch.cat(parts, dim=1) for parts in zip(*calls, strict=True))  # (B, C, V), (B, C)
        check_finite(logits.isfinite().all(-1), start, asked, bench.model)
        lost = torch.nn.functional.cross_entropy(logits.float().mT, tokens, reduction="none")  # (B, C) nats
        found.append([both.double().mean(dim=1).cpu() for both in (logits.argmax(-1) == tokens, lost)])
    right, nats = (torch.cat(parts) for parts in zip(*found, strict=True))
    return right, nats
