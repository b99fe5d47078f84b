"""Every yaml in conf/ composes and means what its class means; every mistake is one message that helps. Composing many runs gives what Hydra gives
for each, and says what Hydra's refusals say."""

import dataclasses
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import thinning
import tiny
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from saying import refused_in_a_line
from thinning import first

from quicksilver.data.spec import DatasetConfig
from quicksilver.measure.perplexity import Protocol
from quicksilver.models.spec import ModelConfig
from quicksilver.modules import Halting, Replay, Schedule
from quicksilver.runs import config as composing
from quicksilver.runs.choices import GROUPS, choices, config_dir
from quicksilver.runs.config import RunConfig, compose, composed, hydra_started, quoted, run_config
from quicksilver.runs.parts import build_measurements, build_modules, module_entry
from quicksilver.runs.sweep import sweep_jobs
from quicksilver.runtime import QuickSilverError, RuntimeModule, Trace, apply
from quicksilver.runtime.errors import ConfigError

# What no config can know is left open and asked for.
OPEN = {
    ("model", "folder"): ["model.name=x", "model.path=/x"],
    ("dataset", "file"): ["dataset.files.test=/x"],
    ("dataset", "ud"): ["dataset.files.test=/x"],
    ("measure", "words"): ["dataset=gum"],  # the default text has no annotation
}


@pytest.mark.parametrize("group", first(["protocol", *(group for group in GROUPS if group not in ("protocol", "modules"))]))
def test_every_choice_of_a_group_composes(group, subtests):
    """Of models and datasets all are read below, in the quick suite as well."""
    for choice in choices(group):
        with subtests.test(choice):
            config = compose([f"{group}={choice}", *OPEN.get((group, choice), [])])
            assert isinstance(config, RunConfig)
            if (group in ("model", "dataset") and (group, choice) not in OPEN) or group in ("protocol", "tracker"):
                assert getattr(config, group).name == choice
            if group == "measure":
                assert config.measure["name"] == choice


@pytest.mark.parametrize(("group", "schema"), [("model", ModelConfig), ("dataset", DatasetConfig)])
def test_every_key_of_a_yaml_is_a_field_of_its_type(group, schema, subtests):
    for choice in choices(group):
        with subtests.test(choice):
            content = OmegaConf.load(config_dir() / group / f"{choice}.yaml")
            inherits = "defaults" in content
            content.pop("defaults", None)
            merged = OmegaConf.merge(OmegaConf.structured(schema), content)
            assert inherits or (group, choice) in OPEN or merged.name == choice
            if not inherits and (group, choice) not in OPEN:
                assert OmegaConf.missing_keys(merged) == set()


def test_every_module_s_yaml_says_where_it_goes_and_composes_to_its_entry(subtests):
    """That an entry has every option of its class, tests/modules/test_defaults.py says. Only `make test-all` has Hydra compose them all."""
    for number, module in enumerate(choices("modules")):
        with subtests.test(module):
            first_line, second = (config_dir() / "modules" / f"{module}.yaml").read_text(encoding="utf-8").splitlines()[:2]
            assert (first_line[:19], second[:2]) == ("# @package modules.", "# ")
            name, entry = module_entry(module)
            assert all(isinstance(built, RuntimeModule) for built in build_modules({name: entry}))
            if thinning.whole or number % 10 == 0:
                config = compose([f"modules=[{module}]", "protocol=all"])
                assert config.modules == {name: entry}
                assert config.label == f"far-gpt2 | python-source | {name.replace('quicksilver', 'predicted_kv')} | all"


@pytest.mark.parametrize(("name", "more"), [("predicted_kv", []), ("predicted_kv_50", []), ("predicted_kv", ["save=0.6"])])
def test_predicted_kv_is_the_same_run_as_by_its_old_name(name, more):
    names = (name.replace("predicted_kv", "quicksilver"), name)
    options = ([f"modules.{one.removesuffix('_50')}.{word}" for word in more] for one in names)
    old, new = (compose([f"modules=[{one}]", "protocol=continuation", *words]) for one, words in zip(names, options, strict=True))
    assert old.identity() == new.identity()
    assert new.label == "far-gpt2 | python-source | predicted_kv | continuation"


def test_modules_is_a_list_and_later_words_reach_into_it():
    words = ["modules.halting.tau_drift=[1,2]", "modules.halting.full_ids=[3,5]", "modules.kv_skipping.tau_kv=p95"]
    modules = compose(["modules=[kv_skipping,halting]", *words]).modules
    assert set(modules) == {"halting", "kv_skipping"}
    assert (modules["halting"]["tau_drift"], modules["kv_skipping"]["tau_kv"]) == ([1, 2], "p95")
    assert compose([]).modules == {}
    assert list(build_modules(modules)[0].full_ids) == [3, 5]
    assert type(modules["halting"]) is dict  # plain python: a list of OmegaConf would surprise the module


