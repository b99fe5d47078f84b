"""Fine-tune a causal language model on tasks with label words: `python scripts/finetune.py reference-llama --tasks sst2=3 rte=1`.

One model for several tasks: a batch holds examples of one task and of like length, batches come in a shuffled order that the seed
fixes. The loss is the cross-entropy of the label word after the prompt. For tasks of one sentence it is joined by `--prefix-loss` times
the cross-entropy among the label words after each token of the sentence (in training only): a phrase's sentiment is mostly decided
before its end, and thousands of labels alone train a small model slowly. With `--distil SHARE` the targets of these tasks are partly the
answers of a linear model of word n-grams that never saw the row's sentence. Resumable after a kill at any moment (run the same command again).

All weights are trained, or with `--lora RANK` low-rank updates of the matrices (`peft`), which are merged into the finished model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import training_loop
from torch.nn.utils.rnn import pad_sequence
from train_reference import DATA, start_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from quicksilver.data.spec import TaskConfig
from quicksilver.data.tasks import Example, read_task
from quicksilver.fitting.training import matrices_and_rest
from quicksilver.runs.config import compose
from quicksilver.runtime.errors import ConfigError

SAVED_EVERY, SCORED_EVERY = 200, 600  # steps; the kept rows take as long as 25 steps
HELD_ROWS = 600  # of a task's training rows, kept out of training: what choices are made on
FOLDS = 5
LONGEST = 3  # words of an n-gram


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights."""

    base: str
    epochs: dict[str, float]
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 100
    batch_tokens: int = 1024
    max_tokens: int = 192
    prefix_loss: float = 0.5
    seed: int = 42
    lora: int = 0  # rank of the low-rank updates; 0: all weights are trained
    # (from step, to step), in order: in each the learning rate falls straight to 0 from what the plan has at its beginning.
    falls: tuple[tuple[int, int], ...] = ()
    plan_dropout: float = 0.0  # share of a sentence's tokens whose embedding is zero in a step
    # What is kept out: "rows", or of tasks of one sentence whole "sentences" with all their phrases.
    held: str = "rows"
    distil: float = 0.0  # share of the n-gram model's answers in the targets of tasks of one sentence
    whole_sentences: float = 0.0  # epochs, besides the plan's, of the rows that are no phrase of another
    attention: str = "sdpa"  # "eager" takes half the time at a few dozen tokens

    def lr_scale(self, step: int, steps: int) -> float:
        """Share of the peak learning rate at `step`: a warmup, then a straight fall to 0 at the plan's `steps`."""
        return training_loop.falling(lambda at: min(1.0, (at + 1) / self.warmup_steps) * (1 - at / steps), self.falls, step)

    def may_differ(self, meta: Mapping[str, Any]) -> list[str]:
        """Fields of a state's recipe that may be others: falls that begin after its step."""
        begun = [list(fall) for fall in self.falls if fall[0] < meta["step"]]
        return ["falls"] if meta["recipe"]["falls"] == begun else []


OPTIONS = [f.name for f in dataclasses.fields(Recipe) if f.name not in ("base", "epochs", "falls")]  # by their names


@dataclass(frozen=True)
class Encoded:
    """One row.

    Attributes:
        words: the label words' tokens. sentence_end: tokens of the prompt up to here are the sentence; 0: no prefix loss.
        words_read: of the sentence, at each of its tokens.
        targets: (1 + words, W): share of each label word before the first word and after each; None: all on gold.
        whole: no phrase of another row.
    """

    ids: list[int]
    words: list[int]
    gold: int
    sentence_end: int
    words_read: tuple[int, ...] = ()
    targets: np.ndarray | None = None
    whole: bool = False


def encoded(tokenizer: Any, task: TaskConfig, found: Sequence[Example], max_tokens: int) -> list[Encoded]:
    texts = [task.template.split("}")[-1], *task.labels]
    last, *words = ([*one] for one in tokenizer(texts, add_special_tokens=False)["input_ids"])
    tail = len(last) if task.template.count("{") == 1 else 0
    if any(len(w) != 1 for w in words) or len({w[0] for w in words}) != len(words):
        raise SystemExit(f"label words must be one token each, and differ: {list(task.labels)}")
    prompts = tokenizer([e.prompt for e in found], add_special_tokens=False, verbose=False, return_offsets_mapping=True)
    made = []
    for ids, spans, e in zip(prompts["input_ids"], prompts["offset_mapping"], found, strict=True):
        end = max(len(ids[-max_tokens:]) - tail, 0) if tail else 0
        read = [len(e.prompt[:last].split()) - (not e.prompt[last : last + 1].isspace()) for _, last in spans[-max_tokens:][:end]]
        made.append(Encoded(ids[-max_tokens:], [w[0] for w in words], int(e.gold), end, tuple(read)))
    return made


