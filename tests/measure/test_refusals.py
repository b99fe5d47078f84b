"""What gives no number, or one that says nothing, is refused before anything is measured, in one line that names it and the remedy."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch

from quicksilver.fitting.gates import GateRecipe
from quicksilver.measure import alternate
from quicksilver.measure.dense_states import Bounds, Lenses
from quicksilver.measure.deployment import serve
from quicksilver.measure.energy import CodeCarbonMeter, Energy
from quicksilver.measure.inside import look_inside
from quicksilver.measure.measurement import Setting
from quicksilver.measure.perplexity import Protocol, score
from quicksilver.runs.config import compose
from quicksilver.runtime import ConfigError

IDS = torch.ones(2, 8, dtype=torch.long)
SETTING = Setting("all", 512, 448, "compact")
HALTING = ("modules=[halting_attention]", "protocol=continuation", "measure=generation")


def scored(windows: torch.Tensor, tokens: int = 8, model: Any = None) -> object:
    return score(model or tiny.load("gpt2"), windows, Protocol("all", window_tokens=tokens))


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Bounds(windows=0), "windows=0 must be a whole number of at least 1"),
    (lambda: Bounds(tokens=1000).check(SETTING), "tokens=1000 is out of range: .* at most the 512 of a window"),
    (lambda: Bounds(depths=[1.0]), r"depths\[0\]=1.0 is out of range"),
    (lambda: Lenses(windows=2).check(SETTING), "windows"),
    (lambda: Energy(window_s=0.5), "window_s=0.5"),
    (lambda: Energy(rounds=1), "rounds=1"),
    (lambda: CodeCarbonMeter("Germany"), "country_iso_code=Germany.*DEU"),
    (lambda: alternate({"a": lambda: None}, repeats=2), "repeats=2.*at least 3"),
    (lambda: alternate({"a": lambda: None}, warmup=-1), "warmup=-1"),
    (lambda: alternate({}), "nothing to time"),
    (
        lambda: compose([*HALTING, "measure.generation.prompt_tokens=600"]),
        "prompt_tokens=600: a prompt is the beginning of a window",
    ),
    (lambda: compose([*HALTING, "measure.generation.new_tokens=2"]), "new_tokens=2 must be a whole number of at least"),
    (lambda: compose([*HALTING, "measure.generation.temperature=0"]), "temperature=0.0 is out of range"),
    (lambda: compose(["measure.signals.enabled=true"]), "measure.signals.sentences"),
    (lambda: compose(["measure.signals.enabled=true", "measure.signals.windows=-1"]), "measure.signals.windows=-1"),
    (lambda: compose(["dataset=sst3", "measure=task"]), r"dataset=sst3: there is no such dataset\..*sst2"),
    (lambda: look_inside(tiny.load("gpt2"), torch.zeros(1, dtype=torch.long)), "1 tokens"),
    (lambda: look_inside(tiny.load("gpt2"), torch.zeros(97, dtype=torch.long)), "97 tokens"),
    (lambda: serve(tiny.load("gpt2"), IDS, 4), "one prompt"),
    (lambda: serve(tiny.load("gpt2"), IDS[:1], 1), "new_tokens=1"),
    (lambda: Protocol("prefix"), "'prefix' is not one of all, continuation"),
    (lambda: Protocol(window_tokens=1), "window_tokens=1"),
    (lambda: Protocol(window_tokens=512.0), r"window_tokens=512\.0"),
    (lambda: Protocol(batch_size=0), "batch_size=0"),
    (lambda: Protocol("continuation", window_tokens=64, prompt_tokens=64), "prompt_tokens=64.*window_tokens=64"),
    (lambda: scored(IDS, 9), r"\(2, 8\).*window_tokens=9"),
    (lambda: scored(IDS[:0]), "no window"),
    (lambda: scored(IDS.float()), "float32"),
    (lambda: scored(61 * IDS), "61.*another model's tokenizer"),
    (lambda: scored(torch.ones(1, 97, dtype=torch.long), 97), "window_tokens=97.*96"),
    (lambda: scored(IDS, model=tiny.build("gpt2").train()), r"model\.eval"),
    (lambda: GateRecipe((0, 1), steps=0), "steps=0"),
    (lambda: GateRecipe((0, 1), saves_pct=0.0), "saves_pct=0.0 must lie between 0 and 100"),
    (
        lambda: GateRecipe((0, 1), predicts=(0,)),
        r"predicts=\[0\] of layers=\[0, 1\]: tokens are dropped first and predicted later",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_gives_no_number_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        call()
    assert "\n" not in str(raised.value)
