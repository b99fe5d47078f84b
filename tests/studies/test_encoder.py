"""Bidirectional encoders: torch's own layer, and the invariants of the runtime on it."""

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinning import draws
from tiny import WIDTH, Capacity, Hashed
from tiny_encoder import MODEL, Tagger, states
from torch import nn

from quicksilver.measure.flop_counter import count_executed
from quicksilver.runtime import ConfigError, UnsupportedModelError, apply, architecture_of
from quicksilver.studies.token_halting.model import EncoderConfig, EncoderLayer


class Chance(Hashed):
    """`Hashed` where there are no ids: the state's bits stand for them."""

    def decide(self, view, tokens):
        view.input_ids = (view.before[..., 0].detach() * 1e3).round().long().abs()
        super().decide(view, tokens)


def test_a_layer_is_torchs_own_with_its_weights():
    theirs = nn.TransformerEncoderLayer(WIDTH, 4, 40, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    ours = EncoderLayer(MODEL.config)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(states(2, 9)), theirs(states(2, 9)), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_every_token_sees_every_other():
    before, changed = states(1, 8), states(1, 8)
    changed[0, 7, :5] += 3.0
    assert not torch.allclose(MODEL(before)[0, 0], MODEL(changed)[0, 0], atol=1e-4)


@torch.no_grad()
def test_no_module_changes_nothing():
    plain = MODEL(states(2, 9))
    with apply(MODEL, []) as run:
        assert torch.equal(MODEL(states(2, 9)), plain)
    assert run.flops.nominal == run.flops.dense_nominal  # its fused projection is in both
    with apply(MODEL, [tiny.Never(attention=True)]):
        assert torch.equal(MODEL(states(2, 9)), plain)


@settings(max_examples=draws(12), deadline=None)
@given(
    mode=st.sampled_from(["drop", "project", "copy", "zero", "mixed-capacity"]),
    resume=st.integers(0, 2),
    rows=st.integers(1, 3),
    seed=st.integers(0, 50),
    padded=st.booleans(),
)
@torch.no_grad()
def test_compact_is_masked_and_its_ledger_is_what_ran(mode, resume, rows, seed, padded):
    policy = Capacity(share=0.4, at=(0, 2), signal="attention", resume_layers=resume)
    if mode != "mixed-capacity":
        policy = Chance(halt=0.4, missing_kv=mode, resume_layers=resume, seed=seed)
    given_states = states(rows, 11, seed)
    mask = None
    if padded:
        mask = torch.ones(rows, 11)
        mask[0, 8:] = 0
    said, ledgers, counted = {}, {}, {}
    for execution in ("compact", "masked"):
        with apply(MODEL, [policy], execution=execution) as run:

            def once(execution=execution):
                said[execution] = MODEL(given_states, mask)

            counted[execution] = count_executed(once)
        ledgers[execution] = run.flops
        assert run.trace.active_counts()[-1] < rows * 11 or resume
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(said["compact"][real], said["masked"][real], atol=1e-5, rtol=1e-5)
    for execution in said:
        assert ledgers[execution].executed == pytest.approx(counted[execution], rel=0.01)
    assert ledgers["compact"].nominal == ledgers["masked"].nominal
    if rows == 1 and not padded:
        assert ledgers["compact"].executed == pytest.approx(ledgers["compact"].nominal + ledgers["compact"].signals, rel=0.01)


@torch.no_grad()
def test_a_row_does_not_depend_on_its_batch_mates():
    policy = Chance(halt=0.4, missing_kv="drop")
    together, alone = states(3, 10), []
    with apply(MODEL, [policy]):
        joined = MODEL(together)
    for row in range(3):
        with apply(MODEL, [policy]):
            alone.append(MODEL(together[row : row + 1]))
    torch.testing.assert_close(joined, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"shape \(1, 3\); give \(B, N\) = \(1, 4\)"):
        MODEL(states(1, 4), torch.ones(1, 3))
    with pytest.raises(UnsupportedModelError, match="no decoder layer"):
        architecture_of(Tagger(EncoderConfig(hidden_size=8, num_hidden_layers=0, num_attention_heads=2)))
