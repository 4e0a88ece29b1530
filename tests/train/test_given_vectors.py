"""Tables that begin with given vectors, and tables that never learn, in every world."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from world_runs import assert_same_state, summary, tensors

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.loader import START, Loader
from dlrm_hybrid.data.preprocessing import read_kept
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.model.dlrm import StageModel
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.spec import ModelSpec, Partition
from dlrm_hybrid.model.tensors import draw_embeddings

ROWS, D, STEPS, LR, BATCH = 600, 4, 6, 0.2, 32
FROZEN, GIVEN, DRAWN = (f"embedding.{number}.weight" for number in (1, 2, 3))
SCHEMA = """
label: click
dense: [{{name: price}}]
categorical:
  - {{name: item, vectors: {items}, trainable: false{more}}}
  - {{name: shop, kind: integer, vectors: {shops}}}
  - {{name: tags, kind: integer, max_length: 3}}
split: {{by: fraction, test: 0.2, seed: 1}}
"""
HYBRID = ("parallel=hybrid", "parallel.trainers=2", "train.batch_size=16", "parallel.cuts=[]")
IN_PROCESS = "parallel.world=in_process"
SERVED = (IN_PROCESS, "embedding=served", "parallel.table_servers=2")
DISTINCT = "embedding.deduplicate=true"
WIDE = ("model.embedding_dim=8", "model.bottom=[null,16,8]")
WORLDS = {
    "single": ("parallel=single", f"train.batch_size={BATCH}"),
    "shared": (*HYBRID, IN_PROCESS),
    "distinct": (*HYBRID, DISTINCT),
    "levels": (*HYBRID, DISTINCT, "embedding.levels=true"),
    "by rows": (*HYBRID, "embedding.sharding=row_wise"),
    "served": (*HYBRID, *SERVED),
    "cached": (*HYBRID, *SERVED, "embedding.cache_rows=300", "embedding.cache_batches=4"),
    "in files": (*HYBRID, *SERVED, "embedding.storage=mmap"),
    "async": (*HYBRID, *SERVED, "sync=async"),
}
OPTIMIZERS = {
    "sgd": (),
    "rowwise_adagrad": ("embedding.optimizer=rowwise_adagrad",),
    "adam": ("embedding.optimizer=adam", "embedding.weight_decay=0.01"),
}
Train = Callable[..., Path]


def write_rows(path: Path, seed: int, items: range, shops: range) -> None:
    draw = np.random.default_rng(seed)
    columns = {
        "click": draw.integers(0, 2, ROWS),
        "price": draw.random(ROWS),
        "item": [f"item {one}" for one in draw.integers(items.start, items.stop, ROWS)],
        "shop": draw.integers(shops.start, shops.stop, ROWS),
        "tags": [draw.integers(0, 9, draw.integers(0, 4)).tolist() for _ in range(ROWS)],
    }
    pq.write_table(pa.table(columns), path)


def vector(category: int, of: str = "item") -> list[float]:
    """That of a category, which nothing else is."""
    return [
        float(np.float32((category - 30 + len(of) / 8 + place / 64) / 100)) for place in range(D)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two days, with vectors of the items 20 … 69 and, in another form, of the even shops."""
    folder = tmp_path_factory.mktemp("given")
    write_rows(folder / "day1.parquet", 1, range(40), range(30))
    write_rows(folder / "day2.parquet", 2, range(10, 60), range(50))
    items = [*range(20, 70)]
    table = {
        "title": [f"no. {one}" for one in items],
        "item": [f"item {one}" for one in items],
        "vector": [vector(one) for one in items],
    }
    pq.write_table(pa.table(table), folder / "items.parquet", row_group_size=7)
    shops = np.zeros(60, [("shop", "<i8"), ("of", "<f4", D)])
    shops["shop"] = 2 * np.arange(60)
    shops["of"] = [vector(one, "shop") for one in shops["shop"].tolist()]
    np.save(folder / "shops.npy", shops)
    files = {"items": folder / "items.parquet", "shops": folder / "shops.npy"}
    (folder / "mine.yaml").write_text(SCHEMA.format(**files, more=""))
    (folder / "few.yaml").write_text(
        SCHEMA.format(**files, more=", max_rows: 30, evict: least_recent")
    )
    return folder


