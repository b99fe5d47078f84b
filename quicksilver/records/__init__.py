"""Records: what a run is of, where its results lie, and their statistics. Read with pandas and numpy alone; no model is needed."""

from __future__ import annotations

from quicksilver.records.record import Record, load_record, record_frame
from quicksilver.records.stats import PairedInterval, paired_perplexity, paired_records
from quicksilver.records.store import Store

__all__ = ["PairedInterval", "Record", "Store", "load_record", "paired_perplexity", "paired_records", "record_frame"]
