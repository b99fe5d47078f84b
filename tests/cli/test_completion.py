"""Completion: a shell asks for the words that may end a line, and every word it gets is one that the command takes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quicksilver.cli import main as console
from quicksilver.cli.completion import candidates
from quicksilver.runs.choices import choices


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("quicksilver re", {"report", "reproduce"}),
        ("quicksilver reproduce ", {"table", "figure", "all"}),
        ("quicksilver list f", {"figure"}),
        ("quicksilver dev re", {"readme"}),
        ("quicksilver reproduce table 1", {"1", "10", "11", "12", "13"}),
        ("quicksilver budget sa", {"save="}),
        ("quicksilver demo ", {"save=", "text=", "new_tokens=", "model=", "svg="}),
        ("quicksilver run model=gpt2", {f"model={name}" for name in choices("model") if name.startswith("gpt2")}),
        ("quicksilver claims dataset=wiki", {f"dataset={name}" for name in choices("dataset") if name.startswith("wiki")}),
        (
            "quicksilver run modules=[halting] modules.halting.tau_",
            {"modules.halting.tau_drift=", "modules.halting.tau_entropy="},
        ),
        ("quicksilver run modules=[halting,kv_", {f"modules=[halting,{n}" for n in choices("modules") if n.startswith("kv_")}),
        ("quicksilver run nothing_like_that", set()),
        ("quicksilver nothing ", set()),
    ],
)
def test_what_may_end_a_line(line, found):
    assert set(candidates(line)) == found


def test_every_command_completes_its_own_keys():
    assert set(candidates("quicksilver ")) == set(console.commands())
    assert {"save=", "dial=", "model=", "dataset="} <= set(candidates("quicksilver budget save=30 "))


def test_zsh_has_a_script_too(capsys):
    assert console.main(["dev", "completion", "zsh"]) == 0
    assert "compdef" in capsys.readouterr().out


def test_bash_replaces_what_follows_the_last_equals_sign(tmp_path):
    command = tmp_path / "quicksilver"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m quicksilver "$@"\n')
    command.chmod(0o755)
    script = """eval "$(quicksilver dev completion bash)"
COMP_LINE="quicksilver run model=reference-g"; COMP_POINT=${#COMP_LINE}; _quicksilver 2>/dev/null; echo "${COMPREPLY[@]}"
COMP_LINE="quicksilver budg"; COMP_POINT=${#COMP_LINE}; _quicksilver 2>/dev/null; echo "${COMPREPLY[@]}"
"""
    found = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    )
    assert found.stdout.splitlines() == ["reference-gpt2", "budget"]
