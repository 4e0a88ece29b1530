"""Completing yields commands, keys and choices, in bash itself for both ways of calling."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_SECONDS

from dlrm_hybrid.cli.completion import words
from dlrm_hybrid.cli.main import run

ROOT = Path(__file__).parent.parent.parent


DATA = ("criteo_1tb", "criteo_1tb_multi_hot", "criteo_kaggle", "synthetic", "table")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dlrm_hybrid tr", ["train"]),
        ("dlrm_hybrid train dat", ["data.", "data="]),
        ("dlrm_hybrid train data=", [f"data={one}" for one in DATA]),
        ("dlrm_hybrid train data=syn", ["data=synthetic"]),
        ("dlrm_hybrid train +experiment=dct_h", ["+experiment=dct_hybrid"]),
        ("dlrm_hybrid train x=1 train.s", ["train.seed=", "train.steps="]),
        ("dlrm_hybrid train gradient.ga", ["gradient.gamma="]),
        ("dlrm_hybrid train data.shuffle=", ["data.shuffle=false", "data.shuffle=true"]),
        ("dlrm_hybrid train --mu", ["--multirun"]),
        ("dlrm_hybrid train hydra.run.", ["hydra.run.dir="]),
        ("dlrm_hybrid report ", ["report."]),
        ("dlrm_hybrid report train.", []),
        ("/usr/bin/python3 -m dlrm_hybrid doctor doctor.a", ["doctor.action="]),
        ("dlrm_hybrid train train.seed=", []),
        ("dlrm_hybrid nope x", []),
    ],
)
def test_words(line: str, expected: list[str]) -> None:
    assert words(line) == expected


@pytest.mark.parametrize(
    "program", ["dlrm_hybrid", pytest.param("python -m dlrm_hybrid", marks=pytest.mark.slow)]
)
def test_bash_completes(program: str, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    for name, arguments in (("dlrm_hybrid", "-m dlrm_hybrid "), ("python", "")):
        command = tmp_path / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments}"$@"\n')
        command.chmod(0o755)
    function = "_dlrm_hybrid_module" if " " in program else "_dlrm_hybrid_command"
    line = f"{program} train optimizer.schedule="
    script = f"""
        eval "$({program} -sc install=bash)"
        complete -p {program.partition(" ")[0]}
        COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=({line})
        {function} 2>/dev/null
        echo "${{COMPREPLY[@]}}"
    """
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [bash, "-c", script],
        env={**os.environ, **path},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert function in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[-1] == "constant linear plateau warmup_decay"


def test_the_shells_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dlrm_hybrid", "-sc", "install=zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload -Uz compinit bashcompinit")
    assert run(["dlrm_hybrid", "-sc", "install=fish"]) == 2
    assert "-sc install=bash or -sc install=zsh" in capsys.readouterr().err
