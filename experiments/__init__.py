"""One file per table or figure of the paper, `ablation/table11_ablation.py`, in families. Found by name: there is no list to keep."""
