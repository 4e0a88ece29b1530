"""A stage on a device: all that it computes is there, and the host waits once for what it needs.

Fake tensors stand for a GPU: an operation on tensors of two devices, and each hidden wait for a
number, is an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_world import CROSS, DROPPING, MACHINE, PAPER, SEED, SMALL, draw_batch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dlrm_hybrid.compress.device import rows
from dlrm_hybrid.model import dlrm, placement
from dlrm_hybrid.model.dlrm import StageModel
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.optimizer import Adagrad, Adam, Constant, Momentum, Optimizer, Sgd
from dlrm_hybrid.model.placement import HOST, Placement
from dlrm_hybrid.model.spec import Partition
from dlrm_hybrid.parallel.dense.bucket import Bucket, ServerOptions
from dlrm_hybrid.parallel.dense.client import LocalClient
from dlrm_hybrid.parallel.dense.master import OptimizerConfig
from dlrm_hybrid.parallel.dense.sections import flat_views
from dlrm_hybrid.parallel.messages import message
from dlrm_hybrid.parallel.policies import Lockstep
from dlrm_hybrid.parallel.stage import Stage
from dlrm_hybrid.parallel.topology import lay_out
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.types import BatchNumber
from dlrm_hybrid.wire.frame import Kind

# Torch without CUDA can neither index nor differentiate fake tensors of a GPU.
DEVICE = torch.device("meta")
ROWS, NUMBER = 24, BatchNumber(0)
SPECS = {
    **{"small": SMALL, "paper": PAPER, "cross": CROSS, "machine": MACHINE, "dropping": DROPPING},
    "norm": replace(SMALL, batch_norm=True),
}


class _Zeros:
    """An array of zeros that is no tensor: fake tensors go with no others."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = shape

    def numpy(self) -> np.ndarray:
        return np.zeros(self.shape, np.int32)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of tensors that were fetched at a time from a fake GPU; zeros come in their place."""
    fetched: list[int] = []

    def zeros(tensors: Sequence[Tensor]) -> list[Any]:
        assert all(one.device == DEVICE for one in tensors)
        fetched.append(len(tensors))
        return [_Zeros(one.shape) if one.dim() else 0 for one in tensors]

    monkeypatch.setattr(dlrm, "draw_dense", lambda tensors, seed: None)
    for module in (placement, rows):
        monkeypatch.setattr(module, "fetched", zeros)
    with FakeTensorMode(allow_non_fake_inputs=False):
        yield fetched


def put(model: StageModel) -> StageModel:
    """The layers on a fake GPU, as `to` does it with tensors that are none."""
    moved: dict[Tensor, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, one in module.named_parameters(recurse=False):
            moved[one] = torch.nn.Parameter(torch.empty(one.shape, device=DEVICE))
            setattr(module, name, moved[one])
        for name, one in module.named_buffers(recurse=False):
            setattr(module, name, one.to(DEVICE))
    for module in model.modules():
        if flat := getattr(module, "_flat", ()):
            module._flat = tuple(moved[one] for one in flat)
    model._dense_parameters = dict(model.named_parameters())
    return model


def up(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.empty(tuple(tensor.shape), dtype=tensor.dtype)


CUTS = [(), ("bottom.1",), ("top.1",), ("bottom.1", "top.1")]
# Every model with every list of cuts and place of tables, and every two of each with a precision.
CASES = [
    (spec, cuts, [*Precision][(number + cut + place) % len(Precision)], tables)
    for number, spec in enumerate(SPECS)
    for cut, cuts in enumerate(CUTS)
    for place, tables in enumerate(("host", "device"))
]


@pytest.mark.parametrize(("name", "cuts", "precision", "tables"), CASES)
def test_all_of_a_stage_is_on_its_device(
    name: str, cuts: tuple[str, ...], precision: Precision, tables: str, waits: list[int]
) -> None:
    spec = SPECS[name]
    where = Placement(DEVICE, is_apart=True)
    beside = where if tables == "device" else HOST
    shape = (ROWS, len(spec.table_rows), spec.embedding_dim)
    pooled_BFD = torch.empty(shape, device=beside.device)
    carried: Tensor | None = None
    stages: list[Stage] = []
    for part in Partition.of(spec, cuts).stages:
        model = put(StageModel(spec, part, precision, SEED))
        stage = Stage(model, 1, 1e-3, placement=where, tables=beside)
        inputs = draw_batch(spec, ROWS, 0)
        inputs = replace(
            inputs, dense_BI=up(inputs.dense_BI), label_B=up(inputs.label_B), bags=None
        )
        stage.begin(NUMBER, inputs)
        stage.take_rows(NUMBER, pooled_BFD)
        carried = stage.forward(NUMBER, 0, None if carried is None else carried.cpu())
        stages.append(stage)
    assert waits == []
    for stage in reversed(stages):
        carried = stage.backward(NUMBER, 0, None if carried is None else carried.cpu())
        assert carried is None or carried.device == DEVICE
        assert waits == []
        result = stage.finish(NUMBER)
        assert {one.device for one in result.gradients.values()} == {DEVICE}
        has_rows = stage.model.part.has_interaction
        assert len(waits) == (stage.model.part.is_last or (has_rows and tables == "host"))
        if has_rows and tables == "device":
            assert result.pooled_gradient_BFD.device == DEVICE
        waits.clear()


OPTIMIZERS = [
    Sgd(),
    Momentum(),
    Adagrad(),
    Adam(),
    Adam(weight_decay=0.1, decoupled_weight_decay=True),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.name)
def test_optimizers_wait_for_no_device(optimizer: Optimizer) -> None:
    weight, gradient = (torch.empty(4, 3, device=DEVICE) for _ in range(2))
    schedule = OptimizerConfig(optimizer=optimizer, schedule=Constant(base_lr=0.1))
    client = LocalClient({"one": weight}, schedule, SpanClock())
    for _ in range(2):  # a number of a meta tensor cannot be read
        assert not [*client.push({"one": gradient})]


NAME = "top.0.weight"
ELSEWHERE = {NAME: torch.zeros(3, 2, device="meta")}
NAMED = rf"{NAME} is on meta, .* pass its \.cpu\(\)"


def test_replicas_servers_and_messages_refuse_tensors_of_another_device() -> None:
    with pytest.raises(ValueError, match=NAMED):
        flat_views(ELSEWHERE)
    with pytest.raises(ValueError, match=NAMED):
        message(Kind.WEIGHTS, 0, 0, 0, {}, ELSEWHERE)
    tensors = lay_out({NAME: (3, 2)}, {NAME: 0}, 1)
    optimizer = OptimizerConfig(optimizer=Sgd(), schedule=Constant(base_lr=0.1))
    options = ServerOptions(policy=Lockstep(), optimizers=[optimizer], check_every=1, attempt=0)
    with pytest.raises(ValueError, match=NAMED):
        Bucket(tensors, ELSEWHERE, options, ())
