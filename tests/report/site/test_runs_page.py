"""The runs page: what tells runs of one label apart, and a table to search, sort, filter and compare."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser import Page, started

from quicksilver.report.site.collection import printed, varied


def test_only_what_differs_is_named():
    one = {"modules": {"halting": {"tau_drift": "p10", "window": [0.2, 0.8]}}, "seed": 0}
    other = {"modules": {"halting": {"tau_drift": "p40", "window": [0.2, 0.8]}}, "seed": 0}
    assert printed(one)["modules.halting.window"] == "[0.2, 0.8]"
    assert varied([printed(one), printed(other)]) == ("modules.halting.tau_drift",)
    assert varied([printed(one)]) == ()


ROWS = [("a", "model one", "3.5", 3.5, "p10"), ("b", "model two", "12.0", 12.0, "p40"), ("c", "model two", "–", "", "p25")]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A small page with the script, in a browser."""
    import quicksilver.report.site as site

    script = (Path(site.__file__).parent / "templates" / "runs.js").read_text(encoding="utf-8")
    rows = "".join(
        f'<tr data-run="{name}" data-name="{name}" data-model="{model}"><td><input type="checkbox" name="compare"></td><th>{model}</th>'
        f'<td data-value="{value}">{shown}</td></tr>'
        for name, model, shown, value, _ in ROWS
    )
    settings = json.dumps({name: {"tau_drift": tau, "seed": "0"} for name, *_, tau in ROWS})
    path = tmp_path_factory.mktemp("page") / "runs.html"
    path.write_text(
        '<!doctype html><meta charset="utf-8"><form id="runs-tools"><input id="runs-search"><select data-filter="model"><option value="">'
        '</option><option>model one</option><option>model two</option></select><span id="runs-shown"></span></form>'
        '<div id="runs-compared"></div><table id="runs"><thead><tr><th data-unsorted>compare</th><th>run</th><th>ppl</th></tr></thead><tbody>'
        f'{rows}</tbody></table><script type="application/json" id="runs-settings">{settings}</script><script>{script}</script>',
        encoding="utf-8",
    )
    with started(tmp_path_factory.mktemp("chromium")) as browser:
        yield Page(browser, path)


SHOWN = (
    "return [...document.querySelectorAll('#runs tbody tr')].filter((row) => !row.hidden).map((row) => row.dataset.run).join('')"
)


@pytest.mark.slow
def test_search_filter_sort_and_compare(page):
    js = page
    assert js(SHOWN) == "abc"
    js("const one = document.getElementById('runs-search'); one.value = 'TWO'; one.dispatchEvent(new Event('input'))")
    assert js(SHOWN) == "bc"
    assert js("return document.getElementById('runs-shown').textContent") == "2 of 3 shown"
    js("const one = document.getElementById('runs-search'); one.value = ''; one.dispatchEvent(new Event('input'))")
    js("const one = document.querySelector('select'); one.value = 'model one'; one.dispatchEvent(new Event('change'))")
    assert js(SHOWN) == "a"
    js("const one = document.querySelector('select'); one.value = ''; one.dispatchEvent(new Event('change'))")
    js("document.querySelectorAll('button.sort')[1].click()")
    assert js(SHOWN) == "abc"
    js("document.querySelectorAll('button.sort')[1].click()")
    assert js(SHOWN) == "bac"  # 12 before 3.5, which text would sort the other way; what has no number stays last
    js("document.querySelector('tr[data-run=a]').click(); document.querySelector('tr[data-run=b]').click()")
    compared = js("return document.getElementById('comparison').innerText")
    lines = [re.split(r"\t", line) for line in compared.splitlines()]
    assert lines[0][1:3] == ["a", "b"]
    assert ["tau_drift", "p10", "p40", ""] in lines
    assert ["ppl", "3.5", "12.0", "8.5"] in lines
    assert not any(line[0] == "seed" for line in lines)  # the same in both
