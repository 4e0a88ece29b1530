"""Threads that share a replica, a residual and a connection: nothing is lost, all is in order."""

import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANG_SECONDS
from server_world import SHAPES, World, assert_same, drawn, gappy_gradients_of
from test_asynchronous_servers import assert_moved, dyadic
from test_compressed_servers import sparsifier
from torch import Tensor

from dlrm_hybrid.comm.in_process import in_process_channels
from dlrm_hybrid.comm.mailbox import GivenUpError, Mailbox, SharedMailbox
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.compress.gradient.error_feedback import Drain
from dlrm_hybrid.compress.gradient.methods.thresholded import DrainMode
from dlrm_hybrid.compress.update import DenseUpdate, decode
from dlrm_hybrid.model.optimizer import Constant
from dlrm_hybrid.parallel.dense.client import ServerClient
from dlrm_hybrid.parallel.dense.server import serve
from dlrm_hybrid.parallel.dense.threads import thread_clients
from dlrm_hybrid.parallel.effects import Port
from dlrm_hybrid.parallel.policies import Asynchronous
from dlrm_hybrid.parallel.runners import ProcessRunner
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.traffic import Counters
from dlrm_hybrid.wire.frame import Frame, Kind

LR = 0.5
Values = dict[str, Tensor]


@contextmanager
def hasty() -> Iterator[None]:
    """The interpreter changes threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def zeros() -> Values:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def given_by(thread: int, turn: int) -> Values:
    return dyadic(gappy_gradients_of(thread, turn))


class Process:
    """A worker with threads, and a server in a thread of its own, which keeps what is pushed."""

    def __init__(self, threads: int, drain: DrainMode = "none") -> None:
        policy = Asynchronous(1, threads=threads)
        make = sparsifier(0.9, drain=drain)
        values = dyadic(drawn(0))
        self.world = world = World(
            1, policy, schedule=Constant(base_lr=LR), values=values, make=make
        )
        ends = in_process_channels(2)
        self._ends = [MeteredChannel(end, Counters(), SpanClock()) for end in ends]
        self.client = ServerClient(
            Port(topology=world.topology, rank=0, attempt=0, transmit=self._ends[0].send),
            *(world.tensors, world.replicas[0], policy, world.compressors[0], SpanClock()),
        )
        self.clients = thread_clients(self.client, threads, threading.Lock(), SpanClock())
        self.mailbox = SharedMailbox(Mailbox(self._ends[0], 0, 2 * threads))
        self.runner = ProcessRunner(
            mailbox=self.mailbox, patience_seconds=HANG_SECONDS, clock=SpanClock()
        )
        self.pushes: list[Frame] = []

    def run(self, turns: int) -> None:
        """Let each thread push so often; the replica is settled before and after."""
        with hasty(), ThreadPoolExecutor(len(self.clients) + 1) as pool:
            serving = pool.submit(self._serve)
            try:
                self.runner.run(self.client.refresh(whole=False))
                begin = threading.Barrier(len(self.clients))
                made = [
                    pool.submit(self._push, thread, turns, begin)
                    for thread in range(len(self.clients))
                ]
                for one in made:
                    one.result()
                self.runner.run(self.client.refresh(whole=False))
            finally:
                goodbye = Frame(kind=Kind.GOODBYE, sender=0, attempt=0, number=0)
                self._ends[0].send(1, goodbye, 0)
            serving.result()

    def _push(self, thread: int, turns: int, begin: threading.Barrier) -> None:
        client = self.clients[thread]
        begin.wait(HANG_SECONDS)
        for turn in range(turns):
            self.runner.run(client.pull())
            self.runner.run(client.push(given_by(thread, turn)))

    def _serve(self) -> None:
        server = self.world.servers[1]

        def handle(frame: Frame):
            if frame.kind is Kind.PUSH:
                self.pushes.append(frame)
            return server.handle(frame)

        serve(self._ends[1], {Kind.PUSH: handle, Kind.PULL: handle}, {0}, HANG_SECONDS)

    def pushed(self) -> Values:
        """The sum of all pushes."""
        total = zeros()
        for push in self.pushes:
            update = decode(push.sections, "push")
            for place, sum_N in enumerate(total.values()):
                if isinstance(update, DenseUpdate):
                    sum_N.view(-1).numpy()[:] += update.values_of(place)
                    continue
                first_k, end_k = update.offsets_E[place : place + 2]
                sum_N.view(-1).numpy()[update.indices_K[first_k:end_k]] += update.values_of(place)
        return total


def given_sum(threads: int, turns: int) -> Values:
    total = zeros()
    for thread in range(threads):
        for turn in range(turns):
            for name, gradient in given_by(thread, turn).items():
                total[name] += gradient
    return total


@settings(max_examples=12, deadline=None)
@given(
    threads=st.integers(1, 4),
    turns=st.integers(1, 25),
    drain=st.sampled_from(["none", "flush", "discard"]),
)
def test_what_threads_give_is_pushed_kept_or_drained(
    threads: int, turns: int, drain: DrainMode
) -> None:
    """Exactly: dyadic gradients. Answers carry digests, so those out of order would be refused."""
    process = Process(threads, drain)
    process.run(turns)
    world = process.world
    assert [push.number for push in process.pushes] == [*range(threads * turns)]
    pushed, total = process.pushed(), given_sum(threads, turns)
    held = world.compressors[0].tensors()
    for name, gradient in total.items():
        left = gradient - pushed[name] - held[f"{name}.residual"]
        if drain != "discard":
            assert not left.any()
        assert float(left.double().sum()) == float(held[f"{name}.discarded"][0])
    first = dyadic(drawn(0))
    weights = {name: value for name, value in world.held().items() if name in SHAPES}
    for name, value in first.items():  # the order of threads decides the sign of a zero
        assert torch.equal(weights[name], value - LR * pushed[name]), name
    assert_same(world.replicas[0], weights)
    assert_moved(weights, first)
    assert_drained(held, drain, threads * turns)


def assert_drained(held: Mapping[str, Tensor], mode: DrainMode, pushes: int) -> None:
    """At pushes of the process that depend on their numbers alone."""
    drain = Drain(mode=mode, every=5, seed=3, trainer=0)
    for name in SHAPES:
        due = sum(drain.is_due(name, number) for number in range(pushes))
        assert held[f"{name}.drains"].tolist() == [due]


@pytest.mark.parametrize("threads", [1, 3])
def test_pushes_are_counted_as_old_as_if_threads_took_turns(threads: int) -> None:
    process = Process(threads)
    process.run(40)
    (staleness,) = process.world.servers[1].staleness().values()
    assert staleness.count == 40 * threads
    assert staleness.mean == pytest.approx(threads - 1, abs=0.1)


def test_a_thread_that_fails_while_it_waits_lets_the_others_go_on() -> None:
    process = Process(2)
    one, other = process.clients
    with ThreadPoolExecutor(2) as pool:
        process.runner.run(one.push(given_by(0, 0)))
        fails = pool.submit(process.runner.run, one.pull())  # nobody answers
        turn = other._pulling
        while not turn.locked():
            assert not fails.done()
        waits = pool.submit(process.runner.run, other.pull())  # for its turn; nothing else is due
        process.mailbox.give_up()
        with pytest.raises(GivenUpError) as raised:  # held, as by whoever is to tell of it
            fails.result(HANG_SECONDS)
        assert waits.result(HANG_SECONDS) is None
        assert raised.value is not None
