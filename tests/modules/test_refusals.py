"""What options cannot be together, or on this model, is refused in one line that names them and the remedy. One option alone: test_options.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from drawing import Preset
from looking import LAYERS, Pass, architecture

from quicksilver.baselines.eviction import SinkAttention, SlidingWindow
from quicksilver.baselines.halting import OneShotHalting, PromptPruning
from quicksilver.baselines.number_formats import BFloat16, Int8Dynamic
from quicksilver.baselines.prompts import PromptTruncation
from quicksilver.fitting.controls import FittedPrediction, OracleExit, static_schedule
from quicksilver.measure.perplexity import Protocol, check_allowed
from quicksilver.modules import (
    AdaptiveQuantization,
    ChannelSparsity,
    Halting,
    KVSkipping,
    LearnedHalting,
    PresetHalting,
    Replay,
    Schedule,
    StagedHalting,
    TokenFusion,
    shuffled,
)
from quicksilver.modules.learned_halting import TrainedGates
from quicksilver.modules.signals import make_signal
from quicksilver.runtime import ConfigError, RuntimeModule, Trace, apply

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
        ({"tau_fuse": [1.0, 2.0, 3.0]}, "tau_fuse has 3 values and the model 10 layers"),
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
        ({"depth": 1.0}, "leaves no layer"),
        ({"tau_low": [1.0] * 3}, "tau_low has 3 values and the model 10 layers"),
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
    PromptTruncation: [
        ({"keep": 0.0}, "leaves no prompt"),
    ],
    FittedPrediction: [({"schedule": SCHEDULE, "drop_oldest": False}, "give save instead")],
    OracleExit: [({"save": 20}, "save=20 is out of range: give save=0.2 for 20%")],
}  # fmt: skip


@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
def test_options_that_do_not_go_together_or_with_the_model_are_refused(cls: Any) -> None:
    for options, words in OPTIONS[cls]:
        with pytest.raises(ConfigError, match=words) as raised:
            cls(**options).bind(architecture())
        assert "\n" not in str(raised.value), options


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
    (lambda: Schedule(1, 0.25, 5).halting("drop").bind(architecture(tiny.LAYERS)), "before=5 is layer 5, where halting saves nothing"),
    (lambda: apply(tiny.load("gpt2"), [SlidingWindow(), SinkAttention()]), "2 modules limit how far back"),
    (lambda: apply(tiny.load("gpt2"), [Int8Dynamic(), AdaptiveQuantization()]), "Int8Dynamic and AdaptiveQuantization"),
    (lambda: apply(tiny.load("gpt2"), [Int8Dynamic(), BFloat16()]), "Int8Dynamic and BFloat16"),
    (lambda: apply(tiny.load("gpt2"), [StagedHalting(stages=[STAGE | {"before": 1}, {"before": 3, "rest": True}])], decision_layers=[0]),
     r"decision_layers=\[0\]: StagedHalting decides after layer 2 too. Add it"),
    (lambda: Pass([3]).run(Halting(rule="capacity", full_ids=[7])), r"full_ids=\[7\].*embeddings.*input_ids"),
    (lambda: Pass([3, 3]).run(Halting(rule="capacity", forced_mask=torch.zeros(3, 4).bool())), "forced_mask has 3 rows and the batch 2"),
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
    (lambda: shuffled(Trace(3), 0, protect_last=0.5), "protect_last=0.5"),  # type: ignore[arg-type]
    (lambda: TrainedGates((0,), torch.tensor([[float("nan")]]), torch.zeros(1), 3), "not finite"),
    (lambda: TrainedGates((0, 1), torch.zeros(2, 4), torch.zeros(2), 3, place=torch.zeros(2, 1)),
     r"place of a set of gates has shape \(2, 1\) where \(2, 2\) is needed"),
    (lambda: TrainedGates((0, 2), torch.zeros(2, 4), torch.zeros(2), 5, predicts=(1,)), "no gate stands after layer 1; there are"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), CALLS)
def test_a_call_that_makes_no_sense_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        call()
    assert "\n" not in str(raised.value)
