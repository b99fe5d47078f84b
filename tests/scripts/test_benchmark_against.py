"""Two versions side by side: each process times the package it was given, what differs is told from noise, and no worktree is left."""

import json
import subprocess
from pathlib import Path

import benchmark_against as against
import pytest
from repository import git

TINY = ["--shape=tiny", "--layers=2", "--tokens=6", "--new-tokens=2", "--warmup=0", "--repeats=1"]


def rounds(old: float, new: float, again: float, n: int = 5) -> list[list[against.Times]]:
    return [[{"plain": {"prefill": ms + 0.001 * i, "decode": ms}} for ms in (old, new, again)] for i in range(n)]


@pytest.mark.parametrize(
    ("times", "verdict"),
    [((10.0, 12.0, 10.1), "slower"), ((10.0, 8.0, 10.1), "faster"), ((10.0, 12.0, 13.0), "no difference"), ((10.0, 10.0, 10.0), "no difference")],
)  # fmt: skip
def test_a_ratio_within_the_noise_of_the_revision_against_itself_is_no_difference(times, verdict):
    given = rounds(*times)
    for revision, _, _ in given:
        revision["fusion"] = revision["plain"]  # which this code lacks: it is not compared
    prefill, decode = against.compared(given)
    assert [(one["what"], one["phase"]) for one in (prefill, decode)] == [("plain", "prefill"), ("plain", "decode")]
    assert prefill["verdict"] == decode["verdict"] == verdict
    assert decode["ratio"] == pytest.approx(times[1] / times[0])
    assert decode["noise_floor"] == pytest.approx(times[2] / times[0] - 1)


@pytest.fixture
def repository(tmp_path) -> Path:
    """A clone with two commits: the second changed the file."""
    where = tmp_path / "clone"
    where.mkdir()
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "1"], ["commit", "-qam", "2"]):
        (where / "version").write_text(words[-1])
        git(where, *words)
    return where


def test_a_revision_is_there_for_as_long_as_it_is_needed(repository):
    with against.checked_out("HEAD~1", repository) as (there, commit):
        assert (there / "version").read_text() != (repository / "version").read_text()
        assert len(commit) == 40
    assert not there.exists()
    listed = subprocess.run(["git", "worktree", "list"], cwd=repository, capture_output=True, text=True, check=True).stdout
    assert len(listed.splitlines()) == 1
    with pytest.raises(against.AgainstError, match="no-such is no revision of"), against.checked_out("no-such", repository):
        pass


def test_every_pass_is_timed_with_the_package_that_was_asked_for(capsys):
    assert against.main([*TINY, "--package", str(against.ROOT)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["absent"] == {}
    assert set(answer["times"]) == set(against.MODULES)
    assert all(ms > 0 for times in answer["times"].values() for ms in times.values())
    assert against.main([*TINY, "--package", "/not/there"]) == 2
    assert "/not/there was to be timed, and Python found quicksilver in" in capsys.readouterr().err


def test_both_versions_take_turns_and_the_answer_is_written(repository, tmp_path, monkeypatch, capsys):
    asked = []

    def answer(package, options):
        asked.append(package)
        ms = 20.0 if package == repository else 10.0
        return {"times": {"plain": {"prefill": ms, "decode": ms}}, "absent": {"fusion": "TypeError: it has no such option"}}

    monkeypatch.setattr(against, "ROOT", repository)
    checked_out = against.checked_out
    monkeypatch.setattr(against, "checked_out", lambda revision: checked_out(revision, repository))
    monkeypatch.setattr(against, "one_process", answer)
    assert against.main(["HEAD~1", "--rounds=3", f"--output={tmp_path / 'against.json'}"]) == 0
    assert [package == repository for package in asked] == [False, True, False] * 3
    content = json.loads((tmp_path / "against.json").read_text())
    assert {(one["ratio"], one["verdict"]) for one in content["compared"]} == {(2.0, "slower")}
    assert len(content["rounds_ms"]) == 3
    shown = capsys.readouterr().out
    assert "slower" in shown
    assert "fusion: not compared" in shown


@pytest.mark.parametrize(
    ("words", "said"), [([], "say which revision"), (["no-such-revision"], "no-such-revision is no revision")]
)
def test_what_makes_no_sense_is_one_line(words, said, capsys):
    assert against.main(words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    with pytest.raises(SystemExit):
        against.main(["HEAD", "--rounds=2"])
    assert "rounds: 2: give a number of at least 3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_revision_is_timed_in_a_process_of_its_own():
    options = against.parsed("against", "", against.OPTIONS, TINY, None)
    with against.checked_out("HEAD") as (there, _):
        answer = against.one_process(there, options)
    assert answer["absent"] == {}
    assert set(answer["times"]) == set(against.MODULES)
