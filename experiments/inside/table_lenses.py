"""Table lenses: what the entropy of a middle layer is worth, read by the paper's logit lens and by a lens fitted to the model.

The paper halts a token whose entropy is low. A lens that knows less than uniform reads noise, and noise chooses nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.measure.lenses import BY_ENTROPY, LensesResult, Rounding
from quicksilver.report import provenance
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import AnsweredBy
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table, number

# panel -> title, defaults
PANELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "asked": ("The model and text that were asked for", ()),
    "llama": ("reference-llama", ("model=reference-llama",)),
}
KEY = "dense"
LEGEND = (
    "loss: of the next token, nats, when the state after that layer is read as if it were the last. Above that of a uniform guess, which stands below the panel, the lens "
    "knows less than nothing of it.",
    "r: correlation of a token's entropy there with its entropy at the end, with its 95% interval, bootstrap over windows. What halts tokens of low "
    "entropy in the middle goes by this number.",
    "rounded: states after that layer at a width by entropy, the 30% of least entropy at 2 bits, the next 40% at 4, the rest at 8 (the paper's rule). error: "
    "mean of ‖h − Quant(h)‖₂, in units of the state. r: its correlation with the entropy by the logit lens, as paper E.9 has it; at 8 bits: the same where "
    "all tokens have that width.",
    "tuned lens: ridge regression of the head's input on calibration text, one map a layer (arXiv 2303.08112 fits by KL). - where none ships with the model.",
)


def rows() -> list[Row]:
    """The dense model, and reference-llama."""
    always = ("protocol=all", "measure=lenses", "dataset.windows=16", "modules=[]")
    return [Row(panel, "", KEY, title, (*always, *more)) for panel, (title, more) in PANELS.items()]


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A panel a model, a row a layer."""
    frame = pd.DataFrame([row for outcome in outcomes for row in _rows(outcome)], columns=COLUMNS)
    columns = (
        Column("", "after layer", lambda row: (f"{row['layer']}",), align="left"),
        *(
            Column(said, heading, cell)
            for lens, said in (("logit", "logit lens"), ("tuned", "tuned lens"))
            for heading, cell in (
                ("loss", _nats(f"{lens}_nats")), ("entropy", _nats(f"{lens}_entropy_nats")), ("r", _correlation(lens)),
            )
        ),
        Column("rounded", "error", _nats("rounded_error_l2")),
        Column("rounded", "r", _correlation("rounded")),
        Column("rounded", "r at 8 bits", _correlation("eight")),
    )  # fmt: skip
    panels = tuple(
        Panel(key, title, columns, tuple(_notes([one for one in outcomes if one.row.panel == key])))
        for key, (title, _) in PANELS.items()
    )
    return Table(name, "What a lens reads in the middle layers", frame, panels, LEGEND)


_OF = [f"{lens}_{what}" for lens in ("logit", "tuned") for what in ("nats", "entropy_nats", "r", "r_low", "r_high")]
_ROUNDED = {"rounded": BY_ENTROPY, "eight": 8}
_OF += [f"{name}_{what}" for name in _ROUNDED for what in ("error_l2", "r", "r_low", "r_high")]
COLUMNS = ["panel", "section", "key", "layer", *_OF, "record"]


def _rows(outcome: Outcome) -> Iterator[dict[str, Any]]:
    if outcome.record is None:
        return
    by_layer: dict[int, dict[str, Any]] = {}
    for one in outcome.record.measured("lenses", LensesResult).readings:
        row = by_layer.setdefault(
            one.layer, {"panel": outcome.row.panel, "section": "", "key": f"{one.layer}", "layer": one.layer}
        )
        lens = one.lens.split()[0]
        row |= {f"{lens}_nats": one.nats, f"{lens}_entropy_nats": one.entropy_nats, f"{lens}_r": one.correlation}
        row |= {
            f"{lens}_r_low": one.correlation_low,
            f"{lens}_r_high": one.correlation_high,
            "record": outcome.record.fingerprint,
        }
    for rounding in outcome.record.measured("lenses", LensesResult).roundings:
        for name, bits in _ROUNDED.items():
            if rounding.bits == bits:
                by_layer[rounding.layer] |= {
                    f"{name}_error_l2": rounding.error_l2, f"{name}_r": rounding.correlation,
                    f"{name}_r_low": rounding.correlation_low, f"{name}_r_high": rounding.correlation_high,
                }  # fmt: skip
    yield from by_layer.values()


def _notes(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        if outcome.record is None:
            yield f"{outcome.row.technique}: {outcome.reason}."
            continue
        found = outcome.record.measured("lenses", LensesResult)
        yield (
            f"A uniform guess loses {found.uniform_nats:.2f} nats a token, the model itself {found.final_nats:.2f}, at a mean entropy of "
            f"{found.final_entropy_nats:.2f}; {found.tokens:,} tokens in {found.windows} windows."
        )
        if found.no_tuned_because is not None:
            yield "No tuned lens ships with this model."
    yield from provenance.notes(outcomes)


def _nats(key: str) -> Any:
    return lambda row: (NO_VALUE if (value := number(row, key)) is None else f"{value:.2f}",)


def _correlation(lens: str) -> Any:
    def cell(row: Mapping[str, Any]) -> Lines:
        value, low, high = (number(row, f"{lens}_r{end}") for end in ("", "_low", "_high"))
        return (NO_VALUE,) if value is None else (f"{value:.2f}", f"[{low:.2f} {high:.2f}]")

    return cell


# --- claims -----------------------------------------------------------------------------------------------------------------------


def _rounded(outcomes: Mapping[str, Outcome]) -> dict[int, Rounding]:
    """Of the middle layer, where the paper decides about widths, by width."""
    record = outcomes[KEY].record
    roundings = [] if record is None else record.measured("lenses", LensesResult).roundings
    return {one.bits: one for one in roundings if record is not None and one.layer == record.model.layers // 2}


def _correlated(outcomes: Mapping[str, Outcome]) -> Estimate | None:
    one = _rounded(outcomes).get(BY_ENTROPY)
    return None if one is None else Estimate(one.correlation, one.correlation_low, one.correlation_high)


def _noise_per_bit(outcomes: Mapping[str, Outcome]) -> Estimate | None:
    """The larger of the ratios from 2 to 4 and from 4 to 8 bits, a bit; the smaller is the lower end."""
    found = _rounded(outcomes)
    if not {2, 4, 8} <= found.keys():
        return None
    ratios = sorted((found[more].error_l2 / found[less].error_l2) ** (1 / (more - less)) for less, more in ((2, 4), (4, 8)))
    return Estimate(ratios[1], *ratios)


ANSWERS = {
    "e9.correlation.pearson_r": tuple(
        AnsweredBy(panel, KEY, of=_correlated, note="logit-lens entropy after half of the layers, widths by entropy")
        for panel in PANELS
    ),
    "e3.noise.noise_ratio_per_bit": tuple(
        AnsweredBy(
            panel,
            KEY,
            of=_noise_per_bit,
            note="from 2 to 4 and from 4 to 8 bits; the ends are the two",
            by_definition="the step of a uniform code halves with each bit",
        )
        for panel in PANELS
    ),
}
