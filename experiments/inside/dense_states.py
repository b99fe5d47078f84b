"""Two tables on the states of the dense model: the paper's bounds as inequalities, and what a lens reads in the middle layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from quicksilver.measure.dense_states import BY_ENTROPY, CONSTANTS, INEQUALITIES, BoundsResult, LensesResult, Rounding
from quicksilver.records.record import Record
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row, artefact
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.table import ENDS, NO_VALUE, Column, Lines, Panel, Table, interval_columns, numbers, with_ends

# panel -> title, further overrides
PANELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "asked": ("The model and text of the command", ()),
    "llama": ("reference-llama", ("model=reference-llama",)),
}
KEY = "dense"


def _rows(measure: str, windows: int) -> list[Row]:
    """The dense model, and reference-llama."""
    always = ("protocol=all", f"measure={measure}", f"dataset.windows={windows}", "modules=[]")
    return [Row(panel, "", KEY, title, (*always, *more)) for panel, (title, more) in PANELS.items()]


def _table(
    name: str,
    title: str,
    outcomes: Sequence[Outcome],
    rows: Callable[[Record, str], Iterable[dict[str, Any]]],
    columns: Sequence[Column],
    notes: Callable[[Record], Iterable[str]],
    legend: Lines,
) -> Table:
    """A panel a model; `rows` and `notes` are of one record."""
    there = [(one.record, one.row.panel) for one in outcomes if one.record is not None]
    frame = pd.DataFrame([row | {"record": record.fingerprint} for record, panel in there for row in rows(record, panel)])
    panels = []
    for key, (heading, _) in PANELS.items():
        mine = [one for one in outcomes if one.row.panel == key]
        said = (notes(one.record) if one.record else [f"{one.row.technique}: {one.reason}."] for one in mine)
        panels.append(Panel(key, heading, tuple(columns), (*(line for lines in said for line in lines), *provenance.notes(mine))))
    return Table(name, title, frame, tuple(panels), legend)


def _ends(column: str, one: Any, name: str) -> dict[str, float]:
    """The fields `name`, `name_low` and `name_high` as three columns."""
    return {f"{column}{end}": getattr(one, f"{name}{end}") for end in ENDS}


def _of_both(of: Callable[[Record], Estimate | None], note: str, by_definition: str = "") -> tuple[AnsweredBy, ...]:
    return tuple(AnsweredBy(panel, KEY, of_record=of, note=note, by_definition=by_definition) for panel in PANELS)


_LAYER = Column("", "after layer", "{layer}", align="left")


# --- bounds -----------------------------------------------------------------------------------------------------------------------
# inequality -> what is printed, its claims
SAID = {
    "halting": ("error at the last layer ≤ Σ L_j · last drift (B.4, H, P)", ("b4.bound", "h.bound")),
    "fusion": ("error after one layer ≤ L · half the distance of the pair (D.4)", ("d4.bound",)),
    "fusion, end": ("error at the last layer ≤ Σ L_k · distance of the pair (N)", ("n.bound",)),
}
NAMES = {"measured": "measured", "one": "all 1"}
BOUNDS_LEGEND = (
    "Error: how far the state of a token that halts after that layer, or is replaced by the mean of itself and the token before it, is from its "
    "dense state. Every token of the texts is halted; the fused ones are spread evenly over them.",
    "Constants: L_j is how much layer j stretches a small change of one token's own state, in the direction that it stretches most; the largest over the "
    "tokens that are followed. The paper gives none. all 1: layers that stretch nothing.",
    "D.4 is Lipschitz continuity itself, so it holds wherever the constant is large enough for the pair; how much larger the bound is than the error is what can be "
    "learned. B.4 and N add constants up where continuity alone would multiply them: that they hold is a finding.",
    "the bound holds: of the cases, with Wilson's 95% interval clustered by window; where all agree, each window counts once. bound ÷ error: below 1 it fails; far above 1 it promises little.",
)


def _least(inequality: str, record: Record) -> Estimate:
    """Share of the cases in which the bound holds with measured constants, at the layer where that is least."""
    found = record.measured("bounds", BoundsResult).held
    each = [one.holds for one in found if (one.inequality, one.constants) == (inequality, CONSTANTS[0])]
    return Estimate.of(min(each, key=lambda share: share.value))


BOUNDS_ANSWERS = {
    f"{claim}.bound_holds_share": _of_both(partial(_least, inequality), "constants measured; the layer where it holds least")
    for inequality, (_, claims) in SAID.items()
    for claim in claims
}


@artefact(lambda: _rows("bounds", 8), answers=BOUNDS_ANSWERS)
def table_bounds(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table bounds: the paper's bounds on what halting and fusion do to a state, tested as inequalities on real states (B.4, D.4, H, N)."""
    columns = (
        _LAYER,
        Column("", "constants", lambda row: (NAMES[row["constants"]],), align="left"),
        Column("the bound holds", "%", with_ends("holds_pct")),
        Column("bound ÷ error", "median", lambda row: _times(row)[:1]),
        Column("bound ÷ error", "5% to 95%", lambda row: (" to ".join(_times(row)[1:]),), expendable=1),
        Column("", "cases", "{cases:,}", expendable=2),
    )
    title = "The paper's bounds, tested on dense states"

    def gains(record: Record) -> list[str]:
        found = record.measured("bounds", BoundsResult).gains
        return [f"L_j of the layers, from the first: {', '.join(f'{gain:.1f}' for gain in found)}."]

    return _table(name, title, outcomes, _bounds, columns, gains, BOUNDS_LEGEND)


