"""Trainers that make steps together, die and come again: turns and rounds never wait in vain."""

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.parallel.policies import Rounds, RoundsBucket
from dlrm_hybrid.parallel.sync import Average, BucketState, Publish, Pull, Push
from dlrm_hybrid.train.asynchronous.leases import MOST_AT_ONCE, PASS, InTurns, Leases

LEADER = "leader"


@dataclass
class Trainer:
    """One that lives or is lost, with what is under way from it to servers and the leader."""

    pushed: int = 0
    turns: deque[int] = field(default_factory=deque[int])
    answered: list[int] = field(default_factory=list[int])
    mail: dict[int | str, deque[tuple[str, int]]] = field(default_factory=dict)
    lives: bool = True
    learned: int = 0


class World:
    """Servers that each have one bucket, and hear of a loss when they do; leases of any size."""

    def __init__(self, trainers: int, servers: int, random: Random) -> None:
        self.random = random
        self.turns = Leases.begin((0,) * trainers, InTurns())
        self.buckets: list[BucketState] = [
            Rounds(trainers).bucket(range(trainers), 0) for _ in range(servers)
        ]
        self.trainers = [Trainer(answered=[0] * servers) for _ in range(trainers)]
        self.averages: list[list[tuple[Push, ...]]] = [[] for _ in range(servers)]
        self.told: Counter[int] = Counter()
        self.deaths = 0
        self.pushes: Counter[tuple[int, int]] = Counter()
        for number, trainer in enumerate(self.trainers):
            trainer.mail = {place: deque() for place in (*range(servers), LEADER)}
            self.pull(number)

    def pull(self, number: int) -> None:
        trainer = self.trainers[number]
        for server, bucket in enumerate(self.buckets):
            self.buckets[server] = bucket.on_pull(Pull(number, trainer.pushed))
            trainer.answered[server] = trainer.pushed

    def moves(self) -> list[tuple[str, int, int | str]]:
        found: list[tuple[str, int, int | str]] = []
        for number, trainer in enumerate(self.trainers):
            found += [("arrive", number, place) for place, mail in trainer.mail.items() if mail]
            # A worker needs the answers to all its pushes before the next; servers differ freely.
            if trainer.lives and trainer.turns and set(trainer.answered) == {trainer.pushed}:
                found.append(("learn", number, 0))
            if trainer.lives and number not in self.turns.away and not trainer.turns:
                found += [("give", number, 0)] * bool(self.turns.take(number)[1])
        return found

    def play(self, move: str, number: int, place: int | str) -> None:
        trainer = self.trainers[number]
        if move == "give":
            self.turns, given = self.turns.take(number, self.random.randint(1, MOST_AT_ONCE))
            assert given == (PASS,) or PASS not in given
            trainer.turns.extend(given)
        elif move == "learn":
            batch = trainer.turns.popleft()
            for server in range(len(self.buckets)):
                trainer.mail[server].append(("pass" if batch == PASS else "push", trainer.pushed))
            trainer.pushed += 1
            if batch != PASS:
                trainer.learned += 1
                self.pushes[number, trainer.pushed - 1] += 1
                trainer.mail[LEADER].append(("learned", trainer.learned))
        else:
            self.arrive(number, place, *trainer.mail[place].popleft())

    def arrive(self, number: int, place: int | str, what: str, count: int) -> None:
        if not isinstance(place, int):
            if what == "left":
                self.turns = self.turns.lose(number)
                self.trainers[number].learned = self.turns.done[number]
                return
            new = count - self.turns.done[number]
            self.told.update(self.turns.under_way[number][:new])
            self.turns = self.turns.finish(number, count)
            return
        bucket = self.buckets[place]
        before = bucket.version
        if what == "left":
            after, actions = bucket.on_leave(number)
        else:
            take = bucket.on_push if what == "push" else bucket.on_pass
            after, actions = take(Push(number, count))
        self.buckets[place] = after
        assert isinstance(after, RoundsBucket)
        assert not actions or after.arrived == {}
        for action in actions:
            if isinstance(action, Average):
                assert action is actions[0] and action.number == before // len(self.trainers)
                assert after.version == before + len(action.pushes)
                self.averages[place].append(action.pushes)
        told = {action.to[0]: action for action in actions if isinstance(action, Publish)}
        assert set(told) == (set(after.live) if actions else set())
        for worker, action in told.items():
            assert action.version == self.trainers[worker].answered[place] + 1
            self.trainers[worker].answered[place] += 1

    def kill(self, number: int) -> None:
        trainer = self.trainers[number]
        trainer.lives, self.deaths = False, self.deaths + 1
        trainer.turns.clear()
        for mail in trainer.mail.values():
            for _ in range(self.random.randint(0, len(mail))):
                mail.pop()  # what had not left it yet
            mail.append(("left", 0))

    def at_rest(self) -> bool:
        return not self.moves() and not any(self.turns.rule.dealt) and not any(self.turns.under_way)

    def revive(self) -> None:
        """At rest the leader lets all join that are lost."""
        for number in sorted(self.turns.away):
            trainer = self.trainers[number]
            trainer.lives, trainer.pushed = True, trainer.pushed + self.random.randint(0, 9)
            self.pull(number)
            self.turns = self.turns.join(number)


