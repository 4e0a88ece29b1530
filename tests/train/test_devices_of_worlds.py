"""Worlds whose workers compute on a device learn what those on the host learn.

The CPU stands for a device: all that a GPU is given and gives back is copied, and gradients are
selected by what selects them there.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from outside_model import DeepFm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlrm_hybrid import World
from dlrm_hybrid.bags import Bags
from dlrm_hybrid.compress import Dct
from dlrm_hybrid.compress.device.feedback import DeviceFeedback
from dlrm_hybrid.config import compose
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.model import placement
from dlrm_hybrid.model.interaction import Cross
from dlrm_hybrid.model.own import OwnModel
from dlrm_hybrid.model.placement import HOST, Placement
from dlrm_hybrid.model.row_storage import IN_MEMORY
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.parallel.dense.client import DeviceClient, LocalClient
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import engine as build_engine
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.train.in_process import InProcessEngine
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.types import ResourceError
from dlrm_hybrid.world.settings import settings_of

DEVICE = Placement(torch.device("cpu"), is_apart=True)
GPU = Placement(torch.device("cuda", 0), is_apart=True)
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
PLACES = [pytest.param(DEVICE, id="cpu"), pytest.param(GPU, marks=NO_GPU, id="gpu")]
SPEC = ModelSpec(embedding_dim=8, bottom=(13, 32, 16, 8), top=(32, 16, 1), table_rows=(40, 7, 300))
SPECS: Mapping[str, ModelSpec | OwnModel] = {
    "cross": replace(SPEC, interaction=Cross(layers=2, rank=8), dropout=0.2, batch_norm=True),
    "own": OwnModel(
        module=DeepFm, table_rows=SPEC.table_rows, num_dense=13, embedding_dim=SPEC.embedding_dim
    ),
}
STEPS, FEW_STEPS, ROWS = 200, 10, 16
LONG = ("single", "dct")
Keys = Mapping[str, Any]
SINGLE: Keys = {"parallel.trainers": 1, "parallel.cuts": [], "parallel.servers": 0}
HYBRID: Keys = {
    **{"parallel.trainers": 2, "parallel.cuts": ["bottom.2", "top.1"], "parallel.servers": 1},
    **{"activation": "dct", "activation.sparsity": 0.5},
}
DCT: Keys = {**HYBRID, "gradient": "dct", "gradient.density": 0.1}
WORLDS: Mapping[str, Keys] = {
    "single": SINGLE,
    "adam": {**SINGLE, "optimizer": "adam", "optimizer.lr": 0.01, "embedding.lr": 0.1},
    "cross": {**SINGLE, "optimizer.weight_decay": 1e-3},
    "micro-batches": {
        **SINGLE,
        "parallel.cuts": ["top.1"],
        "schedule": "gpipe",
        "schedule.microbatches": 4,
    },
    "dense": HYBRID,
    "dct": DCT,
    "own": {**DCT, "gradient": "deft", "parallel.cuts": ["bottom2", "top1"]},
    "levels": {
        **DCT,
        "gradient.precision": "levels",
        "activation.bits": 4,
        "pull.precision": "levels",
    },
    "terngrad": {**HYBRID, "gradient": "terngrad"},
    "dsp, bounded": {
        **{**DCT, "schedule": "dsp", "schedule.delays": [1, 1, 0], "schedule.staleness": [2, 1, 0]},
        **{"sync": "bounded", "sync.staleness": 1},
    },
    "served": {**DCT, "embedding": "served", "parallel.table_servers": 1},
    "tables": {**SINGLE, "embedding.optimizer": "rowwise_adagrad"},
    "tables, adam": {**SINGLE, "embedding.optimizer": "adam"},
    "tables, gpipe": {
        **{**SINGLE, "parallel.cuts": ["bottom.2", "top.1"]},
        **{"schedule": "gpipe", "schedule.microbatches": 4},
    },
    "tables, dsp": {
        **{**DCT, "parallel.trainers": 1},
        **{"schedule": "dsp", "schedule.delays": [1, 1, 0], "schedule.staleness": [2, 1, 0]},
    },
}


def engine_of(name: str, where: Placement) -> InProcessEngine:
    keys = {
        **{"train.batch_size": ROWS, "optimizer.lr": 0.1, "sync.check_every": 1},
        **({} if name == "served" else {"embedding.kernel": "numba"}),
        **WORLDS[name],
    }
    spec = SPECS.get(name, SPEC)
    config = settings_of(spec, "in_process", {}, None, keys).config
    layout = build_world.layout(config, spec, STEPS, attempt=0)
    assert layout.placement == HOST
    there = where if name.startswith("tables") else HOST
    layout = replace(layout, placement=where, tables=there)
    return build_engine.engine_of(layout, None, IN_MEMORY)


def batches(trainers: int) -> Iterator[list[Batch]]:
    """Of all trainers; labels that the features explain, so that weights move."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        dense_BI = np.log1p(rng.pareto(1, (trainers * ROWS, 13))).astype(np.float32)
        ids_FB = np.stack([rng.integers(0, rows, trainers * ROWS) for rows in SPEC.table_rows])
        label_B = (dense_BI[:, 0] + rng.random(trainers * ROWS) > 1.2).astype(np.float32)
        parts = [slice(one * ROWS, (one + 1) * ROWS) for one in range(trainers)]
        yield [Batch(dense_BI[one], Bags(ids_FB[:, one].copy()), label_B[one]) for one in parts]


