"""Deltas: a model that changes while it scores, into the very model that was learned."""

import json
import shutil
import subprocess
import sys
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from drifting import Log, write
from patience import HANG_SECONDS
from torch import Tensor
from world_runs import summary

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.compress.activation.methods import Dct
from dlrm_hybrid.config.choices import Hybrid
from dlrm_hybrid.data.preprocessing import Vocabulary, read_kept
from dlrm_hybrid.data.schema import CategoricalColumn
from dlrm_hybrid.predict import Predictor
from dlrm_hybrid.run.assembly.build import shape_of
from dlrm_hybrid.saved.delta import (
    later_vocabulary,
    read_manifest,
    read_tensors,
    vocabulary_tensors,
    write_delta,
)
from dlrm_hybrid.saved.model import scoring
from dlrm_hybrid.types import DataError

DAYS, DIM = 3, 4


class Models:
    """Models of three days, each of which goes on from the one before, and rows to score."""

    def __init__(self, folder: Path, *options: str) -> None:
        log = Log(rows=1500, days=DAYS + 1, new=0.2)
        write(log, folder / "log")
        self.folder = folder
        self.log = folder / "log"
        given = ("data=table", "model=dlrm_small", "train.batch_size=64", "checkpoint.every=10")
        (folder / "inbox").mkdir()
        for day in range(1, DAYS + 1):
            (folder / f"inbox/day{day}.parquet").symlink_to(self.log / f"day{day}.parquet")
        given += (f"data.schema={self.log}/day1.yaml", f"data.follow={folder}/inbox")
        given += ("data.follow_idle_seconds=0", f"hydra.run.dir={folder}/run", *options)
        assert run(["dlrm_hybrid", "train", *given, "telemetry.tensorboard=false"]) == 0
        self.rows = pd.read_parquet(self.log / "day4.parquet").drop(columns="clicked")[:300]

    def of(self, day: int) -> Path:
        return self.folder / f"run/files/{day:06d}-day{day}"

    def delta(self, before: int, after: int) -> Path:
        out = self.folder / f"delta{before}{after}"
        if not out.exists():
            assert export(self.of(before), self.of(after), out) == 0
        return out

    def scores(self, day: int) -> bytes:
        return Predictor(self.of(day)).predict(self.rows).tobytes()


def export(since: Path, checkpoint: Path, out: Path, *options: str) -> int:
    given = (f"export.since={since}", f"export.checkpoint={checkpoint}", f"export.output={out}")
    return run(["dlrm_hybrid", "export", *given, *options])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), "checkpoint.keep=9")


def test_a_model_becomes_the_later_one_bit_for_bit(models: Models) -> None:
    predictor = Predictor(models.of(1))
    assert predictor.predict(models.rows).tobytes() == models.scores(1)
    for before, after in ((1, 2), (2, 3)):
        predictor.update(models.delta(before, after))
        assert predictor.predict(models.rows).tobytes() == models.scores(after)
        assert predictor.checkpoint.parent.parent == models.of(after)
    at_once = Predictor(models.of(1))
    at_once.update(models.delta(1, 3))
    assert at_once.predict(models.rows).tobytes() == models.scores(3)
    assert len({models.scores(day) for day in (1, 2, 3)}) == 3


def test_a_day_may_bring_no_categories(models: Models, tmp_path: Path) -> None:
    out, predictor = tmp_path / "delta", Predictor(models.of(1))
    same = sorted((models.of(1) / "checkpoints").glob("step_*"))
    before = Predictor(same[0])
    assert len(same) > 1
    assert export(same[0], same[-1], out) == 0
    before.update(out)
    assert before.predict(models.rows).tobytes() == predictor.predict(models.rows).tobytes()


