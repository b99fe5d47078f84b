"""Any value that a person gives reaches the config as it was given."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from quicksilver.runs.composing import quoted
from quicksilver.runs.config import compose

UNREADABLE = ["é", "~", "#", "'", "(", "&", "\\"]


@given(
    st.text(st.characters(codec="utf-8", exclude_characters=",$\n\r\0", exclude_categories=["C"]), min_size=1),
    st.sampled_from("é~#&"),
)
def test_what_hydra_cannot_read_alone_keeps_every_character(value, strange):
    given_value = f"/a{value}{strange}b"
    (override,) = quoted([f"results_dir={given_value}"])
    assert OverridesParser.create().parse_override(override).value() == given_value


@pytest.mark.parametrize(
    "override", ["model=gpt2", "modules=[halting,kv_skipping]", "seed=1,2", "a.b={x:1}", "word", "~modules", "x=[é]"]
)
def test_what_it_reads_and_what_is_no_text_stays(override):
    assert quoted([override]) == [override]


@pytest.mark.parametrize("template", ["{sentence} It was", "{premise}\n{hypothesis}", "{text}", "{choices[0]}: it's {label}?"])
def test_a_template_needs_no_quotes_of_its_own(template):
    (override,) = quoted([f"dataset.task.template={template}"])
    assert OverridesParser.create().parse_override(override).value() == template


@pytest.mark.parametrize("character", UNREADABLE)
def test_a_folder_may_be_called_anything(character):
    assert compose([f"results_dir=/tmp/a{character}b"]).results_dir == f"/tmp/a{character}b"