def _bounds(record: Record, panel: str) -> Iterator[dict[str, Any]]:
    held = record.measured("bounds", BoundsResult).held
    for one in sorted(held, key=lambda one: INEQUALITIES.index(one.inequality)):
        yield {
            **{"panel": panel, "section": SAID[one.inequality][0], "key": f"{one.inequality}.{one.layer}.{one.constants}"},
            **{"inequality": one.inequality, "layer": one.layer, "constants": one.constants, "cases": one.cases},
            **interval_columns("holds_pct", one.holds, 100),
            **_ends("bound_ratio", one, "bound_ratio"),
        }


def _times(row: Mapping[str, Any]) -> Lines:
    """How many times larger than the error the bound is: median, 5% and 95%."""
    found = numbers(row, "bound_ratio")
    return tuple(NO_VALUE if one is None else f"{one:.2f}" if one < 10 else f"{one:,.0f}" for one in found)


# --- lenses -----------------------------------------------------------------------------------------------------------------------
LENSES_LEGEND = (
    "loss: of the next token, nats, when the state after that layer is read as if it were the last. Below the panel stands the loss of a "
    "uniform guess; a lens above it is worse than guessing.",
    "r: correlation of a token's entropy there with its entropy at the end, with its 95% interval, bootstrap over windows. What halts tokens of low "
    "entropy in the middle goes by this number.",
    "rounded: states after that layer at a width by entropy, the 30% of least entropy at 2 bits, the next 40% at 4, the rest at 8 (the paper's rule). error: "
    "mean of ‖h − Quant(h)‖₂, in units of the state. r: its correlation with the entropy by the logit lens, as paper E.9 has it; at 8 bits: the same where "
    "all tokens have that width.",
    "tuned lens: ridge regression of the head's input on calibration text, one map a layer (arXiv 2303.08112 fits by KL). - where none ships with the model.",
)
_LENSES, _ROUNDED = ("logit", "tuned"), {"rounded": BY_ENTROPY, "eight": 8}
_COLUMNS = [
    *("panel", "section", "key", "layer"),
    *(f"{lens}_{what}" for lens in _LENSES for what in ("nats", "entropy_nats", "r", "r_low", "r_high")),
    *(f"{name}_{what}" for name in _ROUNDED for what in ("error_l2", "r", "r_low", "r_high")),
]


