"""The four mechanisms as Table 11 runs them: each alone, then one after another."""

from __future__ import annotations

from collections.abc import Iterator

# claim in reported.yaml -> module in conf/modules, what the paper calls it; in the paper's order, which is also that of adding
TECHNIQUES = {
    "halting": ("halting", "Token halting"),
    "kv_skipping": ("kv_skipping", "KV skipping"),
    "fusion": ("token_fusion", "Token fusion"),
    "quantization": ("adaptive_quantization", "Quantization"),
}
# Fusion at a fixed share of each prompt, so that its null (random neighbours) has the same budget.
ALWAYS = {
    "fusion": ("modules.token_fusion.rule=capacity", "modules.token_fusion.tau_fuse=null"),
}
# Alone, KV skipping cannot follow halting (2.2): it skips the half of the tokens that gets least attention (C.2).
ALONE = {
    "kv_skipping": (
        "modules.kv_skipping.criterion=attention",
        "modules.kv_skipping.skipped_share=0.5",
        "modules.kv_skipping.min_depth=0.4",
    )
}


def steps() -> Iterator[tuple[str, str, str, tuple[str, ...], tuple[str, ...]]]:
    """Every mechanism alone, then one after another: section, key, technique, modules it needs, overrides."""
    for claim, (module, technique) in TECHNIQUES.items():
        overrides = (f"modules=[{module}]", *ALWAYS.get(claim, ()), *ALONE.get(claim, ()))
        yield "Isolated", f"isolated.{claim}", technique, (module,), overrides
    for count, (claim, (_, technique)) in enumerate(TECHNIQUES.items(), start=1):
        claims = tuple(TECHNIQUES)[:count]
        together = tuple(TECHNIQUES[one][0] for one in claims)
        always = tuple(word for one in claims for word in ALWAYS.get(one, ()))
        yield "Cumulative", f"cumulative.{claim}", f"+ {technique}", together, (f"modules=[{','.join(together)}]", *always)
