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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import reference_corpus as corpus
import torch
import torch.nn.functional as F
import training_loop
from context_use import context_use
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from quicksilver.data.windows import encode
from quicksilver.fitting.training import matrices_and_rest
from quicksilver.measure.perplexity import Protocol, score
from quicksilver.runtime.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "quicksilver" / "models" / "reference"
DATA = Path(os.environ.get("QUICKSILVER_DATA", ROOT.parent / "shared" / "data"))
HELD_OUT = ("wikitext-103-valid", "python-docs")  # watched while training goes on
SAVED_EVERY, EVALUATED_SECONDS = 50, 1800  # steps, seconds


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
    tokenizer_of: str | None = None  # the shipped model whose tokenizer it has; None: one of its own, or that of `start`
    start: str | None = None  # the shipped model, or exported folder, whose weights and tokenizer the training begins with
    shortened: tuple[int, int] | None = None  # (from step, to step) between which the learning rate falls straight to 0

    @property
    def _planned_steps(self) -> int:
        return math.ceil(self.total_tokens / self.batch_tokens)

    @property
    def steps(self) -> int:
        return self.shortened[1] if self.shortened else self._planned_steps

    @property
    def decay_start(self) -> int:
        return round(self._planned_steps * (1 - self.decay_fraction))

    def lr_scale(self, step: int) -> float:
        """Share of the peak learning rate at `step`."""

        def planned(at: int) -> float:
            left = (self._planned_steps - at) / (self._planned_steps - self.decay_start) if at >= self.decay_start else 1.0
            return min(1.0, (at + 1) * self.batch_tokens / self.warmup_tokens) * left

        return training_loop.falling(planned, [self.shortened] if self.shortened else [], step)

    def context_at(self, step: int) -> int:
        far = self.long_from_tokens is not None and step * self.batch_tokens >= self.long_from_tokens
        return self.context_tokens if far or step >= self.decay_start else self.stable_context_tokens

    def may_differ(self, meta: Mapping[str, Any]) -> list[str]:
        """Fields of a checkpoint's recipe that may be others: what takes effect only after its step."""
        step, free = meta["step"], []
        # A shortening says from which step it holds: up to there both recipes are one.
        if self.shortened and step <= self.shortened[0]:
            free.append("shortened")
        if step <= min(self.decay_start, Recipe.from_saved(meta["recipe"]).decay_start):
            free += ["total_tokens", "decay_fraction", "decay_mixture"]
        return free

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> Recipe:
        """A recipe as JSON keeps it: tuples come back as lists; fields of another version are missing or left out."""
        known = {field.name for field in dataclasses.fields(cls)}
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items() if k in known}
        return cls(**fields)


# On from the shipped models: windows of 1,024, source code, repeated spans and recalled facts, at a lower peak.
_FAR = Recipe(
    family="gpt2", context_tokens=1024, total_tokens=12_000_000, decay_fraction=0.3, sources=corpus.FAR_SOURCES, whole_documents=True,
    long_from_tokens=0, repeats=(0.0, 0.15), mixture=(0.24, 0.14, 0.18, 0.28, 0.16), decay_mixture=(0.32, 0.1, 0.2, 0.26, 0.12),
    lr_muon=5e-3, lr_adamw=3e-3, start="reference-gpt2",
)  # fmt: skip
RECIPES = {
    "reference-gpt2": Recipe(family="gpt2", total_tokens=13_000_000),
    # The same again from other weights and with other windows: what differs between the two is chance.
    "reference-gpt2-seed43": Recipe(family="gpt2", total_tokens=13_000_000, seed=43, tokenizer_of="reference-gpt2"),
    # A ladder up to reference-gpt2's size: the same text, heads of the same width; all four see the same 4 M tokens.
    "ladder-gpt2-1m": Recipe(family="gpt2", layers=12, width=64, heads=2, kv_heads=2, mlp_width=256, total_tokens=4_000_000),
    "ladder-gpt2-2m": Recipe(family="gpt2", layers=12, width=96, heads=3, kv_heads=3, mlp_width=384, total_tokens=4_000_000),
    "ladder-gpt2-4m": Recipe(family="gpt2", layers=16, width=128, heads=4, kv_heads=4, mlp_width=512, total_tokens=4_000_000),
    "ladder-gpt2-8m": Recipe(family="gpt2", total_tokens=4_000_000),
    "far-gpt2": _FAR,
    "far-llama": dataclasses.replace(
        _FAR, family="llama", kv_heads=2, mlp_width=512, start="reference-llama", mixture=(0.24, 0.12, 0.16, 0.26, 0.22),
        decay_mixture=(0.30, 0.10, 0.18, 0.24, 0.18),
    ),
    "reference-llama": Recipe(family="llama", kv_heads=2, mlp_width=512, total_tokens=10_000_000, shortened=(850, 1020)),
}  # fmt: skip


