"""The report: what it is made of, what it says about what is missing, and that a real browser can use it."""

import dataclasses
import functools
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from browser import Page, started
from harness_world import make_world
from repository import below
from saying import unsaid
from thinning import first

from quicksilver.measure.audit import AuditResult
from quicksilver.records.identity import ProtocolEntry
from quicksilver.records.record import CHECKSUM, RECORD, Record, checksum
from quicksilver.records.store import Store
from quicksilver.records.window_tokens import window_tokens
from quicksilver.report import comparison
from quicksilver.report.artefacts import Outcome, Row
from quicksilver.report.claims.ledger import COLUMNS
from quicksilver.report.figure import Figure, panels, style
from quicksilver.report.reproduction import DEFAULT, VARIANTS
from quicksilver.report.site import views
from quicksilver.report.site.collection import Collection, NamedRecord
from quicksilver.report.site.pages import Site, _environment, cell_lines, make, of_paper, prose
from quicksilver.report.site.views import BEATEN, ON_FRONT, UNSEEN, boards, token_views
from quicksilver.report.table import Heading, Panel, PrintedPanel, Table, read, without_folders
from quicksilver.runs.config import compose
from quicksilver.runs.jobs import RecordIndex
from quicksilver.runs.run import ensure
from quicksilver.runtime.trace import Trace

LAYERS, WINDOW, PROMPT = 6, 64, 48
FUSION = ("modules.token_fusion.rule=capacity", "modules.token_fusion.tau_fuse=null")
RUNS = {
    "dense": ("modules=[]",),
    **{f"signal.{signal}": ("modules=[halting_attention]", f"modules.halting.signal={signal}") for signal in ("drift", "random")},
    "share": ("modules=[halting_attention]", "modules.halting.signal=drift", "modules.halting.halted_share=0.2"),
    "all": ("modules=[halting_attention,kv_skipping,token_fusion,adaptive_quantization]", *FUSION, "measure=signals"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A results folder with records of a real run, a table, a figure and a ledger."""
    folder = tmp_path_factory.mktemp("site")
    results = folder / "results"
    world = make_world(folder, layers=LAYERS, window=WINDOW, prompt=PROMPT)
    words = [*world, "dataset.windows=8", "protocol=continuation", f"protocol.prompt_tokens={PROMPT}", f"results_dir={results}"]
    words += [f"measure.signals.{word}" for word in ("sentences=['A sentence of its own.']", "windows=1", "attribution=false")]
    claimed = {"all": "table11.cumulative.quantization"}
    rows = [Row("continuation", "", key, key, more, reported=claimed.get(key)) for key, more in RUNS.items()]
    records = ensure([compose([*words, *row.overrides]) for row in rows])
    store = Store(results)
    outcomes = [Outcome(row, record, store.dense_of(record)) for row, record in zip(rows, records, strict=True)]
    frame = comparison.frame(outcomes)
    notes = ("Records: " + ", ".join(one.record.fingerprint[:12] for one in outcomes if one.record) + ".",)
    panel = Panel("continuation", "Protocol continuation", comparison.columns(prompt=True), notes)
    Table("table11", "Table 11: a < b | c", frame, (panel,), comparison.legend(frame)).write(results / "tables")
    with style():
        drawing, axes = panels()
        axes[0, 0].plot(range(3))
    shown = frame[["key", "record"]]
    caption = ("Model: tiny & small.", *notes, "Text: digest 7c304b8e77c0.")
    Figure("figure99", "Figure 99: shown nowhere", shown, drawing, caption).write(results / "figures")
    claim: dict[str, Any] = dict.fromkeys(COLUMNS, "") | dict(
        panel="Table 11", kind="claim", place="Appendix P", quote="a <b> c", why="because"
    )
    claim |= dict.fromkeys(("claim", "counted_as"), "table11.halting.delta_ppl") | dict(reported="0.12", unit="%", protocol="all")
    claim |= dict(
        measured="0.34", measured_low="0.1", measured_high="0.5", verdict="partly", record=outcomes[1].record.fingerprint
    )
    other = (
        claim
        | dict.fromkeys(("claim", "counted_as"), "p4.joint.flops")
        | dict.fromkeys(("measured", "measured_low", "record"), "")
    )
    other["verdict"] = "not measured"
    conflict = claim | {"kind": "conflict", "claim": "conflict.bits", "verdict": "contradiction", "record": ""}
    write_claims(results, pd.DataFrame([claim, other, conflict]))
    return results


def write_claims(results: Path, frame: pd.DataFrame) -> None:
    (results / "claims.json").write_bytes(Table("claims", "Claims", frame, ()).written().json())


def changed(path: Path, **changes: Any) -> None:
    """Rewrite a JSON artefact with other contents."""
    path.write_bytes(dataclasses.replace(read(path), **changes).json())


def forge(results: Path, record: Record, **changes: Any) -> None:
    """Rewrite entries of a record as if it had been written so; `label`, or `model.name` as `model__name`."""
    path = results / "runs" / record.fingerprint / RECORD
    data = json.loads(path.read_text())
    for names, value in changes.items():
        *outer, name = names.split("__")
        entries = functools.reduce(dict.__getitem__, outer, data)
        entries[name] = value
    path.write_text(json.dumps({**data, CHECKSUM: checksum(data)}))


def page_of(results: Path, record: Record | str) -> str:
    """A page by its name, or that of a record."""
    name = f"runs/{record.fingerprint}" if isinstance(record, Record) else record
    return (results / "report" / f"{name}.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(made) -> Path:
    make(made)
    return made / "report"


@pytest.fixture
def copy(made, tmp_path) -> Path:
    """A results folder that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "results", ignore=shutil.ignore_patterns("report", "calibration")))


