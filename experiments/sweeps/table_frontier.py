"""Table frontier: which tokens may leave a prompt, how much of its work that saves, and what it costs the tokens after it.

RecordIndex the abstract's "39.6% fewer FLOPs with near-zero perplexity loss (≤ 0.2)", which is +1.1% of its perplexity: which technique comes
nearest at that budget, and where the frontier lies.
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.table import Column, Panel, Table, interval_cell, kl_cell, number, signed

from . import frontier


def rows() -> list[Row]:
    """Every technique at every value of its dial."""
    return frontier.rows()


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A section a technique."""
    frame = frontier.frame(outcomes)
    columns = (
        Column("", "share or depth", lambda row: (row["technique"],), align="left"),
        Column("saved %", "exec, prompt", lambda row: (signed(number(row, "prompt_executed_flops_saved_pct")),)),
        Column("saved %", "KV bytes", lambda row: (signed(number(row, "kv_bytes_saved_pct")),), expendable=1),
        Column("perplexity", "Δppl", lambda row: interval_cell(row, "delta_ppl")),
        Column("", "KL × 100", kl_cell, expendable=2),
        Column("", "front", lambda row: ("●" if row["front"] else "",)),
    )
    saved, cost = frontier.paper_bar()
    legend = (
        "share: of the prompt's tokens that leave after a fifth of the depth. Static depth: the depth after which all tokens "
        "but the last leave. p below: the threshold under which gates that were trained for 40% let a token leave.",
        "saved: executed operations of the prompt, signals included, and resident KV bytes, in percent of dense inference.",
        "Δppl: perplexity of the tokens after the prompt minus dense, with its 95% interval; below it the same in percent.",
        "KL × 100: of the dense model's next-token distribution to the run's, hundredths of a nat a token, with its 95% interval.",
        "front: ● where no other row saves as much or more for a smaller Δppl. Point estimates are compared, not intervals.",
        f"The paper's bar is {saved:g}% of FLOPs for at most {cost:.1f}% of perplexity (abstract: ≤ 0.2 at 18.2).",
    )
    panel = Panel(
        frontier.PANEL, "Protocol continuation: tokens leave inside the prompt only", columns, provenance.notes(outcomes)
    )
    return Table(name, "What may leave a prompt: saved against lost", frame, (panel,), legend)
