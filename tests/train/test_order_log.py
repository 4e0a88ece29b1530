"""What is logged is read again, and a gate hands frames on in that order whenever they come."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_disk import fill, needs_mount, small_disk

from dlrm_hybrid.config import compose
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.run.rank.facts import check_record
from dlrm_hybrid.train.asynchronous.order_log import Gate, OrderLog, Taken, read_order
from dlrm_hybrid.types import DataError, ResourceError
from dlrm_hybrid.wire.frame import EVALUATION, Frame, Kind

VALUES = compose.values_of([])


def frame(kind: Kind, sender: int, number: int, microbatch: int = 0) -> Frame:
    return Frame(kind=kind, sender=sender, attempt=0, number=number, microbatch=microbatch)


def logged(path: Path, frames: list[Frame]) -> list[Taken]:
    with path.open("wb", buffering=0) as stream:
        log = OrderLog(path, stream)
        handlers = log.around(dict.fromkeys(Kind, lambda one: []))
        for one in frames:
            assert handlers[one.kind](one) == []
        log.add(Taken(Kind.DECISION, 2, 40, 8))
    return read_order(path)


def test_what_changes_a_server_is_logged(tmp_path: Path) -> None:
    frames = [
        frame(Kind.PULL, 0, 0),
        frame(Kind.PUSH, 3, 2**40),
        frame(Kind.FETCH, 1, 5),
        frame(Kind.LOOKUP, 1, 7, EVALUATION),
        frame(Kind.LOOKUP, 1, 7),
        frame(Kind.UPDATE, 1, 7),
    ]
    assert logged(tmp_path / "order.bin", frames) == [
        Taken(Kind.PULL, 0, 0),
        Taken(Kind.PUSH, 3, 2**40),
        Taken(Kind.LOOKUP, 1, 7),
        Taken(Kind.UPDATE, 1, 7),
        Taken(Kind.DECISION, 2, 40, 8),
    ]


@needs_mount
def test_an_order_that_a_full_disk_refuses_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        path = disk / "order.bin"
        with path.open("wb", buffering=0) as stream:
            log = OrderLog(path, stream)
            log.add(Taken(Kind.PUSH, 1, 1))
            fill(disk)
            with pytest.raises(ResourceError, match=f"{path}: .*No space left"):
                for number in range(1000):
                    log.add(Taken(Kind.PUSH, 1, number))
        assert read_order(path)[0] == Taken(Kind.PUSH, 1, 1)


@settings(max_examples=50)
@given(
    st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=2))
    | st.dictionaries(st.sampled_from(["sync", "model", "x"]), st.none() | st.integers())
)
@example(json.loads("[" * 150 + "]" * 150))
@example({"sync": {}})
def test_no_record_of_anybody_is_more_than_data(tmp_path: Path, config: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=f"sync.replay: {tmp_path}/config.json: "):
        check_record(tmp_path, VALUES)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="cannot be read"):
        check_record(tmp_path, VALUES)


def test_a_broken_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "order.bin"
    path.write_bytes(bytes(15))
    with pytest.raises(DataError, match="15 bytes are no whole records"):
        read_order(path)
    path.write_bytes(bytes(16))
    with pytest.raises(DataError, match="0 is not a valid Kind"):
        read_order(path)


@given(st.permutations([(sender, number) for sender in range(3) for number in range(4)]), st.data())
def test_a_gate_keeps_the_order(order: list[tuple[int, int]], data: st.DataObject) -> None:
    handled: list[tuple[int, int]] = []
    sent: list[Outgoing] = []

    def handle(one: Frame) -> list[Outgoing]:
        assert len(sent) == len(handled)  # all before has been sent
        handled.append((one.sender, one.number))
        return [Outgoing(one.sender, one, 0)]

    gate = Gate(handle, iter([Taken(Kind.PUSH, *one) for one in order]))
    coming = data.draw(st.permutations(order))
    for sender, number in coming:
        for outgoing in gate.take(frame(Kind.PUSH, sender, number)):
            sent.append(outgoing)
    assert handled == order and gate.due is None
