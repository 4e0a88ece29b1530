"""Shell completion: the script that a shell evaluates, and the words that it asks for.

eval "$(dlrm_hybrid -sc install=bash)"              also python -m dlrm_hybrid -sc install=bash
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from dlrm_hybrid.cli.arguments import COMPLETION, FLAGS, HELP, SWEEP, VERSION
from dlrm_hybrid.cli.help import VERBS, groups_read, keys_read
from dlrm_hybrid.config.keys import CONF, EXPERIMENT, all_groups
from dlrm_hybrid.types import ConfigError

LINE, POINT = "COMP_LINE", "COMP_POINT"
SHELLS = ("bash", "zsh")
FOLDER_KEYS = ("hydra.run.dir", "hydra.sweep.dir")
# Bash replaces only what follows the last word break, such as =.
SCRIPT = """\
_dlrm_hybrid() {
    local line="${COMP_LINE:0:COMP_POINT}" word prefix
    word="${line##* }"
    prefix="${word%"${word##*[=:]}"}"
    local IFS=$'\\n'
    COMPREPLY=($(COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" "$@" -sc query 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} != *[=.] ]] && compopt +o nospace
}
_dlrm_hybrid_command() { _dlrm_hybrid "${COMP_WORDS[0]}"; }
_dlrm_hybrid_module() {
    if [[ ${COMP_WORDS[1]} == -m && ${COMP_WORDS[2]} == dlrm_hybrid ]]; then
        _dlrm_hybrid "${COMP_WORDS[0]}" -m dlrm_hybrid
    elif [[ -n $_dlrm_hybrid_before ]]; then
        "$_dlrm_hybrid_before" "$@"
    fi
}
_dlrm_hybrid_before=$(complete -p python 2>/dev/null | sed -n 's/.*-F \\([^ ]*\\).*/\\1/p')
[[ $_dlrm_hybrid_before == _dlrm_hybrid_module ]] && _dlrm_hybrid_before=
complete -o default -o nospace -F _dlrm_hybrid_command dlrm_hybrid
complete -o default -o nospace -F _dlrm_hybrid_module python python3
"""
ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"


def answer(arguments: Sequence[str]) -> str:
    """The output of `-sc install=SHELL` or `-sc query`; raises ConfigError for other arguments."""
    if list(arguments) == ["query"]:
        line = os.environ.get(LINE, "")
        point = os.environ.get(POINT, "")
        return "".join(
            f"{word}\n" for word in words(line[: int(point)] if point.isdigit() else line)
        )
    if list(arguments) in ([f"install={shell}"] for shell in SHELLS):
        return (ZSH if arguments[0].endswith("zsh") else "") + SCRIPT
    raise ConfigError(f"-sc: use -sc install={' or -sc install='.join(SHELLS)}")


def words(line: str) -> list[str]:
    """Completions of the last word of a command line, given up to the cursor."""
    typed = line.split()
    last = "" if not typed or line[-1].isspace() else typed.pop()
    # `dlrm_hybrid …` or `python -m dlrm_hybrid …`
    typed = typed[3 if typed[1:2] == ["-m"] else 1 :]
    if not typed:
        choices = [*VERBS, *HELP, VERSION, COMPLETION[0]]
    elif typed[0] not in VERBS:
        choices = []
    else:
        choices = _arguments(typed[0], typed[1:], last)
    return sorted(word for word in choices if word.startswith(last))


def _arguments(verb: str, typed: Sequence[str], last: str) -> list[str]:
    """Overrides and flags of a verb; keys are completed by one level at a time."""
    if last.startswith("-"):
        hidden = () if verb == "train" else SWEEP
        return [flag for flag in FLAGS if flag not in hidden]
    head, sign, _ = last.partition("=")
    if sign:
        return [f"{head}={value}" for value in _values(verb, typed, head)]
    groups = [
        f"+{name}=" if name == EXPERIMENT else f"{name}="
        for name in groups_read(verb)
        if len(all_groups()[name]) > 1
    ]
    names = [*(key.name for key in keys_read(verb)), *(FOLDER_KEYS if verb == "train" else ())]
    depth = last.count(".") + 1
    keys = [
        ".".join(name.split(".")[:depth]) + ("." if name.count(".") >= depth else "=")
        for name in names
        if not (name.endswith(".name") and name.partition(".")[0] in all_groups())
    ]
    return list(dict.fromkeys([*groups, *keys]))


def _values(verb: str, typed: Sequence[str], head: str) -> list[str]:
    group = head.lstrip("+")
    if group in groups_read(verb):
        return [*all_groups()[group], *(_own_experiments(typed) if group == EXPERIMENT else ())]
    keys = [key for key in keys_read(verb) if key.name == group]
    return list(keys[0].choices) if keys else []


def _own_experiments(typed: Sequence[str]) -> Iterable[str]:
    if not any(text.startswith(f"{CONF}=") for text in typed):
        return ()
    from dlrm_hybrid.config.experiments import OwnExperiments  # Hydra takes a tenth of a second

    return OwnExperiments.of(typed).files
