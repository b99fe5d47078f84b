"""What a record is of: configuration, data, weights, the user's own code and the version of the numbers."""

from __future__ import annotations

import json

import pytest

from quicksilver.modules.halting import Halting
from quicksilver.records.identity import Identity, foreign_sources
from quicksilver.runtime.errors import ConfigError

OF = Identity({"seed": 0, "modules": {"halting": {"tau": 1.0, "window": (0.2, 0.8)}}}, {"text": "a", "weights": "b"}, {}, 1)


def test_each_part_counts_and_spelling_does_not():
    others = [
        Identity({**OF.config, "seed": 1}, OF.digests, {}, 1),
        Identity(OF.config, {**OF.digests, "weights": "c"}, {}, 1),
        Identity(OF.config, OF.digests, {"mine": "d"}, 1),
        Identity(OF.config, OF.digests, {}, 2),
    ]
    assert len({OF.fingerprint, *(other.fingerprint for other in others)}) == 5
    turned = Identity({"modules": {"halting": {"window": [0.2, 0.8], "tau": 1}}, "seed": 0.0}, OF.digests, {}, 1)
    assert turned.fingerprint == OF.fingerprint
    assert Identity(**json.loads(json.dumps(OF.to_json()))).fingerprint == OF.fingerprint


def test_the_users_own_files_count_and_the_packages_do_not(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_base.py").write_text("from quicksilver.modules.halting import Halting\n\n\nclass Base(Halting):\n    pass\n")
    (tmp_path / "my_module.py").write_text("from my_base import Base\n\n\nclass Mine(Base):\n    pass\n")
    from my_module import Mine

    assert foreign_sources([Halting]) == {}
    before = foreign_sources([Halting, Mine])
    assert set(before) == {"my_base", "my_module"}
    with (tmp_path / "my_base.py").open("a") as file:
        file.write("# changed\n")
    after = foreign_sources([Mine])
    assert after["my_module"] == before["my_module"]
    assert after["my_base"] != before["my_base"]


def test_a_class_without_a_file_is_refused():
    scope: dict = {"__name__": "nowhere"}
    exec("class Typed: pass", scope)
    with pytest.raises(ConfigError, match=r"nowhere\.Typed has no source file.*put the class into a file"):
        foreign_sources([scope["Typed"]])
