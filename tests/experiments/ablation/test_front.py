"""Table front: its runs are those of other tables, and the columns of far recall and of texts are read from runs of their own."""

from typing import Any

import fakes
import pandas as pd
import pytest
import yaml
from repository import ROOT
from saying import unsaid

from quicksilver.experiments.ablation import front, prompts, table11_ablation
from quicksilver.experiments.sweeps import table_fair_trial
from quicksilver.measure.generation import GREEDY, SAMPLED
from quicksilver.measure.needle import column
from quicksilver.models.loading import EMBEDDED
from quicksilver.records.store import Store
from quicksilver.report.artefacts import Outcome, find
from quicksilver.report.table import ENDS, read
from quicksilver.runs.choices import choices


@pytest.mark.parametrize(
    ("panel", "elsewhere", "keys"),
    [
        (front.RECALL, prompts.far_context_rows, ["dense", "position", "truncated", "40"]),
        (front.WRITTEN, prompts.generation_rows, ["cumulative.quantization", "position", "truncated", "40"]),
    ],
)
def test_the_runs_of_a_column_are_those_of_its_table(panel, elsewhere, keys) -> None:
    there = {row.overrides for row in elsewhere()}
    assert [row.key for row in front.front_rows() if row.panel == panel and row.overrides in there] == keys


def test_the_figure_of_far_context_draws_the_rows_of_its_table(tmp_path) -> None:
    lost = {"predicted": 0.02, "truncated": 0.08, "position": 0.2, "random": 0.5}
    rows = [row for row in prompts.far_context_rows() if row.key in {"dense", *lost}]
    assert find("figure", "far_context").experiment.rows() == find("table", "far_context").experiment.rows()
    outcomes = fakes.outcomes(tmp_path, rows, lambda row: {"per_token": lost.get(row.key, 0.0), "saved": 0.4})
    made = find("figure", "far_context").build(outcomes, "figure_far_context")
    assert {*zip(made.frame["panel"], made.frame["key"], strict=True)} == {
        (text, key) for text in prompts.FAR_TEXTS for key in lost
    }
    assert made.finding.startswith("Answers far back: predicting K/V costs +")
    some = prompts.figure_far_context([one for one in outcomes if one.row.key != "truncated"], "x")
    assert not some.finding


def test_tuned_rows_are_the_best_chance_of_table_11() -> None:
    best = {row.key: row for row in table11_ablation.rows()}
    same = [one for one in table_fair_trial.BEST.items() if one in front.TUNED]
    assert [mechanism for mechanism, _ in same] == ["halting", "halting_prompt", "fusion"]
    for mechanism, budget in same:
        row = next(row for row in front.front_rows() if row.key == f"tuned.{mechanism}.{budget}")
        for model in ("reference-gpt2", "reference-llama"):
            ours, timed = ({*one.words([f"model={model}"])} for one in (row, best[f"best.{mechanism}"]))
            assert not any("module" in word or "layers" in word for word in ours ^ timed)


def test_each_row_has_the_far_recall_and_the_texts_of_its_own_module(tmp_path) -> None:
    lost = {"position": 0.1, "40": 0.02}

    def made(row):
        texts = fakes.generated() if (row.panel, row.key) == (front.WRITTEN, "40") else {}
        return {"per_token": lost[row.key] * (1 if row.panel == front.RECALL else 0.5), "saved": 0.4, **texts}

    rows = [row for row in front.front_rows() if row.key in lost and (row.panel, row.key) != (front.WRITTEN, "position")]
    outcomes = fakes.outcomes(tmp_path, rows, made)
    frame = front.table_front(outcomes, "table_front").frame.set_index("key")
    assert list(frame.index) == ["position", "40"]
    for key, nats in lost.items():
        assert frame.loc[key, "recall_delta_ppl_pct"] > frame.loc[key, "delta_ppl_pct"] > 0
        assert frame.loc[key, "recall_delta_ppl_pct"] == pytest.approx(100 * (2.718281828**nats - 1), rel=0.05)
    assert frame["agreement"].fillna(-1).to_dict() == {"position": -1, "40": 25}


def test_a_record_knows_whether_it_acted_on_scored_tokens() -> None:
    """By its operations alone: the paper's thresholds halt a few scored tokens, all others here act in the prompt."""
    rows = read(ROOT / "results" / "tables" / "table_front.json").entries
    store = Store(ROOT / "results")
    acts = {row["key"]: store.get(str(row["record"])).acts_on_scored for row in rows if row["panel"] == front.PANEL}
    assert [key for key, found in acts.items() if found] == ["isolated.halting", "tuned.halting.15", "cumulative.quantization"]


def test_nothing_is_chosen_for_the_second_training():
    rows = {(row.panel, row.key): row.overrides for row in front.seeds_rows()}
    one, other = front.SEEDS
    assert {key: [word.replace(one, other) for word in words] for key, words in rows.items() if key[0].startswith(f"{one}.")} == {
        (panel.replace(other, one), key): [*words] for (panel, key), words in rows.items() if panel.startswith(f"{other}.")
    }
    schedule = yaml.safe_load((EMBEDDED / one / "predicted_kv" / "schedules.yaml").read_text())["schedules"][40]["schedule"]
    del schedule["protect_at_most"]  # prompts have 448 tokens here
    assert yaml.safe_load(front.SCHEDULE.replace(":", ": ")) == schedule
    shared = [row for row in front.seeds_rows() if row.key in front.BOTH and row.panel.startswith(f"{one}.")]
    # Truncation keeps what the module does by default: the second model's weights are not kept, so its records stay.
    of_front = {tuple(sorted((*row.overrides, f"model={one}"))) for row in front.front_rows()}
    of_front = {tuple(word for word in words if ".keep=" not in word) for words in of_front}
    assert {tuple(sorted(row.overrides)) for row in shared} <= of_front


