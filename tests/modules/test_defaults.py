"""One set of defaults: what `Halting()` is in Python, `modules=[halting]` is on the command line."""

import dataclasses
from typing import Any

import pytest
from omegaconf import OmegaConf

from quicksilver.modules import PRESETS, Halting
from quicksilver.records.identity import canonical
from quicksilver.runs.choices import choices, config_dir
from quicksilver.runs.config import compose
from quicksilver.runs.parts import build_modules, module_class, module_entry

DERIVED = ("full_mask", "forced_mask", "keep_mask", "protected_mask", "exempt_mask")  # tensors, which no yaml holds


def own(name: str) -> dict[str, Any]:
    """What a yaml of conf/modules says itself."""
    content = OmegaConf.to_container(OmegaConf.load(config_dir() / "modules" / f"{name}.yaml"))
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


BASES = [name for name in choices("modules") if "_target_" in own(name)]


@pytest.mark.parametrize("name", BASES)
def test_the_yaml_of_a_class_gives_its_defaults_and_says_nothing_itself(name: str) -> None:
    key, entry = module_entry(name)
    cls: Any = module_class(key, entry)
    assert set(own(name)) == {"_target_"}
    defaults = {option.name: option.default for option in dataclasses.fields(cls) if option.init and option.name not in DERIVED}
    assert {option: value for option, value in entry.items() if option != "_target_"} == canonical(defaults)
    (composed,) = build_modules(compose([f"modules=[{name}]"]).modules)
    ours = cls()
    words = {
        option for option in defaults if option.endswith("_ids") and defaults[option]
    }  # words have ids with a tokenizer only
    for option in set(defaults) - words:
        assert canonical(getattr(composed, option)) == canonical(getattr(ours, option)), option


def test_every_base_is_among_them() -> None:
    presets = set(choices("modules")) - set(BASES)
    assert presets
    for name in presets:
        (parent,) = (one.removesuffix("@_here_") for one in own(name)["defaults"] if one != "_self_")
        assert parent in BASES
        changed = set(own(name)) - {"defaults"}
        assert changed <= set(module_entry(parent)[1])


@pytest.mark.parametrize("preset", PRESETS)
def test_the_papers_constants_are_the_same_by_either_name(preset: str) -> None:
    entry = module_entry(f"halting_{preset.replace('-', '_')}")[1]
    halting = Halting(preset=preset)
    assert {key: canonical(getattr(halting, key)) for key in PRESETS[preset]} == {
        key: canonical(entry[key]) for key in PRESETS[preset]
    }
    assert {key for key, value in module_entry("halting")[1].items() if value != entry[key]} <= set(PRESETS[preset])
