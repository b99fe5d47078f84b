"""The claims ledger: what records answer is judged, and what nothing answers says why. No model is run here."""

import re
from pathlib import Path
from unittest.mock import Mock

import fakes
import pandas as pd
import pytest
from saying import unsaid

import quicksilver.runs.config as harness_config
from quicksilver.cli.commands import reproduce
from quicksilver.records.store import Store
from quicksilver.report.artefacts import Artefact, Outcome, Row, find
from quicksilver.report.claims import ledger as claims
from quicksilver.report.claims.ledger import TUNED, AnsweredBy, Source, Statement, frame, ledger, standing, told
from quicksilver.report.claims.reported import Estimate, contradictions, reported
from quicksilver.runtime.errors import ConfigError

COMMAND = "quicksilver reproduce table 11"


class Experiment:
    """Two rows: dense inference, and one run that answers what `answers` says."""

    def __init__(self, answers=None, named: str | None = "table11.isolated.halting"):
        self.ANSWERS = answers or {}
        self.named = named

    def rows(self):
        return [
            Row("all", "", "baseline", "Dense", ("modules=[]",), reported="table11.baseline"),
            Row("all", "", "run", "Run", ("modules=[halting]",), reported=self.named),
        ]


def source(results: Path, *, answers=None, named="table11.isolated.halting", reason=None, changes=None, **run) -> Source:
    """Records of both rows; `run` says how fast and how bad the second is, None that there is no record."""
    artefact = Artefact("table", ("11",), Path("table11_ablation.py"))
    artefact.__dict__["experiment"] = Experiment(answers, named)
    dense = fakes.make(results, "dense all", "all", **(changes or {}))
    baseline, row = artefact.experiment.rows()
    outcomes = [Outcome(baseline, dense, dense)]
    if run:
        run = {"per_token": 0.0, "null_per_token": 0.05, "noise_pct": 0.5} | run
        record = fakes.make(results, f"run {sorted(run.items())} {changes}", "all", **run, **(changes or {}))
        outcomes.append(Outcome(row, record, dense))
    else:
        outcomes.append(Outcome(row, reason=reason))
    return Source(artefact, outcomes, COMMAND)


def row(sources, claim: str) -> pd.Series:
    found = frame(sources)
    found = found[found["claim"] == claim]
    assert len(found) == 1
    return found.iloc[0]


def halting(tmp_path, quantity: str, **options) -> pd.Series:
    return row([source(tmp_path, **options)], f"table11.isolated.halting.{quantity}")


def test_without_records_every_claim_and_contradiction_has_a_row_that_says_why():
    found = frame([])
    expected = {f"{entry.id}.{name}" for entry in reported().values() for name in entry.quantities}
    assert set(found.loc[found["kind"].isin(("claim", claims.SETTING)), "claim"]) == expected
    assert set(found.loc[found["kind"] == "conflict", "claim"]) == {f"conflict.{row.id}" for row in contradictions()}
    judged = found[found["kind"] == "claim"]
    assert set(judged["verdict"]) == {"not measured", "not comparable", "by definition"}
    fixed = judged.loc[judged["verdict"] == "by definition", "claim"].tolist()
    assert fixed == ["table3.uniform8.flops_saved_pct", "i3.bound.bound_holds_share"]  # whatever is measured
    of_tokens = judged[judged["claim"].str.startswith("table5.")]
    assert set(of_tokens["verdict"]) == {"not comparable"}  # levels of one sentence in a model without a name
    assert (judged["why"] != "").all()
    assert judged["measured"].isna().all()
    setting = found.set_index("claim").loc["b2.thresholds.tau_drift"]
    assert (setting["verdict"], setting["reported"]) == ("not comparable", "0.045")
    assert "conf/modules/halting_paper_b2.yaml: tau_drift" in setting["why"]


@pytest.mark.parametrize(("saved", "faster", "per_token", "more", "verdicts"), [
    (0.25, 0.20, 0.003, {}, ["reproduced"] * 3),
    (0.10, 0.08, 0.003, {}, ["partly"] * 3),  # quality at less than the claimed saving
    (0.25, 0.20, 0.2, {}, ["not reproduced"] * 3),
    (0.25, 0.20, 0.0095, {}, ["partly"] * 3),  # quality that partly holds
    (0.25, 0.20, 0.0068, {"spread": 40.0}, ["undecided"] * 3),  # quality that is undecided
    (0.10, 0.08, 0.2, {}, ["not reproduced"] * 3),
    (0.0, -0.30, 0.2, {}, ["not reproduced"] * 3),
])  # fmt: skip
def test_a_saving_is_judged_with_the_quality_that_it_is_claimed_with(tmp_path, saved, faster, per_token, more, verdicts):
    sources = [source(tmp_path, saved=saved, faster=faster, per_token=per_token, **more)]
    found = [row(sources, f"table11.isolated.halting.{name}") for name in ("flops_saved_pct", "speedup_pct", "delta_ppl")]
    assert [one["verdict"] for one in found] == verdicts
    if saved > 0.2 and verdicts[0] != "reproduced":
        assert "by itself, but table11.isolated.halting.delta_ppl, claimed with it" in found[0]["why"]


