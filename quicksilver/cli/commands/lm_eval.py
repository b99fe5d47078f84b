"""lm-evaluation-harness with models under runtime modules: its own command line, with the model `quicksilver`.

quicksilver lm_eval --model_args pretrained=reference-gpt2,modules=halting_attention --tasks lambada_openai
quicksilver lm_eval --model_args pretrained=gpt2,modules=halting_attention,modules.halting.halted_share=0.3 --tasks boolq --batch_size 8

Everything after the command is lm-eval's own (`quicksilver lm_eval run --help`); without --model, it is quicksilver. docs/lm-eval.md says
what --model_args takes. Needs pip install 'quicksilver[lm-eval]'.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quicksilver.runtime.errors import ConfigError

OWN_HELP = True  # lm-eval's, of each of its commands
_MODEL = ("--model", "-M")


def main(words: Sequence[str]) -> int:
    """Hand `words` to lm-eval; returns the exit code.

    Raises:
        ConfigError: lm-eval is not installed, or what the model refuses.
    """
    if [*words] in (["-h"], ["--help"], []):
        print(__doc__)
        return 0 if words else 2
    try:
        import quicksilver.lm_eval  # noqa: F401  registers the model
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("quicksilver"):
            raise
        raise ConfigError(f"lm_eval needs {error.name}, which is not installed: pip install 'quicksilver[lm-eval]'.") from error
    from lm_eval.__main__ import cli_evaluate

    asked = [*words]
    if asked and asked[0] not in ("ls", "validate") and not any(word.split("=")[0] in _MODEL for word in asked):
        asked += ["--model", "quicksilver"]
    before = sys.argv
    sys.argv = ["lm_eval", *asked]
    try:
        cli_evaluate()
    except SystemExit as stop:  # argparse's
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
    finally:
        sys.argv = before
    return 0
