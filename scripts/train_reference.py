"""Train the two reference models from scratch: `python scripts/train_reference.py reference-gpt2` (or reference-llama).

Deterministic by seed, resumable after a kill at any moment (run the same command again), on CPU and on CUDA. Hidden matrices are
optimised by Muon (torch.optim.Muon, https://kellerjordan.github.io/posts/muon/), the rest by AdamW. The schedule is warmup, stable,
linear decay (arXiv 2405.18392): because the stable part does not depend on the end, `--total-tokens` may be changed on a resume until
the decay has begun, and the result is the same as if it had been given from the start.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import reference_corpus as corpus
import torch
import torch.nn.functional as F
from context_use import context_use
from safetensors.torch import load_file
from tqdm import tqdm
from training_state import TrainingState
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "quicksilver" / "models" / "reference"
SAVED_SECONDS, EVALUATED_SECONDS = 180, 1800


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights. Two runs with equal recipes on one machine give equal weights."""

    family: str
    layers: int = 16
    width: int = 192
    heads: int = 6
    kv_heads: int = 6
    mlp_width: int = 768
    vocab_size: int = 6144
    context_tokens: int = 512
    stable_context_tokens: int = 256  # attention at 512 costs a third of the throughput here; the decay runs at the full context
    micro_batch_tokens: int = 2048
    batch_tokens: int = 8192
    total_tokens: int = 14_000_000
    warmup_tokens: int = 400_000
    decay_fraction: float = 0.35
    lr_muon: float = 7e-3
    lr_adamw: float = 4e-3
    weight_decay: float = 0.01
    mixture: tuple[float, ...] = (0.36, 0.22, 0.42)  # wiki, books, docstrings
    decay_mixture: tuple[float, ...] = (0.70, 0.05, 0.25)  # while the learning rate falls: encyclopedic prose is what lags
    seed: int = 42
    sources: tuple[str, ...] = corpus.SOURCES
    whole_documents: bool = False  # a window begins with a document, or lies wholly in one
    long_from_tokens: int | None = None  # the full context from here on; None: from the decay on
    repeats: tuple[float, float] = (0.0, 0.0)  # share of windows with repeated spans, at the short and at the full context
    start: str | None = None  # the shipped model, or exported folder, whose weights and tokenizer the training begins with
    shortened: tuple[int, int] | None = (
        None  # (from step, to step): from there the learning rate falls straight to 0 at the other
    )

    @property
    def steps(self) -> int:
        return self.shortened[1] if self.shortened else self._planned_steps

    @property
    def _planned_steps(self) -> int:
        return math.ceil(self.total_tokens / self.batch_tokens)

    @property
    def decay_start(self) -> int:
        return round(self._planned_steps * (1 - self.decay_fraction))

    def lr_scale(self, step: int) -> float:
        """Share of the peak learning rate at `step`."""
        warm = min(1.0, (step + 1) * self.batch_tokens / self.warmup_tokens)
        if self.shortened and step >= self.shortened[0]:
            first, last = self.shortened
            return dataclasses.replace(self, shortened=None).lr_scale(first) * (last - step) / (last - first)
        if step < self.decay_start:
            return warm
        return warm * (self._planned_steps - step) / (self._planned_steps - self.decay_start)

    def context_at(self, step: int) -> int:
        long = step >= self.decay_start
        if self.long_from_tokens is not None:
            long = long or step * self.batch_tokens >= self.long_from_tokens
        return self.context_tokens if long else self.stable_context_tokens

    def mixture_at(self, step: int) -> tuple[float, ...]:
        return self.mixture if step < self.decay_start else self.decay_mixture

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> Recipe:
        """A recipe as JSON keeps it: tuples come back as lists, fields of a later version are missing."""
        unknown = saved.keys() - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise SystemExit(
                f"The checkpoint's recipe has {', '.join(sorted(unknown))}, which this version does not know. Nothing was changed."
            )
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
        return cls(**fields)


