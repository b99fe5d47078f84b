"""Table 5: the paper's sample sentence through all four modules, token by token.

Claims: the statements of the paper's Table 5 about single words (reported_tokens.yaml, table5.…). Its rule for K/V contradicts itself
(docs/conflicts.md #11).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from quicksilver.records.record import Record
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.reported import reported
from quicksilver.report.table import NO_VALUE, Column, Lines, Panel, Table

from . import sentences

READS = sentences.READ
TEXT = sentences.SENTENCE
PAPER_LAYERS = 30  # of its figures; its sentence is given word by word


def rows() -> list[Row]:
    """One run."""
    return [sentences.everything()]


def table(outcomes: Sequence[Outcome], name: str) -> Table:
    """A row a token, a column a mechanism, and what the paper says of the word."""
    _, record = sentences.measured(outcomes, "all four")
    frame = walk(record)
    panel = Panel("sentence", "In the order of the sentence", COLUMNS, sentences.caption(outcomes, TEXT))
    return Table(name, "Table 5: one sentence through all four modules", frame, (panel,), _legend(frame))


def walk(record: Record) -> pd.DataFrame:
    """Per token: after which layer it halts (`halts_after_layer`, empty if never) with the drift and entropy there; in how many layers it has
    no K/V entry; which token carries it from which layer on; its width and the entropy that decided it; the paper's words."""
    signals = record.signals(TEXT)
    tokens, n_layers = record.texts[TEXT].tokens, record.model.layers
    by_layer = {
        name: sentences.layers(signals, name) for name in ("active", "kv", "carrier", "bits", "drift_relative", "entropy_nats")
    }
    decided = sentences.layer_after(record.config["modules"]["adaptive_quantization"]["depth"], n_layers)
    claims = _claims()
    found = []
    for slot, token in enumerate(tokens):
        carrier = by_layer["carrier"][slot]
        fused_after = int((carrier != slot).idxmax()) - 1 if (carrier != slot).any() else None
        row: dict[str, Any] = {"panel": "sentence", "section": "", "slot": slot, "token": token.strip()}
        halts = int(sentences.halted_after(by_layer["active"])[slot])
        if halts < n_layers and (fused_after is None or halts < fused_after):
            row |= {"halts_after_layer": halts, "resumes_in_layer": _resumes(by_layer["active"][slot], halts)}
            row |= {name: float(by_layer[name].loc[halts, slot]) for name in ("drift_relative", "entropy_nats")}
        if fused_after is not None:
            into = int(carrier.loc[n_layers])
            row |= {"fused_after_layer": fused_after, "fused_into": into, "fused_into_token": tokens[into].strip()}
        row["layers_without_kv"] = int((~by_layer["kv"][slot].astype(bool)).sum())
        width = int(by_layer["bits"].loc[n_layers, slot])
        if width < 16:
            row |= {"bits": width, "deciding_entropy_nats": float(by_layer["entropy_nats"].loc[decided, slot])}
        row["parts"] = int((by_layer["carrier"].loc[n_layers] == slot).sum())
        row["paper"] = "; ".join(claims.get(token.strip().lower(), ()))
        found.append(row)
    columns = [
        "panel",
        "section",
        "slot",
        "token",
        "halts_after_layer",
        "resumes_in_layer",
        "drift_relative",
        "entropy_nats",
        "layers_without_kv",
    ]
    columns += ["fused_after_layer", "fused_into", "fused_into_token", "parts", "bits", "deciding_entropy_nats", "paper"]
    return pd.DataFrame(found, columns=columns)


def _resumes(active: pd.Series, halts: int) -> int | None:
    again = active.loc[halts + 1 :].astype(bool)
    return int(again.idxmax()) if again.any() else None


def _claims() -> dict[str, list[str]]:
    """What the paper's Table 5 says, by word in lower case."""
    said: dict[str, list[str]] = {}
    for key, claim in reported().items():
        if key.startswith("table5."):
            word = re.search(r'"([^"]+)"', claim.quote)
            if word is not None:
                said.setdefault(word[1].lower(), []).append(re.sub(r'^(Token )?"[^"]+":? *', "", claim.quote).replace("->", "→"))
    return said


def _number(name: str, text: str) -> Callable[[Mapping[str, Any]], Lines]:
    return lambda row: (NO_VALUE,) if pd.isna(row[name]) else (text.format(row[name]),)


def _halting(row: Mapping[str, Any]) -> Lines:
    if pd.isna(row["halts_after_layer"]):
        return (NO_VALUE,)
    again = "" if pd.isna(row["resumes_in_layer"]) else f", again from {row['resumes_in_layer']:.0f}"
    return (f"after {row['halts_after_layer']:.0f}{again}",)


def _kv(row: Mapping[str, Any]) -> Lines:
    if not pd.isna(row["fused_into"]):
        return ("carrier’s",)
    return (f"none in {row['layers_without_kv']:.0f}" if row["layers_without_kv"] else "all",)


def _fusion(row: Mapping[str, Any]) -> Lines:
    if not pd.isna(row["fused_into"]):
        return (f"into {row['fused_into_token']} ({row['fused_into']:.0f}) after {row['fused_after_layer']:.0f}",)
    return (f"carries {row['parts']:.0f}" if row["parts"] > 1 else NO_VALUE,)


COLUMNS = (
    Column("", "#", _number("slot", "{:.0f}")),
    Column("", "token", lambda row: (row["token"],), align="left"),
    Column("1. halting", "layer", _halting, align="left"),
    Column("1. halting", "drift", _number("drift_relative", "{:.3f}"), expendable=2),
    Column("1. halting", "entropy", _number("entropy_nats", "{:.2f}"), expendable=2),
    Column("2. K/V", "layers", _kv, align="left"),
    Column("3. fusion", "layer", _fusion, align="left"),
    Column("4. quantization", "bits", _number("bits", "{:.0f}")),
    Column("4. quantization", "entropy", _number("deciding_entropy_nats", "{:.2f}"), expendable=2),
    Column("", "the paper says", lambda row: (row["paper"] or NO_VALUE,), align="left", expendable=1),
)


def _legend(frame: pd.DataFrame) -> tuple[str, ...]:
    halted, fused = frame["halts_after_layer"].notna().sum(), frame["fused_into"].notna().sum()
    skipped = ((frame["layers_without_kv"] > 0) & frame["fused_into"].isna()).sum()
    widths = frame["bits"].value_counts().sort_index(ascending=False)
    return (
        f"Of {len(frame)} tokens {halted} halt, {skipped} have no K/V entry in some layer, {fused} are carried by a neighbour, and "
        + ", ".join(f"{count} are held at {width:.0f} bits" for width, count in widths.items())
        + ".",
        "Layers are counted from 1. 1: the token halts after this layer, with this drift (relative) and this entropy (nats, "
        "logit lens); it takes part again in the last layers. 2: in how many layers the token has no K/V entry, so that "
        "no later token sees it. 3: the token that it is fused into, with its number, and after which layer. 4: the bit-width from half the depth "
        "on, and the entropy by which it was chosen. -: nothing was done to it.",
        "Order at one layer: halting, K/V, fusion, precision (2.4). A token that halted or was fused before gets no bit-width.",
        "What the paper says of a word (in a model of 30 layers) stands beside every token that is that whole word. The paper's "
        "rule for K/V contradicts its own text: it skips at 15.18 > 0.45, which is the opposite of convergence, and 1.00 is not "
        "below 0.30.",
    )