def weights(engine: InProcessEngine) -> dict[str, Tensor]:
    return {one.name: one.view.clone() for one in engine.pieces()}


def losses(engine: InProcessEngine, steps: int) -> list[float]:
    trainers = len(engine.ranks.workers) // len(engine.evaluators)
    return [
        metrics.loss_sum / max(1, metrics.rows)
        for metrics in map(engine.learn, islice(batches(trainers), steps))
    ]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "name",
    # `dct` is `dense` with less sent, `tables, gpipe` has the micro-batches.
    [
        pytest.param(one, marks=pytest.mark.slow if one in ("dense", "micro-batches") else ())
        for one in WORLDS
    ],
)
def test_a_device_learns_what_the_host_learns(name: str, place: Placement) -> None:
    host, device = engine_of(name, HOST), engine_of(name, place)
    before = weights(device)
    bound = 1e-4 if place is GPU else 1e-5
    steps = STEPS if name in LONG and place is GPU else FEW_STEPS
    there, here = losses(device, steps), losses(host, steps)
    np.testing.assert_allclose(there, here, rtol=0, atol=bound)
    after = weights(device)
    for one in SPECS.get(name, SPEC).dense_shapes():
        assert (after[one] - before[one]).abs().max() > 1e-4, one
    ((batch, *_),) = islice(batches(1), 1)
    for engine in (host, device):
        engine.take_masters()
    torch.testing.assert_close(
        *(engine.predict(0, batch) for engine in (device, host)), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NO_GPU, id="gpu")])
def test_processes_learn_by_dct_what_one_process_learns(device: str) -> None:
    """Of one trainer, for whom neither TorchRec nor FBGEMM need be there."""
    losses_of_worlds: list[list[float]] = []
    for world_of in (World.in_process, World.processes):
        with world_of(
            SPEC,
            trainers=1,
            cuts=["bottom.2", "top.1"],
            servers=1,
            gradient=Dct(density=0.1),
            batch_size=ROWS,
            config={"device": device, "embedding.kernel": "numba", "optimizer.lr": 0.1},
        ) as world:
            parts = [part for (part,) in islice(batches(1), FEW_STEPS)]
            rows = [(part.dense_BI, part.bags, part.label_B) for part in parts]
            losses_of_worlds.append([world.step(part).loss for part in rows])
    np.testing.assert_allclose(*losses_of_worlds, rtol=0, atol=1e-6)


def test_gradients_are_selected_where_they_are() -> None:
    of_levels, of_terngrad = (engine_of(name, DEVICE).ranks for name in ("levels", "terngrad"))
    on_device = [
        [isinstance(one.compression.gradients, DeviceFeedback) for one in ranks.learners]
        for ranks in (of_levels, of_terngrad)
    ]
    assert all(on_device[0]) and not any(on_device[1])
    assert all(isinstance(one.client, DeviceClient) for one in of_levels.workers)
    assert all(
        isinstance(one.client, LocalClient) for one in engine_of("single", DEVICE).ranks.workers
    )


