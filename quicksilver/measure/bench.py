"""The bench that measurements share: a frozen model, its windows and modules, and the scores that the first of them made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from quicksilver.measure.latency import shared_weight_copy
from quicksilver.measure.measurement import Measurement, Result
from quicksilver.measure.perplexity import Keep, Protocol, calls, keep_nothing
from quicksilver.runtime.errors import ConfigError
from quicksilver.runtime.module import RuntimeModule
from quicksilver.runtime.run import Execution, Run, apply
from quicksilver.runtime.trace import Trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quicksilver.data.tasks import TaskExamples
    from quicksilver.data.windows import Windows
    from quicksilver.measure.perplexity import DensePasses

Report = Callable[[str, float], None]  # phase, share of the whole that is done


@dataclass(frozen=True)
class Side:
    """The dense model or the run: whatever a measurement makes passes of in turns. `run` is None for the dense model."""

    model: PreTrainedModel
    batch: torch.Tensor
    protocol: Protocol
    run: Run | None = None

    def reset(self) -> None:
        """Forget the passes before, whose traces would pile up."""
        if self.run is not None:
            self.run.reset()

    def forward(self, prompt_only: bool = False) -> None:
        """One pass over the batch, or over its prompts."""
        self.reset()
        forward(self.model, self.batch, self.protocol, prompt_only)


@dataclass
class Bench:
    """What every measurement of a run is given.

    Attributes:
        model: as loaded; a measurement leaves it as it found it.
        windows: what is scored.
        batch_windows: windows in the batch that is audited, counted, timed and weighed.
        modules: of the run; none: it is dense.
        tokenizer: of the model; only texts of one's own need it.
        examples: the labelled examples of a task; None: the dataset has none.
        progress: a measurement calls it with the share of itself that is done, 0 to 1.
        scored: windows done and windows in all, where the present measurement scores them.
        frame: one row a window; a measurement may add columns to it.
        trace: every decision of the scoring pass.
        files: further files of the record, by name: each is given its path.
        decision_layers: layers after which the modules are asked; None: after every layer.
        keep: of a pass over all windows, by its name, what keeps its blocks.
        dense: what passes of the dense model gave, for every run of this model, text and protocol in this process.
    """

    model: PreTrainedModel
    windows: Windows
    protocol: Protocol
    modules: Sequence[RuntimeModule] = ()
    execution: Execution = "compact"
    seed: int = 0
    batch_windows: int = 4
    tokenizer: Any = None
    examples: TaskExamples | None = None
    progress: Callable[[float], None] = lambda share: None
    scored: tuple[int, int] | None = None
    frame: pd.DataFrame = field(default_factory=pd.DataFrame)
    trace: Trace | None = None
    files: dict[str, Callable[[Path], object]] = field(default_factory=dict)
    dense: DensePasses | None = None
    decision_layers: Sequence[int] | None = None
    keep: Callable[[str], Keep] = lambda name: keep_nothing

    @property
    def batch(self) -> torch.Tensor:
        """(B, N) long on the model's device: the first `batch_windows` windows, or as many as there are."""
        return self.windows.ids[: self.batch_windows].to(self.model.device)

    def prompts(
        self, measurement: str, count: int, tokens: int, new_tokens: int, options: str = "prompt_tokens={} and new_tokens={}"
    ) -> torch.Tensor:
        """(P, N) long: the beginnings of the first windows; raises ConfigError where the model has no positions for what shall follow."""
        found = self.windows.ids[:count, :tokens]
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if positions is not None and found.shape[1] + new_tokens > positions:
            asked = options.format(found.shape[1], new_tokens)
            raise ConfigError(f"measure.{measurement}: {asked} are more than the model's {positions} positions.")
        return found

    @contextmanager
    def apply(
        self,
        model: PreTrainedModel | None = None,
        modules: Sequence[RuntimeModule] | None = None,
        execution: Execution | None = None,
    ) -> Iterator[Run]:
        """The modules of the run, applied as it asks for it; or others, to another model. None are always compact. No gradients."""
        modules = self.modules if modules is None else modules
        how: Execution = (execution or self.execution) if modules else "compact"
        layers = self.decision_layers if modules else None
        with torch.no_grad(), apply(model or self.model, modules, execution=how, decision_layers=layers) as run:
            yield run

    @contextmanager
    def sides(self) -> Iterator[dict[str, Side]]:
        """`dense`, and `run` where there are modules: two models with the same weights, which can take turns. No gradients."""
        with torch.no_grad(), ExitStack() as stack:
            found = {"dense": Side(shared_weight_copy(self.model), self.batch, self.protocol)}
            if self.modules:
                run = stack.enter_context(self.apply())
                run.count_decisions(False)
                found["run"] = Side(self.model, self.batch, self.protocol, run)
            yield found

    def batches_done(self, done: int, of: int) -> None:
        """For `score`: windows done and windows in all."""
        self.scored = (done, of)
        self.progress(done / of)


def run_measurements(
    bench: Bench, measurements: Mapping[str, Measurement], report: Report = lambda phase, share: None
) -> dict[str, Result]:
    """Run each pass by its name in the config, in their order; what is timed is never also traced or counted. `report` is called
    with a name and the share of all of them that is done. Raises ConfigError: what does not fit model or protocol;
    QuickSilverError: logits that are not finite."""
    total = sum(one.share for one in measurements.values())
    before, results = 0.0, {}
    for name, measurement in measurements.items():

        def progress(share: float, name: str = name, before: float = before, own: float = measurement.share) -> None:
            report(name, (before + own * share) / total)

        bench.progress, bench.scored = progress, None
        progress(0.0)
        if (found := measurement.run(bench)) is not None:
            results[name] = found
        before += measurement.share
    bench.progress = lambda share: None
    return results


def forward(model: PreTrainedModel, batch: torch.Tensor, protocol: Protocol, prompt_only: bool = False) -> None:
    """Run the `calls` of a batch once, or the first alone."""
    for step in calls(model, batch, protocol)[: 1 if prompt_only else None]:
        step()
