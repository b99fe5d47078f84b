"""Build the W&B report of a project that quicksilver.report.wandb filled: the panels of the paper over the mirrored runs.

    python scripts/wandb_report.py                          into the project quicksilver of whoever is logged in
    python scripts/wandb_report.py entity=my-team project=mine results_dir=results
    python scripts/wandb_report.py list=true                what the report would have; asks nobody

Says what is missing for who is not logged in. docs/wandb.md has the way from records to here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlparse

from quicksilver.cli.arguments import ResultsFolder, key
from quicksilver.report.site.collection import Collection
from quicksilver.report.table import markdown
from quicksilver.report.wandb import sweeps
from quicksilver.runs.tracker import SO_FAR
from quicksilver.runtime.errors import QuickSilverError

TITLE = "QuickSilver: what the paper says, and what was measured"
NEEDED = ("wandb", "wandb_workspaces")


@dataclass
class Keys(ResultsFolder):
    """The keys of this script."""

    project: str = key("NAME", "where the runs are", "quicksilver")
    entity: str = key("NAME", "user or team; default: the key's own", factory=lambda: os.environ.get("WANDB_ENTITY", ""))
    list: bool = key("true", "only say what the report would have", False)


class PanelSpec(NamedTuple):
    """One panel, by the names of logged numbers: a scatter of two of them, bars of some, lines over windows, or pictures."""

    kind: Literal["scatter", "bars", "lines", "pictures"]
    title: str
    keys: tuple[str, ...]


class Section(NamedTuple):
    """A heading with words and panels below it; `sweep` shows the runs of one sweep only."""

    title: str
    text: str = ""
    panels: tuple[PanelSpec, ...] = ()
    sweep: str | None = None


WORK = ("executed_flops_saved_pct", "delta_ppl_pct")
LEDGERS = ("executed_flops_saved_pct", "nominal_flops_saved_pct", "paper_flops_saved_pct")
# What the paper draws over runs: 8/15 the frontier, 6 and 7 the savings, 16 and Table 7 the cost in time, C.4 the cache.
BY_WINDOW = (f"{SO_FAR}ppl", f"{SO_FAR}delta_ppl_pct", f"{SO_FAR}kl_nats")
RUNS = Section(
    "Runs",
    "Every difference is against dense inference on the same windows; times are medians of rounds that alternate with the dense model.",
    (
        PanelSpec("scatter", "Quality against work (Figures 8, 15)", WORK),
        PanelSpec("scatter", "Quality against time (Figure 16)", ("speedup_pct", "delta_ppl_pct")),
        PanelSpec("scatter", "Quality against its null at the same budget", ("null_delta_ppl_pct", "delta_ppl_pct")),
        PanelSpec("scatter", "Time saved against work saved: realization", ("executed_flops_saved_pct", "speedup_pct")),
        PanelSpec("bars", "Work saved, three ledgers, % (Figures 6, 7)", LEDGERS),
        *(PanelSpec("lines", f"{key.removeprefix(SO_FAR)} over the windows so far", (key,)) for key in BY_WINDOW),
        PanelSpec("bars", "KV bytes saved, % of dense", ("kv_bytes_saved_pct",)),
    ),
)


def outline(site: Collection) -> Iterator[Section]:
    """The report's sections: runs, sweeps, then every table and figure that was written."""
    yield RUNS
    for sweep in sweeps(site):
        yield Section(f"Sweep {sweep}", panels=(PanelSpec("scatter", "Quality against work", WORK),), sweep=f"sweep {sweep}")
    for piece in site.pieces:
        if piece.written and piece.kind == "figure":
            yield Section(piece.title, "\n".join(piece.written.caption), (PanelSpec("pictures", piece.title, (piece.name,)),))
        elif piece.written:
            yield Section(piece.title, markdown(piece.written).partition("\n")[2].strip())


def build(project: str, entity: str, site: Collection, workspaces: Any) -> Any:
    """The report as an object of `wandb_workspaces.reports.v2`, not saved yet."""
    where = {"project": project, "entity": entity}
    kinds = {
        "scatter": lambda title, keys: workspaces.ScatterPlot(title=title, x=keys[0], y=keys[1]),
        "bars": lambda title, keys: workspaces.BarPlot(title=title, metrics=list(keys)),
        "lines": lambda title, keys: workspaces.LinePlot(title=title, x=f"{SO_FAR}windows", y=list(keys)),
        "pictures": lambda title, keys: workspaces.MediaBrowser(title=title, media_keys=list(keys)),
    }
    blocks = [workspaces.TableOfContents()]
    for title, text, specs, sweep in outline(site):
        blocks.append(workspaces.H1(text=title))
        blocks += [workspaces.MarkdownBlock(text=text)] if text else []
        if specs:
            chosen = {"filters": f'Metric("group") == "{sweep}"'} if sweep else {}
            runs = workspaces.Runset(**where, name=sweep or "all runs", **chosen)
            blocks.append(workspaces.PanelGrid(runsets=[runs], panels=[kinds[kind](name, keys) for kind, name, keys in specs]))
    return workspaces.Report(**where, title=TITLE, blocks=blocks)


def missing() -> list[str]:
    """What keeps this machine from building a report, with the remedy; asks no network."""
    absent = (name.replace("_", "-") for name in NEEDED if importlib.util.find_spec(name) is None)
    said = [f"The package {name} is not installed: pip install {name}" for name in absent]
    # Whether `wandb login` left a key; it is not read.
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    logged_in = path.is_file() and host in path.read_text(encoding="utf-8", errors="replace")
    if "WANDB_API_KEY" not in os.environ and not logged_in:
        said.append("Nobody is logged in to W&B: wandb login, or set WANDB_API_KEY.")
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        said.append(f"WANDB_MODE={os.environ['WANDB_MODE']}: a report lives on the server, unset it.")
    return said


def main(words: Sequence[str] | None = None) -> int:
    try:
        asked = Keys.parsed(sys.argv[1:] if words is None else words, "scripts/wandb_report.py")
        site = Collection(Path(asked.results_dir))
    except QuickSilverError as error:
        print(error, file=sys.stderr)
        return 1
    if asked.list:
        for section in outline(site):
            print(section.title, *(f"  {spec.kind}: {spec.title} ({', '.join(spec.keys)})" for spec in section.panels), sep="\n")
        return 0
    if said := missing():
        until = "Until then, make report gives the same tables and figures as a local site."
        print("The report was not built.", *said, until, sep="\n  ", file=sys.stderr)
        return 1
    import wandb_workspaces.reports.v2 as workspaces

    report = build(asked.project, asked.entity, site, workspaces)
    report.save()
    print(report.url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
