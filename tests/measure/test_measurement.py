"""A measurement of one's own: one file and one yaml, no other edit. What it finds stands in the record, typed, and is read again."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicksilver.measure import Bench, Measurement, Result, Setting
from quicksilver.measure.measurement import Mistyped, decoded, encoded
from quicksilver.runs.config import compose
from quicksilver.runs.context import RunContext
from quicksilver.runs.run import ensure
from quicksilver.runtime.errors import ConfigError


@dataclass
class Weights:
    """A dataclass inside the options: it stays one."""

    halted: float = 1.0
    kept: float = 2.0


@dataclass(frozen=True)
class Longest(Result):
    """The largest number of active tokens of a layer, and what the options were."""

    active_tokens: int
    weighted: float
    by_layer: list[int]


@dataclass
class LongestLayer(Measurement):
    """Counts active tokens from layer `first` on."""

    first: int = 0
    weights: Weights = field(default_factory=Weights)

    share = 0.01

    def check(self, setting: Setting) -> None:
        if self.first < 0:
            raise ConfigError(f"first={self.first} is out of range: at least 0.")

    def run(self, bench: Bench) -> Longest:
        counts = bench.trace.active_counts().tolist()[self.first :]
        bench.frame = bench.frame.assign(longest=max(counts))
        bench.files["note.txt"] = lambda path: path.write_text("written by a measurement")
        bench.progress(0.5)
        weights = self.weights
        return Longest(max(counts), weights.kept * max(counts) - weights.halted * min(counts), counts)


YAML = """# Counts active tokens.
defaults:
  - quick
  - _self_
name: longest
longest:
  _target_: {target}
  first: 1
  weights:
    kept: 2.0
"""


@pytest.fixture
def words(world: list[str], tmp_path: Path) -> list[str]:
    group = tmp_path / "mine" / "measure"
    group.mkdir(parents=True)
    (group / "longest.yaml").write_text(YAML.format(target=f"{__name__}.LongestLayer"))
    search = f"hydra.searchpath=[file://{tmp_path / 'mine'}]"
    halting = ["modules=[halting]", "modules.halting.tau_drift=p60", "modules.halting.tau_entropy=null"]
    return [*world, *halting, search, "measure=longest", f"results_dir={tmp_path / 'results'}"]


def test_one_file_and_one_yaml_are_all_it_takes(words: list[str]) -> None:
    config = compose([*words, "+measure.longest.weights.halted=0.5"])
    seen = []
    (record,) = ensure([config], progress=lambda progress: seen.append((progress.phase, progress.fraction)))
    found = record.measured("longest", Longest)
    assert found.by_layer == [int(n) for n in record.content["longest"]["by_layer"]]
    assert len(found.by_layer) == record.model.layers - 1
    assert found.weighted == 2.0 * found.active_tokens - 0.5 * min(found.by_layer)
    assert (record.windows["longest"] == found.active_tokens).all()
    assert (record.path / "note.txt").read_text() == "written by a measurement"
    assert "longest" in {phase for phase, _ in seen}
    fractions = [fraction for _, fraction in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_its_options_are_part_of_the_identity_only_while_it_is_on(words: list[str]) -> None:
    def fingerprint(*more: str) -> str:
        return RunContext().fingerprint(compose([*words, *more]))

    on = fingerprint()
    assert fingerprint("measure.longest.first=2") != on
    assert fingerprint("measure.longest.weights.kept=3") != on
    off = fingerprint("measure.longest=null")
    assert off != on
    assert fingerprint("+measure.longest.enabled=false", "measure.longest.first=2") == off
    assert fingerprint("measure=quick") == off
    assert set(RunContext().identity(compose(words)).sources) == {__name__}


def test_its_options_are_checked_before_anything_runs(words: list[str]) -> None:
    for mistake, says in (
        ("measure.longest.first=-1", "measure.longest.first=-1 is out of range"),
        ("measure.longest.first=many", "measure.longest.first=many: needs a whole number"),
        ("+measure.longest.weights.halt=1", "measure.longest.*halt"),
        ("+measure.longest.last=1", "measure.longest.last: LongestLayer has no such option"),
    ):
        with pytest.raises(ConfigError, match=says):
            compose([*words, mistake])


def test_records_rows_and_pages_need_no_torch() -> None:
    measures = ("audit", "components", "deployment", "energy", "flops", "latency", "memory", "quality", "signals", "task")
    names = [*(f"measure.{name}" for name in measures), "records.record", "cli.commands.reproduce", "report.artefacts"]
    imports = ", ".join(f"quicksilver.{name}" for name in names)
    rows = "assert quicksilver.report.artefacts.find('table', '5').experiment.rows()"
    program = f"import sys, {imports}; {rows}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@dataclass(frozen=True)
class Inner:
    median: float
    samples: list[float] | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    count: int
    kind: Literal["a", "b"]
    net: float | Literal["below"]
    parts: dict[str, Inner]
    maybe: float | None
    positions: list[int] = field(default_factory=list)
    run: Inner | None = None


inner = st.builds(Inner, st.floats(allow_nan=False, allow_infinity=False), st.none() | st.lists(st.floats(-1, 1)))
outer = st.builds(
    Outer, st.text(), st.integers(), st.sampled_from(["a", "b"]), st.just("below") | st.floats(-9, 9),
    st.dictionaries(st.text(), inner, max_size=3), st.none() | st.floats(0, 1), st.lists(st.integers()), st.none() | inner,
)  # fmt: skip


@given(outer)
def test_what_is_written_is_read(one: Outer):
    assert decoded(Outer, json.loads(json.dumps(encoded(one)))) == one


GOOD = {"name": "x", "count": 1, "kind": "a", "net": 1.0, "parts": {"p": {"median": 2}}, "maybe": None}

BAD = {
    "name is 3, not text": {"name": 3}, "count is 1.5, not a whole number": {"count": 1.5},
    "count is True, not a whole number": {"count": True}, "kind is 'c', not one of 'a', 'b'": {"kind": "c"},
    "net is nan, not a finite number": {"net": float("nan")}, "net is 'above', not a number": {"net": "above"},
    r"parts.p.median is inf, not a finite number": {"parts": {"p": {"median": float("inf")}}},
    r"parts.p is 3, not an object": {"parts": {"p": 3}}, r"positions\[1\] is 'x', not a whole number": {"positions": [1, "x"]},
    r"run.median is missing": {"run": {}},
}  # fmt: skip


def test_what_is_not_what_it_should_be_is_named_what_is_more_is_left_alone_and_what_may_be_absent_is_left_out():
    for says, changed in BAD.items():
        with pytest.raises(Mistyped, match=says):
            decoded(Outer, GOOD | changed)
    assert decoded(Outer, GOOD | {"further": 1}).parts["p"].median == 2.0
    with pytest.raises(Mistyped, match="kind is missing"):
        decoded(Outer, {key: value for key, value in GOOD.items() if key != "kind"})
    assert encoded(Inner(1.0)) == {"median": 1.0}
    written = encoded(decoded(Outer, GOOD))
    assert written["maybe"] is None
    assert "run" not in written
