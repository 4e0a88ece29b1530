"""Work that a thread does while the process goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Future[T]:
    """Do it in a thread that nobody waits for when the process ends."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True, name="checkpoint").start()
    return future


def outcome(future: Future[T], wait_seconds: float) -> T | None:
    """What came of it, or None if it is not done after so long; raises what the work raised."""
    try:
        return future.result(wait_seconds)
    except NotYetError:
        if future.done():  # the work itself has raised this
            raise
        return None