def test_perplexity_is_compared_in_percent_of_the_papers(tmp_path):
    found = halting(tmp_path, "delta_ppl", saved=0.2, faster=0.2, per_token=0.003)
    assert (found["target_low"] + found["target_high"]) / 2 == pytest.approx(100 * 0.12 / 18.2)
    assert found["measured"] == pytest.approx(100 * 0.003, abs=0.1)
    assert found["measured_low"] < found["measured"] < found["measured_high"]
    assert found["versus_null"] == "better than chance"
    found = halting(tmp_path, "delta_ppl", saved=0.2, per_token=0.05, null_per_token=0.01)
    assert found["versus_null"] == "worse than chance"


def test_better_than_chance_is_decided_over_all_tests_of_the_ledger(tmp_path, monkeypatch):
    monkeypatch.setattr("quicksilver.report.claims.ledger.false_discovery", lambda p_values: [0.06 for _ in p_values])
    assert halting(tmp_path, "delta_ppl", saved=0.2)["versus_null"] == "no better than chance"


def test_a_row_names_where_its_number_comes_from(tmp_path):
    found = halting(tmp_path, "speedup_pct", saved=0.2, faster=0.2)
    assert found[["artefact", "protocol", "execution", "model", "data"]].tolist() == [
        *("table11", "all", "compact", "reference-gpt2", "python-docs")
    ]
    assert Store(tmp_path).get(found["record"]) is not None
    one = source(tmp_path, answers={"table11.isolated.halting": AnsweredBy("all", "run")}, saved=0.2)
    assert (frame([one, one])["claim"] == found["claim"]).sum() == 1  # the same record answers a claim once
    assert found["dense_record"] == fakes.fingerprint("dense all")
    assert found["command"] == COMMAND


NO_ENERGY = ConfigError("record.json has no entry 'energy'")
FAST, SIMULATED = "table11.isolated.halting.speedup_pct", {"kernels": {"one": "float products"}}


@pytest.mark.parametrize(("claim", "options", "of", "verdict", "why"), [
    (FAST, {}, None, "not measured", f"no record: {COMMAND}"),
    (FAST, {"reason": "refused under all"}, None, "not measured", "refused under all"),
    (FAST, {"saved": 0.3, "changes": SIMULATED}, None, "not measured", "simulated"),
    ("table11.isolated.halting.delta_ppl", {"saved": 0.3, "changes": {"lookahead": True}}, None, "not comparable", "looks ahead"),
    ("o.bound.bound_holds_share", {"saved": 0.2}, lambda panel: Estimate(1.0, 1.0, 1.0), "not comparable", "γ is any constant"),
    ("f2.joint.speedup_pct", {"saved": 0.2}, Mock(side_effect=NO_ENERGY), "not measured", "record.json has no entry 'energy'"),
])  # fmt: skip
def test_what_is_not_judged_says_why(tmp_path, claim, options, of, verdict, why):
    answers = {} if of is None else {claim: AnsweredBy("all", "run", of=of)}
    found = row([source(tmp_path, answers=answers, **options)], claim)
    assert found["verdict"] == verdict
    assert why in found["why"]


def test_what_is_true_by_definition_is_not_counted(tmp_path):
    quantized = "table11.isolated.quantization.flops_saved_pct"
    sources = [source(tmp_path, answers={quantized: AnsweredBy("all", "run", by_definition="nothing else")}, saved=0.2)]
    zero = "dense inference itself: zero by definition"
    for claim, why in (("table11.baseline.speedup_pct", zero), (quantized, "nothing else")):
        found = row(sources, claim)
        assert (found["verdict"], found["why"]) == ("by definition", why)
    assert found["measured"] == pytest.approx(20)
    made = ledger(sources)
    assert not any("by definition" in text for text in (made.title, *(panel.title for panel in made.panels)))


