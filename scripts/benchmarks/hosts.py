"""Processes on emulated hosts, for benchmarks of the links between them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from dlrm_hybrid.comm.netem.namespaces import enter
from dlrm_hybrid.process import die_with_parent

PATIENCE_SECONDS = 60.0


@contextmanager
def processes(
    method: str, targets: Sequence[tuple[Callable[..., None], *tuple[Any, ...]]]
) -> Generator[list[Connection]]:
    """Start processes, and give our ends of what connects us to them.

    Args:
        method: spawn, or fork where nothing has threads.
        targets: what each calls with the arguments behind it, and last its end.
    """
    context: Any = multiprocessing.get_context(method)
    pipes = [context.Pipe() for _ in targets]
    started = [
        context.Process(target=target, args=(*given, theirs))
        for (target, *given), (_, theirs) in zip(targets, pipes, strict=True)
    ]
    for process in started:
        process.start()
    try:
        yield [ours for ours, _ in pipes]
    finally:
        for process in started:
            process.join(PATIENCE_SECONDS)
            process.kill()


def settle(namespaces: Sequence[str]) -> None:
    """Enter the namespaces of a host, and end with the process that started this one."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    die_with_parent(parent.pid)
    for path in namespaces:
        enter(path)


def answer(connection: Connection) -> Any:
    """What a process has sent."""
    if not connection.poll(PATIENCE_SECONDS):
        raise SystemExit("a host does not answer")
    return connection.recv()
