"""Run the notebooks and keep their outputs, without what differs from run to run: times, counters, the machine's own paths.

    python scripts/run_notebooks.py             all of notebooks/, written back
    python scripts/run_notebooks.py --check     run them, write nothing; exit code 1 if one fails

Needs nbclient and ipykernel: pip install 'quicksilver-lm[notebooks,plots]'.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
_KEPT = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}, "language_info": {"name": "python"}}


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, cleaned."""
    notebook = nbformat.read(path, as_version=4)
    quiet = ["--IPKernelApp.log_level=40"]  # it warns of its local ports
    where = {"metadata": {"path": str(path.parent)}}
    return cleaned(NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where, extra_arguments=quiet).execute())


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without execution times, and without what libraries log; temporary folders by one name."""
    notebook.metadata = nbformat.from_dict(_KEPT)
    for number, cell in enumerate(notebook.cells):
        cell |= {"metadata": nbformat.from_dict({}), "id": f"cell-{number:02d}"}
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
            for part in (cell, *(one for one in cell.outputs if "execution_count" in one)):
                part.execution_count = None
            for output in (one for one in cell.outputs if "text" in one):
                output.text = re.sub(r"/\S*/quicksilver-\w+", "/tmp/quicksilver", output.text)
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the notebooks and keep their outputs.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("notebooks", nargs="*", type=Path, help="some only")
    arguments = parser.parse_args()
    if missing := [str(path) for path in arguments.notebooks if not path.is_file()]:
        sys.exit(f"run_notebooks: there is no {', '.join(missing)}. Give notebooks such as {FOLDER.name}/NAME.ipynb.")
    failed = 0
    for path in arguments.notebooks or sorted(FOLDER.glob("*.ipynb")):
        try:
            notebook = run(path)
        except CellExecutionError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            failed = 1
            continue
        if not arguments.check:
            nbformat.write(notebook, path)
        print(f"{path.name}: {len(notebook.cells)} cells")
    return failed


if __name__ == "__main__":
    sys.exit(main())
