"""Ports for what tests let listen."""

import socket

_HELD: list[socket.socket] = []


def free_port() -> int:
    """One of this machine that the kernel gives to no other program while this process lives.

    It is bound here, where nobody listens: who is told its number can still listen on it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return held.getsockname()[1]
