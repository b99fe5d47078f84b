"""One paragraph, dense and adaptive side by side, every token coloured by the depth it reached."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicksilver.cli.arguments import Command, key
from quicksilver.files import write_atomically
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import InnerShare, Positive

if TYPE_CHECKING:
    import torch

SCHEDULED_PCT = (40, 50)  # of the work: for these the embedded models have schedules
SVG_COLUMNS = 100
# From halted early to full depth: colours of a 256-colour terminal that are read on black and on white.
RAMP = (33, 38, 36, 71, 136, 172, 203)


@dataclass
class Demo(Command):
    """
    quicksilver demo
    quicksilver demo save=0.5 model=reference-llama
    quicksilver demo save=0.2 text="A paragraph of your own, of some length."

    The first three quarters of the text are a prompt, the rest is scored from the cache that the prompt left. Two ways of saving the prompt's
    work are shown: the oldest tokens are dropped early and nearly all others stop later, with their keys and values predicted (the model's own
    schedule, chosen for save=0.4 or 0.5); at other shares, the tokens that get the least attention leave early. No download.
    """

    save: InnerShare = key(
        "0.4", "share of the prompt's FLOPs to be saved; a schedule saves it in prompts of 448 tokens, less in shorter ones", 0.4
    )
    text: str | None = key("TEXT", "default: of the Python language reference, which the models were not trained on")
    new_tokens: Positive = key("20", "how many tokens both write after it", 20)
    model: str = key("NAME", "reference-gpt2 or reference-llama, which come with the package", "reference-gpt2")
    svg: str | None = key("FILE", "write it as a picture too")

    def main(self) -> int:
        """Run both ways and print them.

        Raises:
            ConfigError: no embedded model of that name, a share that cannot be saved, a text that is too short or too long.
        """
        from quicksilver.runs.choices import choices

        embedded = [name for name in choices("model") if name.startswith("reference-")]
        if self.model not in embedded:
            raise ConfigError(f"model={self.model}: a demo runs the models that come with the package: {', '.join(embedded)}.")
        if sys.stderr.isatty():
            print("Loading …", end="\r", file=sys.stderr, flush=True)
        colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        show = _shown(self)
        print("\n".join(show(min(shutil.get_terminal_size((100, 24)).columns, 120), colours)))
        if self.svg is not None:
            write_atomically(Path(self.svg), _picture(show(SVG_COLUMNS, True)).encode())
        return 0


@dataclass(frozen=True)
class Pass:
    """One way through the text.

    Attributes:
        ppl: perplexity of the tokens after the prompt.
        prompt_flops, flops: executed, by the ledger, of the prompt and of all.
        kv_bytes: resident in the cache at the end.
        depths: layers that each token of the text but the last went through, length N - 1.
        written: what follows, greedily.
    """

    ppl: float
    prompt_flops: int
    flops: int
    kv_bytes: int
    depths: list[int]
    written: str


def _picture(lines: Sequence[str]) -> str:
    """A terminal's window as SVG, which asks no other place for a font."""
    import io
    import re

    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=SVG_COLUMNS, file=io.StringIO())
    for line in lines:
        console.print(Text.from_ansi(line), soft_wrap=True)
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="quicksilver demo", code_format=plain, unique_id="demo")


def _shown(options: Demo) -> Callable[[int, bool], list[str]]:
    """Both ways, once; what it returns prints them at a width, with or without colours."""
    from quicksilver.models.loading import load, locate
    from quicksilver.models.spec import ModelConfig

    config = ModelConfig(name=options.model, path=f"embedded:{options.model}")
    loaded = load(config, locate(config))
    model, tokenizer = loaded.model, loaded.tokenizer
    ids = tokenizer(" ".join((options.text or _paragraphs()).split()), return_tensors="pt")["input_ids"]
    most = model.config.max_position_embeddings - options.new_tokens
    if not 32 <= ids.shape[1] <= most:
        raise ConfigError(f"text has {ids.shape[1]} tokens: give 32 to {most}.")
    prompt = 3 * ids.shape[1] // 4
    module, what = _module(model, options.save, prompt)
    dense, adaptive = (_through(model, tokenizer, ids, prompt, modules, options.new_tokens) for modules in ([], [module]))
    layers = model.config.num_hidden_layers
    tokens = _readable(tokenizer, ids[0, :-1].tolist())
    halted = sum(depth < layers for depth in adaptive.depths)

    def page(columns: int, colours: bool) -> list[str]:
        return [
            f"{options.model}: {layers} layers; a prompt of {prompt} tokens, {halted} of which leave early; {ids.shape[1] - prompt} tokens scored.",
            what,
            "",
            *_painted(tokens, adaptive.depths, layers, columns, colours),
            "",
            _legend(adaptive.depths, layers, colours),
            "",
            *_side_by_side(dense, adaptive, columns),
        ]

    return page