def test_the_folders_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("QUICKSILVER_DATA", "/somewhere")
    monkeypatch.setenv("QUICKSILVER_RESULTS", "/elsewhere")
    assert (compose([]).data.root, compose([]).results_dir) == ("/somewhere", "/elsewhere")
    assert compose(["data.root=/here"]).data.root == "/here"
    monkeypatch.delenv("QUICKSILVER_DATA")
    assert compose([]).data.root is None


MISTAKES = {
    "model=gpt2-larg": ["model=gpt2-larg", "Did you mean gpt2-large", "Choices: far-gpt2, far-llama, folder, gpt2,"],
    "modules=[haltin]": ["there is no such module", "Did you mean halting"],
    "measure=": ["measure= names nothing", "Choices: ", "default, "],
    "modle=gpt2": ["modle: there is no such key", "model"],
    "protocol.window_token=3": ["Did you mean protocol.window_tokens"],
    "protocol.window_tokens=abc": ["protocol.window_tokens=abc: needs a whole number"],
    "measure.latency.enabled=maybe": ["measure.latency.enabled=maybe: needs true or false"],
    "measure.latency=true": ["measure.latency=true", "measure.latency.enabled=true"],
    "measure.latency=3": ["measure.latency=3 is no measurement", "_target_"],
    "measure.latency.warmup=abc": ["measure.latency.warmup=abc: needs a whole number"],
    "measure.latency.repeat=9": ["Did you mean measure.latency.repeats"],
    "+measure.latency.repeat=9": ["Latency has no such option", "Did you mean repeats"],
    "measure.quality=null": ["measure.quality", "cannot be switched off"],
    "+measure.x._target_=subprocess.Popen": ["measure.x._target_=subprocess.Popen is not imported: it is no Measurement class"],
    "measure.batch_windows=some": ["measure.batch_windows=some: needs a whole number"],
    "model.dtype=null": ["model.dtype=null: needs a value"],
    "model.dtype=float3": ["Did you mean float32", "bfloat16"],
    "dataset.part=validation": ["dataset.part=validation", "test, calibration"],
    "dataset.task.examples=40": ["dataset.task.examples=40: the dataset python-source has no task", "dataset=sst2"],
    "+dataset.task.examples=40": ["+dataset.task.examples=40: the dataset python-source has no task"],
    "dataset.task={examples:40}": ["the dataset python-source has no task"],
    "dataset=sst2 dataset.task.examples=40 dataset.tagger.name=auto": [
        "dataset.tagger.name=auto: the dataset sst2 has no tagger"
    ],
    "execution=maskd": ["Did you mean masked"],
    "dataset.windows=0": ["dataset.windows=0 is out of range: at least 1"],
    "measure.latency.repeats=2": ["measure.latency.repeats=2 must be a whole number of at least 3"],
    "seed=-1": ["seed=-1 is out of range"],
    "seed.x=1": ["seed is a value, not a section"],
    "model=folder": ["model.name has no value"],
    "dataset=file": ["dataset.files.test has no value", "dataset=file needs dataset.files.test="],
    "execution=masked": ["has no latency worth a record", "measure.latency.enabled=false"],
    "+nonsense=1": ["nonsense: there is no such key"],
    "+model.nonsense=1": ["nonsense", "model"],
    "modules.halting.tau_drift=1": ["the module halting is not selected", "modules=[halting]"],
    "modules.haltin.tau_drift=1": ["there is no module haltin", "Did you mean halting"],
    "results_dir=": ["results_dir is empty"],
    "decision_layers=[]": ["decision_layers=[]: give one or more layers"],
    "decision_layers=[-1]": ["decision_layers=[-1]: "],
    "measure=quick measure.energy.enabled=true": ["measure.energy.country_iso_code has no value", "DEU"],
    "measure=energy measure.energy.window_s=0.2": ["measure.energy.window_s=0.2", "at least 1"],
    "measure=energy measure.energy.rounds=1": ["measure.energy.rounds=1", "at least 2"],
    "measure=deployment protocol.window_tokens=32": ["measure.deployment.prompt_tokens=256", "window_tokens=32"],
    "measure=components execution=masked": ["execution=masked", "measure.components.enabled=false"],
    "model.parallel=tensor": ["model.parallel=tensor: measure.null_control is of one process alone", "measure=ranks"],
    "model.parallel=pipeline measure=ranks": ["model.parallel=pipeline", "tensor"],
    "model.parallel=tensor measure=ranks records=checked": ["records=checked"],
}


