"""Stages of a prompt: each halts exactly its tokens, of the row's own length; presets, schedules and words by class are made of them."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from drawing import Preset
from harness_world import make_world
from hypothesis import given
from hypothesis import strategies as st
from looking import LAYERS, Pass

from quicksilver.data.annotation import TOKEN_SETS
from quicksilver.fitting.schedules import saved_pct, smallest_schedule
from quicksilver.modules import Calibration, PresetHalting, Schedule, StagedHalting, WordClassHalting
from quicksilver.modules.fitted import model_digest
from quicksilver.modules.staged_halting import schedule_files
from quicksilver.runs.config import compose
from quicksilver.runs.context import RunContext
from quicksilver.runs.parts import build_modules
from quicksilver.runtime import MISSING_KV, architecture_of

ROWS = st.lists(st.integers(1, 14), min_size=1, max_size=3)
SIGNALS = ("position", "drift", "random", "attention", {"name": "entropy", "of": "latent"})
FREE: dict[str, Any] = {"protect_first": 0, "protect_last": None, "missing_kv": "project"}  # nobody is protected


@st.composite
def stages(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Stages by shares, the last of them sometimes the rest."""
    layers = sorted(draw(st.sets(st.integers(1, LAYERS - 1), min_size=1, max_size=3)))
    shares = [draw(st.floats(0, 1 / len(layers))) for _ in layers]
    made: list[dict[str, Any]] = []
    for layer, share in zip(layers, shares, strict=True):
        how = {"multiple_of": draw(st.integers(1, 5)), "signal": draw(st.sampled_from(SIGNALS))}
        kept = {"protect_first": draw(st.integers(0, 2)), "protect_last": draw(st.integers(0, 2))}
        made.append({"before": layer, "share": share, "missing_kv": draw(st.sampled_from(MISSING_KV[:4])), **how, **kept})
    if draw(st.booleans()):
        del made[-1]["share"], made[-1]["signal"], made[-1]["multiple_of"]
        made[-1]["rest"] = True
    return made


def wanted(n: int, share: float, multiple_of: int) -> int:
    left = n - math.floor(share * n + 0.5)
    if multiple_of == 1:
        return n - left
    return n - min(n, min(range(multiple_of, n + 2 * multiple_of, multiple_of), key=lambda some: (abs(some - left), -some)))


@given(ROWS, st.integers(0, 2), stages())
def test_each_stage_halts_exactly_its_tokens(lengths: list[int], extra: int, given_stages: list[dict[str, Any]]) -> None:
    one = Pass(lengths, extra=extra, ids=tiny.ids(len(lengths), max(lengths) + extra))
    one.run(StagedHalting(stages=given_stages, **FREE))
    for row, n in enumerate(lengths):
        halted = 0
        for i, stage in enumerate(given_stages):
            first, last = (max(later[end] for later in given_stages[i:]) for end in ("protect_first", "protect_last"))
            free = max(0, n - halted - first - last)
            halted += free if "rest" in stage else min(free, wanted(n, stage["share"], stage["multiple_of"]))
            real = one.state.valid[row]
            now = (one.state.halt_layer[row] == stage["before"] - 1) & real
            assert int((one.state.halt_layer[row][real] < stage["before"]).sum()) == halted, (stage, n)
            assert not now[real.nonzero()[:first]].any()
            assert not now[real.nonzero()[n - last :]].any()
            assert (one.state.halted_kv[row][now] == MISSING_KV.index(stage["missing_kv"])).all()


def test_a_threshold_is_the_layer_s_own_and_causal() -> None:
    calibration = Calibration(LAYERS, (0, 100), {"drift-relative": [[0.0, float(layer)] for layer in range(LAYERS)]})
    halting = StagedHalting(stages=[{"before": 5, "below": "p25", "signal": "drift"}], **FREE)
    assert halting.causal
    assert [signal.key for signal in halting.calibration_signals()] == ["drift-relative"]
    halting.calibration = calibration
    assert not halting.calibration_signals()
    after = torch.ones(1, 3, 8)
    before = after * (1 - torch.tensor([0.9, 1.1, 0.99]))[None, :, None]
    one = Pass([3])
    one.ask(halting, 4, before=before, after=after)  # a quarter of 4
    assert one.halted(4)[0].tolist() == [True, False, True]


