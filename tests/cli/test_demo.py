"""`quicksilver demo`: both ways on one text, with numbers of the ledgers, in colour where there is a terminal and in plain text elsewhere."""

import re
import sys

import pytest
from repository import ROOT
from thinning import first

from quicksilver.cli.commands.demo import _painted


def numbers(line: str) -> list[float]:
    return [float(found) for found in re.findall(r"[-+]?\d+\.?\d*", line)]


@pytest.mark.parametrize(
    ("save", "least", "said"),
    [("0.4", 30, "are predicted for the layers they miss."), ("0.3", 28, "the least attention are dropped.")],
)
def test_it_shows_both_ways_in_plain_text_where_there_is_no_terminal(save, least, said, prints, tmp_path):
    out = prints("demo", "new_tokens=2", f"save={save}", f"svg={tmp_path / 'demo.svg'}").out
    assert said in " ".join(out.split())
    picture = (tmp_path / "demo.svg").read_text()
    assert picture.startswith("<svg")
    assert "dense" in picture
    assert "url(" not in picture.replace("url(#", "")
    assert "\033" not in out
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    dense, adaptive, saved = numbers(lines["prompt's FLOPs"])
    assert least < saved < 100 * float(save) + 3
    assert saved == pytest.approx(100 * (1 - adaptive / dense), abs=0.5)
    assert numbers(lines["perplexity"])[0] > 1
    assert "goes on with" in lines
    head = numbers(out.splitlines()[0].partition(":")[2])  # layers, tokens of the prompt, tokens that leave, tokens scored
    assert 0 < len(re.findall(r"\[\d+: ", out.partition("\n\n[n")[0])) <= head[2] < head[1]
    assert max(map(len, out.splitlines())) <= 120
    if save == "0.4":  # the picture in the README has the numbers that are printed
        picture = (ROOT / "docs/assets/demo.svg").read_text(encoding="utf-8")
        picture = re.sub(r"</?text[^>]*>", "", picture).replace("&#160;", " ").replace("&#x27;", "'")
        wanted = [line for line in out.splitlines() if line.startswith(("prompt's", "all FLOPs", "KV", "perplexity"))]
        assert len(wanted) == 4
        words = " ".join(picture.split())  # a terminal may be of another width
        assert [line for line in wanted if " ".join(line.split()) not in words] == []


def test_without_colours_spans_of_tokens_have_one_mark():
    words, _, legend = _painted(["Ro", "und", " and", "\n", " \\1", " end"], [2, 2, 4, 3, 1, 1], 4, False)
    assert str(words) == "[2: Round] and\n [1: \\1 end]"
    assert legend == "[n: …]: these tokens went through n of 4 layers; all others, through all."


@pytest.mark.parametrize("asked", first([None, "1"]))
def test_a_terminal_gets_colours_unless_it_asks_for_none(asked, monkeypatch, prints):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", asked) if asked else monkeypatch.delenv("NO_COLOR", raising=False)
    assert ("\033[38;5;" in prints("demo", "new_tokens=1", "save=0.2").out) == (asked is None)
