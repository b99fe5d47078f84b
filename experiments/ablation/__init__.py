"""The mechanisms alone, one after another, and in all combinations, against dense inference."""