def test_a_number_larger_than_the_prompt_is_refused() -> None:
    counts = [{"before": 3, "count": 9, "signal": "position"}, {"before": 6, "count": 8, "signal": "drift"}]
    halting = StagedHalting(stages=counts, protect_first=2, protect_last=1, missing_kv="project")
    with tiny.refused(r"stages\[0\]: count=9 is more than a prompt of 10 tokens has left: 0 .* at most 7"):
        Pass([14, 10]).run(halting)
    with tiny.refused(r"stages\[1\]: count=8 .* prompt of 14 .*: 9 have halted before and 3 are .* at most 2"):
        Pass([14]).run(halting)


N = 40
BATCH = tiny.Batch((tuple(range(1, N + 1)), tuple(range(3, N + 3))))
SCHEDULE = Schedule(drop_before=1, drop_share=0.25, predict_before=3, protect_first=2, protect_last=5)


@pytest.mark.parametrize("name", tiny.thinned(tiny.FAMILIES))
def test_the_oldest_are_dropped_and_all_but_the_protected_are_predicted(name: str) -> None:
    run = tiny.forward(tiny.load(name), BATCH, [Preset(schedule=SCHEDULE)])
    (one,) = run.trace.passes
    wanted = torch.full((N,), tiny.LAYERS - 1)
    wanted[2:12], wanted[12 : N - 5] = 0, 2
    assert (one.halt_layer == wanted).all()
    mode = torch.where(wanted == 2, MISSING_KV.index("predict"), MISSING_KV.index("drop"))
    assert (one.halted_kv == mode).all()
    assert one.kv_present(4).sum(1).tolist() == [N - 10, N - 10]


def test_a_short_prompt_protects_a_share_of_its_own_last_tokens_and_one_at_least() -> None:
    short = replace(SCHEDULE, drop_share=0.0, protect_last=5, protect_at_most=0.125)
    lengths = (40, 24, 14, 3)
    rows = tiny.Batch(tuple(tuple(range(1, n + 1)) for n in lengths))
    run = tiny.forward(tiny.load("gpt2"), rows, [Preset(schedule=short)]).run
    (one,) = run.trace.passes
    through = [int((depth[valid] == tiny.LAYERS - 1).sum()) for depth, valid in zip(one.halt_layer, one.valid, strict=True)]
    assert through == [2 + 5, 2 + 3, 2 + 2, 2 + 1] == [short.protected(n) for n in lengths]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_the_search_counts_is_what_a_run_executes(name: str) -> None:
    model = tiny.load(name)
    arch = architecture_of(model)
    more = ({"predict_before": 2, "protect_last": 1}, {"tile": 16}, {"linear_mlp": (1, 2)}, {"protect_at_most": 0.05})
    for changes in ({}, {"drop_share": 0.0}, *more):
        one = replace(SCHEDULE, **changes)
        head = (N - 1) * 2 * arch.vocab_size * arch.width  # the test asks for all logits, a prompt for one
        executed, dense = (
            tiny.forward(model, BATCH.alone(0), modules).run.flops.executed - head for modules in ([Preset(schedule=one)], [])
        )
        assert saved_pct(arch, one, N, n_neurons=3) == pytest.approx(100 * (1 - executed / dense), abs=1e-9)


