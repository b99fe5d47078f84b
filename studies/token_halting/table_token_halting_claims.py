"""Table token_halting_claims: what the second paper's abstract and introduction state (arXiv 2303.05078), beside what was measured here.

They print no number, so the rule of docs/verdicts.md has nothing to compare with: a statement that something is better is reproduced where the
interval of the difference lies above 0, not reproduced where it lies below, and undecided where it holds 0. The ledger has them, too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from quicksilver.report.artefacts import Outcome
from quicksilver.report.claims.ledger import Statement
from quicksilver.report.claims.reported import Estimate
from quicksilver.report.table import Column, Lines, Panel, Table, signed

from . import tables as results

PANEL = "claims"
PAPER = "arXiv 2303.05078 (Ye et al., token halting)"
PARETO = "Our method significantly improves the Pareto frontier of efficiency versus accuracy when compared with the existing approaches"
NON_UNIFORM = "A non-uniform token sparsity loss is employed to improve the learning of the halting module"
BY_NORM = "AP of learned halting minus that of halting by feature norm, the best rule here, at the same rates"
BY_BOX = "AP with box weights minus that with uniform weights"
DEPENDS = "deciding whether or not to halt a token needs to depend on the input"
BY_CHANCE = "AP of learned halting minus that of random halting at the same rates"
BETTER = {  # of detector box: quote, what is compared, against, with recycling
    "pareto": (PARETO, BY_NORM, "norm", True),
    "pareto.unrecycled": (PARETO, f"{BY_NORM}, without recycling", "norm", False),
    "input_dependent": (DEPENDS, BY_CHANCE, "random", True),
    "box_weights": (NON_UNIFORM, BY_BOX, "uniform", True),
    "box_weights.unrecycled": (NON_UNIFORM, f"{BY_BOX}, without recycling", "uniform", False),
}
WIDER = "By halting tokens and increasing model capacity, we are able to improve the baseline model's performance without increasing the model's latency"
RECYCLED = "our framework allows halted tokens to be reused to inform the model's predictions through a straightforward token recycling mechanism"
PSEUDO = "a theoretical analysis is conducted to evaluate the accuracy of the pseudo-gradient"

rows = results.no_rows


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """One row a statement."""
    made = []
    for one in statements():
        ends = (None, None, None) if one.estimate is None else (one.estimate.value, one.estimate.low, one.estimate.high)
        made.append((one.quote, one.compared, *ends, one.verdict, one.why))
    found = pd.DataFrame(made, columns=["quote", "compared", "difference", "low", "high", "verdict", "why"])
    found.insert(0, "panel", PANEL)
    found.insert(1, "section", "")
    panel = Panel(
        PANEL, "Statements of the abstract and the introduction, at the paper's threshold p < ½", COLUMNS, results.note()
    )
    return Table(name, "What arXiv 2303.05078 states, and what was measured", found, (panel,), LEGEND)


def statements() -> list[Statement]:
    """Every statement with what the study says about it; without a study none was measured."""
    each, slopes = results.frame("evaluations"), results.frame("gradients")
    found = [
        _statement(name, quote, compared, _difference("box", against, recycled), "95% over scenes, mean of seeds")
        for name, (quote, compared, against, recycled) in BETTER.items()
    ]
    gain = None
    if not each.empty:
        box = _at_half(each, "box", policy="learned")
        gain = _spread(box["ap"] - box["ap_unrecycled"])
    spread = "from the least to the greatest of the seeds"
    found.append(_statement("recycling", RECYCLED, "AP with recycling minus without", gain, spread))
    found.append(_wider(each))
    own = None if slopes.empty else _spread(slopes[slopes["estimate"] == "both"]["correlation"])
    compared = "correlation of the pseudo-gradient with the effect of turning the decision round"
    said = "from the least to the greatest, layer by layer, kept and halted tokens apart"
    found.append(_statement("pseudo_gradient", PSEUDO, compared, own, said))
    return found


STATEMENTS = statements


def _statement(name: str, quote: str, compared: str, estimate: Estimate | None, why: str, fails: bool = False) -> Statement:
    why = why if estimate is not None else f"no such study here: {results.COMMAND}"
    return Statement(f"token_halting.{name}", PAPER, quote, compared, estimate, why, fails)


def _spread(values: pd.Series) -> Estimate:
    return Estimate(values.mean(), values.min(), values.max())


def _at_half(frame: pd.DataFrame, detector: str, **values: object) -> pd.DataFrame:
    """The rows of a detector at the paper's threshold with these values."""
    for column, value in {"detector": detector, "dial": results.PAPER_THRESHOLD, **values}.items():
        frame = frame[frame[column] == value]
    return frame


def _difference(detector: str, against: str, recycled: bool) -> Estimate | None:
    apart = results.frame("differences")
    if apart.empty:
        return None
    (one,) = _at_half(apart, detector, policy="learned", against=against, recycled=recycled).itertuples()
    return Estimate(one.difference, one.low, one.high)


def _wider(each: pd.DataFrame) -> Statement:
    compared = "AP of a wider detector that halts minus that of the dense one trained for as many steps, at no more time"
    name, timed = "wide_gentle", results.frame("timing")
    trained = name in set(each.get("detector", ()))
    if not trained or name not in set(timed.get("detector", ())):
        why = f"the wider detector was not {'timed' if trained else 'trained'}: {results.COMMAND} --more wide"
        return Statement("token_halting.wider", PAPER, WIDER, compared, None, why)
    seeds = each.loc[each["detector"] == name, "seed"].nunique()
    ratio = float(_at_half(timed, name, clock="encoder")["latency_ratio"].iloc[0])
    why = f"seeds: {seeds}; its encoder takes {ratio:.2f} of the dense detector's time"
    return _statement("wider", WIDER, compared, _difference(name, "longer control", True), why, ratio > 1)


def _words(key: str, width: int) -> Callable[[Mapping[str, object]], Lines]:
    return lambda row: tuple(textwrap.wrap(str(row[key]), width)) or ("",)


def _measured(row: Mapping[str, object]) -> Lines:
    if pd.isna(row["difference"]):
        return ("-",)
    return (f"{signed(row['difference'], 3)} [{signed(row['low'], 3)} {signed(row['high'], 3)}]",)  # type: ignore[arg-type]


COLUMNS = (
    Column("", "the paper states", _words("quote", 44), align="left"),
    Column("", "compared", _words("compared", 34), align="left"),
    Column("", "measured", _measured),
    Column("", "verdict", lambda row: (row["verdict"],), align="left"),
    Column("", "why", _words("why", 34), align="left"),
)

LEGEND = (
    "reproduced: the interval lies above 0; not reproduced: below; undecided: it holds 0. The paper's text at hand prints no number.",
    "On small detectors of made scenes, not on the Waymo Open Dataset: a verdict does not say that the paper is wrong.",
)