@pytest.fixture(scope="module")
def records(made) -> dict[str, Record]:
    frame = pd.read_csv(made / "tables" / "table11.csv").set_index("key")
    return {key: Store(made).get(fingerprint) for key, fingerprint in frame["record"].items()}


# --- pages ------------------------------------------------------------------------------------------------------------------------
class Links(HTMLParser):
    """What a page loads, where it leads, and which ids it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded, self.targets, self.ids, self.text = [], [], [], []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.ids.append(named.get("id"))
        if tag in ("script", "img") and "src" in named:
            self.loaded.append(named["src"])
        if "href" in named:
            (self.loaded if tag == "link" else self.targets).append(named["href"])

    def handle_data(self, data):
        self.text.append(data)


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def test_links_resolve_and_nothing_is_loaded_from_a_network(site):
    assert len(pages(site)) > 12
    assert not (site / "runs" / "7c304b8e77c0.html").exists()  # a digest of a text is no record
    for page in pages(site):
        links = Links(page)
        for name in [*links.loaded, *links.targets]:
            if name in links.targets and name.startswith(("https://arxiv.org/", "#")):
                continue
            if name != "data:,":  # no icon, so that no browser looks for one
                assert not re.match(r"\w+:", name), (page, name)
                assert (page.parent / name.partition("#")[0]).is_file(), (page, name)
        if page.name == "index.html":
            assert sum((site / name).stat().st_size for name in links.loaded if name != "data:,") < 1_000_000
        ids = [one for one in links.ids if one]
        assert len(ids) == len(set(ids)), page


def test_the_same_files_give_the_same_bytes_wherever_they_lie(site, copy):
    make(copy)
    assert below(copy / "report") == below(site)


def test_a_table_of_another_model_is_linked_from_the_default_one_and_back(copy):
    variant = VARIANTS[0]
    name = f"table11-{variant.name}"
    shutil.copy(copy / "tables" / "table11.json", copy / "tables" / f"{name}.json")
    changed(copy / "tables" / f"{name}.json", name=name)
    (copy / "figures" / "figure99.svg").write_text("<svg/>")
    make(copy)
    first, there, other, figure = (page_of(copy, page) for page in ("index", "table11", name, "figure99"))
    assert f'<a href="{name}.html">{variant.title}</a>' in there
    assert unsaid(other, f'<a href="table11.html">{DEFAULT}</a>', f"<strong>{variant.title}</strong>", variant.overrides[0]) == []
    (line,) = [line for line in first.splitlines() if f"{name}.html" in line]
    assert 'href="table11.html"' in line  # in the default's line, not in one of its own
    assert "Model and text" not in figure
    # Vector graphics are shown where they were written.
    assert '<a href="files/figure99.png"><img src="files/figure99.svg"' in figure
    assert (copy / "report" / "files" / "figure99.svg").read_text() == "<svg/>"


def test_a_run_has_its_numbers_config_environment_and_passes(site, records):
    record = records["signal.drift"]
    text = " ".join(Links(site / "runs" / f"{record.fingerprint}.html").text)
    for word in (f"{record.quality.ppl:.4g}", "signal: drift", record.environment.torch, "audit", "windows.parquet"):
        assert word in text, word


def test_many_records_that_nothing_names_have_short_pages_and_a_frame(copy, records, monkeypatch):
    without_artefacts(copy)
    monkeypatch.setattr("quicksilver.report.site.pages.ROWS", 2)
    whole, brief = (Site(Collection(copy, most)).contents() for most in (len(records), 2))
    names = {f"runs{part}.html" for part in ("", *(f"-{number}" for number in range(2, (len(records) + 3) // 2)))}
    assert names == {name for name in brief if name.startswith("runs") and "/" not in name}
    rows = "".join(brief[name].decode() for name in names)
    share = records["share"]
    assert all(record.fingerprint in rows for record in records.values())
    name, delta = f"runs/{share.fingerprint}.html", f"{100 * (share.quality.ppl / share.dense.ppl - 1):+.2f}%"
    for site, is_whole in ((whole, True), (brief, False)):
        page = site[name].decode()
        assert unsaid(page, delta, "No table or figure names it.") == []
        assert ("Window by window" in page) == ('class="interval"' in page) == is_whole
        assert (f"tokens/{share.fingerprint}.html" in site) == is_whole
    frame = pd.read_parquet(io.BytesIO(brief["assets/records.parquet"]))
    assert frame.loc[share.fingerprint, "ppl"] == share.quality.ppl
    assert str(copy) not in "".join(map(str, frame.to_numpy().ravel()))


def test_a_written_table_is_laid_out_as_it_was_printed(made, site):
    written = read(made / "tables" / "table11.json")
    assert written.title == "Table 11: a < b | c"
    page = (site / "table11.html").read_text(encoding="utf-8")
    words = ("", "paper reports", "paper reports", "measured", "measured")
    columns = tuple(Heading(group, "h") for group in words)
    assert of_paper(PrintedPanel("", "", columns, ())) == (False, True, True, False, False)  # may be folded away
    assert not any(of_paper(PrintedPanel("", "", columns[:4], ())))  # hardly another column would be left
    groups = re.findall(r'<th colspan="(\d+)" scope="colgroup"[^>]*>([^<]*)</th>', page)
    assert [group for _, group in groups] == ["paper reports", "measured", "FLOPs saved %", "perplexity against dense"]
    assert sum(int(span) for span, _ in groups) + page.count('<td colspan="1">') == len(written.panels[0].columns)
    assert re.findall(r'<tr><th scope="row">([^<]*)</th>', page) == list(RUNS)
    assert page.count("<tr>") == len(RUNS) + 1
    assert "Table 11: a &lt; b | c" in page
    hostile = "<script>1</script> ![x](https://example.org/x.png)"
    assert prose("Isolated `a`") == "Isolated <code>a</code>"
    assert cell_lines(("x", "y")) == "x<br>y"
    assert cell_lines((hostile,)) == "&lt;script&gt;1&lt;/script&gt; ![x](https://example.org/x.png)"


def test_a_models_name_loads_nothing_and_tells_no_folder(copy, records):
    """Wherever a record's words are shown: pages of its run, and of what names it."""
    record, mine = records["signal.drift"], "/home/somebody/models/mine"
    hostile = "![x](https://example.org/x.png)<img src=https://example.org/y.png>"
    forge(copy, record, model__name=hostile, label=f"a run of {mine}", config__model__path=mine)
    forge(copy, record, warnings=["/home/somebody/data/text.txt was read", {"at": "file:///home/somebody/x"}])
    make(copy)
    for page in pages(copy / "report"):
        text = page.read_text(encoding="utf-8")
        assert "somebody" not in text, page
        assert not [name for name in Links(page).loaded if "example.org" in name], page
    assert unsaid(page_of(copy, record), "a run of mine", "text.txt was read") == []


