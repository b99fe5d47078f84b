"""Chosen kernels are measured once for a machine, kept, printed, in the record, and part of what a record is of."""

import json
from pathlib import Path

import pytest

from quicksilver.runs import ensure
from quicksilver.runs.config import compose
from quicksilver.runs.context import RunContext, torch_threads
from quicksilver.runtime.quantized import kernels
from quicksilver.runtime.quantized.kernels import Choices, Kind, weight_of


class Machine:
    """Counts its measurements, and finds what it is told to find."""

    def __init__(self, name: str) -> None:
        self.name, self.measured = name, 0

    def choose(self, linears) -> Choices:
        self.measured += 1
        kinds = {str(Kind.of(weight_of(linear), rows)) for linear in linears for rows in kernels.ROWS}
        return Choices(dict.fromkeys(sorted(kinds), self.name), dict.fromkeys(kinds, 2.0))


@pytest.fixture
def machine(monkeypatch) -> Machine:
    found = Machine("weight_only")
    monkeypatch.setattr(kernels, "choose", found.choose)
    return found


def test_a_choice_is_kept_printed_in_the_record_and_part_of_its_identity(words, tmp_path: Path, machine: Machine, capsys) -> None:
    words = [*words, "dataset.windows=2", "measure.audit.enabled=false"]
    config = compose([*words, "modules=[fastest_linear]"])
    capsys.readouterr()
    first = RunContext().fingerprint(config)
    said = capsys.readouterr().err
    assert said.startswith("Kernels for tiny on ")
    assert "weight_only: " in said
    assert said.count("\n") == 1
    (record,) = ensure([config])
    assert record.fingerprint == first
    assert "weight_only for 16 x 16 x 48 float32" in record.kernels["fastest_linear"]
    assert "kernels.fastest_linear" in record.identity.digests
    assert machine.measured == 1  # read again from the results folder
    kept = tmp_path / "results" / "cache" / "kernels.json"
    with torch_threads(config.threads):
        assert list(json.loads(kept.read_text())) == [kernels.machine()]
    # Another machine that finds another kernel has another record; one that finds the same has the same.
    machine.name = "bfloat16"
    kept.write_text("{}")
    assert RunContext().fingerprint(config) != first
    machine.name = "weight_only"
    kept.write_text('{"damaged": [')
    assert RunContext().fingerprint(config) == first
    assert machine.measured == 3
    named = compose([*words, "modules=[fastest_linear]", "modules.fastest_linear.product=bfloat16"])
    assert not any(name.startswith("kernels") for name in RunContext().identity(named).digests)
    assert machine.measured == 3


def test_the_layers_of_a_model_are_what_is_measured(words, machine: Machine) -> None:
    found = RunContext().kernel_choices(compose([*words, "modules=[fastest_linear]"]))
    shapes = ((16, 48), (16, 16), (16, 64), (64, 16))
    assert set(found.by_kind) == {str(Kind(rows, *shape, "float32")) for rows in kernels.ROWS for shape in shapes}
