"""What a process was asked to do by several signals."""

import signal
import sys
from types import FrameType

import pytest

from dlrm_hybrid.train.signals import INTERRUPTION, StopRequest


def severity_after(first: int, second: int, moment: int) -> tuple[int, int]:
    """The severity, if the second signal comes at a moment in the handler of the first; and theirs.

    Moments are the begin and the end of each call, where Python handles signals.
    """
    stop, moments = StopRequest(supervised=True), 0

    def strike(frame: FrameType, event: str, _: object) -> None:
        nonlocal moments
        if frame.f_code is StopRequest._on_signal.__code__:
            if moments == moment:
                stop._on_signal(second, None)
            moments += 1

    sys.setprofile(strike)
    try:
        stop._on_signal(first, None)
    finally:
        sys.setprofile(None)
    return stop.severity, moments


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_amid_the_handling_of_another_is_not_forgotten(first: int) -> None:
    (second,) = {signal.SIGTERM, signal.SIGINT} - {first}
    _, moments = severity_after(first, second, -1)
    assert moments > 1
    for moment in range(moments):
        assert severity_after(first, second, moment)[0] == INTERRUPTION
