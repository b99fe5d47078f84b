"""What commands say: how far runs are, why rows failed and how to repeat them, and what a record found."""

from __future__ import annotations

import gc
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from quicksilver.cli.main import fault_of_own_file, say
from quicksilver.runtime.errors import ConfigError, QuickSilverError, installing

if TYPE_CHECKING:
    from quicksilver.measure.measurement import Result
    from quicksilver.records.identity import Ledger
    from quicksilver.records.record import Record
    from quicksilver.records.stats import PairedInterval
    from quicksilver.runs.jobs import Job
    from quicksilver.runs.run import Planned, Progress


T = TypeVar("T")
SAYS_EVERY_S = 60.0  # in a log


def log(line: str) -> None:
    """A line of progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def width() -> int | None:
    """Columns of the terminal; None: the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def explain(failed: Sequence[Job], what: str = "Failed") -> None:
    """Why jobs failed, and the command that repeats the first of them alone; jobs with the same trouble share it."""
    troubles: dict[str, list[Job]] = {}
    for job in failed:
        troubles.setdefault(str(job.error) or repr(job.error), []).append(job)
    for trouble, jobs in troubles.items():
        print(f"\n{what}: {', '.join(job.name for job in jobs)}\n  {trouble}", file=sys.stderr)
        print(f"  To repeat it alone: quicksilver run {shlex.join(jobs[0].overrides)}", file=sys.stderr)


