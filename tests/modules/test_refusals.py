"""What is refused, in one line that names option, value and remedy: an option that its annotation restricts; options that cannot be together, or on
this model."""

import dataclasses
import importlib
import math
import os
import pkgutil
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import tiny
import torch
from drawing import Preset, RandomMLP
from looking import LAYERS, Pass, architecture

import quicksilver.baselines
import quicksilver.cli.commands
import quicksilver.fitting
import quicksilver.measure
import quicksilver.modules
from quicksilver.baselines.eviction import SinkAttention, SlidingWindow
from quicksilver.baselines.halting import OneShotHalting, PromptPruning
from quicksilver.baselines.number_formats import BFloat16, Int8Dynamic
from quicksilver.baselines.prompts import PromptTruncation
from quicksilver.fitting.controls import FittedPrediction, OracleExit, static_schedule
from quicksilver.fitting.gates import GateRecipe
from quicksilver.measure import alternate
from quicksilver.measure.dense_states import Bounds, Lenses
from quicksilver.measure.deployment import serve
from quicksilver.measure.energy import CodeCarbonMeter, Energy
from quicksilver.measure.inside import look_inside
from quicksilver.measure.measurement import Setting
from quicksilver.measure.perplexity import Protocol, check_allowed, score
from quicksilver.modules import (
    AdaptiveQuantization,
    ChannelSparsity,
    Halting,
    KVSkipping,
    LearnedHalting,
    LinearMLP,
    PresetHalting,
    Replay,
    Schedule,
    StagedHalting,
    TokenFusion,
    shuffled,
)
from quicksilver.modules.checks import TokenMask
from quicksilver.modules.fitted import translator_for
from quicksilver.modules.learned_halting import TrainedGates
from quicksilver.modules.linear_mlp import Neurons
from quicksilver.modules.signals import make_signal
from quicksilver.runs.config import compose
from quicksilver.runtime import ConfigError, RuntimeModule, Trace, apply, architecture_of
from quicksilver.runtime.options import Count, Fractions, Odd, Options, Positive, Share, TokenIds, at_least

# -- one option alone --------------------------------------------------------------------------------------------------------------
PACKAGES = (quicksilver.baselines, quicksilver.cli.commands, quicksilver.fitting, quicksilver.measure, quicksilver.modules)


def every_class() -> list[type[Options]]:
    for package in PACKAGES:
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    waiting, classes = [Options], []
    while waiting:
        classes.append(waiting.pop())
        waiting += classes[-1].__subclasses__()
    return [cls for cls in classes if cls.__module__.startswith("quicksilver.") and dataclasses.is_dataclass(cls)]


def makeable(cls: Any) -> bool:
    needed = [field for field in dataclasses.fields(cls) if field.init and field.default is field.default_factory]
    return not needed and not getattr(cls, "__abstractmethods__", None)


CLASSES = sorted((cls for cls in every_class() if makeable(cls)), key=lambda cls: (cls.__module__, cls.__name__))
# What a value may be accepted for: a word of the annotation. What has none is wrong everywhere.
WRONG: list[tuple[Any, str]] = [
    ("no such value", r"(?<!Literal)\bstr\b|Path"), ("no", r"\bstr\b|Path"), ("ü", r"\bstr\b|Path"), ("", r"\bstr\b|Path"), ("p101", r"\bstr\b|Path"),
    ("0.2", r"\bstr\b|Path"), (b"0.2", "never"), (None, "None|TokenMask"), (True, "bool"), (math.nan, "never"), (math.inf, "never"), (-math.inf, "never"),
    (-1, "int\\b.*None|-1.0"), (-0.5, "-1.0"), (1j, "never"), (object(), "never"), (torch.tensor(0.5), "never"), ([], "Sequence|list|TokenIds"),
    (["no"], r"Sequence\[int \| str\]|list\[str\]"), ([[]], "never"), ([math.nan], "never"), ([True], "never"), ([-1], "Sequence\\[int"), ({}, "dict"),
    ({"no": 1}, "dict"), (set(), "never"), (lambda: None, "never"), (Halting, "never"),
]  # fmt: skip
FIELDS = [(cls, field) for cls in CLASSES for field in dataclasses.fields(cls) if field.init]


