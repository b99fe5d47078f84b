"""README.md shows what was written into results/, between markers."""

from __future__ import annotations

import re
from pathlib import Path

from quicksilver.report.artefacts import artefacts
from quicksilver.report.written import markdown, read
from quicksilver.runtime.errors import ConfigError

_MARKED = re.compile(r"(<!-- (\w+):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)


def fill_readme(readme: Path, results: Path) -> str:
    """Put every written table or figure between its markers `<!-- NAME:begin -->` and `<!-- NAME:end -->`; says what was done.

    Raises:
        ConfigError: no README there, or something marked that was not written yet.
    """
    if not readme.is_file():
        raise ConfigError(f"{readme} is not there: this command is for a clone of the repository.")
    titles = {artefact.name: artefact.title for artefact in artefacts()}
    names = []

    def filled(match: re.Match[str]) -> str:
        name = match[2]
        kind = "figure" if name.startswith("figure") else "table"
        path = results / f"{kind}s" / f"{name}.json"
        if not path.is_file():
            number = (
                name.removeprefix(f"{kind}_") if name[len(kind)] == "_" else name.removeprefix(kind).split("_")[0].lstrip("0")
            )
            raise ConfigError(f"{path} is not there: make it first, make reproduce-{kind} {kind.upper()}={number}.")
        names.append(name)
        written = read(path)
        if kind == "figure":
            title = titles.get(name, name)
            return f"{match[1]}![{title[:1].upper()}{title[1:]}]({path.with_name(written.pictures[0]).as_posix()})\n{match[3]}"
        return match[1] + markdown(written, level=3) + match[3]  # one level deeper: the table is a part of the README

    content = _MARKED.sub(filled, readme.read_text(encoding="utf-8"))
    readme.write_text(content, encoding="utf-8")
    return f"{readme}: {', '.join(names) or 'no markers found'}"
