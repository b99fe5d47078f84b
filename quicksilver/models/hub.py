"""Is the hub there? Asked once, briefly: a person without a network must not wait for retries to learn what to do instead."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal

from quicksilver.runtime.errors import ConfigError

ANSWER_WITHIN_S = 7.0  # includes name resolution, which has time limits of its own and cannot be interrupted


def require_hub(what: str, repo: str, kind: Literal["model", "dataset"], offline: Sequence[str]) -> None:
    """Return when the hub knows `repo` and lets us read it.

    Args:
        what: how the config names it, for the message.
        offline: the choices of a person without a network.

    Raises:
        ConfigError: no answer within seconds, HF_HUB_OFFLINE, an unknown or gated repository.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    answer: dict[str, Any] = {}

    def ask() -> None:
        try:
            answer["info"] = HfApi().repo_info(repo, repo_type=kind, timeout=ANSWER_WITHIN_S - 2)
        except Exception as error:
            answer["error"] = error

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_WITHIN_S)
    error = answer.get("error", TimeoutError(f"no answer within {ANSWER_WITHIN_S:g} s") if "info" not in answer else None)
    if error is None:
        return
    where = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    choices = f"Without a network: {'; '.join(offline)}."
    if isinstance(error, OfflineModeIsEnabled):
        reason = f"it is not on this machine and HF_HUB_OFFLINE is set. {choices}"
    elif isinstance(error, GatedRepoError):
        reason = f"{where} is gated. Accept its licence there and set HF_TOKEN. {choices}"
    elif isinstance(error, RepositoryNotFoundError):
        reason = f"{where} does not exist, or is private and HF_TOKEN does not open it. {choices}"
    elif isinstance(error, HfHubHTTPError):
        reason = f"{where} answers: {str(error).splitlines()[0]}. {choices}"
    else:
        reason = f"{where} cannot be reached ({type(error).__name__}: {error}). {choices}"
    raise ConfigError(f"{what}: {reason}") from error