MODULE_MISTAKES = {
    "modules.halting.tau_drift=abc": ["modules.halting", "tau_drift='abc' is not a number"],
    "modules.halting.tau_drift=-1": ["tau_drift=-1", "out of range"],
    "modules.halting.tau_drif=1": ["modules.halting.tau_drif: there is no such key", "Did you mean modules.halting.tau_drift"],
    "+modules.halting.tau_drif=1": ["Halting has no such option", "Did you mean tau_drift"],
    "modules.halting.window=[0.9,0.1]": ["window=[0.9, 0.1]"],
    "modules.halting.resume_layers=many": ["resume_layers='many'"],
    "modules.halting.signal=drifd": ["drifd", "drift"],
    "modules.halting=3": ["modules.halting=3 is no module", "_target_"],
    "modules.halting._target_=nowhere.Halting": ["nowhere.Halting cannot be imported"],
    "modules.halting._target_=quicksilver.modules.shuffled": ["is not a class"],
}


@pytest.mark.parametrize("word", [*MISTAKES, *MODULE_MISTAKES])
def test_a_mistake_is_one_message_that_says_what_to_write(word):
    with refused_in_a_line(*(MISTAKES | MODULE_MISTAKES)[word]) as caught:
        build_modules(compose([*(["modules=[halting]"] if word in MODULE_MISTAKES else []), *word.split()]).modules)
    assert "hydra" not in str(caught.value).lower()


@pytest.mark.parametrize("experiment", first(choices("experiment"), 3))
def test_a_sweep_here_is_the_sweep_that_hydra_runs(experiment):
    jobs = sweep_jobs(experiment)
    cfg = OmegaConf.load(config_dir() / "experiment" / f"{experiment}.yaml")
    words = [f"{key}={values}" for key, values in cfg.hydra.sweeper.params.items()]
    (theirs,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)
    assert [list(job[1:]) for job in jobs] == theirs
    assert cfg.hydra.mode == "MULTIRUN"
    configs = [compose(job) for job in jobs]
    assert len({repr(config.identity()) for config in configs}) == len(jobs) > 1
    assert len({repr(config.dense().identity()) for config in configs}) == 1  # one dense run serves them all
    with pytest.raises(ConfigError, match="no such experiment. Did you mean"):
        sweep_jobs(experiment + "s")


def test_what_is_no_part_of_an_identity():
    assert compose([]).identity() == compose(["dataset.part=calibration"]).identity()  # the text's own digest tells them apart
    words = ["modules=[halting]", "seed=3", "execution=decide", "modules.halting.tau_drift=p10"]
    assert compose(words).dense().identity() == compose([]).dense().identity()  # all modules share their dense run


def test_an_installed_package_finds_its_configs_inside_itself(tmp_path, monkeypatch):
    import quicksilver.runs.choices as module

    inside = tmp_path / "site-packages" / "quicksilver"
    (inside / "conf").mkdir(parents=True)
    (inside / "conf" / "run.yaml").write_text("")
    monkeypatch.setattr(module, "__file__", str(inside / "runs" / "choices.py"))
    assert config_dir() == inside / "conf"
    (inside / "conf" / "run.yaml").unlink()
    with pytest.raises(ConfigError, match="install quicksilver again"):
        config_dir()


def test_defaults_are_filled_in_where_no_folder_of_the_path_has_the_package(tmp_path, monkeypatch):
    """As with an editable install and a command that was typed in another folder."""
    expected = module_entry("halting")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not (Path(place) / "quicksilver").is_dir()])
    assert module_entry("halting") == expected
    assert len(expected[1]) > 10


# --- composing many runs ----------------------------------------------------------------------------------------------------------
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
ENTRIES = [[f"modules=[{name}]"] for name in (choices("modules") if thinning.whole else ())]
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


def test_what_hydra_reads_stays_and_a_template_needs_no_quotes_of_its_own():
    read = ["model=gpt2", "modules=[halting,kv_skipping]", "seed=1,2", "a.b={x:1}", "word", "~modules", "x=[é]"]
    assert quoted(read) == read
    for template in ("{sentence} It was", "{premise}\n{hypothesis}", "{text}", "{choices[0]}: it's {label}?"):
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
    with refused_in_a_line():
        compose(["modules=[haltin]", "modules.haltin.tau_drift=3"])