def _rounded(record: Record) -> dict[int, Rounding]:
    """Of the middle layer, where the paper decides about widths, by width."""
    roundings = record.measured("lenses", LensesResult).roundings
    return {one.bits: one for one in roundings if one.layer == record.model.layers // 2}


def _correlated(record: Record) -> Estimate | None:
    one = _rounded(record).get(BY_ENTROPY)
    return None if one is None else Estimate(one.correlation, one.correlation_low, one.correlation_high)


def _noise_per_bit(record: Record) -> Estimate | None:
    """The larger of the ratios from 2 to 4 and from 4 to 8 bits, a bit; the smaller is the lower end."""
    found = _rounded(record)
    if not {2, 4, 8} <= found.keys():
        return None
    ratios = sorted((found[more].error_l2 / found[less].error_l2) ** (1 / (more - less)) for less, more in ((2, 4), (4, 8)))
    return Estimate(ratios[1], *ratios)


_STEP = ("from 2 to 4 and from 4 to 8 bits; the ends are the two", "the step of a uniform code halves with each bit")
LENSES_ANSWERS = {
    "e9.correlation.pearson_r": _of_both(_correlated, "logit-lens entropy after half of the layers, widths by entropy"),
    "e3.noise.noise_ratio_per_bit": _of_both(_noise_per_bit, *_STEP),
}


@artefact(lambda: _rows("lenses", 16), answers=LENSES_ANSWERS)
def table_lenses(outcomes: Sequence[Outcome], name: str) -> Table:
    """Table lenses: what the entropy of a middle layer is worth, read by the paper's logit lens and by a lens fitted to the model.

    The paper halts a token whose entropy is low. A lens that knows less than uniform reads noise, and noise chooses nobody.
    """
    columns = [_LAYER]
    for lens in _LENSES:
        cells = {"loss": f"{{{lens}_nats:,.2f}}", "entropy": f"{{{lens}_entropy_nats:,.2f}}", "r": with_ends(f"{lens}_r", ".2f")}
        columns += [Column(f"{lens} lens", heading, cell) for heading, cell in cells.items()]
    cells = {"error": "{rounded_error_l2:,.2f}", "r": with_ends("rounded_r", ".2f"), "r at 8 bits": with_ends("eight_r", ".2f")}
    columns += [Column("rounded", heading, cell) for heading, cell in cells.items()]
    return _table(name, "What a lens reads in the middle layers", outcomes, _lenses, columns, _known, LENSES_LEGEND)


def _lenses(record: Record, panel: str) -> Iterable[dict[str, Any]]:
    found, by_layer = record.measured("lenses", LensesResult), dict[int, dict[str, Any]]()
    for one in found.readings:
        first = {"panel": panel, "section": "", "key": f"{one.layer}", "layer": one.layer}
        row, lens = by_layer.setdefault(one.layer, dict.fromkeys(_COLUMNS) | first), one.lens.split()[0]
        row |= {f"{lens}_nats": one.nats, f"{lens}_entropy_nats": one.entropy_nats}
        row |= _ends(f"{lens}_r", one, "correlation")
    for rounding in found.roundings:
        for name, bits in _ROUNDED.items():
            if rounding.bits == bits:
                by_layer[rounding.layer] |= _ends(f"{name}_r", rounding, "correlation")
                by_layer[rounding.layer][f"{name}_error_l2"] = rounding.error_l2
    return by_layer.values()


def _known(record: Record) -> Iterator[str]:
    found = record.measured("lenses", LensesResult)
    yield (
        f"A uniform guess loses {found.uniform_nats:.2f} nats a token, the model itself {found.final_nats:.2f}, at a mean entropy of "
        f"{found.final_entropy_nats:.2f}; {found.tokens:,} tokens in {found.windows} windows."
    )
    if found.no_tuned_because is not None:
        yield "No tuned lens ships with this model."
