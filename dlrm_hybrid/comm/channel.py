"""The channel protocol: a rank sends frames to other ranks and receives theirs."""

from __future__ import annotations

from typing import Protocol

from dlrm_hybrid.wire.frame import Frame


class Channel(Protocol):
    """One rank's end of the network.

    Frames of one sender arrive once each, in the order sent. Of several threads one at a time may
    send, and one at a time receive; only one may still use it when it is closed or abandoned.
    """

    @property
    def rank(self) -> int:
        """The rank that sends and receives here."""
        ...

    def send(self, to: int, frame: Frame, dense_equivalent_bytes: int) -> None:
        """Send a frame; returns once it is encoded, without waiting for the receiver.

        Args:
            to: rank of the receiver.
            frame: its tensors may change as soon as this returns.
            dense_equivalent_bytes: size of its tensors as plain float32.

        Raises:
            ValueError: `to` is this rank or no rank of the run, or the frame names another sender.
            ConfigError: the message is too long for the network.
            PeerLostError: the receiver has left.
        """
        ...

    def receive(self, deadline_seconds: float) -> Frame:
        """Receive the next frame from any rank.

        Args:
            deadline_seconds: how long to wait; 0 takes only what has arrived.

        Raises:
            PeerLostError: a rank left without a goodbye.
            DeadlineError: no frame arrived in time.
        """
        ...

    def close(self) -> None:
        """Say goodbye: return once every other rank has all frames sent to it.

        Raises:
            PeerLostError: a rank left without a goodbye.
            DeadlineError: a rank did not take its frames in time.
        """
        ...

    def abandon(self) -> None:
        """Leave at once without a goodbye: other ranks see this one as lost."""
        ...


def check_outgoing(rank: int, world_size: int, to: int, frame: Frame) -> None:
    """Raise ValueError unless `rank` may send this frame to `to`."""
    if to == rank:
        raise ValueError(f"rank {rank} sends a frame to itself")
    if not 0 <= to < world_size:
        raise ValueError(f"rank {rank} sends a frame to rank {to}; ranks are 0 to {world_size - 1}")
    if frame.sender != rank:
        raise ValueError(f"rank {rank} sends a frame in the name of rank {frame.sender}")
