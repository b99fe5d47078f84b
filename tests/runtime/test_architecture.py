"""What a family's adapter says of its layers: K and V before the rotation, and the norm before its gain."""

from __future__ import annotations

import pytest
import tiny
import torch

from quicksilver.runtime import architecture_of


@pytest.fixture(params=tiny.FAMILIES)
def arch(request: pytest.FixtureRequest):
    return architecture_of(tiny.load(request.param))


def rotary_of(arch, n: int, layer: int):
    if not hasattr(arch.base, "rotary_emb"):
        return None
    kind = (
        [arch.config.layer_types[layer]] if arch.config.model_type == "gemma3_text" else []
    )  # factors of their own for each kind
    return arch.base.rotary_emb(torch.zeros(1, n, arch.width), torch.arange(3, n + 3)[None], *kind)


def test_rotating_unrotated_keys_gives_the_layers_own(arch) -> None:
    hidden, moved = torch.randn(2, 6, arch.width), False
    for layer in range(arch.n_layers):
        rotary = rotary_of(arch, 6, layer)
        keys, values = arch.project_kv(layer, hidden, rotary)
        raw, same_values = arch.project_kv_unrotated(layer, hidden)
        torch.testing.assert_close(arch.rotate_keys(layer, raw, rotary), keys)
        torch.testing.assert_close(same_values, values)
        moved |= not torch.allclose(raw, keys)
    assert moved == (rotary is not None)


def test_gain_and_bias_on_the_normalised_input_give_the_norm(arch) -> None:
    hidden = 3 * torch.randn(2, 6, arch.width) + 1
    norm = arch.input_norm(1)
    bias = 0 if getattr(norm, "bias", None) is None else norm.bias
    gain = getattr(norm, "weight", torch.ones(()))  # OLMo 2 has no norm there
    gain = 1 + gain if arch.family == "gemma" else gain
    torch.testing.assert_close(arch.normalised_input(1, hidden) * gain + bias, norm(hidden))
