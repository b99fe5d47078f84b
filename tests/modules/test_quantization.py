"""Adaptive quantization: who gets how many bits; and that held tokens obey every invariant of the runtime, alone and with the others.

Models are in float64 where two executions are compared: rounding to a code is not continuous, so a difference of 1e-7 between two
float32 executions may move one value to its neighbouring code, and that is no error of either.
"""

import math
from contextlib import ExitStack
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from looking import LAYERS, Pass, architecture
from tiny import Batch, Hashed

from quicksilver.modules import AdaptiveQuantization, calibrate
from quicksilver.runtime import RuntimeModule, apply
from quicksilver.runtime.quantized.codes import mix_of, quantize_dequantize

pytestmark = pytest.mark.filterwarnings("ignore:.*has no exact int8 matrix product")

BATCH = Batch((tuple(range(1, 21)), tuple(range(30, 45))))


# Logits (a, 0, 0, 0) for states (a, …): entropies fall from ln 4 as a grows.
HEAD = torch.zeros(8, 4)
HEAD[0, 0] = 1.0


def entropy_of(a: float) -> float:
    log_p = torch.tensor([a, 0, 0, 0], dtype=torch.float64).log_softmax(0)
    return float(-(log_p.exp() * log_p).sum())


STATES = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0]
ENTROPIES = [entropy_of(a) for a in STATES]  # 1.386, 1.268, 0.915, 0.519, 0.250, 0.046


def assigned(module: AdaptiveQuantization, one: Pass | None = None, layer: int = 4, states: list[float] = STATES) -> list[int]:
    """The bits of the first row's tokens after `module` decided after `layer`."""
    one = Pass([len(states)], logits=HEAD) if one is None else one
    after = torch.zeros(*one.shape, 8)
    after[..., one.shape[1] - len(states) :, 0] = torch.tensor(states)
    fake = architecture(one.n_layers)
    fake.vocab_size, fake.width = 4, 8
    module.bind(fake)
    assert module.acts_at(layer)
    module.decide(*one.look(layer, after=after))
    return one.state.bits[0][one.state.valid[0]].tolist()


