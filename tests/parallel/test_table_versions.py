"""Every lookup is answered with one certain version, whatever comes when, and how often."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.parallel.tables.order import (
    Apply,
    BatchOf,
    BatchOrder,
    PredictionOf,
    Resend,
    SendRows,
)
from dlrm_hybrid.types import BatchNumber, DlrmError, Version

SEEDS = st.integers(0, 2**32 - 1)
Message = tuple[str, BatchOf]


def messages(trainer: int, staleness: int, first: int, batches: int) -> Iterator[Message]:
    """What one trainer sends, in its order, and may send again: until it has the rows it waits."""
    asked = first
    for number in range(first, first + batches):
        while asked <= number + staleness:
            yield "lookup", BatchOf(trainer, BatchNumber(asked))
            asked += 1
        yield "update", BatchOf(trainer, BatchNumber(number))


class Trainer:
    """Sends its messages in order; an update waits for the rows of its batch."""

    def __init__(self, number: int, staleness: int, first: int, batches: int) -> None:
        self.left = list(messages(number, staleness, first, batches))
        self.sent: list[Message] = []
        self.has: dict[BatchOf, int] = {}

    @property
    def ready(self) -> bool:
        return bool(self.left) and (self.left[0][0] == "lookup" or self.left[0][1] in self.has)

    def next(self) -> Message:
        self.sent.append(self.left.pop(0))
        return self.sent[-1]


@given(st.integers(1, 4), st.integers(0, 5), st.integers(0, 9), st.integers(1, 8), SEEDS)
def test_versions_do_not_depend_on_order_or_repetition(
    trainers: int, staleness: int, first: int, batches: int, seed: int
) -> None:
    state = BatchOrder(staleness).begin(trainers, Version(first))
    world = [Trainer(number, staleness, first, batches) for number in range(trainers)]
    rng, version, kept = np.random.default_rng(seed), first, {}
    while any(trainer.left for trainer in world):
        able = [trainer for trainer in world if trainer.ready]
        assert able, f"deadlock: {state}"
        trainer = able[rng.integers(len(able))]
        if trainer.sent and rng.random() < 0.3:
            kind, of = trainer.sent[rng.integers(len(trainer.sent))]
        else:
            kind, of = trainer.next()
        before = state
        act = state.on_question if kind == "lookup" else state.on_update
        state, actions = act(of)
        for action in actions:
            if isinstance(action, Apply):
                assert action.step == version
                assert action.updates == tuple(BatchOf(n, version) for n in range(trainers))
                assert all(("update", one) in world[one.trainer].sent for one in action.updates)
                version += 1
            elif isinstance(action, Resend):
                assert kept[action.of] == world[action.of.trainer].has[action.of]
            else:
                for one in action.questions:
                    assert isinstance(one, BatchOf)
                    assert version == max(first, one.batch - staleness)
                    assert world[one.trainer].has.setdefault(one, version) == version
                    kept[one] = version
        assert state.version == version
        if kind == "update" and not actions and of.batch < before.updated[of.trainer]:
            assert state == before
        assert len(state.answered) + len(state.waiting) <= trainers * (staleness + 1)
    assert version == first + batches
    assert all(len(trainer.has) == batches + staleness for trainer in world)


def test_a_prediction_waits_for_its_version() -> None:
    state = BatchOrder(0).begin(1, Version(4))
    asked = PredictionOf(0, Version(5))
    state, actions = state.on_question(asked)
    assert not actions
    state, _ = state.on_question(BatchOf(0, BatchNumber(4)))
    state, actions = state.on_update(BatchOf(0, BatchNumber(4)))
    assert actions == (Apply((BatchOf(0, BatchNumber(4)),), 4), SendRows((asked,)))
    assert not state.waiting


def test_what_is_not_due_is_refused() -> None:
    state = BatchOrder(1).begin(2, Version(3))
    with pytest.raises(DlrmError, match=r"lookup of batch 5 by trainer 0: too early, .* batch 3"):
        state.on_question(BatchOf(0, BatchNumber(5)))
    with pytest.raises(DlrmError, match=r"update of batch 4 by trainer 1: too early, .* batch 3"):
        state.on_update(BatchOf(1, BatchNumber(4)))
    for batch in (3, 4):
        state, _ = state.on_update(BatchOf(0, BatchNumber(batch)))
    with pytest.raises(DlrmError, match=r"update of batch 5 by trainer 0: .* at version 3"):
        state.on_update(BatchOf(0, BatchNumber(5)))
    for batch in (3, 4):
        state, _ = state.on_update(BatchOf(1, BatchNumber(batch)))
    with pytest.raises(DlrmError, match=r"lookup of batch 5 by trainer 0: too late, .* version 4"):
        state.on_question(BatchOf(0, BatchNumber(5)))