# --- every key of a run, and public calls, × values of the wrong kind: an error of one line, or a value that may stand there --------
MODULES = ("halting_attention", "kv_skipping", "token_fusion", "adaptive_quantization")
WRONG_VALUES: list[Any] = ["no", "ü", "0.2", "p101", math.nan, -1, -0.5, True, 10**20, ["x"], {"a": 1}, [[]]]
TEXTS = {
    "name", "path", "revision", "adapter", "test", "calibration", "id", "config", "text_field", "project", "root", "results_dir",
    "country_iso_code",
}  # fmt: skip


def base() -> DictConfig:
    words = (f"modules=[{','.join(MODULES)}]", "model=reference-gpt2", "protocol=continuation")
    return composed(quoted(words))


def leaves(node: Any, key: str = "") -> list[str]:
    if not OmegaConf.is_dict(node):
        return [key]
    return [leaf for name in node for leaf in leaves(node._get_node(name), f"{key}.{name}" if key else str(name))]


def refusal(config: DictConfig, key: str, value: Any) -> str | None:
    """What is said of the value; None: it is accepted."""
    changed = config.copy()
    try:
        OmegaConf.update(changed, key, value, merge=False)
        run = run_config(changed, (f"{key}={value}",))
        Protocol(**dataclasses.asdict(run.protocol))
        build_modules(run.modules)
    except ConfigError as error:
        return str(error)
    except OmegaConfBaseException as error:
        return str(error).splitlines()[0]  # composing explains it (`explain`); here it was set past Hydra
    return None


def test_no_wrong_value_of_any_key_gets_through() -> None:
    config = base()
    keys = [key for key in leaves(config) if not key.startswith("hydra") and ".enabled" not in key and "_target_" not in key]
    assert len(keys) > 130
    tried = [(key, value) for key in keys for value in WRONG_VALUES]
    if not thinning.whole:
        tried = random.Random(0).sample(tried, 60)
    found = []
    for key, value in tried:
        said, last = refusal(config, key, value), key.split(".")[-1]
        if said is None:
            section = OmegaConf.select(config, key.rpartition(".")[0]) if "." in key else None
            idle = section is not None and section.get("enabled") is False
            if not (idle or (isinstance(value, bool | int | float | str) and last in TEXTS) or fits(config, key, value)):
                found.append(f"{key}={value!r} is accepted")
        elif "\n" in said:
            found.append(f"{key}={value!r}: {said}")
    assert not found


def fits(config: DictConfig, key: str, value: Any) -> bool:
    """Whether the value is of the kind that stands there: a flag for a flag, a number within its range for a number."""
    before = OmegaConf.select(config, key)
    if key.endswith("_ids"):  # a name of a set of tokens stands for their ids, once there is a tokenizer
        return value == ["x"]
    if key.endswith("tau_attention"):
        return value in (-1, -0.5)
    if key.startswith("measure.") and isinstance(before, bool) and value == "no":
        return True  # OmegaConf reads it as false
    return key == "measure.name" or (type(before) is type(value) and isinstance(value, bool | str))


def test_an_empty_place_is_refused_or_means_none() -> None:
    for key in ("results_dir", "model.path", "dataset.files.test", "data.root"):
        for value in ("", " "):
            said = refusal(base(), key, value)
            assert said is None or key in said


# --- public calls ---------------------------------------------------------------------------------------------------------------
WRONG_ARGUMENTS: list[Any] = ["0.2", "abc", None, float("nan"), -1, True, {}, object()]
CALLS: dict[str, Callable[[Any], object]] = {
    "from_preset of a share": lambda value: Halting.from_preset(tiny.load("gpt2"), save=value),
    "from_preset of a length": lambda value: Halting.from_preset(tiny.load("gpt2"), save=0.2, prompt_tokens=value),
    "from_preset of a model": lambda value: Halting.from_preset(value, save=0.2),
    "a model": lambda value: apply(value, []),
    "an execution": lambda value: apply(tiny.load("gpt2"), [], execution=value),
    "a trace": Replay,
    "a file": Trace.load,
    "a schedule": lambda value: Schedule(value, 0.1, 3),
    "a protocol": Protocol,
    "a length": lambda value: Protocol("all", window_tokens=value),
    "overrides": compose,
    "an override": lambda value: compose([value]),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_of_the_wrong_kind_is_refused_in_one_line(call: str) -> None:
    for value in WRONG_ARGUMENTS:
        with refused_in_a_line(kind=QuickSilverError):
            CALLS[call](value)