def _module(model: Any, save: float, prompt: int) -> tuple[Any, str]:
    """What saves the share, and what it does with tokens, in words."""
    from quicksilver.modules import Halting
    from quicksilver.modules.staged_halting import PresetHalting

    if round(100 * save, 6) in SCHEDULED_PCT:
        return PresetHalting(
            save=save
        ), "The oldest are dropped, the others' keys and values are predicted for the layers they miss."
    return Halting.from_preset(model, save=save, prompt_tokens=prompt), "Those that get the least attention are dropped."


def _readable(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; of several that share a character's bytes, the last has it."""
    texts, waiting = [], list[int]()
    for number in ids:
        waiting.append(number)
        text = tokenizer.decode(waiting)
        texts.append("" if "\ufffd" in text else text)
        waiting = waiting if "\ufffd" in text else []
    return texts


def _paragraphs() -> str:
    """Prose of the language reference that every Python carries."""
    from pydoc_data.topics import topics

    blocks = topics["for"].replace("’", "'").split("\n\n")
    prose = (
        block for block in blocks if not block.startswith((" ", "Changed in")) and "***" not in block and not block.endswith(":")
    )
    return " ".join(prose)


def _through(model: Any, tokenizer: Any, ids: torch.Tensor, prompt: int, modules: list[Any], new_tokens: int) -> Pass:
    """The text (1, N) with its prompt in one call, the rest scored; then what is written after it."""
    import torch

    from quicksilver.measure.perplexity import Protocol, score
    from quicksilver.runtime.run import apply

    scores = score(model, ids, Protocol("continuation", ids.shape[1], prompt, 1), modules=modules)
    depths: list[int] = []
    for one in scores.trace.passes:
        depths += torch.stack([one.active(layer)[0] for layer in range(one.n_layers)]).sum(0).tolist()
    with torch.inference_mode(), apply(model, modules):
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            no_repeat_ngram_size=3,  # so small a model says one thing over and over otherwise
            pad_token_id=0,
        )
    row = scores.windows.iloc[0]
    return Pass(
        scores.ppl,
        int(row["prompt_executed_flops"]),
        int(row["executed_flops"]),
        scores.kv_bytes_resident,
        depths,
        " ".join(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).split()),
    )


def _painted(tokens: Sequence[str], depths: Sequence[int], layers: int, columns: int, colours: bool) -> list[str]:
    """The paragraph, wrapped between words: coloured by depth, or with the depth behind every token that did not reach the end."""
    words: list[list[tuple[str, int]]] = []
    for token, depth in zip(tokens, depths, strict=True):
        if token.startswith(" ") or not words:
            words.append([])
        words[-1].append((token if colours or depth == layers else f"{token}[{depth}]", depth))
    lines, width = [""], 0
    for word in words:
        if width + sum(len(text) for text, _ in word) > columns and width:
            lines.append("")
            word[0], width = (word[0][0].lstrip(), word[0][1]), 0
        width += sum(len(text) for text, _ in word)
        lines[-1] += "".join(_coloured(text, depth, layers) if colours else text for text, depth in word)
    return lines


def _coloured(text: str, depth: int, layers: int) -> str:
    if depth == layers:
        return text  # full depth: the terminal's own colour
    return f"\033[38;5;{RAMP[min(len(RAMP) - 1, len(RAMP) * depth // layers)]}m{text}\033[0m"


def _legend(depths: Sequence[int], layers: int, colours: bool) -> str:
    if not colours:
        return f"[n]: the token went through n of {layers} layers; without a mark, through all."
    reached = sorted({depth for depth in depths if depth < layers})
    return "Layers gone through: " + " ".join([*(_coloured(f"{depth}", depth, layers) for depth in reached), f"{layers} (all)"])


def _side_by_side(dense: Pass, adaptive: Pass, columns: int) -> list[str]:
    def saved(name: str, unit: float, suffix: str) -> tuple[str, str]:
        before, after = getattr(dense, name), getattr(adaptive, name)
        return f"{before / unit:.3g} {suffix}", f"{after / unit:.3g} {suffix} ({100 * (1 - after / before):.1f}% saved)"

    rows = [
        ("", "dense", "adaptive"),
        ("prompt's FLOPs", *saved("prompt_flops", 1e9, "G")),
        ("all FLOPs", *saved("flops", 1e9, "G")),
        ("KV cache", *saved("kv_bytes", 1e6, "MB")),
        ("perplexity", f"{dense.ppl:.2f}", f"{adaptive.ppl:.2f} ({100 * (adaptive.ppl / dense.ppl - 1):+.1f}%)"),
    ]
    wide = max(20, (columns - 20) // 2)
    lines = [f"{name:<16}{left:<{wide}}  {right}" for name, left, right in rows]
    left, right = (textwrap.wrap(one.written, wide) or [""] for one in (dense, adaptive))
    for number in range(max(len(left), len(right))):
        name = "goes on with" if number == 0 else ""
        before, after = (side[number] if number < len(side) else "" for side in (left, right))
        lines.append(f"{name:<16}{before:<{wide}}  {after}".rstrip())
    return [*lines, "", "One text is an anecdote: `quicksilver reproduce table 11` measures it, with intervals and nulls."]
