"""What is fitted on calibration text: maps of K/V and their controls, lenses, exit heads; against regressions on all of the data at once."""

import hashlib
import json
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from thinning import first

from quicksilver.fitting.controls import FittedPrediction, OracleExit, share_that_saves, static_schedule
from quicksilver.fitting.fit import FitCost, FitText, fit_lens, fit_mlp_maps, fit_translators, priced
from quicksilver.fitting.schedules import KLToDense, by_kl, distill, saved_pct, search
from quicksilver.measure.flop_counter import count_executed
from quicksilver.models.loading import EMBEDDED
from quicksilver.modules import Halting, Schedule, signals
from quicksilver.modules.calibration import calibrate
from quicksilver.modules.fitted import Lens, ModelShape, Translator, lens_files, lens_for, model_digest
from quicksilver.modules.linear_mlp import Neurons, mlp_map_files
from quicksilver.runs.config import compose
from quicksilver.runs.context import RunContext
from quicksilver.runtime import MISSING_KV, apply, architecture_of


def text(windows: int = 12, tokens: int = 48, seed: int = 0) -> FitText:
    return FitText(tiny.ids(windows, tokens, seed), {"texts": {}})


def ridge(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(1 + D, M) float64: the ridge regression of y (T, M) on x (T, D), on all data at once; and what it leaves of y, squared: (M,)."""
    x, y = torch.cat([torch.ones_like(x[:, :1]), x], dim=1).double(), y.double()
    w = torch.linalg.solve(x.T @ x + 0.01 * (x.T @ x).diagonal().mean() * torch.eye(x.shape[1]), x.T @ y)
    return w, (y - x @ w).square().sum(0)


def is_fitted(weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    torch.testing.assert_close(weight.double(), ridge(x, y)[0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_streamed_sums_solve_to_the_ridge_regression_of_all_data(name: str) -> None:
    arch, fit_on = architecture_of(tiny.load(name)), text()
    found = fit_translators(arch, fit_on, [1, 2], ridge=0.01, batch_size=5)
    assert sorted(found) == [1, 2]
    with torch.no_grad():
        states = arch.model(fit_on.ids, output_hidden_states=True, use_cache=False).hidden_states
    for source, translator in found.items():
        parts = [part.transpose(1, 2).flatten(2).flatten(0, 1)
                 for layer in range(source + 1, arch.n_layers) for part in arch.project_kv_unrotated(layer, states[layer])]  # fmt: skip
        is_fitted(
            translator.weight.flatten(1), arch.normalised_input(source, states[source].flatten(0, 1)), torch.cat(parts, dim=1)
        )
        assert translator.weights_digest == model_digest(arch.model)
        assert translator.provenance["tokens"] == fit_on.ids.numel()


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.thinned(tiny.FAMILIES))
def test_a_linear_mlp_is_a_ridge_regression_and_those_neurons_stay_that_it_explains_least(name: str) -> None:
    arch, fit_on, met = architecture_of(tiny.load(name)), text(), {}
    with ExitStack() as hooks:
        for layer in (1, 3):
            note = lambda _, args, output, at=layer: met.update({at: (args[0].flatten(0, 1), output.flatten(0, 1))})
            hooks.enter_context(arch.mlp(layer).register_forward_hook(note))
        arch.model(fit_on.ids)
    for neurons in (0, 4):
        found = fit_mlp_maps(arch, fit_on, [3, 1], neurons=neurons, ridge=0.01, batch_size=5)
        assert found.layers == (1, 3)
        for i, (layer, (given, returned)) in enumerate(met.items()):
            if neurons:
                every, kept = Neurons.of(arch, layer)(given), list(found.neurons[i])
                lost = ridge(given, every)[1] * arch.mlp_writer(layer).square().sum(1)
                assert sorted(kept) == sorted(lost.topk(neurons).indices.tolist())
                given = torch.cat([given, every[:, kept]], dim=1)
            is_fitted(found.weight[i], given, returned)
            stand_in = found.of_layers([layer], arch)[layer]
            assert count_executed(partial(stand_in, met[layer][0][None])) == 12 * 48 * stand_in.flops_per_token
    for wrong, says in (({"layers": [0]}, "layer 0 has no map"), ({"layers": [2], "neurons": 9999}, "neurons=9999: an MLP of")):
        with tiny.refused(says):
            fit_mlp_maps(arch, fit_on, **wrong)


@pytest.mark.parametrize(
    "fit",
    [lambda *given: fit_translators(*given, [1]), fit_lens, lambda *given: fit_mlp_maps(*given, [1])],
    ids=["translators", "lens", "mlp"],
)
def test_a_frozen_model_is_run_without_gradients(fit) -> None:
    arch, seen = architecture_of(tiny.load("gpt2")), set()
    note = lambda *_: seen.add(torch.is_grad_enabled())
    with arch.model.register_forward_pre_hook(note), arch.base.register_forward_pre_hook(note):
        fit(arch, text())
    assert seen == {False}


def test_a_fit_that_was_stopped_goes_on_but_not_from_sums_of_other_text_or_a_torn_file(tmp_path: Path, monkeypatch) -> None:
    arch, path, left = architecture_of(tiny.load("gpt2")), tmp_path / "sums.safetensors", []
    monkeypatch.setattr("quicksilver.fitting.fit.SAVED_EVERY_S", -1.0)

    def stopping(batches):
        left.append(len(batches))
        yield batches[0]
        raise KeyboardInterrupt

    def counting(batches):
        left.append(len(batches))
        return batches

    def fit(seed: int, progress, checkpoint: Path | None = path) -> torch.Tensor:
        return fit_translators(arch, text(seed=seed), [1], batch_size=3, checkpoint=checkpoint, progress=progress)[1].weight

    for seed, torn in ((1, False), (0, False), (0, False), (1, False), (1, True)):
        if torn:
            path.write_bytes(path.read_bytes()[:200])
        with pytest.raises(KeyboardInterrupt):
            fit(seed, stopping)
    assert left == [4, 4, 3, 4, 4]
    assert torch.equal(fit(1, counting), fit(1, iter, None))
    assert left[-1] == 3
    assert not path.exists()


SCHEDULE = Schedule(1, 0.1, 2, 1, 3)


def world(model: torch.nn.Module | None = None) -> tuple:
    arch = architecture_of(model or tiny.load("llama"))
    shape = ModelShape.of(arch)
    weight = torch.zeros(1 + shape.width, 2, 2, shape.n_kv_heads, shape.head_dim)
    return arch, Translator(2, weight, shape, model_digest(arch.model)), tiny.ids(8, 30)


@pytest.mark.parametrize(("name", "linear"), first([("gpt2", ()), ("llama", (1,)), ("gpt_neox", ()), ("gpt2", (1,))], 2))
def test_trained_maps_come_nearer_to_the_dense_answers_and_leave_the_model_alone(name: str, linear: tuple[int, ...]) -> None:
    arch, zeros, ids = world(tiny.build(name).requires_grad_(False))
    schedule, maps = replace(SCHEDULE, linear_mlp=linear), tiny.random_mlp_maps(arch) if linear else None
    options = {"steps": 20, "prompt_tokens": 24, "batch_size": 4, "learning_rate": 2e-2}
    with tiny.left_untouched(arch.model):
        trained, mapped = distill(arch, zeros, ids, [schedule], maps=maps, **options)
    judge = KLToDense(arch, ids, prompt_tokens=24)
    after, alone, before = (
        judge.of(*schedule.modules(translator=one.bound(arch), maps=two or "embedded")).mean()
        for one, two in ((trained, mapped), (trained, maps), (zeros, maps))
    )
    assert alone < (0.9 if linear else 0.8) * before
    assert trained.provenance["distilled"]["steps"] == 20
    assert float(zeros.weight.abs().sum()) == 0
    if linear:
        assert after < alone
        assert torch.equal(mapped.weight[1:], maps.weight[1:])  # of layers that no schedule maps
        assert mapped.provenance["distilled"] == trained.provenance["distilled"]


def test_the_search_takes_the_least_kl_of_what_saves_enough() -> None:
    arch, zeros, ids = world()
    judge = KLToDense(arch, ids, prompt_tokens=24)
    found = search(judge, [zeros], 0.3, protect_last=(2, 6))
    assert [one.kl_nats for one in found] == sorted(one.kl_nats for one in found)
    assert all(one.saved_pct >= 30 for one in found)
    assert found[0].kl_nats == pytest.approx(float(judge.of(*found[0].schedule.modules(translator=zeros.bound(arch))).mean()))
    maps = tiny.random_mlp_maps(arch)
    costs = by_kl(judge, maps)
    assert list(costs.values()) == sorted(costs.values())
    both = search(judge, [zeros], 0.4, protect_last=(2,), maps=maps, order=[*costs])
    linear = next(one.schedule for one in both if one.schedule.linear_mlp)
    assert len(both) == 2
    assert linear.linear_mlp == tuple(sorted([layer for layer in costs if layer < 2][: len(linear.linear_mlp)]))
    with tiny.refused("from layer 2 saves 0.99"):
        search(judge, [zeros], 0.99)


def test_the_price_of_a_fit_has_its_time_its_memory_and_its_machine(tmp_path: Path) -> None:
    megabytes = 64

    def fit() -> str:
        torch.ones(megabytes, 2**18).sum()  # float32
        return "a map"

    found, cost = priced(fit, model="tiny", layers=[3, 4], distill_steps=70, tokens=2048)
    assert found == "a map"
    assert cost.seconds >= 0
    assert cost.peak_bytes > megabytes * 2**20
    assert torch.__version__ in cost.machine
    cost.save(tmp_path / "tiny.cost.json")
    assert FitCost(**json.loads((tmp_path / "tiny.cost.json").read_text())) == cost
    said = FitCost("tiny", [3, 4], 70, 122880, 40.04, 61.0, 812_000_000, "A Processor, torch 2, 2 threads").line()
    assert said == (
        "tiny: 2 maps on 122,880 tokens, 70 steps of distillation each: 40.0 s (61.0 s of processor time), peak memory 0.81 GB; "
        "A Processor, torch 2, 2 threads"
    )


# -- lenses ------------------------------------------------------------------------------------------------------------------------
@pytest.fixture(params=["gpt2", "llama"])
def arch(request):
    return architecture_of(tiny.load(request.param))


@torch.no_grad()
def states_and_targets(arch, ids: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """States after each layer, and the head's own input: (B·N, D) each. Hugging Face's last hidden state is normed already."""
    found = arch.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    return tuple(state.flatten(0, 1) for state in found[1:]), found[-1].flatten(0, 1)


def test_it_is_the_ridge_regression_of_the_head_s_input_and_on_other_text_nearer_to_the_model_than_the_raw_lens(arch) -> None:
    made = fit_lens(arch, text(30), ridge=0.01, batch_size=7)
    states, target = states_and_targets(arch, text(30).ids)
    assert made.weight.shape == (arch.n_layers - 1, 1 + arch.width, arch.width)
    for layer in range(arch.n_layers - 1):
        is_fitted(made.weight[layer], arch.normalised_input(layer, states[layer]), target)
    states, target = states_and_targets(arch, text(6, seed=1).ids)
    with torch.no_grad():
        own = arch.output_head(target).log_softmax(-1)
        for layer in range(arch.n_layers - 1):
            both = arch.logits(states[layer]), arch.output_head(made.head_input(arch, layer, states[layer]))
            kl = [(own.exp() * (own - one.log_softmax(-1))).sum(-1).mean() for one in both]
            assert kl[1] < kl[0]


def test_halting_reads_it_calibrates_on_it_and_pays_for_it(arch, tmp_path: Path, monkeypatch) -> None:
    made = fit_lens(arch, text(30))
    made.save(tmp_path / "lens.safetensors")
    monkeypatch.setattr(Lens, "shipped", lambda: [tmp_path / "lens.safetensors"])
    torch.testing.assert_close(lens_for(arch).weight, made.weight)
    ids = text(4, seed=2).ids
    found = calibrate(arch.model, ids, signals=[signals.Entropy("tuned_lens")])
    states, _ = states_and_targets(arch, ids)
    with torch.no_grad():
        p = arch.output_head(made.head_input(arch, 1, states[1])).softmax(-1)
    median = float(torch.special.entr(p).sum(-1).quantile(0.5))
    assert found.percentiles["entropy-tuned_lens"][1][49] == pytest.approx(median, rel=1e-3)
    halting = Halting(
        tau_entropy="p50", entropy="tuned_lens", calibration=found, window=(0.2, 0.8), missing_kv="drop", tau_drift=None,
        resume_layers=0,
    )  # fmt: skip
    with torch.no_grad(), apply(arch.model, [halting]) as run:
        arch.model(ids, use_cache=False)
    (one,) = run.trace.passes
    first = halting.first_layer
    half = float((one.halt_layer == first).float().mean())
    assert 0.4 < half < 0.6
    asked = sum(int(one.active(layer).sum()) for layer in range(first, halting.last_layer + 1))
    assert run.flops.signals == asked * 2 * arch.width * (arch.vocab_size + arch.width)
    Lens(made.weight, "of another").save(tmp_path / "lens.safetensors")
    with tiny.refused("none with this model"):
        Halting(tau_entropy=1.0, entropy="tuned_lens", tau_drift=None, resume_layers=0).bind(arch)


def test_the_models_own_file_is_part_of_what_a_run_is_of_only_where_it_is_read(tmp_path: Path) -> None:
    folder = EMBEDDED / "reference-gpt2"
    own = [path for path in Lens.shipped() if path.is_relative_to(folder)]
    assert len(own) == 1
    assert lens_files({"entropy": "tuned_lens"}, folder) == lens_files({"source": "tuned_lens"}, folder) == own
    assert lens_files({"entropy": "logit_lens"}, folder) == []
    assert lens_files({"entropy": "tuned_lens"}, tmp_path) == sorted(Lens.shipped())  # it may be a copy of a shipped model
    maps = mlp_map_files({"maps": "embedded"}, EMBEDDED / "far-gpt2")
    assert maps == [EMBEDDED / "far-gpt2" / "linear_mlp" / "maps.safetensors"]
    assert set(maps) < set(mlp_map_files({"maps": "embedded"}, tmp_path))


def test_a_measurement_that_reads_the_lens_is_of_it_too() -> None:
    place = RunContext()
    found = [place.identity(compose(["protocol=all", *words])).digests for words in (["measure=lenses"], ["measure=quick"])]
    own = EMBEDDED / "far-gpt2" / "tuned_lens" / "lens.safetensors"
    assert found[0]["tuned_lens.lenses.lens.safetensors"] == hashlib.sha256(own.read_bytes()).hexdigest()
    assert not any(key.startswith("tuned_lens") for key in found[1])


# -- controls of prediction, and the ceiling of early exit -------------------------------------------------------------------------
N = 40
BATCH = tiny.Batch((tuple(range(1, N + 1)), tuple(range(3, N + 3))))
PRESET = Schedule(1, 0.25, 2, 2, 5)


def fitted(name: str, control: str) -> FittedPrediction:
    module = FittedPrediction(schedule=PRESET, control=control)
    module.fit(tiny.load(name), text(seed=3).ids, batch_size=4)
    return module


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_pairs_predict_better_than_the_mean_and_that_no_worse_than_shuffled_pairs(name: str) -> None:
    arch = architecture_of(tiny.load(name))
    states = arch.model(BATCH.ids, use_cache=False, output_hidden_states=True).hidden_states
    error = {}
    for control in ("none", "shuffled", "mean"):
        module = fitted(name, control)
        module.bind(arch)
        (translator,) = module.translators.values()
        predicted = translator.translate(states[2])
        assert list(predicted.layers) == [3, 4]
        differences = [
            (a - b).square().mean()
            for j in predicted.layers
            for a, b in zip(predicted[j], arch.project_kv_unrotated(j, states[j]), strict=True)
        ]
        error[control] = float(torch.stack(differences).sum())
        same_for_all = all(bool((part - part[:, :, :1]).abs().max() < 1e-6) for j in predicted.layers for part in predicted[j])
        assert same_for_all == (control == "mean")
    assert error["none"] < 0.7 * error["mean"] < error["shuffled"]


def test_it_runs_like_a_preset_and_a_control_costs_the_same_work() -> None:
    controls = {control: fitted("llama", control) for control in ("none", "shuffled", "mean")}
    runs = {name: tiny.forward(tiny.load("llama"), BATCH, [module]) for name, module in controls.items()}
    assert len({run.run.flops.executed for run in runs.values()}) == 1
    assert not torch.equal(runs["none"].logits, runs["mean"].logits)
    assert not torch.equal(runs["none"].logits, runs["shuffled"].logits)
    (one,) = runs["none"].trace.passes
    assert (one.halted_kv == MISSING_KV.index("predict")).any()
    assert FittedPrediction(schedule=PRESET, missing_kv="project").fitted  # there is nothing to fit


def test_static_prediction_drops_nobody_and_stops_as_late_as_the_budget_allows() -> None:
    arch = architecture_of(tiny.load("gpt2"))
    schedule = static_schedule(arch, 0.15, prompt_tokens=N, protect_last=5)
    assert schedule.drop_share == 0
    assert saved_pct(arch, schedule, N) >= 15
    later = Schedule(1, 0.0, schedule.predict_before + 1, 4, 5)
    assert schedule.predict_before + 1 > arch.n_layers - 2 or saved_pct(arch, later, N) < 15
    module = FittedPrediction(save=0.01, drop_oldest=False, prompt_tokens=90)
    module.fit(tiny.load("gpt2"), text(seed=3).ids)
    run = tiny.forward(tiny.load("gpt2"), tiny.Batch((tuple(i % 60 + 1 for i in range(90)),)), [module])
    (one,) = run.trace.passes
    assert not (one.valid & (one.halt_layer < tiny.LAYERS - 1) & (one.halted_kv == MISSING_KV.index("drop"))).any()


def oracle(name: str, save: float = 0.1) -> OracleExit:
    module = OracleExit(save=save, lookahead=True)
    module.fit(tiny.load(name), text(tokens=N, seed=3).ids, batch_size=4)
    return module


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_it_saves_what_was_asked_for_and_loses_less_than_the_same_tokens_without_a_head(name: str) -> None:
    model, module, batch = tiny.load(name), oracle(name), tiny.Batch(tuple(map(tuple, text(tokens=N, seed=3).ids.tolist())))
    rows = [batch.alone(i) for i in range(len(batch.rows))]
    executed = [sum(tiny.forward(model, row, modules).run.flops.executed for row in rows) for modules in ([module], [])]
    # The threshold is the quantile that saves so much on this very text.
    assert 100 * (1 - executed[0] / executed[1]) == pytest.approx(10, abs=1.5)
    dense, run = tiny.forward(model, batch, []), tiny.forward(model, batch, [module])
    (one,) = run.trace.passes
    left = one.halt_layer == module.exit.before - 1
    assert not left[:, :4].any()
    assert float(left.float().mean()) == pytest.approx(module.exit.share * (N - 4) / N, abs=0.02)
    assert (one.halted_kv[left] == MISSING_KV.index("predict")).all()

    def kl(logits: torch.Tensor) -> torch.Tensor:
        p = dense.logits.log_softmax(-1)
        return (p.exp() * (p - logits.log_softmax(-1))).sum(-1)

    exact = module.exit.head
    module._exit = type(module.exit)(module.exit.before, torch.zeros_like(exact), 1e9, 0.0, 0.0)
    without = tiny.forward(model, batch, [module]).logits
    assert float(kl(run.logits)[left].mean()) < float(kl(without)[left].mean())
    assert torch.equal(tiny.forward(model, batch, []).logits, dense.logits)  # nothing is left on the model


def test_what_comes_after_a_token_moves_neither_its_decision_nor_its_logits_and_masked_agrees() -> None:
    model, module = tiny.load("llama"), oracle("llama")
    changed = tiny.Batch(tuple((*row[:20], *[7] * 20) for row in BATCH.rows))
    ways = ((BATCH, "compact"), (changed, "compact"), (BATCH, "masked"))
    one, two, masked = (tiny.forward(model, batch, [module], execution=execution) for batch, execution in ways)
    assert torch.equal(one.trace.passes[0].halt_layer[:, :20], two.trace.passes[0].halt_layer[:, :20])
    torch.testing.assert_close(one.logits[:, :20], two.logits[:, :20], rtol=1e-4, atol=1e-5)
    tiny.assert_close(one.logits, masked.logits)


def test_the_share_of_tokens_that_saves_so_much_rises_with_it() -> None:
    arch = architecture_of(tiny.load("gpt2"))
    shares = [share_that_saves(arch, 2, saved, N, True) for saved in (0.0, 0.05, 0.1, 0.99)]
    assert share_that_saves(arch, 2, 0.3, N, False) < share_that_saves(arch, 2, 0.3, N, True), "an exit head costs something"
    assert shares[0] == 0
    assert shares[3] is None
    assert 0 < shares[1] < shares[2] <= 1


# -- what is refused ---------------------------------------------------------------------------------------------------------------
def maps(on: FitText, layer: int = 1, **options: object) -> object:
    return fit_translators(architecture_of(tiny.load("gpt2")), on, [layer], **options)


def distilled(schedule: Schedule, prompt_tokens: int = 24, **options: object) -> object:
    return distill(*world(), [schedule], prompt_tokens=prompt_tokens, **options)


@pytest.mark.parametrize(("call", "says"), [
    (lambda: maps(text(2, 50)), "100 tokens are too few to fit 33 coefficients a column: give at least 330"),
    (lambda: maps(FitText(text(1, 8).ids.repeat(60, 1), {})), "spans 8 of 33 directions"),
    (lambda: maps(text(), 4), "layers from 0 to 3"),
    (lambda: maps(text(), ridge=0), "ridge=0"),
    (lambda: maps(text(), control="noise"), "control='noise'"),
    (lambda: fit_lens(architecture_of(tiny.load("gpt2")), text(1, 4)), "tokens are too few"),
    (lambda: distilled(SCHEDULE, steps=0), "steps=0"),
    (lambda: distilled(SCHEDULE, prompt_tokens=30), "longer than 31"),
    (lambda: distilled(Schedule(1, 0.1, 3)), "give some for layer 2"),
    (lambda: FittedPrediction(schedule=PRESET).fit(tiny.load("gpt2"), text(2, seed=3).ids), "too few to fit"),
    (lambda: OracleExit(save=0.95).fit(tiny.load("gpt2"), text(tokens=N, seed=3).ids),
     "save=0.95: not even all tokens leaving before layer 1"),
    (lambda: OracleExit().fit(tiny.load("gpt2"), text(2, N, seed=3).ids), "are too few to fit"),
])  # fmt: skip
def test_too_little_text_and_options_that_make_no_sense_are_refused(call, says: str) -> None:
    with tiny.refused(says):
        call()
