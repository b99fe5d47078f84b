"""`quicksilver budget`: several budgets in one word, a report of each, and a list of dials where nothing is asked."""

from __future__ import annotations

from harness_world import make_world

from quicksilver.cli import main as console
from quicksilver.runs import dials as budgets
from quicksilver.runs.dials import Dial, dials

SHARE = Dial("share", ("modules=[halting_attention]", "protocol=continuation"), ("modules.halting.halted_share",), 0.05, 0.9)


def test_it_sets_freezes_and_reports(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(budgets, "load_dial", lambda name: SHARE)
    results = tmp_path / "results"
    asked = ["save=[20,94]", "of=prompt_nominal", "halvings=2", "transfer=file", *make_world(tmp_path), "protocol.batch_size=5"]
    assert (
        console.main(["budget", *asked, f"results_dir={results}"]) == 1
    )  # the second cannot be met; the first is reported all the same
    out, err = capsys.readouterr()
    assert "cannot save 94% of prompt nominal FLOPs" in err
    assert "--config-dir" in out
    assert max(map(len, out[out.index("Budgets:") :].partition("Written:")[0].splitlines())) <= 150
    lines = [line.split() for line in out.splitlines() if line.startswith(("calibrating ", "test ", "file "))]
    assert [line[0] for line in lines] == ["calibrating", "test", "file"]
    assert {line[1] for line in lines} == {lines[0][1]}  # one position of the dial for all
    assert lines[0][4] == "yes"
    assert (results / "tables" / "budget-share-tiny-file.csv").is_file()
    assert (results / "budget" / "modules" / "share_save20_prompt_nominal.yaml").is_file()


def test_asked_for_nothing_it_lists_the_dials(capsys):
    assert console.main(["budget"]) == 2
    out, err = capsys.readouterr()
    assert [name for name in dials() if name not in out] == []
    assert "save=30" in err
