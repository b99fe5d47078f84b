"""Any model, batch, cut into passes and modules: what is computed, decided, counted and kept obeys the invariants of docs/design.md §8 at once.

Of the runtime alone in float32, with policies whose decisions are known; of all 2⁴ combinations of the mechanisms in float64: where codes have two
bits, the last digit of a float32 sum, which follows the shapes, decides a whole step.
"""

import itertools
from pathlib import Path
from typing import Any

import drawing
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import diagonal, draws
from tiny import Batch, Hashed
from transformers import PreTrainedModel

from quicksilver.measure import count_executed
from quicksilver.modules import AdaptiveQuantization, Halting, KVSkipping, RandomHalting, Replay, TokenFusion
from quicksilver.runtime import QuickSilverError, RuntimeModule, Trace, apply, architecture_of

MECHANISMS: dict[str, Any] = {
    "halting": lambda: Halting(tau_drift=0.95, window=(0.0, 1.0), missing_kv="project", resume_layers=1, tau_entropy=None),
    "kv_skipping": lambda: KVSkipping(protect_first=1),
    "fusion": lambda: TokenFusion(rule="capacity", fused_share=0.3, start=0.2, every=1, protect_first=1),
    "quantization": lambda: AdaptiveQuantization(depth=0.2, tau_low=3.4, tau_high=3.7),
}
COMBINATIONS = [names for n in range(5) for names in itertools.combinations(MECHANISMS, n)]
FAMILIES = ("gpt2", "llama", "qwen2-mixed", "gpt_neox")


def modules_of(names: tuple[str, ...]) -> list[RuntimeModule]:
    """`kv_skipping` follows halting; where nothing halts, it skips what gets least attention."""
    alone = {"kv_skipping": lambda: KVSkipping(criterion="attention", skipped_share=0.3, last_queries=4, protect_first=1)}
    return [(MECHANISMS if "halting" in names else MECHANISMS | alone)[name]() for name in names]


def ragged() -> st.SearchStrategy[Batch]:
    """Rows without a token twice: which of two equal distances is the lower is for rounding to say."""
    row = st.lists(st.integers(1, tiny.VOCABULARY - 1), min_size=5, max_size=14, unique=True).map(tuple)
    return st.builds(Batch, st.lists(row, min_size=1, max_size=3).map(tuple), st.integers(0, 2))


def fusions() -> st.SearchStrategy[TokenFusion]:
    return st.builds(
        TokenFusion, rule=st.sampled_from(["capacity", "threshold"]), criterion=st.sampled_from(["l2", "cosine", "attention", "random"]),
        attention_queries=st.sampled_from([3, None]), tau_fuse=st.just(0.5), fused_share=st.sampled_from([0.2, 0.5]),
        start=st.sampled_from([0.2, 0.4]), every=st.sampled_from([0, 1]), merge=st.sampled_from(["size", "mean", "attention"]),
        proportional=st.booleans(), first=st.sampled_from(["halting", "fusion"]), protect_first=st.just(1),
        decode_every=st.sampled_from([0, 2]),
    )  # fmt: skip


def halting() -> st.SearchStrategy[RuntimeModule]:
    seen, resumed = st.sampled_from(["drop", "project", "copy", "zero"]), st.sampled_from([0, 1])
    everywhere = st.just((0.0, 1.0))
    return st.one_of(
        st.builds(RandomHalting, rate=st.just(0.2), missing_kv=seen, window=everywhere, resume_layers=resumed),
        st.builds(Halting, tau_drift=st.just(0.95), tau_entropy=st.none(), window=everywhere, missing_kv=seen, resume_layers=resumed),
        st.builds(Halting, rule=st.just("capacity"), signal=st.sampled_from(["drift", "attention"]), halted_share=st.just(0.4),
                  window=st.just((0.0, 0.6)), missing_kv=seen, resume_layers=resumed),
    )  # fmt: skip


def drawn(names: tuple[str, ...]) -> st.SearchStrategy[list[RuntimeModule]]:
    """The mechanisms of these names with any options."""
    options = {"halting": halting(), "fusion": fusions(), "quantization": drawing.quantizing(causal=False)}
    return st.tuples(*(options.get(name, st.just(None)) for name in names)).map(
        lambda made: [fixed if one is None else one for one, fixed in zip(made, modules_of(names), strict=True)]
    )


