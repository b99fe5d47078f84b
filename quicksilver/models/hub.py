"""The way to the hub: asked first and briefly whether it is there, and whatever goes wrong at it is one line with the remedy."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from quicksilver.runtime.errors import ConfigError

ANSWER_WITHIN_S = 7.0  # includes name resolution, which has time limits of its own and cannot be interrupted
PATIENCE_S = 15.0  # with a hub whose every answer fails
_PAUSE_S = 20.0  # without a complaint: something came through in between
_may_fetch = ContextVar("may_fetch", default=True)


@contextmanager
def nothing_fetched() -> Iterator[None]:
    """Within, `fetching` refuses: what is not on this machine is not there."""
    token = _may_fetch.set(False)
    try:
        yield
    finally:
        _may_fetch.reset(token)


@contextmanager
def fetching(what: str, repo: str, kind: Literal["model", "dataset"], offline: Sequence[str]) -> Iterator[None]:
    """Ask whether the hub knows `repo`; the block may fetch it then. `what` is how the config names it, `offline` the choices of
    a person without a network. Raises ConfigError: no answer within seconds, HF_HUB_OFFLINE, an unknown or gated repository, or
    anything that happens in the block."""
    if not _may_fetch.get():
        raise ConfigError(f"{what}: {repo} is not on this machine, and this command fetches nothing.")
    from huggingface_hub import HfApi, constants

    where = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    try:
        _ask(HfApi(), repo, kind)
        with _patience():
            yield
    except ConfigError:
        raise
    except Exception as error:  # of three libraries, and of what lies below them
        raise ConfigError(f"{what}: {_reason(error, where)} Without a network: {'; '.join(offline)}.") from error


def _ask(api: Any, repo: str, kind: str) -> None:
    """Return when the hub knows `repo`; raises what the client raises."""
    answer: dict[str, Any] = {"error": TimeoutError(f"no answer within {ANSWER_WITHIN_S:g} s")}

    def ask() -> None:
        try:
            api.repo_info(repo, repo_type=kind, timeout=ANSWER_WITHIN_S - 2)
            answer["error"] = None
        except Exception as error:
            answer["error"] = error

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_WITHIN_S)
    if answer["error"] is not None:
        raise answer["error"]


def _reason(error: BaseException, where: str) -> str:
    """What went wrong, and what to do. The clients wrap what the hub said: the first known error in the chain is it."""
    from huggingface_hub import errors

    link: BaseException | None = error
    while link is not None:
        if isinstance(link, errors.OfflineModeIsEnabled):
            return "it is not whole on this machine, and HF_HUB_OFFLINE is set."
        if isinstance(link, errors.GatedRepoError) or "is a gated dataset" in str(link):  # the second cuts the chain
            return f"{where} is gated. Accept its licence there and set HF_TOKEN."
        if isinstance(link, errors.RepositoryNotFoundError):
            return f"{where} does not exist, or is private and HF_TOKEN does not open it."
        if isinstance(link, errors.RevisionNotFoundError):
            return f"{where} has no such revision. Leave it out, or name another."
        if isinstance(link, errors.HfHubHTTPError):
            status = link.response.status_code
            remedy = "Set HF_TOKEN to a token that may read it." if status in (401, 403) else "Try again later."
            return f"{where} answers with status {status}. {remedy}"
        link = link.__cause__ or link.__context__
    said = " ".join(str(error).split()).rstrip(".")
    return f"{where} cannot be read ({type(error).__name__}: {said}). Try again: nothing that came in part is kept."


class _Patience(logging.Handler):
    """Takes the complaints of the hub's clients, which they print at every retry, and gives up when they have gone on for too long."""

    first, last, said = 0.0, -_PAUSE_S, ""

    def handle(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self.last >= _PAUSE_S:
            self.first, self.said = now, record.getMessage()
        self.last = now
        if now - self.first > PATIENCE_S:
            raise TimeoutError(f"{self.said}, for {PATIENCE_S:g} s")
        return False


@contextmanager
def _patience() -> Iterator[None]:
    """Within, the hub's clients say nothing by themselves, and do not try for minutes."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    before, patience = [(logger.handlers, logger.propagate) for logger in loggers], _Patience()
    try:
        for logger in loggers:
            logger.handlers, logger.propagate = [patience], False
        yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
