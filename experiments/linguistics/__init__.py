"""Tables 2, 8, 9, 12 and 13 and their figures: what halts and what fuses, on gold annotation."""
