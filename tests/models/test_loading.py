"""Models: found where the config says, refused in one message where they are not or do not fit, never run as code. A model that is cut among two
processes is the whole one, its ledgers add up, and what cannot be cut is one line."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny
import torch
from harness_world import make_model
from tiny import refused

from quicksilver.models import loading, memory_check
from quicksilver.models.loading import Loaded, load, locate, weights_digest
from quicksilver.models.parallel import check_plan, load_parallel
from quicksilver.models.spec import ModelConfig
from quicksilver.modules import Halting
from quicksilver.modules.fitted import model_digest
from quicksilver.runtime import apply
from quicksilver.runtime.errors import UnsupportedModelError


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "original")


@pytest.fixture
def folder(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def at(path: Path | str, **more) -> ModelConfig:
    return ModelConfig(name="mine", path=str(path), **more)


def loaded(path: Path, **more) -> Loaded:
    config = at(path, **more)
    return load(config, locate(config))


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_is_loaded_frozen_in_the_dtype_asked_for(folder):
    found = loaded(folder, dtype="bfloat16")
    assert found.model.dtype == torch.bfloat16
    assert not found.model.training
    assert not any(p.requires_grad for p in found.model.parameters())
    assert found.tokenizer("ab")["input_ids"] != []
    assert found.files.source == f"folder:{folder}"
    # A name of the hub is served by a folder below data.root.
    for config in (ModelConfig(name="model", path="someone/model"), at("data:model")):
        assert locate(config, folder.parent).folder == folder


@pytest.mark.parametrize(("path", "says"), [
    ("/nowhere/model", "there is no folder /nowhere/model"),
    ("./nowhere", "there is no folder"),
    ("a/b/c", "there is no folder"),
    (" ", "model.path is empty"),
    ("data:model", "data.root, which is not set"),
    ("embedded:reference-gpt9", "no embedded model reference-gpt9"),
    ("embedded:ladder-gpt2-9m", "make train-reference MODEL=ladder-gpt2-9m"),
])  # fmt: skip
def test_a_model_that_is_not_there_says_what_to_give(path, says):
    with refused(f"(?=.*{says}).*model.path="):
        locate(at(path))


def test_weights_that_the_package_leaves_out_have_their_digest_and_say_how_to_be_had(folder, monkeypatch):
    monkeypatch.setattr(loading, "EMBEDDED", folder.parent)
    config = at(f"embedded:{folder.name}")
    whole = weights_digest(folder)
    content = (folder / "model.safetensors").read_bytes()
    (folder / loading.LEFT_OUT).write_text(f"{hashlib.sha256(content).hexdigest()}  model.safetensors\n")
    assert weights_digest(folder) == whole
    (folder / "model.safetensors").unlink()
    assert weights_digest(folder) == whole  # its records are found without them
    with refused(f"make train-reference MODEL={folder.name}"):
        load(config, locate(config))
    (folder / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert weights_digest(folder) != whole  # trained anew, they speak for themselves


def test_an_incomplete_folder_says_what_it_lacks(original, tmp_path):
    index = json.dumps({"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    for lost, says in (
        ("config.json", "no config.json"),
        ("model.safetensors", r"no \*\.safetensors"),
        ("tokenizer.json", "no tokenizer.json"),
    ):
        folder = Path(shutil.copytree(original, tmp_path / lost))
        (folder / lost).rename(folder / "pytorch_model.bin")  # pickled weights are none
        with refused(says):
            locate(at(folder))
    (folder / "pytorch_model.bin").rename(folder / "tokenizer.json")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    for content, says in ((index, r"no model-2\.safetensors"), ("{", "an unreadable")):
        (folder / "model.safetensors.index.json").write_text(content)
        with refused(says):
            locate(at(folder))


def test_a_family_without_an_adapter_names_those_there_are(folder):
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "word_embed_proj_dim": 16}
    OPTForCausalLM(OPTConfig(vocab_size=257, **sizes)).save_pretrained(folder)
    with refused("gpt2", UnsupportedModelError):
        loaded(folder)


def test_code_in_a_folder_is_never_run(folder, tmp_path):
    change_config(folder, model_type="mine", architectures=["Mine"], auto_map={"AutoModelForCausalLM": "evil.Mine"})
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with refused("cannot be loaded|no tokenizer"):
        loaded(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_named(folder):
    with refused("no CUDA device.*device_map=cpu"):
        loaded(folder, device_map="cuda:0")
    assert loaded(folder, device_map="auto").model.device.type == "cpu"


def test_the_digest_is_of_contents_not_of_places_or_prose_and_files_are_read_once(folder, tmp_path, monkeypatch):
    remembered: dict[str, str] = {}
    digest = weights_digest(folder, remembered)
    (folder / "README.md").write_text("prose")
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert weights_digest(copy) == digest
    change_config(copy, scale_attn_weights=False)
    assert digest not in (weights_digest(copy), weights_digest(make_model(tmp_path / "other", seed=1)))
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", lambda *_: pytest.fail("read again"))
        assert weights_digest(folder, remembered) == digest
    weights, status = folder / "model.safetensors", (folder / "model.safetensors").stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    for name in ("model.safetensors", "new"):  # with size and time as before: in place, and as another file that gets the name
        (folder / name).write_bytes(bytes(content))
        os.replace(folder / name, weights)
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert weights.stat().st_size == status.st_size
        assert weights_digest(folder, remembered) != digest


@pytest.fixture(scope="module")
def plain(original):
    return loaded(original).model


def test_a_model_larger_than_memory_and_disk_is_refused_before_it_is_loaded(original, plain, monkeypatch):
    needed, free = memory_check.weights_bytes(original, 4), Mock(free=99)
    assert needed == 4 * sum(parameter.numel() for parameter in plain.parameters())
    monkeypatch.setattr(memory_check, "memory_bytes", lambda: needed - 100)
    monkeypatch.setattr(memory_check.shutil, "disk_usage", lambda _: free)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    with refused("model=mine: its weights are .* free on disk. Take a smaller model"):
        loaded(original, device_map="auto")
    monkeypatch.setattr(memory_check, "host_memory_bytes", lambda: needed - 1)
    with refused("model=mine: its weights are .* model.device_map=auto leaves on disk"):
        loaded(original)
    free.free = 100
    memory_check.check_room(needed, "tiny", original)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU would take it")
@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_what_the_cgroups_around_this_process_leave_of_it(tmp_path, monkeypatch, version):
    old = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    root, names = (tmp_path / "memory", old) if version == 1 else (tmp_path, ("memory.max", "memory.current", "inactive_file"))
    (root / "job" / "step").mkdir(parents=True)
    for place, contents in {".": (900_000, 0, 0), "job": (1_000_000, 700_000, 300_000), "job/step": ("max", 5, 0)}.items():
        for name, content in zip(names[:2], contents[:2], strict=True):
            (root / place / name).write_text(f"{content}\n")
        (root / place / "memory.stat").write_text(f"anon 1\n{names[2]} {contents[2]}\n")
    (tmp_path / "of_process").write_text("1:name=systemd:/\n4:memory:/job/step\n" if version == 1 else "0::/job/step\n")
    monkeypatch.setattr(memory_check, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory_check, "_OF_PROCESS", tmp_path / "of_process")
    assert memory_check.host_memory_bytes() == 900_000
    assert memory_check.free_memory_bytes() == 600_000
    (tmp_path / "of_process").write_text("0::/elsewhere\nnonsense\n")
    (root / "memory.max").unlink(missing_ok=True)
    assert memory_check.host_memory_bytes() == memory_check.psutil.virtual_memory().total


def test_a_broken_installation_is_not_blamed_on_the_model_s_files(original, monkeypatch):
    import transformers

    broken = Mock(side_effect=ModuleNotFoundError("Could not import module 'GPT2LMHeadModel'."))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", broken)
    with refused("Could not import.*this installation is: `quicksilver doctor`"):
        loaded(original)


def test_what_memory_does_not_hold_stays_on_disk(original, plain, monkeypatch):
    needed = memory_check.weights_bytes(original, 4)
    monkeypatch.setattr(memory_check, "free_memory_bytes", lambda: int(0.6 * needed / 0.8))
    model = loaded(original, device_map="auto").model
    elsewhere = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert elsewhere
    assert "disk" in model.hf_device_map.values()
    assert model_digest(model) == model_digest(plain)
    with torch.no_grad(), apply(model, [Halting(tau_drift=0.9, missing_kv="project", tau_entropy=None, resume_layers=0)]) as run:
        model(torch.arange(40).view(2, 20))
    assert run.flops.executed < run.flops.dense_nominal
    assert [name for name, parameter in model.named_parameters() if parameter.is_meta] == elsewhere


# -- a model cut among processes ---------------------------------------------------------------------------------------------------
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
