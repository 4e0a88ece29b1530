"""Attacks by command-line arguments: none may run code, hang or end in a traceback."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from .base import Attack, expect, program

CANARY = "canary"
EVIL = """\
# @package _global_
hydra:
  callbacks:
    x: {_target_: os.mkdir, path: canary}
  job_logging:
    version: 1
    root: {handlers: [x]}
    handlers: {x: {class: logging.FileHandler, filename: canary}}
"""
PLUGIN = "from pathlib import Path\nPath('canary').touch()\n"
ENVIRONMENT = {
    "HYDRA_FULL_ERROR": "1",
    "HYDRA_MAIN_MODULE": "evil",
    "HYDRA_INSTANTIATE_ALLOWLIST_OVERRIDE": "*",
}
# Name, command, what the message says.
REFUSED = (
    ("unknown-key", "train optimizer.lrr=0.1", "optimizer.lr=0.1?"),
    ("hydra-callback", "train +hydra.callbacks.x._target_=os.mkdir", "Hydra's own keys"),
    ("hydra-package", "train +data@_global_.hydra.callbacks.x=synthetic", "Hydra's own keys"),
    ("hydra-launcher", "train data@hydra.launcher=synthetic", "Hydra's own keys"),
    ("hydra-searchpath", "train hydra.searchpath=[file://{here}]", "Hydra's own keys"),
    ("foreign-group", "train +experiment=../../../../../../../..{here}/evil", "no such choice"),
    ("foreign-group-list", "train +experiment=[../../../../../../../..{here}/evil]", "no such"),
    ("foreign-group-sweep", "train -m +experiment=baseline,../../..{here}/evil", "no such choice"),
    ("foreign-folder", "train --config-dir {here}", "not supported"),
    ("foreign-name", "train -cn evil", "not supported"),
    ("foreign-pickle", "train --experimental-rerun {here}/evil.pickle", "not supported"),
    ("sweeper-params", "train -m hydra.sweeper.params={{a:b}}", "hydra.sweeper.params"),
    ("info", "train --info", "not supported"),
    ("resolve-alone", "train --resolve", "--cfg job"),
    ("package-alone", "train --package", "--cfg job"),
    ("package-unknown", "train --cfg job --package nope", "no such section"),
    ("sweep-endless", "train -m train.seed=range(0,1000000000000)", "10,000"),
    ("sweep-shuffled", "train -m train.seed=shuffle(range(0,1000000000000))", "10,000"),
    ("value-flag", "train --steps 100", "train.steps=100?"),
    ("verb-with-path", "evaluate runs/mine", "evaluate.checkpoint=runs/mine?"),
    ("rate-of-no-float32", "train optimizer.lr=1e308", "optimizer.lr = 1e+308: must be a number"),
    (
        "epsilon-of-no-float32",
        "train optimizer=adam optimizer.eps=1e-320",
        "optimizer.eps = 1e-320",
    ),
    ("list-as-sweep", "report report.runs=a,b", "report.runs=[a,b]"),
)
ODD = (
    ("nested-lists", f"model.bottom={'[' * 5_000}{']' * 5_000}"),
    ("nested-dicts", f"model={'{a:' * 3_000}1{'}' * 3_000}"),
    ("huge-integer", f"train.seed={'9' * 100_000}"),
    ("control-characters", "name=\x1b[2J\x07"),
    ("no-utf8", os.fsdecode(b"name=caf\xe9")),
    ("no-utf8-key", os.fsdecode(b"\xff\xfe=1")),
    ("interpolates-itself", "name=${name}"),
    ("equals-only", "="),
)


def _refused(command: str, told: str, folder: Path) -> str:
    _trap(folder)
    arguments = [word.format(here=folder) for word in command.split()]
    ended = program(arguments, folder, ENVIRONMENT)
    expect(ended.code == 2, f"exit code {ended.code}: {ended.errors[-300:]}")
    expect(told in ended.errors, ended.errors)
    expect(not (folder / CANARY).exists(), "the canary is there: foreign code has run")
    return ended.errors.strip().splitlines()[-1].strip()


def _odd(override: str, folder: Path) -> str:
    ended = program(["train", override], folder)
    expect(ended.code == 2, f"exit code {ended.code}: {ended.errors[-300:]}")
    lines = ended.errors.splitlines()
    expect(len(lines) == 2 and all(map(str.isprintable, lines)), f"{lines}")
    return lines[1].strip()[:80]


def _plugin(folder: Path) -> str:
    _trap(folder)
    ended = program(["train", "--cfg", "job"], folder, ENVIRONMENT)
    expect(ended.code == 0, ended.errors)
    expect(not (folder / CANARY).exists(), "the canary is there: a plugin has been imported")
    return "not imported"


def _line_of_a_script(folder: Path) -> str:
    name = f"data.prepared='{folder}/x\n#SBATCH --wrap=y'"
    ended = program(["train", "-m", "sweep.submit=slurm", name], folder)
    expect(ended.code == 2, f"exit code {ended.code}: {ended.errors[-300:]}")
    expect("has a control character" in ended.errors, ended.errors)
    return ended.errors.strip().splitlines()[-1].strip()


def _trap(folder: Path) -> None:
    (folder / "evil.yaml").write_text(EVIL)
    (folder / "hydra_plugins").mkdir()
    (folder / "hydra_plugins" / "evil.py").write_text(PLUGIN)


ATTACKS = (
    *(Attack(name, "exit 2, one line", partial(_refused, *case)) for name, *case in REFUSED),
    *(Attack(name, "exit 2, one printable line", partial(_odd, text)) for name, text in ODD),
    Attack("line-of-a-script", "exit 2, no job", _line_of_a_script),
    Attack("hydra-plugin", "no module of the working folder is imported", _plugin),
)