def show_fault(error: Exception) -> None:
    """The traceback of what is no QuickSilverError: a fault of ours or of a library, for which one line would not do. Of a person's own file,
    its line. And the line of a record that the tracker did not take, which no row of a table would say."""
    from quicksilver.runs.tracker import NotMirrored

    if isinstance(error, NotMirrored):
        say(str(error))
    elif (said := fault_of_own_file(error)) is not None and not isinstance(error, QuickSilverError):
        say(said)
    elif not isinstance(error, QuickSilverError):
        traceback.print_exception(error)


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Around imports of libraries that not everybody has."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "quicksilver":
            raise
        raise ConfigError(f"{what} needs {error.name}, which is not installed: {installing(extra)}.") from error


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Within, Python looks for no garbage. Imports and ten thousand records make half a million objects that all stay. Looking through them again and
    again takes a seventh of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr over all missing runs, nothing when nothing has to run; where stderr is no terminal, a line a minute."""
    from tqdm import tqdm

    from quicksilver.report.sweep_status import how_far

    bar: Any = None
    said = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal bar, said
        if not sys.stderr.isatty():
            if time.monotonic() - said >= SAYS_EVERY_S:
                said = time.monotonic()
                log(f"{progress.label}: {how_far(vars(progress))}")
            return
        if bar is None:
            shape = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
            bar = tqdm(total=100.0, smoothing=0, file=sys.stderr, disable=None, leave=False, bar_format=shape)
        bar.set_description_str(f"run {progress.run + 1}/{progress.runs} {progress.label}", refresh=False)
        bar.set_postfix_str(progress.phase, refresh=False)
        bar.update(max(0.0, 100 * progress.fraction - bar.n))

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


@contextmanager
def watched(steps: Sequence[Planned]) -> Iterator[Callable[[Progress], None]]:
    """Say on stderr how much there is to do and how far it is: a bar with the time left on a terminal, else one line a run."""
    from quicksilver.runs.estimate import duration

    if missing := [step for step in steps if not step.done]:
        there, reused = len(steps) - len(missing), sum(step.reuses_quality for step in missing)
        line = f"This needs {len(steps)} run{'s' * (len(steps) != 1)}: {there} {'was' if there == 1 else 'were'} made before, "
        line += f"{len(missing)} must be made."
        if reused:
            takes = f"{reused} of these take{'s' * (reused == 1)} the repository's quality"
            line += f" {takes} after some windows are measured again; records=own measures all."
        log(line)
    announced, started = set[int](), time.monotonic()
    with progress_bar() as bar:

        def show(progress: Progress) -> None:
            bar(progress)
            if not sys.stderr.isatty() and progress.run not in announced:
                announced.add(progress.run)
                done, spent_s = progress.fraction, time.monotonic() - started
                left = f", about {duration(spent_s * (1 - done) / done)} left" if done > 0 else ""
                log(f"[{progress.run + 1}/{progress.runs}] {progress.label}{left}")

        yield show


def counted(steps: Collection[T], what: str) -> Iterable[T]:
    """The steps, under a bar on a terminal that is gone at the end."""
    from tqdm import tqdm

    return tqdm(steps, desc=what, file=sys.stderr, disable=None, leave=False, delay=0.5)


_SAID_APART = ("quality", "null_control", "latency", "flops")


def _found_in(record: Record) -> dict[str, Result]:
    """What measurements found, in the order of the config; not what no class at hand can read, nor what float products say of quantised ones."""
    from quicksilver.runs.parts import is_on, measurement_class

    found: dict[str, Result] = {}
    # Emissions are no part of an identity, so no record's config names them.
    for name, entry in {**record.config["measure"], "emissions": {"_target_": "quicksilver.measure.energy.Emissions"}}.items():
        if name not in _SAID_APART and is_on(name, entry):
            with suppress(ConfigError):
                made = measurement_class(name, entry)
                read = None if made.timed and record.simulated else made.result_class()
                if read is not None and (result := record.found(name, read)):
                    found[name] = result
    return found


def summary(record: Record) -> str:
    """What a person wants to know of one record; everything else is in its folder."""
    data, quality = record.data, record.quality
    per_byte = "" if quality.bits_per_byte is None else f", {quality.bits_per_byte:.4g} bits per byte"
    lines = [
        f"{record.label}  ({record.execution}, {record.model.dtype}{', LOOKS AHEAD' if record.lookahead else ''})",
        f"  text         {data.windows} windows of {record.protocol.window_tokens} tokens, {quality.tokens} scored, {data.shown_form}",
        f"  perplexity   {quality.ppl:.4g} per token{per_byte}",
    ]
    if (confirmed := record.confirmed) is not None and confirmed.agrees and not record.is_kept:
        windows = f"{confirmed.windows} of {confirmed.of} windows were scored again here"
        lines.append(f"  confirmed    quality is the repository's: {windows}. All here: records=own")
    if record.dense is not None:
        lines += _against_dense(record)
    results, care = _found_in(record), list[str]()
    lines += [f"  {name:<12} {line}" for name, found in results.items() if (line := found.line())]
    if getattr(results.get("audit"), "leaks", False) and not record.lookahead:
        what = "looks ahead, or decides by something else than the tokens: later tokens moved earlier logits."
        also = " Set its `causal = False`, and measure it under protocol=continuation."
        also = "" if record.protocol.name == "continuation" else also
        care.append(f"{'+'.join(record.config['modules'])} {what}{also}")
    saved_pct, kl = record.flops_saved_pct("nominal"), quality.kl_nats
    charged_pct = record.flops_saved_pct("paper") or 0.0  # fewer bits are charged less by the paper's formula alone
    if record.dense is not None and quality.ppl == record.dense.ppl and saved_pct == 0:
        care.append("nothing was decided: perplexity and operations are exactly those of dense inference.")
    elif saved_pct is not None and 0 <= saved_pct < 0.5 and charged_pct < 0.5 and kl is not None and kl < 0.001:
        care.append("hardly anything was decided: nearly the result of dense inference. Sweep the option that decides.")
    lines += [f"  care         {said}" for said in (*care, *record.timing_warnings)]
    kept = f"{record.fingerprint}, one of the repository's in {record.path.parent}"
    lines.append(f"  record       {kept if record.is_kept else record.path}")
    return "\n".join(lines)


def _against_dense(record: Record) -> list[str]:
    from quicksilver.measure.latency import LatencyResult
    from quicksilver.measure.quality import NullResult

    lines = [_difference("against dense", "", record)]
    if record.found("null", NullResult) is not None:
        lines += [_difference("its null", "null_", record), *_versus_null(record)]
    modules, prompt = record.config["modules"], record.protocol.name == "continuation"
    both = (("FLOPs saved", "prompt_", " of the prompt"), ("", "", " of all tokens"))
    for title, phase, of in both if prompt else (("FLOPs saved", "", ""),):
        ledgers = {name: record.flops_saved_pct(f"{phase}{name}") for name in ("executed", "nominal", "paper")}
        lines.append(f"  {title:<12} {', '.join(f'{name} {pct:.1f}%' for name, pct in ledgers.items() if pct is not None)}{of}")
    if record.acts_on_scored:
        kept = {"causal": "false", "protect_last": "1"}  # of a method of the user's, and of the paper's halting
        keys = (f"modules.{name}.{key}={kept[key]}" for name, one in modules.items() for key in kept if key in one)
        remedy = f" {key} keeps it in the prompt" if (key := next(keys, "")) else ""
        lines.append(f"  acts on      prompt and scored tokens: perplexity pays for both.{remedy}")
    elif record.acts_on_scored is not None and record.flops_saved_pct("prompt_paper"):
        lines.append("  acts on      the prompt only")
    saved_pct = record.flops_saved_pct("prompt_executed") if prompt else None
    name, entry = next(iter(modules.items()), ("", None))
    asked = entry.get("save") if isinstance(entry, Mapping) and len(modules) == 1 else None
    if isinstance(asked, float) and saved_pct is not None and 100 * asked - saved_pct > 2:
        those = f"those of {record.protocol.prompt_tokens} tokens save {saved_pct:.1f}%"
        lines.append(f"  care         modules.{name}.save={asked:g} was chosen for other prompts: {those}")
    if (latency := record.found("latency", LatencyResult)) is not None:
        around = record.environment
        said = "simulated: no time, because quantised products are computed in float" if record.simulated else latency.line()
        where = f"{around.gpu or around.cpu}, {around.threads} thread{'s' * (around.threads != 1)}"
        lines += [f"  latency      {said}", f"  {'':<12} on {where}"]
    return lines


def _difference(name: str, column: str, record: Record) -> str:
    """Perplexity against dense, and how far the distributions lie apart; column: what its columns begin with."""
    from quicksilver.records.stats import MIN_WINDOWS, paired_perplexity

    frame = record.windows
    tokens, kl = frame["tokens"], f"{column}kl_nats"
    far = f", KL {(frame[kl] * tokens).sum() / tokens.sum():.3g} nats a token" if kl in frame else ""
    if len(frame) < MIN_WINDOWS:
        return f"  {name:<12} no interval from {len(frame)} windows (at least {MIN_WINDOWS}: dataset.windows){far}"
    return f"  {name:<12} {_interval(paired_perplexity(frame[f'{column}nll_nats'], tokens, frame['dense_nll_nats']))}{far}"


def _interval(paired: PairedInterval) -> str:
    from quicksilver.report.table import signed

    shown = (signed(pct, 2) for pct in (paired.relative_pct, paired.relative_pct_low, paired.relative_pct_high))
    return "{}% perplexity [{}, {}]".format(*shown)


def _versus_null(record: Record) -> Iterator[str]:
    """Whether the choice of tokens was better than chance, by perplexity and by KL; nothing where there are too few windows."""
    from quicksilver.records.stats import MIN_WINDOWS

    frame = record.windows
    if len(frame) >= MIN_WINDOWS and (frame["nll_nats"] == frame["null_nll_nats"]).all():
        yield "  to its null  equal: both chose the same tokens, so this null tells nothing"
    elif len(frame) >= MIN_WINDOWS:
        yield from _versus("to its null", record, record, "null_")


def _versus(name: str, record: Record, other: Record, column: str = "") -> Iterator[str]:
    """Perplexity and KL of a record against another's on the same windows; column: what the other's columns begin with."""
    from quicksilver.records.stats import bootstrap, mean, paired_records, pairs_of, sign_flip_p
    from quicksilver.report.table import FALSE_DISCOVERIES

    def said(low: float, high: float, differences: Any) -> str:
        if low * high <= 0:
            return "no difference beyond chance"
        if (p := sign_flip_p(differences)) > FALSE_DISCOVERIES:  # both, as in the tables
            return f"no difference beyond chance (p = {100 * p:.1f}%)"
        return f"{'better' if high < 0 else 'worse'} (p = {100 * p:.2g}%, not corrected for other tests)"

    nll, _, other_nll, _ = pairs_of(record, other, "nll_nats", f"{column}nll_nats")
    paired = paired_records(record, other, baseline_column=f"{column}nll_nats")
    judged = said(paired.relative_pct_low, paired.relative_pct_high, nll - other_nll)
    yield f"  {name:<12} {_interval(paired)}: {judged}"
    if "kl_nats" in record.windows and f"{column}kl_nats" in other.windows:
        ours, _, theirs, _ = pairs_of(record, other, "kl_nats", f"{column}kl_nats")
        kl = bootstrap(mean, ours - theirs)
        yield f"  {'':<12} {kl.value:+.3g} KL [{kl.low:+.3g}, {kl.high:+.3g}]: {said(kl.low, kl.high, ours - theirs)}"


def beside(record: Record, other: Record) -> str:
    """A record against another one of the same text and protocol, window by window.
    Raises ConfigError: they scored different text, or fewer than 8 windows."""
    from quicksilver.measure.latency import LatencyResult

    def saved(ledger: Ledger) -> str:
        return " against ".join(f"{one.flops_saved_pct(ledger) or 0.0:.1f}%" for one in (record, other))

    prompt = f"{saved('prompt_executed')} of the prompt, " if record.protocol.name == "continuation" else ""
    lines = [f"{record.label}  {record.fingerprint}", f"against {other.label}  {other.fingerprint}, on the same windows"]
    if record.modules == other.modules and record.identity.sources != other.identity.sources:
        lines.append("  care         the code of your module differs between them")
    lines += _versus("quality", record, other)
    lines.append(f"  FLOPs saved  {prompt}{saved('executed')} of all tokens (executed)")
    times = [found.line().split("\n")[0] for one in (record, other) if (found := one.found("latency", LatencyResult))]
    if len(times) == 2:
        lines += [f"  time         {times[0]}, beside its own dense run", f"  {'':<12} {times[1]}, beside its own"]
    return "\n".join(lines)
