"""A task's labelled examples under the run's modules: the choice of greatest log-likelihood after each prompt, and what it cost.

The prompt is computed once for all choices, with everything allowed that a prompt allows; the choice follows from its cache. Examples of
equal length go together, so nothing is padding and no operation is spent on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from quicksilver.measure.measurement import Measurement, Result
from quicksilver.models.loading import classification_head
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.options import Positive

if TYPE_CHECKING:
    from quicksilver.data.spec import TaskConfig
    from quicksilver.data.tasks import Example
    from quicksilver.measure.bench import Bench
    from quicksilver.runtime.run import Run

EXAMPLES = "examples.parquet"


@dataclass(frozen=True)
class TaskResult(Result):
    """Over all examples; each has its row in examples.parquet.

    Attributes:
        metric: the task's own; `score` is its value, `scores` those of all metrics.
        majority: score of the most frequent right answer, whatever the prompt (0 for correlations).
        examples: how many, with so many `tokens` in their prompts. truncated: those cut on the left to fit into the context.
        executed_flops, nominal_flops, paper_flops: of all examples. signal_flops: of them, what decides.
        deciding_depth: layers that the last token of a prompt went through, mean.
        evaluated: numbers of the metric of `evaluate` that was asked for.
    """

    metric: str
    score: float
    scores: dict[str, float]
    majority: float
    examples: int
    truncated: int
    tokens: int
    executed_flops: int
    nominal_flops: int
    paper_flops: int
    signal_flops: int
    deciding_depth: float
    evaluated: dict[str, float] | None = None

    def line(self) -> str:
        cut = f", {self.truncated} cut on the left to fit" if self.truncated else ""
        others = ", ".join(f"{name} {value:.4g}" for name, value in (self.evaluated or {}).items())
        found = (
            f"{self.metric} {100 * self.score:.1f} on {self.examples} examples{cut} (majority class {100 * self.majority:.1f})"
        )
        return f"{found}; evaluate: {others}" if others else found


class Encoded(NamedTuple):
    """An example in tokens: its prompt, and each choice."""

    number: int
    prompt: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    truncated: bool

    @property
    def is_one_word(self) -> bool:
        """Every choice is one token: the logits after the prompt say all."""
        return all(len(choice) == 1 for choice in self.choices)


@dataclass
class Task(Measurement, share=0.6):
    """Answer every example of the dataset.

    Args:
        batch_size: examples of equal length that are computed together (the paper: 8).
        evaluate: a metric of Hugging Face's `evaluate` beside our own: the path of a script, or a name of the hub (`glue/sst2`).
    """

    batch_size: Positive = 8
    evaluate: str | None = None

    def identity(self) -> dict[str, Any]:
        # A metric beside the others moves none of them: what asks for none is what it was before there were any.
        return {name: value for name, value in super().identity().items() if name != "evaluate" or value is not None}

    def run(self, bench: Bench) -> TaskResult:
        import pandas as pd
        import torch

        from quicksilver.data.tasks import REGRESSION, load_metric, scored

        if bench.examples is None:
            raise ConfigError("measure=task needs labelled examples and the dataset has none: take a task, such as dataset=sst2.")
        evaluated = None if self.evaluate is None else load_metric(self.evaluate)  # before the work, not after it
        task, examples = bench.examples.task, bench.examples.examples
        classes = label_classes(bench.model, task)
        encoded = encode(examples, bench.tokenizer, bench.protocol.window_tokens)  # no more than the context: windows were scored
        rows: list[dict[str, Any]] = []
        with bench.apply() as run:
            for batch in batches(encoded, self.batch_size):
                rows += _answered(bench.model, run, batch, classes)
                bench.progress(len(rows) / len(encoded))
        frame = pd.DataFrame(rows).sort_values("example", ignore_index=True)
        if REGRESSION in task.metrics:
            likelihoods = torch.tensor(frame["log_likelihoods"].tolist())  # label words: as many for each
            frame["prediction"] = (likelihoods.softmax(-1) * torch.arange(likelihoods.shape[1])).sum(-1).tolist()
        frame.insert(1, "row", [one.row for one in examples])
        frame.insert(2, "group", [one.group for one in examples])
        frame.insert(3, "gold", [float(one.gold) for one in examples])
        bench.files[EXAMPLES] = lambda path: frame.to_parquet(path, index=False)
        groups = list(frame["group"])
        scores = scored(task.metrics, frame["gold"], frame["prediction"], groups)
        name, score = next(iter(scores.items()))
        most = frame["gold"].mode().iloc[0]
        majority = scored(task.metrics, frame["gold"], [most] * len(frame), groups)[name]
        sums = {name: int(frame[name].sum()) for name in frame if name in ("truncated", "tokens") or name.endswith("_flops")}
        return TaskResult(
            name, score, scores, majority, len(frame), deciding_depth=float(frame["deciding_depth"].mean()), **sums,
            evaluated=None if evaluated is None else evaluated(frame["gold"], frame["prediction"]),
        )  # fmt: skip


def encode(examples: Sequence[Example], tokenizer: Any, context_tokens: int) -> list[Encoded]:
    """Examples in tokens; a prompt that leaves no room for its choices is cut on the left. Raises ConfigError: a choice without a
    token, two choices of the same tokens, a choice as long as the context."""

    def ids(texts: Sequence[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    found = []
    prompts = ids([one.prompt for one in examples])
    # A choice's tokens are those it has behind its prompt. Alone, tokenizers such as Llama 2's begin it with a space more.
    behind = iter(ids([one.prompt + choice for one in examples for choice in one.choices]))
    alone = dict(zip(words := sorted({choice for one in examples for choice in one.choices}), ids(words), strict=True))
    for number, (one, prompt) in enumerate(zip(examples, prompts, strict=True)):
        whole = [(next(behind), alone[choice]) for choice in one.choices]
        # Where a token crosses the border, no part of the whole is the choice.
        choices = tuple(tuple(both[len(prompt) :] if both[: len(prompt)] == prompt else own) for both, own in whole)
        if not all(choices) or len(set(choices)) < len(choices):
            raise ConfigError(f"row {one.row}: for this tokenizer the choices {', '.join(map(repr, one.choices))} do not differ.")
        longest = max(map(len, choices))
        room = context_tokens - longest + 1
        if room < 2:
            raise ConfigError(f"row {one.row}: its choices have {longest} tokens and the context {context_tokens}.")
        found.append(Encoded(number, tuple(prompt[-room:]), choices, len(prompt) > room))
    return found


def batches(encoded: Sequence[Encoded], size: int) -> Iterator[list[Encoded]]:
    """Examples whose prompts are equally long, at most `size`, the short ones first; one alone where a choice has several tokens."""
    ordered = sorted(encoded, key=lambda one: (len(one.prompt), one.number))
    for _, group in groupby(ordered, lambda one: len(one.prompt)):
        batch: list[Encoded] = []
        for one in group:
            if batch and (len(batch) == size or not (batch[0].is_one_word and one.is_one_word)):
                yield batch
                batch = []
            batch.append(one)
        yield batch


def label_classes(model: Any, task: TaskConfig) -> list[int] | None:
    """Class of a classifier's head for each of the task's labels, in their order; None: a model that answers by words. Raises
    ConfigError: a head of another number of labels, labels that it does not have, a task that chooses among texts."""
    head = classification_head(model)
    if head is None:
        return None
    names = {number: str(name).lower() for number, name in (getattr(model.config, "id2label", None) or {}).items()}
    there = ", ".join(names.values())
    if len(task.labels) != head.out_features:
        raise ConfigError(
            f"the model's head has {head.out_features} labels ({there}), and dataset.task.labels has {len(task.labels)}: take the task "
            "that it was trained for, or a model with a head of words."
        )
    wanted = [{one.lower() for one in spellings} for spellings in task.labels.values()]
    for spelled in (names, {number: str(number) for number in range(head.out_features)}):
        fits = [[number for number, text in spelled.items() if text in one] for one in wanted]
        if all(len(numbers) == 1 for numbers in fits) and len({numbers[0] for numbers in fits}) == len(fits):
            return [numbers[0] for numbers in fits]
    asked = ", ".join(map("/".join, task.labels.values()))
    remedy = "spell them there as the model does, or by their numbers."
    raise ConfigError(f"dataset.task.labels ({asked}) are not the model's labels ({there}): {remedy}")


def _answered(model: Any, run: Run, batch: Sequence[Encoded], classes: Sequence[int] | None) -> list[dict[str, Any]]:
    """One row an example of the batch; classes: as `label_classes` gives them."""
    import torch

    from quicksilver.measure.perplexity import ledger_columns

    run.reset()  # a ledger and a trace of this batch alone
    prompts = torch.tensor([one.prompt for one in batch], device=model.device)  # (B, N)
    if classes is None:
        output = model(prompts, use_cache=True, logits_to_keep=1)
        logits = output.logits[:, -1]  # (B, V)
    else:
        output = model.base_model(prompts, use_cache=True)
        logits = classification_head(model)(output.last_hidden_state[:, -1])[:, classes]  # (B, labels)  # type: ignore[misc]
    after = logits.float().log_softmax(-1)
    if not bool(after.isfinite().all()):
        damaged = f"example {batch[0].number}: the logits after its prompt are NaN or infinite (dtype={model.dtype})."
        raise QuickSilverError(f"{damaged} Check the weights, or use model.dtype=float32.")
    (prompt_pass,) = run.trace.passes
    depths = sum(prompt_pass.active(layer)[:, -1].long() for layer in range(run.arch.n_layers))
    rows = []
    for place, one in enumerate(batch):
        likelihoods = after[place].tolist() if classes else [float(after[place, choice[0]]) for choice in one.choices]
        if classes is None and not one.is_one_word:
            rest = [_rest(model, output.past_key_values, choice) for choice in one.choices]
            likelihoods = [first + more for first, more in zip(likelihoods, rest, strict=True)]
        best, depth = float(likelihoods.index(max(likelihoods))), int(depths[place])  # type: ignore[index]
        row = {"example": one.number, "prediction": best, "log_likelihoods": likelihoods, "tokens": len(one.prompt)}
        rows.append(row | {"truncated": one.truncated, "deciding_depth": depth})
    # Of every row the same: prompts are equally long.
    share = {name: total / len(rows) for name, total in ledger_columns(run.flops).items()}
    return [row | share for row in rows]


def _rest(model: Any, cache: Any, choice: Sequence[int]) -> float:
    """Log-likelihood in nats of a choice's tokens after its first; the cache is given back as it was."""
    import torch

    if len(choice) == 1:
        return 0.0
    given = torch.tensor([choice[:-1]], device=model.device)
    logits = model(given, use_cache=True, past_key_values=cache).logits[0].float().log_softmax(-1)  # (C-1, V)
    cache.crop(1 - len(choice))  # negative: as many tokens are removed
    return float(logits.gather(1, torch.tensor(choice[1:], device=model.device)[:, None]).sum())
