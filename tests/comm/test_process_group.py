import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from patience import HANG_SECONDS

from dlrm_hybrid.comm.group import CountedGroup
from dlrm_hybrid.run.supervisor import Rank, run_ranks
from dlrm_hybrid.telemetry.events import Event
from dlrm_hybrid.types import DlrmError

MEMBERS = [1, 4, 7]


def _run(folder: Path, entry: str, present: list[int], **given: object) -> tuple[list[dict], str]:
    seen: list[Event] = []
    ranks = [
        Rank(
            index=rank,
            name=f"worker-{rank}",
            argument=json.dumps({"rank": rank, "folder": str(folder / "group"), **given}),
            log_folder=folder,
        )
        for rank in present
    ]
    outcome = run_ranks(ranks, f"group_ranks:{entry}", seen.append)
    return [one.values for one in seen], outcome.message


@pytest.mark.parametrize("members", [MEMBERS, MEMBERS[:2]])
def test_collectives_move_and_count_what_they_say(tmp_path: Path, members: list[int]):
    told, message = _run(tmp_path, "collects", members, members=members)
    assert message == ""
    size = len(members)
    assert sorted(one["rank"] for one in told) == list(range(size))
    for one in told:
        me, results = one["rank"], one["results"]
        others = size - 1
        # One part of what member `me` gives away stays with it.
        leaving = 2 * sum(t + 1 for t in range(size) if t != me)
        coming = 2 * (me + 1) * others
        ways = [[t, me] for t in range(size) for _ in range(me + 1)]
        assert results["exchange"] == [[ways], [8 * leaving, 8 * leaving, 8 * coming]]
        assert results["exchange_half"] == [[ways], [2 * leaving, 4 * leaving, 2 * coming]]
        assert results["even"] == [[list(range(size))], [8 * others] * 3]
        rows = [[float(t)] * 3 for t in range(size) for _ in range(2)]
        assert results["all_gather"] == [[rows], [24 * others] * 3]
        uneven = [[[float(t)] * 3] * (t + 1) for t in range(size)]
        sent, others_rows = 12 * (me + 1) * others, sum(t + 1 for t in range(size) if t != me)
        assert results["all_gather_uneven"] == [uneven, [sent, sent, 12 * others_rows]]
        total = [[size * (2.0 * me + i) + sum(range(size)) for i in range(2)]]
        assert results["reduce_scatter"] == [[total], [8 * others] * 3]
        part = [size * 10.0 ** (me + 1)] * (me + 1)
        assert results["reduce_scatter_uneven"] == [[part], [2 * leaving, 2 * leaving, 2 * coming]]
        assert one["listening"], "a rank must listen for its peers"
        assert set(one["listening"]) <= {"127.0.0.1", "::1"}
        assert not one["open"]


def test_messages_of_any_length_arrive_and_few_need_more_than_a_collective(tmp_path: Path):
    size, draws = len(MEMBERS), np.random.default_rng(5)
    steady = draws.integers(100, 106, (30, size, size))
    odd = draws.choice([0, 1, 40, 3000, 70_000], (12, size, size))
    lengths = np.concatenate([odd, steady])
    lengths[:, range(size), range(size)] = 0  # none for itself
    told, message = _run(
        tmp_path, "tells_messages", MEMBERS, members=MEMBERS, lengths=lengths.tolist()
    )
    assert message == ""
    assert sorted(one["rank"] for one in told) == list(range(size))
    for one in told:
        me, counted = one["rank"], np.array(one["counted"])
        collectives = counted[counted[:, 1] == 7]
        assert len(collectives) == len(lengths)
        assert 0 < len(counted) - len(collectives) <= len(odd) + 2
        sent, received = counted[:, 0].sum(), counted[:, 2].sum()
        assert sent >= lengths[:, me].sum() + 4 * (size - 1) * len(lengths)
        assert received >= lengths[:, :, me].sum()
        # A steady message is followed by no other and has an eighth more room at most.
        assert (collectives[-25:, 0] <= (size - 1) * (4 + 106 * 9 / 8)).all()
        assert (collectives[-25:, 0] >= (size - 1) * 104).all()


def test_members_that_do_not_come_are_named(tmp_path: Path):
    _, message = _run(tmp_path, "comes", [4], members=MEMBERS, deadline_seconds=0.3, alone=True)
    assert message.startswith("ranks [1, 7] did not join ")
    assert "0.3 s (network.patience_seconds)" in message


@pytest.mark.parametrize("given", [{}, {"never_joins": 7}], ids=["collective", "joining"])
def test_a_lost_member_is_named_before_any_deadline(tmp_path: Path, given: dict[str, int]):
    told, message = _run(tmp_path, "loses_the_last", MEMBERS, members=MEMBERS, **given)
    assert message == ""
    assert len(told) == 2
    for one in told:
        assert one["rank"] == 7
        assert one["message"].startswith("rank 7 is gone: ")


def test_a_collective_has_a_deadline(tmp_path: Path):
    members = MEMBERS[:2]
    told, message = _run(tmp_path, "takes_its_time", members, members=members)
    assert message == ""
    assert len(told) == 1
    assert f"took longer than {HANG_SECONDS:g} s (network.patience_seconds)" in told[0]["message"]


def test_who_says_that_less_than_nothing_follows_is_named() -> None:
    mesh: Any = SimpleNamespace(place=0, size=3)
    never: Any = nullcontext()
    group = CountedGroup(mesh, lambda *counts: None, lambda error: error, never)
    with pytest.raises(DlrmError, match="trainer 2 says that -5 rows follow"):
        group.exchange(torch.zeros(6), [2, 2, 2], [2, 2, -5])