def test_a_charge_that_was_chosen_to_give_a_number_does_not_reproduce_it(tmp_path):
    claim, run = "table3.uniform8.flops_saved_pct", {"saved": 0.25, "per_token": 0.003}
    found = row([source(tmp_path, named="table3.uniform8", **run)], claim)
    assert found["verdict"] == "by definition"
    assert "circular" in found["why"]
    # Another ledger, declared as an answer of its own, is judged.
    own = {claim: AnsweredBy("all", "run", of=lambda panel: Estimate(0.0, 0.0, 0.0), note="another β")}
    found = row([source(tmp_path / "own", named=None, answers=own, **run)], claim)
    assert (found["verdict"], found["note"]) == ("not reproduced", "another β")


@pytest.mark.parametrize("claim", ["table11.isolated.kv_skipping.flops_saved_pct", "p4.isolated.kv_skipping.flops_saved_pct"])
def test_what_the_papers_formula_cannot_count_is_judged_in_the_nominal_ledger(tmp_path, claim):
    one = source(tmp_path, named=claim.rpartition(".")[0], saved=0.2, per_token=0.003)
    for name in ("record", "dense"):
        windows = getattr(one.outcomes[1], name).windows
        windows["nominal_flops"] = 100 - 12 * (name == "record")
    assert row([one], claim)["measured"] == pytest.approx(12.0)


def test_an_absolute_number_is_compared_on_its_own_model_only(tmp_path):
    answers = {"table3.baseline.ppl": AnsweredBy("all", "baseline")}
    own = {"model": {**fakes.described("any")["model"], "name": "gpt2-large"}}
    for changes, verdict in ((None, "not comparable"), (own, "partly")):
        sources = [source(tmp_path / verdict, answers=answers, saved=0.2, changes=changes)]
        found = row(sources, "table3.baseline.ppl")
        assert found["verdict"] == verdict  # the hand-made perplexity is about 30, claimed are 18.2
        assert found["measured"] == pytest.approx(sources[0].outcomes[0].record.quality.ppl)


def test_a_file_declares_what_else_it_answers(tmp_path):
    answers = {
        "p4.joint": AnsweredBy("all", "run"),
        "k.decay.decay_per_layer": AnsweredBy("all", "run", of=lambda panel: Estimate(0.07, 0.06, 0.08), note="a fit"),
        "o.two_bits.two_bit_share_pct": AnsweredBy("all", "run", of=lambda panel: None),
    }
    sources = [source(tmp_path, answers=answers, saved=0.5, per_token=0.003)]
    joint, decay = row(sources, "p4.joint.flops_saved_pct"), row(sources, "k.decay.decay_per_layer")
    assert (joint["verdict"], joint["measured"]) == ("reproduced", pytest.approx(50))
    assert (decay["verdict"], decay["note"]) == ("reproduced", "a fit")
    assert row(sources, "o.two_bits.two_bit_share_pct")["verdict"] == "not measured"
    # P.4's savings are claimed with P.4's stability.
    worse = [source(tmp_path, answers=answers, saved=0.5, per_token=0.3)]
    assert row(worse, "p4.joint.flops_saved_pct")["verdict"] == "not reproduced"


@pytest.mark.parametrize(
    ("claim", "key", "said"), [("table11.nonsense", "run", "table11.nonsense"), ("p4.joint", "missing", "missing")]
)
def test_an_answer_to_nothing_is_refused(tmp_path, claim, key, said):
    with pytest.raises(ConfigError, match=said):
        frame([source(tmp_path, answers={claim: AnsweredBy("all", key)})])


def test_it_is_readable_in_a_terminal(tmp_path):
    text = ledger([source(tmp_path, saved=0.25, faster=0.2, per_token=0.003)]).text(150)
    assert max(map(len, text.splitlines())) <= 150
    assert text.startswith("The claims of arXiv 2506.22396 on reference-gpt2 and python-docs: ")
    settings = [one for one in reported().values() if one.group == "Settings"]
    assert f"Settings: {sum(len(entry.quantities) for entry in settings)} settings" in text
    for heading in ("Operations and perplexity", "Time", "Energy", "Tasks", "Settings", claims.CONTRADICTIONS):
        assert heading in text
    line = next(part for part in text.splitlines() if part.lstrip().startswith("table11.isolated.halting.delta_ppl"))
    assert line.split()[1:3] == ["0.12", "+0.66%"]
    assert "reproduced" in line


@pytest.mark.parametrize(("ends", "fails", "verdict"), [
    ((0.01, 0.2), False, "reproduced"),
    ((-0.01, 0.2), False, "undecided"),
    ((-0.2, -0.01), False, "not reproduced"),
    ((0.01, 0.2), True, "not reproduced"),
    (None, False, "not measured"),
])  # fmt: skip
def test_a_verdict_is_where_the_interval_lies(ends, fails, verdict):
    estimate = None if ends is None else Estimate(sum(ends) / 2, *ends)
    assert Statement("a.b", "a paper", "words", "this minus that", estimate, "why", fails).verdict == verdict


