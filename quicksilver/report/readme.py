"""README.md shows what was written into results/, between markers."""

from __future__ import annotations

import re
from pathlib import Path

from quicksilver.files import write_files
from quicksilver.report.artefacts import artefacts
from quicksilver.report.written import Written, markdown, read
from quicksilver.runtime.errors import ConfigError

_MARKED = re.compile(r"(<!-- (\w+)(\.rows)?:begin -->\n).*?(<!-- \2(?:\.rows)?:end -->)", re.DOTALL)


def fill_readme(readme: Path, results: Path) -> str:
    """Put every written table or figure between its markers `<!-- NAME:begin -->` and `<!-- NAME:end -->`; says what was done.

    `NAME.rows` is a table's rows alone, with a line that says where they come from; `claims` is the one line that counts verdicts.

    Raises:
        ConfigError: no README there, or something marked that was not written yet.
    """
    if not readme.is_file():
        raise ConfigError(f"{readme} is not there: this command is for a clone of the repository.")
    titles = {artefact.name: artefact.title for artefact in artefacts()}
    names = []

    def filled(match: re.Match[str]) -> str:
        begin, name, only_rows, end = match.groups()
        path = _path(name, results)
        written = read(path)
        names.append(name)
        if name == "claims":
            return f"{begin}[{written.title}]({path.with_suffix('.md').as_posix()}).\n{end}"
        if written.kind == "figure":
            title = titles.get(name, name)
            picture = path.with_name(written.pictures[0]).as_posix()
            return f"{begin}![{title[:1].upper()}{title[1:]}]({picture})\n{end}"
        if only_rows:
            return f"{begin}{_rows(written, path)}\n{end}"
        return begin + markdown(written, level=3) + end  # one level deeper: the table is a part of the README

    content = _MARKED.sub(filled, readme.read_text(encoding="utf-8"))
    write_files(readme.parent, {readme.name: content.encode()})
    return f"{readme}: {', '.join(names) or 'no markers found'}"


def _path(name: str, results: Path) -> Path:
    if name == "claims":
        path, make = results / "claims.json", "make claims"
    else:
        kind = "figure" if name.startswith("figure") else "table"
        path = results / f"{kind}s" / f"{name}.json"
        number = name.removeprefix(f"{kind}_") if name[len(kind)] == "_" else name.removeprefix(kind).split("_")[0].lstrip("0")
        make = f"make reproduce-{kind} {kind.upper()}={number}"
    if not path.is_file():
        raise ConfigError(f"{path} is not there: make it first, {make}.")
    return path


def _rows(written: Written, path: Path) -> str:
    """The first panel without its headings; below it model, text and protocol, and where the rest stands."""
    rows = [line for line in markdown(written).splitlines() if line.startswith("|")]
    first = written.panels[0]
    count = 2 + sum(len(section.rows) + bool(section.title) for section in first.sections)
    where = " ".join(first.notes[:4])
    return "\n".join(
        [*rows[:count], "", f"<sub>{where} [What the columns mean, and the records]({path.with_suffix('.md').as_posix()}).</sub>"]
    )
