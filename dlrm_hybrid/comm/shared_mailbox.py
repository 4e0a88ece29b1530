"""A mailbox shared by the threads of a process: a waiting thread receives for all of them."""

from __future__ import annotations

import time
from threading import Condition, Lock
from typing import final

from dlrm_hybrid.comm.mailbox import Key, Mailbox, Receive, key_of
from dlrm_hybrid.types import DeadlineError, DlrmError
from dlrm_hybrid.wire.frame import Frame

# How long a receiving thread takes to notice that another has failed.
ATTENTION_SECONDS = 0.2


class GivenUpError(DlrmError):
    """Another thread of this process has failed, and has the cause."""


@final
class SharedMailbox:
    """Hands frames to threads: one waiting thread receives, and wakes those it receives for.

    Once it has its own frame, the next one receives. So a frame passes between threads only where
    it must, and no further thread is needed.

    Args:
        mailbox: that of the process; while threads use this one, nobody else may use it.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._turn = Lock()
        self._waiting: dict[Key, Condition] = {}
        self._receives = False  # whether a thread is receiving
        self._is_given_up = False

    def take(self, wanted: Receive, deadline_seconds: float) -> Frame:
        """Wait for a frame that no other thread waits for, and take it out.

        Raises:
            GivenUpError: `give_up` was called, and the frame is not here.
            DlrmError: as `Mailbox.take`.
        """
        until = time.monotonic() + deadline_seconds
        with self._turn:
            try:
                while (frame := self._mailbox.pop(wanted)) is None:
                    if self._is_given_up:
                        raise GivenUpError("another thread of this process has failed")
                    left_seconds = until - time.monotonic()
                    if left_seconds <= 0:
                        raise self._mailbox.late(wanted, deadline_seconds)
                    if self._receives:
                        self._wait(key_of(wanted), left_seconds)
                    else:
                        self._receive(min(left_seconds, ATTENTION_SECONDS))
                return frame
            finally:
                self._hand_on()

    def take_now(self, wanted: Receive) -> Frame | None:
        """Take out the frame if it has arrived, without waiting; raises as `Mailbox.take`."""
        with self._turn:
            try:
                while (frame := self._mailbox.pop(wanted)) is None:
                    if self._receives or not self._receive(0.0):
                        return None
                return frame
            finally:
                self._hand_on()  # a thread that began to wait meanwhile left receiving to this one

    def give_up(self) -> None:
        """Make all threads fail that wait, now or later, for a frame that has not arrived."""
        with self._turn:
            self._is_given_up = True
            for waiting in self._waiting.values():
                waiting.notify()

    def _hand_on(self) -> None:
        """Let another waiting thread receive, now that this one has stopped."""
        if self._waiting and not self._receives:
            next(iter(self._waiting.values())).notify()

    def _wait(self, key: Key, seconds: float) -> None:
        assert key not in self._waiting, f"two threads wait for {key}"
        waiting = self._waiting[key] = Condition(self._turn)
        try:
            waiting.wait(seconds)
        finally:
            del self._waiting[key]

    def _receive(self, seconds: float) -> bool:
        """Receive a frame for any thread; False if none came in time."""
        frame: Frame | None = None
        self._receives = True
        self._turn.release()
        try:
            try:
                frame = self._mailbox.channel.receive(seconds)
            except DeadlineError:
                return False
            self._mailbox.accept(frame)
        finally:
            self._turn.acquire()
            self._receives = False
            if frame is not None and (waiting := self._waiting.get(key_of(frame))) is not None:
                waiting.notify()
        return True
