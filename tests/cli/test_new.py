"""`quicksilver new` writes files that work at once, and changes none that are there."""

import sys

import pytest

from quicksilver.cli import main as console
from quicksilver.cli.commands.new import FILES


@pytest.mark.filterwarnings("error")
def test_what_it_writes_passes_its_own_tests_is_run_and_is_not_written_over(
    tmp_path, capsys, prints, refused, words, monkeypatch
):
    for kind in FILES:
        assert f"test_{'table_' * (kind == 'table')}my_{kind}.py" in prints("new", kind, f"my_{kind}", f"folder={tmp_path}").out
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the present folder
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        ran = 0
        for path in sorted(tmp_path.glob("test_*.py")):
            names = {"__file__": str(path)}
            exec(compile(path.read_text(), path, "exec"), names)
            ran += len([test() for name, test in names.items() if name.startswith("test_")])
        assert ran >= 6
    # As the command `quicksilver` starts, which has the present folder not on its path: options of the new class are keys.
    for name in ("my_module", "my_family"):
        sys.modules.pop(name)
    mine = ["--config-dir", ".", *words, "protocol=continuation", "measure=sweep"]
    assert " | my_module | " in prints("run", *mine, "modules=[my_module]", "modules.my_module.share=0.1").out
    assert "Did you mean my_module" in refused("run", *mine, "modules=[my_modul]")
    assert "Did you mean modules.my_module.share" in refused("run", *mine, "modules=[my_module]", "modules.my_module.shar=5")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for wrong in ("module my_module", "dataset my_dataset", "thing x", "module", "module No-Name", "module a b"):
        assert console.main(["new", *wrong.split(), f"folder={tmp_path}"]) == 2
    assert {path: path.read_bytes() for path in before} == before
    assert "is there already" in capsys.readouterr().err
    assert f"  cd '{tmp_path / 'a folder'}'\n" in prints("new", "module", "there", f"folder={tmp_path / 'a folder'}").out
    assert "  cd " not in prints("new", "module", "here").out  # it is the present folder