def test_what_is_found_of_a_needle_is_compared_prompt_by_prompt(tmp_path) -> None:
    def answers(lost: int) -> dict[str, Any]:
        """Half of a needle is found behind the first `lost` depths, and one eighth in them; eight windows of 16 have one."""
        asked = [i < 8 for i in range(fakes.WINDOW_COUNT)]
        share = {place: 0.125 if place == "absent" or place < lost else 0.5 for place in (*range(prompts.DEPTHS), "absent")}
        columns = {column("answered", place): [value if yes else None for yes in asked] for place, value in share.items()}
        return columns | {column("nats", place): [3 - value if yes else None for yes in asked] for place, value in share.items()}

    lost = {"dense": 0, "40": 2, "truncated": 4, "position": 5}
    dense = fakes.make(tmp_path, "dense", "continuation", columns=answers(0))
    rows = [row for row in prompts.needle_rows() if row.panel == "far-gpt2" and row.key in lost]
    outcomes = [
        Outcome(row, dense, dense)
        if row.key == "dense"
        else Outcome(row, fakes.make(tmp_path, row.key, "continuation", per_token=0.0, columns=answers(lost[row.key])), dense)
        for row in rows
    ]
    table = find("table", "needle").build(outcomes, "table_needle")
    less = dict(zip(table.frame["key"], table.frame["minus_dense"], strict=True))
    assert {key: less[key] for key in lost if key != "dense"} == {"40": -7.5, "truncated": -15.0, "position": -18.75}
    ours = table.frame.set_index("key").loc["40"]
    assert [ours[f"depth_{depth}"] for depth in range(3)] == [12.5, 12.5, 50]
    assert (ours["minus_dense_low"], ours["minus_dense_high"], ours["none"]) == (-7.5, -7.5, 12.5)
    assert (ours["nats"], ours["none_nats"]) == (pytest.approx(3 - 0.425), 2.875)
    figure = find("figure", "needle").build(outcomes, "figure_needle")
    assert figure.finding.startswith("far-gpt2: predicting K/V finds 8, truncating 15, dropping the oldest 19 points less")
    assert not prompts.figure_needle(outcomes[:2], "x").finding
    assert "failed" in prompts.table_needle([Outcome(rows[1], reason="failed")], "x").text(150)


# --- table generation: means over prompts, differences to dense paired by prompt ------------------------------------------------
def test_both_ways_of_decoding_share_their_runs():
    rows = prompts.generation_rows()
    assert {need for row in rows for need in row.needs} <= set(choices("modules"))
    of = {panel: {row.key: row.overrides for row in rows if row.panel == panel} for panel in prompts.WAYS}
    assert of[GREEDY] == of[SAMPLED]


def test_what_is_printed_is_what_was_measured_and_agreement_is_compared_with_the_first_row_prompt_by_prompt(tmp_path):
    dense, run, other = (
        fakes.make(tmp_path, name, "continuation", per_token=lost, saved=saved, **texts)
        for name, lost, saved, texts in (
            ("dense continuation", None, 0.0, {}), ("run", 0.01, 0.4, fakes.generated()), ("other", 0.01, 0.0, fakes.generated(0.5)),
        )
    )  # fmt: skip
    rows = prompts.generation_rows()
    rows = [*rows[:2], next(row for row in rows if (row.panel, row.key) == (SAMPLED, "quicksilver"))]
    made = prompts.table_generation([Outcome(row, one, dense) for row, one in zip(rows, (run, other, run), strict=True)], "table")
    greedy, second, sampled = (row for _, row in made.frame.iterrows())
    assert greedy["same_tokens_low"] < 7.5 < greedy["same_tokens_high"]
    assert (greedy["same_tokens"], greedy["flops_saved_pct"], greedy["nats_more"]) == pytest.approx((7.5, 40, 0.5))
    assert greedy["repeated_more_low"] > 0
    assert [sampled[f"repeated_more{end}"] for end in ENDS] == [0, 0, 0]
    assert pd.isna(greedy["agreement_less"])
    assert [second[f"agreement_less{end}"] for end in ENDS] == [25, 25, 25]
    text = " ".join(made.text(None).split())
    parts = ("0 of 16 to the end", "16 of 16 to the end", "16 prompts of 448 tokens, 64 new tokens", "+25.0 [+25.0 +25.0]")
    assert unsaid(text, *parts) == []
    failed = prompts.table_generation([Outcome(rows[0], reason="failed")], "table")
    assert "failed" in failed.text(120)


@pytest.mark.parametrize("name", ["table_front", "table_lengths", "table_context_used", "table_quicksilver"])
def test_truncation_saves_what_it_is_compared_at(name: str) -> None:
    rows = [row for row in read(ROOT / "results" / "tables" / f"{name}.json").entries if str(row["key"]).startswith("truncated")]
    saved = {(row["panel"], row["key"]): row["prompt_executed_flops_saved_pct"] for row in rows}
    asked = {one: 50 if one[1] == "truncated_50" else 40 for one in saved}
    assert saved
    assert {one: pct for one, pct in saved.items() if pct is not None and not -0.5 <= pct - asked[one] <= 1.2} == {}
