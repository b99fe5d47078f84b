"""Composing many runs gives what Hydra gives for each, and says what Hydra's refusals say."""

import sys

import pytest
import thinning
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from thinning import first

from quicksilver.runs import composing
from quicksilver.runs.choices import choices
from quicksilver.runs.composing import hydra_started, quoted
from quicksilver.runs.config import RunConfig, compose, run_config
from quicksilver.runs.parts import build_measurements, build_modules
from quicksilver.runtime.errors import ConfigError

RUNS = [
    ["modules=[halting]", "modules.halting.tau_drift=p10"],
    ["modules=[halting]", "modules.halting.tau_drift=p40", "seed=3"],
    ["modules=[halting]", "modules.halting.tau_drift=[0.1,0.2]", "dataset.windows=3"],
    ["modules=[]", "measure=sweep", "results_dir='a, b'"],
    ["experiment=e9_grid", "modules.adaptive_quantization.tau_low=0.2", "modules.adaptive_quantization.tau_high=0.55"],
    ["experiment=e9_grid", "modules.adaptive_quantization.tau_low=0.25", "dataset.windows=9"],
    ["measure.latency.enabled=false", "++measure.audit.probes=1"],
    ["modules=[kv_skipping,halting]", "~modules.halting.tau_entropy", "modules.halting.tau_drift=p10"],
    ["data.root=${oc.env:HOME}", "decision_layers=[1,2]", "threads=null"],
    ["modules=[kv_skipping_paper_c4,token_fusion]", "protocol=continuation", "model=reference-llama"],
    ["modules=static_depth", "modules.static_depth.depth=0.5"],
]
# Entries are read from their files; every one of conf/modules in `make test-all`.
ENTRIES = [[f"modules=[{name}]"] for name in (choices("modules") if thinning.whole else ("halting_paper_b2", "sliding_window"))]
WRONG = [["modules=[haltin]"], ["modules=[halting]", "modules.halting.tau_drft=p10"], ["seed=x"], ["seed=-1"]]
WRONG += [["sed=1"], ["model=3"], ["dataset.windows=0"], ["modules=[halting]", "seed=[1,2]"]]


def by_hydra(words: list[str]) -> RunConfig:
    """What Hydra makes of all words in one go."""
    return run_config(composing.by_hydra(quoted(words)), words)


def test_runs_that_share_their_groups_are_what_hydra_gives_for_each(monkeypatch):
    composing._of_groups.cache_clear()
    calls = []
    whole = composing.by_hydra
    monkeypatch.setattr(composing, "by_hydra", lambda words, folders=(): calls.append(words) or whole(words, folders))
    ours = [compose(words) for words in (*RUNS, *ENTRIES)]
    assert len(calls) < len(RUNS) - 2  # or nothing was shared
    theirs = [by_hydra(words) for words in (*RUNS, *ENTRIES)]
    assert ours == theirs
    assert [list(run.modules) for run in ours] == [list(run.modules) for run in theirs]  # in the same order


@pytest.mark.parametrize("words", first(WRONG, 3))
def test_a_mistake_is_said_as_hydra_s_of_these_very_words(words):
    with pytest.raises(ConfigError) as alone:
        by_hydra(words)
    compose([word for word in words if word.startswith("modules=[halting]")])  # its groups are known already
    with pytest.raises(ConfigError) as among_many:
        compose(words)
    assert str(among_many.value) == str(alone.value)


@pytest.mark.parametrize(("name", "content", "says"), [
    ("modules/halting.yaml", "# @package modules.halting\n_target_: mine.Mine\n", "the package has modules=halting"),
    ("dataset/python-docs.yaml", "reader: text\n", "the package has dataset=python-docs"),
    ("dataset/d7.yaml", "name: python-docs\nreader: text\n", "is that of a dataset of the package"),
    ("modules/mine.yaml", "", "it is empty"),
    ("modules/mine.yaml", "_target_: mine.Mine\n", "# @package modules.mine"),
])  # fmt: skip
def test_a_file_of_one_s_own_that_would_not_be_read_is_named(tmp_path, name, content, says):
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=says):
        compose(["modules=[halting_attention]", "protocol=continuation"], [tmp_path])


def test_a_key_that_a_dataset_does_not_have_is_said_with_its_file(tmp_path):
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "mine.yaml").write_text("name: mine\nreader: text\nfilez: {}\n")
    says = r"dataset/mine.yaml: dataset.filez: there is no such key. Did you mean dataset.files\?"
    with pytest.raises(ConfigError, match=says):
        compose(["dataset=mine"], [tmp_path])


OWN = "from dataclasses import dataclass\nfrom quicksilver.runtime import TokenPolicy\n\n"
ASKED = "    def decide(self, view, tokens):\n        pass\n"
PLAIN = f"{OWN}class Mine(TokenPolicy):\n    def __init__({{}}):\n        self.a = a\n\n{ASKED}"
SHARE = f"{OWN}@dataclass\nclass Mine(TokenPolicy):\n    share: float = 0.1\n\n    def __post_init__(self): pass\n\n{ASKED}"


