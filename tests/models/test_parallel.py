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
from quicksilver.runtime.errors import ConfigError, UnsupportedModelError

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


def test_a_family_without_a_plan_is_named_with_the_way_out():
    with pytest.raises(UnsupportedModelError, match=r"gpt2: transformers has no plan .*model.device_map=auto"):
        check_plan(tiny.load("gpt2").config, 2)


@pytest.mark.parametrize(("size", "says"), [(3, "4 attention heads, which 3 ranks"), (4, "2 K/V heads, which 4 ranks")])
def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused(size, says):
    with pytest.raises(UnsupportedModelError, match=says) as caught:
        check_plan(tiny.load("llama").config, size)
    assert str(caught.value).endswith("start 1, 2 processes.")
    check_plan(tiny.load("llama").config, 2)


def test_a_plan_that_leaves_every_rank_all_heads_is_refused(monkeypatch):
    model = tiny.build("phi3")
    model._tp_size = 2
    with pytest.raises(UnsupportedModelError, match="gives every rank all heads"):
        apply(model, [])


def test_it_takes_torchrun(monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2"):
        load_parallel(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_parallel(tmp_path)
