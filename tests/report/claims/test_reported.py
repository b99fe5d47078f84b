"""The paper's numbers, as data, are the paper's numbers; set against each other, what is computed is right and could come out otherwise."""

import dataclasses
import re
import shlex
import statistics
from collections.abc import Mapping
from inspect import signature
from pydoc import locate

import pandas as pd
import pytest
import yaml
from repository import ROOT

from quicksilver.records.times import timed_processes
from quicksilver.report.claims.ledger import _measurement, standing, told
from quicksilver.report.claims.reported import Reported, check_of, contradictions, quantities, quantity, reported
from quicksilver.report.reproduction import VARIANTS
from quicksilver.report.table import read
from quicksilver.runs.choices import config_dir
from quicksilver.runs.config import compose

# -- the numbers: each test reads all entries and names the one that fails ---------------------------------------------------------
PAPER = ROOT.parent / "shared" / "paper" / "quicksilver.txt"
CLAIMS = list(reported().values())


@pytest.fixture(scope="module")
def paper() -> str:
    if not PAPER.is_file():
        pytest.skip("the paper's text is not beside this clone (../shared/paper/quicksilver.txt)")
    return PAPER.read_text(encoding="utf-8")


def numbers(quote: str) -> set[float]:
    """Every number of a quote: "18.1\\%", "+0.12", "1,204", "10^{-3}"."""
    found = {float(number.replace(",", "")) for number in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", quote)}
    return found | {10.0 ** -int(power) for power in re.findall(r"10\^\{-(\d+)\}", quote)}


def test_every_number_stands_in_its_quote():
    unsaid = {}
    for claim in CLAIMS:
        ends = {end for pair in claim.bounds.values() for end in pair if end is not None}
        said = numbers(claim.quote)
        # "tends to collapse": a change below 0, a ratio below 1, a decay without a size of a tenth; "predominantly": half
        directions = {0.0, 0.9, 1.0, 50.0} if not said and not claim.values else set()
        unsaid[claim.id] = (set(map(float, claim.values.values())) | ends) - said - directions
    assert {claim: missing for claim, missing in unsaid.items() if missing} == {}


@pytest.fixture(scope="module")
def ledgers() -> dict[str, pd.DataFrame]:
    """The committed ledgers, of every pair of model and text, by name."""
    found = {path.stem: pd.DataFrame(read(path).entries) for path in (ROOT / "results").glob("claims*.json")}
    assert len(found) == 1 + len(VARIANTS)
    return found


def test_ledgers_of_other_models_and_texts_have_the_same_outcomes(ledgers):
    found = {name: standing(rows).keys() for name, rows in ledgers.items()}
    assert {name: sorted(found["claims"] ^ outcomes) for name, outcomes in found.items()} == {name: [] for name in ledgers}


def test_every_quote_stands_in_the_paper(paper):
    assert [claim.id for claim in CLAIMS if claim.quote not in paper] == []


def test_every_claim_says_something_that_can_be_judged():
    for claim in CLAIMS:
        assert len(set(claim.quantities)) == len(claim.quantities) > 0, claim.id
        assert [name for name in claim.quantities if not quantity(claim, name).says] == [], claim.id
        for pair in claim.bounds.values():
            assert pair != (None, None), claim.id
            assert None in pair or pair[0] < pair[1], claim.id


def test_numbers_are_rounded_as_the_paper_writes_them():
    claim = reported()["table11.isolated.quantization"]
    assert dict(claim.rounding) == {"speedup_pct": 0.5, "flops_saved_pct": 0.5, "delta_ppl": pytest.approx(0.005)}
    assert reported()["table3.uniform8"].rounding["ppl"] == pytest.approx(0.05)


def test_what_an_entry_refers_to_is_there():
    for claim in CLAIMS:
        for what in (quantity(claim, name) for name in claim.quantities):
            assert not what.of_dense or what.base in reported()[claim.against or claim.id].values, claim.id
        if isinstance(claim.same_as, Mapping):
            assert {f"{claim.id}.{name}" for name in claim.same_as} <= {f"{claim.id}.{name}" for name in claim.quantities}
            assert all(one.rpartition(".")[2] in reported()[one.rpartition(".")[0]].quantities for one in claim.same_as.values())
        elif claim.same_as:
            first = reported()[claim.same_as]
            assert set(claim.quantities) <= set(first.quantities), claim.id
            assert first.same_as is None, claim.id
            for name, value in claim.values.items():
                assert value == pytest.approx(first.values[name], rel=0.06), claim.id  # "nearly 50%" of 47.2
        if claim.quality:
            entry, _, name = claim.quality.rpartition(".")
            assert quantities()[name].kind == "quality", claim.id
            assert name in reported()[entry].quantities, claim.id
    assert sum(bool(claim.against or claim.quality) for claim in CLAIMS) > 40


def test_a_setting_that_is_said_to_be_in_conf_is_there_with_its_number(subtests):
    settings = [(claim, name, key) for claim in CLAIMS for name, key in claim.config.items()]
    assert len(settings) >= 16
    for claim, name, key in settings:
        with subtests.test(claim.id, key=key):
            file, *options = key.split(".")
            value = yaml.safe_load((config_dir() / f"{file}.yaml").read_text(encoding="utf-8"))
            for option in options:
                # What the yaml does not say is the default of the class that it names.
                value = value[option] if option in value else signature(locate(value["_target_"])).parameters[option].default
            assert float(str(value).removeprefix("p")) == claim.values[name]


def test_every_table_with_numbers_has_entries():
    there = {int(n) for claim in CLAIMS for place in (claim.place, *claim.also) for n in re.findall(r"Table (\d+)", place)}
    assert there == set(range(1, 14)) - {1, 6}  # attributes and criteria: words


@pytest.mark.parametrize(("head", "prefix", "rows"), [
    ("Technique\tApplication\tSpeedup (%)", "table11.", 9),
    ("Task\tType\tMetric", "table4.", 6),
    ("Component\tBaseline", "table7.", 7),
    ("POS Tag Category\tFraction", "table2.", 6),
    ("Layer\tPrecision@Fusion", "table9.", 3),
    ("Method\tPrecision@Fusion", "table13.", 2),
    ("Quantization Strategy", "table3.", 5),
])  # fmt: skip
def test_a_table_has_an_entry_for_each_of_its_rows(paper, head, prefix, rows):
    start = paper.index(head)
    printed = paper[start : paper.index("\n\n", start)].splitlines()[1:]
    assert len(printed) == rows
    quotes = [claim.quote for claim in CLAIMS if claim.id.startswith(prefix)]
    assert [line for line in printed if not any(line.startswith(quote) for quote in quotes)] == []


# -- the paper against itself ------------------------------------------------------------------------------------------------------
ROWS = {row.id: row for row in contradictions()}


def test_every_numbered_conflict_has_a_row_that_says_what_was_found_and_what_is_done_instead():
    assert {row.conflict for row in ROWS.values()} - {None} == set(range(1, 28))
    assert len(ROWS) == len(contradictions())
    for row in ROWS.values():
        assert all((row.says, row.ours)), row.id
        finding = row.finding()
        assert (finding is None) == (row.check is None), row.id
        assert finding is None or all((finding.text, row.places)), row.id


def plain(text: str) -> str:
    """Without markup, line numbers, spaces and hyphens, in small letters."""
    text = re.sub(r"[*_`]|</?[a-z]+(?: [^>]*)?>", "", text)
    text = re.sub(r"(?m)^(?:- )?\d{3,4}(?=[\s•])|\t\d{3,4}$", " ", text)
    return re.sub(r"[\s-]+", "", text).lower()


def unprinted(text: str, printed: str) -> list[str]:
    """What stands in quotation marks and not in the plain paper; up to four characters are single words of it."""
    return [quoted for quoted in re.findall(r'"([^"]*)"', text) if len(quoted) >= 5 and plain(quoted) not in printed]


def test_what_is_in_quotation_marks_stands_in_the_paper(paper):
    printed = plain(paper)
    page = (ROOT / "docs" / "conflicts.md").read_text(encoding="utf-8")
    assert {row.id: found for row in ROWS.values() if (found := unprinted(row.says, printed))} == {}
    assert unprinted(page, printed) == []
    assert page.count('"') > 20
    assert unprinted('fusion "does not violate causality" (FAQ)', printed) == ["does not violate causality"]


def test_the_committed_ledger_has_what_is_computed(ledgers):
    rows = ledgers["claims"]
    written = rows[rows["kind"] == "conflict"].set_index("claim")
    assert set(written.index) == {f"conflict.{name}" for name in ROWS}
    for name, row in ROWS.items():
        found = written.loc[f"conflict.{name}"]
        assert found["verdict"] == row.agreement, name
        assert row.check is None or row.finding().text in found["why"], name
    assert ROWS["superadditive"].finding().text.endswith("δ = -19.3 points")


def test_a_committed_claim_names_what_shows_it_and_a_time_its_processes_and_their_machine(ledgers):
    assert told(ledgers["claims"], ["table5.bits.and.bits"]).splitlines()[-1] == "  see        quicksilver reproduce table 5"
    said = told(ledgers["claims"], ["table11.isolated.halting"])
    assert re.search(r"^  timed      in \d processes on .*: `show` of the record prints each, and its file$", said, re.M)
    assert "  its time   quicksilver time table 11" in said
    alone = re.findall(r"^  row alone  quicksilver run (.*) records=own$", said, re.M)
    assert {compose(shlex.split(one)).protocol.name for one in alone} == {"all", "continuation"}
    assert re.search(r"^  tuned      [\d.]+% \[.*\], protocol=continuation, .*\n  verdict    not reproduced$", said, re.M)
    assert re.search(r"^  why        .* is not reproduced in this run: [\d.]+% \[", said, re.M)
    assert re.search(r"^  overall    not reproduced: the least favourable of these \d rows", said, re.M)


def test_every_committed_verdict_that_is_not_plain_has_its_reason_and_the_numbers_of_its_own_row(ledgers):
    quoted = re.compile(r"but (\S+), claimed with it, is .* in this run: (.*?)(?:;|$)")
    for name, rows in ledgers.items():
        judged = rows[rows["verdict"].isin(["partly", "not reproduced", "undecided", "not comparable", "not measured"])]
        assert len(judged) > 100, name
        assert judged.loc[judged["why"] == "", "claim"].tolist() == []
        measured = rows[rows["record"] != ""].to_dict("records")
        own: dict[tuple[str, str], set[str]] = {}
        for row in measured:
            own.setdefault((row["claim"], row["record"]), set()).add(" ".join(_measurement(row)[:2]))
        said = [((found[1], row["record"]), found[2]) for row in measured if (found := quoted.search(row["why"]))]
        assert len([key for key, _ in said if key in own]) > 20, name
        assert [(key, number) for key, number in said if key in own and number not in own[key]] == [], name


TIMED = (("tables", "table11"), ("tables", "table_deployment"), ("tables", "table07"), ("figures", "figure16"))


def test_the_noise_of_a_time_is_what_its_table_prints(ledgers):
    columns = ("noise_floor_pct", "batch_noise_floor_pct", "joint_noise_pct")
    for pair in ("", "-reference-llama-python-docs", "-reference-gpt2-wikitext103", "-reference-gpt2-python-docs"):
        printed = {
            (path.name.removesuffix(f"{pair}.json"), row.get("record"), round(row[column], 5))
            for path in (ROOT / "results" / kind / f"{name}{pair}.json" for kind, name in TIMED)
            for row in read(path).entries
            for column in columns
            if row.get(column)
        }
        rows = ledgers[f"claims{pair}"]
        timed = rows[
            rows["unit"].str.startswith("%") & rows["noise_floor"].notna() & rows["artefact"].isin([one for _, one in TIMED])
        ]
        said = {  # rows of Table 7 are components, so they name no record
            (one.artefact, None if one.artefact == "table07" else one.record, round(one.noise_floor, 5))
            for one in timed.itertuples()
        }
        assert len(said) > 8, pair
        assert said <= printed, pair


def test_what_several_processes_timed_follows_from_the_files_that_show_prints(ledgers):
    processes = timed_processes(ROOT / "results")

    def of(fingerprint: str, phase: str) -> list[float]:
        timed = [one for one in processes if fingerprint in one.results]
        here = [one.results[fingerprint] for one in timed if one.machine == timed[-1].machine]  # of the latest one
        assert len(here) > 1, fingerprint
        return [one.timing(prompt=bool(phase)).ratio.median for one in here]

    rows = pd.concat([ledgers["claims"], ledgers["claims-reference-gpt2-python-docs"]])
    rows = rows[rows["timed"].str.contains(" processes ")]
    assert set(rows["unit"]) == {"%", "points", "×"}
    for row in rows.itertuples():
        found = []
        for phase in ("", "prompt_") if row.protocol == "continuation" else ("",):
            ours = of(row.record, phase)
            theirs = of(row.against, phase) if row.against else [1.0] * len(ours)
            quotients = [a / b for a, b in zip(ours, theirs, strict=True)]
            apart = [100 * (b - a) for a, b in zip(ours, theirs, strict=True)]
            saved = [100 * (1 - one) for one in quotients]
            found.append({"points": apart, "×": quotients, "%": saved}[row.unit])
        said = (row.measured_low, row.measured, row.measured_high)
        ranges = [(min(one), statistics.median(one), max(one)) for one in found]
        assert any(said == pytest.approx(one, rel=1e-5) for one in ranges), (row.claim, said)


def changed(entry: str, quote: str | None = None, **values: float) -> Reported:
    claim = reported()[entry]
    return dataclasses.replace(claim, quote=quote or claim.quote, values=dict(claim.values) | values)


def kv(entry: str, printed: str) -> Reported:
    return changed(f"table5.kv.{entry}", f'"{entry}": KV diff {printed}')


LONG = kv("long", "17.38 > 0.30 -> Write")
TOTAL, ATTENTION = reported()["table7.total"], reported()["table7.attention"]


@pytest.mark.parametrize(("holds", "check", "given", "named"), [
    (True, "same", (), {"a": 1.0, "b": (0.9, 1.1)}),
    (False, "same", (), {"a": 1.2, "b": (0.9, 1.1)}),
    (True, "at_least", (6, 6), {}),
    (True, "all_skipped", (), {"a": changed("table5.kv.is")}),
    (True, "falls_with_bits", (-0.8, (None, 0.9)), {}),
    (True, "superadditive", (70,), {"a": 30, "b": 30}),
    (False, "beyond_pairs", (59,), {"a": 30, "b": 30, "c": 1}),
    (True, "beta_saves", (0.5, 26.4), {}),
    (True, "joint_beyond_alone", (47, 39), {}),
    (True, "model_size", (774, 36, 1280, 20), {}),
    (False, "model_size", (774, 36, 1280, 12), {}),
    (True, "entropy_units", (1.0, 0.6931471805599453), {}),
    (True, "below", (18.2, 18.3), {}),
    (True, "not_the_largest", (12.6,), {"a": 26.4}),
    (True, "inside_grid", (0.3, 0.6, (0.2, 0.4), (0.5, 0.7)), {}),
    (True, "on_the_scale", ((0, 1),), {"a": 0.4}),
    (True, "energy_of_a_token", (1e-6, 0.4, 121, 512), {}),
    (False, "emissions_arithmetic", (0.51, 0.40, 27.5, 0.29, 43.1), {}),
    (True, "steepest_is_last", (1.0,), {"a": 0.9, "b": 0.5}),
    (True, "quantized_baseline", (0.7, 40, 15), {}),
    (True, "milliseconds_are_percent", (18, 121, 15), {}),
    (True, "within_bound", ((None, 0.2),), {"a": 0.19}),
    (True, "saves_at_most_what_it_merges", ((12, 18), 15), {}),
    (True, "beyond_uniform", (17.9, 39.6, 26.4), {}),
    (True, "table5_widths", (0.3, 0.6), {"reducing": changed("table5.bits.reducing")}),
    (False, "table7_arithmetic", (TOTAL,), {"a": ATTENTION}),
    (False, "table7_arithmetic", (changed("table7.attention", speedup_pct=41.0),), {"a": ATTENTION}),
    (True, "table5_kv", (), {"a": kv("is", "0.18 < 0.45 -> Skip"), "b": LONG}),
    (False, "table5_kv", (), {"a": kv("is", "18.18 > 0.45 -> Skip"), "b": LONG}),
    (True, "decay_and_halted_share", ((0.01, 0.2), 15), {"a": changed("table2.content_words")}),
])  # fmt: skip
def test_a_check_can_come_out_either_way(holds, check, given, named):
    assert check_of(check)(*given, **named).holds == holds
