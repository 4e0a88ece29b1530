"""The laws of worlds, over compositions that have every pair of their choices.

One process and many do the same; a run that is resumed or killed ends as the unbroken one; what
trainers recorded that wait for nobody is played back; what a run has scored is scored again by
`evaluate` and by a predictor; trainers without servers learn what they do with one; one trainer,
wherever the model is cut, is plain training. Each holds bit for bit, but where sums have another
order or rounding.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import world_faults
from compositions import (
    COLUMNS,
    PLAIN,
    PLAIN_FORBIDDEN,
    Columns,
    Composition,
    covering,
    is_exact,
    options,
    pairs,
    plain_options,
    singles,
    size,
)
from outside_model import DeepFm
from patience import PATIENT
from world_faults import Fault, planned
from world_runs import (
    assert_moved,
    assert_same,
    assert_same_state,
    checkpoint,
    curve,
    largest_difference,
    pids,
    summary,
    tensors,
)

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.compress.gradient.methods import methods
from dlrm_hybrid.data.loader import sequential_batches
from dlrm_hybrid.data.preprocessing import read_kept
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.predict import Predictor
from dlrm_hybrid.run import training
from dlrm_hybrid.telemetry.metrics import metrics_of
from dlrm_hybrid.train.asynchronous.order_log import order_file, read_order
from dlrm_hybrid.wire.frame import Kind as FrameKind

STEPS, SAVED = 13, 5
COMMON = (
    *(PATIENT, f"train.steps={STEPS}", f"checkpoint.every={SAVED}", "checkpoint.keep=9"),
    *("telemetry.every=4", "train.evaluate_every=8", "optimizer.lr=0.2"),
)
HYBRID = ("parallel=hybrid", "train.batch_size=16", "sync.check_every=1")
IN_PROCESS = "parallel.world=in_process"
COVERING, SINGLES = covering()
PLAIN_COVERING, PLAIN_SINGLES = covering(PLAIN, PLAIN_FORBIDDEN)
# Served tables with SGD, whose rows of lists are only near: here they are equal.
SERVED_SGD = next(
    {**one, "rows": "clicks"}
    for one in PLAIN_COVERING
    if (one["tables"], one["table optimizer"], one["rows"]) == ("served", "sgd", "lists")
    and is_exact({**one, "rows": "clicks"})
)
WAITING = [one for one in COVERING if one["sync"] in ("sync", "bounded")]
APART = [one for one in COVERING if one not in WAITING]
WITHOUT_SERVERS = [one for one in WAITING if one["servers"] == "0"]
# One with each kind of tables, of rows whose columns may grow.
OF_TABLES = {one["tables"]: one for one in reversed(WAITING) if one["rows"] != "clicks"}
SECOND_DAYS = sorted(OF_TABLES.values(), key=WAITING.index)
NEXT_SHOPS = 30  # the first shop of the next day's rows
ON_A_DEVICE = [
    *{one["gradient"]: one for one in WAITING}.values(),
    next(one for one in WITHOUT_SERVERS if one["gradient"] == "levels"),
]
OF_TABLES_APART = {one["tables"]: one for one in reversed(APART) if one["rows"] != "clicks"}
DAYS_APART = sorted(OF_TABLES_APART.values(), key=APART.index)
# Of each kind of tables one with a frozen table, one that columns share and one with vectors, as
# wide as the model has them, and a column of vectors.
GIVEN, GIVEN_APART = (
    [
        {**one, "rows": "given"}
        for one in {
            one["tables"]: one for one in worlds if one["model"] not in ("own", "widths")
        }.values()
    ]
    for worlds in (WAITING, APART)
)
SCHEMA = """
label: {label}
dense: [{dense}]
categorical:
  - {{name: tags, kind: integer{length}, max_rows: 48, evict: least_recent}}
  - {{name: shop, kind: integer}}
{columns}split: {{by: fraction, test: 0.2, seed: 1}}
{more}
"""
MEANS = "  - {name: words, kind: integer, max_length: 4, pooling: mean}\n"
GIVEN_SCHEMA = """
label: click
dense: [{{name: price}}, {{name: image, length: 4}}]
categorical:
  - {{name: tags, kind: integer, max_length: 5, max_rows: 48, evict: least_recent,
     trainable: false, vectors: {folder}/tags.parquet}}
  - {{name: words, kind: integer, max_length: 4, pooling: mean, table: word}}
  - {{name: last, kind: integer, table: word}}
  - {{name: shop, kind: integer, vectors: {folder}/shops.parquet}}
