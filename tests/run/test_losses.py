"""Of ranks that miss each other, who is gone or cut off; how often runs start again."""

from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.run.rank.process import PeerFailure, root_cause
from dlrm_hybrid.run.training import RestartBudget


def failures(**missed: tuple[int, ...]) -> dict[int, PeerFailure]:
    return {int(rank[1:]): PeerFailure(ranks, "") for rank, ranks in missed.items()}


def test_who_says_nothing_is_the_first() -> None:
    told = failures(_0=(1,), _1=(2,), _3=(0,))
    for one in told.values():
        assert root_cause(one, told) == 2


def test_who_is_cut_off_is_the_one_that_most_others_miss() -> None:
    told = failures(_0=(1,), _1=(0,), _2=(0,), _3=(2,), _4=(0,))
    for one in told.values():
        assert root_cause(one, told) == 0


def test_of_two_that_miss_each_other_the_one_that_is_missed_first() -> None:
    told = failures(_0=(1,), _1=(0,))
    assert root_cause(told[0], told) == 1
    assert root_cause(told[1], told) == 0


ranks = st.integers(0, 6)


@given(
    st.dictionaries(ranks, st.lists(ranks, min_size=1, max_size=6, unique=True), min_size=1),
    st.randoms(),
)
def test_it_is_always_somebody_who_is_missed(missed: dict[int, list[int]], choose) -> None:
    told = {rank: PeerFailure(tuple(others), "") for rank, others in missed.items()}
    named = root_cause(choose.choice(list(told.values())), told)
    assert any(named in one.ranks for one in told.values())


@given(
    pauses=st.lists(st.floats(0.0, 10.0), max_size=30),
    limit=st.integers(0, 4),
    window=st.floats(0.1, 20.0),
)
def test_no_window_holds_more_than_its_limit(
    pauses: list[float], limit: int, window: float
) -> None:
    restarts, now, made = RestartBudget(limit, window), 0.0, list[float]()
    for pause in pauses:
        now += pause
        recent = [time for time in made if time > now - window]
        number = restarts.another(now)
        assert number == (len(recent) + 1 if len(recent) < limit else None)
        if number is not None:
            made.append(now)
        assert restarts.made == len(made)
