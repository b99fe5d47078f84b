"""Choose which tokens of a prompt stop where, for a model and a budget, by KL to the dense model on calibration text.

quicksilver schedule model=reference-gpt2 save=[40,50] translators=[results/translators/reference-gpt2.layer9.safetensors]

Prints all candidates, best first, and writes the best of each budget; the rule is in docs/predicted-kv.md. No test text is read but to leave
out what it shares with the calibration text.

Keys of its own:
  save=40           percent of the prompt's executed FLOPs, one or several: save=[40,50]
  translators=[…]   files of `quicksilver fit`
  text=[a,b]        datasets whose calibration part is read; default: [python-docs,wikitext103]
  windows=64        of the choosing half
  output=FILE       default: results_dir/translators/MODEL.schedules.yaml
All others are those of `quicksilver run`: model, model.device_map, data.root, results_dir …
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicksilver.cli.arguments import split
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import Options, Percent, Positive

if TYPE_CHECKING:
    from quicksilver.fitting.schedules import Candidate
    from quicksilver.runs.config import RunConfig


@dataclass
class Keys(Options):
    """The command's own keys, as its help has them."""

    save: list[Percent] = field(default_factory=list)
    translators: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=lambda: ["python-docs", "wikitext103"])
    windows: Positive = 64
    output: str | None = None


def main(words: Sequence[str]) -> int:
    """Search and write; returns the exit code.

    Raises:
        ConfigError: nothing asked for, a budget that no schedule reaches, a translator of another model.
    """
    options, overrides = split(words, Keys, "schedule")
    if not options.save or not options.translators:
        raise ConfigError(
            "Give budgets and translators: quicksilver schedule save=[40,50] translators=[FILE] (of `quicksilver fit`)."
        )
    from quicksilver.modules.staged_halting import shipped_with_schedules
    from quicksilver.runs.config import compose, schedules_file

    config = compose(overrides)
    path = Path(options.output) if options.output else schedules_file(config)
    choose(config, options, path)
    print(f"Written: {path}")
    given = " ".join(word for word in overrides if not word.startswith("modules"))
    if options.output or config.model.name in shipped_with_schedules():
        given += f" modules.quicksilver.schedule={path}"  # no run would look there
    print("Measure it, beside its null:")
    for pct in options.save:
        print(f"  quicksilver run {given} protocol=continuation modules=[quicksilver] modules.quicksilver.save={pct / 100:g}")
    return 0


def choose(config: RunConfig, options: Keys, path: Path) -> None:
    """Search every budget, and write what was found to `path`."""
    import yaml

    from quicksilver.cli.commands.fit import calibration_half
    from quicksilver.files import write_atomically
    from quicksilver.fitting.schedules import ScheduleEvaluator, search
    from quicksilver.modules.fitted import model_digest
    from quicksilver.modules.translators import Translator
    from quicksilver.runs.context import RunContext
    from quicksilver.runtime.architecture import architecture_of

    loaded = RunContext().model(config)
    arch = architecture_of(loaded.model)
    translators = [Translator.load(file) for file in options.translators]
    for translator in translators:
        translator.check(arch)
    text = calibration_half(config, options.text, loaded.tokenizer, "choose", options.windows)
    evaluator = ScheduleEvaluator(arch, text.ids)
    schedules: dict[float, Any] = {}
    for pct in options.save:
        found = search(evaluator, translators, pct / 100, progress=_say)
        schedules[int(pct) if float(pct).is_integer() else pct] = _entry(found)
        print(f"To save {pct:g}%: {found[0].schedule}\n")
    chosen_on = {
        "text_digest": text.digest,
        "windows": {name: said["windows"] for name, said in text.provenance["texts"].items()},
    }
    digests = {translator.source_layer: translator.digest for translator in translators}
    named = {t.source_layer: os.path.relpath(file, path.parent) for t, file in zip(translators, options.translators, strict=True)}
    content = {
        "weights_digest": model_digest(arch.model), "chosen_on": chosen_on, "translators": digests, "files": named, "schedules": schedules,
    }  # fmt: skip
    head = f"# {config.model.name}: chosen by KL to dense on calibration text, by the rule of docs/predicted-kv.md (quicksilver schedule).\n"
    write_atomically(path, (head + yaml.safe_dump(content, sort_keys=False)).encode())


def _entry(found: Sequence[Candidate]) -> dict[str, Any]:
    def numbers(candidate: Candidate) -> dict[str, float]:
        return {
            "saved_pct": round(candidate.saved_pct, 2),
            "kl_nats": round(candidate.kl_nats, 5),
            "kl_error_nats": round(candidate.kl_error, 5),
        }

    others = {str(candidate.schedule): numbers(candidate) for candidate in found[1:]}
    return {"schedule": asdict(found[0].schedule), **numbers(found[0]), "compared_with": others}


def _say(candidate: Candidate) -> None:
    print(
        f"  {candidate.schedule!s:<28} saves {candidate.saved_pct:5.2f}%  KL {candidate.kl_nats:.4f} ± {candidate.kl_error:.4f} nats",
        flush=True,
    )