split: {{by: fraction, test: 0.2, seed: 1}}
"""
OF_ITEMS = "kind: integer, max_rows: 48, evict: least_recent, table: item"
SHARED = (
    f"  - {{name: last, {OF_ITEMS}}}\n"
    f"  - {{name: words, {OF_ITEMS}, max_length: 4, pooling: mean}}\n"
)
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def rows(
    small_rows: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, ...]]:
    """Overrides by name: Criteo's columns, lists and weights, no numbers, labels, one table."""
    folder, draw = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    columns = {"click": draw.integers(0, 2, 1500), "shop": draw.integers(0, 90, 1500)}
    lists = [draw.integers(0, 40, draw.integers(0, 6)).tolist() for _ in range(1500)]
    much = np.arange(1500) % 7 / 3
    words = [draw.integers(0, 40, draw.integers(0, 5)).tolist() for _ in range(1500)]
    numbers = {"price": draw.random(1500), "much": much}
    factors = [draw.normal(size=len(one)).tolist() for one in lists]
    tables = {
        "lists": {**columns, **numbers, "tags": lists, "factors": factors, "words": words},
        "bare": {**columns, "tags": draw.integers(0, 40, 1500)},
    }
    stars = {"stars": np.random.default_rng(1).integers(1, 6, 1500)}
    tables["labels"] = {**tables["lists"], **stars}
    tables["shared"] = {**tables["lists"], "last": draw.integers(0, 40, 1500)}
    columns = {"click": draw.integers(0, 2, 1500), "shop": draw.integers(NEXT_SHOPS, 130, 1500)}
    lists = [draw.integers(10, 60, draw.integers(0, 6)).tolist() for _ in range(1500)]
    words = [draw.integers(20, 60, draw.integers(0, 5)).tolist() for _ in range(1500)]
    factors = [draw.normal(size=len(one)).tolist() for one in lists]
    added = {"tags": lists, "factors": factors, "words": words}
    tables["next lists"] = {**columns, **numbers, **added}
    tables["next bare"] = {**columns, "tags": draw.integers(10, 60, 1500)}
    tables["next labels"] = {**tables["next lists"], **stars}
    tables["next shared"] = {**tables["next lists"], "last": draw.integers(10, 60, 1500)}
    for name, table in tables.items():
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
    for day in ("", "next "):
        image = pa.array(draw.normal(size=(1500, 4)).tolist())
        named = ("click", "price", "tags", "shop", "words", "last")
        some = {name: tables[f"{day}shared"][name] for name in named}
        pq.write_table(pa.table({**some, "image": image}), folder / f"{day}given.parquet")
    for name, column in (("tags", "tags"), ("shops", "shop")):
        vectors = pa.array(draw.normal(size=(60, 4)).tolist())
        ids = range(0, 120, 2) if column == "shop" else range(60)
        pq.write_table(pa.table({column: ids, "vector": vectors}), folder / f"{name}.parquet")
    (folder / "given.yaml").write_text(GIVEN_SCHEMA.format(folder=folder))
    made: dict[str, tuple[str, ...]] = {"clicks": tuple(small_rows)}
    several = "[click, {column: stars, above: 3, loss_weight: 0.3}]"
    length = ", max_length: 5, weights: factors"
    numbered = ("{name: price}", length, MEANS, "weight: much\ngroup: shop")
    schemas = (
        *(("lists", "click", *numbered), ("labels", several, *numbered)),
        ("bare", "click", "", "", "", ""),
        (
            *("shared", "click", "{name: price}", ", max_length: 5, weights: factors, table: item"),
            *(SHARED, "ignore: [much]"),
        ),
    )
    for name, label, dense, length, last, more in schemas:
        text = SCHEMA.format(label=label, dense=dense, length=length, columns=last, more=more)
        (folder / f"{name}.yaml").write_text(text)
    for name in ("lists", "labels", "bare", "given", "shared"):
        made[name] = (
            *("data=table", f"data.schema={folder / name}.yaml"),
            *(f"data.raw={folder / name}.parquet", f"data.prepared={folder / name}"),
            *("model=dlrm_small", "telemetry.tensorboard=false"),
        )
    return made


@pytest.fixture(scope="module")
def made() -> dict[str, Path]:
    """Folders of unbroken runs in one process, and of plain ones, by what they learn."""
    return {}