NATS = {"tau_low": 0.3, "tau_high": 1.0}
LOW, HIGH = min(ENTROPIES), max(ENTROPIES)
SCALED = [(h - LOW) / (HIGH - LOW) for h in ENTROPIES]
IDS = torch.tensor([[1, 2, 0, 0, 3, 0]])
FOURTH = torch.arange(20) == 3
WIDTHS: list[tuple[dict[str, Any], list[int]]] = [
    (NATS, [8, 8, 4, 4, 2, 2]),
    (NATS | {"widths": (4, 8, 16)}, [16, 16, 8, 8, 4, 4]),
    # of fewer widths, by one threshold
    (NATS | {"widths": (4, 8)}, [8, 8, 4, 4, 4, 4]), (NATS | {"widths": (2, 4)}, [4, 4, 4, 4, 2, 2]), (NATS | {"widths": (2, 8)}, [8, 8, 2, 2, 2, 2]),
    (NATS | {"widths": (8, 16)}, [16, 16, 8, 8, 8, 8]), (NATS | {"widths": (4,)}, [4] * 6),
    # thresholds in bits, as shares of the greatest entropy, and between the least and the greatest of the batch
    ({"tau_low": 0.3 / math.log(2), "tau_high": 1.0 / math.log(2), "unit": "bits"}, [8, 8, 4, 4, 2, 2]),
    ({"tau_low": 0.3 / math.log(4), "tau_high": 1.0 / math.log(4), "normalisation": "log_vocab"}, [8, 8, 4, 4, 2, 2]),
    ({"tau_low": 0.3, "tau_high": 0.6, "normalisation": "minmax"}, [2 if h < 0.3 else 8 if h > 0.6 else 4 for h in SCALED]),
    # named tokens keep more
    (NATS | {"protected_ids": [3], "protected_mask": FOURTH, "protect_first": 1}, [8, 8, 4, 8, 8, 2]),
    (NATS | {"protected_ids": [3, 1], "protected_bits": 16}, [16, 8, 4, 4, 16, 2]),
    ({"bits": 2, "protected_ids": [2]}, [2, 8, 2, 2, 2, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "expected"), WIDTHS)
def test_widths_by_entropy_and_name(options: dict[str, Any], expected: list[int]) -> None:
    assert assigned(AdaptiveQuantization(**options), Pass([6], logits=HEAD, ids=IDS)) == expected


def test_one_token_alone_and_one_on_a_threshold() -> None:
    assert assigned(AdaptiveQuantization(normalisation="minmax", tau_low=0.3, tau_high=0.6), states=[2.0]) == [8]
    view, tokens = Pass([1], logits=HEAD).look(4, after=torch.tensor(STATES[3:4] + [0.0] * 7)[None, None])
    exact = float(view.logit_entropy_nats(tokens.active)[0])
    for taus in ((exact, 9), (0, exact)):
        assert assigned(AdaptiveQuantization(tau_low=taus[0], tau_high=taus[1]), states=STATES[3:4]) == [4]


@pytest.mark.parametrize(("source", "outcomes"), [("latent", 8), ("histogram", 64)])
def test_other_sources_do_not_ask_the_head(source: Any, outcomes: int) -> None:
    one = Pass([6], logits=HEAD)
    module = AdaptiveQuantization(source=source, normalisation="log_vocab", tau_low=0.0, tau_high=0.9)
    bits = assigned(module, one)
    assert one.asked_logits == 0
    assert module._divisor == pytest.approx(math.log(outcomes))
    assert bits[0] == (8 if source == "latent" else 4)  # all states equal: the greatest latent entropy, one bin


@pytest.mark.parametrize(("depth", "layer"), [(0.5, 4), (0.2, 1), (0.0, 0), (0.85, 8)])
def test_widths_are_decided_once_at_their_depth_or_after_every_later_layer(depth: float, layer: int) -> None:
    once, again = AdaptiveQuantization(bits=4, depth=depth), AdaptiveQuantization(bits=4, depth=depth, reassign=True)
    for module in (once, again):
        module.bind(architecture())
    assert [once.acts_at(i) for i in range(LAYERS)] == [i == layer for i in range(LAYERS)]
    assert [again.acts_at(i) for i in range(LAYERS)] == [i >= layer for i in range(LAYERS)]


def test_reassigning_may_give_a_token_all_its_bits_back() -> None:
    module = AdaptiveQuantization(tau_low=0.3, tau_high=1.0, widths=(4, 8, 16), reassign=True, depth=0.5)
    one = Pass([2], logits=HEAD)
    assert assigned(module, one, layer=4, states=[6.0, 0.0]) == [4, 16]
    assert assigned(module, one, layer=5, states=[0.0, 6.0]) == [16, 4]
    assert [(p.layer, p.bits.tolist()) for p in one.state.precisions] == [(4, [[4, 0]]), (5, [[16, 4]])]


@given(st.tuples(st.floats(0, 1), st.floats(0, 1)), st.integers(0, 999))
def test_the_null_draws_widths_with_the_shares_it_was_given(cuts: tuple[float, float], seed: int) -> None:
    low, high = sorted(cuts)
    mix = (low, high - low, 1 - high)
    ids = torch.randint(0, 1000, (2, 2000), generator=torch.Generator().manual_seed(seed))
    bits, others = (Pass([2000, 2000], ids=ids).run(AdaptiveQuantization(mix=mix, seed=s)).bits for s in (seed, seed + 1))
    for width, share in zip((2, 4, 8), mix, strict=True):
        assert float((bits == width).double().mean()) == pytest.approx(share, abs=0.04)
    if max(mix) < 0.9:
        assert not torch.equal(bits, others)
    padded = Pass([2000], ids=ids[:1]).run(AdaptiveQuantization(mix=mix, seed=seed)).bits
    assert torch.equal(padded, bits[:1])


@pytest.mark.parametrize("normalisation", ["none", "log_vocab"])
def test_percentiles_are_calibrated(normalisation: Any) -> None:
    model = tiny.load("llama")
    windows = torch.randint(1, tiny.VOCABULARY, (4, 40), generator=torch.Generator().manual_seed(0))
    module = AdaptiveQuantization(tau_low="p30", tau_high="p70", normalisation=normalisation)
    assert [signal.key for signal in module.calibration_signals()] == ["entropy-logit_lens"]
    module.calibration = calibrate(model, windows)
    with torch.no_grad(), apply(model, [module]) as run:
        model(windows, use_cache=False)
    assert mix_of(run.trace) == pytest.approx({2: 0.3, 4: 0.4, 8: 0.3, 16: 0.0}, abs=0.03)


@pytest.mark.parametrize("name", tiny.thinned(tiny.FAMILIES))
def test_fewer_bits_do_more(name: str) -> None:
    model = tiny.load(
        name, dtype=torch.float32 if name in tiny.EAGER_ONLY else torch.float64
    )  # eager Gemma 2 makes NaN of padding there
    dense = tiny.forward(model, BATCH, [])

    def error(**options: Any) -> float:
        found = tiny.forward(model, BATCH, [AdaptiveQuantization(**options)])
        return float((torch.cat(BATCH.real(found.logits)) - torch.cat(BATCH.real(dense.logits))).square().mean())

    for options in ({}, {"execution": "int8"}, {"scope": "residual"}, {"kv": False}):
        assert 0 < error(bits=8, **options) < error(bits=4, **options) < error(bits=2, **options)
    assert error(bits=4) > error(bits=4, depth=0.75)
    assert error(bits=4, weights="token") > error(bits=4)
    assert error(bits=4, group_size=None) > error(bits=4, group_size=4)


@torch.no_grad()
def test_the_residual_scope_holds_the_hidden_state_once() -> None:
    model = tiny.load("llama", dtype=torch.float64)

    def entering(modules: list[RuntimeModule]) -> list[torch.Tensor]:
        """The states that enter each layer."""
        states: list[torch.Tensor] = []
        with apply(model, modules), ExitStack() as hooks:
            for layer in model.base_model.layers:
                hooks.enter_context(layer.register_forward_pre_hook(lambda _, args: states.append(args[0])))
            model(BATCH.ids[:1], use_cache=False)
        return states

    held, dense = entering([AdaptiveQuantization(bits=4, scope="residual", kv=False)]), entering([])
    for layer in range(3):
        assert torch.equal(held[layer], dense[layer])
    assert torch.equal(held[3], quantize_dequantize(dense[3], 4, 32))
    rotary = model.base_model.rotary_emb(dense[3], torch.arange(20)[None])
    assert torch.equal(held[4], model.base_model.layers[3](held[3], position_embeddings=rotary))  # from there on as ever


@pytest.mark.processor
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
def test_narrow_dtypes_decide_alike_and_stay_near(name: str, dtype: torch.dtype) -> None:
    """A value may fall to the neighbouring code in one execution: that moves a logit a little, not the decisions."""
    model = tiny.load(name, dtype=dtype)
    for execution in ("simulate", "int8"):
        quantization = AdaptiveQuantization(widths=(4, 8), mix=(0.5, 0.5), execution=execution)
        runs = [tiny.forward(model, BATCH, [quantization, Hashed(0.2, 0.2)], execution=e) for e in ("compact", "masked")]
        tiny.assert_same_decisions(*(tiny.decisions(BATCH, run.trace) for run in runs))
        compact, masked = (torch.cat(BATCH.real(run.logits)).float() for run in runs)
        assert (compact - masked).norm() < (0.02 if dtype == torch.float32 else 0.1) * masked.norm()


@pytest.mark.parametrize(("options", "layers", "saved"), [
    ({"bits": 8}, 8, 0.25), ({"bits": 4}, 8, 0.375), ({"bits": 8, "beta": "app_j"}, 8, 0.0), ({"bits": 2, "beta": "app_j"}, 8, 0.375),
    ({"bits": 8, "depth": 0.25}, 8, 0.375), ({"bits": 8, "depth": 17 / 36}, 36, 0.264),
])  # fmt: skip
def test_the_paper_s_ledger_charges_by_width(options: dict[str, Any], layers: int, saved: float) -> None:
    """β = bits/16 in the layers after half depth: 25%, and Table 3's 26.4% where 19 of 36 layers are covered (docs/conflicts.md #22)."""
    model = tiny.build("gpt2", n_layer=layers, n_embd=8, n_head=2)
    flops = tiny.forward(model, Batch((tuple(range(1, 20)),)), [AdaptiveQuantization(**options)]).run.flops
    assert 1 - flops.paper / flops.dense_paper == pytest.approx(saved, abs=5e-4)
    assert flops.executed == flops.dense_nominal


def test_trained_weights_bear_8_and_4_bits_and_not_2() -> None:
    """stories260K on a text of its own: real activations. Perplexity over dense, from half depth on (docs/design.md §4: 4 bits cost little)."""
    model = tiny.load(tiny.STORIES)
    torch.manual_seed(0)
    start = torch.ones(4, 1, dtype=torch.long)
    ids = model.generate(start, do_sample=True, max_new_tokens=100, min_new_tokens=100, pad_token_id=0)

    def ppl(modules: list[RuntimeModule]) -> float:
        with torch.no_grad(), apply(model, modules):
            return float(model(ids, labels=ids, use_cache=False).loss.exp())

    dense = ppl([])
    ratio = {bits: ppl([AdaptiveQuantization(bits=bits)]) / dense for bits in (8, 4, 2)}
    assert abs(ratio[8] - 1) < 0.005
    assert 1 < ratio[4] < 1.1
    assert ratio[2] > 1.5
    assert abs(ppl([AdaptiveQuantization(bits=8, execution="int8")]) / dense - 1) < 0.01
