"""Table quicksilver: stopped tokens whose K/V are predicted, each part of the technique taken away in turn.

The first two rows are the model's own schedules at 40% and 50% of the prompt's work, chosen on calibration text (docs/predicted-kv.md). The
rows below take one part away and leave the rest as it is, so their budgets differ and stand beside their cost. More windows than Table 11
has: differences of a percent need them.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import Panel, Table

PANEL = "continuation"
OURS, WITHOUT, FORMATS = "The model's own schedules", "At 40%, one part taken away", "Number formats"
# section -> key, what is printed, modules, overrides
ROWS: dict[str, tuple[tuple[str, str, str, tuple[str, ...]], ...]] = {
    OURS: (("40", "40% of the prompt's work", "quicksilver", ()), ("50", "50%", "quicksilver_50", ())),
    WITHOUT: (
        (
            "drop_all",
            "nothing predicted: the second stage is dropped too",
            "quicksilver",
            ("modules.quicksilver.missing_kv=drop",),
        ),
        ("project", "projected, not predicted (SwiftKV, untrained)", "quicksilver", ("modules.quicksilver.missing_kv=project",)),
        ("oldest", "nothing but the oldest dropped, at the same work", "halting_attention", ("modules.halting.signal=position",)),
    ),
    FORMATS: (
        ("bfloat16", "bfloat16 alone", "bfloat16", ()),
        ("int8", "dynamic int8 alone", "int8_dynamic", ()),
        ("40.bfloat16", "40%, in bfloat16", "quicksilver,bfloat16", ()),
        ("50.bfloat16", "50%, in bfloat16", "quicksilver_50,bfloat16", ()),
    ),
}
ALWAYS = ("protocol=continuation", "dataset.windows=128")


def rows() -> list[Row]:
    """Dense, and every row of `ROWS`."""
    found = [Row(PANEL, "", "dense", "Dense", (*ALWAYS, "modules=[]"))]
    for section, members in ROWS.items():
        for key, technique, modules, overrides in members:
            needs = tuple(modules.split(","))
            found.append(Row(PANEL, section, key, technique, (*ALWAYS, f"modules=[{modules}]", *overrides), needs))
    return found


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """One panel."""
    frame = comparison.frame(outcomes)
    title = "Protocol continuation: anything goes inside the prompt, the tokens after it are scored"
    panel = Panel(PANEL, title, comparison.columns(prompt=True), provenance.notes(outcomes))
    return Table(name, "Predicted instead of dropped", frame, (panel,), comparison.legend(frame))
