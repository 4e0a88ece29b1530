"""The example of a server gives the scores of the checkpoint."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.loader import sequential_batches
from dlrm_hybrid.data.profile import builtin
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.data.synthetic import generate

SERVER = Path(__file__).parent.parent.parent / "scripts" / "examples" / "serve.py"
REQUESTS, ROWS = 1000, 1000
NAMES = ("label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27)))


def row_of(line: str) -> dict[str, Any]:
    """A raw row as a client sends it."""
    fields = dict(zip(NAMES, line.split("\t"), strict=True))
    return {
        name: int(text) if text and name.startswith("I") else text or None
        for name, text in fields.items()
        if name != "label"
    }


@pytest.mark.slow
def test_a_thousand_requests_get_the_scores_of_the_checkpoint(
    small_rows: list[str], tmp_path: Path
) -> None:
    folder = f"hydra.run.dir={tmp_path / 'run'}"
    assert run(["dlrm_hybrid", "train", *small_rows, "train.steps=40", folder]) == 0
    given = [f"export.checkpoint={tmp_path / 'run'}", f"export.output={tmp_path / 'out'}"]
    assert run(["dlrm_hybrid", "export", *given, "export.format=onnx"]) == 0
    generate(tmp_path / "raw.txt", ROWS, 0, builtin("criteo_kaggle"), lambda done: None)
    rows = [row_of(line) for line in (tmp_path / "raw.txt").read_text().splitlines()]

    from dlrm_hybrid.checkpoint.folder import find, read_facts
    from dlrm_hybrid.config.validate import saved_values, validate
    from dlrm_hybrid.model.layers.products import Precision
    from dlrm_hybrid.saved.model import SavedModel

    shards = open_shards(Path(small_rows[1].partition("=")[2]), None)
    checkpoint = find(tmp_path / "run")
    config = validate(saved_values(read_facts(checkpoint)["config"]))
    model = SavedModel.load(config, checkpoint, shards.table_rows, Precision.FLOAT32)
    (batch,) = sequential_batches(shards, range(ROWS), ROWS)
    expected = model.score(batch)[1]

    argv = [sys.executable, str(SERVER), str(tmp_path / "out"), "0"]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        found = [
            score
            for at in range(REQUESTS)
            for score in json.load(urllib.request.urlopen(address, json.dumps([rows[at]]).encode()))
        ]
        together = json.load(urllib.request.urlopen(address, json.dumps(rows).encode()))
    finally:
        server.terminate()
        server.wait()
    assert expected.std() > 0.001
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(together, expected, rtol=0, atol=1e-5)


def test_the_example_is_short() -> None:
    assert len(SERVER.read_text().splitlines()) <= 40
