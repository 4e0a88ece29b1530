"""The text of `--help`, of the program and of each verb, for a terminal of 80 columns."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from dlrm_hybrid import __version__
from dlrm_hybrid.config.identity import flat, is_below
from dlrm_hybrid.config.keys import (
    CONF,
    EXPERIMENT,
    Key,
    all_groups,
    all_keys,
    default_choices,
    head_of,
    line_of,
    summary,
)

PROGRAM = "python -m dlrm_hybrid"
WIDTH = 80
DOC_COLUMN = 32
VERBS = {
    "prepare": "turn Criteo text, CSV or Parquet into shards",
    "train": "train a model, or sweep over values of keys (-m)",
    "evaluate": "score a checkpoint on the test part",
    "predict": "score new rows with a checkpoint: Criteo text, CSV, Parquet",
    "export": "write a checkpoint's model as pt2, ONNX or safetensors",
    "import": "make a checkpoint of weights of facebook DLRM or TorchRec",
    "report": "compare runs: tables and plots in one HTML file",
    "watch": "show a run as a page that is made again while it goes on",
    "plan": "predict speed, bytes and memory of worlds before training them",
    "doctor": "check this machine and report problems; make key files",
}
TRAIN_READS = (
    *("name", "precision", "device", "tf32", "threads", "skip_completed", "conf", "train"),
    *("prepare.overwrite", "data", "model", "optimizer"),
    *("embedding", "parallel", "schedule", "sync", "gradient", "activation", "pull", "network"),
    *("evaluate.batch_size", "checkpoint", "telemetry"),
)
EXPORTS = ("output", "format", "names", "int8", "check_rows")  # of each file of `data.follow`
# Sections, or single keys of others, that each verb reads.
READS: Mapping[str, tuple[str, ...]] = {
    "prepare": ("prepare", "data"),
    "train": (*TRAIN_READS, "sweep", *(f"export.{key}" for key in EXPORTS)),
    "evaluate": (
        *("evaluate", "activation.evaluate_masked", "data", "device", "embedding.device", "tf32"),
        "threads",
    ),
    "predict": ("predict", "threads", "evaluate.batch_size", "data.prepared", "data.block_bytes"),
    "export": ("export", "data", "threads"),
    "import": (
        *("import", "precision", "threads", "train", "data", "model", "optimizer", "embedding"),
    ),
    "report": ("report",),
    "watch": ("watch",),
    "plan": ("plan", *TRAIN_READS),
    "doctor": ("doctor", "data"),
}
# These verbs accept the unchanged command line of a run. `evaluate` compares all of it with its
# checkpoint's, and refuses the rest.
TAKE_A_RUN = ("prepare", "train", "evaluate", "plan", "doctor")
TAKE_A_MODEL = ("evaluate", "predict", "export")
FOLDERS = {
    "train": (
        ("hydra.run.dir=FOLDER", "the run's folder; default runs/<name>/<stamp>-<id>"),
        ("hydra.sweep.dir=FOLDER", "the sweep's folder (-m); default runs/sweep/<stamp>-<id>"),
    )
}
FLAGS = (
    ("-h, --help", "show this help, for the choices made by the overrides given"),
    ("--cfg job", "print the configuration and exit"),
    ("--package KEY, --resolve", "with --cfg: print only this section; resolve interpolations"),
    ("--version", "print the version"),
)
SWEEP_FLAG = ("-m, --multirun", "run every combination of values: key=a,b or key=range(0,5)")
EXAMPLES = {
    "prepare": (
        "prepare data=criteo_kaggle data.raw=train.txt",
        "prepare data=criteo_kaggle data.raw=[day_0.gz,day_1.gz]",
    ),
    "train": (
        "train train.steps=1000",
        "train data=criteo_kaggle train.seed=1",
        "train +experiment=dct_hybrid gradient.density=0.001",
        "train -m +experiment=baseline,dct_hybrid train.seed=1,2",
        "train -m sweep.jobs=2 gradient=dct,topk train.seed=1,2",
        "train hydra.run.dir=runs/mine checkpoint.resume=auto",
        "train data=table data.schema=a.yaml data.follow=FOLDER",
        "train conf=FOLDER +experiment=NAME",
        "train gradient=dct --help",
    ),
    "evaluate": (
        "evaluate evaluate.checkpoint=runs/mine",
        "evaluate evaluate.checkpoint=runs/mine/checkpoints/best",
    ),
    "predict": (
        "predict predict.checkpoint=runs/mine predict.rows=a.txt",
        "predict predict.rows=[a.csv,b.csv] predict.keep=[id] -h",
    ),
    "export": (
        "export export.checkpoint=runs/mine export.output=served",
        "export export.format=safetensors --help",
    ),
    "import": (
        "import import.file=dlrm.pt import.output=runs/theirs",
        "import import.names=torchrec --help",
    ),
    "report": (
        "report report.runs=runs/mine",
        "report report.runs=[runs/a,runs/b] report.output=ab.html",
    ),
    "watch": ("watch watch.run=runs/mine", "watch watch.run=runs/mine watch.output=mine.html"),
    "plan": (
        "plan +experiment=dct_hybrid plan.trainers=[1,2,4]",
        "plan parallel=hybrid plan.rates=[100mbit,1gbit]",
        "plan parallel=hybrid plan.calibration=runs/mine",
        "plan plan.machines=[2,4] plan.rates=[100mbit,1gbit]",
    ),
    "doctor": ("doctor", "doctor doctor.action=keys doctor.output=keys.json"),
}


def usage() -> str:
    """The help of the program, with a list of its commands."""
    lines = [
        f"dlrm_hybrid {__version__}: hybrid-parallel DLRM training that counts every byte sent",
        "",
        f"usage: {PROGRAM} COMMAND [group=choice] [key=value] ...",
        "",
        *(_entry(verb, text, 12) for verb, text in VERBS.items()),
        "",
        "examples:",
        *(f"  {PROGRAM} {EXAMPLES[verb][0]}" for verb in VERBS),
        "",
        f"`{PROGRAM} COMMAND --help` lists the keys of a command. Shell completion:",
        f'  eval "$({PROGRAM} -sc install=bash)"',
    ]
    return "\n".join(lines) + "\n"


def help_text(
    verb: str,
    values: Mapping[str, Any],
    ignored: Sequence[str] = (),
    faults: Sequence[str] = (),
) -> str:
    """The help of a verb: groups, keys, flags, examples, and faults of the arguments."""
    flags = (SWEEP_FLAG, *FLAGS) if verb == "train" else FLAGS
    values = flat(values)
    blocks = [
        [f"dlrm_hybrid {verb}: {VERBS[verb]}"],
        [f"usage: {PROGRAM} {verb} [group=choice] [key=value] ..."],
        _groups(verb, values),
        *(_keys(verb, values)),
        [_entry(*entry) for entry in (*FOLDERS.get(verb, ()), *flags)],
        ["examples:", *(f"  {PROGRAM} {text}" for text in EXAMPLES[verb])],
        _listed("not applied:", ignored),
        _listed(f"`{verb}` would refuse, as it stands:", faults),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _listed(head: str, lines: Sequence[str]) -> list[str]:
    wrap = functools.partial(
        textwrap.wrap, width=WIDTH, initial_indent="  ", subsequent_indent="    "
    )
    wrapped = [part for line in lines for part in wrap(line, break_on_hyphens=False)]
    return [head, *wrapped] if wrapped else []


def keys_read(verb: str) -> list[Key]:
    """The keys that a verb reads, in the order of its help."""
    return [
        key for part in READS[verb] for name, key in all_keys().items() if is_below(name, (part,))
    ]


def groups_read(verb: str) -> list[str]:
    """The groups that a verb reads."""
    groups = [name for name in READS[verb] if name in all_groups()]
    return [*groups, *([EXPERIMENT] if verb in ("train", "plan") else [])]


def unread(verb: str, overrides: Sequence[str]) -> dict[str, str]:
    """Overrides of known keys that a verb does not read, with a message for each."""
    messages: dict[str, str] = {}
    for text in overrides:
        name = head_of(text)
        if name == "model" and ":" in text and verb in TAKE_A_MODEL:
            continue  # lets the model of a run be imported
        readers = [f"`{reader}`" for reader in VERBS if _reads(reader, name)]
        if readers and f"`{verb}`" not in readers:
            *rest, last = readers
            do = f"{', '.join(rest)} and {last} do" if rest else f"{last} does"
            messages[text] = f"{name}: `{verb}` does not read it; {do}"
    return messages


def _reads(verb: str, name: str) -> bool:
    """Whether a verb reads a key, any key of a section, or the choice of a group."""
    parts = (*READS[verb], *groups_read(verb), *(("hydra",) if verb == "train" else ()))
    return is_below(name, parts) or any(is_below(part, (name,)) for part in parts)


def _groups(verb: str, values: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for group in groups_read(verb):
        choices = all_groups()[group]
        if len(choices) > 1:
            head = f"{group}={_choice(group, values)}"
            if group == EXPERIMENT:
                head, choices = "+experiment=…", (*choices, *_own_experiments(values.get(CONF)))
            lines.append(_entry(head, " | ".join(choices)))
    return ["groups (each choice sets the keys of its section):", *lines] if lines else []


def _own_experiments(folder: str | None) -> Iterator[str]:
    if folder is not None:
        from dlrm_hybrid.config.experiments import (
            OwnExperiments,  # Hydra takes a tenth of a second
        )

        yield from OwnExperiments.in_folder(folder).files


def _keys(verb: str, values: Mapping[str, Any]) -> Iterator[list[str]]:
    shown: dict[str, list[str]] = {}
    for key in keys_read(verb):
        group, _, name = key.name.rpartition(".")
        group = group.partition(".")[0]
        is_choice = name == "name" and group in all_groups()
        if key.name not in values or is_choice:
            continue
        text = f"{line_of(key.name, _choice(group, values))} ({key.kind})"
        shown.setdefault(group, []).append(_entry(f"{key.name}={_text(values[key.name])}", text))
    for group, lines in shown.items():
        yield [*_title(group, values), *lines]


def _title(group: str, values: Mapping[str, Any]) -> list[str]:
    if group not in all_groups():
        return []
    choice = _choice(group, values)
    head = f"{group}={choice}: {summary(group, choice)}".removesuffix(": ")
    return textwrap.wrap(head, WIDTH, break_on_hyphens=False)


def _choice(group: str, values: Mapping[str, Any]) -> str:
    return str(values.get(f"{group}.name") or default_choices().get(group, ""))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_text, cast('list[Any]', value)))}]"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _entry(head: str, text: str, column: int = DOC_COLUMN) -> str:
    """Format a head with its text beside it, or below it if the head is long."""
    wrap = functools.partial(textwrap.wrap, width=WIDTH - column, break_on_hyphens=False)
    lines = wrap(text) or [""]
    first = f"  {head}"
    if len(first) < column:
        first, lines = f"{first:<{column}}{lines[0]}", lines[1:]
    return "\n".join([first, *(" " * column + line for line in lines)])