@pytest.mark.parametrize(("said", "shown"), [
    ("/a/b", "b"),
    ("/a/with space/c.txt", "c.txt"),
    ("no text in /a/b/c.txt: make one", "no text in c.txt: make one"),
    ("see https://example.org/a/b and 3/4 of tables/table11", "see https://example.org/a/b and 3/4 of tables/table11"),
    ("~/models/x is gone", "x is gone"),
    (["/a/b", {"/a/k": 3}], ["b", {"k": 3}]),
    ("folder:/home/some body/models/mine", "folder:mine"),
    ("weights of folder:/a/b/mine, and http://example.org:80/a/b", "weights of folder:mine, and http://example.org:80/a/b"),
])  # fmt: skip
def test_folders_of_a_machine_are_left_out(said, shown):
    assert without_folders(said) == shown


def test_what_a_page_shows_cannot_end_its_script():
    hostile = {"name": "</script><b>", "values": ["<!--", "ü"]}
    shown = _environment().from_string("{{ hostile | tojson }}").render(hostile=hostile)
    assert "<" not in shown
    assert json.loads(shown) == hostile


def test_scripts_put_text_into_a_page_through_one_tag_that_escapes_it():
    templates = (files("quicksilver.report.site") / "templates").iterdir()
    scripts = {path.name: path.read_text() for path in templates if path.suffix == ".js"}
    for name, script in scripts.items():
        assert not re.search(r"insertAdjacentHTML|outerHTML|document\.write", script), name
        for value in re.findall(r"innerHTML\s*=\s*(.*)", script):
            assert all(one.endswith("html") for one in re.findall(r"(\w*)`<", value)), value
            assert "html`" in value, value
    if shutil.which("node") is not None:
        tag = scripts["site.js"][: scripts["site.js"].index("const colour")]
        program = tag + "console.log(String(html`<b title=\"${'\"<'}\">${['<i>', html`<u>${'&'}</u>`]}</b>`))"
        said = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True, timeout=60).stdout.strip()
        assert said == '<b title="&#34;&#60;">&#60;i&#62;<u>&#38;</u></b>'


