"""Joules per token of one batch over and over, run and dense in turns with rest, and grams of CO₂ of them (App. F)."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from quicksilver.measure.measurement import Measurement, Result, Setting
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.options import at_least, between

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench


J_PER_KWH = 3.6e6
MIN_WINDOW_S = 1.0  # RAPL counts every millisecond, NVML every tenth of a second
REST = "rest"
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


class Meter(Protocol):
    """Reads energy: `start` a window, `stop` gives its joules.

    Attributes:
        method: where the joules come from, in words.
        measured: False where they are an estimate without any counter.
        grid_kg_per_kwh: emissions of electricity where the machine is said to stand.
    """

    method: str
    measured: bool
    grid_kg_per_kwh: float

    def start(self) -> None: ...

    def stop(self) -> float: ...


class CodeCarbonMeter:
    """codecarbon's offline tracker: whatever of this machine has a counter; its guess for the processor where nothing has one.

    Args:
        country_iso_code: three letters; decides the emissions of electricity. None: the world average that codecarbon has.

    Raises:
        ConfigError: codecarbon is not installed, or knows no such country.
    """

    def __init__(self, country_iso_code: str | None) -> None:
        try:
            from codecarbon import OfflineEmissionsTracker
            from codecarbon.core.emissions import Emissions
            from codecarbon.core.units import Energy
            from codecarbon.external.geography import GeoMetadata
            from codecarbon.input import DataSource

            logging.getLogger("codecarbon").setLevel(logging.CRITICAL)  # its remarks are for who has no record to read
        except ModuleNotFoundError as error:
            raise ConfigError(
                "codecarbon is not installed, and energy and emissions are read with it: pip install codecarbon."
            ) from error
        data = DataSource()
        mix = data.get_global_energy_mix_data()
        if country_iso_code is None:
            self.grid_kg_per_kwh = float(data.get_carbon_intensity_per_source_data()["world_average"]) / 1e3
        elif country_iso_code not in mix:
            raise ConfigError(
                f"country_iso_code={country_iso_code} is not a country that codecarbon knows: three letters, such as USA, DEU, FRA."
            )
        else:
            place = GeoMetadata(country_iso_code=country_iso_code, country_name=mix[country_iso_code]["country_name"])
            emitted = Emissions(data).get_private_infra_emissions(Energy.from_energy(kWh=1.0), place)
            self.grid_kg_per_kwh = float(emitted)

        def tracker(mode: str) -> tuple[Any, dict[str, str]]:
            """A tracker that has found out what the machine has, and its sources by kind of hardware. It wants a country even where only its
            joules are read."""
            made = OfflineEmissionsTracker(
                country_iso_code=country_iso_code or "USA", output_methods=[], log_level="critical", measure_power_secs=1, tracking_mode=mode
            )  # fmt: skip
            made.start_task("warm-up")
            made.stop_task()
            sources = {_kind(part): getattr(part, "_mode", type(part).__name__) for part in made._hardware}
            return made, {kind: source for kind, source in sources.items() if kind != "RAM"}  # never a counter

        self._tracker, sources = tracker("machine")
        counters = {kind: COUNTERS[source] for kind, source in sources.items() if source in COUNTERS}
        self.measured = bool(counters)
        if not counters:
            # A counter sees the whole machine whatever we ask for; a guess had better not see what else runs on it.
            self._tracker, sources = tracker("process")
        self._kinds = tuple(counters) or tuple(sources)
        self.method = " + ".join(counters.values()) or "; ".join(ESTIMATES.get(source, source) for source in sources.values())
        if not self._kinds:
            raise ConfigError("codecarbon finds nothing on this machine whose energy it could tell: add measure.energy=false.")

    def start(self) -> None:
        self._tracker.start_task()

    def stop(self) -> float:
        """Joules since `start`."""
        found = self._tracker.stop_task()
        return J_PER_KWH * sum({"CPU": found.cpu_energy, "GPU": found.gpu_energy}[kind] for kind in self._kinds)


@functools.cache
def meter_of(country_iso_code: str | None) -> Meter:
    """The meter of this machine, set up once: finding out what there is takes seconds."""
    return CodeCarbonMeter(country_iso_code)


def _kind(hardware: Any) -> str:
    """CPU, GPU or RAM."""
    return getattr(hardware, "chip_part", type(hardware).__name__)


@dataclass(frozen=True)
class Window:
    """One window: joules drawn by the machine, how long it took, and how often the work ran in it."""

    joules: float
    seconds: float
    calls: int

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


@dataclass(frozen=True)
class Drawn:
    """What one kind of work drew.

    Attributes:
        gross_j_per_token: with what the machine draws at rest.
        net_j_per_token: without it; None: below the resolution.
        resolution_j_per_token: the smallest net value that could be told from rest.
        windows, tokens: how much was measured.
    """

    gross_j_per_token: float
    net_j_per_token: float | None
    resolution_j_per_token: float
    windows: int
    tokens: int


def energy(
    works: Mapping[str, Callable[[], object]], tokens_per_call: int, meter: Meter, *, window_s: float, rounds: int
) -> tuple[dict[str, Drawn], dict[str, Any]]:
    """Measure `works` and rest in turns: rest, A, B, rest, A, B …

    Args:
        works: callables by name; each is repeated until its window is full.
        tokens_per_call: tokens that one call processes.
        window_s: least length of a window in seconds.
        rounds: windows of each; the spread of the windows of rest is the resolution.

    Returns:
        Energy by name, and how it was measured: method, whether there was a counter, grid factor, watts at rest.

    Raises:
        ConfigError: a window too short for a counter, fewer than 2 rounds, no tokens.
    """
    if window_s < MIN_WINDOW_S:
        raise ConfigError(f"window_s={window_s:g} is too short for an energy counter: at least {MIN_WINDOW_S:g} s.")
    if rounds < 2:
        raise ConfigError(f"rounds={rounds}: at least 2, the spread of the windows of rest is the resolution.")
    if tokens_per_call < 1:
        raise ConfigError(f"tokens_per_call={tokens_per_call}: joules per token need at least one.")
    load = os.getloadavg()[0]
    for work in works.values():
        work()  # one-time allocations are nobody's energy
    found: dict[str, list[Window]] = {name: [] for name in (REST, *works)}
    for _ in range(rounds):
        found[REST].append(window(lambda: time.sleep(window_s), meter, 0.0))
        for name, work in works.items():
            found[name].append(window(work, meter, window_s))
    at_rest = [window.watts for window in found[REST]]
    spread = max(at_rest) - min(at_rest)
    results = {name: _energy(found[name], tokens_per_call, median(at_rest), spread) for name in works}
    how = {
        "method": meter.method,
        "measured": meter.measured,
        "grid_kg_per_kwh": meter.grid_kg_per_kwh,
        "rest_w": median(at_rest),
        "rest_spread_w": spread,
        "window_s": window_s,
        "load_average": load,
    }
    return results, how


def window(work: Callable[[], object], meter: Meter, least_s: float) -> Window:
    """`work` over and over for at least `least_s` seconds, and what the meter read meanwhile."""
    meter.start()
    began, calls = time.perf_counter(), 0
    while True:
        work()
        calls += 1
        seconds = time.perf_counter() - began
        if seconds >= least_s:
            break
    joules = meter.stop()
    return Window(joules, seconds, calls)


def _energy(windows: Sequence[Window], tokens_per_call: int, rest_w: float, spread_w: float) -> Drawn:
    calls, seconds = sum(w.calls for w in windows), sum(w.seconds for w in windows)
    tokens = calls * tokens_per_call
    gross = sum(w.joules for w in windows)
    net = gross - rest_w * seconds
    resolution = spread_w * seconds
    # A counter that did not move in any window resolves nothing, however still it stood at rest.
    resolved = net > resolution and gross > 0
    return Drawn(gross / tokens, net / tokens if resolved else None, resolution / tokens, len(windows), tokens)


BELOW: Literal["below resolution"] = "below resolution"
Net = float | Literal["below resolution"]


@dataclass(frozen=True)
class TokenEnergy:
    """What a token drew.

    Attributes:
        gross_j_per_token: with what the machine draws at rest; `net_…` without it, or words where windows of rest differ by as much.
        resolution_j_per_token: the smallest net value that could be told from rest.
        windows, tokens: how much was measured.
    """

    gross_j_per_token: float
    gross_gco2_per_token: float
    net_j_per_token: Net
    net_gco2_per_token: Net
    resolution_j_per_token: float
    windows: int
    tokens: int


@dataclass(frozen=True)
class EnergyResult(Result):
    """Dense and run.

    Attributes:
        method: where the joules come from; `measured` is False where that is an estimate without any counter.
        grid_kg_per_kwh: emissions of electricity in `country_iso_code`.
        rest_w, rest_spread_w: watts at rest, and how far windows of rest are apart.
        window_s: least length of a window.
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
        one = self.ours
        net, grams = one.net_j_per_token, one.net_gco2_per_token
        said = net if isinstance(net, str) or isinstance(grams, str) else f"{1e3 * net:.3g} mJ a token, {1e6 * grams:.3g} µg CO₂"
        return f"{said} ({self.method}; {self.grid_kg_per_kwh:.3g} kg/kWh, {self.country_iso_code})"