def test_a_delta_has_the_rows_that_changed_and_little_more(
    models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    out = models.folder / "told"
    assert export(models.of(1), models.of(2), out) == 0
    told = capsys.readouterr().out
    appended = [one["appended"] for one in summary(models.of(2))["growth"].values()]
    assert f"rows changed, {sum(appended)} of them new" in told
    numbers = zip(*(read_kept(models.of(day)).vocabularies() for day in (1, 2)), strict=True)
    texts = sum(len(key.encode()) for a, b in numbers for key in b.keys[len(a.keys) :])
    changed = int(told.partition(" rows changed")[0].rpartition(": ")[2].split()[0])
    table_rows = sum(one["rows"] for one in summary(models.of(2))["growth"].values())
    assert sum(appended) < changed < table_rows
    useful = changed * (4 * DIM + 4) + texts + 4 * sum(appended)
    whole = models.folder / "whole"
    given = (f"export.checkpoint={models.of(2)}", f"export.output={whole}")
    assert run(["dlrm_hybrid", "export", *given, "export.format=safetensors"]) == 0
    dense = (whole / "model.safetensors").stat().st_size - table_rows * 4 * DIM  # with its header
    assert (out / "delta.safetensors").stat().st_size <= 1.2 * useful + dense + 1000


def test_requests_of_many_threads_are_of_one_model_each(models: Models) -> None:
    """A thousand of them while deltas come: none fails or mixes two versions."""
    deltas = [models.delta(1, 2), models.delta(2, 3)]
    rows = models.rows[:60]  # two batches
    day_of = {Predictor(models.of(day)).predict(rows).tobytes(): day for day in (1, 2, 3)}
    predictor = Predictor(models.of(1), batch_rows=37)

    def ask(number: int) -> int:
        if number in (300, 600):
            predictor.update(deltas[number // 300 - 1])
        return day_of[predictor.predict(rows).tobytes()]

    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(ask, range(1000))]
    assert set(Counter(found)) == {1, 2, 3}
    assert found[601:].count(1) == 0


@pytest.mark.parametrize(
    "options",
    [
        ("parallel=hybrid", "parallel.trainers=2", "parallel.cuts=[]", "parallel.world=in_process"),
        ("precision=bfloat16",),
    ],
    ids=["rounded rows", "bfloat16"],
)
def test_what_is_rounded_is_rounded_in_deltas(options: tuple[str, ...], tmp_path: Path) -> None:
    more = ("embedding.comm_precision=float16",) if "parallel=hybrid" in options else ()
    models = Models(tmp_path, *options, *more, "checkpoint.keep=9", "data.follow_files=2")
    predictor = Predictor(models.of(1))
    predictor.update(models.delta(1, 2))
    assert predictor.predict(models.rows).tobytes() == models.scores(2)


NO_SERVERS = {"servers": 0, "table_servers": 0}
TWO = {"parallel": Hybrid(trainers=2, cuts=(), **NO_SERVERS)}
CUT = {"parallel": Hybrid(trainers=1, cuts=("top.1",), **NO_SERVERS)}
MASKED = {**CUT, "activation": Dct()}


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [
        ({}, {**TWO, "model": {"dropout": 0.5, "bottom_dropout": 0.1}}, True),
        ({}, {**TWO, "embedding": {"deduplicate": True}}, True),
        ({}, {"embedding": {"comm_precision": "float16"}}, True),
        ({}, {**CUT, "activation": Dct(evaluate_masked=False)}, True),
        (MASKED, {**MASKED, "activation": Dct(allow_rice=False)}, True),
        ({}, {**TWO, "embedding": {"comm_precision": "float16"}}, False),
        ({}, MASKED, False),
        (MASKED, {**MASKED, "activation": Dct(sparsity=0.5)}, False),
    ],
)
def test_models_score_alike_where_nothing_is_masked_or_rounded(
    models: Models, one: dict[str, Any], other: dict[str, Any], are_alike: bool
) -> None:
    def of(changes: dict[str, Any]) -> tuple[object, ...]:
        sections = {
            name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
            for name, value in changes.items()
        }
        return scoring(replace(config, **sections), spec)

    config = Predictor(models.of(1)).config
    spec = shape_of(config, read_kept(models.of(1)).manifest)
    assert (of(one) == of(other)) is are_alike


def test_a_run_may_go_on_in_another_world(models: Models, tmp_path: Path) -> None:
    """Two trainers send rows as they are, so the delta from one trainer's model is as any other."""
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox/day2.parquet").symlink_to(models.log / "day2.parquet")
    given = ("data=table", f"data.schema={models.log}/day1.yaml", f"data.follow={tmp_path}/inbox")
    given += ("data.follow_idle_seconds=0", "model=dlrm_small", "train.batch_size=64")
    given += ("parallel=hybrid", "parallel.trainers=2", "parallel.cuts=[]", "model.dropout=0.2")
    given += ("parallel.world=in_process", "telemetry.tensorboard=false")
    given += (f"checkpoint.resume={models.of(1)}", f"hydra.run.dir={tmp_path}/run")
    assert run(["dlrm_hybrid", "train", *given]) == 0
    assert export(models.of(1), tmp_path / "run", tmp_path / "delta") == 0
    predictor = Predictor(models.of(1))
    predictor.update(tmp_path / "delta")
    expected = Predictor(tmp_path / "run").predict(models.rows).tobytes()
    assert predictor.predict(models.rows).tobytes() == expected != models.scores(1)


@pytest.mark.parametrize("kind", ["string", "integer"])
def test_categories_may_take_places_of_others(kind: str) -> None:
    """As `evict` gives rows to others."""
    column = CategoricalColumn(name="one", kind=kind)  # type: ignore[arg-type]
    keys = [["a", "b", "", "dé"], ["a", "x", "", "y", "new"]]
    if kind == "integer":
        keys = [[5, 3, -9, 8], [5, 1, -9, 2, 7]]
    before, after = (Vocabulary(column, one, first_id=1) for one in keys)
    taken_K, more = after.since(before)
    assert (taken_K.tolist(), len(more)) == ([1, 3], 3)
    made = later_vocabulary(vocabulary_tensors(1, before, after), 1, before)
    assert [*made.keys] == [*after.keys]
    same = later_vocabulary(vocabulary_tensors(1, before, before), 1, before)
    assert same is before
    tensors = vocabulary_tensors(1, before, after)
    tensors["vocabulary.1.taken"] += 9
    with pytest.raises(ValueError, match="no places"):
        later_vocabulary(tensors, 1, before)


def test_a_delta_is_refused_by_any_other_model(models: Models) -> None:
    predictor = Predictor(models.of(1))
    with pytest.raises(DataError, match=r"changes the model of .*000002-day2.* apply deltas in"):
        predictor.update(models.delta(2, 3))
    predictor.update(models.delta(1, 2))
    with pytest.raises(DataError, match="this is that of .*000002-day2"):
        predictor.update(models.delta(1, 2))
    assert predictor.predict(models.rows).tobytes() == models.scores(2)


def test_a_damaged_delta_changes_nothing(models: Models, tmp_path: Path) -> None:
    predictor = Predictor(models.of(1))

    def damaged(file: str, *, cut: bool = False) -> Path:
        folder = tmp_path / f"{file}{cut}"
        shutil.copytree(models.delta(1, 2), folder)
        content = bytearray((folder / file).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / file).write_bytes(content[: len(content) // 3] if cut else content)
        return folder

    for cut in (False, True):
        for file, reason in (
            ("delta.json", "not a delta|changed since"),
            ("delta.safetensors", "checksum"),
        ):
            with pytest.raises(DataError, match=reason):
                predictor.update(damaged(file, cut=cut))
    with pytest.raises(DataError, match=r"no delta here \(no delta.json\)"):
        predictor.update(tmp_path)
    assert predictor.predict(models.rows).tobytes() == models.scores(1)


@pytest.mark.parametrize(
    ("name", "forged", "reason"),
    [
        (
            "vocabulary.1.taken",
            torch.empty(0, dtype=torch.bfloat16),
            "wanted a list of",
        ),
        (
            "vocabulary.1.lengths",
            torch.ones(2, 2, dtype=torch.int32),
            "wanted a list of",
        ),
        ("embedding.1.rows", torch.tensor(0, dtype=torch.int32), ""),
        ("top.1.bias", torch.tensor([torch.nan], dtype=torch.float64), "float64 .*float32"),
    ],
)
def test_a_forged_delta_changes_nothing(
    models: Models, tmp_path: Path, name: str, forged: Tensor, reason: str
) -> None:
    """One whose checksums are right, but whose tensors are not as `export` writes them."""
    good = models.delta(1, 2)
    manifest = read_manifest(good)
    tensors = read_tensors(good, manifest)
    assert name in tensors
    sides = (manifest.base, manifest.model, manifest.base_rows, manifest.table_rows)
    write_delta(tmp_path, {**tensors, name: forged}, *sides)
    predictor = Predictor(models.of(1))
    with pytest.raises(DataError, match=f"{tmp_path}: is damaged: .*{reason}"):
        predictor.update(tmp_path)
    assert predictor.predict(models.rows).tobytes() == models.scores(1)


def test_what_does_not_go_on_has_no_delta(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*arguments: Path | str, code: int) -> str:
        capsys.readouterr()
        paths, options = arguments[:2], [str(one) for one in arguments[2:]]
        assert export(*map(Path, paths), tmp_path / "out", *options) == code
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    fault = told(models.of(2), models.of(1), code=3)
    assert "does not go on from it; export the whole model" in fault
    assert "ids of 'user' are of other categories" in fault
    assert "no checkpoint found" in told("nowhere", models.of(1), code=3)
    assert "export.int8 = true: a delta" in told(
        models.of(1), models.of(2), "export.int8=true", code=2
    )


def test_the_example_of_a_server_takes_deltas_as_they_come(models: Models, tmp_path: Path) -> None:
    rows = json.dumps(models.rows.to_dict(orient="records")).encode()
    program = Path(__file__).parents[2] / "scripts/examples/serve_run.py"
    command = [sys.executable, str(program), str(models.of(1)), "0", str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()

        def ask() -> bytes:
            with urllib.request.urlopen(url, rows, timeout=HANG_SECONDS) as answer:
                return np.array(json.load(answer), np.float32).tobytes()

        assert ask() == models.scores(1)
        for before, after, told in (
            (1, 2, "now of "),
            (1, 2, "this is that of "),
            (2, 3, "now of "),
        ):
            shutil.copytree(models.delta(before, after), tmp_path / ".copy")
            (tmp_path / ".copy").rename(tmp_path / f"{len(list(tmp_path.iterdir()))}")
            assert f"{told}{models.of(after)}" in server.stdout.readline()
            assert ask() == models.scores(after)
    finally:
        server.kill()
        server.communicate()