# On from the shipped models: windows of 1,024, source code, repeated spans and recalled facts, at a lower peak.
_FAR = Recipe(
    family="gpt2", context_tokens=1024, total_tokens=12_000_000, decay_fraction=0.3, sources=corpus.FAR_SOURCES, whole_documents=True,
    long_from_tokens=0, repeats=(0.0, 0.15), mixture=(0.18, 0.14, 0.2, 0.36, 0.12), decay_mixture=(0.3, 0.1, 0.22, 0.3, 0.08),
    lr_muon=5e-3, lr_adamw=3e-3, start="reference-gpt2",
)  # fmt: skip
RECIPES = {
    "reference-gpt2": Recipe(family="gpt2", total_tokens=13_000_000),
    # A ladder up to reference-gpt2's size: the same text, heads of the same width; all four see the same 4 M tokens.
    "ladder-gpt2-1m": Recipe(family="gpt2", layers=12, width=64, heads=2, kv_heads=2, mlp_width=256, total_tokens=4_000_000),
    "ladder-gpt2-2m": Recipe(family="gpt2", layers=12, width=96, heads=3, kv_heads=3, mlp_width=384, total_tokens=4_000_000),
    "ladder-gpt2-4m": Recipe(family="gpt2", layers=16, width=128, heads=4, kv_heads=4, mlp_width=512, total_tokens=4_000_000),
    "ladder-gpt2-8m": Recipe(family="gpt2", total_tokens=4_000_000),
    "far-gpt2": _FAR,
    "far-llama": dataclasses.replace(_FAR, family="llama", kv_heads=2, mlp_width=512, start="reference-llama"),
    "reference-llama": Recipe(family="llama", kv_heads=2, mlp_width=512, total_tokens=10_000_000, shortened=(850, 1020)),
}


