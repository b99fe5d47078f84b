"""A trace is what was decided: replays, files, counts. What is no trace is refused. That a replay is the run: test_any_run.py."""

import json
from pathlib import Path

import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from thinning import draws
from tiny import Batch, Hashed

from quicksilver.modules import Halting, Replay
from quicksilver.runtime import Trace, apply

TENSORS = ("valid", "halt_layer", "halted_kv", "resume_layer", "kv_layer")


def test_a_replay_needs_no_signal() -> None:
    """The policy apart from its execution: entropies and attentions are not computed again."""
    model, batch = tiny.load("llama"), Batch((tuple(range(1, 17)),))
    made = tiny.forward(
        model, batch, [tiny.Capacity(0.5, signal="attention"), Halting(tau_drift=9.0, tau_entropy=3.6, resume_layers=0)]
    )
    assert made.run.flops.signals > 0
    assert made.trace.active_counts()[-1] < 16
    again = tiny.forward(model, batch, [Replay(made.trace)])
    assert again.run.flops.signals == 0
    assert again.run.flops.executed == made.run.flops.executed - made.run.flops.signals


def test_traces_of_several_batches_are_joined_in_order(tmp_path: Path) -> None:
    model = tiny.load("llama")
    batches = [Batch((tuple(range(1, 12)),)), Batch((tuple(range(30, 36)), tuple(range(9, 3, -1))))]
    made = [tiny.forward(model, batch, [Hashed(0.4)]) for batch in batches]
    joined = Trace.concat(outcome.trace for outcome in made)
    joined.save(tmp_path / "joined.safetensors")
    with apply(model, [Replay(Trace.load(tmp_path / "joined.safetensors"))]):
        for batch, outcome in zip(batches, made, strict=True):
            assert torch.equal(model(batch.ids, use_cache=False).logits, outcome.logits)
    again = tiny.forward(model, batches[1], [Replay(joined.compact(), first_pass=1)])
    assert torch.equal(again.logits, made[1].logits)
    with tiny.refused(r"\[5, 6\] layers cannot be joined"):
        Trace.concat([joined, Trace(6)])


@given(batch=tiny.batches(low=2), policy=tiny.hashed(), name=st.sampled_from(tiny.FAMILIES))
@settings(max_examples=draws(30))
def test_the_trace_is_what_the_policy_decided(batch: Batch, policy: Hashed, name: str) -> None:
    """The decisions worked out without a runtime, from slots and ids alone."""
    found = tiny.decisions(batch, tiny.forward(tiny.load(name), batch, [policy]).trace)
    for row, decided in zip(batch.rows, found, strict=True):
        slots, ids = torch.arange(len(row)), torch.tensor(row)
        assert torch.equal(decided["halt_layer"], policy.expected_halt_layer(slots, ids, tiny.LAYERS))
        halted = decided["halt_layer"] < tiny.LAYERS - 1
        resumes = tiny.LAYERS - policy.resume_layers
        assert torch.equal(decided["resume_layer"], torch.where(halted, resumes, tiny.LAYERS).to(torch.int16))
        # The first layer after which the policy said of an active token that it has no K/V from now on.
        last = torch.full(slots.shape, tiny.LAYERS - 1, dtype=torch.int16)
        for layer in reversed(range(tiny.LAYERS - 1)) if policy.skip else ():
            last[policy.skips(layer, slots, ids) & (decided["halt_layer"] > layer)] = layer
        assert torch.equal(decided["kv_layer"], last)


def some_trace() -> Trace:
    return tiny.forward(tiny.load("llama"), Batch((tuple(range(1, 9)),)), [Hashed(0.4)]).trace


def test_a_saved_trace_is_plain_safetensors_the_same_bytes_each_time_and_may_be_empty(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        some_trace().save(tmp_path / name)
    assert len({(tmp_path / name).read_bytes() for name in "abc"}) == 1
    tensors = load_file(tmp_path / "a")
    assert all(tensor.shape == (1, 8) for tensor in tensors.values())
    assert {name.split(".")[1] for name in tensors} >= set(TENSORS)
    loaded, (one,), (other,) = Trace.load(str(tmp_path / "a")), Trace.load(tmp_path / "a").passes, some_trace().passes
    assert (loaded.n_layers, one.first_column) == (tiny.LAYERS, other.first_column)
    assert all(torch.equal(getattr(one, name)[one.valid], getattr(other, name)[other.valid]) for name in TENSORS)
    Trace(5).save(tmp_path / "empty")
    loaded = Trace.load(tmp_path / "empty")
    assert (loaded.n_layers, loaded.passes) == (5, [])


def test_what_is_no_trace_is_refused_by_name(tmp_path: Path) -> None:
    path, unreadable = tmp_path / "foreign.safetensors", "is not a readable trace"
    some_trace().save(path)
    whole, tensors = path.read_bytes(), load_file(path)
    with safe_open(str(path), framework="pt") as file:
        about = json.loads(file.metadata()["quicksilver"])

    def refused(says: str) -> None:
        with tiny.refused(rf"foreign\.safetensors.*{says}"):
            Trace.load(path)

    foreign = (b"", b"not a trace", b"\x00" * 64, b'{"halt_layer": []}' * 9)
    for content in (*foreign, whole[:7], whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(content)
        refused(unreadable)
    for changes in ({"n_layers": "many"}, {"n_layers": None}, {"first_columns": [0, 8]}, {"first_columns": "{"}):
        changed = {name: value for name, value in (about | changes).items() if value is not None}
        save_file(tensors, path, metadata={"quicksilver": json.dumps(changed)})
        refused(unreadable)
    for metadata, schema in ((None, None), ({"format": "pt"}, None), ({"quicksilver": '{"schema": "old"}'}, "'old'")):
        save_file({"weight": torch.zeros(3)}, path, metadata=metadata)
        refused(rf"has schema {schema}.*reads 'quicksilver-trace-\d+'")
    path.unlink()
    refused("")
    path.mkdir()
    refused("")
