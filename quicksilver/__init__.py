"""QuickSilver: runtime, token-level acceleration of frozen causal language models, measured honestly (arXiv 2506.22396).

with quicksilver.apply(model, [Halting(), KVSkipping()]) as run:
    logits = model(input_ids).logits
run.trace, run.flops, run.kv_bytes

`apply`, the classes of `quicksilver.modules` and PRESETS are names of the package itself.
"""

import importlib

__version__ = "1.0.0"


def __getattr__(name: str) -> object:
    # torch and transformers take seconds to import; `make help`, tables and reports do not need them.
    if name == "apply":
        return importlib.import_module("quicksilver.runtime").apply
    if name[:1].isupper():  # a class or PRESETS; whatever else may be asked for is a folder of ours, found without any import
        modules = importlib.import_module("quicksilver.modules")
        if name in modules.__all__:
            return getattr(modules, name)
    raise AttributeError(f"module 'quicksilver' has no attribute {name!r}")


def __dir__() -> list[str]:
    named = importlib.import_module("quicksilver.modules").__all__
    return sorted({*globals(), "apply", *(name for name in named if name[:1].isupper())})
