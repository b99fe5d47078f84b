"""Joules: rest is subtracted, what cannot be told from rest is said in words, and the method is always there. The clock is a fake."""

import socket
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from quicksilver.measure import energy as meters
from quicksilver.measure.energy import BELOW, CodeCarbonMeter, EmissionsResult, TokenEnergy, energy
from quicksilver.measure.energy import window as full_window
from quicksilver.records.store import Store
from quicksilver.report.comparison import against_dense
from quicksilver.runs.config import compose
from quicksilver.runs.run import ensure


class Machine:
    """A clock, and a meter that reads what is drawn: `rest_w` at rest, and what each work says."""

    method, measured, grid_kg_per_kwh = "a test", True, 0.36

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rest_w: tuple[float, ...] = (10.0, 10.0, 10.0), step_j: float = 0.0):
        self.now = self.joules = self.began_j = 0.0
        self.rests, self.step_j = iter(rest_w), step_j
        self.windows: list[str] = []
        monkeypatch.setattr(meters.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(meters.time, "sleep", lambda seconds: self.spend("rest", seconds, next(self.rests)))

    def spend(self, name: str, seconds: float, watts: float) -> None:
        self.windows.append(name)
        self.now += seconds
        self.joules += seconds * watts

    def energy(self, rounds: int, tokens: int, **works: tuple[float, float]) -> tuple[dict[str, TokenEnergy], dict[str, Any]]:
        """Of works by name, each so many seconds long and of so many watts."""
        calls = {name: partial(self.spend, name, *work) for name, work in works.items()}
        return energy(calls, tokens, self, window_s=1.0, rounds=rounds)

    def start(self) -> None:
        self.began_j = self.joules

    def stop(self) -> float:
        joules = self.joules - self.began_j
        return joules - joules % self.step_j if self.step_j else joules


def test_rest_is_subtracted_and_every_window_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    found, how = machine.energy(3, 100, dense=(0.4, 30.0), run=(0.3, 20.0))
    # Each once to warm up, then in turns; 0.4 s fill a second in three calls, 0.3 s in four.
    assert machine.windows == ["dense", "run"] + ["rest", *["dense"] * 3, *["run"] * 4] * 3
    assert found["dense"].gross_j_per_token == pytest.approx(0.4 * 30 / 100)
    assert found["dense"].net_j_per_token == pytest.approx(0.4 * 20 / 100)
    assert found["run"].net_j_per_token == pytest.approx(0.3 * 10 / 100)
    assert (found["run"].windows, found["run"].tokens) == (3, 3 * 4 * 100)
    assert how["rest_w"] == pytest.approx(10)
    assert (how["method"], how["measured"], how["grid_kg_per_kwh"]) == ("a test", True, 0.36)
    assert found["dense"].net_gco2_per_token == pytest.approx(0.08 * 360 / 3.6e6)  # 0.08 J at 360 g a kilowatt hour


def test_what_windows_of_rest_differ_by_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = Machine(monkeypatch, rest_w=(9.0, 10.0, 12.0)).energy(3, 10, dense=(1.0, 12.5), run=(1.0, 14.0))
    # Dense: 2.5 W above the median at rest, and rest itself moves by 3.
    assert found["dense"].net_j_per_token == found["dense"].net_gco2_per_token == BELOW
    assert found["run"].net_j_per_token == pytest.approx(0.4)
    assert found["dense"].resolution_j_per_token == pytest.approx(0.3)
    # A counter that does not move gives no zero.
    found, _ = Machine(monkeypatch, rest_w=(0.1, 0.1), step_j=1000.0).energy(2, 10, dense=(1.0, 30.0))
    assert found["dense"].net_j_per_token == BELOW


def test_the_meter_of_this_machine_needs_no_network_and_says_what_it_reads(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(socket.socket, "connect", Mock(side_effect=AssertionError("the network was asked")))
    meter = CodeCarbonMeter("FRA")
    meter.start()
    joules = meter.stop()
    assert joules >= 0
    assert meter.measured or "no energy counter" in meter.method
    assert 0 < meter.grid_kg_per_kwh < meters._grid_kg_per_kwh("DEU")  # nuclear power against coal
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize(("measured", "least_s"), [(False, 1 / 8), (True, 1 / 2)])  # an estimate needs no half second
def test_emissions_of_a_run_stand_beside_those_of_the_dense_model_and_change_no_identity(words, monkeypatch, measured, least_s):
    meter = Mock(method="a test", measured=measured, grid_kg_per_kwh=0.36, stop=Mock(return_value=2.0))  # 2 J a window
    monkeypatch.setattr(meters, "meter_of", lambda country: meter)
    asked_s = set[float]()

    def shorter(work: Any, meter: Any, asked: float) -> Any:
        asked_s.add(asked)
        return full_window(work, meter, asked / 50)

    monkeypatch.setattr(meters, "window", shorter)
    words = [*words, "protocol=continuation", "modules=[static_depth]"]
    on = compose([*words, "measure.emissions.enabled=true"])
    assert on.identity() == compose(words).identity()
    (record,) = ensure([on])
    found = record.measured("emissions", EmissionsResult)
    assert meter.start.call_count == 2 + 4  # the dense record; the run and the dense model in turns
    assert found.grid == "world average"
    tokens = 4 * 31  # of a batch of four windows, the last token of each is only a target
    calls = 4.0 / (found.energy_j_per_token * tokens)  # of two windows of 2 J
    assert calls == pytest.approx(round(calls))
    assert found.gco2_per_token == pytest.approx(found.energy_j_per_token * 0.36 / 3600)
    assert found.dense_energy_j_per_token > 0
    assert "world average" in found.line()
    assert asked_s == {least_s}
    # What an estimate says to be saved is the time; without a clock that is not known.
    saved = against_dense(record, Store(on.results_dir).dense_of(record)).get("co2_saved_pct")
    assert saved == (pytest.approx(100 * (1 - found.gco2_per_token / found.dense_gco2_per_token)) if measured else None)
