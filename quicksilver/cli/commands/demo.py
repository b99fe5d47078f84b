"""One paragraph, dense and adaptive side by side, every token coloured by the depth it reached."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicksilver.cli.arguments import Command, key
from quicksilver.files import write_atomically
from quicksilver.models.loading import EMBEDDED, load, locate
from quicksilver.models.spec import ModelConfig
from quicksilver.runs.choices import choices
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import InnerShare, Positive

if TYPE_CHECKING:
    import torch
    from rich.table import Table
    from rich.text import Text

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

    The first three quarters of the text are a prompt. The rest is scored from the cache that the prompt left. For save=0.4 or 0.5 it uses the
    model's own schedule: most tokens stop halfway, and their keys and values are predicted. Before that, linear maps stand in for some of their
    MLPs. At other shares, the tokens that get the least attention leave early. Nothing is downloaded.
    """

    save: InnerShare = key(
        "0.4", "share of the prompt's FLOPs to save; schedules save it at 448 tokens, less in shorter prompts", 0.4
    )
    text: str | None = key("TEXT", "default: of the Python language reference, which the models were not trained on")
    new_tokens: Positive = key("20", "how many tokens both write after it", 20)
    model: str = key("NAME", "one that comes with the package", "far-gpt2")
    svg: str | None = key("FILE", "write it as a picture too")

    def main(self) -> int:
        from rich._export_format import CONSOLE_SVG_FORMAT
        from rich.console import Console

        embedded = [name for name in choices("model") if (EMBEDDED / name / "predicted_kv").is_dir()]
        if self.model not in embedded:
            raise ConfigError(f"model={self.model}: a demo runs the models that come with the package: {', '.join(embedded)}.")
        if sys.stderr.isatty():
            print("Loading …", end="\r", file=sys.stderr, flush=True)
        colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        page = self._page()
        wide = min(shutil.get_terminal_size((100, 24)).columns, 120)

        def shown(colours: bool, **more: Any) -> Console:
            console = Console(force_terminal=colours, color_system="256" if colours else None, highlight=False, **more)
            console.print(*page(colours), sep="\n", markup=False, emoji=False)
            return console

        shown(colours, width=wide)
        if self.svg is not None:
            console = shown(True, width=SVG_COLUMNS, record=True, file=io.StringIO())
            plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # no font from elsewhere
            picture = console.export_svg(title="quicksilver demo", code_format=plain, unique_id="demo")
            write_atomically(Path(self.svg), picture.encode())
        return 0

    def _page(self) -> Callable[[bool], list[Any]]:
        """Both ways, once; what it returns has them as lines, paragraphs and a table of rich's, with or without colours."""
        config = ModelConfig(name=self.model, path=f"embedded:{self.model}")
        loaded = load(config, locate(config))
        model, tokenizer = loaded.model, loaded.tokenizer
        ids = tokenizer(" ".join((self.text or _paragraphs()).split()), return_tensors="pt")["input_ids"]
        most = model.config.max_position_embeddings - self.new_tokens
        if most < 32:
            raise ConfigError(f"new_tokens={self.new_tokens}: give at most {most + self.new_tokens - 32}.")
        if not 32 <= ids.shape[1] <= most:
            raise ConfigError(f"text has {ids.shape[1]} tokens: give 32 to {most}.")
        prompt = 3 * ids.shape[1] // 4
        module, what = _module(model, self.save, prompt)
        dense, adaptive = (_through(model, tokenizer, ids, prompt, modules, self.new_tokens) for modules in ([], [module]))
        layers, tokens = model.config.num_hidden_layers, _readable(tokenizer, ids[0, :-1].tolist())
        early, scored = sum(depth < layers for depth in adaptive.depths), ids.shape[1] - prompt
        head = f"{layers} layers; a prompt of {prompt} tokens, {early} of which leave early; {scored} tokens scored."
        last = "One text is an anecdote: `quicksilver reproduce table 11` measures it, with intervals and nulls."

        def page(colours: bool) -> list[Any]:
            painted = _painted(tokens, adaptive.depths, layers, colours)
            return [f"{self.model}: {head}", what, "", *painted, "", _side_by_side(dense, adaptive), "", last]

        return page