@pytest.fixture
def train(rows: dict[str, tuple[str, ...]], tmp_path: Path) -> Train:
    """Train a composition, or the rows of one; the run's folder."""

    def train_here(name: str, composition: Composition, *more: str) -> Path:
        given = (*rows[composition["rows"]], *COMMON, *more)
        assert run(["dlrm_hybrid", "train", *given, f"hydra.run.dir={tmp_path / name}"]) == 0
        return tmp_path / name

    return train_here


def parameters(worlds: Sequence[Composition], quick: int) -> list[object]:
    """The first of them are run by every `make test`, the others by `make test-all`."""
    return [
        pytest.param(
            world,
            id="-".join(world.values()).replace(" ", "_"),
            marks=() if number < quick else pytest.mark.slow,
        )
        for number, world in enumerate(worlds)
    ]


@pytest.mark.parametrize(
    ("columns", "chosen", "quick"),
    [(COLUMNS, COVERING, SINGLES), (PLAIN, PLAIN_COVERING, PLAIN_SINGLES)],
    ids=["worlds", "plain"],
)
def test_few_compositions_have_all_values_and_the_pairs_that_can_be(
    columns: Columns, chosen: Sequence[Composition], quick: int
) -> None:
    assert singles(columns) <= {value for one in chosen[:quick] for value in one.items()}
    sizes = [len(one) for one in columns.values()]
    every = (sum(sizes) ** 2 - sum(size**2 for size in sizes)) // 2
    assert len(set().union(*map(pairs, chosen))) > 0.8 * every
    assert quick <= 20 and len(chosen) <= 260


def test_every_method_of_compression_is_in_a_column() -> None:
    named = {one for value in COLUMNS["gradient"].values() for one in value}
    assert {f"gradient={name}" for name in methods()} - named == {"gradient=none"}


@pytest.mark.parametrize("world", parameters(COVERING, SINGLES) + parameters(GIVEN, 1))
def test_a_resumed_run_is_the_unbroken_one(
    world: Composition, train: Train, made: dict[str, Path]
) -> None:
    given = (*HYBRID, *options(world), IN_PROCESS)
    unbroken = made[str(world)] = train("unbroken", world, *given)
    resumed = train("resumed", world, *given, f"checkpoint.resume={checkpoint(unbroken, SAVED)}")
    for step in (2 * SAVED, STEPS):
        assert_same_state(resumed, unbroken, step)
    assert summary(resumed)["test"] == summary(unbroken)["test"]
    before, after = tensors(unbroken, SAVED), tensors(unbroken, STEPS)
    for part in ("top", "embedding"):
        assert largest_difference(before, after, part) > 1e-5, part
    if world["rows"] == "given":
        assert largest_difference(before, after, "embedding.1.") == 0


@pytest.mark.parametrize("world", parameters(COVERING, 5) + parameters(GIVEN, 1))
def test_other_commands_score_as_the_run_has_scored(
    world: Composition, train: Train, made: dict[str, Path], tmp_path: Path
) -> None:
    given = (*HYBRID, *options(world), IN_PROCESS)
    folder, output = made.get(str(world)) or train("run", world, *given), tmp_path / "scores.json"
    last = checkpoint(folder, STEPS)  # of which the best of its evaluations need not be
    wish = (f"evaluate.checkpoint={last}", f"evaluate.output={output}")
    typed = [one for one in options(world) if one.startswith("model=outside_model:")]
    assert run(["dlrm_hybrid", "evaluate", *wish, *typed]) == 0
    evaluated = json.loads(output.read_text())
    assert evaluated["log_loss"] == summary(folder)["test"]["loss"]
    if world["activation"] == "sketch":  # a negative control, which predictors leave out
        return
    prepared = json.loads((folder / "config.json").read_text())["data"]["prepared"]
    own = DeepFm if typed else None
    shards, model = open_shards(Path(prepared), None), Predictor(last, model=own)._serving.model
    metrics = metrics_of(shards.schema.loss_weights)
    for batch in sequential_batches(shards, shards.test_rows("day"), 500):
        metrics.add(model.logits(batch), *batch.outcomes)
    assert metrics.scores().log_loss == evaluated["log_loss"]


@pytest.mark.parametrize("world", parameters(WITHOUT_SERVERS, 1))
def test_trainers_learn_the_same_without_servers_as_with_one(
    world: Composition, train: Train, made: dict[str, Path]
) -> None:
    given = (*HYBRID, *options(world), IN_PROCESS)
    without = made.get(str(world)) or train("without", world, *given)
    with_one = train("with", world, *given, "parallel.servers=1")
    assert_same_state(without, with_one, STEPS)
    assert curve(without) == curve(with_one)
    counts = (summary(folder)["network"]["by_class"] for folder in (with_one, without))
    some, none = (of_class["parameter_pull"]["bytes"] for of_class in counts)
    assert some > none == 0


