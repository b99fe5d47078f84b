"""Table lengths: the same maps and schedules on prompts of 128, 256 and 448 tokens, beside truncation and dropping.

Maps and schedules were fitted at prompts of 448 tokens. A schedule says shares of the prompt, so that it holds for any length.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import Panel, Table

SCORED = 64
LENGTHS = (128, 256, 448)  # today's reference models have 512 positions
ROWS = {
    "40": ("Dropped, then predicted, 40% (ours)", "quicksilver", ()),
    "50": ("50% (ours)", "quicksilver_50", ()),
    "position": ("Oldest dropped, 40%", "halting_attention", ("modules.halting.signal=position",)),
    "attention": ("Least attended dropped, 40%", "halting_attention", ()),
    "truncated": ("Truncation, 40%, newest kept", "prompt_truncation", ()),
    "truncated_50": ("Truncation, 50%", "prompt_truncation", ("modules.prompt_truncation.keep=0.5",)),
}


def rows() -> list[Row]:
    """Dense and every row, a panel a length."""
    found = []
    for length in LENGTHS:
        panel = f"{length} tokens"
        window = (f"protocol.prompt_tokens={length}", f"protocol.window_tokens={length + SCORED}")
        always = ("protocol=continuation", *window, "measure=quick", "dataset.windows=64")
        found.append(Row(panel, "", "dense", "Dense", (*always, "modules=[]")))
        for key, (technique, module, overrides) in ROWS.items():
            found.append(Row(panel, "", key, technique, (*always, f"modules=[{module}]", *overrides), (module,)))
    return found


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A panel a length."""
    frame = comparison.frame(outcomes)
    panels = tuple(
        Panel(
            panel,
            f"A prompt of {panel}, then {SCORED} scored",
            comparison.columns(prompt=True),
            provenance.notes([one for one in outcomes if one.row.panel == panel]),
        )
        for panel in dict.fromkeys(one.row.panel for one in outcomes)
    )
    return Table(
        name,
        "Prompt lengths: maps and schedules of one length on others (protocol continuation)",
        frame,
        panels,
        comparison.legend(frame),
    )
