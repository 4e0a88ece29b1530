"""The meter counts what travels: whole frames, to the byte, by class."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from channel_rows import frame, in_process
from hypothesis import given
from hypothesis import strategies as st
from patience import HANG_SECONDS

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.comm.metered import MeteredChannel, traffic_of
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.traffic import Counters, Tally, Traffic
from dlrm_hybrid.wire.frame import Frame, Kind, encode


@dataclass
class Recorder:
    """A channel that keeps the bytes it is given."""

    rank: int = 0
    sent: list[bytearray] = field(default_factory=list)

    def send(self, to: int, frame: Frame, dense_equivalent_bytes: int) -> None:
        self.sent.append(encode(frame))

    def receive(self, deadline_seconds: float) -> Frame:
        raise AssertionError("nothing is sent to it")

    def close(self) -> None: ...

    def abandon(self) -> None: ...


@given(st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 50), st.integers(0, 999))))
def test_what_is_counted_is_what_is_sent(frames: list[tuple[Kind, int, int]]) -> None:
    recorder = Recorder()
    metered = MeteredChannel(recorder, Counters(), SpanClock())
    for kind, size, dense_bytes in frames:
        metered.send(1, frame(0, 0, size, kind=kind), dense_bytes)
    tallies = metered.counters.sent.snapshot()
    assert sum(one.num_bytes for one in tallies.values()) == sum(map(len, recorder.sent))
    for traffic in Traffic:
        chosen = [
            (len(sent), dense_bytes)
            for sent, (kind, _, dense_bytes) in zip(recorder.sent, frames, strict=True)
            if traffic_of(kind) is traffic
        ]
        sums = [sum(numbers) for numbers in zip(*chosen, strict=True)] or [0, 0]
        assert tallies[traffic] == Tally(len(chosen), *sums)


def test_every_kind_has_a_class() -> None:
    classes = {
        Kind.ACTIVATION: "activation",
        Kind.ACTIVATION_GRADIENT: "activation_gradient",
        Kind.PUSH: "gradient_push",
        Kind.PULL: "parameter_pull",
        Kind.PARAMETERS: "parameter_pull",
        Kind.CONTRIBUTION: "gradient_push",
        Kind.RESULT: "gradient_push",
        Kind.LOOKUP: "embedding",
        Kind.ROWS: "embedding",
        Kind.UPDATE: "embedding",
    }
    for kind in Kind:
        assert str(traffic_of(kind)) == classes.get(kind, "control")


@pytest.mark.parametrize(
    ("kind", "stands_for"), [(Kind.PUSH, 32), (Kind.CONTRIBUTION, 0), (Kind.RESULT, 0)]
)
def test_what_trainers_say_to_agree_stands_for_no_gradients(kind: Kind, stands_for: int) -> None:
    one, other = (MeteredChannel(end, Counters(), SpanClock()) for end in pair())
    one.send(1, frame(0, 0, 8, kind=kind), stands_for)
    other.receive(HANG_SECONDS)
    sent, received = (
        counter.snapshot()[Traffic.GRADIENT_PUSH]
        for counter in (one.counters.sent, other.counters.received)
    )
    assert sent == received
    assert received.dense_equivalent_bytes == stands_for


def pair() -> tuple[Channel, Channel]:
    opener = in_process(2, Path())
    return opener(0), opener(1)


def test_a_frame_that_is_not_sent_is_not_counted() -> None:
    metered = MeteredChannel(in_process(1, Path())(0), Counters(), SpanClock())
    with pytest.raises(ValueError, match="itself"):
        metered.send(0, frame(0, 0), 0)
    assert set(metered.counters.sent.snapshot().values()) == {Tally()}


def test_phases_are_counted_apart() -> None:
    train, evaluate = Counters(), Counters()
    metered = MeteredChannel(Recorder(), train, SpanClock())
    metered.send(1, frame(0, 0), 0)
    metered.counters = evaluate
    metered.send(1, frame(0, 0), 0)
    metered.send(1, frame(0, 0), 0)
    assert train.sent.snapshot()[Traffic.GRADIENT_PUSH].messages == 1
    assert evaluate.sent.snapshot()[Traffic.GRADIENT_PUSH].messages == 2