@torch.no_grad()
def build_model(recipe: Recipe) -> PreTrainedModel:
    torch.manual_seed(recipe.seed)
    model = _new_model(recipe)
    if recipe.start is not None:
        weights = load_file(start_of(recipe.start) / "model.safetensors")
        for name, tensor in model.state_dict().items():
            if name in weights:  # tied weights are stored once
                known = weights[name].float()
                # Learned positions beyond those of the model it starts from begin as copies of the ones there are.
                tensor.copy_(known if known.shape == tensor.shape else known.repeat(len(tensor) // len(known), 1))
    return model


def start_of(start: str) -> Path:
    """The folder of a shipped model by its name, or a folder as it is."""
    return SHIPPED / start if (SHIPPED / start).is_dir() else Path(start)


def _new_model(recipe: Recipe) -> PreTrainedModel:
    if recipe.family == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=recipe.vocab_size, n_positions=recipe.context_tokens, n_embd=recipe.width, n_layer=recipe.layers,
                n_head=recipe.heads, n_inner=recipe.mlp_width, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
                bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=recipe.vocab_size, hidden_size=recipe.width, num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads, num_key_value_heads=recipe.kv_heads, intermediate_size=recipe.mlp_width,
            max_position_embeddings=recipe.context_tokens, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def optimizers(model: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in named if p.ndim == 2 and ("layers." in n or ".h." in n)]
    rest = [p for n, p in named if not (p.ndim == 2 and ("layers." in n or ".h." in n))]
    return [
        torch.optim.Muon(matrices, lr=recipe.lr_muon, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=recipe.lr_adamw, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Batches:
    """Random windows of the token streams; batch `step` is a pure function of (seed, step), so a resume needs no state."""

    def __init__(self, folder: Path, recipe: Recipe):
        self.recipe = recipe
        self.streams = [np.memmap(folder / f"{name}.bin", dtype=np.uint16, mode="r") for name in recipe.sources]
        self.starts = [np.load(folder / f"{name}.starts.npy") for name in recipe.sources] if recipe.whole_documents else []

    def _window(self, source: int, length: int, rng: np.random.Generator) -> np.ndarray:
        stream = self.streams[source]
        start = int(rng.integers(0, len(stream) - length))
        if self.recipe.whole_documents:
            starts = self.starts[source]
            document = int(np.searchsorted(starts, start, side="right"))
            end = int(starts[document]) if document < len(starts) else len(stream)
            start = max(int(starts[document - 1]), min(start, end - length))
        start = min(start, len(stream) - length)
        return np.asarray(stream[start : start + length], dtype=np.int64)

    def micro_batches(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (input_ids (B, N), position_ids (1, N)) until the batch is complete."""
        recipe = self.recipe
        rng = np.random.default_rng((recipe.seed, step))
        length = recipe.context_at(step)
        rows = recipe.micro_batch_tokens // length
        for _ in range(recipe.batch_tokens // recipe.micro_batch_tokens):
            which = rng.choice(len(self.streams), size=rows, p=recipe.mixture_at(step))
            windows = []
            for source in which:
                window = self._window(source, length, rng)
                repeats = recipe.repeats[length == recipe.context_tokens]
                windows.append(with_repeats(window, rng) if repeats and rng.random() < repeats else window)
            # A random offset trains the later learned positions while windows are still short.
            offset = int(rng.integers(0, recipe.context_tokens - length + 1))
            yield torch.from_numpy(np.stack(windows)), torch.arange(offset, offset + length)[None]


def with_repeats(window: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A span of the window (N,) comes again and again behind it, with gaps of one length or none, until the window is full."""
    window, n = window.copy(), len(window)
    length = int(rng.integers(n // 32, n // 3))
    first = int(rng.integers(0, n - 2 * length))
    gap = int(rng.integers(0, n - first - 2 * length + 1)) if rng.random() < 0.5 else 0
    at = first + length + gap
    while at < n:
        end = min(at + length, n)
        window[at:end] = window[first : first + end - at]
        at = end + gap
    return window


def step_loss(model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor, device: str) -> torch.Tensor:
    """Mean NLL in nats of tokens 1..N-1; input_ids (B, N)."""
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(input_ids, position_ids=position_ids, use_cache=False).logits[:, :-1]  # (B, N-1, V)
    return F.cross_entropy(logits.flatten(0, 1).float(), input_ids[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: str, context: int, max_windows: int | None, device: str
) -> float:
    """Bits per byte of `text` in disjoint windows of `context` tokens (float32, every position but the first of a window scored)."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    windows = ids[: len(ids) // context * context].view(-1, context)
    if max_windows is not None:
        windows = windows[torch.linspace(0, len(windows) - 1, min(max_windows, len(windows))).long()]
    nats, n_bytes = 0.0, 0
    model.eval()
    for rows in windows.split(8):
        logits = model(rows.to(device), use_cache=False).logits[:, :-1]
        nats += F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten().to(device), reduction="sum").item()
        n_bytes += sum(len(text.encode()) for text in tokenizer.batch_decode(rows[:, 1:].tolist()))
    model.train()
    return nats / math.log(2) / n_bytes


def load_tokenizer(folder: Path, context_tokens: int = 512) -> PreTrainedTokenizerFast:
    end = corpus.END_OF_TEXT
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=end, eos_token=end, unk_token=end, model_max_length=context_tokens, clean_up_tokenization_spaces=False
    )  # fmt: skip


class Checkpoint:
    """The state of a run, with its recipe and the seconds it took so far."""

    def __init__(self, folder: Path, recipe: Recipe):
        self.recipe = recipe
        self._state = TrainingState(folder)

    def save(
        self,
        step: int,
        model: PreTrainedModel,
        optims: Sequence[torch.optim.Optimizer],
        history: list[dict[str, Any]],
        seconds: float,
    ) -> None:
        meta = {"step": step, "seconds": seconds, "recipe": dataclasses.asdict(self.recipe), "history": history}
        self._state.save(meta, model, optims)

    def load(self, model: PreTrainedModel, optims: Sequence[torch.optim.Optimizer]) -> tuple[int, list[dict[str, Any]], float]:
        meta = self._state.load(model, optims, lambda meta, source: self._check_recipe(meta["recipe"], meta["step"], source))
        return (0, [], 0.0) if meta is None else (meta["step"], meta["history"], meta["seconds"])

    def _check_recipe(self, saved: dict, step: int, source: Path) -> None:
        theirs, mine = dataclasses.asdict(Recipe.from_saved(saved)), dataclasses.asdict(self.recipe)
        wrong = {k: (theirs[k], v) for k, v in mine.items() if theirs[k] != v}
        # A shortening says from which step it holds: up to there both recipes are one.
        if self.recipe.shortened and step <= self.recipe.shortened[0]:
            wrong.pop("shortened", None)
        before_decay = step <= min(self.recipe.decay_start, Recipe.from_saved(saved).decay_start)
        if before_decay:
            for key in ("total_tokens", "decay_fraction", "decay_mixture"):
                wrong.pop(key, None)
        if wrong:
            lines = "\n".join(f"  {k}: checkpoint {a}, now {b}" for k, (a, b) in wrong.items())
            raise SystemExit(
                f"{source} was made by another configuration:\n{lines}\nGive the same values, or another --work. Nothing was changed."
            )


def loss_curve(history: list[dict], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    train = [(h["tokens"], h["loss_nats"]) for h in history if "loss_nats" in h]
    left.plot([t / 1e6 for t, _ in train], [v for _, v in train], lw=0.8, color="0.25")
    left.set(
        xlabel="training tokens (millions)", ylabel="training loss (nats per token)", ylim=(min(v for _, v in train) * 0.95, 6.5)
    )
    held = [h for h in history if "held_out_bits_per_byte" in h]
    for name, style in (("wikitext-103-valid", "-"), ("python-docs", "--")):
        right.plot(
            [h["tokens"] / 1e6 for h in held], [h["held_out_bits_per_byte"][name] for h in held], style, marker=".", label=name
        )
    right.set(xlabel="training tokens (millions)", ylabel="held-out bits per byte (24 windows)")
    right.legend()
    fig.suptitle(title)
    fig.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(fig)


def corpus_name(recipe: Recipe) -> str:
    return "corpus-far" if "code" in recipe.sources else "corpus"


def train(name: str, recipe: Recipe, data_root: Path, work: Path, out: Path, device: str) -> None:
    run_folder = work / name
    corpus_folder = work / corpus_name(recipe)
    known = None if recipe.start is None else start_of(recipe.start) / "tokenizer.json"
    corpus.prepare(data_root, corpus_folder, recipe.vocab_size, recipe.sources, known)
    tokenizer = load_tokenizer(corpus_folder, recipe.context_tokens)
    held_out = {k: v for k, v in corpus.held_out_texts(data_root).items() if k in ("wikitext-103-valid", "python-docs")}

    model: PreTrainedModel = torch.nn.Module.to(build_model(recipe), device).train()
    optims = optimizers(model, recipe)
    checkpoint = Checkpoint(run_folder, recipe)
    step, history, seconds = checkpoint.load(model, optims)
    batches = Batches(corpus_folder, recipe)
    bar = tqdm(total=recipe.steps, initial=step, desc=name, unit="step", mininterval=5, file=sys.stderr)
    started = time.monotonic() - seconds
    saved, evaluated = time.monotonic(), -math.inf if recipe.long_from_tokens is None else time.monotonic() - EVALUATED_SECONDS
    while step < recipe.steps:
        scale = recipe.lr_scale(step)
        for optim, peak in zip(optims, (recipe.lr_muon, recipe.lr_adamw), strict=True):
            for group in optim.param_groups:
                group["lr"] = peak * scale
        losses = []
        for input_ids, position_ids in batches.micro_batches(step):
            loss = step_loss(model, input_ids.to(device), position_ids.to(device), device)
            (loss * recipe.micro_batch_tokens / recipe.batch_tokens).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=True)
        step += 1
        loss_nats = sum(losses) / len(losses)
        if not math.isfinite(loss_nats):
            raise SystemExit(
                f"{name}: the loss became {loss_nats} at step {step}. The last good checkpoint is kept in {run_folder / 'latest'}."
            )
        bar.update()
        bar.set_postfix(loss=f"{loss_nats:.3f}", lr=f"{scale:.2f}", refresh=False)
        history.append({"tokens": step * recipe.batch_tokens, "loss_nats": loss_nats})
        if (step % 100 == 0 and time.monotonic() - evaluated > EVALUATED_SECONDS) or step == recipe.steps:
            evaluated = time.monotonic()
            scores = {k: bits_per_byte(model, tokenizer, v, recipe.context_tokens, 24, device) for k, v in held_out.items()}
            history.append({"tokens": step * recipe.batch_tokens, "held_out_bits_per_byte": scores})
            if recipe.long_from_tokens is not None:
                used = {
                    name: round(value, 4) for name, value in context_use(model, tokenizer, data_root, 8, "calibration").items()
                }
                history[-1]["context_use"] = used
                tqdm.write(f"{name} step {step} {json.dumps(used)}", file=sys.stderr)
            tqdm.write(
                f"{name} step {step} loss {loss_nats:.3f} " + " ".join(f"{k} {v:.3f}" for k, v in scores.items()), file=sys.stderr
            )
        if step % 50 == 0 or step == recipe.steps or time.monotonic() - saved > SAVED_SECONDS:
            saved = time.monotonic()
            checkpoint.save(step, model, optims, history, time.monotonic() - started)
            loss_curve(history, run_folder / "loss_curve.png", name)
    bar.close()
    export(name, model, tokenizer, recipe, history, time.monotonic() - started, corpus_folder, run_folder, out, device)


def export(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    history: list[dict[str, Any]],
    seconds: float,
    corpus_folder: Path,
    run_folder: Path,
    out: Path,
    device: str,
) -> None:
    """The Hugging Face folder, in bfloat16, with what the model card needs beside it (`training.json`)."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    model.eval().to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    held = [h for h in history if "held_out_bits_per_byte" in h]
    training = {
        "recipe": dataclasses.asdict(recipe), "hours": seconds / 3600, "device": device, "torch": torch.__version__,
        "threads": torch.get_num_threads(), "corpus": json.loads((corpus_folder / "corpus.json").read_text()), "held_out": held,
    }  # fmt: skip
    (folder / "training.json").write_text(json.dumps(training, indent=1))
    loss_curve(history, folder / "loss_curve.png", name)
    print(f"{folder}: {sum(p.stat().st_size for p in folder.iterdir()) / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument(
        "--data-root", type=Path, default=Path(os.environ.get("QUICKSILVER_DATA", ROOT.parent / "shared" / "data"))
    )
    parser.add_argument(
        "--work", type=Path, default=Path(os.environ.get("QUICKSILVER_TRAINING", Path.home() / "quicksilver-training")),
        help="corpus, checkpoints, curves; outside of the repository, so that a run outlives its checkout",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=SHIPPED, help="where the finished folder goes")
    parser.add_argument("--total-tokens", type=int, help="may be changed on a resume until the decay has begun")
    parser.add_argument(
        "--shorten",
        type=int,
        nargs=2,
        metavar=("FROM", "TO"),
        help="let the learning rate fall to 0 at step TO, from step FROM on, not yet passed",
    )
    parser.add_argument("--start", help="go on from this exported folder, with other windows")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    recipe = RECIPES[args.name]
    if args.total_tokens is not None:
        recipe = dataclasses.replace(recipe, total_tokens=args.total_tokens)
    if args.start is not None:
        recipe = dataclasses.replace(recipe, start=args.start, seed=recipe.seed + 1)
    if args.shorten is not None:
        recipe = dataclasses.replace(recipe, shortened=tuple(args.shorten))
    torch.set_num_threads(args.threads)
    try:
        train(args.name, recipe, args.data_root, args.work, args.out, args.device)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
