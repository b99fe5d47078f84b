"""A metric of Hugging Face's `evaluate` beside our own numbers: a script at hand, or one of the hub, which runs code of its author."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quicksilver.runtime.errors import ConfigError


def load_metric(metric: str) -> Callable[[Sequence[float], Sequence[float]], dict[str, float]]:
    """A metric, to be given gold and predicted: (E,) class numbers, or values of a regression. It gives its numbers by name.

    Args:
        metric: path of a metric script; or a name of the hub, with its configuration behind a slash: `accuracy`, `glue/sst2`.

    Raises:
        ConfigError: `evaluate` is not installed, or the metric cannot be had; when called: it refuses the answers.
    """
    try:
        import evaluate
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"measure.task.evaluate={metric} needs {error.name}, which is not installed: pip install 'quicksilver[tasks]'."
        ) from error
    name, _, configuration = metric.partition("/")
    given: tuple[str, str | None] = (metric, None) if Path(metric).suffix == ".py" else (name, configuration or None)
    if given[1] is None and metric.endswith(".py") and not Path(metric).is_file():
        raise ConfigError(f"measure.task.evaluate={metric}: there is no such file.")
    try:
        module = evaluate.load(given[0], config_name=given[1], module_type="metric", keep_in_memory=True)
    except Exception as error:  # whatever a script, a hub or the lack of one raises
        raise ConfigError(
            f"measure.task.evaluate={metric} cannot be loaded ({_first_line(error)}). Without a network give the path of a metric script, or "
            "leave it out: score and scores are computed by this package, as scikit-learn computes them."
        ) from error

    def evaluated(gold: Sequence[float], predicted: Sequence[float]) -> dict[str, float]:
        whole = all(float(one).is_integer() for one in (*gold, *predicted))
        kind: Any = int if whole else float
        try:
            found = module.compute(references=[kind(one) for one in gold], predictions=[kind(one) for one in predicted])
        except Exception as error:  # the script's own
            raise ConfigError(f"measure.task.evaluate={metric} refuses these answers: {_first_line(error)}.") from error
        return {str(name): float(value) for name, value in found.items()}

    return evaluated


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no message'}"
