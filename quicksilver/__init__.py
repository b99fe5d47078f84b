"""QuickSilver: runtime, token-level acceleration of frozen causal language models, measured honestly (arXiv 2506.22396).

with quicksilver.apply(model, [Halting(), KVSkipping()]) as run:
    logits = model(input_ids).logits
run.trace, run.flops, run.kv_bytes
"""

__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    # torch and transformers take seconds to import; `make help`, tables and reports do not need them.
    if name == "apply":
        from quicksilver.runtime import apply

        return apply
    raise AttributeError(f"module 'quicksilver' has no attribute {name!r}")
