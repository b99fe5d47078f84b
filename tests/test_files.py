"""What a command may write and remove: its own files below its folder, through no link, by plain names."""

import json
from pathlib import Path

import pytest
from repository import below
from saying import refused_in_a_line

from quicksilver.files import MANIFEST, fingerprint_of, own_path, plain_name, publish, publish_tree, write_files
from quicksilver.runtime.errors import ConfigError, QuickSilverError

PAGES = {"index.html": b"first", "runs/a.html": b"a", "runs/b.html": b"b"}
HOSTILE = ["../x", "a/../../x", "/etc/x", "..", ".", "", ".git/config", "a//b", "a\\b", "C:x", "javascript:x", "a\nb", "a\0b"]


def refused(*words: str, folder: Path, contents: dict[str, bytes] = PAGES) -> None:
    with refused_in_a_line(*words, "away"):
        publish(folder, contents)


def test_what_was_published_before_is_replaced_and_everything_else_stays(tmp_path):
    folder = tmp_path / "site"
    publish(folder, PAGES)
    assert {name: content for name, content in below(folder).items() if name != MANIFEST} == PAGES
    strangers = {"thesis.tex": b"x", ".git/config": b"mine", "runs/notes.txt": b"x", "runs/b.html": b"changed by hand"}
    for name, content in strangers.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    publish(folder, {"index.html": b"second"})
    left = {name: content for name, content in below(folder).items() if name != MANIFEST}
    assert left == {"index.html": b"second", **strangers}
    refused("b.html", "not written by this command", folder=folder)  # not ours any more
    assert below(folder).keys() == {"index.html", MANIFEST, *strangers}


@pytest.mark.parametrize("name", ["thesis.tex", ".git/config", "index.html"])
def test_a_folder_of_somebody_else_is_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    refused(str(tmp_path), MANIFEST, folder=tmp_path)
    assert below(tmp_path) == {name: b"x"}


@pytest.mark.parametrize("place", ["", "runs", "runs/b.html", "index.html", MANIFEST])
def test_nothing_is_written_or_removed_through_a_link(tmp_path, place):
    folder, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    publish(folder, PAGES)
    elsewhere.mkdir()
    aside = folder.rename(tmp_path / "aside") if not place else (folder / place).rename(tmp_path / "aside")
    target = elsewhere / "it"
    target.write_bytes(aside.read_bytes()) if aside.is_file() else aside.rename(target)
    (folder / place).symlink_to(target)
    before = below(elsewhere)
    refused("is a link to", folder=folder)
    if place not in ("", MANIFEST, "index.html"):
        publish(folder, {"index.html": b"second"})  # what is behind the link is no longer wanted, and stays
    assert below(elsewhere) == before
    assert (folder / place).is_symlink()


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    victim = tmp_path / "x"
    victim.write_bytes(b"x")
    folder = tmp_path / "site"
    publish(folder, PAGES)
    content = {name: b"bad"}
    for call in (lambda: publish(folder, PAGES | content), lambda: own_path(folder, name), lambda: write_files(folder, content)):
        with pytest.raises(ConfigError):
            call()
    for check in (plain_name, fingerprint_of):
        with pytest.raises(ConfigError):
            check(name, "a name")
    (folder / MANIFEST).write_text(json.dumps({"schema_version": 1, "files": {name: "0" * 64}}))
    refused(MANIFEST, folder=folder)
    assert below(tmp_path) == {"x": b"x", **{f"site/{one}": content for one, content in below(folder).items()}}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": []}', '{"files": {"a": 1}}', '{"files": ["a"]}'])
def test_a_damaged_manifest_is_refused(tmp_path, content):
    publish(tmp_path / "site", PAGES)
    (tmp_path / "site" / MANIFEST).write_text(content)
    refused(MANIFEST, folder=tmp_path / "site")


def test_a_folder_in_the_place_of_a_page_is_refused(tmp_path):
    publish(tmp_path / "site", PAGES)
    (tmp_path / "site" / "new.html").mkdir()
    refused("new.html", folder=tmp_path / "site", contents={**PAGES, "new.html": b"x"})
    (tmp_path / "site" / "texts").write_text("x")
    refused("texts", folder=tmp_path / "site", contents={**PAGES, "texts/a.html": b"x"})
    (tmp_path / "file").write_text("x")
    refused("file", folder=tmp_path / "file")


def test_a_call_that_is_killed_leaves_a_folder_that_the_next_one_takes_up(tmp_path, monkeypatch):
    folder, replace, left = tmp_path / "site", Path.replace, [2]

    def killed(path: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("killed")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(QuickSilverError, match="cannot be written"):
        publish(folder, PAGES)
    monkeypatch.undo()
    assert below(folder).keys() == {MANIFEST, "index.html"}
    publish(folder, {"other.html": b"x"})
    assert below(folder).keys() == {MANIFEST, "other.html"}


def test_a_tree_is_published_by_its_files(tmp_path):
    publish(tmp_path / "made", PAGES)
    (tmp_path / "made" / MANIFEST).unlink()
    publish_tree(tmp_path / "made", tmp_path / "site")
    assert below(tmp_path / "made").items() <= below(tmp_path / "site").items()


def test_a_file_is_not_written_in_the_place_of_a_link(tmp_path):
    (tmp_path / "mine.txt").write_bytes(b"mine")
    (tmp_path / "claims.md").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(ConfigError, match="is a link to"):
        write_files(tmp_path, {"claims.csv": b"x", "claims.md": b"x"})
    assert (tmp_path / "mine.txt").read_bytes() == b"mine"
    assert not (tmp_path / "claims.csv").exists()
