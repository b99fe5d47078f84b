"""What makes no sense is one line that says what would, exit code 2 and nothing on stdout: of every command."""

import pytest
from saying import unsaid
from thinning import first

COMMANDS = [
    ("reproduc", ["no command reproduc", "Did you mean reproduce"]),
    ("list claims", ["claims", "table, figure"]),
    ("list sweep depth", ["There is no sweep depth", "quicksilver run -m"]),
    ("run -m --limit=3", ["--limit=3: write limit=VALUE"]),
    *((f"{word} results_dir=/nowhere", ["there is no such folder"]) for word in ("list sweep", "show", "status")),
    ("run model=folder model.name=x model.path=/nowhere", ["there is no folder /nowhere"]),
    ("run model=gpt2 model.path=/nowhere plan=true", ["there is no config.json in /nowhere"]),
    ("run modules=[halting] modules.halting.tau_drift=p10,p20", ["several values", "quicksilver run -m"]),
    ("run modules=[halting] modules.halting.tau_drift=p10,p20 plan=true", ["several values", "quicksilver run -m"]),
    ("run dataset.windows=[4,8]", ["needs a whole number", "quicksilver run -m dataset.windows=4,8"]),
    ("run modules=[halting] modules.halting.tau_drift=[p10,p20]", ["quicksilver run -m modules.halting.tau_drift=p10,p20"]),
    (
        "run -m modules=[halting] seed=0,1 hydra/launcher=slurm",
        ["hydra/launcher=slurm", "Choices: basic, joblib", "submitit_slurm"],
    ),
    ("run modules=[mine]", ["there is no such module", "--config-dir FOLDER"]),
    ("run --config-dir conf/protocol modules=[mine]", ["there is no such module", "conf/protocol has no folder modules/"]),
    ("reproduce table99", ["There is no table 99"]),
    ("run modules=[halting,halting]", ["names halting twice"]),
    ("fit layers=[99]", ["layers=[99]", "from 0 to"]),
    ("fit layers=[9] dataset=books", ["dataset=books", "text=[…]"]),
    *(
        (f"fit lens=true {word}", [f"{word} is of translators"])
        for word in ("control=mean", "distill=1", "mlp=[1]", "layers=[9]")
    ),
    ("fit control=nosuch", ["control='nosuch' is not one of shuffled, mean"]),
    ("fit text=[]", ["text=[] names no text"]),
    ("dev fly", ["fly", "keep"]),
    ("dev keep model=gpt2", ["model=gpt2", "quicksilver dev keep takes results_dir=FOLDER"]),
    ("dev completion fish", ["bash, or zsh"]),
    ("dev benchmark only=[everything]", ["only=everything", "break_even"]),
    ("claims --model gpt2", ["'--model' is not key=value"]),
    ("budget --config-dir /nowhere save=0.3", ["--config-dir /nowhere: there is no such folder"]),
    ("budget --config-dir", ["--config-dir : there is no such folder"]),
    ("budget sav=30", ["sav=30", "Did you mean save", "halvings"]),
    ("budget save=30", ["save[0]=30", "give save=0.3 for 30%"]),
    ("calibrate text=/no/such.txt", ["/no/such.txt"]),
    ("calibrate modules=[halting]", ["modules=[halting]", "dense"]),
    ("calibrate last_queries=4", ["last_queries=4", "add kv=true"]),
    *(
        (f"{line} output=/dev/null/x{file}", ["output=/dev/null/x: nothing can be written there"])
        for line, file in (
            ("calibrate", ""),
            ("fit", ""),
            ("schedule save=0.4 translators=[x]", "/y.yaml"),
            ("budget save=0.3", "/y.yaml"),
        )
    ),
    ("calibrate protocol.window_tokens=1025", ["protocol.window_tokens=1025", "context of 1024 tokens"]),
    ("fit protocol.window_tokens=1025 text=[python-docs]", ["protocol.window_tokens=1025", "context of 1024 tokens"]),
    ("fit protocol.window_tokens=256 text=[python-docs] distill=1", ["protocol.prompt_tokens=448", "at most 254"]),
    ("demo model=gpt2-large", ["reference-gpt2, reference-llama"]),
    ("demo text=short", ["text has"]),
    ("demo new_tokens=5000", ["new_tokens=5000: give at most 992"]),
    ("demo save=0.97", ["saves at most"]),
    ("reproduce", ["table 11", "all"]),
    ("reproduce table", ["which table"]),
    ("reproduce table model=gpt2", ["which table"]),
    ("reproduce table 11 gpt2", ["'gpt2' is not key=value"]),
    ("reproduce table 99", ["no table 99", "Tables: 1, 2/8/12, 3, ", " 11, "]),
    ("reproduce table 22", ["no table 22 in", "There is a figure 22.", "Tables: 1, "]),
    ("reproduce table 11 model=gpt5", ["model=gpt5", "reference-gpt2", "llama2-7b"]),
    ("reproduce table 4 dataset.task.examples=40", ["dataset.task.examples=40: the dataset python-source has no task"]),
    ("time table 5", ["table 5 has no times"]),
    ("reproduce table 11 protocol=all", ["protocol=all", "quicksilver run"]),
    ("reproduce table 11 modules.halting.tau_drift=p10", ["modules.halting.tau_drift=p10", "quicksilver run"]),
    ("reproduce table 11 dataset.windows=4", ["dataset.windows=4", "at least 8"]),
    ("reproduce table 11 measure.latency.repeat=4", ["measure.latency.repeat", "measure.latency.repeats"]),
]


