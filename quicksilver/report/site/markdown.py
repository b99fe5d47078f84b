"""Written tables back from their Markdown, as data that a page can lay out: panels with grouped columns, sections, notes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from markdown_it import MarkdownIt
from markdown_it.token import Token

_SECTION = re.compile(r"<strong>(.*)</strong>")


@dataclass(frozen=True)
class Line:
    """One row: cells as HTML, or the name of the section that begins here."""

    cells: tuple[str, ...]
    section: str | None = None


@dataclass(frozen=True)
class Grid:
    """One table.

    Attributes:
        groups: headings over neighbouring columns, as HTML, with the number of them; empty text for none.
        headers: heading of each column, as HTML.
        right: whether a column is aligned to the right.
        lines: the rows.
    """

    groups: tuple[tuple[str, int], ...]
    headers: tuple[str, ...]
    right: tuple[bool, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Document:
    """A written table: its title and, in order, HTML of prose and grids."""

    title: str
    blocks: tuple[str | Grid, ...]


def parse(text: str) -> Document:
    """Read what `Table.markdown` wrote, or any GitHub-flavoured Markdown; markup in it stays text, `<br>` excepted."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = reader.parse(text)
    title = ""
    blocks: list[str | Grid] = []
    prose: list[Token] = []

    def flush() -> None:
        if prose:
            blocks.append(_breaks(reader.renderer.render(prose, reader.options, {})))
            prose.clear()

    position = 0
    while position < len(tokens):
        token = tokens[position]
        if token.type == "heading_open" and not title:
            title = "".join(child.content for child in tokens[position + 1].children or ())
            position += 3
        elif token.type == "table_open":
            flush()
            end = next(i for i in range(position, len(tokens)) if tokens[i].type == "table_close")
            blocks.append(_grid(reader, tokens[position:end]))
            position = end + 1
        else:
            # Below the title of the page come the parts.
            token.tag = "h2" if token.tag == "h3" else token.tag
            prose.append(token)
            position += 1
    flush()
    return Document(title, tuple(blocks))


def _breaks(html: str) -> str:
    return re.sub(r"&lt;br ?/?&gt;", "<br>", html)


def _grid(reader: MarkdownIt, tokens: Sequence[Token]) -> Grid:
    rows = list(_rows(tokens))
    head, body = rows[0], rows[1:]
    parts = [cell.content.rpartition(": ") for cell, _ in head]

    def html(text: str) -> str:
        return _breaks(reader.renderInline(text))

    groups = tuple((html(group), len(list(run))) for group, run in groupby(group for group, _, _ in parts))
    lines = []
    for row in body:
        cells = tuple(html(cell.content) for cell, _ in row)
        section = _SECTION.fullmatch(cells[0]) if not any(cells[1:]) else None
        lines.append(Line(cells, section[1] if section else None))
    right = tuple("right" in style for _, style in head)
    return Grid(groups, tuple(html(header) for _, _, header in parts), right, tuple(lines))


def _rows(tokens: Sequence[Token]) -> Iterator[list[tuple[Token, str]]]:
    """The inline tokens of each row, with the style of their cells."""
    row: list[tuple[Token, str]] = []
    for position, token in enumerate(tokens):
        if token.type == "tr_open":
            row = []
        elif token.type in ("th_open", "td_open"):
            row.append((tokens[position + 1], str(token.attrs.get("style", ""))))
        elif token.type == "tr_close":
            yield row
