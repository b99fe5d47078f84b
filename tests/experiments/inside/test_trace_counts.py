"""What became of the tokens, counted from traces of real runs on a tiny model."""

import numpy as np
import pandas as pd
import pytest
from harness_world import LAYERS, PROMPT, WINDOW

from quicksilver.experiments.inside import trace_counts
from quicksilver.report.artefacts import find
from quicksilver.runs.config import compose
from quicksilver.runs.run import ensure
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.trace import Trace

MODULES = [
    "modules=[halting,kv_skipping,token_fusion,adaptive_quantization]",
    *("modules.halting.tau_drift=p70", "modules.halting.tau_entropy=p70", "modules.halting.resume_layers=1"),
    *("modules.token_fusion.rule=capacity", "modules.token_fusion.tau_fuse=null", "modules.token_fusion.fused_share=0.25"),
    *("modules.adaptive_quantization.tau_low=p30", "modules.adaptive_quantization.tau_high=p70"),
]


@pytest.fixture(scope="module")
def records(world, tmp_path_factory):
    base = [
        *world,
        f"results_dir={tmp_path_factory.mktemp('fates')}",
        "measure.null_control.enabled=false",
        "measure.audit.enabled=false",
    ]
    runs = (["protocol=continuation", *MODULES], ["protocol=all", "modules=[halting]"], [])
    return ensure([compose([*base, *more]) for more in runs])


@pytest.fixture(scope="module")
def layers(records):
    return trace_counts.by_layer(records[0])


def test_every_token_is_computed_halted_or_carried(records, layers):
    assert (layers["tokens"] == layers["active"] + layers["halted"] + layers["carried"]).all()
    assert set(layers["layer"]) == set(range(1, LAYERS + 1))
    assert sorted(layers["window"].unique()) == list(range(10))
    lengths = layers.groupby("part")["tokens"].unique()
    assert [set(lengths[part]) for part in ("prompt", "continuation")] == [{PROMPT}, {WINDOW - PROMPT - 1}]
    counts = Trace.load(records[0].trace_path).active_counts().tolist()
    assert layers.groupby("layer")["active"].sum().tolist() == counts


def test_at_most_the_fixed_share_of_each_prompt_is_merged_and_stays_so(layers):
    carried = layers[layers["part"] == "prompt"].groupby("layer")["carried"].sum()
    assert carried.iloc[0] == 0
    assert carried.is_monotonic_increasing
    assert 0 < carried.iloc[-1] <= 10 * int(0.25 * PROMPT)
    assert layers.loc[layers["part"] == "continuation", "carried"].eq(0).all()


def test_tokens_halt_until_they_take_part_again_and_widths_are_set_after_half_depth(records, layers):
    assert layers["halted"].sum() > 0
    assert trace_counts.first_resumed_layer(records[0]) == LAYERS  # resume_layers=1: the last one
    assert layers.loc[layers["layer"] == LAYERS, "halted"].eq(0).all()
    widths = layers[[f"bits_{width}" for width in trace_counts.WIDTHS]].sum(axis=1)
    late = layers["layer"] > LAYERS // 2
    assert widths[~late].eq(0).all()
    assert widths[late].sum() > 0
    assert (widths <= layers["active"]).all()


def test_branches_add_up_and_agree_with_the_layers(records, layers):
    branches = trace_counts.by_branch(records[0])
    assert (branches["tokens"] == branches["halted"] + branches["merged"] + branches["full"]).all()
    prompts = branches[branches["part"] == "prompt"]
    assert prompts["merged"].sum() == layers[(layers["part"] == "prompt") & (layers["layer"] == LAYERS)]["carried"].sum()
    assert prompts["halted_layers"].between(prompts["halted"], LAYERS * prompts["halted"]).all()


def test_under_all_there_is_one_part_and_a_dense_record_has_nothing_to_count(records):
    for count in (trace_counts.by_layer, trace_counts.by_branch):
        assert set(count(records[1])["part"]) == {"all"}
        with pytest.raises(ConfigError, match="no trace"):
            count(records[2])


def test_each_run_that_is_counted_is_a_row_of_table_11():
    for name, keys in (("4", [trace_counts.ALL_FOUR]), ("token_decay", trace_counts.DECAYING)):
        assert {row.key for row in find("figure", name).experiment.rows()} == {*keys}


def test_a_share_is_a_ratio_of_sums_with_its_interval():
    share = trace_counts.share_pct(pd.Series([1, 3] * 4), pd.Series([10, 10] * 4))
    assert share.value == pytest.approx(20)
    assert 10 < share.low < 20 < share.high < 30
    certain = trace_counts.share_pct(pd.Series(range(1, 9)), pd.Series(range(10, 90, 10)))
    assert (certain.value, certain.low, certain.high) == pytest.approx((10, 10, 10))


DEPTH = np.arange(1, 9)


def test_an_exponential_decay_is_found_again_and_what_is_none_is_a_bad_fit():
    def decay(active):
        frames = [pd.DataFrame({"window": window, "layer": DEPTH, "tokens": 1e6, "active": active}) for window in range(8)]
        return trace_counts.decay_per_layer(pd.concat(frames), 8)

    for alpha in (0.02, 0.1, 0.5):
        found, quality = decay(1e6 * np.exp(-alpha * DEPTH))
        assert (found.value, found.low, quality) == pytest.approx((alpha, alpha, 1))
    assert decay(np.where(DEPTH < 7, 1e6, 1e5))[1] < 0.7
