"""Name tables and figures, what a run can be made of, and sweeps.

quicksilver list                  every table and figure that `quicksilver reproduce` makes, then what a run can be made of
quicksilver list module           one kind: table, figure, model, dataset, module, peer, protocol, measure, experiment, budget
quicksilver list sweep            the sweeps of the results folder
quicksilver list sweep NAME       one of them: what is done, running, failed and waiting, and what was found so far

`quicksilver run -m …` makes a sweep; its name is the one given as name=…, or the one it prints. The same table is a page,
results/sweeps/NAME/index.html, which is written anew whenever a run begins or ends. Keys: results_dir, with sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quicksilver.cli.arguments import ResultsFolder, split
from quicksilver.cli.progress import width
from quicksilver.report.artefacts import artefacts, listing
from quicksilver.runs.choices import choices, config_dir
from quicksilver.runtime.errors import ConfigError

# Kind -> the folder of conf/ that has a file of each.
GROUPS = {
    "model": "model", "dataset": "dataset", "module": "modules", "peer": "modules", "protocol": "protocol", "measure": "measure",
    "experiment": "experiment", "budget": "budget",
}  # fmt: skip
KINDS = ("table", "figure", *GROUPS, "sweep")


def main(words: Sequence[str]) -> int:
    """Print the list; returns the exit code: 1 where a run of the sweep that is asked for failed.

    Raises:
        ConfigError: words that are no kind, or no such sweep.
    """
    kinds = [word for word in words if "=" not in word]
    keys = [word for word in words if "=" in word]
    if kinds[:1] == ["sweep"] and len(kinds) <= 2:
        options, rest = split(keys, ResultsFolder, "list sweep")
        if rest:
            raise ConfigError(f"{rest[0]}: list sweep takes results_dir=FOLDER and no other key.")
        return _sweeps(options.results_dir, *kinds[1:])
    unknown = [word for word in (*kinds, *keys) if word not in KINDS or word == "sweep"]
    if unknown:
        raise ConfigError(f"{unknown[0]}: quicksilver list takes {', '.join(KINDS)}, or nothing.")
    for kind in kinds or KINDS[:-1]:
        print(listed(kind))
    return 0


def listed(kind: str) -> str:
    """One line a name of this kind, with what its file says first."""
    if kind in ("table", "figure"):
        return listing([artefact for artefact in artefacts() if artefact.kind == kind])
    folder, lines = config_dir() / GROUPS[kind], []
    for name in choices(GROUPS[kind]):
        text = (folder / f"{name}.yaml").read_text(encoding="utf-8")
        if kind in ("module", "peer") and ("_target_: quicksilver.baselines" in text) != (kind == "peer"):
            continue
        said = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#") and "@package" not in line]
        lines.append(f"  {kind} {name}: {said[0] if said else 'see ' + str(folder / f'{name}.yaml')}")
    return "\n".join(lines)


def _sweeps(results_dir: Path | str, name: str | None = None) -> int:
    from quicksilver.report.sweep_status import Board
    from quicksilver.runs.sweep import Sweep, names

    for one in names(results_dir) if name is None else [name]:
        board = Board(Sweep.load(results_dir, one))
        print(board.headline(board.rows(most=50)) if name is None else board.text(width()))
        if name is not None:
            return 1 if any(state.state == "failed" for state in board.sweep.states()) else 0
    return 0
