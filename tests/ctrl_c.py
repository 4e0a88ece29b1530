"""Ctrl-C as a program gets it: in its main thread, or in any other that does not mask it."""

import signal
from threading import Thread

from dlrm_hybrid.process import unshield


def press() -> None:
    """The main thread gets it."""
    signal.raise_signal(signal.SIGINT)


def press_elsewhere() -> None:
    """Another thread gets it, as one of torch or of pytest does while the main one masks it."""

    def catch() -> None:
        unshield()
        press()

    thread = Thread(target=catch)
    thread.start()
    thread.join()