@pytest.mark.parametrize(("source", "options", "says"), [
    (PLAIN.format("self, a='x'"), {}, None),
    (PLAIN.format("self, a"), {}, "Mine needs a: give a default in the class, or a value in its yaml"),
    ("import quicksilver\n\nclass Mine:\n    pass\n", {}, r"own.py: Mine has no base. Write `class Mine\(RuntimeModule\)`"),
    ("class Mine(dict):\n    pass\n", {}, "own.py imports nothing of quicksilver"),
    ("", {"_target_": None, "share": 0.3}, "modules.own has no class: its yaml lacks the line `_target_"),
    (PLAIN.format("self, a=0").replace("view, tokens", "view"), {},
     r"Mine.decide\(self, view\) must take \(self, view, tokens\)"),
    (SHARE, {"share": "lots"}, "share='lots' is not a number"),  # although its __post_init__ is one's own
])  # fmt: skip
def test_a_class_of_one_s_own_is_a_module_or_is_told_what_it_lacks(tmp_path, monkeypatch, source, options, says):
    (tmp_path / "own.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own", None)
    entry = {option: value for option, value in ({"_target_": "own.Mine"} | options).items() if value is not None}
    if says is None:
        assert build_modules({"own": entry})[0].a == "x"
        return
    with pytest.raises(ConfigError, match=says):
        build_modules({"own": entry})


def test_folders_of_the_user_s_own_are_searched_and_read_again_when_they_change(tmp_path):
    (tmp_path / "modules").mkdir()
    for tau in (0.5, 0.25):
        content = f"# @package modules.mine\n_target_: quicksilver.modules.Halting\ntau_drift: {tau}\n"
        (tmp_path / "modules" / "mine.yaml").write_text(content)
        assert compose(["modules=[mine]"], [tmp_path]).modules["mine"]["tau_drift"] == tau
    with pytest.raises(ConfigError, match="mine"):
        compose(["modules=[mine]"])
    with pytest.raises(ConfigError, match="no such folder"):
        compose([], [tmp_path / "not there"])


def test_a_run_does_not_change_the_next_one():
    before = compose(["modules=[halting]"])
    compose(["modules=[halting]", "modules.halting.tau_drift=p99", "seed=7"]).modules.clear()
    assert compose(["modules=[halting]"]) == before
    first_time, again = build_measurements(before.measure), build_measurements(before.measure)
    assert first_time == again
    assert all(again[name] is not built for name, built in first_time.items())


def test_a_hydra_that_runs_already_is_left_as_it_was():
    with hydra_started():  # as in a worker, which a launcher's Hydra started
        outer = GlobalHydra.instance().hydra
        assert compose(["seed=3", "modules=[static_depth]"]).seed == 3
        with hydra_started():
            assert compose(["seed=4"]).seed == 4
        assert GlobalHydra.instance().hydra is outer
    assert not GlobalHydra.instance().is_initialized()


# --- words as a shell hands them on: any value that a person gives reaches the config as it was given
PRINTED = st.characters(codec="utf-8", exclude_characters=",$\n\r\0", exclude_categories=["C"])


@given(st.text(PRINTED, min_size=1), st.sampled_from("é~#&"))
def test_what_hydra_cannot_read_alone_keeps_every_character(value, strange):
    given_value = f"/a{value}{strange}b"
    (override,) = quoted([f"results_dir={given_value}"])
    assert OverridesParser.create().parse_override(override).value() == given_value


READ = ["model=gpt2", "modules=[halting,kv_skipping]", "seed=1,2", "a.b={x:1}", "word", "~modules", "x=[é]"]


@pytest.mark.parametrize("word", READ)
def test_what_it_reads_and_what_is_no_text_stays(word):
    assert quoted([word]) == [word]


@pytest.mark.parametrize("template", ["{sentence} It was", "{premise}\n{hypothesis}", "{text}", "{choices[0]}: it's {label}?"])
def test_a_template_needs_no_quotes_of_its_own(template):
    (override,) = quoted([f"dataset.task.template={template}"])
    assert OverridesParser.create().parse_override(override).value() == template


def test_several_mistakes_are_said_at_once_and_none_that_follows_from_another():
    words = ["modules=[halting]", "measure=quik", "seed=x", "modules.halting.tau_drft=3", "dataset=gumm", "dataset.windows=4"]
    with pytest.raises(ConfigError) as refused:
        compose(words)
    said = str(refused.value).splitlines()
    wrong = ("measure=quik", "seed=x", "modules.halting.tau_drft", "dataset=gumm")
    assert len(said) == len(wrong)
    assert all(any(line.startswith(word) for line in said) for word in wrong)
    with pytest.raises(ConfigError) as alone:
        compose(["modules=[haltin]", "modules.haltin.tau_drift=3"])
    assert "\n" not in str(alone.value)