# --- the leaderboard --------------------------------------------------------------------------------------------------------------
def test_a_board_has_of_each_method_what_no_other_setting_beats_with_its_far_context(records):
    def run(text: str, method: str, saved: float, kl: float, part: str = "test", **other: Any) -> NamedRecord:
        real = records["share"]
        told = {"execution": "compact", "lookahead": (), "config": {"modules": {method: {"save": saved, "kind": "k"}}}} | other
        told = {"protocol": real.protocol, "modules": (method,), "identity": SimpleNamespace(sources={})} | told
        told = {"found": lambda name, result: None} | told
        model = SimpleNamespace(name="m", weights_digest="w", dtype="float32")
        data = SimpleNamespace(name=text, windows=8 if method == "few" else 64, part=part, digest="d")
        record = SimpleNamespace(data=data, model=model, **told)
        return NamedRecord("0" * 20, record, [], row={"prompt_executed_flops_saved_pct": saved, "kl_nats": kl})

    best, worse, other = run("docs", "a", 40, 0.1), run("docs", "a", 30, 0.2), run("docs", "b", 20, 0.3)
    far, nothing = run("far-recall", "a", 40, 0.5), run("docs", "c", -3, 0.0)
    masked = run("docs", "d", 60, 0.0, execution="masked")
    cheap, everywhere = run("docs", "b", 10, 0.01), run("wiki", "a", 1, 1, protocol=ProtocolEntry("all", 64, 0, 1))
    again = run("docs", "a", 40, 0.1)  # of equal settings the timed one
    best.row = {**best.row, "prompt_speedup_pct": 1.0}
    leak = AuditResult(5.0, 10.0, 3, [1, 2, 3])
    sees = run("docs", "e", 90, 0.0, found=lambda name, result: leak if name == "audit" else None)
    searched = run("docs", "f", 90, 0.0, part="calibration")
    real = records["share"].protocol
    shorter = run("docs", "a", 95, 0.0, protocol=dataclasses.replace(real, prompt_tokens=real.prompt_tokens - 8))
    few, hardly = run("docs", "few", 95, 0.0), run("docs", "g", 0.4, 0.0)
    some = [sees, again, worse, other, far, best, cheap, nothing, masked, everywhere, searched, shorter, few, hardly]
    board, other_prompt = boards(some)
    assert (board.model, board.text) == ("m", "docs")
    assert [entry.run for entry in other_prompt.entries] == [shorter]
    assert board.prompt != other_prompt.prompt
    rows = [
        (few, "few", "save=95, kind=k", UNSEEN, None),
        (cheap, "b", "save=10", ON_FRONT, None),
        (best, "a", "save=40, kind=k", ON_FRONT, far),
        (other, "b", "save=20", BEATEN, None),
    ]
    assert board.entries == rows
    assert (board.beaten, board.beaten_timed) == (1, 0)
    assert board.entries[2].time == "+1.0"
    said = {"method": ["few save=95, kind=k", "b save=10", "a save=40, kind=k", "b save=20"], "saved": [95, 10, 40, 20]}
    assert board.chart == said | {"kl": [0, 1, 10, 30], "place": [UNSEEN, ON_FRONT, ON_FRONT, BEATEN]}
    edited = run("docs", "b", 20, 0.35, identity=SimpleNamespace(sources={"b": "1"}))  # the same options, other code
    assert [entry.run for entry in boards([other, edited])[0].entries] == [other]
    better = run("docs", "b", 25, 0.35, identity=SimpleNamespace(sources={"b": "1"}))
    assert ["code=" in entry.options for entry in boards([other, better])[0].entries] == [False, True]
    assert [entry.place for entry in boards([few, cheap])[0].entries] == [UNSEEN, UNSEEN]  # one alone beats nobody


def test_an_added_record_is_on_the_leaderboard_of_whoever_has_the_repository(copy, records, prints):
    without_artefacts(copy)
    added, keep = records["share"], lambda *words, code=0: prints("dev", "keep", *words, f"results_dir={copy}", code=code)
    assert f"added {added.fingerprint}: {added.label}" in keep(f"add=[{added.fingerprint}]").out
    index = copy / "records" / "answers.json"
    remembered = RecordIndex(copy).index() | {"answers": {"row": {"fingerprint": added.fingerprint}}}
    index.write_text(json.dumps(remembered))
    keep(f"add=[{added.fingerprint}]")
    assert json.loads(index.read_text())["answers"].items() >= remembered["answers"].items()
    keep()  # it stays
    assert json.loads((copy / "records" / "added.json").read_text()) == {"records": [added.fingerprint]}
    shutil.rmtree(copy / "runs")
    make(copy)
    page = page_of(copy, "leaderboard")
    assert unsaid(page, f"runs/{added.fingerprint}.html", added.environment.cpu) == []
    assert records["signal.random"].fingerprint not in page
    assert f"cp -r FOLDER/results/runs/0123456789 {copy / 'runs'}/" in keep("add=[0123456789]", code=2).err


# --- what is missing --------------------------------------------------------------------------------------------------------------
def without_artefacts(results: Path) -> None:
    """Leave the records alone: no table, no figure, no ledger."""
    for name in ("tables", "figures"):
        shutil.rmtree(results / name)
    (results / "claims.json").unlink()


def test_a_record_of_few_windows_has_its_page_without_an_interval(copy, records, prints, monkeypatch):
    monkeypatch.setattr("quicksilver.report.site.collection.MIN_WINDOWS", 9)
    without_artefacts(copy)
    prints("report", f"results_dir={copy}")
    assert "8 windows are too few for an interval" in page_of(copy, records["share"])


