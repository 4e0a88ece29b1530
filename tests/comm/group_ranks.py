"""What the ranks of the process group's tests do; each runs in a process of its own."""

import json
import os
from pathlib import Path

import psutil
import torch
from member_groups import members_group
from torch import distributed as dist

from dlrm_hybrid.comm.group import GroupMessages
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.types import DeadlineError, PeerLostError


def _tell(report, **values: object) -> None:
    report(Event(Kind.TICK, 0, 0.0, values))


def collects(argument: str, report, stop) -> None:
    """Runs every collective the group knows, on rows that say where they come from."""
    counted: list[tuple[int, ...]] = []
    results: dict[str, object] = {}
    with members_group(argument, lambda *counts: counted.append(counts)) as group:
        me, size = group.rank(), group.size()

        def result(name: str, value: torch.Tensor | list[torch.Tensor]) -> None:
            parts = value if isinstance(value, list) else [value]
            results[name] = [part.tolist() for part in parts], counted[-1]

        # Member t gets t + 1 rows [me, t].
        rows_T = [t + 1 for t in range(size)]
        given = torch.tensor([[me, t] for t in range(size) for _ in range(t + 1)])
        result("exchange", group.exchange(given, rows_T, [me + 1] * size))
        result("exchange_half", group.exchange(given.half(), rows_T, [me + 1] * size))
        nothing = torch.empty(0, 2)
        before = len(counted)
        assert group.exchange(nothing, [0] * size, [0] * size).shape == (0, 2)
        assert len(counted) == before
        out = torch.empty(size, dtype=torch.int64)
        dist.all_to_all_single(out, torch.full((size,), me))
        result("even", out)

        part = torch.full((2, 3), float(me))
        gathered = torch.empty(2 * size, 3)
        dist.all_gather_into_tensor(gathered, part, group=group)
        result("all_gather", gathered)
        parts = [torch.empty(rows, 3) for rows in rows_T]
        dist.all_gather(parts, torch.full((me + 1, 3), float(me)), group=group)
        result("all_gather_uneven", parts)

        summed = torch.empty(1, 2)
        dist.reduce_scatter_tensor(summed, torch.arange(2.0 * size).view(size, 2) + me)
        result("reduce_scatter", summed)
        mine = torch.empty(me + 1)
        dist.reduce_scatter(mine, [torch.full((rows,), 10.0**rows) for rows in rows_T])
        result("reduce_scatter_uneven", mine)
        dist.barrier()
        listening = [
            connection.laddr.ip
            for connection in psutil.Process().net_connections()
            if connection.status == psutil.CONN_LISTEN
        ]
        dist.barrier()
    _tell(report, rank=me, listening=listening, results=results, open=dist.is_initialized())


def tells_messages(argument: str, report, stop) -> None:
    """Each sends every other messages of drawn lengths, now and then none or a long one."""
    given = json.loads(argument)
    counted: list[tuple[int, ...]] = []
    with members_group(argument, lambda *counts: counted.append(counts)) as group:
        me, size = group.rank(), group.size()
        messages = GroupMessages(group, margin=8)
        for step, lengths_TT in enumerate(given["lengths"]):
            own_T = [_message(step, me, t, lengths_TT[me][t]) for t in range(size)]
            found_T = messages.exchange(own_T, dense_bytes=7)
            for t, found in enumerate(found_T):
                assert bytes(found) == _message(step, t, me, lengths_TT[t][me]), (step, t)
    _tell(report, rank=me, counted=counted)


def _message(step: int, sender: int, to: int, length: int) -> bytes:
    return bytes((step + 3 * sender + 5 * to + place) % 251 for place in range(length))


def comes(argument: str, report, stop) -> None:
    """Only enters."""
    with members_group(argument, lambda *counts: None):
        pass


def loses_the_last(argument: str, report, stop) -> None:
    """The last member ends without a word; the others wait for it to join or in a collective."""
    given = json.loads(argument)

    def tell(error: PeerLostError) -> None:
        _tell(report, rank=error.rank, message=str(error))
        # Those that still wait for the lost one must not take this one for it.
        (Path(given["folder"]) / f"told-{given['rank']}").touch()
        while len(list(Path(given["folder"]).glob("told-*"))) < len(given["members"]) - 1:
            stop.check()

    try:
        with members_group(argument, lambda *counts: None) as group:
            dist.barrier()
            if given["rank"] == given["members"][-1]:
                os._exit(0)
            try:
                group.exchange(torch.ones(group.size()), [1] * group.size(), [1] * group.size())
            except PeerLostError as error:
                tell(error)
    except PeerLostError as error:  # it has not joined
        tell(error)


def takes_its_time(argument: str, report, stop) -> None:
    """The last member comes to the collective only when the others have given up."""
    given = json.loads(argument)
    with members_group(argument, lambda *counts: None) as group:
        gave_up = Path(given["folder"]) / "gave up"
        if given["rank"] == given["members"][-1]:
            while not gave_up.exists():
                stop.check()
            return
        group._mesh._deadline_seconds = 0.3  # both have joined, however long that took
        try:
            group.exchange(torch.ones(group.size()), [1] * group.size(), [1] * group.size())
        except DeadlineError as error:
            _tell(report, message=str(error))
        gave_up.touch()
