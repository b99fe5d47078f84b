"""Joules per token of one batch over and over, and grams of CO₂ of them, read with codecarbon.

`Energy` takes run, dense and rest in turns (App. F). `Emissions` takes a window of a second in every run and includes what the machine draws at
rest. Without an energy counter codecarbon estimates from the processor's nominal power and the load of the process: then the number is derived
from time, and the record says so.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from quicksilver.measure.measurement import Measurement, Result, Setting
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import at_least, between

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench

J_PER_KWH = 3.6e6
MIN_WINDOW_S = 1.0  # RAPL counts every millisecond, NVML every tenth of a second
WORLD = "world average"
BELOW: Literal["below resolution"] = "below resolution"
Net = float | Literal["below resolution"]
COUNTERS = {  # codecarbon's name for a source -> ours
    "intel_rapl": "RAPL",
    "windows_emi": "RAPL (Windows energy meter)",
    "intel_power_gadget": "Intel Power Gadget",
    "AppleSiliconChip": "powermetrics",
    "Raspberry": "Raspberry Pi power rails",
    "GPU": "NVML",
}
ESTIMATES = {
    "cpu_load": "no energy counter: nominal power of the processor × the load of this process",
    "constant": "no energy counter: half the nominal power of the processor",
}


class CodeCarbonMeter:
    """codecarbon's offline tracker: every energy counter of this machine, or its estimate for the processor where there is none.

    Attributes:
        method: where the joules come from, in words; `measured` is False where they are an estimate without any counter.
        grid_kg_per_kwh: emissions of electricity in `country_iso_code`, three letters; None: the world average of codecarbon.

    Raises:
        ConfigError: codecarbon knows no such country.
    """

    def __init__(self, country_iso_code: str | None) -> None:
        from codecarbon import OfflineEmissionsTracker

        logging.getLogger("codecarbon").setLevel(logging.CRITICAL)
        self.grid_kg_per_kwh = _grid_kg_per_kwh(country_iso_code)

        def sources(mode: str) -> dict[str, str]:
            """Start a tracker, which needs some country: its sources by kind of hardware, without RAM, which no counter reads."""
            self._tracker = OfflineEmissionsTracker(
                country_iso_code=country_iso_code or "USA", output_methods=[], log_level="critical", measure_power_secs=1, tracking_mode=mode
            )  # fmt: skip
            self.start()
            self._tracker.stop_task()
            parts = {getattr(part, "chip_part", type(part).__name__): part for part in self._tracker._hardware}
            return {kind: getattr(part, "_mode", type(part).__name__) for kind, part in parts.items() if kind != "RAM"}

        found = sources("machine")
        counters = {kind: COUNTERS[source] for kind, source in found.items() if source in COUNTERS}
        self.measured = bool(counters)
        if not counters:  # a counter sees the whole machine; an estimate should not include what else runs on it
            found = sources("process")
        self._kinds = tuple(counters) or tuple(found)
        self.method = " + ".join(counters.values()) or "; ".join(ESTIMATES.get(source, source) for source in found.values())
        if not self._kinds:
            raise ConfigError(
                "codecarbon finds nothing on this machine whose energy it could tell: add measure.emissions=false measure.energy=false."
            )

    def start(self) -> None:
        self._tracker.start_task()

    def stop(self) -> float:
        """Joules since `start`."""
        found = self._tracker.stop_task()
        return J_PER_KWH * sum({"CPU": found.cpu_energy, "GPU": found.gpu_energy}[kind] for kind in self._kinds)


def _grid_kg_per_kwh(country_iso_code: str | None) -> float:
    """Emissions of a kilowatt hour as codecarbon has them."""
    from codecarbon.core.emissions import Emissions as Factors
    from codecarbon.core.units import Energy as Joules
    from codecarbon.external.geography import GeoMetadata
    from codecarbon.input import DataSource

    data = DataSource()
    if country_iso_code is None:
        return float(data.get_carbon_intensity_per_source_data()["world_average"]) / 1e3
    mix = data.get_global_energy_mix_data()
    if country_iso_code not in mix:
        raise ConfigError(f"country_iso_code={country_iso_code} is no country of codecarbon's: three letters, such as USA, DEU.")
    place = GeoMetadata(country_iso_code=country_iso_code, country_name=mix[country_iso_code]["country_name"])
    return float(Factors(data).get_private_infra_emissions(Joules.from_energy(kWh=1.0), place))


meter_of = functools.cache(CodeCarbonMeter)  # set up once: finding out what there is takes seconds


class Window(NamedTuple):
    """Joules drawn by the machine in one window, how long it took, and how often the work ran in it."""

    joules: float
    seconds: float
    calls: int


def window(work: Callable[[], object], meter: CodeCarbonMeter, least_s: float) -> Window:
    """Repeat `work` for at least `least_s` seconds, and read the meter."""
    meter.start()
    began, calls, seconds = time.perf_counter(), 0, -1.0
    while seconds < least_s:
        work()
        calls += 1
        seconds = time.perf_counter() - began
    return Window(meter.stop(), seconds, calls)


@contextmanager
def _works(bench: Bench, *, dense: bool = True) -> Iterator[tuple[Mapping[str, Callable[[], None]], int]]:
    """One pass of the dense model (where it is wanted) and of the run, by name; and how many tokens a pass processes."""
    import torch

    def finished(forward: Callable[[], None]) -> None:
        forward()
        if bench.model.device.type == "cuda":
            torch.cuda.synchronize(bench.model.device)

    with bench.sides() as sides:
        tokens = bench.batch if bench.protocol.name == "all" else bench.batch[:, :-1]
        passes = {name: functools.partial(finished, side.forward) for name, side in sides.items() if dense or name != "dense"}
        yield passes, tokens.numel()


@dataclass(frozen=True)
class TokenEnergy:
    """What a token drew, measured in so many `windows` of so many `tokens`.

    Attributes:
        gross_j_per_token: with what the machine draws at rest; `net_…` without it, or words where windows of rest differ by as much.
        resolution_j_per_token: the smallest net value that could be told from rest.
    """

    gross_j_per_token: float
    gross_gco2_per_token: float
    net_j_per_token: Net
    net_gco2_per_token: Net
    resolution_j_per_token: float
    windows: int
    tokens: int


def energy(
    works: Mapping[str, Callable[[], object]], tokens_per_call: int, meter: CodeCarbonMeter, *, window_s: float, rounds: int
) -> tuple[dict[str, TokenEnergy], dict[str, Any]]:
    """Measure `works` and rest in turns: rest, A, B, rest, A, B … Each work processes `tokens_per_call` tokens and is repeated
    until its window is full; `window_s` and `rounds` are options of `Energy`. Gives energy by name, and how it was measured."""
    load = os.getloadavg()[0]
    for work in works.values():
        work()  # one-time allocations do not count
    found: dict[str, list[Window]] = {name: [] for name in works}
    rests = []
    for _ in range(rounds):
        rests.append(window(lambda: time.sleep(window_s), meter, 0.0))
        for name, work in works.items():
            found[name].append(window(work, meter, window_s))
    watts = [one.joules / one.seconds for one in rests]
    rest_w, rest_spread_w, grams = median(watts), max(watts) - min(watts), 1e3 * meter.grid_kg_per_kwh / J_PER_KWH
    each = {}
    for name, windows in found.items():
        gross, seconds, calls = (sum(column) for column in zip(*windows, strict=True))
        tokens = tokens_per_call * calls
        net, resolution = gross - rest_w * seconds, rest_spread_w * seconds
        # A counter that did not move in any window resolves nothing, however still it stood at rest.
        resolved = net > resolution and gross > 0
        said, said_grams = (net / tokens, grams * net / tokens) if resolved else (BELOW, BELOW)
        each[name] = TokenEnergy(
            gross / tokens, grams * gross / tokens, said, said_grams, resolution / tokens, len(windows), tokens
        )
    return each, {
        "method": meter.method, "measured": meter.measured, "grid_kg_per_kwh": meter.grid_kg_per_kwh, "rest_w": rest_w,
        "rest_spread_w": rest_spread_w, "window_s": window_s, "load_average": load,
    }  # fmt: skip


@dataclass(frozen=True)
class EnergyResult(Result):
    """Dense and run, over windows of at least `window_s` seconds.

    Attributes:
        method: where the joules come from; `measured` is False where that is an estimate without any counter.
        grid_kg_per_kwh: emissions of electricity in `country_iso_code`.
        rest_w, rest_spread_w: watts at rest, and how far windows of rest are apart.
    """

    dense: TokenEnergy
    method: str
    measured: bool
    grid_kg_per_kwh: float
    rest_w: float
    rest_spread_w: float
    window_s: float
    load_average: float
    country_iso_code: str
    run: TokenEnergy | None = None

    @property
    def ours(self) -> TokenEnergy:
        """Of the run; in a dense run, of the dense model."""
        return self.run or self.dense

    def line(self) -> str:
        net, grams = self.ours.net_j_per_token, self.ours.net_gco2_per_token
        said = net if isinstance(net, str) or isinstance(grams, str) else f"{1e3 * net:.3g} mJ a token, {1e6 * grams:.3g} µg CO₂"
        return f"{said} ({self.method}; {self.grid_kg_per_kwh:.3g} kg/kWh, {self.country_iso_code})"


@dataclass
class Energy(Measurement, share=0.08, timed=True):
    """Read a counter over windows of work and of rest.

    Args:
        country_iso_code: whose electricity it is, such as DEU; there is no default.
        window_s: least length of a window, in seconds.
        rounds: windows of each kind; the spread of those of rest is the resolution.
    """

    country_iso_code: str | None = None
    window_s: Annotated[float, between(MIN_WINDOW_S)] = 3.0
    rounds: Annotated[int, at_least(2)] = 3

    def check(self, setting: Setting) -> None:
        if self.country_iso_code is None:
            raise ConfigError("country_iso_code has no value: give the country whose electricity it is, such as DEU.")

    def run(self, bench: Bench) -> EnergyResult:
        with _works(bench) as (works, tokens):
            meter = meter_of(self.country_iso_code)
            found, how = energy(works, tokens, meter, window_s=self.window_s, rounds=self.rounds)
        return EnergyResult(found["dense"], run=found.get("run"), country_iso_code=str(self.country_iso_code), **how)


@dataclass(frozen=True)
class EmissionsResult(Result):
    """What a token drew and emitted, at the plug of the parts that CodeCarbon reads.

    Attributes:
        energy_j_per_token, gco2_per_token: of the run, over `window_s` seconds; `dense_…` of the dense model in the same process.
        method: where the joules come from; `measured` is False where that is an estimate without any counter.
        grid_kg_per_kwh: emissions of electricity in `grid`, a country or the world average.
    """

    energy_j_per_token: float
    gco2_per_token: float
    dense_energy_j_per_token: float
    dense_gco2_per_token: float
    window_s: float
    method: str
    measured: bool
    grid_kg_per_kwh: float
    grid: str

    def line(self) -> str:
        return (
            f"{1e6 * self.gco2_per_token:.3g} µg CO₂e a token, dense {1e6 * self.dense_gco2_per_token:.3g} "
            f"({self.method}; {self.grid_kg_per_kwh:.3g} kg/kWh, {self.grid})"
        )


@dataclass
class Emissions(Measurement, share=0.04, timed=True, in_identity=False):
    """Read CodeCarbon over a short window of work. No other number depends on it: a record without it is the same record. With a
    counter the dense model is read in turns with the run; an estimate reads it once for all runs of this model, text and protocol in one process.

    Args:
        country_iso_code: whose electricity it is, such as DEU; None: the world average that CodeCarbon has.
        window_s: least time of work of each, in seconds, in two windows; counters need one. An estimate needs a quarter.
    """

    country_iso_code: str | None = None
    window_s: Annotated[float, between(MIN_WINDOW_S)] = 1.0

    def run(self, bench: Bench) -> EmissionsResult:
        meter = meter_of(self.country_iso_code)
        kept = bench.dense.energy_j_per_token if bench.dense is not None else {}
        setting = f"{self.country_iso_code} {self.window_s}"
        with _works(bench, dense=meter.measured or setting not in kept or not bench.modules) as (works, tokens):
            # Two rounds in turns: a slow moment of the machine hits both. Of an estimate, 0.2 s differ from 0.8 s by 5%.
            least_s = self.window_s / (2 if meter.measured else 8)
            rounds = [{name: window(work, meter, least_s) for name, work in works.items()} for _ in range(2)]
        summed = {name: Window(*map(sum, zip(*(one[name] for one in rounds), strict=True))) for name in works}
        joules = {name: both.joules / (tokens * both.calls) for name, both in summed.items()}
        dense = joules["dense"] if "dense" in joules else kept[setting]
        kept.setdefault(setting, dense)
        ours, grams = joules.get("run", dense), 1e3 * meter.grid_kg_per_kwh / J_PER_KWH
        return EmissionsResult(
            ours, grams * ours, dense, grams * dense, (summed.get("run") or summed["dense"]).seconds, meter.method,
            meter.measured, meter.grid_kg_per_kwh, self.country_iso_code or WORLD,
        )  # fmt: skip
