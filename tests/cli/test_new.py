"""`quicksilver new` writes files that work at once, and changes none that are there."""

import os
import subprocess
import sys
from pathlib import Path

from quicksilver.cli import main as console
from quicksilver.cli.commands.new import FILES

ROOT = Path(__file__).resolve().parents[2]


def test_what_it_writes_passes_its_own_tests_and_is_not_written_over(tmp_path, capsys, prints, monkeypatch):
    for kind in FILES:
        assert f"test_{'table_' * (kind == 'table')}my_{kind}.py" in prints("new", kind, f"my_{kind}", f"folder={tmp_path}").out
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "."]
    done = subprocess.run(
        words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # As the command `quicksilver` starts, which has the present folder not on its path: options of the new class are keys.
    words = [sys.executable, "-P", "-m", "quicksilver", "run", "--config-dir", ".", "modules=[my_module]"]
    swept = [*words, "modules.my_module.share=0.1", "protocol=continuation", "plan=true"]
    done = subprocess.run(swept, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    for refused in (["module", "my_module"], ["thing", "x"], ["module"], ["module", "No-Name"], ["module", "a", "b"]):
        assert console.main(["new", *refused, f"folder={tmp_path}"]) == 2
    assert {path: path.read_bytes() for path in before} == before
    assert "is there already" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert "  cd " not in prints("new", "module", "here").out  # it is the present folder
