"""Schedules of one's own, in one file that nothing else knows of: batches stay in flight."""

import pytest
import torch
from reference_step import Dlrm, Trainer
from tiny_world import SEED, SGD, SMALL, TABLES, Layout, TinyWorld, columns, draw_batch

from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.parallel.schedule import Op, StageOps

TICKS = 11


def late_backward(stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
    """Forward of the batch just read, then backward of the one before."""
    forwards = tuple(Op("F", microbatch) for microbatch in range(microbatches))
    backwards = tuple(Op("B", microbatch, delay=1) for microbatch in range(microbatches))
    return forwards + backwards


def test_backward_computes_again_with_the_weights_of_then() -> None:
    # Its rows of the tables are those of forward: only tables that stay give plain training's bits.
    world = TinyWorld(SMALL, Layout(schedule=late_backward), table_lr=0.0)
    plain = Trainer(Dlrm(SMALL, TABLES, Precision.FLOAT32, SEED), SGD)
    for tick in range(TICKS):
        (found,) = world.step(tick, [draw_batch(SMALL, 16, tick)])
        if tick == 0:
            assert found.rows == 0
            continue
        batch = draw_batch(SMALL, 16, tick - 1)
        result = plain.step(*columns(batch), lr=world.lr, embedding_lr=0.0)
        assert found.loss_sum == float(result.loss) * 16
    weights = plain.tensors()
    first = TinyWorld(SMALL, Layout()).tensors()
    for name, tensor in world.tensors().items():
        assert torch.equal(tensor, weights[name]), name
        assert torch.equal(tensor, first[name]) == name.startswith("embedding")


def relay(stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
    """Every stage works on what its neighbours sent a tick before: nobody waits in a tick."""
    late = 2 * (stages - 1) - stage
    forwards = tuple(Op("F", number, delay=stage) for number in range(microbatches))
    backwards = tuple(Op("B", number, delay=late) for number in range(microbatches))
    return forwards + backwards


@pytest.mark.parametrize(
    ("schedule", "servers", "microbatches"),
    [(late_backward, 0, 2), (late_backward, 2, 1), (relay, 0, 1), (relay, 0, 2)],
)
def test_what_is_in_flight_is_saved_and_restored(
    schedule: StageOps, servers: int, microbatches: int
) -> None:
    cuts = ("bottom.2", "top.2")
    layout = Layout(cuts, servers=servers, microbatches=microbatches, schedule=schedule)
    unbroken = TinyWorld(SMALL, layout)
    losses = [_step(unbroken, tick) for tick in range(TICKS)]
    saved = unbroken.save(TICKS)
    flying = {name.split(".")[1] for name in saved["flight"]}
    assert flying == {str(worker.rank) for worker in unbroken.workers}
    resumed = TinyWorld(SMALL, layout)
    resumed.load(TICKS, saved)
    for tick in range(TICKS, 2 * TICKS):
        losses.append(_step(unbroken, tick))
        assert _step(resumed, tick) == losses[-1]
    found, first = resumed.tensors(), TinyWorld(SMALL, layout).tensors()
    for name, tensor in unbroken.tensors().items():
        assert torch.equal(found[name], tensor) and not torch.equal(first[name], tensor), name
    assert sum(losses[-6:]) < sum(losses[4:10])


def _step(world: TinyWorld, tick: int) -> float:
    *_, last = world.step(tick, [draw_batch(SMALL, 16, tick)])
    return last.loss_sum / 16