def batches(data: list[Encoded], recipe: Recipe, rng: np.random.Generator) -> list[list[Encoded]]:
    """Examples of like length, at most `batch_tokens` padded tokens together."""
    made: list[list[Encoded]] = []
    for one in sorted(data, key=lambda e: len(e.ids) + rng.uniform(-1.5, 1.5)):
        longest = max(len(e.ids) for e in (one, *made[-1])) if made else 0
        if not made or (len(made[-1]) + 1) * longest > recipe.batch_tokens:
            made.append([])
        made[-1].append(one)
    return made


def plan(data: dict[str, list[Encoded]], recipe: Recipe, wanted: Mapping[str, float]) -> list[list[Encoded]]:
    """Batches of `wanted` epochs of every task, in one shuffled order."""
    made: list[list[Encoded]] = []
    for name, epochs in wanted.items():
        left, epoch = epochs, 0
        while left > 0:
            rng = np.random.default_rng((recipe.seed, epoch, len(name)))
            some = batches(data[name], recipe, rng)
            rng.shuffle(some)
            made += some[: round(len(some) * min(1.0, left))]
            left, epoch = left - 1, epoch + 1
    np.random.default_rng(recipe.seed).shuffle(made)
    return made


def tensors(batch: list[Encoded]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, N) ids padded on the right, (B, 1) where each one's sentence ends."""
    ids = pad_sequence([torch.tensor(e.ids) for e in batch], batch_first=True)
    return ids, torch.tensor([[e.sentence_end] for e in batch])


