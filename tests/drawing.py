"""Modules that several tests run: all four mechanisms, a preset, quantization with drawn options. Nothing here is a test."""

from typing import Any

import tiny
from hypothesis import strategies as st

from quicksilver.modules import AdaptiveQuantization, Halting, KVSkipping, LinearMLP, PresetHalting, TokenFusion
from quicksilver.runtime import RuntimeModule


def all_four() -> list[RuntimeModule]:
    """Of which each acts on the tiny models."""
    return [
        Halting(rule="capacity", halted_share=0.4, window=(0.2, 0.9), resume_layers=1),
        KVSkipping(),
        TokenFusion(rule="capacity", tau_fuse=None, fused_share=0.4, start=0.4),
        AdaptiveQuantization(depth=0.4, tau_low=3.6, tau_high=3.9),
    ]


class Preset(PresetHalting):
    """With a random map, as no translator ships with a tiny model."""

    def bind(self, architecture: Any) -> None:
        self.translator = tiny.random_translators(architecture)[self.schedule.predict_before - 1]
        self.maps = tiny.random_mlp_maps(architecture)
        super().bind(architecture)


class RandomMLP(LinearMLP):
    """Likewise."""

    def bind(self, architecture: Any) -> None:
        self.maps = tiny.random_mlp_maps(architecture)
        super().bind(architecture)


def quantizing(causal: bool = True) -> st.SearchStrategy[AdaptiveQuantization]:
    """Entropies of the tiny models lie between 2.9 and 4.1 nats."""
    rules = [{"tau_low": 3.5, "tau_high": 3.8}, {"mix": (0.3, 0.4, 0.3)}, {"bits": 4}, {"widths": (2, 8, 16), "mix": (0.3, 0.4, 0.3)},
             {"source": "latent", "tau_low": 2.2, "tau_high": 2.8}]  # fmt: skip
    if not causal:
        rules = [*rules, {"normalisation": "minmax", "tau_low": 0.3, "tau_high": 0.6}]
    executions: list[dict[str, Any]] = [{}, {"execution": "int8"}, {"execution": "int8", "weights": "token"}, {"weights": "token"},
                                        {"scope": "residual"}, {"group_size": None}]  # fmt: skip
    return st.builds(
        lambda rule, execution, depth, **options: AdaptiveQuantization(**rule, **execution, depth=depth, **options),
        st.sampled_from(rules), st.sampled_from(executions), st.sampled_from([0.2, 0.5]), reassign=st.booleans(), kv=st.booleans(),
        kv_group_size=st.sampled_from([32, 3]),
    )  # fmt: skip
