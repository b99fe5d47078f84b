"""Print the script that lets a shell complete commands, keys and choices.

eval "$(quicksilver completion bash)"     in ~/.bashrc
eval "$(quicksilver completion zsh)"      in ~/.zshrc
"""

from __future__ import annotations

from collections.abc import Sequence

from quicksilver.runtime.errors import ConfigError

# The shell hands the line up to the cursor to `quicksilver completion words LINE`, which answers one candidate a line.
BASH = """_quicksilver() {
    local line="${COMP_LINE:0:COMP_POINT}"
    local word="${line##* }"
    local IFS=$'\\n'
    COMPREPLY=($(quicksilver completion words "$line" 2>/dev/null))
    # Readline replaces what follows the last = or : alone.
    local kept="${word%"${word##*[=:]}"}"
    COMPREPLY=("${COMPREPLY[@]#"$kept"}")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
}
complete -o nosort -F _quicksilver quicksilver"""
ZSH = """_quicksilver() {
    local -a found
    found=("${(@f)$(quicksilver completion words "$LBUFFER" 2>/dev/null)}")
    compadd -Q -S '' -- $found
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _quicksilver quicksilver"""


def main(words: Sequence[str]) -> int:
    """Print the script of a shell, or the candidates of a line; returns the exit code.

    Raises:
        ConfigError: another shell.
    """
    scripts = {"bash": BASH, "zsh": ZSH}
    if len(words) == 2 and words[0] == "words":
        from quicksilver.cli.completion import candidates

        print("\n".join(candidates(words[1])))
        return 0
    if len(words) != 1 or words[0] not in scripts:
        raise ConfigError(f"{' '.join(words) or 'nothing'}: say for which shell: quicksilver completion bash, or zsh.")
    print(scripts[words[0]])
    return 0
