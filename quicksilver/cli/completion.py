"""What may stand where the cursor is: commands, a command's own keys, and the keys and choices of a run, which Hydra knows."""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.cli.main import COMMANDS, commands, load

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


def candidates(line: str) -> list[str]:
    """Words that may end `line`, the command line up to the cursor; none where nothing is known."""
    words = line.split()
    word = "" if not words or line.endswith(" ") else words.pop()
    return [one for one in _all_of(words[1:], word) if one.startswith(word)]


def _all_of(given: Sequence[str], word: str) -> list[str]:
    """Whatever may follow `given`, the words after `quicksilver`."""
    if not given or given == ["dev"]:
        return commands("dev " if given else "")
    depth = 2 if given[0] == "dev" else 1
    name, rest = " ".join(given[:depth]), given[depth:]
    if name not in COMMANDS:
        return []
    command = load(name)
    if names := command.next_names(rest):
        return names
    of_run = _of_run([one for one in rest if "=" in one], word) if command.takes == "run" or name == "run" else []
    return sorted({*(f"{own}=" for own in command.own_keys()), *of_run})


def _of_run(overrides: Sequence[str], word: str) -> list[str]:
    """Hydra's own completion of an override, with what was given before it."""
    from hydra.errors import HydraException
    from hydra.plugins.completion_plugin import DefaultCompletionPlugin
    from omegaconf.errors import OmegaConfBaseException

    from quicksilver.runs.choices import choices
    from quicksilver.runs.composing import hydra_started

    key, equals, value = word.partition("=")
    if key == "modules" and equals:  # a list: its last name is completed, which Hydra does not
        chosen = value.lstrip("[").split(",")[:-1]
        return [f"modules=[{','.join([*chosen, name])}" for name in choices("modules") if name not in chosen]
    with hydra_started() as hydra:
        try:
            return DefaultCompletionPlugin(hydra.config_loader)._query("run", " ".join([*overrides, word]))
        except (HydraException, OmegaConfBaseException):
            return []
