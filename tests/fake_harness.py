"""Stands where the harness stands: records are made by hand, and no model is run."""

import dataclasses
from pathlib import Path

import fakes
import pytest

import quicksilver.runs.config as harness_config
import quicksilver.runs.run as harness_run
from quicksilver.runs.config import RunConfig
from quicksilver.runs.context import RunContext
from quicksilver.runs.run import Plan, Planned
from quicksilver.runtime.errors import QuickSilverError


class Harness:
    """Stands for `plan` and for making one run: records are made by hand, and `broken` runs fail."""

    def __init__(self, results: Path) -> None:
        self.results, self.broken, self.made = results, set[str](), list[str]()

    @staticmethod
    def name(config: RunConfig) -> str:
        halting = config.modules.get("halting", {})
        signal = halting.get("signal", "") if halting.get("rule") == "capacity" else ""
        return f"{'+'.join(config.modules) or 'dense'}{signal} {config.protocol.name}"

    def plan(self, configs, context=None):
        steps, wanted = {}, []
        for config in configs:
            dense = self.name(config.dense())
            for name, needs in ((dense, None), (self.name(config), None if self.name(config) == dense else dense)):
                fingerprint = fakes.fingerprint(name)
                steps[name] = Planned(config if needs else config.dense(), fingerprint, needs and fakes.fingerprint(needs))
                _ = steps[name].record  # refuses one that is not whole
            wanted.append(steps[self.name(config)])
        return Plan(tuple(steps.values()), tuple(wanted), context or RunContext())

    def make_one(self, step, context, report, group=None):
        name = self.name(step.config)
        report("quality", 0.0)
        if name in self.broken:
            raise QuickSilverError(f"the logits of {name} are not finite")
        self.made.append(name)
        options = {} if step.dense is None else {"per_token": 0.02, "null_per_token": 0.03, "saved": 0.1}
        fakes.make(self.results, name, name.split()[-1], **options)


COMPOSED: dict[tuple[str, ...], RunConfig] = {}


@pytest.fixture
def harness(tmp_path, monkeypatch):
    fake = Harness(tmp_path / "results")
    compose = harness_config.compose

    def remembered(overrides=()):
        # Composing takes a fifth of a second, and a table composes each of its rows.
        words = tuple(word for word in overrides if not word.startswith("results_dir="))
        if words not in COMPOSED:
            COMPOSED[words] = compose(words)
        return dataclasses.replace(COMPOSED[words], results_dir=str(fake.results))

    monkeypatch.setattr(harness_config, "compose", remembered)
    monkeypatch.setattr(harness_run, "plan", fake.plan)
    monkeypatch.setattr(harness_run, "_make_one", fake.make_one)
    return fake
