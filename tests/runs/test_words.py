"""Options called `…_ids` take words: they become the ids of the model at hand, whatever its tokenizer."""

from __future__ import annotations

import pytest
from harness_world import make_world

from quicksilver.runs.config import compose
from quicksilver.runs.context import RunContext
from quicksilver.runs.parts import build_modules
from quicksilver.runs.run import ensure
from quicksilver.runtime.errors import ConfigError

WORDS = [
    "modules=[halting]",
    "modules.halting.tau_drift=p60",
    "modules.halting.tau_entropy=null",
    "modules.halting.resume_layers=0",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    return [*make_world(folder), f"results_dir={folder / 'results'}", *WORDS]


def test_words_become_the_ids_of_every_token_that_reads_so(world):
    config = compose([*world, "modules.halting.full_ids=[b,3]"])
    tokenizer = RunContext().model(config).tokenizer
    (module,) = build_modules(config.modules, tokenizer)
    assert sorted(module.full_ids) == sorted([3, *tokenizer("b")["input_ids"]])
    (unresolved,) = build_modules(config.modules)
    assert unresolved.full_ids == (3,)


def test_a_word_that_is_no_token_is_named(world):
    config = compose([*world, "modules.halting.forced_ids=[b,word]"])
    with pytest.raises(ConfigError, match="modules.halting.forced_ids: 'word'"):
        build_modules(config.modules, RunContext().model(config).tokenizer)


def test_forced_words_halt_first_and_full_words_never(world):
    words = [
        "measure.signals.enabled=true",
        "measure.signals.sentences=[abcabcd]",
        "modules.halting.forced_ids=[b]",
        "modules.halting.full_ids=[c]",
    ]
    record = ensure([compose([*world, *words])])[0]
    frame = record.signals()
    active = frame.groupby("token", sort=False)["active"]
    assert active.all()["c"]
    first = frame[~frame["active"]].groupby("token")["layer"].min()
    assert first["b"] == first.min()
    assert set(record.thresholds["halting"]) == {"tau_drift"}
    assert len(record.thresholds["halting"]["tau_drift"]) == record.model.layers