@pytest.mark.parametrize("world", parameters(WAITING, 3) + parameters(GIVEN, 2))
def test_processes_killed_or_not_are_one_process(
    world: Composition,
    train: Train,
    made: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = (*HYBRID, *options(world))
    in_process = made.get(str(world)) or train("in-process", world, *given, IN_PROCESS)
    number = [*WAITING, *GIVEN].index(world)
    is_killed = number % 3 == 1
    if is_killed:
        draw = Random(number)
        monkeypatch.setattr(training, "TRAIN_RANK", world_faults.ENTRY)
        fault = Fault(rank=draw.randrange(size(world)), step=draw.randrange(8, 12))
        world_faults.plan(tmp_path / "processes", fault)
    processes = train("processes", world, *given)
    assert planned(processes) == [] and len(pids(processes)) == size(world)
    for step in (SAVED, 2 * SAVED, STEPS):
        assert_same_state(processes, in_process, step)
    assert curve(processes) == curve(in_process)
    one, other = summary(processes), summary(in_process)
    assert (one["restarts"], one["test"]) == (int(is_killed), other["test"])
    assert one["compression"] == other["compression"]
    if not is_killed and world["schedule"] != "dsp":  # whose last answers nobody waits for
        assert_same_traffic(one, other)


@pytest.mark.parametrize("world", parameters(ON_A_DEVICE, 1))
def test_processes_on_devices_are_one_process(
    world: Composition, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is on the host; but norms, which DEFT's shares depend on, are other sums there."""
    given = (*HYBRID, *options(world))
    if world["gradient"] == "deft":
        monkeypatch.setattr(training, "TRAIN_RANK", world_faults.ON_A_DEVICE)
    in_process = train("in-process", world, *given, IN_PROCESS)
    monkeypatch.setattr(training, "TRAIN_RANK", world_faults.ON_A_DEVICE)
    processes = train("processes", world, *given)
    for step in (SAVED, 2 * SAVED, STEPS):
        assert_same_state(processes, in_process, step)
    assert curve(processes) == curve(in_process)
    assert summary(processes)["test"] == summary(in_process)["test"]
    before, after = tensors(processes, SAVED), tensors(processes, STEPS)
    assert all(largest_difference(before, after, part) > 1e-5 for part in ("top", "embedding"))


def assert_same_traffic(processes: dict, in_process: dict) -> None:
    """Trainers share tables in one process; all else is sent there too."""
    sent, counted = (one["network"]["by_class"] for one in (processes, in_process))
    assert set(sent) - set(counted) <= {"embedding"}
    for traffic in ("gradient_push", "parameter_pull", "activation", "activation_gradient"):
        assert counted.get(traffic) == sent.get(traffic), traffic
    assert counted["gradient_push"]["bytes"] > 0


def next_day(first: Path, rows: tuple[str, ...]) -> tuple[str, ...]:
    """Overrides of a run that goes on from one of a table's rows, with those of the day after."""
    raw = next(Path(one.partition("=")[2]) for one in rows if one.startswith("data.raw="))
    new = raw.with_name(f"next {raw.name}")
    prepared = first.with_name("rows")
    return (f"data.raw={new}", f"data.prepared={prepared}", f"checkpoint.resume={first}")


@pytest.mark.parametrize("world", parameters(SECOND_DAYS, 2) + parameters(GIVEN, 1))
def test_a_second_day_in_processes_is_one_process(
    world: Composition, train: Train, made: dict[str, Path], rows: dict[str, tuple[str, ...]]
) -> None:
    given = (*HYBRID, *options(world))
    first = made.get(str(world)) or train("first", world, *given, IN_PROCESS)
    later = next_day(first, rows[world["rows"]])
    in_process = train("in-process", world, *given, *later, IN_PROCESS)
    processes = train("processes", world, *given, *later)
    for step in (SAVED, 2 * SAVED, STEPS):
        assert_same_state(processes, in_process, step)
    one, other = summary(processes), summary(in_process)
    assert (one["first_step"], one["test"]) == (0, other["test"])
    assert one["growth"] == other["growth"]
    assert min(of["appended"] for of in one["growth"].values()) > 5
    assert next(iter(one["growth"].values()))["evicted"] == 10  # those of the first day alone
    before, begun = tensors(first, STEPS), tensors(processes, SAVED)
    after = tensors(processes, STEPS)
    assert before.keys() == after.keys()
    for number in (1, 2):
        name = f"embedding.{number}.weight"
        moved_V = (begun[name] != after[name]).any(axis=1)
        known = len(before[name])
        assert known < len(after[name])
        learns = world["rows"] != "given" or number == 2
        assert moved_V[:known].any() == moved_V[known:].any() == learns


@pytest.mark.parametrize("world", parameters(DAYS_APART, 1))
def test_a_second_day_of_trainers_that_do_not_wait_keeps_the_rows_that_it_lacks(
    world: Composition, train: Train, made: dict[str, Path], rows: dict[str, tuple[str, ...]]
) -> None:
    given = (*HYBRID, *options(world))
    first = made.get(str(world)) or train("first", world, *given, IN_PROCESS)
    second = train("second", world, *given, *next_day(first, rows[world["rows"]]))
    assert summary(second)["first_step"] == 0
    shops = read_kept(first).vocabularies()[1]
    ids = [id for id, key in enumerate(shops.keys, shops.first_id) if int(key) < NEXT_SHOPS]
    before, after = (tensors(one, STEPS)["embedding.2.weight"] for one in (first, second))
    assert len(before) < len(after)
    assert before[ids].tobytes() == after[ids].tobytes()
    assert (before != after[: len(before)]).any()


@pytest.mark.parametrize("world", parameters(APART, 2) + parameters(GIVEN_APART, 1))
def test_what_was_recorded_is_played_back(world: Composition, train: Train) -> None:
    given = (*HYBRID, *options(world))
    recorded = train("recorded", world, *given, "sync.record=true")
    played = train("played", world, *given, IN_PROCESS, f"sync.replay={recorded}")
    for step in (SAVED, 2 * SAVED, STEPS):
        assert_same_state(played, recorded, step)
    assert summary(played)["test"] == summary(recorded)["test"]
    dealt: Counter[int] = Counter()
    for order in read_order(order_file(recorded, "server-0")):
        if order.kind is FrameKind.DECISION:
            dealt.update(range(order.number, order.number + order.batches))
    assert dealt == Counter(range(STEPS * int(world["trainers"])))  # each batch once


@pytest.mark.parametrize(
    "world", parameters(PLAIN_COVERING, PLAIN_SINGLES) + parameters([SERVED_SGD], 1)
)
def test_a_world_is_plain_training(world: Composition, train: Train, made: dict[str, Path]) -> None:
    folder = train("world", world, *HYBRID, *options(world, PLAIN), IN_PROCESS)
    alone = (*plain_options(world), f"train.batch_size={16 * int(world['trainers'])}")
    learned = str((world["rows"], *alone))
    expected = made[learned] = made.get(learned) or train("plain", world, *alone)
    if is_exact(world):
        assert_same(expected, folder, STEPS)
        assert summary(expected)["test"] == summary(folder)["test"]
    else:
        assert_near(expected, folder)


def assert_near(expected: Path, folder: Path) -> None:
    first, last = tensors(expected, STEPS), tensors(folder, STEPS)
    assert first.keys() == last.keys()
    for name, tensor in first.items():
        np.testing.assert_allclose(last[name], tensor, rtol=0, atol=1e-6, err_msg=name)


def test_a_checkpoint_of_any_step_holds_all_pushes(train: Train) -> None:
    """Nothing waits in the first steps of a lone stage: its pushes must be served all the same."""
    world, every = {"rows": "clicks"}, ("checkpoint.every=1", "train.steps=3")
    lone = ("parallel.trainers=1", "parallel.servers=1", "parallel.cuts=[]")
    folder = train("world", world, *HYBRID, *lone, IN_PROCESS, *every)
    expected = train("plain", world, "train.batch_size=16", *every)
    for step in (1, 2, 3):
        assert_same(expected, folder, step)


@pytest.mark.parametrize(
    "sharding",
    ["column_wise", *(pytest.param(one, marks=pytest.mark.slow) for one in ("row_wise", "auto"))],
)
def test_tables_split_in_any_way_are_plain_training(sharding: str, train: Train) -> None:
    """Column-wise shards are 8 wide at least."""
    world = {"rows": "clicks"}
    model = ("model.embedding_dim=16", "model.bottom=[13,32,16,8,16]")
    split = ("parallel.trainers=2", "parallel.cuts=[bottom.4]", f"embedding.sharding={sharding}")
    folder = train("world", world, *HYBRID, *model, *split)
    expected = train("plain", world, *model, "train.batch_size=32")
    assert_near(expected, folder)
    assert_moved(folder, SAVED, STEPS)