def test_the_generator_is_large() -> None:
    assert len(FIELDS) * len(WRONG) > 9_000
    assert len(CLASSES) > 55


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_wrong_value_of_any_option_is_refused_in_one_line_that_names_it(cls: Any) -> None:
    fields = [field for field in dataclasses.fields(cls) if field.init]
    assert not [wrong for field in fields for value, where in WRONG if (wrong := fault(cls, field, value, where))]


def drawn(chance: random.Random) -> tuple[Any, str]:
    """A wrong value and where it may stand: as in `WRONG`, with other letters, numbers, and depths."""
    text = "".join(chance.choices("aZü0.9-_[]{}=,:%\n\0 😀", k=chance.randint(1, 12)))
    number = chance.choice([1, -1]) * 10 ** chance.uniform(-12, 30)
    plain: list[tuple[Any, str]] = [
        (text, r"\bstr\b|Path"), (text.encode(), "never"), (complex(number, 1), "never"), (number, ""), (int(number), ""), (np.float32(number), ""),
        (range(chance.randint(-3, 9)), "Sequence|list|TokenIds|Fractions|Thresholds"), (torch.full((2,), number), "never"), ({text: number}, "dict"), ({number}, "never"),
    ]  # fmt: skip
    value, where = chance.choice(plain)
    for _ in range(chance.choice([0, 0, 1, 2, 40])):
        value, where = [value], r"Sequence|list|TokenIds|Fractions|Thresholds" if where != "never" else where
    return value, where


