"""What is changed under a run's feet, and calls in which transformers sees tokens by another rule: refused in one line, or right."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import tiny
import torch
from drawing import Preset
from thinning import diagonal
from tiny import Batch, Does, HaltAll, Hashed, Never

from quicksilver.modules import Schedule
from quicksilver.runtime import ConfigError, apply
from quicksilver.runtime.pass_state import MISSING_KV

BATCH = Batch((tuple(range(1, 25)),))
PACKED = torch.cat([torch.arange(10), torch.arange(14)])[None]


CHANGES = {
    "training mode.*model.eval": lambda model: model.train(),
    "attn_implementation was 'sdpa' .* is 'eager' now": lambda model: model.set_attn_implementation("eager") or model,
    "copied or pickled inside.*before or after the block": copy.deepcopy,
}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("says", CHANGES)
@pytest.mark.parametrize("modules", [[], [Never()]], ids=["dense", "under a module"])
def test_a_model_changed_inside_the_block_is_not_called(name: str, says: str, modules: list[Any]) -> None:
    model = tiny.build(name)
    with apply(model, modules), tiny.refused(says):
        CHANGES[says](model)(**BATCH.inputs())
    assert tiny.load(name)(**BATCH.inputs()).logits.isfinite().all()


def test_a_module_given_to_a_second_model_is_refused_by_the_first() -> None:
    module, first, second = HaltAll(2), tiny.load("gpt2"), tiny.load("llama")
    run, other = apply(first, [module]), apply(second, [module])
    with run, pytest.raises(ConfigError, match="HaltAll was given to another model"):
        first(**BATCH.inputs())
    with other:
        second(**BATCH.inputs())
    with apply(first, [module]):  # bound once more
        first(**BATCH.inputs())


def test_a_second_thread_in_the_middle_of_a_pass_is_refused() -> None:
    model, inside, go_on = tiny.load("llama"), threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        assert go_on.wait(30)

    with apply(model, [Does(wait)]) as run, ThreadPoolExecutor(1) as pool:
        with pytest.raises(ConfigError, match="padding mask"):  # a pass that failed is over
            model(BATCH.ids, attention_mask=torch.ones(1, 3))
        first = pool.submit(torch.no_grad()(lambda: model(**BATCH.inputs()).logits))
        assert inside.wait(30)
        with pytest.raises(ConfigError, match="Another thread is in the middle of a pass"):
            model(**BATCH.inputs())
        go_on.set()
        assert torch.equal(first.result(30), tiny.load("llama")(**BATCH.inputs()).logits)  # and free again, for this thread
        assert run.pass_index == 2


def test_after_a_decode_pass_that_was_interrupted_modules_act_again() -> None:
    """torch calls no hook after KeyboardInterrupt."""
    model = tiny.load("llama")
    with apply(model, [Preset(schedule=Schedule(1, 0.25, 3, 2, 5))]) as run:
        output = model(**BATCH.inputs(), use_cache=True)
        handle = model.model.layers[2].register_forward_pre_hook(Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):  # no module acts on a token that is decoded: layers append by themselves
            model(BATCH.ids[:, :1], past_key_values=output.past_key_values)
        handle.remove()
        before = run.flops.executed
        assert torch.equal(model(**BATCH.inputs()).logits, output.logits)
        assert run.flops.executed == 2 * before


def test_a_thread_that_is_refused_leaves_the_pass_of_another_as_it_is() -> None:
    model, inside, go_on = tiny.load("llama"), threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        assert go_on.wait(30)

    with apply(model, [Preset(schedule=Schedule(1, 0.25, 3, 2, 5))]) as run, ThreadPoolExecutor(1) as pool:
        caches = [model(**BATCH.inputs(), use_cache=True).past_key_values for _ in range(2)]
        run.reset()
        token = BATCH.ids[:, :1]
        expected = model(token, past_key_values=caches[0]).logits
        executed = run.flops.executed
        handle = model.model.layers[2].register_forward_pre_hook(wait)
        decoded = pool.submit(torch.no_grad()(lambda: model(token, past_key_values=caches[1]).logits))
        assert inside.wait(30)
        with pytest.raises(ConfigError, match="Another thread"):
            model(**BATCH.inputs())
        go_on.set()
        assert torch.equal(decoded.result(30), expected)
        handle.remove()
        assert run.flops.executed == 2 * executed


def test_modules_are_read_once_and_each_stands_once() -> None:
    model, module = tiny.load("gpt2"), HaltAll(1)
    with apply(model, (one for one in [module])) as run:
        model(**BATCH.inputs())
    assert run.trace.passes
    assert run.flops.executed < tiny.forward(model, BATCH, []).run.flops.executed
    with pytest.raises(ConfigError, match="HaltAll stands in the list of modules twice"):
        apply(model, [module, module])


@pytest.mark.slow  # Dynamo takes seconds
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_model_gives_what_it_gives_uncompiled(backend: str) -> None:
    model = tiny.load("gpt2")
    with apply(model, [HaltAll(1)]) as run:
        plain = model(**BATCH.inputs()).logits
        executed = run.flops.executed
        run.reset()
        torch.testing.assert_close(torch.compile(model, backend=backend)(**BATCH.inputs()).logits, plain)
        assert run.flops.executed == executed


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_packed_documents_are_refused_and_a_cache_or_a_mask_says_that_there_are_none(name: str) -> None:
    model = tiny.load(name)
    with apply(model, [Never()]), pytest.raises(ConfigError, match="documents packed into one row"):
        model(BATCH.ids, position_ids=PACKED, use_cache=False)
    with apply(model, []):
        packed = model(BATCH.ids, position_ids=PACKED, use_cache=False).logits
    assert torch.equal(packed, model(BATCH.ids, position_ids=PACKED, use_cache=False).logits)
    for more in ({"use_cache": True}, {"use_cache": False, "attention_mask": torch.ones_like(BATCH.ids)}):
        dense = model(BATCH.ids, position_ids=PACKED, **more).logits
        with apply(model, [Never()]):
            torch.testing.assert_close(model(BATCH.ids, position_ids=PACKED, **more).logits, dense)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_padding_between_tokens_is_right_or_refused(name: str) -> None:
    model, mask = tiny.load(name), torch.ones(1, 24, dtype=torch.long)
    mask[0, 8:12] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    dense = model(BATCH.ids, attention_mask=mask, position_ids=positions).logits
    with apply(model, [Never()]) as run:
        if any(run.arch.attention_window(layer) for layer in range(tiny.LAYERS)):
            with pytest.raises(ConfigError, match="padding between tokens.*sliding window"):
                model(BATCH.ids, attention_mask=mask, position_ids=positions)
            return
        found = model(BATCH.ids, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(found[mask.bool()], dense[mask.bool()], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype", "missing_kv"), diagonal(tiny.FAMILIES, (torch.bfloat16, torch.float16), MISSING_KV), ids=str
)
def test_every_family_runs_in_every_short_format_with_every_missing_kv(name: str, dtype: torch.dtype, missing_kv: str) -> None:
    model = tiny.load(name, dtype=dtype)
    policy = Hashed(halt=0.2, missing_kv=missing_kv)
    compact, masked = (tiny.forward(model, BATCH, [policy], execution=each).logits[0] for each in ("compact", "masked"))
    assert compact.dtype == dtype
    assert compact.isfinite().all()
    rounding = torch.finfo(dtype).eps
    assert (compact.float() - masked.float()).abs().max() <= 64 * rounding * masked.float().abs().max()
