"""Fit translators: maps that predict K and V of later layers, so that tokens may stop early and still be seen.

quicksilver fit model=reference-gpt2 layers=[9,10]
quicksilver fit model=gpt2-large text=[wikitext103,python-docs] windows=480 data.root=/folder
quicksilver fit model=reference-gpt2 layers=[9] distill=120
quicksilver fit model=reference-gpt2 lens=true

One dense pass over the fitting half of the calibration text, memory independent of its length; stopped and asked again it goes on where it
was. Paragraphs that share 13 words with the test part of any dataset at hand are left out, counted and recorded. Time and peak memory are
printed and written beside the maps (MODEL.cost.json). docs/predicted-kv.md

Keys of its own:
  layers=[7,8]      source layers, from 0; default: a third to three quarters of the depth
  text=[a,b]        datasets whose calibration part is read; default: [python-docs,wikitext103]
  windows=240       at most this many windows of 512 tokens
  ridge=0.003       penalty, as a multiple of the mean of the diagonal
  distill=0         then so many steps of Adam on KL to the dense logits
  lens=false        true: a lens instead, for halting with entropy=tuned_lens
  control=NAME      shuffled | mean: what a translator must beat
  dtype=float16     of the written weights
  output=FOLDER     default: results_dir/translators
All others are those of `quicksilver run`: model, model.device_map, data.root, results_dir …
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from quicksilver.cli.arguments import split
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.options import Count, Options, Positive, check_positive

if TYPE_CHECKING:
    from quicksilver.fitting.text import FitText, Half
    from quicksilver.modules.staged_halting import Schedule
    from quicksilver.modules.translators import Translator
    from quicksilver.runs.config import RunConfig
    from quicksilver.runtime.architecture import Architecture

STORED = ("float32", "float16", "bfloat16")
TRAINED_FOR = (
    40.0,
    50.0,
)  # percent saved by the schedules that `distill` trains for, each with either number of protected tokens


@dataclass
class Keys(Options):
    """The command's own keys, as its help has them."""

    layers: list[Count] = field(default_factory=list)
    text: list[str] = field(default_factory=lambda: ["python-docs", "wikitext103"])
    windows: Positive = 240
    ridge: Annotated[float, check_positive] = 3e-3
    distill: Count = 0
    lens: bool = False
    control: str | None = None
    dtype: str = "float16"
    output: str | None = None


def main(words: Sequence[str]) -> int:
    """Fit, write, and name the files; returns the exit code.

    Raises:
        ConfigError: a model, text or value that cannot be had; too little text.
    """
    options, overrides = split(words, Keys, "fit")
    if options.dtype not in STORED:
        raise ConfigError(f"dtype={options.dtype} is not one of {', '.join(STORED)}.")
    from quicksilver.runs.config import compose

    written = fit(compose(overrides), options)
    for path in written:
        print(f"translator={path} ({path.stat().st_size / 1e6:.2f} MB)")
    if not (options.lens or options.control):
        given = " ".join(word for word in overrides if not word.startswith("modules"))
        print(f"Choose who stops where:\n  quicksilver schedule {given} save=40 translators=[{','.join(map(str, written))}]")
    return 0


def fit(config: RunConfig, options: Keys) -> list[Path]:
    """The files written, one for each source layer."""
    import torch
    from tqdm import tqdm

    from quicksilver.fitting.fit import fit_translators, priced
    from quicksilver.runs.context import RunContext
    from quicksilver.runtime.architecture import architecture_of

    loaded = RunContext().model(config)
    arch = architecture_of(loaded.model)
    text = calibration_half(config, options.text, loaded.tokenizer, "fit", options.windows)
    for name, said in text.provenance["texts"].items():
        print(
            f"{name}: {said['windows']} windows; {said['left_out']} of {said['paragraphs']} paragraphs left out, test text has them too"
        )
    folder = Path(options.output or Path(config.results_dir) / "translators")
    if options.lens:
        from quicksilver.fitting.fit import fit_lens

        path = folder / f"{config.model.name}.lens.safetensors"
        lens = fit_lens(arch, text, ridge=options.ridge, progress=lambda batches: tqdm(batches, desc="fitting", file=sys.stderr))
        lens.save(path, getattr(torch, options.dtype))
        return [path]
    control = f".{options.control}" if options.control else ""
    layers = options.layers or list(range(max(1, arch.n_layers // 3), 3 * arch.n_layers // 4 + 1))

    def fitted() -> dict[int, Translator]:
        found = fit_translators(
            arch, text, layers, ridge=options.ridge, control=options.control,
            checkpoint=folder / f".{config.model.name}{control}.sums.safetensors",
            progress=lambda batches: tqdm(batches, desc=f"fitting {config.model.name}", unit="batch", file=sys.stderr),
        )  # fmt: skip
        if options.distill:
            found = {layer: _distilled(arch, translator, text, options.distill) for layer, translator in found.items()}
        return found

    found, cost = priced(fitted, model=config.model.name, layers=layers, distill_steps=options.distill, tokens=text.ids.numel())
    written = []
    for layer, translator in found.items():
        path = folder / f"{config.model.name}.layer{layer}{control}.safetensors"
        translator.save(path, getattr(torch, options.dtype))
        written.append(path)
    print(cost.line())
    cost.save(folder / f"{config.model.name}{control}.cost.json")
    return written


def _distilled(arch: Architecture, translator: Translator, text: FitText, steps: int) -> Translator:
    from tqdm import tqdm

    from quicksilver.fitting.schedules import PROTECT_LAST, distill, smallest_schedule

    layer = translator.source_layer
    wanted = (smallest_schedule(arch, layer, last, saved / 100, 448) for last in reversed(PROTECT_LAST) for saved in TRAINED_FOR)
    schedules: list[Schedule] = [schedule for schedule in wanted if schedule is not None]

    def bar(numbers: range) -> tqdm:
        return tqdm(numbers, desc=f"distilling layer {layer}", unit="step", file=sys.stderr)

    return distill(arch, translator, text.ids, schedules, steps=steps, progress=bar)


def calibration_half(config: RunConfig, datasets: Sequence[str], tokenizer: object, half: Half, windows: int | None) -> FitText:
    """Windows of one half of these datasets' calibration parts, without what the test part of any dataset at hand has, too."""
    from quicksilver.fitting.text import fit_text
    from quicksilver.runs.choices import choices

    texts = {name: _part(config, name, "calibration") for name in datasets}
    evaluation = {}
    for name in choices("dataset"):
        try:
            evaluation[name] = _part(config, name, "test").text
        except QuickSilverError:
            continue  # not at hand: then nothing can be scored on it here, either
    return fit_text(texts, evaluation, tokenizer, half=half, windows=windows)


def _part(config: RunConfig, name: str, part: str):  # type: ignore[no-untyped-def]
    from quicksilver.data.text import read_text
    from quicksilver.runs.config import compose

    root = Path(config.data.root) if config.data.root else None
    dataset = compose([f"dataset={name}"]).dataset
    if dataset.reader == "tagged":
        dataset = replace(dataset, reader="lines", tagger=None)  # its words alone are asked for: no tagger need be trained
    return read_text(dataset, part, root=root)  # type: ignore[arg-type]
