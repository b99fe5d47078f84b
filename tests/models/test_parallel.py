"""Tensor parallelism: a model cut among two processes is the whole one, its ledgers add up, and what cannot be cut is one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from quicksilver.models.parallel import check_plan, load_parallel
from quicksilver.runtime import apply
from quicksilver.runtime.errors import UnsupportedModelError

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_two_ranks_are_one_model(family, tmp_path, subtests):
    """Heads of one K/V group, and heads whose q, k and v are interleaved; the words cannot be halved."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "tests/two_ranks.py", family, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))}
    made = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, env=environment, timeout=1800)
    assert made.returncode == 0, made.stderr[-3000:]
    first, second = json.loads((tmp_path / "found.json").read_text())
    for name, found in first.items():
        with subtests.test(name):
            other = second[name]
            if name == "quantization":
                assert "tensor parallelism" in found["refused"]
                continue
            assert found["same_trace"]
            assert other["same_trace"]
            assert max(found["difference"], other["difference"]) < 2e-5
            assert found["left_out"] > 0 or name in ("none", "eviction")
            assert found["flops_summed"] == found["flops"] == other["flops"]
            for rank in (found, other):
                assert rank["flops_of_rank"] == pytest.approx(rank["counted_on_rank"], rel=0.01)
            assert found["kv_summed"] == found["kv"] == found["kv_whole"]
            # What compares whole tokens is done by both ranks.
            twice = found["signals_whole"] if name in ("fusion", "merging") else 0
            assert 0 <= found["flops"] - found["flops_whole"] <= twice
            assert found["flops"] - found["flops_whole"] == found["signals"] - found["signals_whole"]
    assert first["eviction"]["kv"][0] < first["none"]["kv"][0]


@pytest.mark.parametrize(("family", "size", "says"), [
    ("gpt2", 2, "gpt2: transformers has no plan .*model.device_map=auto"),
    ("llama", 3, r"4 attention heads, which 3 ranks.*start 1, 2 processes\.$"),
    ("llama", 4, r"2 K/V heads, which 4 ranks.*start 1, 2 processes\.$"),
])  # fmt: skip
def test_a_model_that_cannot_be_cut_among_so_many_is_named_with_the_way_out(family, size, says):
    with tiny.refused(says, UnsupportedModelError):
        check_plan(tiny.load(family).config, size)
    check_plan(tiny.load("llama").config, 2)


def test_a_plan_that_leaves_every_rank_all_heads_is_refused():
    model = tiny.build("phi3")
    model._tp_size = 2
    with tiny.refused("gives every rank all heads", UnsupportedModelError):
        apply(model, [])


def test_it_takes_torchrun(monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with tiny.refused("torchrun --nproc-per-node 2"):
        load_parallel(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with tiny.refused(r"has no config\.json"):
        load_parallel(tmp_path)
