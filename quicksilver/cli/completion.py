"""What may stand where the cursor is: commands, a command's own keys, and the keys and choices of a run, which Hydra knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from quicksilver.cli.main import commands, load

# The shell hands the line up to the cursor to `quicksilver dev completion words LINE`, which answers one candidate a line.
_BASH = """_quicksilver() {
    local line="${COMP_LINE:0:COMP_POINT}"
    local word="${line##* }"
    local IFS=$'\\n'
    COMPREPLY=($(quicksilver dev completion words "$line" 2>/dev/null))
    # Readline replaces what follows the last = or : alone.
    local kept="${word%"${word##*[=:]}"}"
    COMPREPLY=("${COMPREPLY[@]#"$kept"}")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
}
complete -o nosort -F _quicksilver quicksilver"""
_ZSH = """_quicksilver() {
    local -a found
    found=("${(@f)$(quicksilver dev completion words "$LBUFFER" 2>/dev/null)}")
    compadd -Q -S '' -- $found
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _quicksilver quicksilver"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH}

# Commands that take no key of a run.
_NO_RUN = ("demo", "dev", "doctor", "list", "lm_eval")


def candidates(line: str) -> list[str]:
    """Words that may end `line`, the command line up to the cursor, sorted; none where nothing is known."""
    words = line.split()
    word = "" if not words or line.endswith(" ") else words.pop()
    given = words[1:]  # after `quicksilver`
    if not given:
        return [name for name in commands() if name.startswith(word)]
    name, *rest = given
    if name not in commands():
        return []
    return [one for one in _of_command(name, rest, word) if one.startswith(word)]


def _of_command(name: str, rest: Sequence[str], word: str) -> list[str]:
    if not rest and name in ("reproduce", "list", "dev"):
        module = load(name)
        return ["table", "figure", "all"] if name == "reproduce" else [*(module.KINDS if name == "list" else module.COMMANDS)]
    if name == "reproduce" and len(rest) == 1 and rest[0] in ("table", "figure"):
        from quicksilver.report.artefacts import artefacts

        return [number for artefact in artefacts() if artefact.kind == rest[0] for number in artefact.numbers]
    options = getattr(load(name), "Keys", None)
    own = [f"{field.name}=" for field in dataclasses.fields(options)] if options is not None else []
    of_run = [] if name in _NO_RUN else _of_run([one for one in rest if "=" in one], word)
    return sorted({*own, *of_run})


def _of_run(overrides: Sequence[str], word: str) -> list[str]:
    """Hydra's own completion of an override, with what was given before it."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.plugins.completion_plugin import DefaultCompletionPlugin
    from omegaconf.errors import OmegaConfBaseException

    import quicksilver.runs.parts  # noqa: F401  (Hydra reads module options through it)
    from quicksilver.runs.choices import config_dir

    key, equals, value = word.partition("=")
    if key == "modules" and equals:
        # A list: its last name is completed, which Hydra does not.
        from quicksilver.runs.choices import choices

        chosen = value.lstrip("[").split(",")[:-1]
        return [f"modules=[{','.join([*chosen, name])}" for name in choices("modules") if name not in chosen]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        plugin = DefaultCompletionPlugin(GlobalHydra.instance().config_loader())
        try:
            return plugin._query("run", " ".join([*overrides, word]))
        except (HydraException, OmegaConfBaseException):
            return []
