"""`schedule=dsp` in worlds with servers, trainers and compressed boundaries; what waits in them."""

from collections import Counter
from typing import Any

import pytest
import torch
from tiny_world import SMALL, Layout, TinyWorld, draw_batch, shares
from torch import Tensor

from dlrm_hybrid.compress.activation.codec import Key, Mask, Sections
from dlrm_hybrid.compress.activation.dct import ThresholdCodec
from dlrm_hybrid.parallel.schedule import Dsp
from dlrm_hybrid.wire.section import Dtype

CUTS = ("bottom.2", "top.2")
NONE = Dsp(delays=(0, 0, 0), staleness=(0, 0, 0))
STALE = Dsp(delays=(1, 1, 0), staleness=(4, 2, 0))
ROWS = 12


def step(world: TinyWorld, tick: int) -> float:
    """The loss of the batches that came to their end in this step, summed."""
    trainers = world.layout.trainers
    batches = shares(draw_batch(SMALL, ROWS * trainers, tick), trainers)
    return sum(one.loss_sum for one in world.step(tick, batches))


def test_inputs_that_wait_are_as_many_as_the_staleness() -> None:
    world = TinyWorld(SMALL, Layout(CUTS, servers=1, schedule=STALE))
    for tick in range(10):
        step(world, tick)
        state = world.save(tick + 1)
        for stage, (delay, staleness) in enumerate(((0, 4), (1, 2), (2, 0))):
            own = [name for name in state["flight"] if name.startswith(f"flight.{stage}.")]
            entered = [name for name in own if name.endswith(".entered.0")]
            assert len(entered) == max(0, min(tick + 1 - delay, staleness)), (tick, stage)
        world.load(tick + 1, state)


@pytest.mark.parametrize("servers", [0, 1])
def test_each_batch_that_is_read_is_learned_from_once(servers: int) -> None:
    world = TinyWorld(SMALL, Layout(CUTS, servers=servers, schedule=STALE))
    rows = sum(world.step(tick, [draw_batch(SMALL, ROWS, tick)])[-1].rows for tick in range(3))
    rows += world.drain(3)[-1].rows
    assert rows == 3 * ROWS
    assert [worker.client.settled() for worker in world.workers] == [3, 3, 3]
    # The pipeline fills again as at the start.
    assert [world.step(tick, [draw_batch(SMALL, ROWS, tick)])[-1].rows for tick in (3, 4, 5)] == [
        *(0, 0, ROWS)
    ]
    assert world.drain(6)[-1].rows == 2 * ROWS
    assert [worker.client.settled() for worker in world.workers] == [6, 6, 6]


class Watched:
    """The codec of DCT-MP, and what went through it at one end of a boundary."""

    def __init__(self) -> None:
        self._codec = ThresholdCodec(sparsity=0.7, dtype=Dtype.FLOAT32, allow_rice=False)
        self.selected: dict[tuple[int, int], Tensor] = {}
        self.encoded: Counter[tuple[int, int]] = Counter()
        self.gradients: dict[tuple[int, int], Tensor] = {}

    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Mask]:
        sections, mask = self._codec.encode(x_BN, key)
        assert mask is not None
        self.encoded[key.batch, key.boundary] += 1
        self.selected[key.batch, key.boundary] = torch.from_numpy(mask.copy()).long()
        return sections, mask

    def decode_gradient(
        self, sections: Sections, shape: torch.Size, mask: Mask, key: Key
    ) -> Tensor:
        found = self._codec.decode_gradient(sections, shape, mask, key)
        self.gradients[key.batch, key.boundary] = found.clone()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)


def test_gradients_come_back_where_the_forward_had_selected() -> None:
    # Computed again, a stage would select other activations: the first mask must last.
    ends: list[Watched] = []

    def codec() -> Any:
        ends.append(Watched())
        return ends[-1]

    world = TinyWorld(SMALL, Layout(CUTS, schedule=STALE), codec=codec, lr=0.5)
    for tick in range(8):
        step(world, tick)
    world.drain(8)
    boundaries = [(batch, boundary) for batch in range(8) for boundary in range(2)]
    assert sum((one.encoded for one in ends), Counter()) == Counter(boundaries)
    for one in ends:
        for key, gradient_BN in one.gradients.items():
            outside_N = gradient_BN.flatten().clone()
            outside_N[one.selected[key]] = 0
            assert not outside_N.any() and gradient_BN.any(), key
    assert {key for one in ends for key in one.gradients} == set(boundaries)
