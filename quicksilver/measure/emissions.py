"""Energy and emissions of one batch, by CodeCarbon: a window of a second for every run, where `energy` takes many of work and of rest.

Gross: what the machine draws at rest is in it. Where the machine has no counter, CodeCarbon estimates from the processor's nominal power and
the load of the process; such a number follows the clock and knows nothing more, and the record says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quicksilver.measure.measurement import Measurement, Result, Setting
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench
    from quicksilver.measure.meters import Meter

WORLD = "world average"


@dataclass(frozen=True)
class EmissionsResult(Result):
    """What a token drew and emitted, at the plug of the parts that CodeCarbon reads.

    Attributes:
        energy_j_per_token, gco2_per_token: of the run; `dense_…` of the dense model, in the same process.
        window_s: how long the run's window was.
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
class Emissions(Measurement):
    """Read CodeCarbon over a window of work. No other number depends on it: a record without it is the same record.

    Args:
        country_iso_code: whose electricity it is, such as DEU; None: the world average that CodeCarbon has.
        window_s: least length of a window, in seconds; counters need one.
    """

    country_iso_code: str | None = None
    window_s: float = 1.0

    share = 0.04
    timed = True
    in_identity = False

    def check(self, setting: Setting) -> None:
        if self.window_s < 1:
            raise ConfigError(f"window_s={self.window_s:g} is out of range: counters need at least 1 second.")

    def run(self, bench: Bench) -> EmissionsResult:
        import torch

        from quicksilver.measure.bench import forward
        from quicksilver.measure.latency import shared_weight_copy
        from quicksilver.measure.meters import J_PER_KWH, meter_of

        model, batch, protocol = bench.model, bench.batch, bench.protocol
        meter = meter_of(self.country_iso_code)
        tokens = batch.numel() if protocol.name == "all" else batch[:, :-1].numel()

        def drawn(of: Any, before: Callable[[], None]) -> tuple[float, float]:
            def work() -> None:
                before()
                forward(of, batch, protocol)
                if model.device.type == "cuda":
                    torch.cuda.synchronize(model.device)

            return _per_token(work, tokens, meter, self.window_s)

        with torch.no_grad():
            shared = bench.dense.energy_j_per_token if bench.dense is not None else None
            seconds = 0.0
            if shared is None:
                shared, seconds = drawn(shared_weight_copy(model), lambda: None)
            ours = shared
            if bench.modules:
                with bench.apply() as run:
                    ours, seconds = drawn(model, run.reset)
        if bench.dense is not None:
            bench.dense.energy_j_per_token = shared
        grams = 1e3 * meter.grid_kg_per_kwh / J_PER_KWH
        return EmissionsResult(
            energy_j_per_token=ours,
            gco2_per_token=grams * ours,
            dense_energy_j_per_token=shared,
            dense_gco2_per_token=grams * shared,
            window_s=seconds,
            method=meter.method,
            measured=meter.measured,
            grid_kg_per_kwh=meter.grid_kg_per_kwh,
            grid=self.country_iso_code or WORLD,
        )


def _per_token(work: Callable[[], None], tokens: int, meter: Meter, window_s: float) -> tuple[float, float]:
    """Joules a token over a window of `work`, and how long it was."""
    from quicksilver.measure.meters import window

    found = window(work, meter, window_s)
    return found.joules / (found.calls * tokens), found.seconds