def test_the_ledger_has_the_statements_of_the_study_and_does_not_count_them():
    artefact = find("table", "token_halting_claims")
    table = ledger([Source(artefact, [], "make it")])
    found = table.frame[table.frame["kind"] == claims.STATEMENT]
    assert set(found["panel"]) == {"arXiv 2303.05078 (Ye et al., token halting)"}
    assert artefact.build([], artefact.name).frame["verdict"].tolist() == found["verdict"].tolist()
    assert f"{len(standing(table.frame))} outcomes, each counted once" in table.title


def test_an_outcome_counts_once_by_its_least_favourable_row_and_says_how_it_is_elsewhere(tmp_path):
    answers = {"p4.joint": (AnsweredBy("all", "run"), AnsweredBy("all", "run", of=lambda panel: Estimate(20.0, 19.0, 21.0)))}
    found = frame(sources := [source(tmp_path, answers=answers, saved=0.5, per_token=0.003)])
    assert set(found.loc[found["claim"] == "p4.joint.flops_saved_pct", "verdict"]) == {"reproduced", "partly"}
    assert standing(found)["p4.joint.flops_saved_pct"] == "partly"
    table = ledger(sources, others={"another": found.assign(verdict="not reproduced")})
    beside = table.frame.set_index("claim").loc["p4.joint.flops_saved_pct", "elsewhere"]
    assert set(beside) == {"another: not reproduced"}
    assert "another: " in table.title
    undecided = found.assign(verdict="undecided")
    table = ledger(sources, others={"wide": undecided, "absent": undecided.assign(verdict="not measured")})
    assert set(table.frame.set_index("claim").loc["p4.joint.flops_saved_pct", "elsewhere"]) == {"wide: undecided"}


def test_the_verdict_on_a_tuned_setting_stands_beside_and_is_not_counted(tmp_path):
    claim = "table11.isolated.halting.flops_saved_pct"
    plain = frame([source(tmp_path, saved=0.05, per_token=0.003)])
    answers = {"table11.isolated.halting": AnsweredBy("all", "run", tuned=True)}
    tuned = source(tmp_path, answers=answers, named=None, saved=0.25, per_token=0.003)
    found = frame([source(tmp_path, saved=0.05, per_token=0.003), tuned])
    assert standing(found) == standing(plain)
    of_claim = found[found["claim"] == claim].set_index("kind")
    assert list(of_claim.index) == ["claim", TUNED]
    said = of_claim.loc["claim", "tuned"]
    assert said.startswith("reproduced: 25.")
    alone = frame([tuned])
    rows = alone.loc[alone["claim"] == claim, ["kind", "verdict", "tuned"]]
    assert rows.to_numpy().tolist() == [["claim", "not measured", said], [TUNED, "reproduced", ""]]
    assert not any(panel.key == TUNED for panel in ledger([tuned]).panels)
    shown = told(found, [claim])
    assert shown.count("  row alone  quicksilver run ") == 2
    assert re.search(r"\n  tuned      25\.\d%.*, protocol=all, .*\n  note .*\n  verdict    reproduced\n", shown)


def test_claims_of_which_the_same_is_said_are_told_together(tmp_path):
    shown = told(frame([source(tmp_path)]), ["table5.halting"])
    assert shown.count("a layer or a number of one sentence") == 1
    assert shown.count('“"to": halted @ layer 20”') == 1
    assert "≥ 0" not in shown


HALTED, PAIRS = "table2.determiners.halted_share_pct", "table9.layer12.random_precision_pct"


@pytest.mark.parametrize(("claim", "share", "beyond", "verdict"), [
    (HALTED, 90.0, (50.0, 45.0, 55.0), "partly"),  # 53.5 points above what any token of Table 2 halts at are claimed
    (HALTED, 92.0, (55.0, 54.0, 56.0), "reproduced"),
    (HALTED, 92.0, (0.5, -0.5, 1.5), "not reproduced"),
    (HALTED, 60.0, (-20.0, -22.0, -18.0), "not reproduced"),
    (HALTED, 92.0, (30.0, 2.0, 58.0), "undecided"),
    (PAIRS, 48.2, (-0.4, -2.1, 1.3), "not reproduced"),
    (PAIRS, 48.2, (-31.0, -33.0, -29.0), "reproduced"),
])  # fmt: skip
def test_a_share_is_judged_by_its_difference_from_chance_or_from_fused_pairs(tmp_path, claim, share, beyond, verdict):
    measured, difference = Estimate(share, share - 1, share + 1), Estimate(*beyond)
    answer = AnsweredBy("all", "run", of=lambda panel: measured, beyond_chance=lambda record: difference)
    found = row([source(tmp_path, answers={claim: answer}, saved=0.2)], claim)
    assert found["verdict"] == verdict
    assert unsaid(found["why"], "points", "from chance" if claim == HALTED else "from fused pairs") == []


