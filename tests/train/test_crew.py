"""Batches are dealt out to threads in turns, and told of in their order."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANG_SECONDS

from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.train.asynchronous.crew import Shares


def batch(number: int) -> Batch:
    return Batch(np.zeros((1, 13), np.float32), np.zeros((26, 1), np.int64), np.full(1, number))


@pytest.fixture(autouse=True)
def hasty() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@settings(max_examples=40, deadline=None)
@given(
    first=st.integers(0, 9),
    threads=st.integers(1, 4),
    leases=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    data=st.data(),
)
def test_each_batch_is_learned_once_by_its_thread(
    first: int, threads: int, leases: list[int], data: st.DataObject
) -> None:
    """A lease comes only when so many batches are learned: less than those that came before it."""
    ends = np.cumsum(leases).tolist()
    due = [0, *(data.draw(st.integers(0, end - 1)) for end in ends[:-1])]
    told: list[int] = []
    numbers = count()
    held = [0]

    def read() -> Batch | None:
        come = max(end for end, after in zip(ends, due, strict=True) if len(told) >= after)
        if held[0] == come:
            return None
        held[0] += 1
        return batch(first + next(numbers))

    shares = Shares(first, threads, read, lambda metrics: told.append(metrics.rows))
    taken: list[list[int]] = [[] for _ in range(threads)]

    def work(thread: int) -> None:
        while (share := shares.next(thread)) is not None:
            number, got = share
            assert got.label_B.tolist() == [number]
            taken[thread].append(number)
            shares.finish(number, StepMetrics(rows=number))

    with ThreadPoolExecutor(threads) as pool:
        for one in [pool.submit(work, thread) for thread in range(threads)]:
            one.result(HANG_SECONDS)
    every = range(first, first + ends[-1])
    assert told == [*every]
    for thread, numbers_here in enumerate(taken):
        assert numbers_here == [number for number in every if number % threads == thread]


def test_nobody_waits_for_a_thread_that_has_failed() -> None:
    coming = [batch(0)]
    shares = Shares(0, 2, lambda: coming.pop() if coming else None, lambda metrics: None)
    assert shares.next(0) is not None
    got: list[object] = [0]
    waiting = threading.Thread(target=lambda: got.append(shares.next(1)))
    waiting.start()
    shares.stop()
    waiting.join(HANG_SECONDS)
    assert got == [0, None]
    assert shares.next(0) is None
