"""Batches are given out once each, and all come to rest at the limit."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.train.asynchronous.leases import MOST_AT_ONCE, Leases, OwnPace
from dlrm_hybrid.train.progress import Plan


@given(
    before=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    rests=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    deaths=st.sampled_from([0, 0.2]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_batch_is_learned_once_whoever_comes_when_or_is_lost(
    before: list[int], rests: list[int], deaths: float, seed: int
) -> None:
    random, leases = Random(seed), Leases.begin(tuple(before), OwnPace())
    trainers, first = len(before), sum(before)
    told: list[int] = []  # that trainers said they have learned
    losses, redone, given_out = 0, 0, 0
    for more in rests:
        leases = leases.until(leases.given + more)
        while leases.learned < leases.limit:
            trainer = random.randrange(trainers)
            under_way = leases.under_way[trainer]
            if losses < 20 and random.random() < deaths:
                held, leases = leases, leases.lose(trainer)
                assert leases.done == held.done and leases.under_way[trainer] == ()
                assert sorted(leases.returned) == sorted((*held.returned, *under_way))
                losses, redone = losses + 1, redone + len(under_way)
            elif under_way and (len(under_way) > MOST_AT_ONCE or random.random() < 0.5):
                count = random.randint(0, len(under_way))
                told += under_way[:count]
                leases = leases.finish(trainer, leases.done[trainer] + count)
            else:
                left = leases.limit - leases.given
                leases, taken = leases.take(trainer)
                given_out += len(taken)
                assert len(taken) <= MOST_AT_ONCE
                assert leases.under_way[trainer] == (*under_way, *taken)
                # Who has nothing gets something; who has some gets more only where all can.
                assert taken or under_way or not left
                assert deaths or not (taken and under_way) or left >= 2 * trainers * len(taken)
        assert not any(leases.under_way) and leases.given == leases.limit
        assert all(not leases.lose(trainer).returned for trainer in range(trainers))
        assert all(not leases.take(trainer)[1] for trainer in range(trainers))
    # Every batch, and for the count only once.
    assert sorted(told) == list(range(first, first + sum(rests)))
    assert leases.learned == first + sum(rests)
    assert given_out == sum(rests) + redone


@given(
    st.integers(1, 4),
    st.integers(1, 40),
    st.lists(st.integers(1, 60), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
def test_nobody_gets_ahead_of_the_slowest_that_is_there_and_somebody_can_go_on(
    trainers: int, ahead: int, rests: list[int], seed: int
) -> None:
    random, leases = Random(seed), Leases.begin((5,) * trainers, OwnPace(ahead))
    learned, losses, told = [0] * trainers, 0, 0
    there = set(range(trainers))
    for more in rests:
        leases = leases.until(leases.given + more)
        told += more
        while leases.learned - 5 * trainers < told:
            assert not there or any(
                leases.under_way[one] or leases.take(one)[1] for one in sorted(there)
            )
            trainer = random.randrange(trainers)
            under_way = leases.under_way[trainer]
            if trainer in there and losses < 9 and random.random() < 0.1:
                leases, losses = leases.lose(trainer), losses + 1
                there.discard(trainer)
            elif trainer not in there or not under_way or random.random() < 0.5:
                if trainer not in there:  # it begins level with the slowest of the others
                    learned[trainer] = min((learned[one] for one in there), default=0)
                    there.add(trainer)
                    leases = leases.join(trainer)
                if len(leases.under_way[trainer]) <= MOST_AT_ONCE:
                    leases, taken = leases.take(trainer)
                    assert len(taken) <= max(1, ahead // 4)
                has = learned[trainer] + len(leases.under_way[trainer])
                assert has <= min(learned[one] for one in there) + ahead
            else:
                count = random.randint(1, len(under_way))
                leases = leases.finish(trainer, leases.done[trainer] + count)
                learned[trainer] += count
    assert leases.given == leases.limit and not any(leases.under_way)


@given(st.integers(1, 5), st.integers(0, 40))
def test_a_rest_that_shall_come_soon_comes_at_the_end_of_a_step(trainers: int, takes: int) -> None:
    leases = Leases.begin((0,) * trainers, OwnPace()).until(1000 * trainers)
    for number in range(takes):
        trainer = number % trainers
        leases, taken = leases.take(trainer)
        leases = leases.finish(trainer, leases.done[trainer] + len(taken))
    soon = leases.soon()
    assert soon.limit % trainers == 0
    assert leases.given <= soon.limit < leases.given + trainers
    assert soon.soon() == soon


def test_a_slow_trainer_takes_few_at_once_and_none_ahead() -> None:
    leases = Leases.begin((100, 10), OwnPace()).until(1000)
    for _ in range(2):
        leases, fast = leases.take(0)
        assert len(fast) == MOST_AT_ONCE
    leases, slow = leases.take(1)
    assert len(slow) == 1
    assert leases.take(1) == (leases, ())


def test_near_the_limit_nobody_takes_ahead() -> None:
    leases = Leases.begin((0, 0), OwnPace()).until(20)
    held: list[int] = []
    for trainer in (0, 1, 0, 1, 0, 1):
        leases, taken = leases.take(trainer)
        held.append(len(taken))
    assert held == [5, 3, 3, 2, 1, 1]  # a quarter of what is left
    leases, taken = leases.finish(0, 4).take(0)
    assert len(taken) == 1
    leases, taken = leases.take(1)
    assert (len(taken), leases.limit - leases.given) == (1, 3)
    assert leases.take(0) == leases.take(1) == (leases, ())
    leases = leases.finish(1, 7)
    leases, taken = leases.take(1)
    assert len(taken) == 1


def test_what_cannot_be_is_refused() -> None:
    leases, taken = Leases.begin((3, 4), OwnPace()).until(100).take(0)
    assert taken[0] == 7
    more = leases.finish(0, 5).take(0)[0]
    with pytest.raises(ValueError, match=r"trainer 0 has batches \(9, .*\) under way"):
        more.take(0)
    with pytest.raises(ValueError, match="trainer 0 has learned from 2 batches; it had done 3"):
        leases.finish(0, 2)
    with pytest.raises(ValueError, match=r"trainer 1 has learned from 5 batches"):
        leases.finish(1, 5)
    with pytest.raises(ValueError, match="limit 7: 13 batches are given out already"):
        leases.until(7)


@pytest.mark.parametrize(
    ("evaluate_every", "checkpoint_every", "rests"),
    [(0, 0, [50]), (20, 0, [20, 40, 50]), (20, 15, [15, 20, 30, 40, 45, 50])],
)
def test_trainers_rest_where_something_is_due(
    evaluate_every: int, checkpoint_every: int, rests: list[int]
) -> None:
    plan = Plan(
        steps=50,
        samples_per_step=1,
        report_every=7,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        checkpoint_minutes=0.0,
    )
    found = [0]
    while found[-1] < plan.steps:
        found.append(plan.next_rest(found[-1]))
    assert found[1:] == rests
