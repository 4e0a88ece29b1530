"""Processes on emulated hosts, for benchmarks of the links between them."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dlrm_hybrid.comm.netem.namespaces import enter
from dlrm_hybrid.comm.netem.network import open_network
from dlrm_hybrid.comm.netem.plan import INTERFACE, NetworkPlan, bits_per_second
from dlrm_hybrid.process import die_with_parent
from dlrm_hybrid.run.rank.process import Rank
from dlrm_hybrid.run.supervisor import run_ranks

PATIENCE_SECONDS = 60.0
LOOPBACK = "loopback"


def told_on(link: str, ranks: int, entry: str, *job: Any) -> list[dict[str, Any]]:
    """What ranks report, each on a host behind a link of its own, or all on one host's loopback.

    Args:
        link: rate of the links, or LOOPBACK.
        ranks: their number.
        entry: the body of a rank, as "module:function". Its argument is JSON: its number, a folder
            that all share, name and address of its interface, and the job.
        job: what else they are told.

    Raises:
        SystemExit: a rank failed; with its log.
    """
    told: list[dict[str, Any]] = []
    on_loopback = link == LOOPBACK
    rate = bits_per_second("1gbit" if on_loopback else link)
    plan = NetworkPlan(hosts=max(2, ranks), rate_bits_per_second=rate, latency_seconds=None)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="dlrm_hybrid-")))
        network = stack.enter_context(open_network(plan))
        started: list[Rank] = []
        for rank in range(ranks):
            own = ("lo", "127.0.0.1") if on_loopback else (INTERFACE, str(plan.address(rank)))
            started.append(
                Rank(
                    index=rank,
                    name=f"rank-{rank}",
                    argument=json.dumps([rank, str(folder), *own, *job]),
                    log_folder=folder,
                    namespaces=network.namespaces[0 if on_loopback else rank],
                )
            )
        outcome = run_ranks(started, entry, lambda event: told.append(dict(event.values)))
        if outcome.message:
            logs = [path.read_text("utf-8") for path in sorted(folder.glob("*.log"))]
            raise SystemExit("\n".join([outcome.message, *logs]))
    return told


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
