"""Ctrl-C in what must not be cut off in the middle."""

import signal
import subprocess
import sys
from collections.abc import Generator

import pytest
from ctrl_c import press, press_elsewhere

from dlrm_hybrid.process import interrupts_wait, masked, stop_signals


@pytest.fixture
def seen() -> Generator[list[int], None, None]:
    """What a handler of the program gets, which raises nothing."""
    found: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGINT, before)


def test_the_first_waits_for_the_end_of_the_outer_block_and_the_second_does_not() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts_wait():
            with interrupts_wait():
                press()
                done.append("inner")
            done.append("outer")
        done.append("after")
    assert done == ["inner", "outer"]
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        press()
        with interrupts_wait():
            press()
            done.append("never")
    assert done == ["inner", "outer"]


def test_an_error_that_ctrl_c_has_caused_is_told_with_it() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_wait():
        press()
        raise ValueError("a child is gone")
    assert isinstance(caught.value.__context__, ValueError)
    with pytest.raises(ValueError, match="alone"), interrupts_wait():
        raise ValueError("alone")


@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_a_handler_of_the_program_gets_each(seen: list[int], times: int) -> None:
    with interrupts_wait():
        for _ in range(times):
            press()
        assert len(seen) == (times if times > 1 else 0)
    assert seen == [signal.SIGINT] * times


def test_it_waits_while_a_child_is_started_whatever_thread_gets_it() -> None:
    ignores = "import signal; print({2, 15} <= signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    for ctrl_c in (press, press_elsewhere):
        done: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            with masked():
                ctrl_c()
                done.append(subprocess.check_output([sys.executable, "-c", ignores], text=True))
            done.append("after")
        assert done == ["True\n"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_this_process_ignores_stays_ignored(number: int) -> None:
    """A shell lets its background jobs ignore Ctrl-C."""
    heard: list[int] = []
    (other,) = {signal.SIGTERM, signal.SIGINT} - {number}
    before = {one: signal.getsignal(one) for one in (number, other)}
    signal.signal(number, signal.SIG_IGN)
    try:
        with stop_signals(lambda one, _: heard.append(one)):
            signal.raise_signal(number)
            signal.raise_signal(other)
        assert heard == [other]
        assert signal.getsignal(number) is signal.SIG_IGN
        assert signal.getsignal(other) is before[other]
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
