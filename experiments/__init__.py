"""Tables and figures of the paper in families. Found by names of files (`ablation/table11_ablation.py`) and of functions under `@artefact`."""
