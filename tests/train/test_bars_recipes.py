"""The recipes of the BARS leaderboards on files laid out as theirs, from CSV to scores."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from bars_files import HEADERS, write_criteo, write_drawn

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.model import spec_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.schemas.reading import builtin
from dlrm_hybrid.model.spec import DataShape
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

ROWS = 20_000
EXPERIMENTS = list(HEADERS)
NARROW = {
    "bars_criteo_x1": ("model.bottom=[null,64,10]", "model.top=[64,1]"),
    "bars_criteo_x4": ("model.cross.deep=[64,32]",),
    "bars_avazu_x1": ("model.top=[64,1]",),
}
# Parameters, those of tables too, that FuxiCTR counts.
COUNTED = {"bars_criteo_x1": 21_664_241, "bars_criteo_x4": 20_382_577, "bars_avazu_x1": 13_402_391}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_models_have_as_many_parameters_as_those_of_fuxictr(experiment: str) -> None:
    config = validate(values_of([f"+experiment={experiment}"]))
    columns = len(builtin(experiment).categorical)
    spec, every = spec_of(config.model, DataShape(table_rows=(9,) * columns)), COUNTED[experiment]
    dense = sum(shape[0] * (shape[1:] or (1,))[0] for shape in spec.dense_shapes().values())
    idle = sum(spec.normed_layers.values())  # biases before batch norm, which has its own
    rows = (
        every - dense - idle
    ) / spec.embedding_dim  # of the tables: a number of categories, so whole
    assert rows == {"bars_criteo_x1": 2_086_303, "bars_criteo_x4": 910_747}.get(
        experiment, 1_298_599
    )


def trained(experiment: str, files: Path, folder: Path, *options: str) -> dict[str, Any]:
    """The summary of a run that evaluates every epoch, until patience ends it."""
    given = (f"+experiment={experiment}", f"data.raw={files}/*.csv", *options)
    rows = (f"data.prepared={folder / 'rows'}", f"hydra.run.dir={folder / 'run'}")
    assert run(["dlrm_hybrid", "train", *given, *rows, "telemetry.tensorboard=false"]) == 0
    return json.loads((folder / "run" / "summary.json").read_text())


def every(steps: int, batch: int) -> tuple[str, ...]:
    due = (f"train.evaluate_every={steps}", f"telemetry.every={steps}")
    return (*due, f"train.batch_size={batch}")


def check(folder: Path, summary: dict[str, Any], auc: float) -> None:
    """It has learnt, has lowered its rates, has ended by itself, and has scored the right parts."""
    found = list(events.read(folder / "run" / "events.jsonl"))
    progress = [one.values for one in found if one.kind is Kind.PROGRESS]
    assert progress[-1]["loss"] < progress[0]["loss"] - 0.01
    falls = math.log10(progress[0]["lr"] / progress[-1]["lr"])
    assert falls == pytest.approx(round(falls)) and falls > 0.5
    parts = [one.values["part"] for one in found if one.kind is Kind.EVALUATED]
    assert parts[-1] == "test" and set(parts[:-1]) == {"validation"} and len(parts) > 4
    assert summary["status"] == "complete" and summary["steps"] < summary["steps_planned"]
    assert summary["validation"]["auc"] > auc and summary["test"]["auc"] > auc
    assert run(["dlrm_hybrid", "evaluate", f"evaluate.checkpoint={folder / 'run'}"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_small_files_are_learnt_from(experiment: str, tmp_path: Path) -> None:
    write_drawn(tmp_path, experiment, ROWS)
    summary = trained(experiment, tmp_path, tmp_path, *NARROW[experiment], *every(55, 256))
    check(tmp_path, summary, 0.6)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_recipes_own_widths_learn(experiment: str, tmp_path: Path) -> None:
    write_drawn(tmp_path, experiment, 2 * ROWS)
    check(tmp_path, trained(experiment, tmp_path, tmp_path, *every(55, 512)), 0.6)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["bars_criteo_x1", "bars_criteo_x4"])
def test_criteos_rows_in_their_layout(experiment: str, criteo_rows: Path, tmp_path: Path) -> None:
    write_criteo(tmp_path, experiment, criteo_rows)
    summary = trained(experiment, tmp_path, tmp_path, *NARROW[experiment], *every(130, 512))
    check(tmp_path, summary, 0.7)
