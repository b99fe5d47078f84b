"""Energy and emissions of one batch, by CodeCarbon: a window of a second for every run, where `energy` takes many of work and of rest.

Gross: what the machine draws at rest is in it. Where the machine has no counter, CodeCarbon estimates from the processor's nominal power and
the load of the process; such a number follows the clock and knows nothing more, and the record says so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from quicksilver.measure.measurement import Measurement, Result
from quicksilver.runtime.options import between

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quicksilver.measure.bench import Bench
    from quicksilver.measure.energy import Window

ROUNDS = 2  # that the window is divided into: run and dense in turns, where dense was not read before
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
    """Read CodeCarbon over a window of work. No other number depends on it: a record without it is the same record. The dense model is read
    once for all runs of this model, text and protocol in one process: beside a window this short, `energy` is what compares with care.

    Args:
        country_iso_code: whose electricity it is, such as DEU; None: the world average that CodeCarbon has.
        window_s: least time of work of each, in seconds, in two windows; counters need one.
    """

    country_iso_code: str | None = None
    window_s: Annotated[float, between(1.0)] = 1.0

    share = 0.04
    timed = True
    in_identity = False

    def run(self, bench: Bench) -> EmissionsResult:
        import torch

        from quicksilver.measure.bench import forward
        from quicksilver.measure.energy import J_PER_KWH, meter_of, window
        from quicksilver.measure.latency import shared_weight_copy

        model, batch, protocol = bench.model, bench.batch, bench.protocol
        meter = meter_of(self.country_iso_code)
        tokens = batch.numel() if protocol.name == "all" else batch[:, :-1].numel()

        def work(of: PreTrainedModel, before: Callable[[], None]) -> Callable[[], None]:
            def fn() -> None:
                before()
                forward(of, batch, protocol)
                if model.device.type == "cuda":
                    torch.cuda.synchronize(model.device)

            return fn

        kept = bench.dense.energy_j_per_token if bench.dense is not None else {}
        setting = f"{self.country_iso_code} {self.window_s}"
        with torch.no_grad(), ExitStack() as stack:
            works = {} if setting in kept else {"dense": work(shared_weight_copy(model), lambda: None)}
            if bench.modules:
                run = stack.enter_context(bench.apply())
                works["run"] = work(model, run.reset)
            windows: dict[str, list[Window]] = {name: [] for name in works}
            for _ in range(ROUNDS):  # in turns: a slow moment of the machine hits both
                for name, one in works.items():
                    windows[name].append(window(one, meter, self.window_s / ROUNDS))
        per_token = {
            name: sum(one.joules for one in those) / (tokens * sum(one.calls for one in those)) for name, those in windows.items()
        }
        dense = kept.setdefault(setting, per_token["dense"]) if "dense" in per_token else kept[setting]
        ours = per_token.get("run", dense)
        seconds = sum(one.seconds for one in windows["run" if "run" in windows else "dense"])
        grams = 1e3 * meter.grid_kg_per_kwh / J_PER_KWH
        return EmissionsResult(
            energy_j_per_token=ours,
            gco2_per_token=grams * ours,
            dense_energy_j_per_token=dense,
            dense_gco2_per_token=grams * dense,
            window_s=seconds,
            method=meter.method,
            measured=meter.measured,
            grid_kg_per_kwh=meter.grid_kg_per_kwh,
            grid=self.country_iso_code or WORLD,
        )
