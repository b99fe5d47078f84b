"""Console entry point: `quicksilver COMMAND key=value …`, the same as `python -m quicksilver COMMAND key=value …`.

Exit codes: 0 done; 1 something failed; 2 the request makes no sense; 130 interrupted; 143 terminated; 141 nobody reads the output.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType, ModuleType

from quicksilver import __version__
from quicksilver.runtime.errors import ConfigError, QuickSilverError, UnsupportedModelError

COMMANDS = Path(__file__).resolve().parent / "commands"


class Terminated(BaseException):
    """SIGTERM arrived. Not an Exception: what is half done is undone on its way out, and nothing may swallow it."""


def commands() -> dict[str, Path]:
    """Every command with its file, sorted by name."""
    return {path.stem: path for path in sorted(COMMANDS.glob("*.py")) if not path.stem.startswith("_")}


def load(name: str) -> ModuleType:
    """The file of a command, imported.

    Raises:
        ConfigError: there is no such command; names close ones.
    """
    there = commands()
    if name not in there:
        close = difflib.get_close_matches(name, there, n=2)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise ConfigError(f"There is no command {name}. {hint}Commands: {', '.join(there)}.")
    return importlib.import_module(f"quicksilver.cli.commands.{name}")


def help_of(name: str) -> str:
    """The docstring of a command's file, read without importing it."""
    return ast.get_docstring(ast.parse(commands()[name].read_text(encoding="utf-8"))) or ""


def usage() -> str:
    """One line a command."""
    lines = [f"  {name:<12} {help_of(name).partition(chr(10))[0]}" for name in commands()]
    return "\n".join(
        [
            "quicksilver COMMAND key=value …",
            "",
            *lines,
            "",
            "`quicksilver COMMAND --help` says more. Keys are the same everywhere: model=gpt2-large dataset=wikitext103 results_dir=/folder",
        ]
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that `words` (default: those of the command line) name; returns the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    return _guarded(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"quicksilver {__version__}")
        return 0
    name, rest = words[0], words[1:]
    module = load(name)
    if any(word in ("-h", "--help") for word in rest) and not getattr(module, "OWN_HELP", False):
        print(help_of(name))
        return 0
    together = name == "run" and "model.parallel=tensor" in rest
    if not together:
        _refuse_torchrun()
    elif os.environ.get("RANK", "0") != "0":
        return _quiet_on_other_ranks(lambda: module.main(rest))
    return module.main(rest)


def _quiet_on_other_ranks(command: Callable[[], int]) -> int:
    """A run that several processes make speaks through the first of them; what is wrong with it, all of them find."""
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            return command()
    except (ConfigError, UnsupportedModelError):
        return 2


def _refuse_torchrun() -> None:
    """Each of its processes would make the same runs, and wait for the others."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and processes != "1":
        raise ConfigError(
            f"torchrun started {processes} processes, and each would make the same runs: start quicksilver by itself. A run or a sweep (-m) "
            "whose model is cut among them has model.parallel=tensor; model.device_map=auto spreads a model over devices."
        )


def _guarded(command: Callable[[], int]) -> int:
    """Run it; whatever goes wrong becomes one line on stderr and an exit code."""
    try:
        with _terminated_like_an_exception():
            code = command()
            sys.stdout.flush()
        return code
    except ConfigError as error:
        say(str(error))
        return 2
    except QuickSilverError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("Interrupted. Finished records are kept: the same command goes on from here.")
        return 130
    except Terminated:
        say("Terminated. Finished records are kept: the same command goes on from here.")
        return 143
    except BrokenPipeError:
        # `quicksilver list | head`: the reader has seen enough. Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.filename is None:
            raise
        say(f"{error.filename}: {error.strerror}. Finished records are kept: mend it, and the same command goes on from here.")
        return 1


@contextmanager
def _terminated_like_an_exception() -> Iterator[None]:
    """Within, SIGTERM raises `Terminated`, so that drafts and temporary files are removed as after any failure."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: its owner decides
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def say(message: str) -> None:
    """One message for the person, on stderr."""
    print(f"quicksilver: {message}", file=sys.stderr, flush=True)