@dataclass(frozen=True)
class Pass:
    """One way through the text."""

    ppl: float  # of the tokens after the prompt
    prompt_flops: int  # executed, by the ledger
    flops: int  # the same, of all tokens
    kv_bytes: int  # resident in the cache at the end
    depths: list[int]  # layers that each token of the text but the last went through, length N - 1
    written: str  # what follows, greedily


def _module(model: Any, save: float, prompt: int) -> tuple[Any, str]:
    """What saves the share, and what it does with tokens, in words."""
    from quicksilver.modules import Halting
    from quicksilver.modules.staged_halting import PresetHalting

    if round(100 * save, 6) in SCHEDULED_PCT:
        return PresetHalting(save=save), "Most stop halfway, and their keys and values are predicted for the layers they miss."
    return Halting.from_preset(model, save=save, prompt_tokens=prompt), "Those that get the least attention are dropped."


def _readable(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; of several that share a character's bytes, the last has it."""
    texts, waiting = [], list[int]()
    for number in ids:
        text = tokenizer.decode([*waiting, number])
        waiting = [*waiting, number] if "\ufffd" in text else []
        texts.append("" if waiting else text)
    return texts


def _paragraphs() -> str:
    """Prose of the language reference that every Python carries."""
    from pydoc_data.topics import topics

    blocks = topics["for"].replace("’", "'").split("\n\n")
    prose = (text for text in blocks if not text.startswith((" ", "Changed in")) and "***" not in text and not text.endswith(":"))
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
        # So small a model says one thing over and over without no_repeat_ngram_size.
        options = {"max_new_tokens": new_tokens, "do_sample": False, "no_repeat_ngram_size": 3, "pad_token_id": 0}
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    written = " ".join(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).split())
    prompt_flops, flops = (int(scores.windows.iloc[0][f"{of}executed_flops"]) for of in ("prompt_", ""))
    return Pass(scores.ppl, prompt_flops, flops, scores.kv_bytes_resident, depths, written)


def _painted(tokens: Sequence[str], depths: Sequence[int], layers: int, colours: bool) -> list[Text | str]:
    """The paragraph and its legend: coloured by depth, or with the depth before each span of tokens that did not reach the end."""
    from rich.text import Text

    def coloured(text: str, depth: int) -> tuple[str, str]:
        # Full depth has the terminal's own colour.
        return text, "" if depth == layers else f"color({RAMP[min(len(RAMP) - 1, len(RAMP) * depth // layers)]})"

    if not colours:
        marked = []
        for depth, span in groupby(zip(tokens, depths, strict=True), lambda one: one[1]):
            text = "".join(token for token, _ in span)
            whole = depth == layers or not text.strip()
            marked.append(text if whole else re.sub(r"\A(\s*)(.*?)(\s*)\Z", rf"\1[{depth}: \2]\3", text, flags=re.DOTALL))
        return [Text("".join(marked)), "", f"[n: …]: these tokens went through n of {layers} layers; all others, through all."]
    legend = Text("Layers gone through: ")
    for depth in sorted({depth for depth in depths if depth < layers}):
        legend.append(*coloured(str(depth), depth)).append(" ")
    return [Text.assemble(*map(coloured, tokens, depths)), "", legend.append(f"{layers} (all)")]


def _side_by_side(dense: Pass, adaptive: Pass) -> Table:
    from rich.table import Table

    def row(name: str, key: str, unit: float, suffix: str) -> tuple[str, str, str]:
        before, after = getattr(dense, key), getattr(adaptive, key)
        saved = f"{after / unit:.3g} {suffix} ({100 * (1 - after / before):.1f}% saved)"
        return f"{name:<16}", f"{before / unit:.3g} {suffix}", saved

    table = Table.grid("", "", "", padding=(0, 2, 0, 0), expand=True)
    perplexity = f"{adaptive.ppl:.2f} ({100 * (adaptive.ppl / dense.ppl - 1):+.1f}%)"
    table.add_row("", "dense", "adaptive")
    table.add_row(*row("prompt's FLOPs", "prompt_flops", 1e9, "G"))
    table.add_row(*row("all FLOPs", "flops", 1e9, "G"))
    table.add_row(*row("KV cache", "kv_bytes", 1e6, "MB"))
    table.add_row("perplexity", f"{dense.ppl:.2f}", perplexity)
    table.add_row("goes on with", dense.written, adaptive.written)
    table.columns[1].ratio = table.columns[2].ratio = 1
    return table