@given(
    trainers=st.integers(1, 4),
    servers=st.integers(1, 3),
    rests=st.lists(st.integers(0, 25), min_size=1, max_size=3),
    deaths=st.sampled_from([0, 0.01, 0.1]),
    seed=st.integers(0, 2**32 - 1),
)
def test_everything_is_learned_whoever_dies_when(
    trainers: int, servers: int, rests: list[int], deaths: float, seed: int
) -> None:
    random = Random(seed)
    world = World(trainers, servers, random)
    for more in rests:
        world.turns = world.turns.until(world.turns.given + more)
        while moves := world.moves():
            living = [n for n, one in enumerate(world.trainers) if one.lives]
            if len(living) > 1 and random.random() < deaths:
                world.kill(random.choice(living))
                continue
            world.play(*random.choice(moves))
        # Nobody can move: all is done, everywhere and for good.
        assert world.at_rest() and world.turns.learned == world.turns.limit
        for bucket in world.buckets:
            assert isinstance(bucket, RoundsBucket) and not bucket.arrived
            assert bucket.live == {n for n, one in enumerate(world.trainers) if one.lives}
        for trainer in world.trainers:
            assert not trainer.lives or set(trainer.answered) == {trainer.pushed}
        world.revive()
    assert world.told == Counter(range(sum(rests)))
    for averages in world.averages:
        took = [push for pushes in averages for push in pushes]
        # A push that was told of may be lost on its way: of each that died the last one.
        assert len(set(took)) == len(took) >= sum(rests) - world.deaths
        assert all(world.pushes[push] == 1 for push in took)
        assert all(
            [one.sender for one in pushes] == sorted(one.sender for one in pushes)
            for pushes in averages
        )
    if not world.deaths:
        assert all(averages == world.averages[0] for averages in world.averages)
        full = [[one.sender for one in pushes] for pushes in world.averages[0]]
        assert full == [list(range(len(pushes))) for pushes in full]


@given(st.integers(1, 5), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_while_all_live_batches_are_dealt_as_in_lock_step(
    trainers: int, steps: int, seed: int
) -> None:
    random, turns = Random(seed), Leases.begin((3,) * trainers, InTurns())
    turns = turns.until(trainers * (3 + steps))
    got: list[list[int]] = [[] for _ in range(trainers)]
    for _ in range(50 * trainers * steps):
        trainer = random.randrange(trainers)
        turns, given = turns.take(trainer, random.randint(1, MOST_AT_ONCE))
        got[trainer] += given
    assert got == [
        [trainers * step + trainer for step in range(3, 3 + steps)] for trainer in range(trainers)
    ]


def test_who_has_no_batch_left_passes() -> None:
    turns, taken = Leases.begin((0, 0, 0), InTurns()).until(6).take(0)
    assert taken == (0, 3)
    turns, taken = turns.take(1)
    assert taken == (1, 4)
    turns = turns.finish(0, 2).finish(1, 1).lose(2)
    assert turns.returned == (2, 5)
    turns = turns.lose(1)
    assert turns.returned == (2, 4, 5)
    turns, taken = turns.take(0)
    assert taken == (2, 4, 5) and turns.take(1) == (turns, ())
    turns = turns.finish(0, 5)
    turns = turns.join(2).until(9).finish(0, 5)
    turns, first = turns.take(0)
    turns, second = turns.take(2)
    assert (first, second) == ((6, 8), (7,))
    turns, second = turns.take(2)
    assert second == (PASS,) and turns.take(2) == (turns, ())


def test_what_cannot_be_is_refused() -> None:
    turns, _ = Leases.begin((2, 2), InTurns()).until(20).take(0, 3)
    with pytest.raises(ValueError, match="limit 8: 10 batches are given out already"):
        turns.until(8)
    with pytest.raises(ValueError, match=r"trainer 0 has learned from 6 batches; it had done 2"):
        turns.finish(0, 6)
    with pytest.raises(ValueError, match="trainer 1 joins while others have turns"):
        turns.lose(1).join(1)
    assert turns.soon().limit == 10
