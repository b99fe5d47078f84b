"""Schedules of predicted K/V: chosen, and trained for, by KL to the dense model's answers (docs/predicted-kv.md).

The rule: for every source layer a translator is at hand for, and every number of protected last tokens asked about, the fewest dropped tokens that
reach the share and leave whole tiles of tokens; of these, least KL to dense on the choosing half. No perplexity, no timing, no test text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quicksilver.fitting.training import Steps, descend, warm_cosine
from quicksilver.modules.fitted import EMBEDDED, BoundTranslator, Translator
from quicksilver.modules.linear_mlp import LinearMLP, MLPMaps, map_flops
from quicksilver.modules.staged_halting import Schedule
from quicksilver.runtime.architecture import Architecture
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.ledger import LayerWork, head_flops
from quicksilver.runtime.module import RuntimeModule
from quicksilver.runtime.run import apply


# -- what a model says after a prompt, and what that costs ---------------------------------------------------------------------------
def continuation_log_probs(model: Any, ids: torch.Tensor, prompt_tokens: int) -> torch.Tensor:
    """Log-probabilities of what follows a prompt, teacher-forced, given the cache that the prompt left: ids (B, N) -> (B, N − P, V)."""
    ids = ids.to(model.device)
    prompt = model(ids[:, :prompt_tokens], use_cache=True, logits_to_keep=1)
    rest = model(ids[:, prompt_tokens:-1], use_cache=True, past_key_values=prompt.past_key_values)
    return torch.cat([prompt.logits, rest.logits], dim=1).float().log_softmax(-1)


def kl_nats(dense: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(dense ‖ other) a token, mean over the positions of each row: two of (B, S, V) log-probabilities -> (B,)."""
    return (dense.exp() * (dense - other)).sum(-1).mean(1)


def work_saved_pct(architecture: Architecture, work: Iterable[LayerWork], n_tokens: int, rows: int = 1) -> float:
    """Percent of the executed FLOPs of `rows` prompts that is saved where their layers do `work`, output head included."""
    head = rows * head_flops(architecture, 1).executed
    dense = rows * architecture.n_layers * LayerWork(1, n_tokens, None).flops(architecture)
    return 100 * (1 - (sum(one.flops(architecture) for one in work) + head) / (dense + head))


def layers_work(architecture: Architecture, active: Sequence[int], predicted: Mapping[int, int]) -> list[LayerWork]:
    """What each layer does of a prompt.

    Args:
        active: tokens that go through each layer.
        predicted: by layer, how many stop before it whose K/V are predicted from there on.
    """
    work, stopped = [], 0
    for layer, tokens in enumerate(active):
        newly = predicted.get(layer, 0)
        stopped += newly
        later = 2 * architecture.kv_params_per_layer * newly * (architecture.n_layers - 1 - layer)
        work.append(LayerWork(1, tokens, tokens + stopped if stopped else None, newly, later))
    return work


def saved_pct(architecture: Architecture, schedule: Schedule, prompt_tokens: int, n_neurons: int = 0) -> float:
    """Percent of a prompt's executed FLOPs that a schedule saves, its projections, predictions and the output head included.

    Args:
        n_neurons: that stay in each linear MLP.
    """
    n_layers, source = architecture.n_layers, schedule.predict_before
    protected, left = schedule.protected(prompt_tokens), prompt_tokens - schedule.dropped(prompt_tokens)
    active = [prompt_tokens] * schedule.drop_before + [left] * (source - schedule.drop_before) + [protected] * (n_layers - source)
    work = layers_work(architecture, active, {source: left - protected})
    of_map = map_flops(architecture.width, n_neurons, len(architecture.mlp_readers(0)[0]))
    for layer in schedule.linear_mlp:
        # All tokens that are there: to leave out the protected would take longer.
        work[layer] = replace(work[layer], mapped=active[layer] - protected, map_flops=of_map * active[layer])
    return work_saved_pct(architecture, work, prompt_tokens)


