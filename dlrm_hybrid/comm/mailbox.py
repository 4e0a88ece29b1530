"""A mailbox hands out frames in the order in which they are wanted, not that of arrival."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import NamedTuple, final

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.types import DeadlineError, DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind


class UnexpectedFrameError(DlrmError):
    """A frame arrived that nobody can want; the message names it."""


class Receive(NamedTuple):
    """The effect of waiting for a frame, and its key.

    Attributes:
        kind: of the frame.
        sender: rank of the sender.
        number: that of the frame, counted per kind.
        boundary: between stages `boundary` and `boundary + 1`, 0 where there is none.
        round: that of a collective before a push, 0 where there is none.
        microbatch: 0 where there is none.
        waits: False takes the frame only if it has arrived, else None.
    """

    kind: Kind
    sender: int
    number: int
    boundary: int = 0
    round: int = 0
    microbatch: int = 0
    waits: bool = True


FrameKey = tuple[Kind, int, int, int, int, int]


def key_of(frame: Frame | Receive) -> FrameKey:
    """The fields in which a frame and its request agree."""
    return frame.kind, frame.sender, frame.number, frame.boundary, frame.round, frame.microbatch


def _described(key: FrameKey) -> str:
    kind, sender, number, boundary, round_, microbatch = key
    parts = {"boundary": boundary, "round": round_, "microbatch": microbatch}
    named = [f"{name} {value}" for name, value in parts.items() if value]
    return ", ".join([f"{kind.name.lower()} {number} from rank {sender}", *named])


def answers_none(frame: Frame) -> bool:
    """Keep every frame for whoever waits for it."""
    return False


@dataclass(slots=True)
class Mailbox:
    """Keeps the frames of a channel that arrive before they are wanted.

    Attributes:
        channel: source of the frames.
        attempt: the current one; frames of another attempt are refused.
        capacity: most frames kept; if more come, two ranks disagree about what is to be sent.
        answer: handles a frame at once if nobody waits for its kind, and says whether it did. It
            may itself wait for frames here.
    """

    channel: Channel
    attempt: int
    capacity: int
    answer: Callable[[Frame], bool] = answers_none
    _frames: dict[FrameKey, Frame] = field(default_factory=dict[FrameKey, Frame], repr=False)

    def __len__(self) -> int:
        return len(self._frames)

    def take(self, request: Receive, deadline_seconds: float) -> Frame:
        """Wait for a frame and take it out.

        Raises:
            DeadlineError: the frame did not arrive in time; names the frame.
            UnexpectedFrameError: a frame of another attempt, a second one, or one too many arrived.
            PeerLostError: from the channel.
        """
        frame = self.take_unless(request, lambda: False, deadline_seconds)
        assert frame is not None
        return frame

    def late(self, request: Receive, deadline_seconds: float) -> DeadlineError:
        """The error for a frame that did not arrive in time."""
        return DeadlineError(
            f"rank {self.channel.rank}: {_described(key_of(request))} did not come within "
            f"{deadline_seconds:g} s; {len(self._frames)} other frames wait",
            [request.sender],
        )

    def pop(self, request: Receive) -> Frame | None:
        """Take out the frame if it is kept here, without receiving."""
        return self._frames.pop(key_of(request), None)

    def take_now(self, request: Receive) -> Frame | None:
        """Take out the frame if it has arrived, without waiting.

        Raises:
            UnexpectedFrameError: as `take`.
            PeerLostError: from the channel.
        """
        while (frame := self.pop(request)) is None:
            try:
                self._take_in(0.0)
            except DeadlineError:
                return None
        return frame

    def take_unless(
        self, request: Receive, is_off: Callable[[], bool], deadline_seconds: float
    ) -> Frame | None:
        """Wait for a frame as `take` does, but return None as soon as it is known not to come.

        Args:
            request: the frame's key.
            is_off: whether the frame will not come; called before each receive.
            deadline_seconds: how long to wait.

        Raises:
            DlrmError: as `take`, and what `answer` raises.
        """
        until = time.monotonic() + deadline_seconds
        while (frame := self.pop(request)) is None and not is_off():
            try:
                self._take_in(max(0.0, until - time.monotonic()))
            except DeadlineError:
                raise self.late(request, deadline_seconds) from None
        return frame

    def forget(self, sender: int) -> None:
        """Drop the frames kept from a rank that has left."""
        self._frames = {key: frame for key, frame in self._frames.items() if frame.sender != sender}

    def wait_until(self, is_done: Callable[[], bool], deadline_seconds: float) -> None:
        """Handle and keep frames until a condition holds.

        Args:
            is_done: the condition, called before each receive.
            deadline_seconds: longest silence.

        Raises:
            DeadlineError: no frame arrived in time.
            DlrmError: as `take`, and what `answer` raises.
        """
        while not is_done():
            self._take_in(deadline_seconds)

    def _take_in(self, deadline_seconds: float) -> None:
        self.accept(self.channel.receive(deadline_seconds))

    def accept(self, frame: Frame) -> None:
        """Answer a frame or keep it; raises as `take`, and what `answer` raises."""
        if not self.answer(frame):
            self.put(frame)

    def put(self, frame: Frame) -> None:
        """Keep a frame until it is wanted.

        Raises:
            UnexpectedFrameError: as `take`.
        """
        key = key_of(frame)
        if frame.attempt != self.attempt:
            fault = f"is of attempt {frame.attempt}; this is attempt {self.attempt}"
        elif key in self._frames:
            fault = "came twice"
        elif len(self._frames) == self.capacity:
            oldest = next(iter(self._frames))
            fault = f"is one too many: {self.capacity} wait already, first {_described(oldest)}"
        else:
            self._frames[key] = frame
            return
        raise UnexpectedFrameError(f"rank {self.channel.rank}: {_described(key)} {fault}")


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
        self._waiting: dict[FrameKey, Condition] = {}
        self._receives = False  # whether a thread is receiving
        self._is_given_up = False

    def take(self, request: Receive, deadline_seconds: float) -> Frame:
        """Wait for a frame that no other thread waits for, and take it out.

        Raises:
            GivenUpError: `give_up` was called, and the frame is not here.
            DlrmError: as `Mailbox.take`.
        """
        until = time.monotonic() + deadline_seconds
        with self._turn:
            try:
                while (frame := self._mailbox.pop(request)) is None:
                    if self._is_given_up:
                        raise GivenUpError("another thread of this process has failed")
                    left_seconds = until - time.monotonic()
                    if left_seconds <= 0:
                        raise self._mailbox.late(request, deadline_seconds)
                    if self._receives:
                        self._wait(key_of(request), left_seconds)
                    else:
                        self._receive(min(left_seconds, ATTENTION_SECONDS))
                return frame
            finally:
                self._hand_on()

    def take_now(self, request: Receive) -> Frame | None:
        """Take out the frame if it has arrived, without waiting; raises as `Mailbox.take`."""
        with self._turn:
            try:
                while (frame := self._mailbox.pop(request)) is None:
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

    def _wait(self, key: FrameKey, seconds: float) -> None:
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
