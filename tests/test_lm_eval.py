"""The model of lm-evaluation-harness: without modules it is HFLM, with modules the context is a prompt that is computed once."""

import json
import logging

import pytest
import torch
from harness_world import make_model

from quicksilver.runtime import apply
from quicksilver.runtime.errors import ConfigError

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'quicksilver-lm[lm-eval]'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")

CONTEXTS = ("the cat sat on", "a", "so many words stand here", "the cat sat on")
CHOICES = (" a mat", " x", " trees and roofs", "!")
HALTING = {"modules": "halting_attention", "modules.halting.halted_share": "0.5"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("lm_eval") / "tiny")


@pytest.fixture
def lm(folder, tmp_path):
    from quicksilver.lm_eval import QuickSilverLM

    def made(**options):
        return QuickSilverLM(pretrained=str(folder), **{"results_dir": str(tmp_path), **options})

    return made


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


def pairs():
    return instances("loglikelihood", [(c, choice) for c in CONTEXTS for choice in CHOICES] + [("", " word")])


@pytest.fixture(scope="module")
def hflm(folder):
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return HFLM(
        AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=3
    )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_without_modules_it_is_hflm(lm, hflm, batch_size):
    ours = lm(batch_size=batch_size)
    (nats, greedy), (theirs, is_greedy) = (
        zip(*one.loglikelihood(pairs(), disable_tqdm=True), strict=True) for one in (ours, hflm)
    )
    assert nats == pytest.approx(theirs, abs=1e-4)
    assert greedy == is_greedy
    texts = instances("loglikelihood_rolling", [("so many words " * 9,), ("the cat",)])  # longer than the context, and shorter
    assert ours.loglikelihood_rolling(texts) == pytest.approx(hflm.loglikelihood_rolling(texts), abs=1e-3)
    until = instances("generate_until", [(c, {"until": ["."], "max_gen_toks": 6}) for c in CONTEXTS])
    assert ours.generate_until(until, disable_tqdm=True) == hflm.generate_until(until, disable_tqdm=True)


def test_a_context_is_a_prompt_that_is_computed_once(lm):
    """Halting drops half of every prompt and nothing after it, whatever it is batched with."""
    one, three = lm(**HALTING), lm(batch_size=3, **HALTING)
    asked = pairs()
    found = one.loglikelihood(asked, disable_tqdm=True)
    for (nats, _), (batched, _) in zip(found, three.loglikelihood(asked, disable_tqdm=True), strict=True):
        assert nats == pytest.approx(batched, abs=1e-4)
    dense = lm()
    assert max(abs(a - b) for (a, _), (b, _) in zip(found, dense.loglikelihood(asked, disable_tqdm=True), strict=True)) > 1e-3
    assert one.flops.executed < dense.flops.executed
    tokenizer, model = one.tokenizer, one.model
    prompt, choice = (tokenizer(text, return_tensors="pt")["input_ids"] for text in (CONTEXTS[0], CHOICES[0]))
    with torch.no_grad(), apply(model, one.modules) as run:
        first = model(prompt, use_cache=True)
        rest = model(choice[:, :-1], use_cache=True, past_key_values=first.past_key_values).logits[0]
        whole = torch.cat([first.logits[0, -1:], rest]).log_softmax(-1)
    assert found[0][0] == pytest.approx(float(whole.gather(1, choice[0][:, None]).sum()), abs=1e-4)
    assert run.flops.executed > 0


def test_one_prompt_costs_as_much_as_its_choices_add(lm):
    """Four choices of one token cost what one costs."""
    costs = []
    for choices in ("!", "!?.,"):
        model = lm()
        model.loglikelihood(instances("loglikelihood", [(CONTEXTS[0], one) for one in choices]), disable_tqdm=True)
        costs.append(model.flops.executed)
    assert costs[0] == costs[1]


def test_a_whole_text_has_no_prompt_to_look_ahead_in(lm):
    text = instances("loglikelihood_rolling", [("the cat sat",)])
    with pytest.raises(ConfigError, match="looks ahead"):
        lm(**HALTING).loglikelihood_rolling(text)
    causal = lm(modules="random_halting", **{"modules.random_halting.rate": "0.6"})
    assert causal.loglikelihood_rolling(text) != pytest.approx(lm().loglikelihood_rolling(text), abs=1e-3)


def test_what_does_not_fit_is_cut_on_the_left_and_counted(lm, hflm, caplog):
    ours = lm()
    asked = instances("loglikelihood", [("word " * 20, " end"), ("short", " end")])
    with caplog.at_level(logging.WARNING, "quicksilver"):
        found = ours.loglikelihood(asked, disable_tqdm=True)
    assert ours.truncated == 1
    assert "1 of 2 contexts were cut on the left to fit into 64 tokens" in caplog.text
    theirs = hflm.loglikelihood(asked, disable_tqdm=True)
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in theirs], abs=1e-4)


MISTAKES = {
    "batch_size": ({"batch_size": "auto"}, "batch_size=auto: give a number"),
    "option": ({"modles": "halting"}, "modles=halting: .*modules"),
    "module": ({"modules": "haltin"}, "haltin"),
    "parallel": ({"parallelize": True}, "parallelize=True"),
    "model": ({"pretrained": "/no/such/folder"}, "there is no folder"),
    "module's option": ({**HALTING, "modules.halting.share": 1}, r"modules\.halting\.share: there is no such key"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(folder, tmp_path, mistake):
    from quicksilver.lm_eval import QuickSilverLM

    options, says = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=says) as caught:
        QuickSilverLM(**{"pretrained": str(folder), "results_dir": str(tmp_path), **options})
    assert "\n" not in str(caught.value)


def test_a_task_of_a_yaml_is_evaluated(folder, tmp_path, monkeypatch):
    """lm-eval's own way: a task file, rows of a file, the model by its name."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import quicksilver.lm_eval  # noqa: F401  registers the model

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"text": f"row {i}", "gold": i % 2} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny_task.yaml").write_text(
        f"""task: tiny_task
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}, cache_dir: {tmp_path / "cache"}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}} is"
doc_to_choice: [" bad", " good"]
doc_to_target: gold
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    found = simple_evaluate(
        model="quicksilver", model_args={"pretrained": str(folder), "results_dir": str(tmp_path / "results"), **HALTING},
        tasks=["tiny_task"], task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False), batch_size=4,
        bootstrap_iters=0,
    )  # fmt: skip
    assert 0 <= found["results"]["tiny_task"]["acc,none"] <= 1
    assert found["n-samples"]["tiny_task"]["effective"] == 5
    told = found["config"]["quicksilver"]
    assert list(told["modules"]) == ["halting"]
    assert told["executed_flops"] > 0
