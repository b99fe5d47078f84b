"""Tables of other models and texts: named alike everywhere, kept by git, and missing only with a reason."""

import shutil
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from repository import ROOT

from quicksilver.report import reproduction
from quicksilver.report.artefacts import find
from quicksilver.report.reproduction import LOCAL_SUFFIX, VARIANTS, Variant, command_of, name_of
from quicksilver.report.table import read, versus_null_cell
from quicksilver.runs.config import compose
from quicksilver.runs.jobs import REFUSED, Job


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda one: one.name)
def test_a_variants_name_is_that_of_its_overrides_and_leads_back(variant: Variant) -> None:
    overrides = [*variant.overrides, "results_dir=/somewhere", "records=any"]
    name = name_of("table11", compose(overrides), overrides)
    assert name == f"table11-{variant.name}"
    assert reproduction.of_name(name, "table11") is variant
    assert reproduction.of_name(name, "table1") is None
    assert reproduction.selected_by(variant.overrides) is variant
    # Said too, the default text is no other selection: nothing poorer is written over what the repository has.
    if not any(word.startswith("dataset=") for word in variant.overrides):
        assert reproduction.selected_by([*variant.overrides, "dataset=python-source"]) is variant
    more = [*overrides, "dataset.calibration_windows=3"]
    assert reproduction.selected_by(more) is None
    assert name_of("table11", compose(more), more) != name  # what else is changed is another table
    command = command_of(find("table", "11"), variant.overrides)
    assert variant.overrides[0].split("=")[1] in command
    assert "table 11" in command


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="no git tree")
def test_git_keeps_what_is_read_of_a_variant_and_nothing_that_is_a_users() -> None:
    there = {f"tables/table11-{one.name}.{suffix}" for one in VARIANTS for suffix in ("md", "json")}
    there |= {f"figures/figure08_15-{one.name}.{suffix}" for one in VARIANTS for suffix in ("png", "json")}
    mine = {f"tables/table11-{one.name}{suffix}" for one in VARIANTS for suffix in (".csv", f"{LOCAL_SUFFIX}.md")}
    mine |= {f"figures/figure09-{one.name}{LOCAL_SUFFIX}.png" for one in VARIANTS} | {"tables/table11-gpt2-large-wikitext103.md"}
    asked = ["git", "check-ignore", "--no-index", *(f"results/{name}" for name in there | mine)]
    ignored = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert {name.removeprefix("results/") for name in ignored} == mine


def job(fingerprint: str | None = None, **more: object) -> Job:
    record = None if fingerprint is None else SimpleNamespace(fingerprint=fingerprint)
    return Job("continuation halting", (), record=record, **more)


@pytest.mark.parametrize(("jobs", "said"), [
    ([job("a"), job("b")], None),
    ([job("a"), job(reason=REFUSED)], None),  # refused under any selection: part of the table
    ([job("a"), job(), job()], "were not made"),
    ([job("d"), job("d")], "fixes its own models, texts and windows"),
    ([], "asks for no run"),
    ([job("a"), job(error=ValueError("no gold annotation"))], "no gold annotation"),
])  # fmt: skip
def test_one_that_is_missing_says_why(jobs: list[Job], said: str | None) -> None:
    why = reproduction.why_not("table11", jobs, ["d", "e"])
    assert why is None if said is None else said in str(why)


def test_the_page_links_what_is_there_and_gives_each_reason_once() -> None:
    tables, figure = [find("table", number) for number in ("11", "3", "10")], find("figure", "7")
    missing = {tables[0]: None, tables[1]: "it was not run", tables[2]: "it was not run", figure: None}
    there = {VARIANTS[0]: missing, VARIANTS[1]: dict.fromkeys(missing, "it was not run")}
    page = reproduction.variants_page(there, {variant: {one: f"make {one.name}" for one in missing} for variant in VARIANTS})
    assert f"(tables/table11-{VARIANTS[0].name}.md)" in page
    assert f"[ledger](claims.md) | [ledger](claims-{VARIANTS[0].name}.md) |" in page
    assert f"(figures/figure07-{VARIANTS[0].name}.png)" in page
    assert f"table03-{VARIANTS[0].name}" not in page
    assert "- table 3, table 10: it was not run" in page
    assert page.count("](tables/table03.md)") == 1  # the default is always there


def test_more_windows_and_draws_change_the_verdicts_that_the_docs_name() -> None:
    """docs/measuring.md, *Null*."""

    def verdicts(names: Sequence[str], suffix: str = "") -> dict[tuple[str, ...], str]:
        rows = ((name, row) for name in names for row in read(ROOT / f"results/tables/{name}{suffix}.json").entries)
        judged = ((name, row) for name, row in rows if row.get("versus_null_ppl") is not None)
        return {(name, str(row["panel"]), str(row["key"])): versus_null_cell(row)[0] for name, row in judged}

    more_windows = ("table03", "table11")
    once, thrice = verdicts(more_windows), verdicts(more_windows, "-128-windows")
    assert once.keys() == thrice.keys()
    assert len(once) == 36
    changed = {key: verdict for key, verdict in thrice.items() if once[key] != verdict}
    assert {once[key] for key in changed} == {"same"}
    assert changed == {
        ("table03", "all", "entropy_aware.calibrated"): "better",
        ("table03", "continuation", "aggressive"): "worse",
        ("table03", "continuation", "entropy_aware.calibrated"): "worse",
        ("table03", "continuation", "aggressive.calibrated"): "worse",
        ("table11", "continuation", "isolated.fusion"): "worse",
        ("table11", "continuation", "predicted.40"): "better",
        ("table11", "continuation", "cumulative.kv_skipping"): "worse",
        ("table11", "continuation", "best.halting_prompt"): "worse",
        ("table11", "continuation", "budget.drift"): "worse",
    }
    combined = read(ROOT / "results/tables/table11-128-windows.json").entries
    kinds = {row["null_kind"] for row in combined if row["key"] == "cumulative.fusion"}
    assert kinds == {None, "random neighbours"}  # under `all` it is refused
    same = [f"table_{name}" for name in ["context_used", "fair_trial", "far_context", "front", "lengths", "seeds"]]
    once, thrice = verdicts(same), verdicts(same, "-128-windows")
    assert {key: verdict for key, verdict in thrice.items() if once[key] != verdict} == {
        ("table_context_used", "far-gpt2.recall.960", "40"): "same",
    }
    assert once.keys() == thrice.keys()
    assert len(once) == 115
