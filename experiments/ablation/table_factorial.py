"""Table factorial: all 16 combinations of the four mechanisms, interactions and the synergy δ (Appendix P).

The mechanisms are those that stand alone in Table 11, and the same wherever they take part. Quality and operations only, nothing timed.

Claims: P.4's isolated and joint savings, the sign of their synergy, and that no composition adds more than 0.2 of perplexity.
"""

from __future__ import annotations

from quicksilver.report.claims.ledger import AnsweredBy

from . import factorial

rows = factorial.rows
table = factorial.table
ANSWERS = {f"p4.isolated.{claim}": AnsweredBy("factorial", letter) for letter, (_, claim, _) in factorial.FACTORS.items()}
ANSWERS |= {"p4.joint": AnsweredBy("factorial", factorial.LETTERS), "p4.half": AnsweredBy("factorial", factorial.LETTERS)}
ANSWERS["p4.stability.delta_ppl"] = AnsweredBy(
    "factorial", factorial.LETTERS, of=factorial.worst, note="the combination of the 15 that adds most"
)