@pytest.fixture
def train(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    monkeypatch.chdir(tmp_path)

    def train_here(name: str, *options: str, day: int = 1, code: int = 0) -> Path:
        rows = (
            "data=table",
            f"data.schema={folder}/mine.yaml",
            f"data.raw={folder}/day{day}.parquet",
        )
        more = (f"train.steps={STEPS}", "checkpoint.every=1", "checkpoint.keep=99")
        given = (*rows, "model=dlrm_small", *more, f"optimizer.lr={LR}")
        output = ("telemetry.tensorboard=false", f"hydra.run.dir={tmp_path / name}")
        assert run(["dlrm_hybrid", "train", *given, *output, *options]) == code
        return tmp_path / name

    return train_here


def begun(of: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """What the tables of a run that takes over nothing begin with."""
    kept = read_kept(of)
    found = {
        f"embedding.{number}.weight": torch.zeros(rows, D)
        for number, rows in enumerate(kept.table_rows, 1)
    }
    draw_embeddings(found, seed)
    items, shops, _ = kept.vocabularies()
    for row, key in enumerate(items.keys, items.first_id):
        if 20 <= int(str(key).split()[1]) < 70:
            found[FROZEN][row] = torch.tensor(vector(int(str(key).split()[1])))
    for row, key in enumerate(shops.keys, shops.first_id):
        if int(key) % 2 == 0:
            found[GIVEN][row] = torch.tensor(vector(int(key), "shop"))
    return {name: one.numpy() for name, one in found.items()}


@pytest.mark.parametrize(
    ("world", "optimizer"),
    [
        pytest.param(world, optimizer, marks=() if number % 4 == 0 else pytest.mark.slow)
        for number, (world, optimizer) in enumerate(product(WORLDS, OPTIMIZERS))
    ],
)
def test_rows_begin_with_vectors_and_frozen_ones_stay(
    world: str, optimizer: str, train: Train
) -> None:
    folder = train("run", *WORLDS[world], *OPTIMIZERS[optimizer])
    first, before, after = begun(folder), tensors(folder, 1), tensors(folder, STEPS)
    for held in (before, after):
        assert held[FROZEN].tobytes() == first[FROZEN].tobytes()
        of_frozen = [name for name in held if name.startswith("embedding.1.") and name != FROZEN]
        assert not any(held[name].any() for name in of_frozen)
        assert len(of_frozen) == {"sgd": 0, "rowwise_adagrad": 1, "adam": 3}[optimizer]
    for name in (GIVEN, DRAWN):
        moved_V = (before[name] != first[name]).any(axis=1)
        assert not moved_V.all() or name == DRAWN  # of few rows
        assert (after[name] != first[name]).any()


def test_gradients_of_frozen_tables_are_not_sent(train: Train, folder: Path) -> None:
    schema = (folder / "mine.yaml").read_text().replace("trainable: false", "trainable: true")
    (folder / "learns.yaml").write_text(schema)
    sent = []
    for name in ("mine", "learns"):
        found = summary(train(name, *WORLDS["served"], f"data.schema={folder}/{name}.yaml"))
        sent.append(found["network"]["by_class"]["embedding"]["bytes"])
    assert sent[0] < 0.9 * sent[1]


def test_the_tables_learn_what_plain_torch_learns(train: Train) -> None:
    folder = train("run", *WORLDS["single"])
    first, config = begun(folder), json.loads((folder / "config.json").read_text())
    shards = open_shards(Path(config["data"]["prepared"]), None)
    spec = ModelSpec(
        embedding_dim=D, bottom=(1, 32, 16, 8, D), top=(32, 16, 8, 1), table_rows=shards.table_rows
    )
    (part,) = Partition.of(spec, ()).stages
    dense = StageModel(spec, part, Precision.FLOAT32, seed=0)
    bags = [
        nn.EmbeddingBag.from_pretrained(
            torch.from_numpy(first[name]),
            freeze=name == FROZEN,
            mode="sum",
            include_last_offset=True,
        )
        for name in (FROZEN, GIVEN, DRAWN)
    ]
    weights = [*dense.dense_parameters().values(), *(one.weight for one in bags)]
    rule = torch.optim.SGD([one for one in weights if one.requires_grad], lr=LR)
    loader, at = plain_loader(config, shards), START
    for _ in range(STEPS):
        batch, at = loader.read(at)
        pooled_BFD = torch.stack(by_table(bags, batch), 1)
        logit_B = dense(torch.from_numpy(batch.dense_BI), pooled_BFD).squeeze(1)
        rule.zero_grad()
        label_B = torch.from_numpy(batch.label_B)
        functional.binary_cross_entropy_with_logits(logit_B, label_B).backward()
        rule.step()
    after = tensors(folder, STEPS)
    for name, one in zip((FROZEN, GIVEN, DRAWN), bags, strict=True):
        np.testing.assert_allclose(after[name], one.weight.detach(), rtol=0, atol=1e-6)
    for name, weight in dense.dense_parameters().items():
        np.testing.assert_allclose(after[name], weight.detach(), rtol=0, atol=1e-6)


def plain_loader(config: dict[str, Any], shards: Any) -> Loader:
    keys = ("shuffle", "shuffle_block_rows", "shuffle_read_rows")
    options = {key: config["data"][key] for key in keys}
    return Loader(shards, batch_size=BATCH, seed=config["train"]["seed"], **options)


def by_table(bags: list[nn.EmbeddingBag], batch: Any) -> list[Tensor]:
    values, offsets = (torch.from_numpy(one) for one in (batch.bags.values, batch.bags.offsets))
    ends = offsets[:: batch.bags.rows].tolist()
    found = []
    for table, (bag, begin, end) in enumerate(zip(bags, ends, ends[1:], strict=False)):
        first = table * batch.bags.rows
        own = offsets[first : first + batch.bags.rows + 1] - begin
        found.append(bag(values[begin:end], own))
    return found


@pytest.mark.parametrize(
    "world",
    ["single", *(pytest.param(one, marks=pytest.mark.slow) for one in ("distinct", "in files"))],
)
def test_a_resumed_run_needs_no_vectors(world: str, train: Train, folder: Path) -> None:
    unbroken = train("unbroken", *WORLDS[world])
    hidden = [path.rename(path.with_name(f"gone-{path.name}")) for path in vector_files(folder)]
    try:
        resumed = train(
            "resumed", *WORLDS[world], f"checkpoint.resume={unbroken}/checkpoints/step_00000002"
        )
        scored = f"evaluate.checkpoint={unbroken}"
        assert run(["dlrm_hybrid", "evaluate", scored]) == 0
    finally:
        for path in hidden:
            path.rename(path.with_name(path.name.removeprefix("gone-")))
    assert_same_state(resumed, unbroken, STEPS)


def vector_files(folder: Path) -> list[Path]:
    return [folder / "items.parquet", folder / "shops.npy"]


@pytest.mark.parametrize(
    ("world", "schema"),
    [
        ("distinct", "mine"),
        ("served", "few"),
        pytest.param("single", "few", marks=pytest.mark.slow),
        *(pytest.param("by rows", one, marks=pytest.mark.slow) for one in ("mine", "few")),
    ],
)
def test_new_categories_of_a_second_day_begin_with_their_vectors(
    world: str, schema: str, train: Train, folder: Path
) -> None:
    named = f"data.schema={folder}/{schema}.yaml"
    first = train("first", *WORLDS[world], named)
    second = train("second", *WORLDS[world], named, f"checkpoint.resume={first}", day=2)
    before, after, fresh = tensors(first, STEPS), tensors(second, STEPS), begun(second)
    replaced = read_kept(second).replaced(read_kept(first))[0]
    assert (len(replaced) > 3) == (schema == "few")
    expected = fresh[FROZEN]
    expected[: len(before[FROZEN])] = before[FROZEN]
    expected[replaced] = begun(second)[FROZEN][replaced]
    assert expected.tobytes() == after[FROZEN].tobytes()
    known = len(before[GIVEN])
    assert len(after[GIVEN]) > known + 10
    begins = np.concatenate([before[GIVEN], fresh[GIVEN][known:]])
    moved_V = (tensors(second, 1)[GIVEN] != begins).any(axis=1)
    assert 0 < moved_V.sum() <= 33 and not moved_V[known:].all()


def test_what_was_found_is_told_and_remembered(
    train: Train, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = train("run", *WORLDS["single"])
    told = capsys.readouterr().out
    vocabulary = read_kept(of).vocabularies()[0]
    found = len({f"item {one}" for one in range(20, 70)} & {*vocabulary.keys})
    rows, lost = vocabulary.table_rows, 50 - found
    assert lost >= 30
    assert (
        f"item: {found} of {rows} rows begin with a vector of {folder}/items.parquet; {lost} of "
        "its categories have no row"
    ) in told
    items = folder / "items.parquet"
    kept = items.read_bytes()
    try:
        pq.write_table(pq.read_table(items).slice(0, 40), items)
        train("again", *WORLDS["single"], code=3)
        told = capsys.readouterr().err
        assert f"{items} has changed since it was prepared (categorical[0].vectors" in told
    finally:
        items.write_bytes(kept)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no column": ({"id": ["a"], "v": [[1.0] * D]}, "no column 'item': it has 'id', 'v'"),
    "no list": ({"item": ["a"], "v": [1.0]}, "no column of lists: wants one, of numbers"),
    "two lists": (
        {"item": ["a"], "v": [[1.0]], "w": [[1.0]]},
        "'v', 'w' are lists: wants one, of numbers",
    ),
    "empty": (
        {"item": ["a"], "v": pa.array([[]], pa.list_(pa.float32()))},
        "row 1: column 'v': no",
    ),
    "ragged": (
        {"item": ["a", "b"], "v": [[1.0] * D, [1.0]]},
        f"row 2: column 'v': 1 numbers instead of {D}",
    ),
    "missing": (
        {"item": ["a", "b"], "v": [[1.0] * D, [1.0, None, 1.0, 1.0]]},
        "row 2: column 'v': a number is missing",
    ),
    "beyond": (
        {"item": ["a", "b"], "v": [[1.0] * D, [1e300] * D]},
        "row 2: column 'v': a number is missing, or not of 32 bits",
    ),
    "no numbers": ({"item": ["a"], "v": [["x"] * D]}, "row 1: column 'v': 'x' is not a number"),
    "twice": (
        {"item": ["item 1", "item 2", "item 1"], "v": [[1.0] * D] * 3},
        "row 3: column 'item': 'item 1' is in row 1 too",
    ),
    "no category": (
        {"item": [1.5, 2.5], "v": [[1.0] * D] * 2},
        "row 1: column 'item': 1.5 is a float, not text",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_has_no_vectors_is_told_in_one_message(
    case: str, train: Train, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, told = BAD[case]
    pq.write_table(pa.table(table), tmp_path / "bad.parquet")
    schema = (folder / "mine.yaml").read_text()
    schema = schema.replace(str(folder / "items.parquet"), str(tmp_path / "bad.parquet"))
    (tmp_path / "bad.yaml").write_text(schema)
    of = train("run", *WORLDS["single"], f"data.schema={tmp_path}/bad.yaml", code=3)
    found = capsys.readouterr().err
    assert f"{tmp_path}/bad.parquet: {told}" in found
    assert found.count("categorical[0].vectors") == 1
    assert not of.exists()


def test_vectors_of_another_width_are_told_with_both(
    train: Train, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = train("run", *WORLDS["single"], *WIDE, code=2)
    told = capsys.readouterr().err
    for number, path in enumerate(vector_files(folder)):
        key = f"data.schema.categorical[{number}].vectors = {path}"
        assert f"{key}: vectors of {D} numbers for rows of 8" in told
    assert not of.exists()


def test_vectors_of_another_width_than_the_schema_says_are_not_prepared(
    train: Train, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = (
        (folder / "mine.yaml").read_text().replace(" vectors:", " embedding_dim: 9, vectors:", 1)
    )
    (tmp_path / "wide.yaml").write_text(schema)
    train("run", *WORLDS["single"], f"data.schema={tmp_path}/wide.yaml", code=3)
    told = capsys.readouterr().err
    assert f"column 'vector': vectors of {D} numbers, categorical[0].embedding_dim = 9" in told


def test_damaged_vectors_beside_the_rows_are_found(train: Train, tmp_path: Path) -> None:
    first = train("first", *WORLDS["single"])
    prepared = Path(json.loads((first / "config.json").read_text())["data"]["prepared"])
    path = prepared / "vectors.1.npy"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    train("second", *WORLDS["single"], code=3)