@pytest.mark.slow
def test_ten_times_as_many_wrong_values_by_a_seed() -> None:
    seed = int(os.environ.get("FAULTS_SEED", time.time() // 86400))  # another one every night; the message names it
    chance = random.Random(seed)
    assert not [wrong for cls, field in FIELDS * (10 * len(WRONG)) if (wrong := fault(cls, field, *drawn(chance)))], (
        f"FAULTS_SEED={seed}"
    )


def fault(cls: Any, field: Any, value: Any, where: str) -> str | None:
    """None: `value` is refused in one line that names the option, or accepted by an option whose annotation has a word of `where`."""
    about = f"{cls.__name__}.{field.name}: {field.type} = {value!r:.80}"
    try:
        cls(**{field.name: value})
    except ConfigError as error:
        return None if len(str(error).splitlines()) == 1 and field.name in str(error) else f"{about}: {error}"
    except Exception as error:
        return f"{about}: {type(error).__name__}: {error}"
    return None if re.search(where, field.type) else f"{about} is accepted"


@dataclasses.dataclass
class Example(Options):
    """One of each."""

    choice: Literal["threshold", "capacity"] = "threshold"
    share: Share = 0.5
    count: Count | None = 0
    width: Annotated[int, at_least(2)] = 4
    every: Positive = 1
    pool: Odd = 1
    window: Fractions = (0.2, 0.8)
    ids: TokenIds = ()
    mask: TokenMask = None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"choice": "treshold"}, "choice='treshold' is not one of threshold, capacity. Did you mean 'threshold'?"),
        ({"share": 1.5}, "share=1.5 is out of range; give a number from 0 to 1."),
        ({"share": float("nan")}, "share=nan is not finite; give a number from 0 to 1."),
        ({"share": True}, "share=True is not a number; give a number from 0 to 1."),
        ({"count": -1}, "count=-1 must be a whole number of at least 0."),
        ({"count": 1.0}, "count=1.0 must be a whole number of at least 0."),
        ({"width": 1}, "width=1 must be a whole number of at least 2."),
        ({"every": False}, "every=False must be a whole number of at least 1."),
        ({"pool": 4}, "pool=4 has no middle: give an odd number."),
        ({"window": (0.8, 0.2)}, "window=[0.8, 0.2] is empty: its first fraction is above its last. Give them in order, such as [0.2, 0.8]."),
        ({"window": (0.2,)}, "window=(0.2,) must be two fractions of depth, such as [0.2, 0.8]."),
        ({"window": (5, 24)}, "window[0]=5.0 is out of range; give a number from 0 to 1."),
        ({"ids": 5}, "ids=5 must be a list of token ids, such as [50256]."),
        ({"ids": [3, "a"]}, "ids[1]='a' must be a whole number of at least 0."),
        ({"mask": [True]}, "mask must be a bool tensor by slot, (S,) or (B, S), not [True]: write mask.bool()."),
    ],
)  # fmt: skip
def test_the_message_names_option_value_and_remedy(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Example(**options)
    assert str(raised.value) == said


def test_sequences_become_tuples_and_none_is_let_through_where_it_may_stand() -> None:
    made = Example(window=[0, 1], ids=[3, 4], count=None, mask=torch.ones(3, dtype=torch.bool))
    assert (made.window, made.ids, made.count) == ((0.0, 1.0), (3, 4), None)


# -- options together, or on a model -----------------------------------------------------------------------------------------------
LONG = tiny.Batch((tuple(range(28)),))
SCHEDULE = Schedule(1, 0.25, 3, 2, 5)
GATES = TrainedGates((0, 2), torch.zeros(2, tiny.WIDTH), torch.zeros(2), tiny.LAYERS)
STAGE: dict[str, Any] = {"before": 3, "count": 2, "signal": "position"}
REST = {"before": 5, "rest": True}
HALF = {"before": 3, "share": 0.6, "signal": "drift"}

OPTIONS: dict[Callable[..., Any], list[tuple[dict[str, Any], str]]] = {
    Halting: [
        ({"tau_drift": [0.1, 0.2]}, "tau_drift has 2 values.*10 layers.*one per layer"),
        ({"tau_drift": "p25"}, "tau_drift='p25'.*no calibration.*quicksilver calibrate.*give a number"),
        ({"tau_drift": "p25", "calibration": "/no/such.json"}, "/no/such.json.*quicksilver calibrate"),
        ({"tau_drift": None, "tau_entropy": None}, "rule='threshold'.*tau_drift or tau_entropy.*'p25'"),
        ({"signal": "atention"}, "signal='atention'.*Did you mean 'attention'?"),
        ({"window": (1.0, 1.0)}, r"Nothing would ever halt.*\(1.0, 1.0\).*Open the window earlier"),
        ({"resume_layers": 9, "tau_drift": 0.1}, "resume_layers=9.*resume fewer layers"),
    ],
    KVSkipping: [
        ({"criterion": "attention"}, "criterion='attention'.*one of tau_kv and skipped_share"),
        ({"criterion": "attention", "tau_kv": 0.1, "skipped_share": 0.5}, "needs one of tau_kv and skipped_share, not tau_kv=0.1 and skipped_share=0.5"),
        ({"criterion": "halted_and_attention"}, "needs tau_kv.*'p95'"),
        ({"criterion": "attention", "tau_kv": [0.1] * 3}, "tau_kv has 3 values.*10 layers"),
        ({"criterion": "attention", "tau_kv": "p250"}, "tau_kv='p250' is no percentile: give one from 'p0' to 'p100'"),
        ({"criterion": "attention", "tau_kv": "p95"}, "tau_kv='p95'.*no calibration.*quicksilver calibrate"),
        ({"min_depth": 1.0}, "min_depth=1.0.*10 layers.*smaller fraction"),
    ],
    TokenFusion: [
        ({"tau_fuse": None}, "rule='threshold' needs tau_fuse: a number, one per layer, or a percentile such as 'p15'"),
        ({"criterion": "random"}, "give a number, or rule='capacity'"),
        ({"rule": "capacity", "fused_share": 0.6, "max_group": 2}, "fused_share=0.6 cannot be reached with max_group=2"),
        ({"rule": "capacity", "tau_attention": 0.5}, "give rule='threshold' and a distance, or leave it out"),
        ({"anchors": "Question:"}, r"anchors='Question:' must be a list of sequences of token ids, such as \[\[24361, 25\]\]"),
        ({"rare_below": 5}, "rare_below=5 and token_counts=null: give both"),
        ({"token_counts": "/nowhere.json", "rare_below": 5}, "token_counts='/nowhere.json' cannot be read"),
        ({"start": 1.0, "rule": "capacity"}, "start=1.0 leaves none of 10 layers.*give a smaller fraction"),
        ({"tau_fuse": [1.0, 2.0, 3.0]}, "tau_fuse has 3 values and the model has 10 layers"),
        ({"tau_fuse": "p15"}, "tau_fuse='p15' is a calibrated percentile and there is no calibration"),
    ],
    AdaptiveQuantization: [
        ({"widths": (8, 4)}, r"must ascend, such as \[4, 8\]"),
        ({"tau_low": 2.5}, "tau_low=2.5 is above tau_high=2.3"),
        ({"mix": (0.5, 0.5)}, r"one share for each of widths=\[2, 4, 8\]"),
        ({"mix": (0.5, 0.5, 0.5)}, "adds up to 1.5, not to 1"),
        ({"mix": (1, 0, 0), "bits": 4}, "remove one"),
        ({"normalisation": "log_vocab", "unit": "bits"}, "has no effect"),
        ({"normalisation": "minmax", "tau_high": "p50"}, "scales each batch anew"),
        ({"protected_bits": 4}, "protects nothing"),
        ({"execution": "int8", "weights": "float"}, "weights='int8' or 'token'"),
        ({"execution": "int8", "scope": "residual"}, "nothing to multiply"),
        ({"scope": "residual", "weights": "int8"}, "nothing to multiply"),
        ({"depth": 1.0}, "leaves none of"),
        ({"tau_low": [1.0] * 3}, "tau_low has 3 values and the model has 10 layers"),
        ({"tau_low": [1.0] * 9 + [3.0]}, "tau_low=3 is above tau_high=2.3 at layer 9"),
        ({"tau_low": "p30"}, "there is no calibration"),
    ],
    StagedHalting: [
        ({"stages": []}, r"stages=\[\] names no stage"),
        ({"stages": [3]}, r"stages\[0\]=3 must be a Stage or a mapping"),
        ({"stages": [{"count": 3, "signal": "drift"}]}, r"stages\[0\] does not say before which layer: give before=3"),
        ({"stages": [STAGE | {"befor": 2}]}, r"option of stages\[0\]='befor' is not one of .*Did you mean 'before'"),
        ({"stages": [STAGE | {"share": 0.5}]}, "exactly one of count, share, rest and below, and it gives count and share"),
        ({"stages": [{"before": 3, "signal": "drift"}]}, "exactly one of count, share, rest and below, and it gives none"),
        ({"stages": [{"before": 3, "count": 2}]}, r"stages\[0\]: count=2 needs a signal"),
        ({"stages": [REST | {"signal": "drift"}]}, "signal='drift' has no effect with rest=true"),
        ({"stages": [STAGE | {"missing_kv": "predict"}]}, r"stages\[0\]: missing_kv='predict' needs a translator: give translator=embedded"),
        ({"stages": [STAGE | {"translator": "embedded"}]}, "translator='embedded' has no effect with missing_kv='drop'"),
        ({"stages": [REST, STAGE | {"before": 7}]}, r"stages\[0\] halts the rest, so stages\[1\] has no tokens left"),
        ({"stages": [STAGE | {"before": 5}, STAGE]}, r"stages\[0\] has before=5 and stages\[1\] has before=3: give stages in order of depth"),
        ({"stages": [STAGE, STAGE]}, "in order of depth, one a layer"),
        ({"stages": [HALF, HALF | {"before": 5}]}, "shares of the stages add up to 1.2, more than all tokens"),
        ({"stages": [STAGE | {"before": LAYERS}]}, f"before={LAYERS} is layer {LAYERS}, where halting saves nothing: .*from 1 to {LAYERS - 1}"),
        ({"stages": [STAGE | {"before": 9}], "resume_layers": 2}, "tokens resume in the last 2, so give a layer from 1 to 7"),
        ({"stages": [STAGE | {"before": 8}, STAGE | {"before": 0.3}]}, "in order of depth"),
    ],
    PresetHalting: [
        ({"save": None}, "give one of them"),
        ({"save": 40}, "save=40 is out of range: give save=0.4 for 40%"),
        ({"schedule": {"drop_befor": 1}}, "schedule has no 'drop_befor':"),
        ({"schedule": {"drop_before": 1}}, "is incomplete"),
    ],
    PromptPruning: [
        ({"layers": (0.5, 0.2), "kept": (0.7, 0.4)}, "must rise"),
        ({"layers": (0.2, 0.5), "kept": (0.4, 0.7)}, "must fall"),
        ({"layers": (0.2,), "kept": (0.4, 0.2)}, "give one share each"),
        ({"layers": (0.5, 0.52), "kept": (0.5, 0.4)}, "layers of their own"),
    ],
    OneShotHalting: [({"start": 1.0}, "Nothing would ever halt")],
    PromptTruncation: [({"keep": 0.0}, "leaves no prompt")],
    FittedPrediction: [({"schedule": SCHEDULE, "drop_oldest": False}, "give save instead")],
    OracleExit: [({"save": 20}, "save=20 is out of range: give save=0.2 for 20%")],
}  # fmt: skip


@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
def test_options_that_do_not_go_together_or_with_the_model_are_refused(cls: Any) -> None:
    for options, words in OPTIONS[cls]:
        with tiny.refused(words):
            cls(**options).bind(architecture())


# -- a call ------------------------------------------------------------------------------------------------------------------------
ONES = torch.ones(2, 8, dtype=torch.long)
SETTING = Setting("all", 512, 448, "compact")
COMPOSED = ("modules=[halting_attention]", "protocol=continuation", "measure=generation")


def scored(windows: torch.Tensor, tokens: int = 8, model: Any = None) -> object:
    return score(model or tiny.load("gpt2"), windows, Protocol("all", window_tokens=tokens))


def under(*modules: RuntimeModule, **inputs: Any) -> Callable[[], object]:
    """A call of a tiny GPT-2 of 5 layers with 28 tokens."""

    def call() -> None:
        model = tiny.load("gpt2")
        with torch.no_grad(), apply(model, modules):
            model(**(inputs or {"input_ids": torch.arange(28)[None]}))

    return call


def learned(**options: Any) -> LearnedHalting:
    return LearnedHalting(**{"gates": GATES, "protect_first": 0, "protect_last": None} | options)


CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: make_signal("entropi"), "signal='entropi'.*attention.*Did you mean 'entropy'?"),
    (lambda: make_signal({"name": "attention", "last_querys": 3}), "'last_querys'.*Did you mean 'last_queries'?"),
    (lambda: make_signal({"name": "position", "seed": 3}), "'seed'.*it has none"),
    (lambda: make_signal({"last_queries": 3}), "signal=None.*drift"),
    (lambda: Schedule(1, 1.5, 3), "drop_share=1.5 is out of range"),
    (lambda: Schedule(3, 0.25, 3), "drop earlier than you predict"),
    (lambda: Schedule(1, 0.25, 3, linear_mlp=(1, 3)), "no token has an MLP from layer 3 on. Leave 3 out"),
    (lambda: LinearMLP(layers=[0, 1]), "give layers from 1"),
    (lambda: RandomMLP(layers=[1, 9]).bind(architecture_of(tiny.load("gpt2"))), "no map stands in for the MLP of layer 9. There are: 1, 2, 3, 4"),
    (lambda: Neurons.of(architecture_of(tiny.load("gpt2")), 1, [3, 999]), "and none is 999"),
    (lambda: replace(tiny.random_mlp_maps(architecture_of(tiny.load("gpt2"))), neurons=((1, 2), (3,))), r"neurons=\[2, 1\]: give as many"),
    (lambda: LinearMLP().bind(architecture(tiny.LAYERS)), "maps='embedded'.*fit them for this model"),
    (lambda: Schedule(1, 0.25, 5).modules("drop")[-1].bind(architecture(tiny.LAYERS)), "before=5 is layer 5, where halting saves nothing"),
    (lambda: apply(tiny.load("gpt2"), [ChannelSparsity(), RandomMLP()]), "channel_sparsity rotates the states, and a file of MLP maps .*rotate=false"),
    (lambda: apply(tiny.load("gpt2"), [ChannelSparsity(), Preset(schedule=Schedule(1, 0.25, 3))]), "rotates the states, and a translator"),
    (lambda: StagedHalting(stages=[STAGE], full_ids=[10**6]).bind(architecture_of(tiny.load("gpt2"))), r"full_ids.*1000000"),
    (lambda: translator_for(architecture_of(tiny.build("gpt2")), tiny.random_translators(architecture_of(tiny.load("gpt2")))[1], 2),
     "The translator was fitted to other weights"),
    (lambda: apply(tiny.load("gpt2"), [SlidingWindow(), SinkAttention()]), "2 modules limit how far back"),
    (lambda: apply(tiny.load("gpt2"), [Int8Dynamic(), AdaptiveQuantization()]), "Int8Dynamic and AdaptiveQuantization"),
    (lambda: apply(tiny.load("gpt2"), [Int8Dynamic(), BFloat16()]), "Int8Dynamic and BFloat16"),
    (lambda: apply(tiny.load("gpt2"), [StagedHalting(stages=[STAGE | {"before": 1}, {"before": 3, "rest": True}])], decision_layers=[0]),
     r"decision_layers=\[0\]: StagedHalting decides after layer 2 too. Add it"),
    (lambda: Pass([3]).run(Halting(rule="capacity", full_ids=[7])), r"full_ids=\[7\].*embeddings.*input_ids"),
    (lambda: Pass([3, 3]).run(Halting(rule="capacity", forced_mask=torch.zeros(3, 4).bool())), "forced_mask has 3 rows and the batch has 2"),
    (under(TokenFusion(max_group=40, rule="capacity")), "max_group=40 is larger than the prompt of 28 tokens: give at most 28"),
    (under(TokenFusion(token_counts=[5, 5, 5], rare_below=2, rule="capacity")), "token_counts has 3 numbers for 61 tokens"),
    (under(TokenFusion(anchors=[[1, 2]], rule="capacity"), inputs_embeds=torch.randn(1, 8, tiny.WIDTH)),
     "anchors and token_counts select by token id.*exempt_mask"),
    (lambda: under(Replay(tiny.forward(tiny.load("gpt2"), LONG, [AdaptiveQuantization(bits=8)]).trace))(), "like=modules"),
    (lambda: under(Replay(tiny.forward(tiny.load("gpt2"), LONG, [Preset(schedule=SCHEDULE)]).trace))(), "like=modules"),
    (under(PresetHalting(save=0.4)), "save=0.4: one ships with .*, none with this model"),
    (under(learned(threshold=[0.5, 0.5, 0.5])), "threshold has 3 numbers, and there are 2 gates"),
    (under(learned(resume_layers=2)), r"Gates after layers \[2\] save nothing with resume_layers=2"),
    (under(LearnedHalting()), "gates='predict': one ships with .*, none with this model"),
    (under(ChannelSparsity()), "no thresholds: call fit"),
    (under(FittedPrediction(schedule=SCHEDULE)), "has no map: call fit"),
    (under(OracleExit()), "has no exit head: call fit"),
    (lambda: static_schedule(apply(tiny.load("gpt2"), []).arch, 0.99), "save=0.99: no layer saves so much"),
    (lambda: check_allowed([OracleExit()], Protocol("all", 40, 1, 2)), "lookahead"),
    (lambda: check_allowed([PromptTruncation()], Protocol("all", 24)), "PromptTruncation looks ahead"),
    (lambda: Replay(Trace(5)).bind(architecture()), "5 layers and this one has 10.*model it was made with"),
    (lambda: Replay(Trace(5), first_pass=-1), "first_pass=-1"),
    (lambda: shuffled(Trace(3), 0, protect_first=-1), "protect_first=-1"),
    (lambda: shuffled(Trace(3), 0, protect_last=0.5), "protect_last=0.5"),
    (lambda: TrainedGates((0,), torch.tensor([[float("nan")]]), torch.zeros(1), 3), "not finite"),
    (lambda: TrainedGates((0, 1), torch.zeros(2, 4), torch.zeros(2), 3, place=torch.zeros(2, 1)),
     r"place of a set of gates has shape \(2, 1\) where \(2, 2\) is needed"),
    (lambda: TrainedGates((0, 2), torch.zeros(2, 4), torch.zeros(2), 5, predicts=(1,)), "no gate stands after layer 1; there are"),
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
    (lambda: compose([*COMPOSED, "measure.generation.prompt_tokens=600"]),
     "prompt_tokens=600: a prompt is the beginning of a window"),
    (lambda: compose([*COMPOSED, "measure.generation.new_tokens=2"]), "new_tokens=2 must be a whole number of at least"),
    (lambda: compose([*COMPOSED, "measure.generation.temperature=0"]), "temperature=0.0 is out of range"),
    (lambda: compose(["measure.signals.enabled=true"]), "measure.signals.sentences"),
    (lambda: compose(["measure.signals.enabled=true", "measure.signals.windows=-1"]), "measure.signals.windows=-1"),
    (lambda: compose(["dataset=sst3", "measure=task"]), r"dataset=sst3: there is no such dataset\..*sst2"),
    (lambda: look_inside(tiny.load("gpt2"), torch.zeros(1, dtype=torch.long)), "1 tokens"),
    (lambda: look_inside(tiny.load("gpt2"), torch.zeros(97, dtype=torch.long)), "97 tokens"),
    (lambda: serve(tiny.load("gpt2"), ONES, 4), "one prompt"),
    (lambda: serve(tiny.load("gpt2"), ONES[:1], 1), "new_tokens=1"),
    (lambda: Protocol("prefix"), "'prefix' is not one of all, continuation"),
    (lambda: Protocol(window_tokens=1), "window_tokens=1"),
    (lambda: Protocol(window_tokens=512.0), r"window_tokens=512\.0"),
    (lambda: Protocol(batch_size=0), "batch_size=0"),
    (lambda: Protocol("continuation", window_tokens=64, prompt_tokens=64), "prompt_tokens=64.*window_tokens=64"),
    (lambda: scored(ONES, 9), r"\(2, 8\).*window_tokens=9"),
    (lambda: scored(ONES[:0]), "no window"),
    (lambda: scored(ONES.float()), "float32"),
    (lambda: scored(61 * ONES), "61.*another model's tokenizer"),
    (lambda: scored(torch.ones(1, 97, dtype=torch.long), 97), "window_tokens=97.*96"),
    (lambda: scored(ONES, model=tiny.build("gpt2").train()), r"model\.eval"),
    (lambda: GateRecipe((0, 1), steps=0), "steps=0"),
    (lambda: GateRecipe((0, 1), saves_pct=0.0), "saves_pct=0.0 must lie between 0 and 100"),
    (lambda: GateRecipe((0, 1), predicts=(0,)),
     r"predicts=\[0\] of layers=\[0, 1\]: tokens are dropped first and predicted later"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[words for _, words in CALLS])
def test_a_call_that_makes_no_sense_is_refused(call: Callable[[], object], words: str) -> None:
    with tiny.refused(words):
        call()
