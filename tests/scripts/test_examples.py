"""The examples do what the documentation says of them."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import HANG_SECONDS

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.profile import builtin
from dlrm_hybrid.data.synthetic import generate

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "scripts" / "examples"
PAGE = REPOSITORY / "docs" / "tutorial.md"
NAMES = ("label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27)))


def printed(*command: object, folder: Path | None = None) -> str:
    """What a program prints that ends well."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_hundredth_of_the_bytes_trains_as_well() -> None:
    methods = ("NoCompression", "TopK", "CltK", "TernGrad")
    options = ("--steps", "150", "--seeds", "1", "--methods", *methods)
    lines = printed(EXAMPLES / "ddp.py", *options).splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in lines]
    losses = {name: float(mean) for name, mean, *_ in rows}
    sent = {name: int(count.replace(",", "")) for name, _, _, count, _ in rows}
    assert tuple(losses) == methods
    for name, least in (("TopK", 50), ("CltK", 50), ("TernGrad", 10)):
        assert losses[name] < 1.25 * losses["NoCompression"]
        assert sent[name] * least < sent["NoCompression"]


@pytest.mark.slow
def test_the_tutorial_prints_what_its_page_says(tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8")
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    numbers = r"loss ([\d.]+)\n *([\d,]+) bytes a step, float32 takes ([\d,]+)"
    page = re.search(numbers, text)
    assert program is not None and page is not None
    (tmp_path / "tutorial.py").write_text(program[1], "utf-8")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    told = re.search(numbers, printed(*torchrun, "tutorial.py", folder=tmp_path))
    assert told is not None
    (loss, sent, dense), (page_loss, page_sent, page_dense) = (
        [float(number.replace(",", "")) for number in one.groups()] for one in (told, page)
    )
    assert loss == pytest.approx(page_loss, rel=0.2)  # processors add up differently
    assert sent == pytest.approx(page_sent, rel=0.05)
    assert dense == page_dense > 100 * sent


@pytest.mark.slow
def test_a_study_goes_on_where_it_ended(small_rows: list[str], tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the example needs pip install optuna")
    given = (*small_rows, "parallel.world=in_process", "train.steps=16", "train.evaluate_every=8")
    for count in (2, 1):
        told = printed(EXAMPLES / "tune.py", tmp_path / "study", count, *given)
        assert "best: log-loss 0." in told
    folders = {path.name for path in (tmp_path / "study").iterdir() if path.is_dir()}
    assert folders == {"0", "1", "2"}


def row_of(line: str) -> dict[str, Any]:
    """A raw row as a client sends it."""
    fields = dict(zip(NAMES, line.split("\t"), strict=True))
    return {
        name: int(text) if text and name.startswith("I") else text or None
        for name, text in fields.items()
        if name != "label"
    }


@pytest.mark.slow
def test_requests_get_the_scores_of_the_checkpoint(small_rows: list[str], tmp_path: Path) -> None:
    raw, folder, scores = tmp_path / "raw.txt", tmp_path / "run", tmp_path / "scores.csv"
    assert (
        run(["dlrm_hybrid", "train", *small_rows, "train.steps=40", f"hydra.run.dir={folder}"]) == 0
    )
    given = [f"export.checkpoint={folder}", f"export.output={tmp_path / 'out'}"]
    assert run(["dlrm_hybrid", "export", *given, "export.format=onnx"]) == 0
    generate(raw, 1000, 0, builtin("criteo_kaggle"), lambda done: None)
    asked = [f"predict.checkpoint={folder}", f"predict.rows={raw}", f"predict.output={scores}"]
    assert run(["dlrm_hybrid", "predict", *asked]) == 0
    expected = np.loadtxt(scores, skiprows=1, delimiter=",", ndmin=2)[:, -1]
    rows = [row_of(line) for line in raw.read_text().splitlines()]
    command = [sys.executable, str(EXAMPLES / "serve.py"), str(tmp_path / "out"), "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        ask = lambda asked: json.load(urllib.request.urlopen(address, json.dumps(asked).encode()))  # noqa: E731
        single = [ask([row])[0] for row in rows[:100]]
        together = ask(rows)
    finally:
        server.terminate()
        server.wait()
    assert expected.std() > 0.001
    np.testing.assert_allclose(single, expected[:100], rtol=0, atol=1e-5)
    np.testing.assert_allclose(together, expected, rtol=0, atol=1e-5)
