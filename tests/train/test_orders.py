"""What one trainer is told, and what is forgotten of it."""

import pytest

from dlrm_hybrid.train.asynchronous.trainers import Trainer


@pytest.mark.parametrize("stages", [1, 2])
def test_each_worker_is_sent_every_order_once_and_the_done_ones_are_forgotten(stages: int) -> None:
    orders = Trainer(stages=stages, is_leaving=True)
    assert not orders.may_leave, "it has not begun"
    sent: dict[int, list[int]] = {worker: [] for worker in range(stages)}
    for number in range(20):
        orders.told.append({"do": "learn", "number": number})
        for worker in range(stages):
            orders.done[worker] = max(0, number - worker)
            for to, place, order in orders.unsent():
                assert order["number"] == place
                sent[to].append(place)
        slowest = number - (stages - 1)
        forgotten = [not order for order in orders.told]
        assert forgotten == [place < slowest for place in range(number + 1)]
    assert all(places == [*range(20)] for places in sent.values())
    orders.done = dict.fromkeys(range(stages), 20)
    assert orders.unsent() == []
    assert orders.told[-1] == {"do": "learn", "number": 19}, "whether it learns must be known"
    assert orders.may_leave
    orders.writing.add(0)
    assert not orders.may_leave, "a checkpoint waits for it"
