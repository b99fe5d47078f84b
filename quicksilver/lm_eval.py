"""Models under runtime modules for EleutherAI's lm-evaluation-harness, as its model `quicksilver` (pip install 'quicksilver-lm[lm-eval]').

    quicksilver lm_eval --model_args pretrained=reference-gpt2,modules=halting_attention --tasks my_task --include_path tasks

Importing this file registers the model, which `lm_eval.simple_evaluate(model="quicksilver", …)` then knows. The context of a request is a
prompt: modules may look ahead inside it, it is computed once for all continuations of one example, and continuations follow from its cache.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from quicksilver.measure.perplexity import Protocol, check_allowed
from quicksilver.records.store import Store
from quicksilver.runs.choices import choices, suggest
from quicksilver.runs.config import RunConfig, compose
from quicksilver.runs.context import RunContext
from quicksilver.runs.run import calibrated_modules
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.ledger import Flops
from quicksilver.runtime.module import TokenPolicy
from quicksilver.runtime.pass_state import TokenState
from quicksilver.runtime.run import apply
from quicksilver.runtime.view import LayerView

# Options of HFLM that mean the same here.
PASSED_ON = (
    "add_bos_token", "chat_template_args", "enable_thinking", "max_batch_size", "max_length", "prefix_token_id", "think_end_token",
    "truncation",
)  # fmt: skip
_OURS = ("pretrained", "modules", "device", "dtype", "batch_size")
_log = logging.getLogger(__name__)

Answer = tuple[float, bool]  # log-likelihood in nats, and whether greedy decoding would have written it
Request = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, tokens of the context, tokens of the continuation


@dataclass(frozen=True)
class Prompt:
    """One context and what is asked after it."""

    ids: tuple[int, ...]  # cut on the left where context and continuation do not fit into the model
    asked: tuple[tuple[int, tuple[int, ...]], ...]  # number of the request, and tokens of its continuation


@dataclass
class _Nothing(TokenPolicy):
    """Decides nothing. Without it a padded batch would run transformers' masked kernel, and what a module saves would hold the difference."""

    def decide(self, view: LayerView, tokens: TokenState) -> None: ...


