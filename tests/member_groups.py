"""A process group of ranks that tests have started, each a process of its own."""

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from patience import HANG_SECONDS

from dlrm_hybrid.comm.group import CountBytes, CountedGroup, GroupOptions, process_group
from dlrm_hybrid.comm.rendezvous import share_folder
from dlrm_hybrid.comm.zmq.channel import ZmqOptions, open_zmq_channel
from dlrm_hybrid.telemetry.spans import SpanClock

_OPEN: list[object] = []  # channels, until the process ends: some peers are gone without a word


@contextmanager
def members_group(argument: str, count: CountBytes) -> Generator[CountedGroup, None, None]:
    """The group of all members, each of which sees by a channel of its own when one is gone."""
    given = json.loads(argument)
    torch.set_num_threads(1)
    members, rank, folder = given["members"], given["rank"], Path(given["folder"])
    deadline_seconds = given.get("deadline_seconds", HANG_SECONDS)
    channel = None
    if not given.get("alone", False):
        channel = open_zmq_channel(
            share_folder(folder / "channels"),
            members.index(rank),
            len(members),
            0,
            ZmqOptions(
                address="127.0.0.1",
                keys=None,
                enclosed=False,
                start_seconds=HANG_SECONDS,
                close_seconds=HANG_SECONDS,
                silence_seconds=HANG_SECONDS,
            ),
            print,
        )

    def lost_peer(seconds: float) -> int | None:
        index = None if channel is None else channel.lost_peer(seconds)
        return None if index is None else members[index]

    _OPEN.append(channel)
    rendezvous = share_folder(folder)
    if given.get("never_joins") == rank:
        rendezvous.wait_for_all(
            (f"embeddings-{member}" for member in members if member != rank), HANG_SECONDS
        )
        os._exit(0)
    options = GroupOptions(
        rendezvous=rendezvous,
        lost_peer=lost_peer,
        address="127.0.0.1",
        deadline_seconds=deadline_seconds,
    )
    with process_group(members, rank, options, count, SpanClock()) as group:
        yield group