@dataclass
class Energy(Measurement):
    """Read a counter over windows of work and of rest.

    Args:
        country_iso_code: whose electricity it is, such as DEU; there is no default.
        window_s: least length of a window, in seconds.
        rounds: windows of each kind; the spread of those of rest is the resolution.
    """

    country_iso_code: str | None = None
    window_s: Annotated[float, between(1.0)] = 3.0
    rounds: Annotated[int, at_least(2)] = 3

    share = 0.08
    timed = True

    def check(self, setting: Setting) -> None:
        if self.country_iso_code is None:
            raise ConfigError("country_iso_code has no value: give the country whose electricity it is, such as DEU.")

    def run(self, bench: Bench) -> EnergyResult:
        import torch

        from quicksilver.measure.bench import forward
        from quicksilver.measure.latency import shared_weight_copy

        assert self.country_iso_code is not None  # checked with the config
        model, batch, protocol = bench.model, bench.batch, bench.protocol
        dense = shared_weight_copy(model)

        def synchronised(work: Callable[[], None]) -> Callable[[], None]:
            def fn() -> None:
                work()
                if model.device.type == "cuda":
                    torch.cuda.synchronize(model.device)

            return fn

        with torch.no_grad(), ExitStack() as stack:
            works = {"dense": synchronised(lambda: forward(dense, batch, protocol))}
            if bench.modules:
                run = stack.enter_context(bench.apply())

                def ours() -> None:
                    run.reset()
                    forward(model, batch, protocol)

                works["run"] = synchronised(ours)
            processed = batch.numel() if protocol.name == "all" else batch[:, :-1].numel()
            meter = meter_of(self.country_iso_code)
            found, how = energy(works, processed, meter, window_s=self.window_s, rounds=self.rounds)
        per_token = {name: _per_token(one, meter.grid_kg_per_kwh) for name, one in found.items()}
        return EnergyResult(dense=per_token["dense"], run=per_token.get("run"), country_iso_code=self.country_iso_code, **how)


def _per_token(drawn: Drawn, grid_kg_per_kwh: float) -> TokenEnergy:

    grams = 1e3 * grid_kg_per_kwh / J_PER_KWH
    net = drawn.net_j_per_token
    return TokenEnergy(
        gross_j_per_token=drawn.gross_j_per_token,
        gross_gco2_per_token=grams * drawn.gross_j_per_token,
        net_j_per_token=BELOW if net is None else net,
        net_gco2_per_token=BELOW if net is None else grams * net,
        resolution_j_per_token=drawn.resolution_j_per_token,
        windows=drawn.windows,
        tokens=drawn.tokens,
    )
