"""What pages, messages, pictures and comments name is there: files, commands, targets of make, choices, numbered entries and sections."""

import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import fewer_draws  # noqa: F401  (the examples ask for intervals)
from repository import ROOT, blocks

from quicksilver.cli import main as console
from quicksilver.runs.choices import choices

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
TARGETS = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
PLACES = ("README.md", "CONTRIBUTING.md", "conf", "docs", "experiments", "quicksilver", "scripts", "studies", "tests")
FILES = (path for name in PLACES for path in (ROOT / name, *sorted((ROOT / name).rglob("*"))))
WRITTEN = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES
           if path.suffix in (".py", ".yaml", ".md", ".html", ".css", ".js")}  # fmt: skip
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
INVENTED = ("quiet_tokens", "quiet", "letters", "batch_speed", "table_depth")  # by pages that say how to add one


# -- pages -----------------------------------------------------------------------------------------------------------------------
def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and mkdocs make them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().strip().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_choices_of_a_page_are_there(page):
    text = page.read_text(encoding="utf-8")
    broken = []
    for link in (link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    for group, name in re.findall(r"\b(model|dataset|protocol|measure)=([\w.-]+)", text, re.IGNORECASE):
        broken += [name] if name not in (*choices(group.lower()), *INVENTED) else []
    assert broken == []


def leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [leaf for entry in (nav.values() if isinstance(nav, dict) else nav) for leaf in leaves(entry)]


def test_every_page_is_in_the_navigation_once_and_the_api_names_packages_that_say_what_they_are():
    assert sorted(leaves(SITE["nav"])) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    named = {name for page in (DOCS / "api").glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)}
    packages = ("runtime", "modules", "baselines", "measure", "records", "runs", "report")
    assert named >= {f"quicksilver.{name}" for name in packages}
    assert [name for name in named if not importlib.import_module(name).__doc__] == []


def test_files_that_a_picture_names_are_there():
    for picture in {*(DOCS / "assets").glob("*.svg")} - {DOCS / "assets" / "demo.svg"}:
        named = []
        text = picture.read_text(encoding="utf-8")
        for name in re.findall(r"(?:quicksilver|experiments|studies|conf)/[\w./{},-]*[\w/}]", text):
            before, options, after = re.fullmatch(r"([^{]*)(?:\{([^}]*)\}(.*))?", name).groups()
            named += [f"{before}{option}{after or ''}" for option in (options or "").split(",")]
        assert len(named) > 10
        assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="`make docs` installs mkdocs")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    loaded = re.compile(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="(https?:[^"]*)"')
    assert {str(path): found for path, text in pages.items() if (found := loaded.findall(text))} == {}
    assert '<a href="/index.html">Start page' in pages[tmp_path / "404.html"]
    runtime = (tmp_path / "api" / "runtime.html").read_text(encoding="utf-8")
    for name in ("apply", "Architecture", "TokenState", "LayerView"):
        assert f'id="quicksilver.runtime.{name}"' in runtime
    # A line of a docstring that begins with a number sign would be a heading.
    assert re.findall(r'id="quicksilver[^"]*--[^"]*"', "".join(pages.values())) == []


# -- pages, messages and comments ----------------------------------------------------------------------------------------------
COMMAND = re.compile(
    r"""(?:(?<=[`"])|^)quicksilver (?P<word>[a-z_]+)|quicksilver (?P<with_options>[a-z_]+) [a-z_]+=""", re.MULTILINE
)
TARGET = re.compile(r"(?:^|(?<=[`(]))make (?P<target>[a-z]+(?:-[a-z]+)*)|make (?P<with_options>[a-z-]+) [A-Z]+=", re.MULTILINE)
PLACE = re.compile(r"((?<![\w/.{}~-])(?:conf|docs|experiments|quicksilver|scripts|studies|tests)/[\w./…*-]+[\w…*])")
MODULES = re.compile(r"modules=\[(?P<names>[\w,]+)\]")


