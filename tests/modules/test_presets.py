"""Two stages of a prompt: who stops where, what it saves, and which schedules are refused."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import tiny
import torch
import yaml

from quicksilver.fitting.schedules import saved_pct, smallest_schedule
from quicksilver.modules import PresetHalting, Replay, Schedule
from quicksilver.modules.fitted import model_digest
from quicksilver.modules.staged_halting import files_behind
from quicksilver.runs.config import compose
from quicksilver.runtime import MISSING_KV, ConfigError, architecture_of

N = 40
BATCH = tiny.Batch((tuple(range(1, N + 1)), tuple(range(3, N + 3))))


class Staged(PresetHalting):
    """With a random map, as no translator ships with a tiny model."""

    def bind(self, architecture) -> None:
        layer = self.schedule.predict_before - 1
        self.translator = tiny.random_translators(architecture)[layer]
        tiny_digest = self.translator.translator.weights_digest
        assert tiny_digest == "random"
        super().bind(architecture)


def schedule(**changes) -> Schedule:
    return Schedule(
        **{"drop_before": 1, "drop_share": 0.25, "predict_before": 3, "protect_first": 2, "protect_last": 5} | changes
    )


@pytest.mark.parametrize("name", tiny.FAMILIES)
@pytest.mark.parametrize("execution", ["compact", "masked"])
def test_the_oldest_are_dropped_and_all_but_the_protected_are_predicted(name: str, execution: str) -> None:
    run = tiny.forward(tiny.load(name), BATCH, [Staged(schedule=schedule())], execution=execution)
    (one,) = run.trace.passes
    wanted = torch.full((N,), tiny.LAYERS - 1)
    wanted[2:12], wanted[12 : N - 5] = 0, 2
    assert (one.halt_layer == wanted).all()
    mode = torch.where(wanted == 2, MISSING_KV.index("predict"), MISSING_KV.index("drop"))
    assert (one.halted_kv == mode).all()
    assert one.kv_present(4).sum(1).tolist() == [N - 10, N - 10]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_the_search_counts_is_what_a_run_executes(name: str) -> None:
    model = tiny.load(name)
    arch = architecture_of(model)
    for one in (schedule(), schedule(drop_share=0.0), schedule(predict_before=2, protect_last=1)):
        run = tiny.forward(model, tiny.Batch((tuple(range(1, N + 1)),)), [Staged(schedule=one)]).run
        head = 2 * arch.vocab_size * arch.width
        executed = run.flops.executed - N * head + head  # the test asks for all logits, a prompt for one
        dense = tiny.forward(model, tiny.Batch((tuple(range(1, N + 1)),)), []).run.flops.executed - N * head + head
        assert saved_pct(arch, one, N) == pytest.approx(100 * (1 - executed / dense), abs=1e-9)


def test_just_enough_drops_one_token_fewer_than_would_not_do() -> None:
    arch = architecture_of(tiny.load("gpt2"))
    found = smallest_schedule(arch, 3, 4, 0.35, 64)
    assert found is not None
    assert saved_pct(arch, found, 64) >= 35
    fewer = Schedule(found.drop_before, found.drop_share - 1 / 64, 3, 4, 4)
    assert saved_pct(arch, fewer, 64) < 35
    assert smallest_schedule(arch, 3, 4, 0.99, 64) is None
    assert smallest_schedule(arch, 1, 4, 0.1, 64) is None


def test_it_is_not_replayed_without_its_translators() -> None:
    made = tiny.forward(tiny.load("llama"), BATCH, [Staged(schedule=schedule())])
    with pytest.raises(ConfigError, match="like=modules"):
        tiny.forward(tiny.load("llama"), BATCH, [Replay(made.trace)])


def test_outside_a_prompt_it_does_nothing() -> None:
    made = tiny.forward(tiny.load("gpt2"), BATCH, [Staged(schedule=schedule())], chunks=[N - 4, 1, 3])
    assert all(bool((one.halt_layer == tiny.LAYERS - 1).all()) for one in made.trace.passes[1:])
    assert bool((made.trace.passes[0].halt_layer == 2).any())


def test_a_file_of_schedules_names_its_maps_and_serves_its_model_alone(tmp_path: Path) -> None:
    model = tiny.load("llama")
    arch = architecture_of(model)
    digest = model_digest(model)
    fitted = replace(tiny.random_translators(arch)[2].translator, weights_digest=digest)
    fitted.save(tmp_path / "maps.safetensors")
    file = tmp_path / "chosen.yaml"
    content = {"weights_digest": digest, "files": {3: "maps.safetensors"}, "schedules": {40: {"schedule": asdict(schedule())}}}
    file.write_text(yaml.safe_dump(content))
    made = tiny.forward(model, BATCH, [PresetHalting(schedule=file, save=0.4)])
    given = tiny.forward(model, BATCH, [PresetHalting(schedule=schedule(), translator=tmp_path / "maps.safetensors")])
    assert torch.equal(made.logits, given.logits)
    assert files_behind({"missing_kv": "predict", "schedule": str(file)}, tmp_path) == [file, tmp_path / "maps.safetensors"]
    with pytest.raises(ConfigError, match="there are schedules for 0.4"):
        PresetHalting(schedule=file, save=0.5).bind(arch)
    with pytest.raises(ConfigError, match="chosen for other weights"):
        PresetHalting(schedule=file).bind(architecture_of(tiny.load("gpt2")))
    for wrong in (
        "",
        "[1]",
        "a: b",
        "schedules: 3",
        yaml.safe_dump(content | {"schedules": {"x": {}}}),
        "!!python/name:os.system",
        "[" * 5000,
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="is no file of `quicksilver schedule`") as raised:
            PresetHalting(schedule=str(file)).bind(arch)
        assert "\n" not in str(raised.value)


def test_a_run_finds_the_schedule_of_a_model_by_its_name(tmp_path: Path) -> None:
    def found(*words: str) -> str | None:
        config = compose(["modules=[quicksilver]", f"results_dir={tmp_path}/results", *words])
        assert config.identity()["modules"]["quicksilver"].get("schedule") is None  # its content counts, wherever it lies
        return config.modules["quicksilver"].get("schedule")

    results, beside = tmp_path / "results" / "translators" / "own.schedules.yaml", tmp_path / "model" / "own.schedules.yaml"
    own = ("model.name=own", f"model.path={beside.parent}")
    assert found(*own) is None
    for file in (results, beside):  # the model's own folder comes first
        file.parent.mkdir(parents=True)
        file.touch()
        assert found(*own) == str(file)
    assert found(*own, "modules.quicksilver.schedule=other.yaml") == "other.yaml"
    assert found("model.name=another", f"model.path={tmp_path}") is None
    assert found("model=reference-gpt2") is None  # one ships