def test_a_missing_record_is_named_with_the_command_that_makes_it(copy, records, prints):
    gone, judged = records["signal.random"].fingerprint, "0" * 20
    shutil.rmtree(copy / "runs" / gone)
    ledger = pd.DataFrame(read(copy / "claims.json").entries)
    ledger.loc[0, "record"] = judged  # nothing else names it
    write_claims(copy, ledger)
    said = prints("report", f"results_dir={copy}", code=1).err
    of_ledger = f"runs/{judged}: there is no such record (named by claims).\n  To make it: quicksilver claims\n"
    assert unsaid(said, gone[:12], "quicksilver reproduce table 11", of_ledger) == []
    # Only the beginning of its name is known from the notes, all of it from the frame.
    assert "there is no such record" in page_of(copy, f"runs/{gone}")
    assert "(named by claims)" in page_of(copy, f"runs/{judged}")
    assert gone[:12] in page_of(copy, "table11")
    assert page_of(copy, f"tokens/{records['signal.drift'].fingerprint}")


def test_a_damaged_file_of_a_record_costs_its_pages_and_no_other(copy, records):
    damaged = {"trace.safetensors": records["signal.drift"], "windows.parquet": records["share"]}
    for name, record in damaged.items():
        path = copy / "runs" / record.fingerprint / name
        path.write_bytes(b"\0" * path.stat().st_size)
    _, problems = make(copy)
    for name, record in damaged.items():
        assert any(f"{name} is not the file that was recorded" in problem.what for problem in problems)
        assert unsaid(page_of(copy, record), f"{name} is not the file", "quicksilver reproduce table 11") == []
    traced = {path.stem for path in (copy / "report" / "tokens").iterdir()}
    assert traced >= {records["all"].fingerprint, records["signal.random"].fingerprint}
    assert records["signal.drift"].fingerprint not in traced
    (sweep,) = json.loads(re.search(r'id="sweeps">(.*?)</script>', page_of(copy, "explorer"))[1])
    leads = {one["fingerprint"]: one["trace"] for one in sweep["records"]}
    drift, random = (records[f"signal.{name}"].fingerprint for name in ("drift", "random"))
    assert leads == {drift: None, random: f"tokens/{random}.html"}  # no link where there is no page


def test_a_failed_row_and_an_artefact_that_was_not_made_are_named(copy, prints):
    path = copy / "tables" / "table11.json"
    status = read(path).columns.index("status")
    rows = [list(row) for row in read(path).rows]
    rows[list(RUNS).index("share")][status] = "failed"
    changed(path, rows=tuple(map(tuple, rows)))
    mine = shutil.copy(path, path.with_name("table11-mine.json"))
    changed(mine, name="table11-mine")
    (copy / "claims.json").unlink()
    out, said = prints("report", f"results_dir={copy}", code=1)
    assert "the run of its row continuation share failed" in said
    assert "table11-mine" not in said  # its row says so
    assert "are not made yet" in out  # the ledger, and the figures of experiments/ that this folder has not
    assert "not made" not in said
    assert "quicksilver claims" in page_of(copy, "index")


@pytest.mark.parametrize("content", first(["", "[]", '{"schema_version": 1, "kind": "table"}']))
def test_a_damaged_table_is_named_and_the_rest_is_there(copy, content):
    (copy / "tables" / "table11.json").write_text(content)
    _, problems = make(copy)
    assert any(problem.where == "table11" and "Make it again" in problem.what for problem in problems)
    assert "figure99.png" in page_of(copy, "figure99")


def test_without_any_table_or_record_the_report_that_is_there_stays(copy, tmp_path, refused):
    """As in a fresh clone: tables and report are committed, records are not."""
    for empty, command in ((tmp_path, "table 11"), (tmp_path / "nowhere", "all")):
        assert f"quicksilver reproduce {command}" in refused("report", f"results_dir={empty}")
    make(copy)
    before = page_of(copy, "index")
    shutil.rmtree(copy / "runs")
    assert "quicksilver reproduce all" in refused("report", f"results_dir={copy}")
    assert page_of(copy, "index") == before


@pytest.fixture
def victim(copy) -> Iterator[Path]:
    """A file outside of the report that nothing may change, show or link."""
    path = copy.parent / "victim"
    path.write_text("secret of mine")
    yield path
    assert path.read_text() == "secret of mine"
    assert not [page for page in (copy / "report").rglob("*") if page.is_file() and b"secret of mine" in page.read_bytes()]