def is_there(name: str) -> bool:
    pattern = r"…|[A-Z]{4}|\*|" + "|".join(INVENTED)
    return (ROOT / name.rstrip(".")).exists() or name == "quicksilver/conf" or bool(re.search(pattern, name))


NAMED: dict[str, tuple[re.Pattern[str], int, Callable[[str], bool], str]] = {
    "files": (PLACE, 20, is_there, "a file of scripts/calibrate.py."),
    # "quicksilver without modules" is the harness
    "commands": (COMMAND, 20, {*console.commands(), "without"}.__contains__, "run `quicksilver calibrat`"),
    "targets": (TARGET, 5, TARGETS.__contains__, "or `make calibrat`."),
    "modules": (MODULES, 20, {*choices("modules"), *INVENTED, "NAME", "module"}.__contains__, "give modules=[halting,haltin]"),
}


@pytest.mark.parametrize("kind", NAMED)
def test_what_is_named_is_there(kind: str) -> None:
    pattern, least, known, gone = NAMED[kind]

    def named(texts: dict[str, str]) -> list[tuple[str, str]]:
        groups = ((where, match.groups()) for where, text in texts.items() for match in pattern.finditer(text))
        return [(where, name) for where, found in groups for name in next(filter(None, found)).split(",")]

    written = named({name: text for name, text in WRITTEN.items() if not name.startswith("tests/")})
    assert [(where, name) for where, name in written if not known(name)] == []
    assert len(written) > least
    assert len([name for _, name in named({"here": gone}) if not known(name)]) == 1


# -- citations: entries of docs/conflicts.md by number, sections of docs/design.md -----------------------------------------------
def test_everything_cited_is_there_and_only_what_is_in_the_repository_is_cited():
    entries, sections = (
        [int(number) for number in re.findall(r"^## (\d+)\. ", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)]
        for page in ("conflicts.md", "design.md")
    )
    assert (entries, sections) == (list(range(1, 29)), list(range(1, 10)))
    cited = [
        (name, there, int(number))
        for name, text in WRITTEN.items()
        for pattern, there in ((r"conflicts\.md\s+(#\d+(?:,\s*#\d+)*)", entries), (r"design\.md §(\d+)", sections))
        for found in re.finditer(pattern, text)
        for number in re.findall(r"\d+", found[1])
    ]
    assert [(name, number) for name, there, number in cited if number not in there] == []
    assert len(cited) > 40
    listed = yaml.safe_load((ROOT / "quicksilver" / "report" / "claims" / "contradictions.yaml").read_text(encoding="utf-8"))
    numbers = {row["conflict"] for row in listed["contradictions"] if "conflict" in row}
    assert numbers <= set(entries)
    assert len(numbers) > 20
    vague = re.compile(r"\bDESIGN\b(?!\.md)|(?<!docs/)\bconflicts\.md\s+#|\bconflicts #\d")
    here = str(Path(__file__).relative_to(ROOT))
    assert {name: found for name, text in WRITTEN.items() if name != here and (found := vague.findall(text))} == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the examples run: three pages ask for the same records, which are made once."""
    return tmp_path_factory.mktemp("examples")


@pytest.mark.parametrize("name", ["baselines", "measure", "modules", "records", "report", "runs", "runtime"])
def test_every_public_name_has_an_example_and_the_examples_run(name, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    code = "\n".join(blocks(DOCS / "api" / f"{name}.md", "python"))
    package = importlib.import_module(f"quicksilver.{name}")
    names = getattr(package, "__all__", ())
    if name == "baselines":
        files = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        there = (named for file in files for named in vars(importlib.import_module(file.name)).items())
        classes = (one for one in there if isinstance(one[1], type) and one[1].__module__.startswith(package.__name__))
        names = {one for one, _ in classes if not one.startswith("_")}
    assert [one for one in names if not re.search(rf"\b{one}\b", code)] == []
    exec(compile(code, f"{name}.md", "exec"), {})
    assert capsys.readouterr().out.count("\n") >= 2
