"""A rank answers some frames whenever it waits for others."""

import pytest

from dlrm_hybrid.comm.in_process import in_process_channels
from dlrm_hybrid.comm.mailbox import Mailbox, Receive
from dlrm_hybrid.parallel.dense.server import Handle, HandlerTable
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.types import DeadlineError
from dlrm_hybrid.wire.frame import Frame, Kind


def frame(kind: Kind, sender: int, number: int) -> Frame:
    return Frame(kind=kind, sender=sender, attempt=0, number=number)


def test_frames_with_a_handler_are_answered_and_others_kept() -> None:
    server, worker = in_process_channels(2)
    taken: list[int] = []

    def handle(one: Frame) -> list[Outgoing]:
        taken.append(one.number)
        return [Outgoing(1, frame(Kind.WEIGHTS, 0, one.number), 0)]

    mailbox = Mailbox(server, 0, 9, HandlerTable(server, {Kind.FETCH: handle}))
    for kind, number in ((Kind.FETCH, 1), (Kind.REPORT, 2), (Kind.FETCH, 3), (Kind.REPORT, 4)):
        worker.send(0, frame(kind, 1, number), 0)
    assert mailbox.take(Receive(Kind.REPORT, 1, 2), 1.0).number == 2
    assert taken == [1]
    mailbox.wait_until(lambda: len(mailbox) == 1, 1.0)
    assert taken == [1, 3]
    assert mailbox.take(Receive(Kind.REPORT, 1, 4), 1.0).number == 4
    assert [worker.receive(0.0).number for _ in taken] == [1, 3]
    assert mailbox.take_now(Receive(Kind.REPORT, 1, 5)) is None
    with pytest.raises(DeadlineError):
        mailbox.wait_until(lambda: False, 0.0)


def test_what_a_handler_takes_in_while_it_waits_is_not_lost() -> None:
    server, worker = in_process_channels(2)
    handlers: dict[Kind, Handle] = {}
    mailbox = Mailbox(server, 0, 9, HandlerTable(server, handlers))

    def handle(one: Frame) -> list[Outgoing]:
        awaited = mailbox.take(Receive(Kind.PARAMETERS, 1, 5), 1.0)
        return [Outgoing(1, frame(Kind.COPIED, 0, awaited.number), 0)]

    handlers[Kind.SAVE] = handle
    for kind, number in ((Kind.SAVE, 1), (Kind.DECISION, 2), (Kind.PARAMETERS, 5)):
        worker.send(0, frame(kind, 1, number), 0)
    assert mailbox.take(Receive(Kind.DECISION, 1, 2), 1.0).number == 2
    assert worker.receive(0.0).number == 5
