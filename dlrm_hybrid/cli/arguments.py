"""Parses the arguments after the verb, and suggests what was meant by unknown ones."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from dlrm_hybrid.config.keys import (
    EXPERIMENT,
    all_groups,
    all_keys,
    did_you_mean,
    near_choices,
    near_keys,
)
from dlrm_hybrid.run.request import Arguments

HELP = ("-h", "--help")
VERSION = "--version"
CFG = ("--cfg", "-c")
PACKAGE = ("--package", "-p")
SWEEP = ("-m", "--multirun")
COMPLETION = ("-sc", "--shell-completion")
SWITCHES = {
    **dict.fromkeys(HELP, "wants_help"),
    **dict.fromkeys(SWEEP, "is_sweep"),
    "--resolve": "resolve",
}
SECTIONS = ("job", "hydra", "all")
FLAGS = (*HELP, VERSION, *SWEEP, *CFG, "--resolve", *PACKAGE, *COMPLETION)
# Flags of Hydra that do not apply to this program.
HYDRAS = (
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    *("--experimental-rerun", "--info", "-i", "--hydra-help", "--run", "-r"),
)
# For a word that sets nothing: what to put before it, and the key that it is most likely for.
POSITIONAL = {
    "prepare": ("data=criteo_kaggle ", "data.raw"),
    "train": ("", "checkpoint.resume"),
    "evaluate": ("", "evaluate.checkpoint"),
    "predict": ("", "predict.rows"),
    "export": ("", "export.checkpoint"),
    "import": ("", "import.file"),
    "report": ("", "report.runs"),
    "watch": ("", "watch.run"),
    "plan": ("", "plan.calibration"),
    "doctor": ("", "doctor.action"),
}


def parse(verb: str, arguments: Sequence[str]) -> Arguments:
    """Parse the arguments after a verb; faults are collected in the result."""
    args = Arguments()
    words: list[str] = []
    rest = list(arguments)
    while rest:
        text = rest.pop(0)
        if text.encode(errors="ignore").decode() != text:
            args.faults.append(f"{text}: is not UTF-8")
        elif text.startswith("-"):
            _take_flag(args, verb, text, rest)
        elif (fault := _own_key(verb, text)) is not None:
            args.faults.append(fault)
        elif "=" in text or text.startswith("~"):
            args.overrides.append(text)
        else:
            words.append(text)
    args.faults += _unknown_words(verb, words)
    if args.cfg is None and (args.resolve or args.package is not None):
        args.faults.append("--resolve, --package: only apply with --cfg job")
    if args.cfg is not None and args.is_sweep:
        args.faults.append("--cfg: cannot be combined with -m")
    return args


def _take_flag(args: Arguments, verb: str, text: str, rest: list[str]) -> None:
    """Note a flag in `args`, and take its value from `rest` if it has one."""
    flag, sign, value = text.partition("=")
    if text in SWITCHES:
        setattr(args, SWITCHES[text], True)
    elif flag in CFG:
        args.cfg = value if sign else rest.pop(0) if rest and rest[0] in SECTIONS else "job"
        if args.cfg not in SECTIONS:
            args.faults.append(f"{text}: must be one of {', '.join(SECTIONS)}")
    elif flag in PACKAGE:
        args.package = value if sign else rest.pop(0) if rest else ""
    else:
        if not sign and rest and not rest[0].startswith("-") and "=" not in rest[0]:
            value = rest.pop(0)  # probably meant as the flag's value
        args.faults.append(_unknown_flag(verb, flag, value))


def _unknown_flag(verb: str, flag: str, value: str) -> str:
    """The fault of an unknown flag, with the key that it was probably meant for."""
    if flag in HYDRAS:
        return f"{flag}: this flag of Hydra's is not supported; configure with key=value"
    name = flag.lstrip("-").replace("-", "_")
    exact = (name, f"{verb}.{name}")
    keys = [key for key in exact if key in all_keys() or key in all_groups()] or near_keys(name)
    if keys:
        meant = did_you_mean(_set(key, value) for key in keys)
        return f"{flag}: keys are set without dashes{meant}"
    return f"{flag}: unknown flag; choose from {', '.join(FLAGS)}"


def _own_key(verb: str, text: str) -> str | None:
    """The fault of a key of the verb's own section that lacks the section; None if it is none."""
    key, sign, value = text.partition("=")
    own = f"{verb}.{key}"
    if not sign or own not in all_keys() or key in all_keys() or value.startswith("{"):
        return None
    return f"{key}: is a key of {verb}{did_you_mean([_set(own, value)])}"


def _set(key: str, value: str) -> str:
    """The override that sets a key to a value, quoted where Hydra or the shell needs it."""
    from dlrm_hybrid.config.overrides import override_fault, override_text

    if not value:
        return f"{key}=…"
    typed = f"{key}={value}"
    return shlex.quote(override_text(key, value) if override_fault(typed) else typed)


def _near_choices(word: str) -> list[str]:
    """Overrides for choices of groups that are so like a word that it is probably no path."""
    names = {name for choices in all_groups().values() for name in choices}
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.8)
    return [
        override
        for group, choices in all_groups().items()
        for name in near
        if name in choices
        for override in near_choices(group, word, [name])
    ]


def _unknown_words(verb: str, words: Sequence[str]) -> Iterator[str]:
    """Faults of words that set nothing, with what was probably meant."""
    loose: list[str] = []
    rest = iter(words)
    for word in rest:
        groups = [group for group, choices in all_groups().items() if word in choices]
        signs = {group: "+" if group == EXPERIMENT else "" for group in groups}
        meant = [f"{sign}{group}={word}" for group, sign in signs.items()]
        if word in all_keys():
            meant = [_set(word, next(rest, ""))]
        if not meant and not Path(word).exists():
            meant = _near_choices(word)
        if meant:
            yield f"{word}: is not key=value{did_you_mean(meant)}"
        else:
            loose.append(word)
    if loose:
        from dlrm_hybrid.config.overrides import override_text  # Hydra takes a tenth of a second

        before, key = POSITIONAL[verb]
        is_one, takes_list = len(loose) == 1, "[" in all_keys()[key].kind
        value = loose if takes_list and not is_one else loose[0]
        meant = before + shlex.quote(override_text(key, value))
        limit = "" if is_one or takes_list else f" ({key} takes one value)"
        are = "is" if is_one else "are"
        yield f"{' '.join(loose)}: {are} not key=value; did you mean {meant}?{limit}"
