"""What the paper reports, the rule by which it is judged, and the ledger of verdicts."""