class Copies(TorchDispatchMode):
    """Counts the copies of a step, and what the host reads of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "fetched_shapes"),
    [
        # Loss, number of right answers, gradient of the pooled rows; up go dense features, labels
        # and pooled rows.
        ("single", [(), (), (ROWS, 3, 8)]),
        # The gradient stays; up go dense features, labels and ids.
        ("tables", [(), ()]),
    ],
)
def test_a_step_waits_once_and_copies_what_it_must(
    name: str, fetched_shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, fetched = engine_of(name, DEVICE), placement.fetched
    waits: list[list[tuple[int, ...]]] = []

    def counted(tensors: Any) -> Any:
        waits.append([tuple(one.shape) for one in tensors])
        return fetched(tensors)

    monkeypatch.setattr(placement, "fetched", counted)
    (first, second) = islice(batches(1), 2)
    engine.learn(first)
    waits.clear()
    with Copies() as copies:
        engine.learn(second)
    assert waits == [fetched_shapes]
    assert copies.counts == {"_to_copy": 3, "copy_": len(fetched_shapes)}


@pytest.mark.parametrize(
    ("keys", "numbers"),
    [
        ({"device": "cuda"}, [0, 1, 0, 1, 0, 1]),
        ({"device": "cuda:1"}, [1] * 6),
        # Trainers 0 and 2 are on one machine, trainer 1 on the other.
        ({"device": "cuda", "parallel.machines": 2}, [0, 1, 0, 1, 0, 1]),
        ({"device": "cuda", "parallel.machines": 3}, [0, 1, 0, 1, 0, 1]),
        ({"device": "cuda", "parallel.cuts": [], "parallel.machines": 3}, [0, 0, 0]),
    ],
)
def test_workers_of_a_machine_take_its_devices_in_turn(
    keys: Keys, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    keys = {"parallel.trainers": 3, "parallel.cuts": ["top.1"], "parallel.servers": 1, **keys}
    texts = [f"{name}={json.dumps(value)}" for name, value in keys.items()]
    config = validate(compose.values_of(["parallel=hybrid", *texts]))
    topology = build.topology(config)
    places = [build_world.placement(config, topology, rank) for rank in range(topology.size)]
    assert [one.device for one in places[:-1]] == [torch.device("cuda", one) for one in numbers]
    assert all(one.is_apart for one in places[:-1]) and places[-1] == HOST


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tables_are_beside_the_layers_or_on_the_host(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = validate(compose.values_of(["device=cuda", f"embedding.device={device}"]))
    layout = build_world.layout(config, SPEC, STEPS, attempt=0)
    assert layout.placement == GPU
    assert layout.tables == (GPU if device == "cuda" else HOST)


@pytest.mark.parametrize(("device", "devices"), [("cuda", 0), ("cuda:2", 2)])
def test_a_device_that_is_not_there_is_named(
    device: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    config = validate(compose.values_of([f"device={device}"]))
    with pytest.raises(ResourceError, match=rf"^device = {device}: .* sees {devices} CUDA devices"):
        build_world.placement(config, build.topology(config), 0)


@pytest.mark.parametrize(
    ("name", "after"),
    [
        *((name, DEVICE) for name in ("adam", "dsp, bounded", "tables, adam")),
        *((name, HOST) for name in ("levels", "tables, adam", "tables, dsp")),
    ],
    ids=lambda one: one if isinstance(one, str) else "device" if one == DEVICE else "host",
)
def test_a_run_resumes_on_the_device_or_on_the_host(name: str, after: Placement) -> None:
    unbroken, first, second = (engine_of(name, one) for one in (DEVICE, DEVICE, after))
    steps, saved = 10, 6
    expected = losses(unbroken, steps)[saved:]
    losses(first, saved)
    values = weights(first)
    for piece in second.ranks.tables:
        piece.view.copy_(values[piece.name])
    second.restart(Progress(step=saved, samples=0), values)
    trainers = len(second.ranks.workers) // len(second.evaluators)
    found = [
        metrics.loss_sum / max(1, metrics.rows)
        for metrics in map(second.learn, islice(batches(trainers), saved, steps))
    ]
    np.testing.assert_allclose(found, expected, rtol=0, atol=0 if after is DEVICE else 1e-5)
