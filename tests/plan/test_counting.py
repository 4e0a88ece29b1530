"""What is counted of a world in this process, against what its ranks send."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from planned import WORLDS, config
from world_runs import Train

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.plan.calibration import read
from dlrm_hybrid.plan.counting import LARGER, SMALL, Counter, grown, smaller
from dlrm_hybrid.plan.layout import Layout
from dlrm_hybrid.report.runs import Run, read_run
from dlrm_hybrid.run.assembly.build import prepared_folder, semantics
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.telemetry.traffic import Traffic

STEPS = 30
PROCESSES = ("parallel=hybrid", "parallel.world=processes", f"train.steps={STEPS}")


def counter_of(run: Run, steps: int = 10 * STEPS) -> tuple[Counter, Layout]:
    planned = validate(run.config)
    shards = open_shards(prepared_folder(planned), semantics(planned))
    counter = Counter(shards, steps, lambda text: None)
    return counter, counter.layout(planned)


def sent(run: Run) -> dict[Traffic, float]:
    """Bytes of a step, by class."""
    timed = max(one.values["timed_steps"] for one in run.events if one.kind is Kind.RANK)
    by_class = run.summary["network"]["by_class"]
    return {Traffic(name): one["bytes"] / timed for name, one in by_class.items()}


@pytest.mark.parametrize("sync", [pytest.param("sync", marks=pytest.mark.slow), "bounded"])
def test_counted_steps_send_what_processes_send(sync: str, train: Train) -> None:
    overrides = ("gradient=dct", "activation=dct", "parallel.trainers=3", "checkpoint.minutes=0")
    cuts = ("parallel.cuts=[bottom.2]", "embedding.deduplicate=true")
    code, folder = train("run", *PROCESSES, *overrides, *cuts, f"sync={sync}")
    assert code == 0
    trained = read_run(folder)
    _, world = counter_of(trained)
    counted = world.bytes_by_class()
    for traffic, size in sent(trained).items():
        if traffic is not Traffic.CONTROL:
            # Servers begin to count a version early or late; ids are those of some batches.
            near = {Traffic.EMBEDDING: 0.03, Traffic.PARAMETER_PULL: 0.01}.get(traffic, 1e-6)
            assert counted[traffic] == pytest.approx(size, rel=near), traffic
    assert read(folder).ranks.keys() == set(range(world.topology.size))


@pytest.fixture(scope="module")
def counter(small_rows: list[str]) -> Counter:
    planned = validate(values_of(["parallel=hybrid", *small_rows]))
    shards = open_shards(prepared_folder(planned), semantics(planned))
    return Counter(shards, 10, lambda text: None)


@pytest.mark.parametrize("name", WORLDS)
def test_every_kind_of_world_is_counted(name: str, counter: Counter, small_rows: list[str]) -> None:
    planned = config(*small_rows, *WORLDS[name])
    world = counter.layout(planned)
    found = world.bytes_by_class()
    is_alone = planned.parallel.trainers == 1
    assert (found[Traffic.GRADIENT_PUSH] > 0) is not is_alone
    assert (found[Traffic.PARAMETER_PULL] > 0) is (planned.parallel.servers > 0)
    assert found[Traffic.ACTIVATION] > 0
    assert (found[Traffic.EMBEDDING] > 0) is not is_alone


@pytest.mark.parametrize(
    ("gradient", "servers"),
    [
        *(("dct", 2), ("dct", 0)),
        *(pytest.param(method, 2, marks=pytest.mark.slow) for method in ("none", "deft")),
    ],
)
def test_what_many_trainers_send_follows_from_few(
    gradient: str, servers: int, counter: Counter, small_rows: list[str]
) -> None:
    shape = ("parallel.trainers=6", f"parallel.servers={servers}", f"gradient={gradient}")
    planned = config(*small_rows, *shape)
    exact, near = (counter.layout(planned, exactly=one).bytes_by_class() for one in (True, False))
    for traffic in Traffic:
        if traffic is not Traffic.CONTROL:
            assert near[traffic] == pytest.approx(exact[traffic], rel=0.2), traffic


def test_frames_grow_with_trainers_up_to_all_that_there_is() -> None:
    assert grown(100, 200, 1e6, LARGER) == pytest.approx(200)
    assert grown(100, 200, 1e6, SMALL) == pytest.approx(100)
    assert grown(100, 100, 1e6, 4096) == pytest.approx(100)
    assert 399 < grown(100, 200, 1e6, 8) < 400
    assert grown(100, 200, 1e3, 10_000) == pytest.approx(1e3)
    assert smaller(config("parallel.trainers=64"), SMALL).parallel.trainers == SMALL


SCHEMA = """
label: y
dense: [{name: x}]
categorical:
  - {name: tags, kind: integer, max_length: 9, weights: much}
  - {name: shop, kind: integer, expand_to: 3}
split: {by: fraction, test: 0.1}
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder, rng, rows = tmp_path_factory.mktemp("table"), np.random.default_rng(0), 2_000
    tags = [rng.integers(0, 300, rng.integers(0, 10)).tolist() for _ in range(rows)]
    columns = {
        "y": rng.integers(0, 2, rows),
        "x": rng.random(rows),
        "tags": pa.array(tags, pa.list_(pa.int64())),
        "shop": rng.integers(0, 50, rows),
        "much": [rng.random(len(one)).tolist() for one in tags],
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    (folder / "mine.yaml").write_text(SCHEMA)
    data = ("data=table", f"data.schema={folder / 'mine.yaml'}", f"data.raw={folder}/rows.parquet")
    return (*data, f"data.prepared={folder / 'rows'}", "model=dlrm_small")


@pytest.mark.parametrize("deduplicate", [pytest.param("false", marks=pytest.mark.slow), "true"])
def test_bytes_of_lists_are_as_calculated(
    deduplicate: str, table: tuple[str, ...], tmp_path: Path
) -> None:
    shape = ("parallel.trainers=2", "parallel.cuts=[]", "train.batch_size=32")
    options = (*table, *PROCESSES, *shape, f"embedding.deduplicate={deduplicate}")
    words = (*options, "checkpoint.minutes=0", f"hydra.run.dir={tmp_path / 'run'}")
    assert run(["dlrm_hybrid", "train", *words]) == 0
    trained = read_run(tmp_path / "run")
    _, world = counter_of(trained, 10)
    calculated = world.bytes_by_class()[Traffic.EMBEDDING]
    assert calculated == pytest.approx(sent(trained)[Traffic.EMBEDDING], rel=0.03)
