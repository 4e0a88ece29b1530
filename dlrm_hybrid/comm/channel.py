"""How a rank sends frames to other ranks and receives theirs."""

from __future__ import annotations

from typing import Protocol

from dlrm_hybrid.wire.frame import Frame


class Channel(Protocol):
    """One rank's end of the network.

    Frames of one sender arrive in the order in which they were sent, each once. Of several threads
    one at a time may send, and one at a time receive; to close and to abandon it, one is left.
    """

    @property
    def rank(self) -> int:
        """Whose end this is."""
        ...

    def send(self, to: int, frame: Frame, dense_equivalent_bytes: int) -> None:
        """Send a frame; it is encoded before this returns, and the receiver is not waited for.

        Args:
            to: rank of the receiver.
            frame: its tensors may change as soon as this returns.
            dense_equivalent_bytes: what the frame would have carried as plain float32.

        Raises:
            ValueError: `to` is this rank, or no rank of the run, or the frame names another sender.
            ConfigError: the message is too long for the network.
            PeerLostError: the receiver is gone.
        """
        ...

    def receive(self, deadline_seconds: float) -> Frame:
        """The next frame, from anyone.

        Args:
            deadline_seconds: how long to wait for it; 0 takes what has come already.

        Raises:
            PeerLostError: a rank went without saying goodbye.
            DeadlineError: nothing came in time.
        """
        ...

    def close(self) -> None:
        """Say goodbye: return when every other rank has all frames that were sent to it.

        Raises:
            PeerLostError: a rank went without saying goodbye.
            DeadlineError: a rank did not take its frames in time.
        """
        ...

    def abandon(self) -> None:
        """Leave at once, without a goodbye: to the others this rank is lost."""
        ...


def check_outgoing(rank: int, world_size: int, to: int, frame: Frame) -> None:
    """Raise ValueError unless `rank` may send this frame to `to`."""
    if to == rank:
        raise ValueError(f"rank {rank} sends a frame to itself")
    if not 0 <= to < world_size:
        raise ValueError(f"rank {rank} sends a frame to rank {to}; ranks are 0 to {world_size - 1}")
    if frame.sender != rank:
        raise ValueError(f"rank {rank} sends a frame in the name of rank {frame.sender}")