@torch.no_grad()
def build_model(recipe: Recipe) -> PreTrainedModel:
    torch.manual_seed(recipe.seed)
    own: dict[str, Any] = {
        "n_inner": recipe.mlp_width, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        "activation_function": "gelu_pytorch_tanh",  # one kernel; `gelu_new`: eight
    } if recipe.family == "gpt2" else {
        "intermediate_size": recipe.mlp_width, "num_key_value_heads": recipe.kv_heads, "tie_word_embeddings": True,
    }  # fmt: skip
    config = AutoConfig.for_model(
        recipe.family, vocab_size=recipe.vocab_size, max_position_embeddings=recipe.context_tokens, hidden_size=recipe.width,
        num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads, bos_token_id=0, eos_token_id=0, **own,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
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


def optimizers(model: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    hidden, rest = matrices_and_rest(model)
    return [
        torch.optim.Muon(hidden, lr=recipe.lr_muon, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
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
        rows, repeats = recipe.micro_batch_tokens // length, recipe.repeats[length == recipe.context_tokens]
        mixture = recipe.mixture if step < recipe.decay_start else recipe.decay_mixture
        for _ in range(recipe.batch_tokens // recipe.micro_batch_tokens):
            which = rng.choice(len(self.streams), size=rows, p=mixture)
            windows = []
            for source in which:
                window = self._window(source, length, rng)
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


def bits_per_byte(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: str, context: int, max_windows: int | None
) -> float | None:
    """Bits per byte of `text` in disjoint windows of `context` tokens; the model comes back in the mode it was in."""
    windows, training = encode(text, tokenizer, context, max_windows), model.training
    try:
        return score(model.eval(), windows.ids, Protocol("all", context), windows.token_bytes).bits_per_byte
    finally:
        model.train(training)


def load_tokenizer(folder: Path, context_tokens: int = 512) -> PreTrainedTokenizerFast:
    end = corpus.END_OF_TEXT
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=end, eos_token=end, unk_token=end, model_max_length=context_tokens, clean_up_tokenization_spaces=False
    )  # fmt: skip


def loss_curve(history: training_loop.History, path: Path, title: str) -> None:
    millions = lambda rows: [row["tokens"] / 1e6 for row in rows]
    rows, texts = ([row for row in history if key in row] for key in ("loss_nats", "held_out_bits_per_byte"))
    training = {"training": (millions(rows), [row["loss_nats"] for row in rows])}
    held_out = {name: (millions(texts), [row["held_out_bits_per_byte"][name] for row in texts]) for name in HELD_OUT}
    curves = {"training loss (nats per token)": training, "held-out bits per byte (24 windows)": held_out}
    training_loop.draw_curves(path, title, [("training tokens (millions)", up, of) for up, of in curves.items()])


def corpus_name(recipe: Recipe) -> str:
    """Streams are reused by vocabulary size and sources, so a tokenizer of another model has a folder of its own."""
    name = "corpus-far" if "code" in recipe.sources else "corpus"
    return f"{name}-{recipe.tokenizer_of}" if recipe.tokenizer_of else name


def train(name: str, recipe: Recipe, data_root: Path, work: Path, out: Path, device: str) -> None:
    run_folder, corpus_folder = work / name, work / corpus_name(recipe)
    before = recipe.start or recipe.tokenizer_of
    known = None if before is None else start_of(before) / "tokenizer.json"
    corpus.prepare(data_root, corpus_folder, recipe.vocab_size, recipe.sources, known)
    tokenizer = load_tokenizer(corpus_folder, recipe.context_tokens)
    held_out = {name: text for name, text in corpus.held_out_texts(data_root).items() if name in HELD_OUT}
    model: PreTrainedModel = torch.nn.Module.to(build_model(recipe), device).train()
    batches = Batches(corpus_folder, recipe)
    far = recipe.long_from_tokens is not None
    evaluated = time.monotonic() - EVALUATED_SECONDS if far else -math.inf

    def losses(step: int) -> Iterator[torch.Tensor]:
        for input_ids, position_ids in batches.micro_batches(step):
            loss = step_loss(model, input_ids.to(device), position_ids.to(device), device)
            yield loss * (recipe.micro_batch_tokens / recipe.batch_tokens)

    def note(step: int, loss_nats: float, history: training_loop.History) -> None:
        nonlocal evaluated
        tokens = step * recipe.batch_tokens
        history.append({"tokens": tokens, "loss_nats": loss_nats})
        if step == recipe.steps or (step % 100 == 0 and time.monotonic() - evaluated > EVALUATED_SECONDS):
            evaluated = time.monotonic()
            scores = {k: bits_per_byte(model, tokenizer, v, recipe.context_tokens, 24) for k, v in held_out.items()}
            history.append({"tokens": tokens, "held_out_bits_per_byte": scores})
            if far:
                used = context_use(model, tokenizer, data_root, 8, "calibration")
                history[-1]["context_use"] = {what: round(value, 4) for what, value in used.items()}
            tqdm.write(f"{name} step {step} loss {loss_nats:.3f} {json.dumps(history[-1])}", file=sys.stderr)
        if step % SAVED_EVERY == 0 or step == recipe.steps:
            run_folder.mkdir(parents=True, exist_ok=True)
            loss_curve(history, run_folder / "loss_curve.png", name)

    _, history, seconds = training_loop.run(
        model, optimizers(model, recipe), run_folder, recipe, name=name, steps=recipe.steps,
        lr_scale=recipe.lr_scale, loss_of=losses, note=note, save_every=SAVED_EVERY,
    )  # fmt: skip
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    model.eval().to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    about = {  # what the model card needs
        "recipe": dataclasses.asdict(recipe), "hours": seconds / 3600, "device": device, "torch": torch.__version__,
        "threads": torch.get_num_threads(), "corpus": json.loads((corpus_folder / "corpus.json").read_text()),
        "held_out": [row for row in history if "held_out_bits_per_byte" in row],
    }  # fmt: skip
    (folder / "training.json").write_text(json.dumps(about, indent=1))
    loss_curve(history, folder / "loss_curve.png", name)
    print(f"{folder}: {sum(p.stat().st_size for p in folder.iterdir()) / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--data-root", type=Path, default=DATA)
    work = Path(os.environ.get("QUICKSILVER_TRAINING", Path.home() / "quicksilver-training"))
    said = "corpus, checkpoints, curves; outside of the repository, so that a run outlives its checkout"
    parser.add_argument("--work", type=Path, default=work, help=said)
    parser.add_argument("--out", type=Path, default=SHIPPED, help="where the finished folder goes")
    parser.add_argument("--total-tokens", type=int, help="may be changed on a resume until the decay has begun")
    said = "let the learning rate fall to 0 at step TO, from step FROM on, not yet passed"
    parser.add_argument("--shorten", type=int, nargs=2, metavar=("FROM", "TO"), help=said)
    parser.add_argument("--start", help="go on from this exported folder, with other windows")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    recipe = RECIPES[args.name]
    shortened, seed = args.shorten and tuple(args.shorten), recipe.seed + (args.start is not None)
    given = {"total_tokens": args.total_tokens, "start": args.start, "shortened": shortened, "seed": seed}
    recipe = dataclasses.replace(recipe, **{name: value for name, value in given.items() if value is not None})
    torch.set_num_threads(args.threads)
    try:
        train(args.name, recipe, args.data_root, args.work, args.out, args.device)
    except (FileNotFoundError, ConfigError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