def test_just_enough_drops_one_token_fewer_than_would_not_do() -> None:
    arch = architecture_of(tiny.load("gpt2"))
    found = smallest_schedule(arch, 3, 4, 0.35, 64, tile=1)
    assert saved_pct(arch, found, 64) >= 35
    fewer = Schedule(found.drop_before, found.drop_share - 1 / 64, 3, 4, 4)
    assert saved_pct(arch, fewer, 64) < 35
    in_tiles = smallest_schedule(arch, 3, 4, 0.35, 64, tile=16)
    assert in_tiles.dropped(64) == 16 * -(-found.dropped(64) // 16)  # up to the next whole tile
    assert smallest_schedule(arch, 3, 4, 0.99, 64) is None
    assert smallest_schedule(arch, 1, 4, 0.1, 64) is None


def test_a_file_of_schedules_names_its_maps_and_serves_its_model_alone(tmp_path: Path) -> None:
    model = tiny.load("llama")
    arch = architecture_of(model)
    digest = model_digest(model)
    fitted = replace(tiny.random_translators(arch)[2].translator, weights_digest=digest)
    fitted.save(tmp_path / "maps.safetensors")
    file = tmp_path / "chosen.yaml"
    content = {"weights_digest": digest, "files": {3: "maps.safetensors"}, "schedules": {40: {"schedule": asdict(SCHEDULE)}}}
    file.write_text(yaml.safe_dump(content))
    made = tiny.forward(model, BATCH, [PresetHalting(schedule=file, save=0.4)])
    given = tiny.forward(model, BATCH, [PresetHalting(schedule=SCHEDULE, translator=tmp_path / "maps.safetensors")])
    assert torch.equal(made.logits, given.logits)
    assert schedule_files({"missing_kv": "predict", "schedule": str(file)}, tmp_path) == [file, tmp_path / "maps.safetensors"]
    with tiny.refused("there are schedules for 0.4"):
        PresetHalting(schedule=file, save=0.5).bind(arch)
    with tiny.refused("fitted to other weights"):
        PresetHalting(schedule=file).bind(architecture_of(tiny.load("gpt2")))
    unordered = yaml.safe_dump(content | {"schedules": {"x": {}}})
    for wrong in ("", "[1]", "a: b", "schedules: 3", unordered, "!!python/name:os.system", "[" * 600):
        file.write_text(wrong)
        with tiny.refused("cannot be read as a file of schedules"):
            PresetHalting(schedule=str(file)).bind(arch)


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


# A vocabulary: ids 1 to 8 of the tiny model.
WORDS = {1: "The", 2: " cat", 3: " sat", 4: " on", 5: " inter", 6: "in", 7: ".", 8: " it"}
SETS = {
    option: [number for number, text in WORDS.items() if TOKEN_SETS[name](text)]
    for option, name in (
        ("function_ids", "@function_words"), ("letter_ids", "@with_letters"),
        ("begin_ids", "@begins_with_a_letter"), ("end_ids", "@ends_with_a_letter"),
    )
}  # fmt: skip
TEXT = (1, 2, 3, 4, 5, 6, 7, 8, 2)  # The cat sat on inter|in . it cat


def stopped(text: tuple[tuple[int, ...], ...] = (TEXT,), extra: int = 0, **options: object) -> list[list[int]]:
    """Places of each row's tokens that do not reach the last layer."""
    module = WordClassHalting(depth=0.4, **{"protect_first": 0, "protect_last": None, **SETS, **options})
    batch = tiny.Batch(text, extra)
    run = tiny.forward(tiny.load("llama"), batch, [module]).trace.passes[0]
    gone = ~run.active(run.n_layers - 1)
    return [row.nonzero()[:, 0].tolist() for row in batch.real(gone)]


def test_the_classes_are_those_of_the_words() -> None:
    assert stopped() == [[0, 3, 7]]
    assert stopped(halted="content") == [[1, 2, 4, 5]]  # the last token decides, and does not stop; a point is no word
    assert stopped(halted="content", protect_last=0) == [[1, 2, 4, 5, 8]]


def test_the_null_stops_as_many_of_each_row() -> None:
    one = stopped((TEXT, TEXT[:6]), at_random=True)
    assert [len(row) for row in one] == [3, 2]
    drawn = {tuple(stopped(at_random=True, seed=seed)[0]) for seed in range(6)}
    assert len(drawn) > 1
    assert all(8 not in places for places in drawn)


def test_the_sets_are_named_in_the_config(tmp_path) -> None:
    world = [*make_world(tmp_path), f"results_dir={tmp_path}/results", "modules=[word_class_halting]", "protocol=continuation"]
    config = compose(world)
    tokenizer = RunContext().model(config).tokenizer
    (module,) = build_modules(config.modules, tokenizer)
    assert [tokenizer.decode([one]) for one in sorted(module.function_ids)] == ["A", "I", "a", "i"]  # a token a byte
    assert not set(module.letter_ids) & set(tokenizer(" .,;!")["input_ids"])
    with tiny.refused(r"function_ids: .*@function_words"):
        build_modules(compose([*world, "modules.word_class_halting.function_ids=['@function_word']"]).modules, tokenizer)
