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


def judged(results: Path, **options) -> pd.DataFrame:
    """By claim, the ledger of one source; a claim with several rows gives no single value."""
    return frame([source(results, **options)]).set_index("claim")


HALTING = "table11.isolated.halting"


def test_without_records_every_claim_and_contradiction_has_a_row_that_says_why():
    found = frame([])
    expected = {f"{entry.id}.{name}" for entry in reported().values() for name in entry.quantities}
    assert set(found.loc[found["kind"].isin(("claim", claims.SETTING)), "claim"]) == expected
    assert set(found.loc[found["kind"] == "conflict", "claim"]) == {f"conflict.{row.id}" for row in contradictions()}
    outcomes = found[found["kind"] == "claim"]
    assert set(outcomes["verdict"]) == {"not measured", "not comparable", "by definition"}
    fixed = outcomes.loc[outcomes["verdict"] == "by definition", "claim"].tolist()
    assert fixed == ["table3.uniform8.flops_saved_pct", "i3.bound.bound_holds_share"]  # whatever is measured
    of_tokens = outcomes[outcomes["claim"].str.startswith("table5.")]
    assert set(of_tokens["verdict"]) == {"not comparable"}  # levels of one sentence in a model without a name
    assert (outcomes["why"] != "").all()
    assert outcomes["measured"].isna().all()
    by_claim = found.set_index("claim")
    setting = by_claim.loc["b2.thresholds.tau_drift"]
    assert (setting["verdict"], setting["reported"]) == ("not comparable", "0.045")
    assert "conf/modules/halting_paper_b2.yaml: tau_drift" in setting["why"]
    ends = ["target_low", "target_high"]  # in percent of dense: 3.1 of 121.0 ms, 0.34 of 0.51 g
    assert by_claim.loc["e7.latency.latency_saved_ms", ends].tolist() == pytest.approx([2.52, 2.61], abs=0.05)
    assert by_claim.loc["f2.kv_skipping.emissions_g_per_token", ends].tolist() == pytest.approx([31.68, 34.95], abs=0.05)


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
    found = judged(tmp_path, saved=saved, faster=faster, per_token=per_token, **more)
    of_run = found.loc[[f"{HALTING}.{name}" for name in ("flops_saved_pct", "speedup_pct", "delta_ppl")]]
    assert of_run["verdict"].tolist() == verdicts
    if saved > 0.2 and verdicts[0] != "reproduced":
        assert f"by itself, but {HALTING}.delta_ppl, claimed with it" in of_run.iloc[0]["why"]


def test_a_row_has_its_number_in_percent_its_interval_and_where_it_comes_from(tmp_path):
    found = judged(tmp_path, saved=0.2, per_token=0.003).loc[f"{HALTING}.delta_ppl"]
    assert (found["target_low"] + found["target_high"]) / 2 == pytest.approx(100 * 0.12 / 18.2)
    assert found["measured"] == pytest.approx(100 * 0.003, abs=0.1)
    assert found["measured_low"] < found["measured"] < found["measured_high"]
    described = ["table11", "all", "compact", "reference-gpt2", "python-docs"]
    assert found[["artefact", "protocol", "execution", "model", "data"]].tolist() == described
    assert Store(tmp_path).get(found["record"]) is not None
    assert (found["dense_record"], found["command"]) == (fakes.fingerprint("dense all"), COMMAND)
    one = source(tmp_path, answers={HALTING: AnsweredBy("all", "run")}, saved=0.2)
    assert (frame([one, one])["claim"] == f"{HALTING}.delta_ppl").sum() == 1  # the same record answers a claim once


def test_better_than_chance_is_decided_over_all_tests_of_the_ledger(tmp_path, monkeypatch):
    def against_chance(**run) -> str:
        return judged(tmp_path, saved=0.2, **run).loc[f"{HALTING}.delta_ppl", "versus_null"]

    assert against_chance(per_token=0.003) == "better than chance"
    assert against_chance(per_token=0.05, null_per_token=0.01) == "worse than chance"
    monkeypatch.setattr("quicksilver.records.stats.false_discovery", lambda p_values: [0.06 for _ in p_values])
    assert against_chance() == "no better than chance"


NO_ENERGY = ConfigError("record.json has no entry 'energy'")
FAST, SIMULATED = f"{HALTING}.speedup_pct", {"kernels": {"one": "float products"}}


@pytest.mark.parametrize(("claim", "options", "of", "verdict", "why"), [
    (FAST, {}, None, "not measured", f"no record: {COMMAND}"),
    (FAST, {"reason": "refused under all"}, None, "not measured", "refused under all"),
    (FAST, {"saved": 0.3, "changes": SIMULATED}, None, "not measured", "simulated"),
    (f"{HALTING}.delta_ppl", {"saved": 0.3, "changes": {"lookahead": True}}, None, "not comparable", "looks ahead"),
    ("o.bound.bound_holds_share", {"saved": 0.2}, lambda panel: Estimate(1.0, 1.0, 1.0), "not comparable", "γ is any constant"),
    ("f2.joint.speedup_pct", {"saved": 0.2}, Mock(side_effect=NO_ENERGY), "not measured", "record.json has no entry 'energy'"),
])  # fmt: skip
def test_what_is_not_judged_says_why(tmp_path, claim, options, of, verdict, why):
    answers = {} if of is None else {claim: AnsweredBy("all", "run", of=of)}
    found = judged(tmp_path, answers=answers, **options).loc[claim]
    assert found["verdict"] == verdict
    assert why in found["why"]