def test_a_folder_of_somebody_else_or_a_link_is_left_alone(copy, victim, prints):
    (copy / "report").mkdir()
    (copy / "report" / "thesis.tex").write_text("x")
    assert "thesis" not in (said := prints("report", f"results_dir={copy}", code=2).err)
    assert unsaid(said, str(copy / "report"), "Move") == []
    assert [path.name for path in (copy / "report").iterdir()] == ["thesis.tex"]
    (copy / "report").rename(copy / "mine")
    (copy / "report").symlink_to(copy / "mine")
    assert "is a link" in prints("report", f"results_dir={copy}", code=2).err
    assert [path.name for path in (copy / "mine").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("changes", [
    {"records": ("../../../victim",)},
    {"pictures": ("../../victim",)},
    {"pictures": ("victim.png",)},  # a link that leads to it
    {"name": "../victim"},
])  # fmt: skip
def test_a_hostile_figure_neither_reads_nor_writes_elsewhere(copy, victim, changes):
    (copy / "figures" / "victim.png").symlink_to(victim)
    changed(copy / "figures" / "figure99.json", **changes)
    _, problems = make(copy)
    assert any(problem.where == "figure99" for problem in problems)
    assert not (copy / "report" / "victim.html").exists()


@pytest.mark.parametrize(("column", "value"), [
    ("record", "../../../victim"), ("artefact", "javascript:alert(1)//"), ("record", "x"),
])  # fmt: skip
def test_a_hostile_ledger_or_name_of_a_file_is_named_and_leads_nowhere(copy, victim, column, value):
    frame = pd.DataFrame(read(copy / "claims.json").entries).assign(artefact="table11")
    write_claims(copy, frame.assign(**{column: value}))
    shutil.copy(copy / "tables" / "table11.json", copy / "tables" / "javascript:x.json")
    _, problems = make(copy)
    assert any(problem.where == "claims" and value in problem.what for problem in problems)
    assert any("javascript:x.json" in problem.where for problem in problems)
    for page in pages(copy / "report"):
        assert not [target for target in Links(page).targets if target.startswith("javascript:") or "victim" in target]


@pytest.mark.parametrize(("changes", "said"), [
    ({"schema_version": 99}, "schema 99"),
    ({"ppl": None}, "ppl"),
    ({"environment": {}}, "environment"),
    ({"dense_fingerprint": "../../victim"}, "victim"),
    ({"data__token_digest": "../../victim"}, "victim"),
    ({"files__../../../victim": {"bytes": 14, "sha256": "0" * 64}}, "victim"),
    (None, "no schema_version"),
])  # fmt: skip
def test_a_foreign_damaged_or_hostile_record_is_named_and_all_others_have_their_pages(
    copy, records, victim, prints, changes, said
):
    record = records["all"]
    if changes is None:
        (copy / "runs" / record.fingerprint / RECORD).write_text("{}")
    else:
        forge(copy, record, **changes)
    heard = prints("report", f"results_dir={copy}", code=1).err
    assert unsaid(heard, said, record.fingerprint, "To make it") == []
    assert said in page_of(copy, record)
    assert "Window by window" in page_of(copy, records["share"])
    assert page_of(copy, "figure99")
    assert sorted(path.name for path in copy.parent.iterdir()) == ["results", "victim"]


def decoded(view: dict) -> dict:
    """A view with a string for each token, as its script reads it."""
    found = ((name, view[name]) for name in ("states", "bits"))
    return view | {name: coded and [coded["distinct"][place] for place in coded["places"]] for name, coded in found}


# --- tokens -----------------------------------------------------------------------------------------------------------------------
def test_the_letters_are_what_the_trace_says(records):
    trace = Trace.load(records["all"].trace_path)
    view = decoded(views._from_trace(trace, 5))
    prompt, scored = (one.row(5 % 4) for one in trace.passes[2:4])  # batches of 4: the second has window 5
    assert len(view["states"]) == WINDOW - 1
    for layer in range(LAYERS):
        letters = [states[layer] for states in view["states"]]
        active = [*prompt.active(layer)[0].tolist(), *scored.active(layer)[0].tolist()]
        entry = [*prompt.kv_present(layer)[0].tolist(), *scored.kv_present(layer)[0].tolist()]
        assert [letter in "CWRN" for letter in letters] == active
        for letter, has in zip(letters, entry, strict=True):
            assert (letter in "CKR") == has
    assert {letter for states in view["states"] for letter in states} >= {"C", "H", "F"}
    carried = {token for token, *_ in view["fusions"]}
    assert carried == {token for token, states in enumerate(view["states"]) if "F" in states}


def test_trace_and_signals_say_the_same(records):
    """Two passes, one over a batch of windows, one over the prompt of the first window alone."""
    record = records["all"]
    inside = decoded(token_views(record)[1])
    assert inside["name"] == "window 0"
    traced = decoded(views._from_trace(Trace.load(record.trace_path), 0))
    assert inside["states"] == traced["states"][:PROMPT]
    assert inside["bits"] == (traced["bits"] and traced["bits"][:PROMPT])
    fused = sorted(entry[:3] for entry in traced["fusions"])
    assert sorted(entry[:3] for entry in inside["fusions"]) == fused
    assert inside["texts"] == window_tokens(record, 0)[:PROMPT]
    assert {"entropy", "relative drift"} <= set(inside["signals"])


def test_the_harmed_window_comes_first(records):
    record = records["signal.random"]
    harm = record.windows["nll_nats"] - record.windows["dense_nll_nats"]
    first, second = token_views(record)
    assert first["name"].startswith(f"window {harm.idxmax()}, harmed most")
    assert second["name"] != first["name"]
    assert "".join(first["texts"]).strip()
    other = dataclasses.replace(record, data=dataclasses.replace(record.data, token_digest="0" * 64))
    view = token_views(other)[0]
    assert view["texts"] is None
    assert "other tokens now" in view["no_texts"]


# --- thresholds -------------------------------------------------------------------------------------------------------------------
def sweep_of(records: dict[str, Record], *keys: str, titles: Sequence[str] = ("a table",)) -> list[dict]:
    rows = {key: comparison.against_dense(records[key], records["dense"]) for key in keys}
    runs = [NamedRecord(records[key].fingerprint, records[key], [], row=row) for key, row in rows.items()]
    return views.sweeps((title, runs) for title in titles)


def test_every_position_is_a_record_with_its_own_options_and_a_set_is_shown_once(records):
    (sweep,) = sweep_of(records, "dense", "signal.drift", "signal.random", "share")
    assert [option["name"] for option in sweep["options"]] == ["halting.halted_share", "halting.signal"]
    assert len(sweep["records"]) == 3
    for row in sweep["records"]:
        record = next(one for one in records.values() if one.fingerprint == row["fingerprint"])
        known = views.settings(record)
        for option, place in zip(sweep["options"], row["at"], strict=True):
            assert option["values"][place] == known[option["name"]]
        assert row["executed_flops_saved_pct"] == pytest.approx(record.flops_saved_pct("executed"), rel=1e-4)
        assert row["delta_ppl_pct"][1] <= row["delta_ppl_pct"][0] <= row["delta_ppl_pct"][2]
    assert sweep_of(records, "signal.drift", "all") == []  # other modules are another sweep, and one record is none
    assert [one["title"] for one in sweep_of(records, "signal.drift", "share", titles=("a table", "its figure"))] == ["a table"]


# --- in a browser -----------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with started(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.mark.slow
def test_pages_load_without_a_console_error(browser, site):
    for path in pages(site):
        page = Page(browser, path)
        assert page.errors() == [], path
        assert page("return document.title").endswith("QuickSilver")
        # Nothing is wider than the window but what scrolls by itself.
        assert page("return document.documentElement.scrollWidth <= innerWidth"), path


@pytest.mark.slow
def test_the_ledger_is_filtered_and_a_narrow_window_scrolls_in_one_direction_only(browser, site, records):
    names = ["index", "claims", "runs", "explorer", "table11", "figure99", "tokens", f"tokens/{records['all'].fingerprint}"]
    ledger = "const box = document.querySelector('#claims').closest('.scroll'); return box.scrollWidth <= box.clientWidth"
    page = Page(browser, site / "claims.html")
    assert page(ledger)
    visible = "return [...document.querySelectorAll('#claims tbody tr')].filter((row) => !row.hidden).length"
    for words, count in (("", 2), ("p4.joint", 1), ("", 2)):
        page.choose("#contains", words)
        assert page(visible) == count
    page.find("input[value=partly]").click()
    assert page(visible) == 1
    assert page.text("#shown") == "1 of 2 shown"
    browser.set_window_size(500, 900)
    try:
        for name in names:
            assert Page(browser, site / f"{name}.html")("return document.documentElement.scrollWidth <= innerWidth"), name
        assert Page(browser, site / "claims.html")(ledger)
    finally:
        browser.set_window_size(1280, 900)


def test_a_chart_is_drawn_when_it_comes_into_view_on_the_pages_own_background(browser, site, records):
    page = site / "runs" / f"{records['share'].fingerprint}.html"
    far = page.with_name("far.html")
    far.write_text(page.read_text().replace('<div class="chart"', '<div style="height: 5000px"></div><div class="chart"', 1))
    try:
        opened = Page(browser, far)
        assert opened("return document.querySelectorAll('.chart.drawn').length") == 0
        clear = "return getComputedStyle(document.querySelector('.chart')).backgroundColor"
        assert opened(clear) == opened("return getComputedStyle(document.body).backgroundColor")
        opened.draw()
        assert opened("return document.querySelector('.chart').quicksilverDocument !== undefined")
        assert opened.errors() == []
    finally:
        far.unlink()


def test_on_a_telephone_the_measured_columns_come_first_and_the_reported_on_demand(browser, site):
    shown = "return [...document.querySelectorAll('thead th.reported')].filter((one) => one.offsetParent).length"
    page = Page(browser, site / "table11.html")
    assert page(shown) > 0
    assert not page.find(".fold").is_displayed()
    browser.set_window_size(500, 900)
    try:
        page = Page(browser, site / "table11.html")
        assert page(shown) == 0
        first = "return document.querySelector('tbody td:not(.reported)').getBoundingClientRect().right <= innerWidth"
        assert page(first)
        page.find(".fold input").click()
        assert page(shown) > 0
    finally:
        browser.set_window_size(1280, 900)


def test_both_themes(browser, site):
    page = Page(browser, site / "index.html")
    page("localStorage.clear()")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    try:
        page = Page(browser, site / "index.html")
        assert brightness(page) < 60
        page.find("#theme").click()
        assert brightness(page) > 200
        assert brightness(Page(browser, site / "table11.html")) > 200  # remembered
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        chart = Page(browser, site / "explorer.html")
        chart.draw()
        before = chart("return Bokeh.documents[0].all_models.size")
        chart.find("#theme").click()
        assert brightness(chart) < 60
        axis = "return [...Bokeh.documents[0].all_models].find((one) => one.type === 'LinearAxis').axis_label_text_color"
        assert before
        assert chart(axis) == chart("return getComputedStyle(document.documentElement).getPropertyValue('--soft').trim()")
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        page("localStorage.clear()")


def brightness(page: Page) -> float:
    colour = page("return getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def test_a_token_answers_to_pointer_and_keyboard(browser, site, records):
    from selenium.webdriver import ActionChains, Keys

    page = Page(browser, site / "tokens" / f"{records['all'].fingerprint}.html")
    page.choose("#window", 2)  # the window that was harmed most
    view = decoded(token_views(records["all"])[2])
    fused = next(i for i, states in enumerate(view["states"]) if "F" in states)
    ActionChains(browser).move_to_element(page.find(f"#token-{fused}")).perform()
    detail = page.text("#detail")
    assert unsaid(detail, f"token {fused}, prompt", "carried by") == []
    letters = view["states"][fused]
    assert f"computed\n{sum(letter in 'CWRN' for letter in letters)} of {LAYERS} layers" in detail
    assert f"K/V entries\n{sum(letter in 'CKR' for letter in letters)} of {LAYERS} layers" in detail
    halted = next(i for i, states in enumerate(view["states"]) if "H" in states and "F" not in states)
    page(f"show({halted})")
    assert f"after layer {view['states'][halted].index('H')} of {LAYERS}" in page.text("#detail")
    page(f"show({fused})")
    assert page("return document.querySelectorAll('#detail .strip .carried').length") == view["states"][fused].count("F")
    assert page("return document.querySelectorAll('.tied').length") >= 1

    page.find("#tokens").send_keys(Keys.HOME)
    assert "token 0, prompt" in page.text("#detail")
    page.find("#tokens").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "token 2, prompt" in page.text("#detail")
    page.find("#tokens").send_keys(Keys.ARROW_DOWN)
    assert page("return document.getElementById('tokens').getAttribute('aria-activedescendant')") != "token-2"
    page.find("#tokens").send_keys(Keys.END)
    assert "only predicted" in page.text("#detail")
    assert page.errors() == []


def test_shading_follows_the_channel_and_the_layer(browser, site, records):
    page = Page(browser, site / "tokens" / f"{records['all'].fingerprint}.html")
    page.choose("#window", 1)
    shades = "return [...document.querySelectorAll('#tokens span')].map((one) => one.style.background)"
    page.choose("#channel", "fusion")
    fused = page(shades)
    assert any(fused)
    page.choose("#channel", "entropy")
    page.choose("#layer", 1)
    first = page(shades)
    page.choose("#layer", LAYERS)
    assert fused != first != page(shades)
    values = token_views(records["all"])[1]["signals"]["entropy"]["values"]
    page("show(7)")
    assert str(values[7][LAYERS - 1]) in page.text("#detail")


def test_a_slider_moves_from_record_to_record(browser, site, records):
    page = Page(browser, site / "explorer.html")
    (sweep,) = [one for one in page("return sweeps") if len(one["records"]) == 3]
    page.choose("#sweep", page("return sweeps").index(sweep))
    names = [option["name"] for option in sweep["options"]]
    share, signal = (names.index(f"halting.{name}") for name in ("halted_share", "signal"))
    page.choose(f"#option-{signal}", sweep["options"][signal]["values"].index("random"))
    row = sweep["records"][page("return current")]
    assert row["fingerprint"] == records["signal.random"].fingerprint
    shown = page.text("#result")
    assert unsaid(shown, row["fingerprint"][:12], f"{row['delta_ppl_pct'][0]:+.2f}%") == []
    assert unsaid(shown, f"{row['executed_flops_saved_pct']:+.1f}%", "not timed") == []
    # No record has random at the smaller share: the slider moves to drift, and says so.
    page.choose(f"#option-{share}", sweep["options"][share]["values"].index("0.2"))
    assert sweep["records"][page("return current")]["fingerprint"] == records["share"].fingerprint
    assert "Also changed" in page.text("#result")
    assert page(f"return document.querySelector('#option-{signal}').selectedOptions[0].textContent") == "drift"
    page.draw()
    ring = page(
        "return document.querySelector('[data-sweep=\"0\"] .chart').quicksilverDocument.get_model_by_name('now').data.delta"
    )
    assert next(iter(ring)) == pytest.approx(sweep["records"][page("return current")]["delta_ppl_pct"][0])
    assert page("return document.querySelectorAll('#records [aria-selected=true]').length") == 1
    assert page.errors() == []