@pytest.mark.parametrize(("line", "said"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_command_that_makes_no_sense(line, said, refused, tmp_path, monkeypatch):
    monkeypatch.setenv("QUICKSILVER_RESULTS", str(tmp_path))
    assert unsaid(refused(*line.split()), *said) == []
    assert not (tmp_path / "runs").exists()


DEPTHS = ["modules=[static_depth]", "protocol=continuation", "measure=sweep", "dataset.windows=3"]
SWEPT, DRAWN = "modules.static_depth.depth=0.2,0.5", "modules.static_depth.depth=interval(0.1,0.9)"
ONE = [
    ("seed=x", "needs a whole number"),
    ("model", "'model' is not an override"),
    ("3=4", "'3=4' is not an override"),
    ("--config-name=other", "--config-name is not supported"),
    ("--verbose", "unrecognized arguments: --verbose"),
    ("limit=3", "keys of a sweep"),
]
SWEEPS = [
    ("shard=true", "shard=true: one process has nobody to share windows with"),
    ("shard=true hydra/launcher=joblib workers=1 measure=default", "cannot be shared (measure.latency reads a clock)"),
    ("shard=true hydra/launcher=joblib records=checked", "cannot be shared (model.parallel=None, records=checked)"),
    ("name=a/b", "the name of a sweep is a folder"),
    ("limit=0", "limit=0 must be a whole number of at least 1"),
    ("seed=interval(0,1)", "a sweep needs single values"),
    ("sead=1", "Did you mean"),
    ("limit=x", "must be a whole number"),
    ("results_dir=a,b", "one results folder"),
    ("--config-dir=/not/there", "there is no such folder"),
    ("hydra.searchpath=[file:///not/there]", "takes a list of folders that are there"),
    ("hydra.searchpath=[", "takes a list of folders that are there"),
    ("model.path=/not/there", "there is no folder"),
]
OPTUNA = [
    ("", "needs name="),
    ("name=a +hydra.sweeper.objectives.kl=minimize", "there is no kl"),
    ("name=a hydra.sweeper.sampler=tpf", "Did you mean tpe"),
    ("name=a hydra.sweeper.trials=0", "out of range"),
    ("name=a modules.static_depth.depth=0.5", "draws nothing"),
    ("name=a hydra.sweeper.objectives.kl_nats=low", "minimize or maximize"),
    ("name=a hydra.sweeper.budget={ppl:3}", "ppl is none of the objectives"),
    ("name=a hydra/launcher=joblib", "one run after the other"),
    ("name=a modules.static_depth.depth=interval(0.9,0.1)", "interval(0.9,0.1): "),
    ("name=a model.path=/not/there", "there is no folder"),
]


@pytest.mark.parametrize(("before", "word", "said"), [
    *(([], *row) for row in ONE),
    *first(((["-m", *DEPTHS, SWEPT], *row) for row in SWEEPS), 7),
    *first(((["-m", "hydra/sweeper=optuna", *DEPTHS, DRAWN], *row) for row in OPTUNA), 5),
])  # fmt: skip
def test_a_run_or_a_sweep_that_makes_no_sense(before, word, said, words, refused, tmp_path):
    assert said in refused("run", *words, *before, *word.split())
    assert not (tmp_path / "results" / "runs").exists()
    assert not (tmp_path / "results" / "sweeps").exists()
