"""A passage that stands once in a prompt: where it stands, what is asked, and whether leaving its tokens out loses it."""

import math
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from tiny import build, ids, load, refused

from quicksilver.cli.progress import summary
from quicksilver.data.windows import Windows
from quicksilver.measure.bench import Bench
from quicksilver.measure.needle import ABSENT, Needle, NeedleResult, _found, column
from quicksilver.measure.perplexity import Protocol
from quicksilver.runs.config import compose
from quicksilver.runs.run import ensure
from quicksilver.runtime.errors import ConfigError, QuickSilverError

SMALL = ["measure=needle", "measure.needle.windows=3", "measure.needle.depths=2", "measure.needle.needle_tokens=4", "measure.needle.cue_tokens=1"]  # fmt: skip


@pytest.fixture(scope="module")
def world(world, tmp_path_factory):
    return [*world, f"results_dir={tmp_path_factory.mktemp('needle')}", "protocol=continuation", *SMALL]


def test_a_needle_stands_where_its_depth_says_and_is_asked_for_at_the_end(monkeypatch):
    asked = Mock(return_value=(torch.ones(4).double(), torch.zeros(4).double()))
    monkeypatch.setattr("quicksilver.measure.needle._found", asked)
    text = torch.arange(4 * 24).reshape(4, 24)
    frame = pd.DataFrame({"window": range(4)})
    bench = Bench(load("gpt2"), Windows(text, 4, 96, None, "made here"), Protocol("continuation", 24, 20, 2), frame=frame)
    found = Needle(windows=4, depths=3, needle_tokens=5, cue_tokens=2).run(bench)
    *placed, absent = (call.args[1] for call in asked.call_args_list)
    for row in range(4):
        needle, hay = text[(row + 2) % 4, :5], text[row, :18]  # the prompt has 20 tokens, of which two are the cue
        for depth, at in zip(placed, (2, 6, 11), strict=True):  # a sixth, a half and five sixths of the 13 places
            assert torch.equal(depth[row], torch.cat([hay[:at], needle, hay[at + 5 :], needle]))
        assert torch.equal(absent[row], torch.cat([hay, needle]))
    assert (found.asked_tokens, found.depths) == (3, [2 / 20, 6 / 20, 11 / 20])
    assert bench.frame[column("answered", ABSENT)].tolist() == [1.0] * 4


@pytest.mark.parametrize("batch_size", [2, 3])
def test_what_is_found_is_what_one_pass_of_the_plain_model_predicts(batch_size):
    model, rows = build("llama"), ids(3, 24)
    bench = Bench(model, Windows(rows, 3, 72, None, "made here"), Protocol("continuation", 24, 20, batch_size))
    with torch.no_grad():
        likely = model(rows).logits[:, 19:-1].double().log_softmax(-1)  # (3, 4, V)
        rows[:, 20] = likely[:, 0].argmax(-1)  # so that something is found
        likely = model(rows).logits[:, 19:-1].double().log_softmax(-1)
        found, nats = _found(bench, rows)
    assert found.tolist() == (likely.argmax(-1) == rows[:, 20:]).double().mean(1).tolist()
    assert found.min() >= 0.25
    torch.testing.assert_close(nats, -likely.gather(-1, rows[:, 20:, None]).mean((1, 2)), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with refused("NaN or infinite", QuickSilverError):
        _found(bench, rows)


def test_a_run_and_its_dense_run_answer_window_by_window(world):
    (record,) = ensure([compose([*world, "modules=[static_depth]", "modules.static_depth.depth=0.5"])])
    found = record.measured("needle", NeedleResult)
    windows = record.windows.set_index("window")
    for depth in range(2):
        answered = windows[column("answered", depth)]
        assert answered.notna().sum() == 3
        assert found.answered[depth] == pytest.approx(answered.mean())
        assert found.nats[depth] == pytest.approx(windows[column("nats", depth)].mean())
    dense = ensure([compose([*world, "modules=[]"])])[0]
    assert record.dense_fingerprint == dense.fingerprint
    assert dense.measured("needle", NeedleResult).nats != found.nats
    assert f"  needle       {found.line()}" in summary(record)


@pytest.mark.parametrize(("words", "said"), [
    (["measure.needle.cue_tokens=4"], "cue_tokens=4: it must be less than needle_tokens=4"),
    (["measure.needle.needle_tokens=40"], "fill the prompt"),
    (["measure.needle.windows=1"], "windows=1 must be"),
    (["protocol=all", "protocol.window_tokens=8"], "windows of 8 tokens are shorter than the prompt: give a smaller protocol.prompt_tokens"),
    (["dataset.windows=1"], "one window is scored.*dataset.windows=2 or more"),
    (["protocol.window_tokens=64", "protocol.prompt_tokens=62"], r"prompt_tokens=62 and needle_tokens - cue_tokens=3 are more"),
])  # fmt: skip
def test_what_cannot_be_asked_is_refused(world, words, said):
    with pytest.raises(ConfigError, match=said):  # a line for each thing that is wrong
        ensure([compose([*world, *words])])