@pytest.mark.parametrize(("claim", "low", "high"), [
    ("e7.latency.latency_saved_ms", 2.52, 2.61),  # 3.1 of 121.0 ms
    ("f2.kv_skipping.emissions_g_per_token", 31.68, 34.95),  # 0.34 of 0.51 g
])  # fmt: skip
def test_times_and_emissions_are_compared_in_percent_of_dense_ones(claim, low, high):
    found = row([], claim)
    assert (found["target_low"], found["target_high"]) == (pytest.approx(low, abs=0.05), pytest.approx(high, abs=0.05))


def test_a_number_that_is_printed_again_counts_once(tmp_path):
    (entry,) = (one for one in reported().values() if one.id == "faq.joint")
    found = frame([source(tmp_path, named="faq.joint", saved=0.5, per_token=0.003)])
    counted = standing(found)
    assert f"{entry.id}.flops_saved_pct" not in counted
    assert counted[f"{entry.same_as}.flops_saved_pct"] == "reproduced"


# --- the command ----------------------------------------------------------------------------------------------------------------
@pytest.fixture
def table11(harness, monkeypatch):
    """Two experiments over hand-made records, which the others would not find their numbers in."""
    monkeypatch.setattr(reproduce, "artefacts", lambda: [find("table", "11"), find("figure", "6")])
    return harness


def test_the_command_runs_nothing_and_writes_the_ledger(table11, prints):
    shown = prints("claims", f"results_dir={table11.results}").out
    assert table11.made == []
    assert "quicksilver reproduce table 11" in " ".join(shown.split())
    assert {path.name for path in table11.results.iterdir() if path.is_file()} == {"claims.csv", "claims.json", "claims.md"}


def test_some_claims_are_told_with_their_commands_and_records(table11, prints, refused):
    shown, err = prints("claims", "Table 11.isolated.halting", "c3.percentile", f"results_dir={table11.results}")
    assert "(slower)" not in shown  # nothing was measured
    kept = Path(reproduce.__file__).parents[3] / "results"
    assert f"has no record that answers. The repository's records do: results_dir={kept}." in err
    assert unsaid(shown, "c3.percentile.percentile (Appendix C.3)", "  repeat     quicksilver reproduce table 11") == []
    assert "kv_skipping" not in shown.partition("c3.percentile")[0]
    assert not list(table11.results.glob("claims*"))
    said = refused("claims", "table11.isolated.haltng", f"results_dir={table11.results}")
    assert "no claim's name begins so. Did you mean table11.isolated.halting" in said


def test_what_was_looked_up_is_remembered_with_and_without_a_record(table11, prints, monkeypatch):
    words = ["claims", f"results_dir={table11.results}"]
    prints(*words)
    before = (table11.results / "claims.csv").read_bytes()
    composed: list[tuple[str, ...]] = []
    compose = harness_config.compose
    monkeypatch.setattr(harness_config, "compose", lambda overrides=(): composed.append(tuple(overrides)) or compose(overrides))
    prints(*words)
    assert not any("modules" in override for line in composed for override in line)  # no row's
    assert (table11.results / "claims.csv").read_bytes() == before
    # Remembered as missing is not remembered for ever: the table makes its runs, and the claims see them.
    prints("reproduce", "table", "11", f"results_dir={table11.results}")
    assert table11.made
    prints(*words)
    assert (table11.results / "claims.csv").read_bytes() != before


def test_a_damaged_record_is_named_and_the_rest_is_judged(table11, prints):
    prints("reproduce", "table", "11", f"results_dir={table11.results}")
    (table11.results / "runs" / fakes.fingerprint("halting all") / "record.json").write_text("{")
    assert fakes.fingerprint("halting all") in prints("claims", f"results_dir={table11.results}", code=1).err
    found = pd.read_csv(table11.results / "claims-mine.csv", keep_default_na=False)
    judged = found[found["claim"] == "table11.isolated.quantization.delta_ppl"]
    assert sorted(judged["protocol"]) == ["all", "continuation"]
    assert set(judged["verdict"]) == {"not reproduced"}
