"""Console entry point: `quicksilver COMMAND key=value …`, the same as `python -m quicksilver COMMAND key=value …`.

Exit codes: 0 done; 1 something failed; 2 the request makes no sense; 130 interrupted; 143 terminated; 141 nobody reads the output.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from quicksilver import __version__
from quicksilver.runtime.errors import ConfigError, QuickSilverError, UnsupportedModelError

if TYPE_CHECKING:
    from quicksilver.cli.arguments import Command

# Name -> its class in a file of commands/, and what it does. Those below `dev` are of people who work on QuickSilver itself.
COMMANDS = {
    "budget": ("search.Budget", 'Set a dial so that a budget holds: "save 30% of the FLOPs", or "cost at most 1% of perplexity".'),
    "calibrate": ("search.Calibrate", "Measure a model's drift and entropy on text, and keep their percentiles per layer."),
    "claims": ("reproduce.Claims", "Judge every number that the paper claims by the records that are there; run nothing."),
    "demo": ("demo.Demo", "One paragraph, dense and adaptive side by side, every token coloured by the depth it reached; half a minute."),
    "doctor": ("doctor.Doctor", "Print what this machine has, and what each missing thing costs: put it into a bug report."),
    "fit": ("search.Fit", "Fit translators: maps that predict K and V of later layers, so that tokens may stop early and still be seen."),
    "list": ("look.List", "Name tables and figures, what a run can be made of, and sweeps."),
    "lm_eval": ("run.LmEval", "lm-evaluation-harness with models under runtime modules: its own command line, with the model `quicksilver`."),
    "new": ("new.New", "Write a method, a text, a model family or a table of your own: a file, its yaml and a test that passes at once."),
    "report": ("look.Report", "Write a site of everything that was made so far, to be opened in a browser; run nothing."),
    "reproduce": ("reproduce.Reproduce", "Remake tables and figures of the paper: run what has no record yet, print and write them."),
    "run": ("run.Run", "Make one record, or those of a sweep: model × dataset × modules × protocol × measure."),
    "schedule": ("search.Schedule", "Choose which tokens of a prompt stop where, for a model and a budget, by KL to dense on calibration text."),
    "show": ("look.Show", "Print all that one record has: its numbers against dense and its null, its files and its page."),
    "status": ("look.Status", "Say what is at work below a results folder: sweeps, single runs, the processes that make them, jobs in the queue."),
    "time": ("reproduce.Time", "Time the rows of a table again in several processes, so that it prints their range."),
    "dev benchmark": ("dev.Benchmark", "What the runtime costs and saves on this machine, within ten minutes."),
    "dev completion": ("dev.Completion", "The script with which a shell completes commands, keys and choices."),
    "dev keep": ("dev.Keep", "Put the records behind every written table, figure and the ledger into results/records, where git has them."),
    "dev readme": ("dev.Readme", "Put the written tables and figures into README.md, between its markers."),
    "dev variants": ("dev.Variants", "Write what the repository has of other models and texts: tables, figures, the ledger, results/variants.md."),
}  # fmt: skip


class Terminated(BaseException):
    """SIGTERM arrived. Not an Exception: what is half done is undone on its way out, and nothing may swallow it."""


def commands(below: str = "") -> list[str]:
    """The words that may stand first, or after `below`, such as `dev`."""
    return list(dict.fromkeys(name.removeprefix(below).split()[0] for name in COMMANDS if name.startswith(below)))


def load(name: str) -> type[Command]:
    """The class of a command."""
    if name not in COMMANDS:
        known = [one for one in COMMANDS if one.startswith("dev ") == name.startswith("dev ")]
        close = " or ".join(difflib.get_close_matches(name, known, n=2))
        hint = f"Did you mean {close}? " if close else ""
        raise ConfigError(f"There is no command {name}. {hint}Commands: {', '.join(known)}.")
    file, _, cls = COMMANDS[name][0].partition(".")
    found: type[Command] = getattr(importlib.import_module(f"quicksilver.cli.commands.{file}"), cls)
    return found


def help_of(name: str) -> str:
    """What `--help` says of a command."""
    return f"{COMMANDS[name][1]}\n\n{load(name).help()}"


def usage(below: str = "") -> str:
    """One line a command; those below `dev` by themselves."""
    lines = [f"  {name:<14} {said}" for name, (_, said) in COMMANDS.items() if name.startswith("dev ") == (below == "dev")]
    if not below:
        lines.append(f"  {'dev':<14} Commands of those who work on QuickSilver itself: {', '.join(commands('dev '))}.")
    keys = "Keys are the same everywhere: model=gpt2-large dataset=wikitext103 results_dir=/folder"
    return "\n".join(["quicksilver COMMAND key=value …", "", *lines, "", f"`quicksilver COMMAND --help` says more. {keys}"])


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that `words` (default: those of the command line) name; returns the exit code."""
    given = list(sys.argv[1:] if words is None else words)
    return _guarded(lambda: _dispatch(given))