def policies() -> st.SearchStrategy[list[RuntimeModule]]:
    """Those of the runtime's tests; and that every token goes, even the first: no key for a query, no query for a layer, an empty cache."""
    nobody = tiny.hashed(protect=0).map(lambda m: [Hashed(0.7, 0.5, m.missing_kv, m.resume_layers, 0, m.seed)])
    return st.one_of(st.just([]), tiny.causal_policies(), tiny.prompt_policies(), nobody)


@pytest.mark.parametrize(("name", "attention"), diagonal(tiny.unlike_first(tiny.MODELS), ("sdpa", "eager"), n=5))
@given(data=st.data())
@settings(max_examples=draws(17))
def test_of_any_model(name: str, attention: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    check(tiny.load(name, attention), data.draw(tiny.batches()), data.draw(policies()), data, path, whole=True)


@pytest.mark.parametrize("names", COMBINATIONS, ids=lambda names: "+".join(names) or "none")
@given(data=st.data(), family=st.sampled_from(FAMILIES))
@settings(max_examples=draws(4))
def test_of_any_mechanisms_together(names, family, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    check(tiny.load(family, dtype=torch.float64), data.draw(ragged()), data.draw(drawn(names)), data, path, whole=False)


@pytest.mark.parametrize("execution", ["compact", "masked"])
def test_a_decoded_token_without_a_key_is_refused_under_eager_attention(execution: str) -> None:
    model, skipping = tiny.load("olmo2", "eager"), Hashed(0.7, 0.5, "drop", 0, protect=0, seed=1)
    with tiny.refused("no key left", QuickSilverError):
        tiny.forward(model, Batch(((1, 1, 1, 1, 1),)), [skipping], execution=execution, chunks=[2, 1, 1, 1])


def check(model: PreTrainedModel, batch: Batch, modules: list[RuntimeModule], data: st.DataObject, path: Path, whole: bool):
    """whole: nothing is quantized and no decision hangs on the last digit, so a replay is the run to the bit."""
    # States stay packed between decision layers.
    layers = data.draw(st.none() | st.sampled_from([(0,), (2,), (0, 3), (1, 2)])) if whole else None
    for module in modules:
        module.bind(architecture_of(model))
    if layers and not all(any(map(module.acts_at, layers)) for module in modules):
        layers = None
    options: dict[str, Any] = {"chunks": data.draw(st.none() | tiny.chunkings(batch.width)), "decision_layers": layers}
    with tiny.unless_blind(model) as blind:
        masked = tiny.forward(model, batch, modules, execution="masked", **options)
    if blind:
        with pytest.raises(QuickSilverError, match="no key left"):
            tiny.forward(model, batch, modules, **options)
        return
    made: list[tiny.Outcome] = []
    counted = count_executed(lambda: made.append(tiny.forward(model, batch, modules, **options)))
    run, flops = made[0], made[0].run.flops
    assert torch.cat(batch.real(run.logits)).isfinite().all()
    # 6: what is counted from outside, what is formulated, what is held
    assert flops.executed == pytest.approx(counted, rel=0.01)
    assert not whole or flops.nominal <= flops.executed - flops.signals
    assert flops.nominal <= flops.dense_nominal
    assert flops.paper <= flops.dense_paper
    # Uneven rows are padded twice: tokens to the most active row, K/V of halted ones to the least.
    if len(batch.rows) == 1 and whole:
        assert flops.executed - flops.signals <= masked.run.flops.executed - masked.run.flops.signals
    assert modules or (flops.nominal, flops.paper, flops.signals) == (flops.dense_nominal, flops.dense_paper, 0)
    if options["chunks"] is not None:
        assert run.run.kv_bytes.billed == run.run.kv_bytes.resident
        assert not whole or run.run.kv_bytes.billed == (masked.run.kv_bytes.billed if modules else run.run.kv_bytes.resident)
        assert not (whole and modules) or run.run.kv_bytes.billed == entries(run.trace, model)
    halted_after = set(torch.cat([one.halt_layer[one.valid] for one in run.trace.passes]).tolist())
    assert not layers or halted_after <= {*layers, tiny.LAYERS - 1}
    # 2 and 7: masked, and replays from a file
    run.trace.save(path)
    replay = [Replay(Trace.load(path), like=modules)] if modules else []
    again = tiny.forward(model, batch, replay, chunks=options["chunks"])
    # A decoded token that no module is asked about needs no mask where a sliding window hides nothing yet; its replay has one: other sums.
    windowed = any(map(run.run.arch.attention_window, range(tiny.LAYERS))) and 1 in (options["chunks"] or [])[1:]
    assert not whole or windowed or torch.equal(torch.cat(batch.real(again.logits)), torch.cat(batch.real(run.logits)))
    assert (again.run.kv_bytes, again.run.flops.nominal) == (run.run.kv_bytes, flops.nominal)
    for other in (masked, again, tiny.forward(model, batch, replay, chunks=options["chunks"], execution="masked")):
        tiny.assert_same_run(batch, run, other)
        assert all(getattr(flops, name) == getattr(other.run.flops, name) for name in ("nominal", "paper", "dense_paper"))
    # 3: another cut into passes
    if all(module.causal for module in modules):
        tiny.assert_same_run(
            batch, run, tiny.forward(model, batch, modules, **options | {"chunks": data.draw(tiny.chunkings(batch.width))})
        )
    if options["chunks"] is None:
        decided = tiny.forward(model, batch, modules, execution="decide", decision_layers=layers).logits
        tiny.assert_close(batch.real(decided), batch.real(tiny.forward(model, batch, []).logits))
        if not any(getattr(module, "normalisation", "") == "minmax" for module in modules):  # which is over the batch
            for i in range(len(batch.rows)):  # 5: each row alone
                alone = tiny.forward(model, batch.alone(i), modules, decision_layers=layers)
                tiny.assert_close(alone.logits, batch.real(run.logits)[i][None])
                tiny.assert_same_decisions(
                    tiny.decisions(batch.alone(i), alone.trace), tiny.decisions(batch, run.trace)[i : i + 1]
                )
    no_lookahead(model, max(batch.rows, key=len), modules, data)


def entries(trace: Trace, model: PreTrainedModel) -> int:
    """Bytes of the K/V entries the trace says there are."""
    config = model.config
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    count = sum(int(p.kv_present(layer).sum()) for p in trace.passes for layer in range(trace.n_layers))
    return count * 2 * kv_heads * head_dim * 4


def no_lookahead(model: PreTrainedModel, row: tuple[int, ...], modules: list[RuntimeModule], data: st.DataObject) -> None:
    """4: other tokens after `probe` move nothing up to it; what looks ahead does so in the prompt."""
    prompt = 0 if all(module.causal for module in modules) else 2
    if len(row) < prompt + 2:
        return
    probe = data.draw(st.integers(prompt, len(row) - 2))
    other = (*row[: probe + 1], *((t * 7) % (tiny.VOCABULARY - 1) + 1 for t in row[probe + 1 :]))
    chunks = [prompt, len(row) - prompt] if prompt else None
    with tiny.unless_blind(model) as blind:
        found = [tiny.forward(model, Batch((ids,)), modules, chunks=chunks) for ids in (row, other)]
    if not blind:
        tiny.assert_close(found[0].logits[:, : probe + 1], found[1].logits[:, : probe + 1])
        before, after = (tiny.decisions(Batch((ids,)), one.trace)[0] for ids, one in zip((row, other), found, strict=True))
        assert all(torch.equal(before[name][: probe + 1], after[name][: probe + 1]) for name in before)


@pytest.mark.parametrize("execution", ["compact", "masked"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
@given(batch=tiny.batches(low=2, padded=True), data=st.data())
@settings(max_examples=draws(5))
def test_padding_on_the_right_is_no_difference_either(name: str, execution: str, batch: Batch, data: st.DataObject) -> None:
    """Evaluation harnesses pad on the right: no real token sees padding there, with or without a mask that says so."""
    model, modules = tiny.load(name), data.draw(tiny.policies())
    width = batch.width
    ids = torch.tensor([list(row) + [9] * (width - len(row)) for row in batch.rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch.rows])
    with apply(model, modules, execution=execution) as run:
        found = model(ids, attention_mask=mask, use_cache=False).logits
    for i, row in enumerate(batch.rows):
        alone = tiny.forward(model, batch.alone(i), modules, execution=execution)
        tiny.assert_close([found[i, : len(row)]], alone.logits)
        assert torch.equal(run.trace.passes[0].halt_layer[i, : len(row)], alone.trace.passes[0].halt_layer[0])


def test_every_mechanism_adds_something_to_all_the_others() -> None:
    """Or the sixteen would be fewer."""
    model, batch = tiny.load("gpt2"), Batch(tuple(map(tuple, tiny.ids(4, 24, seed=3).tolist())))
    found = [tiny.forward(model, batch, modules_of(names)).logits for names in COMBINATIONS]
    for one, other in itertools.combinations(found, 2):
        assert (one - other).abs().max() > 1e-3
