"""One file per table or figure of the paper, `table11_ablation.py`, `figure08_….py`. Found by name: there is no list to keep."""
