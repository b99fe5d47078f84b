"""The entry point: every command is a class, light until it works, completed by the shell, and an exit code for every way to stop."""

import os
import signal
import subprocess
import sys

import pytest
from saying import unsaid

from quicksilver.cli import main as console
from quicksilver.cli.arguments import Command
from quicksilver.cli.commands.dev import Benchmark, candidates
from quicksilver.cli.commands.look import GROUPS
from quicksilver.records.store import Store
from quicksilver.runs.choices import choices

HEAVY = ("torch", "transformers", "pandas", "matplotlib", "datasets")


def test_a_fault_in_a_person_s_own_file_is_its_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "of_mine.py").write_text("def decide(tokens):\n    tokens.hlt()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import of_mine  # type: ignore[import-not-found]

    assert console._guarded(lambda: of_mine.decide(())) == 1
    said = capsys.readouterr().err
    assert "of_mine.py, line 2, in decide: AttributeError: 'tuple' object has no attribute 'hlt'\n  tokens.hlt()" in said


@pytest.mark.parametrize("name", console.COMMANDS)
def test_every_command_is_named_with_what_it_does_and_its_help_names_every_key(name, prints):
    below, _, word = name.rpartition(" ")
    assert f"  {name} " in prints(*below.split(), "--help").out
    command, summary = console.load(name), console.COMMANDS[name][1]
    assert 20 < len(summary) < 120
    assert command.main is not Command.main
    assert word.replace("_", "") == command.__name__.lower()
    if name != "run":  # Hydra's own, which lists the choices
        shown = prints(*name.split(), "--help").out
        assert shown.startswith(summary)
        assert unsaid(shown, f"quicksilver {name}", *(f"  {key}=" for key in command.own_keys())) == []


def test_an_empty_word_is_no_command(refused):
    assert "There is no command " in refused("")


LIGHT = ["--help", "list", "budget --help", "reproduce table 99", "budget sav=3", "run model=gpt5", "runn"]


def test_help_and_refusals_load_nothing_heavy():
    code = f"import sys; from quicksilver.cli.main import main\nfor line in {LIGHT!r}:\n  main(line.split())\n"
    code += f"  print('loaded', *set({HEAVY!r}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert [line for line in done.stdout.splitlines() if line.startswith("loaded")] == ["loaded"] * len(LIGHT)


def test_the_list_has_every_choice_once_and_peers_apart(prints):
    named = [line.split(":")[0].split() for line in prints("list").out.splitlines()]
    for kind, group in GROUPS.items():
        there = [name for one, name in named if one == kind or (group == "modules" and one in ("module", "peer"))]
        assert sorted(there) == choices(group)
    assert {("peer", "prompt_lookup"), ("module", "halting"), ("table", "11")} <= set(map(tuple, named))
    dials = prints("budget").out
    assert unsaid(dials, "halting_attention", "Say what to hold: quicksilver budget save=0.3, or cost=1 (make budget") == []


def test_a_reader_that_has_seen_enough_meets_no_traceback():
    pipe = f"{sys.executable} -m quicksilver list | head -n 1; echo ${{PIPESTATUS[0]}}"
    shown = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True)
    assert shown.stderr == ""
    assert shown.stdout.startswith("  table 1: ")
    # A reader that is gone before the first line: nothing can be written at all.
    closed, end = os.pipe()
    os.close(closed)
    gone = subprocess.run([sys.executable, "-m", "quicksilver", "list"], stdout=end, stderr=subprocess.PIPE, text=True)
    os.close(end)
    assert (gone.returncode, gone.stderr) == (141, "")


@pytest.mark.parametrize(("sent", "code", "said"), [("SIGTERM", 143, "Terminated"), ("SIGINT", 130, "Interrupted")])
def test_a_signal_is_one_line_an_exit_code_and_no_draft(tmp_path, sent, code, said, monkeypatch, prints):
    class Stopped(Command):
        def main(self) -> int:
            with Store(tmp_path).draft("0" * 20) as draft:
                assert draft.folder.is_dir()
                os.kill(os.getpid(), getattr(signal, sent))
                return 0

    # A parent in the background has it ignored, and children inherit that.
    before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(console, "load", lambda name: Stopped)
    err = prints("stopped", code=code).err
    assert err.count("\n") == 1
    assert said in err
    assert list(Store(tmp_path).drafts.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before[0]  # the owner's again
    signal.signal(signal.SIGINT, before[1])


def test_the_processes_of_torchrun_do_not_make_the_same_runs_twice(monkeypatch, prints):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for words in (["run", "results_dir=/not/there"], ["run", "-m", "seed=0,1"], ["reproduce", "table", "11"]):
        said = prints(*words, code=2).err
        assert "torchrun started 2 processes" in said
        assert said.count("\n") == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "torchrun" not in prints("run", "model.path=/not/there", "model=folder", "model.name=mine", code=2).err


# --- completion: a shell asks for the words that may end a line, and every word it gets is one that the command takes -----------------
@pytest.mark.parametrize(("line", "found"), [
    ("quicksilver ", set(console.commands())),
    ("quicksilver re", {"report", "reproduce"}),
    ("quicksilver reproduce ", {"table", "figure", "all"}),
    ("quicksilver list f", {"figure"}),
    ("quicksilver dev re", {"readme"}),
    ("quicksilver reproduce table 1", {"1", "10", "11", "12", "13"}),
    ("quicksilver budget sa", {"save="}),
    ("quicksilver demo ", {"save=", "text=", "new_tokens=", "model=", "svg="}),
    ("quicksilver run model=gpt2", {f"model={name}" for name in choices("model") if name.startswith("gpt2")}),
    ("quicksilver claims dataset=wiki", {f"dataset={name}" for name in choices("dataset") if name.startswith("wiki")}),
    ("quicksilver run modules=[halting] modules.halting.tau_", {"modules.halting.tau_drift=", "modules.halting.tau_entropy="}),
    ("quicksilver run modules=[halting,kv_", {f"modules=[halting,{n}" for n in choices("modules") if n.startswith("kv_")}),
    ("quicksilver run nothing_like_that", set()),
    ("quicksilver nothing ", set()),
])  # fmt: skip
def test_what_may_end_a_line(line, found):
    assert set(candidates(line)) == found


def test_the_parts_of_the_benchmark_are_keys_of_its_command():
    command = Benchmark.parsed(["lengths=--repeats 5", "only=[lengths]"], "").command()
    assert command[-3:] == ["--only", "lengths", "--lengths=--repeats 5"]
    assert Benchmark.parsed(["full=true"], "").command()[-1] == "--full"


def test_a_command_of_runs_completes_its_own_keys_and_those_of_a_run(prints):
    assert {"save=", "dial=", "model=", "dataset="} <= set(candidates("quicksilver budget save=0.3 "))
    assert "compdef" in prints("dev", "completion", "zsh").out


def test_bash_replaces_what_follows_the_last_equals_sign(tmp_path):
    command = tmp_path / "quicksilver"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m quicksilver "$@"\n')
    command.chmod(0o755)
    script = """eval "$(quicksilver dev completion bash)"
COMP_LINE="quicksilver run model=far-g"; COMP_POINT=${#COMP_LINE}; _quicksilver 2>/dev/null; echo "${COMPREPLY[@]}"
COMP_LINE="quicksilver budg"; COMP_POINT=${#COMP_LINE}; _quicksilver 2>/dev/null; echo "${COMPREPLY[@]}"
"""
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)
    assert found.stdout.splitlines() == ["far-gpt2", "budget"]