class KLToDense:
    """How far from the dense model modules leave the answers to the prompts of the same windows.

    Args:
        ids: (W, N) long, windows of the choosing half.
        dtype: in which the dense answers are kept.
    """

    def __init__(
        self,
        architecture: Architecture,
        ids: torch.Tensor,
        prompt_tokens: int = 448,
        batch_size: int = 8,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        self.arch, self.prompt_tokens = architecture, prompt_tokens
        self.batches = ids.split(batch_size)
        with torch.no_grad():
            self.dense = [continuation_log_probs(architecture.model, batch, prompt_tokens).to(dtype) for batch in self.batches]

    def of(self, *modules: RuntimeModule) -> torch.Tensor:
        """Of each window, nats a token: (W,)."""
        found = []
        with torch.no_grad(), apply(self.arch.model, modules) as run:
            for batch, dense in zip(self.batches, self.dense, strict=True):
                found.append(kl_nats(dense.float(), continuation_log_probs(self.arch.model, batch, self.prompt_tokens)))
                run.reset()
        return torch.cat(found).cpu()


# -- choosing ----------------------------------------------------------------------------------------------------------------------
DROP_DEPTH = 3 / 16  # of the layers, before which old tokens are dropped
TILE = 32  # tokens: attention kernels and matrix units take as long for a part of one as for all of it
PROTECT_LAST = (12, 28, 60, 92)  # with the first 4: half a tile, or one to three


@dataclass(frozen=True)
class Candidate:
    """A schedule and what it was found to do on the choosing text.

    Attributes:
        saved_pct: of the prompt's executed FLOPs.
        kl_nats: mean over windows, nats a token; kl_error its standard error.
    """

    schedule: Schedule
    saved_pct: float
    kl_nats: float
    kl_error: float


def first_that_saves(
    architecture: Architecture, schedules: Iterable[Schedule], save: float, prompt_tokens: int, n_neurons: int = 0
) -> Schedule | None:
    """The first of these schedules that saves the share `save` of a prompt's executed FLOPs; None: none does."""
    return next((one for one in schedules if saved_pct(architecture, one, prompt_tokens, n_neurons) >= 100 * save), None)


def _protects(last: int, prompt_tokens: int) -> dict[str, Any]:
    """So many last tokens of a prompt of `prompt_tokens`, the same share of a shorter one."""
    return {"protect_last": last, "protect_at_most": round(last / prompt_tokens, 6)}


def smallest_schedule(
    architecture: Architecture, source_layer: int, protect_last: int, save: float, prompt_tokens: int, tile: int = TILE
) -> Schedule | None:
    """The schedule with the fewest dropped tokens that saves the share `save` and leaves a multiple of `tile`, or all; of a prompt too short for
    that, any number. None where none saves so much."""
    drop_before = max(1, round(DROP_DEPTH * architecture.n_layers))
    if drop_before >= source_layer:
        return None
    drops = (n for n in range(prompt_tokens - protect_last - 4) if n == 0 or (prompt_tokens - n) % tile == 0)
    schedules = (
        Schedule(drop_before, round(n / prompt_tokens, 6), source_layer, tile=tile, **_protects(protect_last, prompt_tokens))
        for n in drops
    )
    found = first_that_saves(architecture, schedules, save, prompt_tokens)
    if found is not None or tile == 1:
        return found
    return smallest_schedule(architecture, source_layer, protect_last, save, prompt_tokens, tile=1)


def fewest_linear_mlps(
    architecture: Architecture, source_layer: int, protect_last: int, save: float, prompt_tokens: int, order: Sequence[int],
    n_neurons: int = 0,
) -> Schedule | None:  # fmt: skip
    """The schedule that drops no token and saves the share `save` with the fewest linear MLPs, taken as they come in `order`, before the
    source layer, one at least. None where all of them save less."""
    usable = [layer for layer in order if layer < source_layer]
    schedules = (
        Schedule(1, 0.0, source_layer, linear_mlp=tuple(sorted(usable[:n])), **_protects(protect_last, prompt_tokens))
        for n in range(1, len(usable) + 1)
    )
    return first_that_saves(architecture, schedules, save, prompt_tokens, n_neurons)


def by_kl(judge: KLToDense, maps: MLPMaps) -> dict[int, float]:
    """Layers with a map, by what it costs alone, least first: mean KL to dense, nats a token."""
    costs = {layer: float(judge.of(LinearMLP(layers=[layer], maps=maps)).mean()) for layer in maps.layers}
    return dict(sorted(costs.items(), key=lambda item: item[1]))


def search(
    judge: KLToDense,
    translators: Sequence[Translator],
    save: float,
    protect_last: Sequence[int] = PROTECT_LAST,
    progress: Callable[[Candidate], None] | None = None,
    *,
    maps: MLPMaps | None = None,
    order: Sequence[int] = (),
) -> list[Candidate]:
    """Every candidate of the rule, best first.

    Args:
        save: share of the prompt's executed FLOPs, 0 to 1.
        maps: linear MLPs; order: their layers, `by_kl`.

    Raises:
        ConfigError: no candidate saves so much.
    """
    found: list[Candidate] = []
    n_neurons = maps.n_neurons if maps else 0
    for translator, last in ((translator, last) for translator in translators for last in protect_last):
        asked = judge.arch, translator.source_layer, last, save, judge.prompt_tokens
        for schedule in (smallest_schedule(*asked), fewest_linear_mlps(*asked, order, n_neurons)):
            if schedule is None:
                continue
            bound = translator.bound(judge.arch)
            kl = judge.of(*schedule.modules(translator=bound, maps=EMBEDDED if maps is None else maps))
            saved = saved_pct(judge.arch, schedule, judge.prompt_tokens, n_neurons)
            found.append(Candidate(schedule, saved, float(kl.mean()), float(kl.std() / len(kl) ** 0.5)))
            if progress is not None:
                progress(found[-1])
    if not found:
        layers = ", ".join(str(translator.source_layer) for translator in translators)
        raise ConfigError(f"No schedule with a translator from layer {layers} saves {save:g}: ask less, or fit an earlier layer.")
    return sorted(found, key=lambda candidate: candidate.kl_nats)


# -- training a translator for them ------------------------------------------------------------------------------------------------
PROMPT_SHARES = (1.0, 0.5, 0.75, 0.25)  # of the asked prompt, in turn: maps of absolute positions have to see all of them


def distill(
    architecture: Architecture,
    translator: Translator,
    ids: torch.Tensor,
    schedules: Sequence[Schedule],
    *,
    steps: int = 120,
    prompt_tokens: int = 448,
    batch_size: int = 4,
    learning_rate: float = 5e-4,
    seed: int = 0,
    maps: MLPMaps | None = None,
    progress: Steps = iter,
) -> tuple[Translator, MLPMaps | None]:
    """Both after so many steps of Adam on KL(dense ‖ predicted), in nats a token of what follows a prompt.

    Args:
        ids: (W, N) long, the windows of the fit; a step takes `batch_size` of them, in an order drawn by `seed`.
        schedules: what is trained for, in turn; all predict before the translator's source layer. maps: their linear MLPs.
        prompt_tokens: of the longest prompt; of four steps, one has it, and the others three, two and one quarter of it.

    Raises:
        ConfigError: no steps, windows no longer than the prompt, a schedule that predicts from another layer.
        QuickSilverError: the loss is not finite.
    """
    if steps < 1 or ids.shape[1] <= prompt_tokens + 1:
        given = f"steps={steps}, windows of {ids.shape[1]} tokens"
        raise ConfigError(f"{given}: give steps, windows longer than {prompt_tokens + 1}.")
    wrong = [str(schedule) for schedule in schedules if schedule.predict_before != translator.source_layer]
    if wrong or not schedules:
        raise ConfigError(f"schedules {', '.join(wrong) or 'none'}: give some for layer {translator.source_layer}.")
    model = architecture.model
    weight = translator.weight.to(model.device).clone().requires_grad_()
    bound = BoundTranslator(replace(translator, weight=weight), architecture)
    trained = replace(maps, weight=maps.weight.clone().requires_grad_()) if maps else None
    order = drawn_order(len(ids), steps * batch_size, torch.Generator().manual_seed(seed))

    def loss_of(step: int) -> torch.Tensor:
        prompt = round(PROMPT_SHARES[step % len(PROMPT_SHARES)] * prompt_tokens)
        batch = ids[order[step * batch_size : (step + 1) * batch_size], : prompt + ids.shape[1] - prompt_tokens]
        with torch.no_grad():
            dense = continuation_log_probs(model, batch, prompt)
        schedule = schedules[step // len(PROMPT_SHARES) % len(schedules)]
        modules = schedule.modules(translator=bound, maps=EMBEDDED if trained is None else trained)
        with torch.enable_grad(), apply(model, modules):
            return kl_nats(dense, continuation_log_probs(model, batch, prompt)).mean()

    optimiser = torch.optim.Adam([weight, *([trained.weight] if trained else [])], lr=learning_rate, betas=(0.9, 0.99))
    descend(range(steps), loss_of, [optimiser], lambda step: learning_rate * warm_cosine(step, steps, 10), progress=progress)
    said: dict[str, Any] = {
        "steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed, "schedules": [str(s) for s in schedules],
    }  # fmt: skip
    if maps and trained:
        maps = replace(maps, weight=trained.weight.detach().cpu(), provenance=maps.provenance | {"distilled": said})
    return replace(translator, weight=weight.detach().cpu(), provenance=translator.provenance | {"distilled": said}), maps


def drawn_order(n: int, wanted: int, generator: torch.Generator) -> torch.Tensor:
    """At least `wanted` numbers below n: all of them in an order that is drawn, as often as it takes."""
    return torch.cat([torch.randperm(n, generator=generator) for _ in range(-(-wanted // n))])
