"""The documentation as a site: every page is in it, every name is documented, and nothing is asked of another host."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(entry)


def test_every_page_is_in_the_navigation_once():
    assert sorted(leaves(SITE["nav"])) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_the_pages_of_the_api_name_packages_that_say_what_they_are():
    named = [name for page in (DOCS / "api").glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)]
    assert {f"quicksilver.{name}" for name in ("runtime", "modules", "baselines", "measure", "records", "runs", "report")} <= set(
        named
    )
    assert [name for name in named if not importlib.import_module(name).__doc__] == []


def test_files_that_a_picture_names_are_there():
    for picture in {*(DOCS / "assets").glob("*.svg")} - {DOCS / "assets" / "demo.svg"}:
        named = []
        for name in re.findall(
            r"(?:quicksilver|experiments|studies|conf)/[\w./{},-]*[\w/}]", picture.read_text(encoding="utf-8")
        ):
            before, options, after = re.fullmatch(r"([^{]*)(?:\{([^}]*)\}(.*))?", name).groups()
            named += [f"{before}{option}{after or ''}" for option in (options or "").split(",")]
        assert len(named) > 10
        assert [name for name in named if not (ROOT / name).exists()] == []


def test_no_font_comes_from_another_host():
    assert SITE["theme"]["font"] is False
    assert "extra_javascript" not in SITE


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="`make docs` installs mkdocs")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    loaded = re.compile(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="(https?:[^"]*)"')
    assert {str(path): found for path, text in pages.items() if (found := loaded.findall(text))} == {}
    runtime = (tmp_path / "api" / "runtime.html").read_text(encoding="utf-8")
    for name in ("apply", "Architecture", "TokenState", "LayerView"):
        assert f'id="quicksilver.runtime.{name}"' in runtime
    # A line of a docstring that begins with a number sign would be a heading.
    assert re.findall(r'id="quicksilver[^"]*--[^"]*"', "".join(pages.values())) == []