def _dispatch(words: list[str]) -> int:
    if words[:1] in (["-V"], ["--version"]):
        print(f"quicksilver {__version__}")
        return 0
    depth = 2 if words[:1] == ["dev"] else 1
    if (words[depth - 1 :] or ["--help"])[0] in ("-h", "--help", "help"):
        print(usage("dev" if depth == 2 else ""))
        return 0 if words[depth - 1 :] else 2
    name, rest = " ".join(words[:depth]), words[depth:]
    command = load(name)
    if not command.own_help and {"-h", "--help"} & set(rest):
        print(help_of(name))
        return 0
    together = name == "run" and ("model.parallel=tensor" in rest or not {"-m", "--multirun"} & set(rest))
    processes = os.environ.get("WORLD_SIZE", "1")
    if not together and "TORCHELASTIC_RUN_ID" in os.environ and processes != "1":
        shared = "They share the windows of one run (`run` without -m). A sweep (-m) whose model is cut among them has model.parallel=tensor."
        same = f"torchrun started {processes} processes, and each would make the same runs"
        raise ConfigError(f"{same}: start quicksilver by itself. {shared}")
    if not together or os.environ.get("RANK", "0") == "0":
        return command.parsed(rest, f"quicksilver {name}").main()
    try:  # The first process speaks. What is wrong with the run, all of them find.
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            return command.parsed(rest, f"quicksilver {name}").main()
    except (ConfigError, UnsupportedModelError):
        return 2


def _guarded(command: Callable[[], int]) -> int:
    """Run it; whatever goes wrong becomes one line on stderr and an exit code."""
    try:
        with _terminated_like_an_exception():
            code = command()
            sys.stdout.flush()
        return code
    except QuickSilverError as error:
        say(str(error))
        return 2 if isinstance(error, ConfigError) else 1
    except (KeyboardInterrupt, Terminated) as stop:
        said, code = ("Terminated", 143) if isinstance(stop, Terminated) else ("Interrupted", 130)
        say(f"{said}. Finished records are kept: the same command goes on from here.")
        return code
    except BrokenPipeError:
        # `quicksilver list | head`: the reader has seen enough. Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.filename is None:
            raise
        say(f"{error.filename}: {error.strerror}. Finished records are kept: mend it, and the same command goes on from here.")
        return 1
    except Exception as error:
        if (fault := fault_of_own_file(error)) is None:
            raise
        say(fault)
        return 1


def fault_of_own_file(error: BaseException) -> str | None:
    """The last line of a person's own file in a traceback, and the error; None: only files of the package or of libraries are in it."""
    package = Path(__file__).resolve().parents[1]
    ours = [package, *(package.parent / name for name in ("experiments", "scripts", "studies"))]
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib", "scripts")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if path.is_file() and not any(path.is_relative_to(folder) for folder in (*ours, *installed)):
            where = f"{frame.filename}, line {frame.lineno}, in {frame.name}"
            return f"{where}: {type(error).__name__}: {error}\n  {frame.line}"
    return None


@contextmanager
def _terminated_like_an_exception() -> Iterator[None]:
    """Within, SIGTERM raises `Terminated`, so that drafts and temporary files are removed as after any failure."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = None
    with suppress(ValueError):  # not the main thread: its owner decides
        before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def say(message: str) -> None:
    """One message for the person, on stderr."""
    print(f"quicksilver: {message}", file=sys.stderr, flush=True)