def test_what_is_true_by_definition_is_not_counted(tmp_path):
    quantized, charged = "table11.isolated.quantization.flops_saved_pct", "table3.uniform8.flops_saved_pct"
    answers = {quantized: AnsweredBy("all", "run", by_definition="nothing else")}
    made = ledger([source(tmp_path, named="table3.uniform8", answers=answers, saved=0.25, per_token=0.003)])
    found = made.frame.set_index("claim")
    zero = "dense inference itself: zero by definition"
    for claim, why in (("table11.baseline.speedup_pct", zero), (quantized, "nothing else"), (charged, "circular")):
        assert found.loc[claim, "verdict"] == "by definition"
        assert why in found.loc[claim, "why"]
    assert found.loc[quantized, "measured"] == pytest.approx(25)
    assert not any("by definition" in text for text in (made.title, *(panel.title for panel in made.panels)))
    # Another ledger than the one whose charge gives the number, declared as an answer of its own, is judged.
    own = {charged: AnsweredBy("all", "run", of=lambda panel: Estimate(0.0, 0.0, 0.0), note="another β")}
    found = judged(tmp_path, named=None, answers=own, saved=0.25).loc[charged]
    assert (found["verdict"], found["note"]) == ("not reproduced", "another β")


def test_what_the_papers_formula_cannot_count_is_judged_in_the_nominal_ledger(tmp_path):
    for claim in ("table11.isolated.kv_skipping", "p4.isolated.kv_skipping"):
        one = source(tmp_path, named=claim, saved=0.2, per_token=0.003)
        for name in ("record", "dense"):
            windows = getattr(one.outcomes[1], name).windows
            windows["nominal_flops"] = 100 - 12 * (name == "record")
        assert frame([one]).set_index("claim").loc[f"{claim}.flops_saved_pct", "measured"] == pytest.approx(12.0)


def test_an_absolute_number_is_compared_on_its_own_model_only(tmp_path):
    answers = {"table3.baseline.ppl": AnsweredBy("all", "baseline")}
    own = {"model": {**fakes.described("any")["model"], "name": "gpt2-large"}}
    for changes, verdict in ((None, "not comparable"), (own, "partly")):
        found = judged(tmp_path / verdict, answers=answers, saved=0.2, changes=changes).loc["table3.baseline.ppl"]
        assert found["verdict"] == verdict  # the hand-made perplexity is about 30, claimed are 18.2
        assert found["measured"] == pytest.approx(Store(tmp_path / verdict).get(found["record"]).quality.ppl)


def test_a_file_declares_what_else_it_answers(tmp_path):
    answers = {
        "p4.joint": AnsweredBy("all", "run"),
        "k.decay.decay_per_layer": AnsweredBy("all", "run", of=lambda panel: Estimate(0.07, 0.06, 0.08), note="a fit"),
        "o.two_bits.two_bit_share_pct": AnsweredBy("all", "run", of=lambda panel: None),
    }
    found = judged(tmp_path, answers=answers, saved=0.5, per_token=0.003)
    joint, decay = found.loc["p4.joint.flops_saved_pct"], found.loc["k.decay.decay_per_layer"]
    assert (joint["verdict"], joint["measured"]) == ("reproduced", pytest.approx(50))
    assert (decay["verdict"], decay["note"]) == ("reproduced", "a fit")
    assert found.loc["o.two_bits.two_bit_share_pct", "verdict"] == "not measured"
    # P.4's savings are claimed with P.4's stability.
    worse = judged(tmp_path, answers=answers, saved=0.5, per_token=0.3)
    assert worse.loc["p4.joint.flops_saved_pct", "verdict"] == "not reproduced"


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
    found = judged(tmp_path, answers={claim: answer}, saved=0.2).loc[claim]
    assert found["verdict"] == verdict
    assert unsaid(found["why"], "points", "from chance" if claim == HALTED else "from fused pairs") == []


def test_a_number_that_is_printed_again_counts_once(tmp_path):
    counted = standing(frame([source(tmp_path, named="faq.joint", saved=0.5, per_token=0.003)]))
    assert "faq.joint.flops_saved_pct" not in counted
    assert counted[f"{reported()['faq.joint'].same_as}.flops_saved_pct"] == "reproduced"


# --- the command ----------------------------------------------------------------------------------------------------------------
@pytest.fixture
def table11(harness, monkeypatch):
    """Two experiments over hand-made records, which the others would not find their numbers in."""
    monkeypatch.setattr(reproduce, "artefacts", lambda: [find("table", "11"), find("figure", "6")])
    return harness


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


def test_the_command_runs_nothing_writes_the_ledger_and_remembers_what_it_looked_up(table11, prints, monkeypatch):
    words = ["claims", f"results_dir={table11.results}"]
    shown = prints(*words).out
    assert table11.made == []
    assert "quicksilver reproduce table 11" in " ".join(shown.split())
    assert {path.name for path in table11.results.iterdir() if path.is_file()} == {"claims.csv", "claims.json", "claims.md"}
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
