"""One option at a time, calibrations, and the frontier of saved work against lost quality."""
