"""In which phase servers are: that of the worker they answer."""

from types import SimpleNamespace

import pytest

from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.wire.frame import Frame, Kind


def frame(kind: Kind, sender: int, number: int) -> Frame:
    return Frame(kind=kind, sender=sender, attempt=0, number=number)


@pytest.mark.parametrize("starts", [(0, 0), (7, 7), (90, 12)])
def test_the_first_pushes_of_each_worker_are_warm_up(starts: tuple[int, int]) -> None:
    from dlrm_hybrid.train.server_rank import ServerRank

    phases: list[Phase] = []
    rank = ServerRank(
        server=SimpleNamespace(handle=lambda frame: [], kinds=(Kind.PUSH,)),
        rank=2,
        switch=phases.append,
        writer=None,
    )
    for push in range(WARMUP_STEPS + 3):
        for sender, start in enumerate(starts):
            rank.handlers()[Kind.PUSH](frame(Kind.PUSH, sender, start + push))
    assert phases == [Phase.WARMUP] * 2 * WARMUP_STEPS + [Phase.TRAIN] * 2 * 3


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("starts", [(0, 0), (90, 12)])
def test_so_are_its_lookups_and_updates(starts: tuple[int, int], ahead: int) -> None:
    from dlrm_hybrid.train.server_rank import ServerRank

    phases: list[Phase] = []
    rank = ServerRank(
        server=SimpleNamespace(handle=lambda frame: [], kinds=(Kind.LOOKUP, Kind.UPDATE)),
        rank=2,
        switch=phases.append,
        ahead=ahead,
        writer=None,
    )
    serve = rank.handlers()[Kind.LOOKUP]  # as of an update
    for sender, start in enumerate(starts):
        for batch in range(ahead):
            serve(frame(Kind.LOOKUP, sender, start + batch))
    assert phases == [Phase.WARMUP] * 2 * ahead
    phases.clear()
    for batch in range(WARMUP_STEPS + 3):
        for sender, start in enumerate(starts):
            serve(frame(Kind.LOOKUP, sender, start + batch + ahead))
            serve(frame(Kind.UPDATE, sender, start + batch))
    assert phases == [Phase.WARMUP] * 4 * WARMUP_STEPS + [Phase.TRAIN] * 4 * 3


@pytest.mark.parametrize("elastic", [False, True])
def test_a_checkpoint_waits_for_no_push_that_was_lost_with_its_trainer(elastic: bool) -> None:
    from dlrm_hybrid.parallel.messages import message
    from dlrm_hybrid.train.server_rank import ServerRank

    begun: list[int] = []
    rank = ServerRank(
        server=SimpleNamespace(handle=None, has_made=lambda *_: False, pieces=list, kinds=()),
        rank=2,
        switch=lambda phase: None,
        writer=SimpleNamespace(begin=lambda step, groups: begun.append(step)),
        elastic=elastic,
    )
    answers = rank.handlers()[Kind.SAVE](message(Kind.SAVE, 0, 0, 40, {"step": 20, "pushed": None}))
    assert [one.frame.kind for one in answers] == [Kind.COPIED] * elastic
    assert begun == [20] * elastic
