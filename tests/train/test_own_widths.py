"""Columns whose tables have widths of their own, from the schema to scores of other programs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from drifting import Log, write
from outside_model import DeepFm
from world_runs import assert_same, summary, tensors

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.export.names import names_of
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.predict import Predictor
from dlrm_hybrid.types import ConfigError
from dlrm_hybrid.world.world import World

DIMS, STEPS = [8, 6, 4, 4], 20  # of user, item, shop and city; dlrm_small has 4
OWN = f"model={DeepFm.__module__}:{DeepFm.__qualname__}"


class Learned:
    """Three days of rows with a schema, and runs on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write(Log(rows=1500, days=3, new=0.2), folder)
        schema = (folder / "day1.yaml").read_text().partition("split:")[0]
        schema += "split: {by: fraction, test: 0.2}\n"
        (folder / "plain.yaml").write_text(schema)
        assert schema.count("name: user,") == schema.count("name: item,") == 1
        schema = schema.replace("name: user,", "name: user, embedding_dim: 8,")
        schema = schema.replace("name: item,", "name: item, embedding_dim: 6,")
        schema = schema.replace("name: shop", "name: shop, embedding_dim: 4")  # as the model's
        (folder / "mine.yaml").write_text(schema)
        self.first = self.train("first", 1, f"data.schema={folder}/mine.yaml")
        self.second = self.train("second", 2, f"checkpoint.resume={self.first}")

    def train(self, name: str, day: int, *options: str) -> Path:
        given = ("data=table", "model=dlrm_small", "model.bottom=[3,8,4]", "train.batch_size=64")
        given += (
            f"train.steps={STEPS}",
            "train.epochs=2",
            "optimizer.lr=0.3",
            "telemetry.tensorboard=false",
        )
        given += (
            f"data.raw={self.folder}/day{day}.parquet",
            f"data.prepared={self.folder}/{name}-rows",
        )
        given += (f"hydra.run.dir={self.folder}/{name}",)
        assert run(["dlrm_hybrid", "train", *given, *options]) == 0
        return self.folder / name

    @property
    def rows(self) -> pd.DataFrame:
        return pd.read_parquet(self.folder / "day3.parquet").drop(columns="clicked")[:300]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    return Learned(tmp_path_factory.mktemp("days"))


def test_a_table_is_as_wide_as_its_column_says(learned: Learned) -> None:
    found = tensors(learned.first, STEPS)
    assert [found[f"embedding.{n}.weight"].shape[1] for n in (1, 2, 3, 4)] == DIMS
    projected = {name: one.shape for name, one in found.items() if "project" in name}
    assert projected == {
        "interaction.project.1.weight": (4, 8),
        "interaction.project.2.weight": (4, 6),
    }
    assert json.loads((learned.first / "config.json").read_text())["model"]["table_dims"] == DIMS


def test_the_next_day_keeps_the_widths_without_the_schema(learned: Learned) -> None:
    before, after = (tensors(one, STEPS) for one in (learned.first, learned.second))
    assert summary(learned.second)["growth"]["item"]["appended"] > 5
    for name, tensor in before.items():
        assert after[name].shape[1:] == tensor.shape[1:], name
        assert not np.array_equal(after[name][: len(tensor)], tensor), name


def test_named_in_the_configuration_they_are_the_same(learned: Learned) -> None:
    plain = learned.folder / "plain.yaml"
    dims = f"model.table_dims={DIMS}".replace(" ", "")
    again = learned.train("again", 1, f"data.schema={plain}", dims)
    assert_same(again, learned.first, STEPS)