def loss_of(model: Any, batch: list[Encoded], prefix: float, heard: torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
    """Loss and share of right answers; `heard`: (B, N), 0 where a token's embedding is zero in this step."""
    ids, ends = tensors(batch)
    head = model.get_output_embeddings()
    embedded = model.get_input_embeddings()(ids)  # (B, N, D)
    if heard is not None:
        embedded = embedded * heard[..., None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.base_model(inputs_embeds=embedded, use_cache=False).last_hidden_state  # (B, N, D)
        logits = head(hidden[torch.arange(len(batch)), [len(e.ids) - 1 for e in batch]])  # (B, V)
    words, gold = torch.tensor(batch[0].words), torch.tensor([e.gold for e in batch])
    target = F.one_hot(gold, len(words)).float()  # (B, W)
    if batch[0].targets is not None:
        target = torch.tensor(np.array([e.targets[-1] for e in batch]), dtype=torch.float32)  # type: ignore[index]
    loss = -(target * logits.float().log_softmax(-1)[:, words]).sum(-1).mean()
    right = (logits[:, words].argmax(-1) == gold).float().mean().item()
    if prefix and int(ends.max()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            among = F.linear(hidden, head.weight[words]).float()  # (B, N, W)
        at = torch.arange(ids.shape[1]) < ends
        wanted = target[:, None].repeat(1, ids.shape[1], 1)  # (B, N, W)
        for row, e in zip(wanted, batch, strict=True):
            if e.targets is not None:
                row[: e.sentence_end] = torch.from_numpy(e.targets[list(e.words_read)])
        loss = loss + prefix * F.cross_entropy(among[at], wanted[at], reduction="none").mean()
    return loss, right


def drawn(batch: list[Encoded], share: float, seed: int, step: int) -> torch.Tensor:
    """(B, N): 0 for `share` of the tokens of each sentence, drawn by seed and step alone; 1 elsewhere.

    Not of the first ones: the first token sees itself alone, so that a zero would stay one through all layers, and the gradient of a norm at
    zero is a thousandfold in each of them.
    """
    ids, ends = tensors(batch)
    some, at = torch.from_numpy(np.random.default_rng((seed, step)).random(ids.shape)) < share, torch.arange(ids.shape[1])
    return (~(some & (at > 0) & (at < ends))).float()


@torch.no_grad()
def accuracy(model: Any, data: list[Encoded]) -> float:
    model.eval()
    ordered = sorted(data, key=lambda e: len(e.ids))
    groups = (ordered[start : start + 32] for start in range(0, len(ordered), 32))
    right = sum(round(loss_of(model, batch, 0.0)[1] * len(batch)) for batch in groups)
    model.train()
    return right / len(data)


def with_lora(model: Any, rank: int) -> Any:
    """The model with low-rank updates of all its matrices, which alone are trained; `merge_and_unload` gives a plain one back."""
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise SystemExit(f"--lora needs {error.name}, which is not installed: pip install 'quicksilver-lm[peft]'.") from error
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def read_rows(recipe: Recipe, tokenizer: Any, data_root: Path) -> tuple[dict[str, list[Encoded]], dict[str, list[Encoded]]]:
    """Rows of every task: those that are trained on, and those that are kept out."""
    data, held = {}, {}
    for name in recipe.epochs:
        read = read_task(compose([f"dataset={name}", "measure=task"]).dataset, "calibration", root=data_root)
        task, found = read.task, list(read.examples)
        sentences = sentences_of(task, found)
        if sentences and recipe.held == "sentences":
            scored, trained = map(np.flatnonzero, kept_out(sentences, HELD_ROWS, recipe.seed))
        else:
            order = np.random.default_rng(recipe.seed).permutation(len(found))
            scored, trained = np.split(order, [min(HELD_ROWS, len(found) // 10)])
        kept, rest = ([found[i] for i in rows] for rows in (scored, trained))
        held[name] = encoded(tokenizer, task, kept, recipe.max_tokens)
        data[name] = encoded(tokenizer, task, rest, recipe.max_tokens)
        if sentences:
            data[name] = taught(data[name], sentences_of(task, rest), recipe)
    return data, held


def sentences_of(task: TaskConfig, found: Sequence[Example]) -> list[str]:
    """What stands in the only field of each prompt; of a template with more fields nothing."""
    if task.template.count("{") != 1:
        return []
    before, after = task.template.split("{")[0], task.template.split("}")[1]
    return [e.prompt.removeprefix(before).removesuffix(after) for e in found]


def taught(data: list[Encoded], sentences: list[str], recipe: Recipe) -> list[Encoded]:
    """Rows with what the recipe wants to know of their sentences."""
    if recipe.distil:
        if (labels := len(data[0].words)) != 2:
            raise SystemExit(f"--distil takes tasks of two labels, and one of one sentence has {labels}.")
        answers, gold = out_of_fold(sentences, [e.gold for e in data], recipe.seed), np.eye(2)
        targets = [(1 - recipe.distil) * gold[e.gold] + recipe.distil * answer for e, answer in zip(data, answers, strict=True)]
        data = [dataclasses.replace(e, targets=mixed) for e, mixed in zip(data, targets, strict=True)]
    if recipe.whole_sentences:
        data = [dataclasses.replace(e, whole=bool(is_whole)) for e, is_whole in zip(data, owners(sentences)[1], strict=True)]
    return data


# -- rows that are parts of one another: SST-2's training rows are phrases of the same sentences -----------------------------------
# A row that is kept out of training measures nothing while the rest of its sentence is trained on, so rows are kept out by sentence.


def owners(texts: Sequence[str]) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """The sentences that each text is in. A text that no longer one contains, word for word, is a sentence itself.

    Returns:
        Per text the numbers of its sentences, ascending; and (texts,) whether it is a whole sentence.
    """
    sentences, whole = list[str](), set[str]()
    with_word: dict[str, list[int]] = defaultdict(list)
    found: dict[str, tuple[int, ...]] = {}
    plain = [" ".join(text.split()) for text in texts]
    for text in sorted(set(plain), key=lambda text: (-len(text.split()), text)):
        rarest = min((with_word.get(word, []) for word in text.split()), key=len, default=[])
        inside = tuple(i for i in rarest if f" {text} " in sentences[i])
        if not inside:
            inside = (len(sentences),)
            whole.add(text)
            for word in set(text.split()):
                with_word[word].append(len(sentences))
            sentences.append(f" {text} ")
        found[text] = inside
    return [found[text] for text in plain], np.array([text in whole for text in plain])


def kept_out(texts: Sequence[str], sentences: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to score and rows to train on, of different sentences.

    Args:
        sentences: how many are kept out; a tenth at most, and one at least.

    Returns:
        (texts,) rows that are whole kept sentences; (texts,) rows that are in another sentence too, which are trained on. A phrase of kept
        sentences alone is in neither. So it is between the official splits: a common phrase is trained on, the rest of a scored sentence is not.
    """
    owned, whole = owners(texts)
    there = 1 + max(max(own) for own in owned)
    kept = set(np.random.default_rng(seed).permutation(there)[: max(1, min(sentences, there // 10))].tolist())
    inside = np.array([all(i in kept for i in own) for own in owned])
    return inside & whole, ~inside


def out_of_fold(texts: Sequence[str], gold: Sequence[int], seed: int) -> list[np.ndarray]:
    """What a logistic regression of word 1- to 3-grams, fitted on the other folds, says after each word; a text goes with its first sentence.

    Args:
        gold: (texts,) 0 or 1.

    Returns:
        Per text (1 + words, 2): probabilities before the first word and after each. An n-gram that comes again counts again.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    first = np.array([own[0] for own in owners(texts)[0]])
    fold = np.random.default_rng(seed).integers(0, FOLDS, first.max() + 1)[first]
    labels, row = np.array(gold), np.array(texts, dtype=object)
    answers: list[np.ndarray] = [np.empty(0)] * len(texts)
    for number in range(FOLDS):
        rest = fold != number
        grams = TfidfVectorizer(ngram_range=(1, LONGEST), token_pattern=r"\S+", sublinear_tf=True)
        fitted = LogisticRegression(C=4.0, max_iter=300).fit(grams.fit_transform(row[rest]), labels[rest])
        for i in np.flatnonzero(~rest):
            answers[i] = _after_each_word(row[i], grams.vocabulary_, grams.idf_, fitted.coef_[0], fitted.intercept_[0])
    return answers


def _after_each_word(text: str, numbers: Mapping[str, int], idf: np.ndarray, weights: np.ndarray, bias: float) -> np.ndarray:
    """(1 + words, 2): the model's probabilities of each beginning of the text."""
    words = text.lower().split()
    push, norm = np.zeros((2, 1 + len(words)))
    for end in range(1, len(words) + 1):
        for length in range(1, min(LONGEST, end) + 1):
            gram = numbers.get(" ".join(words[end - length : end]))
            if gram is not None:
                push[end] += idf[gram] * weights[gram]
                norm[end] += idf[gram] ** 2
    logit = push.cumsum() / np.sqrt(np.maximum(norm.cumsum(), 1e-12)) + bias
    positive = 1 / (1 + np.exp(-logit))
    return np.stack([1 - positive, positive], axis=1)


# -- training ---------------------------------------------------------------------------------------------------------------------


def train(recipe: Recipe, data_root: Path, work: Path, out: Path | None, minutes: float) -> None:
    folder = start_of(recipe.base)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    whole: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=recipe.attention)
    adapted = with_lora(whole, recipe.lora) if recipe.lora else None
    model: Any = whole.train()  # the same modules, with the updates in them
    data, held = read_rows(recipe, tokenizer, data_root)
    sentences = {f"{name} sentences": [e for e in rows if e.whole] for name, rows in data.items() if any(e.whole for e in rows)}
    every = plan(data | sentences, recipe, dict(recipe.epochs) | dict.fromkeys(sentences, recipe.whole_sentences))
    steps = recipe.falls[-1][1] if recipe.falls else len(every)
    smooth: float | None = None  # share of right answers
    began, first = time.monotonic(), -1
    hidden, rest = matrices_and_rest(model)
    groups = [{"params": hidden, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optims = [torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.98))]

    def step_loss(step: int) -> torch.Tensor:
        nonlocal smooth, first
        first = step if first < 0 else first
        heard = drawn(every[step], recipe.plan_dropout, recipe.seed, step) if recipe.plan_dropout else None
        loss, right = loss_of(model, every[step], recipe.prefix_loss, heard)
        smooth = right if smooth is None else 0.98 * smooth + 0.02 * right
        return loss

    def note(step: int, loss_nats: float, history: training_loop.History) -> None:
        if step % SCORED_EVERY == 0 or step == steps:
            scores = {name: accuracy(model, rows) for name, rows in held.items()}
            history.append({"step": step, "loss_nats": loss_nats, "training_accuracy": smooth, "held_accuracy": scores})
            seen = sum(len(e.ids) for batch in every[first:step] for e in batch)
            print(json.dumps({**history[-1], "tokens_per_s": seen / (time.monotonic() - began)}), flush=True)

    done, history, _ = training_loop.run(
        model, optims, work, recipe, name=folder.name, steps=steps,
        lr_scale=lambda step: recipe.lr_scale(step, len(every)), loss_of=step_loss, note=note, save_every=SAVED_EVERY, minutes=minutes,
    )  # fmt: skip
    if done < steps or out is None:
        return
    # The model in bfloat16 with its tokenizer, training.json, the learning curve and a card.
    finished, rows = adapted.merge_and_unload() if adapted else model, {name: len(rows) for name, rows in data.items()}
    finished.to(torch.bfloat16).save_pretrained(out)
    for path in folder.glob("tokenizer*.json"):
        (out / path.name).write_bytes(path.read_bytes())
    told = {"recipe": dataclasses.asdict(recipe), "rows": rows, "history": history, "torch": torch.__version__}
    (out / "training.json").write_text(json.dumps(told, indent=1) + "\n")
    at = [h["step"] for h in history]
    curves = {name: (at, [h["held_accuracy"][name] for h in history]) for name in history[-1]["held_accuracy"]}
    training_loop.draw_curves(out / "learning_curve.png", out.name, [("step", "accuracy on rows kept out of training", curves)])
    (out / "README.md").write_text(card(out, recipe, history, rows))


LICENCES = {
    "sst2": "SST-2 (GLUE): for research", "cola": "CoLA: sentences published in linguistics, fair use",
    "rte": "RTE (GLUE): for research", "qnli": "QNLI, from SQuAD: CC BY-SA 4.0",
}  # fmt: skip


def card(out: Path, recipe: Recipe, history: list[Any], rows: dict[str, int]) -> str:
    """README.md of the finished model, by finetune.md.jinja."""
    falls = [f"{first}-{last}" for first, last in recipe.falls]
    words = ["--tasks", *(f"{name}={value:g}" for name, value in recipe.epochs.items()), *(["--falls", *falls] if falls else [])]
    for name in OPTIONS:
        if (value := getattr(recipe, name)) != getattr(Recipe, name):
            words += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else f"{value:g}"]
    before = start_of(recipe.base) / "training.json"
    known = json.loads(before.read_text()).get("rows", ()) if before.is_file() else ()
    return training_loop.filled(
        "finetune.md.jinja", name=out.name, recipe=recipe, rows=rows, last=history[-1], licences=LICENCES, held_rows=HELD_ROWS,
        size_mb=sum(path.stat().st_size for path in out.iterdir() if path.name != "README.md") / 1e6,
        trained_before=bool(set(rows) & set(known)), command=" ".join(["python scripts/finetune.py", recipe.base, *words, "--work W --out O"]),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask = parser.add_argument
    ask("base")
    ask("--tasks", nargs="+", required=True, metavar="TASK=EPOCHS")
    ask("--data-root", type=Path, default=DATA)
    ask("--work", type=Path, required=True)
    ask("--out", type=Path)
    ask("--threads", type=int, default=1)
    ask("--falls", nargs="*", default=[], metavar="FROM-TO", help="steps between which the learning rate falls to 0")
    ask("--minutes", type=float, default=1e9)
    training_loop.add_options(parser, Recipe, OPTIONS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    try:
        epochs = {name: float(n) for name, n in (word.split("=") for word in args.tasks)}
    except ValueError as error:
        raise SystemExit(f"--tasks takes TASK=EPOCHS, such as sst2=3, not {' '.join(args.tasks)!r}.") from error
    falling = tuple((int(first), int(last)) for first, last in (fall.split("-") for fall in args.falls))
    recipe = Recipe(args.base, epochs, **{name: getattr(args, name) for name in OPTIONS}, falls=falling)
    torch.manual_seed(recipe.seed)
    try:
        train(recipe, args.data_root, args.work, args.out, args.minutes)
    except ConfigError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
