"""Joules per token of one batch over and over, run and dense in turns with rest, and grams of CO₂ of them (App. F)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quicksilver.measure.measurement import Measurement, Result, Setting, at_least
from quicksilver.runtime.errors import ConfigError

if TYPE_CHECKING:
    from quicksilver.measure.bench import Bench
    from quicksilver.measure.meters import Drawn

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
    window_s: float = 3.0
    rounds: int = 3

    share = 0.08
    timed = True

    def check(self, setting: Setting) -> None:
        if self.country_iso_code is None:
            raise ConfigError("country_iso_code has no value: give the country whose electricity it is, such as DEU.")
        at_least("rounds", self.rounds, 2)
        if self.window_s < 1:
            raise ConfigError(f"window_s={self.window_s:g} is out of range: counters need at least 1 second.")

    def run(self, bench: Bench) -> EnergyResult:
        import torch

        from quicksilver.measure.bench import forward
        from quicksilver.measure.latency import shared_weight_copy
        from quicksilver.measure.meters import energy, meter_of

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
    from quicksilver.measure.meters import J_PER_KWH

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