@pytest.mark.parametrize("format", [pytest.param("pt2", marks=pytest.mark.slow), "safetensors"])
def test_other_programs_and_other_checkpoints_score_the_same(
    format: str, learned: Learned, tmp_path: Path
) -> None:
    out, scores = tmp_path / "out", tmp_path / "scores.json"
    given = (f"export.checkpoint={learned.first}", f"export.output={out}")
    assert run(["dlrm_hybrid", "export", *given, f"export.format={format}"]) == 0
    described = json.loads((out / "model.json").read_text())
    assert described["model"]["table_dims"] == DIMS
    assert described["check"]["rows_apart"] == 0
    wish = (f"evaluate.checkpoint={learned.first}", f"evaluate.output={scores}")
    assert run(["dlrm_hybrid", "evaluate", *wish]) == 0
    assert json.loads(scores.read_text())["log_loss"] == summary(learned.first)["test"]["loss"]
    if format == "pt2":
        return
    prepared = json.loads((learned.first / "config.json").read_text())["data"]["prepared"]
    given = ("data=table", f"data.prepared={prepared}", "model=dlrm_small", "model.bottom=[3,8,4]")
    given += (
        f"import.file={out}/model.safetensors",
        f"import.output={tmp_path / 'back'}",
        "import.names=ours",
    )
    assert run(["dlrm_hybrid", "import", *given]) == 0
    both = (Predictor(one).predict(learned.rows) for one in (tmp_path / "back", learned.first))
    assert np.array_equal(*both)


def test_a_delta_leads_to_the_later_model(learned: Learned, tmp_path: Path) -> None:
    given = (f"export.since={learned.first}", f"export.checkpoint={learned.second}")
    assert run(["dlrm_hybrid", "export", *given, f"export.output={tmp_path / 'delta'}"]) == 0
    predictor = Predictor(learned.first)
    before = predictor.predict(learned.rows)
    predictor.update(tmp_path / "delta")
    after = predictor.predict(learned.rows)
    assert after.tobytes() == Predictor(learned.second).predict(learned.rows).tobytes()
    assert not np.array_equal(before, after)


def test_a_world_of_a_program_learns_what_the_command_does(learned: Learned) -> None:
    prepared = json.loads((learned.first / "config.json").read_text())["data"]["prepared"]
    shards = open_shards(Path(prepared), None)
    spec = ModelSpec(
        embedding_dim=4,
        bottom=(3, 8, 4),
        top=(32, 16, 8, 1),
        table_rows=shards.table_rows,
        table_dims=tuple(DIMS),
    )
    keys = {"embedding": "served", "parallel.table_servers": 1, "train.seed": 0}
    with World.in_process(spec, trainers=2, cuts=["bottom.1"], batch_size=16, config=keys) as world:
        first = {name: one.clone() for name, one in world.state_dict().items()}
        rng = np.random.default_rng(0)
        ids = np.stack([rng.integers(0, n, 32) for n in shards.table_rows], 1)
        dense, label = rng.random((32, 3), np.float32), rng.integers(0, 2, 32)
        world.step((dense, ids, label))
        after = world.state_dict()
    for name in ("embedding.1.weight", "interaction.project.1.weight"):
        assert after[name].shape == first[name].shape
        assert not np.array_equal(after[name], first[name])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ("model.table_dims=[8,6]",),
            "model.table_dims: 2 widths; the rows of",
        ),
        (
            ("model.table_dims=[8,0,4,4]",),
            "model.table_dims[1] = 0: must be a whole number at least 1 and at most 4,096",
        ),
        (
            ("parallel=hybrid", "parallel.cuts=[]", "embedding.sharding=column_wise"),
            "embedding.sharding = 'column_wise': model.table_dims[1] = 6 cannot be cut",
        ),
        (
            (OWN,),
            "categorical[0].embedding_dim = 8: a model of your own takes rows of one width; "
            "column 'user' needs null, or model.embedding_dim = ",
        ),
    ],
)
def test_what_has_no_such_tables_says_so(
    options: tuple[str, ...], told: str, learned: Learned, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("data=table", f"data.schema={learned.folder}/mine.yaml")
    given += (f"data.prepared={learned.folder}/first-rows",)
    if OWN not in options:
        given += ("model=dlrm_small", "model.bottom=[3,8,8]", "model.embedding_dim=8")
    assert run(["dlrm_hybrid", "train", *given, *options]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"table_dims": (8, 4)}, "has no model with tables of several widths"),
        ({"bottom": ()}, "has no model without dense"),
    ],
)
def test_names_of_other_programs_are_refused(changes: dict[str, Any], told: str) -> None:
    one: dict[str, Any] = {"embedding_dim": 4, "bottom": (3, 8, 4), "top": (8, 1)}
    spec = ModelSpec(**one | {"table_rows": (9, 9)} | changes)
    with pytest.raises(ConfigError, match=told):
        names_of("dlrm", spec, [])
