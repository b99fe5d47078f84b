"""Table far_context: which tokens may leave a prompt when answers depend on distant context.

Text of the language reference gains little from far context, so dropping the oldest tokens is nearly free there. Here it is not: passages
are repeated, or questions ask for facts that stand at the beginning (data/far_context.py). Everything saves about 40% of the prompt's work.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import comparison, provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import Panel, Table

PANELS = {
    "far-copy": "Passages given three times in a row",
    "far-recall": "Facts, a passage, then questions about the facts",
}
ALWAYS = ("protocol=continuation", "measure=quick", "dataset.windows=64")
ROWS = {
    "predicted": ("oldest dropped, then predicted", "quicksilver", ()),
    "learned": ("learned: dropped, then predicted", "learned_halting", ()),
    "position": ("oldest dropped", "halting_attention", ("modules.halting.signal=position",)),
    "attention": ("least attended dropped", "halting_attention", ()),
    "fusion": ("least attended, fused", "token_fusion_attention", ()),
    "drift": ("least drift dropped (paper)", "halting_attention", ("modules.halting.signal=drift",)),
    "truncated": ("oldest cut before the first layer", "prompt_truncation", ()),
    "truncated_ends": ("middle cut before the first layer", "prompt_truncation", ("modules.prompt_truncation.which=ends",)),
    "random": ("random dropped", "halting_attention", ("modules.halting.signal=random",)),
}


def always(panel: str) -> tuple[str, ...]:
    """What every row of a panel has."""
    return (*ALWAYS, f"dataset={panel}")


def rows() -> list[Row]:
    """Dense and every row, a panel a text."""
    found = []
    for panel in PANELS:
        found.append(Row(panel, "", "dense", "Dense", (*always(panel), "modules=[]")))
        for key, (technique, module, overrides) in ROWS.items():
            found.append(Row(panel, "", key, technique, (*always(panel), f"modules=[{module}]", *overrides), (module,)))
    return found


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A panel a text."""
    frame = comparison.frame(outcomes)
    panels = tuple(
        Panel(
            key,
            title,
            comparison.columns(prompt=True),
            (*comparison.cautions(frame, key), *provenance.notes([one for one in outcomes if one.row.panel == key])),
        )
        for key, title in PANELS.items()
    )
    title = "Far context: which tokens may leave when answers depend on distant context (protocol continuation)"
    return Table(name, title, frame, panels, comparison.legend(frame))
