"""A model of a user's own: what it learns, where it goes on, is scored and exported, and what not.

That worlds of it are one process, resumed or not, is a column of `test_world_matrix.py`.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from outside_model import DeepFm
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from world_runs import summary, tensors

from dlrm_hybrid import Features, OwnModel, Predictor
from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.loader import START, Loader
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.model.layers.own import made
from dlrm_hybrid.model.tensors import draw_embeddings
from dlrm_hybrid.types import ConfigError

NAME = "outside_model:DeepFm"
OWN = (f"model={NAME}", "model.embedding_dim=4", "model.top=[8,8]")
Trained = Callable[..., Path]


@pytest.fixture
def nobody_has_typed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_hybrid.config.outside._loaded", {})


@pytest.fixture(scope="module")
def learned(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process."""
    folder = tmp_path_factory.mktemp("own") / "run"
    given = (*small_rows, *OWN, "train.steps=20", "optimizer.lr=0.5", "train.seed=3")
    assert run(["dlrm_hybrid", "train", *given, f"hydra.run.dir={folder}"]) == 0
    return folder


def test_a_run_learns_as_a_loop_of_plain_torch(learned: Path, small_rows: list[str]) -> None:
    config = json.loads((learned / "config.json").read_text())
    shards = open_shards(Path(config["data"]["prepared"]), None)
    assert config["model"] == {
        "name": NAME, "embedding_dim": 4, "dense": 13, "tables": 26,
        "bottom": [16, 8, 8], "top": [8, 8],
    }  # fmt: skip
    spec = OwnModel(
        module=DeepFm, table_rows=shards.table_rows, num_dense=13, embedding_dim=4,
        settings={"top": (8, 8)},
    )  # fmt: skip
    model = made(spec, seed=3)
    tables = {
        f"embedding.{n}.weight": torch.zeros(rows, 4) for n, rows in enumerate(shards.table_rows, 1)
    }
    draw_embeddings(tables, 3)
    weights = [*model.parameters(), *(one.requires_grad_() for one in tables.values())]
    optimizer = torch.optim.SGD(weights, lr=0.5)
    loader, at = (
        Loader(
            shards,
            batch_size=64,
            seed=3,
            shuffle=True,
            shuffle_block_rows=65_536,
            shuffle_read_rows=1024,
            trainer=0,
            trainers=1,
        ),
        START,
    )
    for _ in range(20):
        batch, at = loader.read(at)
        x_BN: Tensor = torch.from_numpy(batch.dense_BI)
        ids = torch.from_numpy(batch.bags.values)
        pooled_BFD = torch.stack(
            [table[one] for table, one in zip(tables.values(), ids, strict=True)], 1
        )
        for name, part in model.named_children():
            x_BN = part(x_BN, pooled_BFD) if name == "interaction" else part(x_BN)
        label_B = torch.from_numpy(batch.label_B)
        functional.binary_cross_entropy_with_logits(x_BN.squeeze(1), label_B).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = tensors(learned, 20)
    first = dict(made(spec, seed=3).named_parameters())
    for name, one in {**dict(model.named_parameters()), **tables}.items():
        np.testing.assert_allclose(
            found[name], one.detach().numpy(), rtol=0, atol=1e-5, err_msg=name
        )
    moved = {name: one.detach() - first[name].detach() for name, one in model.named_parameters()}
    assert max(float(one.abs().max()) for one in moved.values()) > 1e-2


def test_a_run_is_evaluated_predicted_and_exported_where_it_is_typed(
    learned: Path, tmp_path: Path, nobody_has_typed_it: None, capsys: pytest.CaptureFixture[str]
) -> None:
    scored = tmp_path / "scores.json"
    evaluate = ["dlrm_hybrid", "evaluate", f"evaluate.checkpoint={learned}"]
    assert run([*evaluate, f"evaluate.output={scored}"]) == 2
    told = f"model = '{NAME}': is from outside the package, and imported only where model={NAME}"
    assert told in capsys.readouterr().err
    with pytest.raises(ConfigError, match="imported only where"):
        Predictor(learned)
    assert run([*evaluate, f"evaluate.output={scored}", f"model={NAME}"]) == 0
    expected = summary(learned)["test"]
    assert json.loads(scored.read_text())["log_loss"] == expected["loss"]
    exported = tmp_path / "exported"
    export = ["dlrm_hybrid", "export", f"export.checkpoint={learned}", f"model={NAME}"]
    assert run([*export, "export.format=safetensors", f"export.output={exported}"]) == 0
    described = json.loads((exported / "model.json").read_text())["model"]
    assert (described["name"], described["settings"]["top"]) == (NAME, [8, 8])
    model = DeepFm(Features(dense=13, tables=26, embedding_dim=4), top=(8, 8))
    held: dict[str, Tensor] = load_file(exported / "model.safetensors")
    model.load_state_dict({k: one for k, one in held.items() if not k.startswith("embedding.")})
    predictor = Predictor(learned, model=DeepFm)
    assert predictor.step == 20


@pytest.mark.slow  # test_extending.py has one that `export` compares
@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_a_graph_of_it_scores_as_the_run(learned: Path, tmp_path: Path, format: str) -> None:
    export = ["dlrm_hybrid", "export", f"export.checkpoint={learned}", f"model={NAME}"]
    assert run([*export, f"export.format={format}", f"export.output={tmp_path / 'graph'}"]) == 0
    assert json.loads((tmp_path / "graph" / "model.json").read_text())["check"]["rows"] > 100
