"""What is measured, fitted and searched on calibration text: percentiles, dials, translators, schedules."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from quicksilver.cli.arguments import Command, key
from quicksilver.cli.main import say
from quicksilver.cli.progress import progress_bar, width
from quicksilver.files import check_writable, write_atomically
from quicksilver.records.identity import Ledger
from quicksilver.runs.choices import choices
from quicksilver.runs.config import RunConfig, compose, schedules_file, searched
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.options import Count, InnerShare, Positive, check_positive

if TYPE_CHECKING:
    from quicksilver.fitting.fit import FitText, Half
    from quicksilver.fitting.schedules import Candidate
    from quicksilver.models.loading import Loaded
    from quicksilver.modules.fitted import Translator
    from quicksilver.modules.linear_mlp import MLPMaps
    from quicksilver.records.record import Record
    from quicksilver.runs.context import RunContext
    from quicksilver.runs.dials import Fit as FittedDial
    from quicksilver.runtime.architecture import Architecture

ORDERED_ON = 16  # windows, for which layers have linear MLPs while a translator is distilled
TRAINED_FOR = (0.4, 0.5)  # shares saved by the schedules that `distill` trains for, each with either number of protected tokens
TEXTS = ("python-docs", "wikitext103")
_TEXT = ("[a,b]", "calibration parts that are read; default: [python-docs,wikitext103]")  # a key of `fit` and `schedule`


def percent(share: float) -> float:
    """0.3 as 30."""
    return round(100 * share, 6)


@dataclass
class Budget(Command):
    """
    quicksilver budget save=0.3
    quicksilver budget cost=1 dial=fusion_attention transfer=wikitext103 data.root=/folder
    quicksilver budget save=[0.2,0.4] cost=2 sure=true model=gpt2-large dataset=wikitext103

    The search reads the calibrating part of the text alone. Some dials have a grid of settings (docs/sweeps-and-budgets.md). Each of them is
    searched, and the one of least KL to the dense model is taken. What it finds is frozen, written as a module yaml, and reported on the test
    part and on other texts. Every step is a record: repeat a stopped command to resume it. Without a budget it lists the dials.
    """

    takes = "run"
    save: list[InnerShare] = key("SHARE", "save at least this share of the FLOPs; several: save=[0.2,0.4]", factory=list)
    cost: list[Annotated[float, check_positive]] = key("PCT", "percent of perplexity at most; several: cost=[1,2]", factory=list)
    sure: bool = key("true", "with cost: the upper end of the 95% interval counts", False)
    of: Ledger = key("executed", "which FLOPs `save` counts: executed, nominal, paper or prompt_executed …", "executed")
    dial: str = key("NAME", "a file of conf/budget, or a yaml like those; default: halting_attention", "halting_attention")
    transfer: list[str] = key("[NAME,…]", "datasets on which the frozen dial is used too", factory=list)
    halvings: Positive = key("6", "steps of the search, at each setting", 6)
    output: str | None = key("FILE", "a yaml that gets what was found and compared, beside what it has of other models and dials")

    def main(self) -> int:
        """Search, freeze and report; returns 1 where one of several budgets cannot be met."""
        from quicksilver.runs import dials

        dial = dials.load_dial(self.dial)
        if not self.save and not self.cost:
            from quicksilver.cli.commands.look import listed

            print(listed("budget"))
            print("Say what to hold: quicksilver budget save=0.3, or cost=1 (make budget ARGS='save=0.3').")
            return 0
        from quicksilver.report.sweeps import budget_table
        from quicksilver.runs.context import RunContext

        context = RunContext()
        wanted = [dials.Budget("save", percent(share), self.of) for share in self.save]
        wanted += [dials.Budget("cost", pct, sure=self.sure) for pct in self.cost]
        results, refused = Path(compose(self.overrides).results_dir), list[str]()
        if self.output:
            _output(str(Path(self.output).parent), results)
        reports: list[tuple[FittedDial, dict[str, tuple[Record, Record]]]] = []
        for budget in wanted:
            try:
                with progress_bar() as progress:
                    found = dials.fit(budget, dial, self.overrides, halvings=self.halvings, context=context, progress=progress)
            except ConfigError as error:
                if len(wanted) == 1:
                    raise
                refused.append(str(error))
                continue
            yaml = dials.freeze(found, results / "budget", context=context)
            if self.output:
                dials.note(found, Path(self.output))
            reports.append((found, self._later(found, yaml, context)))
            use = ["--config-dir", str(results / "budget"), f"modules=[{yaml.stem}]", f"protocol={found.config.protocol.name}"]
            use += [word for word in self.overrides if not word.startswith(("modules", "protocol="))]
            print(f"To {budget}: {found.dial.said(found.chosen.value)}, written to {yaml}. To use it:")
            print(f"  quicksilver run {shlex.join(use)}")
            print(f"or add to a command of your own: {shlex.join(dials.frozen_overrides(found, yaml))}\n")
        if reports:
            of, default = ([one.model.name, one.dataset.name] for one in (reports[0][0].config, compose([])))
            made = budget_table(reports, "-".join(["budget", dial.name, *(of if of != default else [])]))
            print(made.text(width()))
            print("Written: " + ", ".join(map(str, made.write(results / "tables"))))
        for message in refused:
            say(message)
        return 1 if refused else 0

    def _later(self, found: FittedDial, yaml: Path, context: RunContext) -> dict[str, tuple[Record, Record]]:
        """The frozen dial on the test part, and on other texts, each with its dense record."""
        from quicksilver.records.store import Store
        from quicksilver.runs.dials import frozen_overrides
        from quicksilver.runs.run import ensure

        later = {}
        for name in ("test", *self.transfer):
            text = [] if name == "test" else [f"dataset={name}"]
            config = compose(["measure=quick", *self.overrides, *text, *frozen_overrides(found, yaml)])
            with progress_bar() as progress:
                (record,) = ensure([config], progress=progress, context=context)
            later[name] = (record, Store(config.results_dir).dense_of(record))
        return later


@dataclass
class Calibrate(Command):
    """
    quicksilver calibrate model=gpt2 dataset=wikitext103
    quicksilver calibrate model=reference-gpt2 text=my.txt dataset.calibration_windows=32

    Prints a file that serves as `calibration=FILE` wherever a threshold is a percentile, such as p25. Asked again with the same model and
    text it measures nothing and names the same file. `quicksilver run` calibrates by itself and does not need it.
    """

    takes = "run"
    text: str | None = key("FILE", "a UTF-8 text file; default: the calibration part of the dataset")
    kv: bool = key("true", "also the attention that halted tokens receive, for tau_kv of kv_skipping", False)
    last_queries: Positive = key("16", "with kv=true: so many last queries, whose attention counts", 16)
    output: str | None = key("FOLDER", "default: results_dir/calibration")

    def main(self) -> int:
        from quicksilver.data.windows import check_context
        from quicksilver.modules.calibration import SIGNALS, calibrated, calibration_path
        from quicksilver.modules.signals import AttentionReceived
        from quicksilver.runs.context import RunContext, torch_threads

        if self.last_queries != Calibrate.last_queries and not self.kv:
            raise ConfigError(f"last_queries={self.last_queries} is of what kv=true measures: add kv=true, or leave it out.")
        config, context = self._of_file(compose(self.overrides)), RunContext()
        if config.modules:
            raise ConfigError(f"modules=[{','.join(config.modules)}]: calibrate measures the dense model; leave modules out.")
        folder = _output(self.output, Path(config.results_dir) / "calibration")
        text, windows = context.text(config, "calibration"), context.windows(config, "calibration").ids
        loaded = context.model(config)
        check_context(loaded.model, config.protocol.window_tokens)
        signals = [*SIGNALS, *([AttentionReceived(self.last_queries, "max")] if self.kv else [])]
        path = calibration_path(folder, loaded.model, windows, signals)
        how = "found" if path.exists() else "measured"
        with torch_threads(config.threads):
            calibration = calibrated(
                folder, loaded.model, windows, signals=signals, batch_size=config.protocol.batch_size,
                source={"model": loaded.files.source, "text": text.source}, progress=bar("calibrating"),
            )  # fmt: skip
        print(f"{how}: {len(windows)} windows of {config.protocol.window_tokens} tokens, {text.source}")
        print("layer  p25 relative drift  p25 entropy (nats)")
        rows = zip(calibration.thresholds("drift-relative", 25), calibration.thresholds("entropy-logit_lens", 25), strict=True)
        for layer, (drift, entropy) in enumerate(list(rows)[:-1]):  # after the last layer nothing halts
            print(f"{layer:5}  {drift:18.4f}  {entropy:18.3f}")
        print(f"calibration={path}")
        return 0

    def _of_file(self, config: RunConfig) -> RunConfig:
        from quicksilver.data.spec import DatasetConfig, FilesConfig

        if self.text is None:
            return config
        if not Path(self.text).is_file():
            raise ConfigError(f"text={self.text}: there is no such file.")
        place, windows = str(Path(self.text).resolve()), config.dataset.calibration_windows
        files = FilesConfig(test=place, calibration=place)
        return dataclasses.replace(config, dataset=DatasetConfig("file", "text", files=files, calibration_windows=windows))


@dataclass
class Fit(Command):
    """
    quicksilver fit model=reference-gpt2 layers=[9,10]
    quicksilver fit model=gpt2-large text=[wikitext103,python-docs] windows=480 data.root=/folder
    quicksilver fit model=reference-gpt2 layers=[9] distill=120
    quicksilver fit model=far-gpt2 layers=[11] mlp=[1,2,3,4,6,7,9] neurons=96 distill=160
    quicksilver fit model=reference-gpt2 lens=true

    Makes one dense pass over the fitting half of the calibration text. Memory does not grow with the text. Repeat a stopped command to resume
    it. Paragraphs that share 13 words with a test text at hand are left out, counted and recorded. Time and peak memory are printed, and written
    beside the maps (MODEL.cost.json). More: docs/predicted-kv.md.
    """

    takes = "run"
    layers: list[Count] = key("[7,8]", "source layers, from 0; default: a third to three quarters of the depth", factory=list)
    mlp: list[Positive] = key(
        "[1,2]", "layers, counted from 0 and not 0 itself, for whose MLPs linear maps are fitted too", factory=list
    )
    neurons: Count = key("0", "of each of these MLPs that stay beside the map", 0)
    text: list[str] = key(*_TEXT, factory=lambda: [*TEXTS])
    windows: Positive = key("240", "at most this many windows of protocol.window_tokens", 240)
    ridge: Annotated[float, check_positive] = key("0.003", "penalty, as a multiple of the mean of the diagonal", 3e-3)
    distill: Count = key("0", "then so many steps of Adam on KL to the dense logits", 0)
    lens: bool = key("false", "true: a lens instead, for halting with entropy=tuned_lens", False)
    control: Literal["shuffled", "mean"] | None = key("NAME", "shuffled | mean: what a translator must beat")
    dtype: Literal["float32", "float16", "bfloat16"] = key("float16", "of the written weights", "float16")
    output: str | None = key("FOLDER", "default: results_dir/translators")

    def main(self) -> int:
        from quicksilver.runs.context import torch_threads

        config = compose(self.overrides)
        for name in ("control", "distill", "mlp", "layers"):
            if self.lens and getattr(self, name):
                raise ConfigError(f"{name}={getattr(self, name)} is of translators: leave it out, or leave out lens=true.")
        if self.neurons and not self.mlp:
            raise ConfigError(f"neurons={self.neurons} stay in linear MLPs: give their layers, mlp=[1,2,3].")
        if self.distill and self.mlp and len(self.layers) != 1:
            raise ConfigError(f"layers={self.layers}: linear MLPs are trained together with one translator. Give one layer.")
        with torch_threads(config.threads):
            written, maps = self.fit(config)
        for path in [*written, *([maps] if maps else [])]:
            print(f"{'mlp_maps' if path == maps else 'translator'}={path} ({path.stat().st_size / 1e6:.2f} MB)")
        if not (self.lens or self.control):
            given = [*_without_modules(self.overrides), "save=0.4", f"text=[{','.join(self.text)}]"]
            given += [*([f"mlp_maps={maps}"] if maps else []), f"translators=[{','.join(map(str, written))}]"]
            print(f"Choose who stops where:\n  quicksilver schedule {shlex.join(given)}")
        return 0

    def fit(self, config: RunConfig) -> tuple[list[Path], Path | None]:
        """Write the translators, one for each source layer, and the linear MLPs where some are asked for; returns their files."""
        import torch

        from quicksilver.fitting.fit import check_source_layers, fit_lens, fit_mlp_maps, fit_translators, priced
        from quicksilver.runs.context import RunContext
        from quicksilver.runtime.architecture import architecture_of

        folder = _output(self.output, Path(config.results_dir) / "translators")
        loaded, name = RunContext().model(config), config.model.name
        arch, dtype = architecture_of(loaded.model), getattr(torch, self.dtype)
        layers = self.layers or list(range(max(1, arch.n_layers // 3), 3 * arch.n_layers // 4 + 1))
        check_source_layers(arch, layers)
        text = calibration_half(config, self.text, loaded, "fit", self.windows, self.overrides, continued=self.distill > 0)
        for dataset, said in text.provenance["texts"].items():
            left_out = f"{said['left_out']} of {said['paragraphs']} paragraphs left out, test text has them too"
            print(f"{dataset}: {said['windows']} windows; {left_out}")
        if self.lens:
            path = folder / f"{name}.lens.safetensors"
            fit_lens(arch, text, ridge=self.ridge, progress=bar("fitting")).save(path, dtype)
            return [path], None
        control = f".{self.control}" if self.control else ""

        def fitted() -> tuple[dict[int, Translator], MLPMaps | None]:
            maps = None
            if self.mlp:
                steps = bar("fitting MLPs")
                maps = fit_mlp_maps(arch, text, self.mlp, neurons=self.neurons, ridge=self.ridge, progress=steps)
            sums = folder / f".{name}{control}.sums.safetensors"
            steps = bar(f"fitting {name}")
            found = fit_translators(arch, text, layers, ridge=self.ridge, control=self.control, checkpoint=sums, progress=steps)
            if self.distill:
                for at in found:
                    found[at], maps = self._distilled(arch, found[at], maps, text, config.protocol.prompt_tokens)
            return found, maps

        (found, maps), cost = priced(fitted, model=name, layers=layers, distill_steps=self.distill, tokens=text.ids.numel())
        maps_file: Path | None = None
        if maps:
            maps_file = folder / f"{name}.mlp.safetensors"
            maps.save(maps_file, dtype)
        written = {layer: folder / f"{name}.layer{layer}{control}.safetensors" for layer in found}
        for layer, translator in found.items():
            translator.save(written[layer], dtype)
        print(cost.line())
        cost.save(folder / f"{name}{control}.cost.json")
        return [*written.values()], maps_file

    def _distilled(
        self, arch: Architecture, translator: Translator, maps: MLPMaps | None, text: FitText, prompt_tokens: int
    ) -> tuple[Translator, MLPMaps | None]:
        from quicksilver.fitting.schedules import PROTECT_LAST, KLToDense, by_kl, distill, fewest_linear_mlps, smallest_schedule

        layer = translator.source_layer
        asked = [(arch, layer, last, saved, prompt_tokens) for last in reversed(PROTECT_LAST) for saved in TRAINED_FOR]
        if maps:
            order = [*by_kl(KLToDense(arch, text.ids[:ORDERED_ON], prompt_tokens), maps)]
            found = [fewest_linear_mlps(*one, order, maps.n_neurons) for one in asked]
        else:
            found = [smallest_schedule(*one) for one in asked]
        return distill(
            arch, translator, text.ids, [schedule for schedule in found if schedule is not None], steps=self.distill,
            prompt_tokens=prompt_tokens, maps=maps, progress=bar(f"distilling layer {layer}", "step"),
        )  # fmt: skip


@dataclass
class Schedule(Command):
    """
    quicksilver schedule model=reference-gpt2 save=[0.4,0.5] translators=[results/translators/reference-gpt2.layer9.safetensors]

    Prints all candidates, best first, and writes the best of each budget. The rule is in docs/predicted-kv.md. Test texts are read for one
    purpose: to leave out what they share with the calibration text.
    """

    takes = "run"
    save: list[InnerShare] = key("SHARE", "of the prompt's executed FLOPs, one or several: save=[0.4,0.5]", factory=list)
    translators: list[str] = key("[…]", "files of `quicksilver fit`", factory=list)
    mlp_maps: str | None = key("FILE", "linear MLPs of `quicksilver fit`, which schedules may use")
    text: list[str] = key(*_TEXT, factory=lambda: [*TEXTS])
    windows: Positive = key("64", "windows of the choosing half", 64)
    output: str | None = key("FILE", "default: results_dir/translators/MODEL.schedules.yaml")

    def main(self) -> int:
        if not self.save or not self.translators:
            asked = "quicksilver schedule save=[0.4,0.5] translators=[FILE] (of `quicksilver fit`)"
            raise ConfigError(f"Give budgets and translators: {asked}.")
        from quicksilver.runs.context import torch_threads

        config = compose(self.overrides)
        with torch_threads(config.threads):
            self.search(config)
        return 0

    def search(self, config: RunConfig) -> None:
        """Write the file of schedules, and print what was compared and how to use it."""
        import yaml

        from quicksilver.fitting.schedules import KLToDense, by_kl, search
        from quicksilver.modules.fitted import Translator, model_digest
        from quicksilver.modules.linear_mlp import MLPMaps
        from quicksilver.modules.staged_halting import shipped_with_schedules
        from quicksilver.runs.context import RunContext
        from quicksilver.runtime.architecture import architecture_of

        path = Path(self.output) if self.output else schedules_file(config)
        _output(self.output and str(path.parent), path.parent)
        loaded = RunContext().model(config)
        arch = architecture_of(loaded.model)
        translators = {file: Translator.load(file) for file in self.translators}
        maps = MLPMaps.load(self.mlp_maps) if self.mlp_maps else None
        for fitted in [*translators.values(), *([maps] if maps else [])]:
            fitted.check(arch)
        halves_of = _fitted_on({**translators, **({str(self.mlp_maps): maps} if maps else {})})
        text = calibration_half(
            config, self.text, loaded, "choose", self.windows, self.overrides, continued=True, halves_of=halves_of
        )
        judge, schedules = KLToDense(arch, text.ids, config.protocol.prompt_tokens), dict[float, Any]()
        order = by_kl(judge, maps) if maps else {}
        for layer, kl_nats in order.items():
            print(f"  linear MLP {layer:<16} KL {kl_nats:.4f} nats", flush=True)
        for share in self.save:
            found, pct = search(judge, [*translators.values()], share, progress=_say, maps=maps, order=[*order]), percent(share)
            schedules[int(pct) if pct.is_integer() else pct] = _entry(found)
            print(f"To save {pct:g}%: {found[0].schedule}\n")
        windows = {name: said["windows"] for name, said in text.provenance["texts"].items()}
        content = {
            "weights_digest": model_digest(arch.model), "chosen_on": {"text_digest": text.digest, "windows": windows},
            "translators": {one.source_layer: one.digest for one in translators.values()},
            "files": {one.source_layer: os.path.relpath(file, path.parent) for file, one in translators.items()}, "schedules": schedules,
        }  # fmt: skip
        if maps:
            content["mlp_maps"] = os.path.relpath(str(self.mlp_maps), path.parent)
            content["linear_mlp_kl_nats"] = {layer: round(kl_nats, 5) for layer, kl_nats in order.items()}
        rule = "chosen by KL to dense on calibration text, by the rule of docs/predicted-kv.md (quicksilver schedule)"
        write_atomically(path, f"# {config.model.name}: {rule}.\n{yaml.safe_dump(content, sort_keys=False)}".encode())
        print(f"Written: {path}")
        given = [*_without_modules(self.overrides), "protocol=continuation", "modules=[predicted_kv]"]
        if self.output or config.model.name in shipped_with_schedules():
            given += [f"modules.predicted_kv.schedule={path}"]  # no run would look there
        print("Measure it, beside its null:")
        for share in self.save:
            print(f"  quicksilver run {shlex.join([*given, f'modules.predicted_kv.save={share:g}'])}")


def _output(given: str | None, otherwise: Path) -> Path:
    """The folder that is written to; refused before the work where it takes no file."""
    folder = Path(given) if given else otherwise
    check_writable("output" if given else "results_dir", folder)
    return folder


def _fitted_on(maps: Mapping[str, Translator | MLPMaps]) -> int | None:
    """Tokens of the windows that maps were fitted on, by file; None: no file says. Raises ConfigError: of several lengths, which have other halves."""
    said = {file: one.provenance.get("text", {}).get("window_tokens") for file, one in maps.items()}
    lengths = {file: tokens for file, tokens in said.items() if tokens}
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{file} on windows of {tokens} tokens" for file, tokens in lengths.items())
        raise ConfigError(f"{each}: what one was not fitted on, another was. Fit them with one protocol.window_tokens.")
    return next(iter(lengths.values()), None)


def _entry(found: Sequence[Candidate]) -> dict[str, Any]:
    def said(one: Candidate) -> dict[str, float]:
        return {"saved_pct": round(one.saved_pct, 2), "kl_nats": round(one.kl_nats, 5), "kl_error_nats": round(one.kl_error, 5)}

    best, *others = found
    compared = {str(one.schedule): said(one) for one in others}
    return {"schedule": dataclasses.asdict(best.schedule), **said(best), "compared_with": compared}


def _say(one: Candidate) -> None:
    print(f"  {one.schedule!s:<28} saves {one.saved_pct:5.2f}%  KL {one.kl_nats:.4f} ± {one.kl_error:.4f} nats", flush=True)


def _without_modules(overrides: Iterable[str]) -> list[str]:
    return [word for word in overrides if not word.startswith("modules")]


def bar(what: str, unit: str = "batch") -> Any:
    """Wraps what a fit goes through into a bar on stderr."""
    from tqdm import tqdm

    return lambda steps: tqdm(steps, desc=what, unit=unit, file=sys.stderr)


def calibration_half(
    config: RunConfig, datasets: Sequence[str], loaded: Loaded, half: Half, windows: int | None, overrides: Sequence[str] = (),
    *, continued: bool = False, halves_of: int | None = None,
) -> FitText:  # fmt: skip
    """Windows of one half of these datasets' calibration parts, without what the test part of any dataset at hand has, too.

    Args:
        overrides: of the command; datasets in folders of its `--config-dir` count too.
        continued: each window is a prompt of protocol.prompt_tokens, and tokens after it.
        halves_of: as in `fit_text`.
    """
    from quicksilver.data.windows import check_context
    from quicksilver.fitting.fit import fit_text

    if not datasets:
        raise ConfigError("text=[] names no text: give one dataset or more, text=[python-docs].")
    window_tokens, prompt_tokens = config.protocol.window_tokens, config.protocol.prompt_tokens
    extra_dirs, words = searched(overrides)
    if ignored := [word for word in words if word.lstrip("+").startswith(("dataset=", "dataset."))]:
        raise ConfigError(f"{ignored[0]}: the text of fits and schedules is text=[…], all of its calibration part. Leave it out.")
    check_context(loaded.model, window_tokens)
    if continued and prompt_tokens > window_tokens - 2:
        must = f"two tokens at least must follow it in a window of protocol.window_tokens={window_tokens}"
        raise ConfigError(f"protocol.prompt_tokens={prompt_tokens}: {must}. Give at most {window_tokens - 2}.")
    texts = {name: _part(config, name, "calibration", extra_dirs) for name in datasets}
    evaluation = {}
    for name in choices("dataset", extra_dirs):
        try:
            evaluation[name] = _part(config, name, "test", extra_dirs).text
        except QuickSilverError:
            continue  # not at hand: then nothing can be scored on it here, either
    return fit_text(
        texts, evaluation, loaded.tokenizer, half=half, windows=windows, window_tokens=window_tokens, halves_of=halves_of
    )


def _part(config: RunConfig, name: str, part: Literal["test", "calibration"], extra_dirs: Sequence[Path]) -> Any:
    from quicksilver.data.text import read_text

    dataset = compose([f"dataset={name}"], extra_dirs).dataset
    if dataset.reader == "tagged":
        dataset = dataclasses.replace(dataset, reader="lines", tagger=None)  # its words alone: no tagger is trained
    return read_text(dataset, part, root=Path(config.data.root).expanduser() if config.data.root else None)