@register_model("quicksilver")
class QuickSilverLM(HFLM):
    """A causal language model under runtime modules.

    Args:
        pretrained: a model of conf/model (reference-gpt2 …), a folder of a Hugging Face model, or a hub id; safetensors only.
        modules: names of conf/modules, joined by `+`; empty: the dense model.
        batch_size: contexts that are computed together.
        device: `cpu`, `cuda:0` …; None: as the model's config says.
        dtype: float32 | bfloat16 | float16; `auto` and None: as the model's config says.
        options: HFLM's options `PASSED_ON`; all others are overrides of a run, `modules.halting.halted_share=0.3`, `execution=masked`,
            `dataset=wikitext103` (whose calibration part gives thresholds that are percentiles).

    Raises:
        ConfigError: a model that cannot be had, an unknown module or option, a batch size that is no number.
    """

    def __init__(
        self,
        pretrained: str,
        modules: str | Sequence[str] = "",
        batch_size: int | str | None = 1,
        device: str | None = None,
        dtype: str | None = None,
        **options: Any,
    ) -> None:
        if not str(batch_size or 1).isdecimal() or int(batch_size or 1) < 1:
            raise ConfigError(f"batch_size={batch_size}: give a number of contexts; it is not searched for.")
        config = compose([*_model(pretrained, device, dtype), *_modules(modules), *_overrides(options)])
        place = RunContext()
        self.modules, _ = calibrated_modules(config, place, Store(config.results_dir))
        self.flops, self.truncated = Flops(), 0
        self._run_config, loaded = config, place.model(config)
        passed_on = {name: options[name] for name in PASSED_ON if name in options}
        super().__init__(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=int(batch_size or 1), **passed_on)
        self.pretrained = config.model.path

    # -- what lm-eval asks -------------------------------------------------------------------------------------------------------

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of whole texts: every token is scored, so modules that look ahead are refused.

        Raises:
            ConfigError: such a module.
        """
        check_allowed(self.modules, Protocol("all"))
        return cast("list[float]", super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm))

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        answers: dict[int, Answer] = {}
        # The windows of a rolling log-likelihood have no texts, and no prompt: a pass of their own each.
        rolling = requests[0][0] is None
        found = self._windows(requests, range(len(requests))) if rolling else self._after_prompts(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or rolling, desc="loglikelihood requests") as bar, torch.no_grad():
            for number, answer in found:
                answers[number] = answer
                if (texts := requests[number][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
                bar.update()
        return [answers[number] for number in range(len(requests))]

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> torch.Tensor:
        with self._counted():
            return cast("torch.Tensor", super()._model_generate(context, max_length, stop, **generation_kwargs))

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results."""
        ours: dict[str, Any] = {"modules": self._run_config.modules, "execution": self._run_config.execution}
        ours |= {"executed_flops": self.flops.executed, "nominal_flops": self.flops.nominal, "truncated_requests": self.truncated}
        return {**super().get_model_info(), "quicksilver": ours}

    # -- continuations of prompts ------------------------------------------------------------------------------------------------

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Within, the model runs under the modules; what it took is added to `flops`."""
        config = self._run_config
        options: dict[str, Any] = {"execution": config.execution, "decision_layers": config.decision_layers}
        with apply(self.model, self.modules or [_Nothing()], **(options if self.modules else {})) as run:
            yield
            self.flops += run.flops

    def _after_prompts(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """Answers by the number of their request."""
        prompts = self._prompts(requests)
        if not self.modules:
            # Dense inference knows no prompts. One that is asked for a single continuation of several tokens goes through in one pass with it.
            alone = {one.asked[0][0] for one in prompts if len(one.asked) == 1 and len(one.asked[0][1]) > 1}
            yield from self._windows(requests, sorted(alone))
            prompts = [one for one in prompts if one.asked[0][0] not in alone]
        for start in range(0, len(prompts), self.batch_size):
            with self._counted():
                yield from self._answers(prompts[start : start + self.batch_size])

    def _prompts(self, requests: Sequence[Request]) -> list[Prompt]:
        """Every context once, the long ones first."""
        asked: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
        truncated = 0
        for number, (_, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)
            if not continuation or room < 1:
                what = f"a continuation of {len(continuation)} tokens and a model of {self.max_length}"
                raise ConfigError(f"request {number}: {what}: nothing can be scored.")
            truncated += len(context) > room
            asked.setdefault(tuple(context[-room:]), []).append((number, tuple(continuation)))
        if truncated:
            said = "%d of %d contexts were cut on the left to fit into %d tokens."
            _log.warning(said, truncated, len(requests), self.max_length)
            self.truncated += truncated
        return sorted((Prompt(ids, tuple(which)) for ids, which in asked.items()), key=lambda one: (-len(one.ids), one.ids))

    def _answers(self, batch: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
        """Answers to all requests of a few prompts, which are computed together, padded on the left."""
        prompts = [torch.tensor(one.ids) for one in batch]
        ids = pad_sequence(prompts, batch_first=True, padding_side="left").to(self.device)  # (B, N)
        given = torch.tensor([len(one.ids) for one in batch])[:, None]
        mask = (torch.arange(ids.shape[1])[None] >= ids.shape[1] - given).long().to(self.device)
        # Positions are given where there is padding: some models would count it.
        padded = {} if bool(mask.all()) else {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        output = self.model(ids, use_cache=True, logits_to_keep=1, **padded)
        after = _log_probabilities(output.logits[:, -1])  # (B, V)
        asked = [(row, number, tokens) for row, one in enumerate(batch) for number, tokens in one.asked]
        yield from ((number, _answer(after[row][None], tokens)) for row, number, tokens in asked if len(tokens) == 1)
        longer = sorted((one for one in asked if len(one[2]) > 1), key=lambda item: len(item[2]))
        for start in range(0, len(longer), len(batch)):
            some = longer[start : start + len(batch)]
            # Each chunk reads a copy of the prompts' cache, in rows of its own: modules may evict and merge while they go on.
            cache = copy.deepcopy(output.past_key_values) if start + len(batch) < len(longer) else output.past_key_values
            yield from self._longer(some, cache, after, mask)

    def _longer(
        self, some: Sequence[tuple[int, int, tuple[int, ...]]], cache: Any, after: torch.Tensor, mask: torch.Tensor
    ) -> Iterator[tuple[int, Answer]]:
        """Continuations of several tokens, of the rows of `cache` that they name; after: (B, V), mask: (B, N) of the prompts."""
        rows = torch.tensor([row for row, _, _ in some], device=self.device)
        cache.batch_select_indices(rows)
        # Padding on the right comes after all that is scored: no token sees it.
        given = pad_sequence([torch.tensor(tokens[:-1]) for _, _, tokens in some], batch_first=True).to(self.device)  # (R, C-1)
        mask = torch.cat([mask[rows], torch.ones_like(given)], dim=1)
        positions = mask.cumsum(1)[:, -given.shape[1] :] - 1
        padded = {} if bool(mask.all()) else {"attention_mask": mask, "position_ids": positions}
        logits = self.model(given, use_cache=True, past_key_values=cache, **padded).logits
        rest = _log_probabilities(logits)  # (R, C-1, V)
        for place, (row, number, tokens) in enumerate(some):
            yield number, _answer(torch.cat([after[row][None], rest[place, : len(tokens) - 1]]), tokens)

    # -- whole texts -------------------------------------------------------------------------------------------------------------

    def _windows(self, requests: Sequence[Request], numbers: Sequence[int]) -> Iterator[tuple[int, Answer]]:
        """Answers to those requests, each scored in one pass over context and continuation, the long ones first.

        With modules those of one length go together, and nothing is padding. Without, padding on the right comes after all that is scored.
        """
        texts = {n: (requests[n][1] + requests[n][2])[-(self.max_length + 1) :] for n in numbers}
        ordered = sorted(numbers, key=lambda n: (-len(texts[n]), n))
        groups = [list(one) for _, one in groupby(ordered, lambda n: len(texts[n]))] if self.modules else [ordered]
        size = self.batch_size
        for some in (group[start : start + size] for group in groups for start in range(0, len(group), size)):
            tokens = pad_sequence([torch.tensor(texts[n]) for n in some], batch_first=True).to(self.device)  # (R, N)
            with self._counted():
                logits = self.model(tokens[:, :-1], use_cache=False).logits  # (R, N-1, V)
            for place, number in enumerate(some):
                end, scored = len(texts[number]) - 1, requests[number][2]
                yield number, _answer(_log_probabilities(logits[place, end - len(scored) : end]), scored)


def _answer(log_p: torch.Tensor, tokens: Sequence[int]) -> Answer:
    """Of tokens (C,) under log-probabilities (C, V)."""
    wanted = torch.tensor(tokens, device=log_p.device)
    return float(log_p.gather(1, wanted[:, None]).sum()), bool((log_p.argmax(-1) == wanted).all())


def _log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """In nats, float32, the shape of `logits`.

    Raises:
        QuickSilverError: logits that are not finite.
    """
    found = logits.float().log_softmax(-1)
    if not bool(found[..., 0].isfinite().all()):  # one that is not makes its whole row NaN
        raise QuickSilverError("The model's logits are NaN or infinite: check the weights, or use dtype=float32.")
    return found


def _model(pretrained: str, device: str | None, dtype: str | None) -> list[str]:
    """Overrides that select a model."""
    if not isinstance(pretrained, str) or not pretrained.strip():
        raise ConfigError(f"pretrained={pretrained!r}: give the name of a model, a folder or a hub id.")
    found = ["model=folder", f"model.name={Path(pretrained).name}", f"model.path={pretrained}"]
    found = [f"model={pretrained}"] if pretrained in choices("model") else found
    found += [f"model.device_map={device}"] if device else []
    return [*found, *([f"model.dtype={dtype}"] if dtype and dtype != "auto" else [])]


def _modules(modules: str | Sequence[str]) -> list[str]:
    names = modules.split("+") if isinstance(modules, str) else list(modules)
    # Whether a module may look ahead depends on the request: only what rolls over whole texts forbids it.
    return [f"modules=[{','.join(name.strip() for name in names if name.strip())}]", "protocol=continuation"]


def _overrides(options: Mapping[str, Any]) -> list[str]:
    """What is no option of HFLM, as overrides of a run."""
    known = [*RunConfig.__dataclass_fields__, *_OURS, *PASSED_ON]
    found = []
    for key, value in options.items():
        if key in PASSED_ON:
            continue
        if key.split(".")[0] not in RunConfig.__dataclass_fields__:
            raise ConfigError(f"model_args {key}={value}: {suggest(key, known, 'Options')}")
        found.append(f"{key}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}")
    return found
