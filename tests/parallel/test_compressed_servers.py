"""Servers that are sent parts of gradients, and tell what has changed, maybe rounded."""

import itertools
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_world import OPTIMIZERS, SHAPES, World, arrived, assert_same, gappy_gradients_of, travel
from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.error_feedback import Drain, ErrorFeedback, FeedbackOptions
from dlrm_hybrid.compress.gradient.layout import Layout
from dlrm_hybrid.compress.gradient.methods.dct import Dct
from dlrm_hybrid.compress.gradient.methods.thresholded import DrainMode
from dlrm_hybrid.compress.gradient.methods.topk import CountedThreshold
from dlrm_hybrid.compress.gradient.thresholded import ThresholdSelector
from dlrm_hybrid.model.optimizer import Adam, Constant, Optimizer
from dlrm_hybrid.parallel.dense.master import MasterWeights, OptimizerConfig
from dlrm_hybrid.parallel.dense.published import SUFFIX
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.policies import Lockstep
from dlrm_hybrid.parallel.sync import SyncPolicy
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Frame
from dlrm_hybrid.wire.section import Dtype, Encoding, Section
from dlrm_hybrid.wire.sparse import sparse_of

# Not Adam: to it an element that is not sent is none whose gradient is zero.
SPARSE = [one for one in OPTIMIZERS if not isinstance(one, Adam)]
STILL = [one for one in SPARSE if not one.moves_all]
POLICIES: list[SyncPolicy] = [Lockstep(), Lockstep(1), Lockstep(2)]
DTYPES = (Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16, None)  # None: levels
HALF_ULP = {Dtype.BFLOAT16: 2.0**-8, Dtype.FLOAT16: 2.0**-11}


def sparsifier(
    sparsity: float, *, dtype: Dtype | None = Dtype.FLOAT32, drain: DrainMode = "none"
) -> Callable[[Layout], Compressor]:
    """Thresholds that change every few steps, residuals that are drained every few.

    `dtype` is None for levels.
    """
    selector = ThresholdSelector(
        Dct(density=1 - sparsity, lifespan=4, renewal="controlled"), CountedThreshold()
    )
    options = FeedbackOptions(
        dtype=dtype or Dtype.BFLOAT16,
        drain=Drain(mode=drain, every=5, seed=3, trainer=0),
        levels=dtype is None,
    )
    return lambda layout: ErrorFeedback(layout, selector, options)


@pytest.mark.parametrize("optimizer", STILL, ids=lambda one: one.name)
@pytest.mark.parametrize("count", [1, 3, 7, 8, 9, 15, 17, 33, 63, 65, 429, 1031])
def test_a_sparse_gradient_is_a_dense_one_with_zeros(optimizer: Optimizer, count: int):
    rng = np.random.default_rng(count)
    weight_N = torch.from_numpy(rng.normal(size=count).astype(np.float32))
    config = OptimizerConfig(optimizer=optimizer, schedule=Constant(base_lr=0.037))
    sparse, dense = (MasterWeights({"w": weight_N.clone()}, config) for _ in range(2))
    for step in range(10):
        index_K = np.flatnonzero(rng.random(count) < rng.random()).astype(np.int32)
        gradient_N = np.zeros(count, np.float32)
        gradient_N[index_K] = rng.normal(size=len(index_K))
        dense.apply_gradient("w", torch.from_numpy(gradient_N), step)
        moved_K = sparse.apply_sparse("w", index_K, gradient_N[index_K], step)
        assert_same(sparse.tensors(), dense.tensors())
        assert moved_K.tobytes() == sparse.weights["w"].numpy()[index_K].tobytes()
    assert not torch.equal(sparse.weights["w"], weight_N)


class Scrambled:
    """A world whose workers compute, and whose frames arrive, in any order that can be."""

    def __init__(self, world: World, choices: Random) -> None:
        self.world, self._choices = world, choices
        self._done = dict.fromkeys(world.clients, 0)
        self._links: defaultdict[tuple[int, int], deque[Frame]] = defaultdict(deque)
        self._published = {
            (owner, stage, 0): self._values(owner, stage)
            for owner in world.servers
            for stage in range(world.topology.stages)
        }
        self._inboxes: dict[int, dict[tuple[int, int], Frame]] = {
            rank: {} for rank in world.clients
        }
        self.pulls = 0

    def run(self, steps: int) -> None:
        while able := self._able(steps):
            to, sender = self._choices.choice(able)
            if sender is None:
                self._compute(to)
            else:
                self._arrive(to, self._links[sender, to].popleft())

    def _able(self, steps: int) -> list[tuple[int, int | None]]:
        """Workers that have all they need, and links with a frame on the way."""
        computing: list[tuple[int, int | None]] = [
            (rank, None)
            for rank, step in self._done.items()
            if step < steps and self._wanted(rank) <= self._inboxes[rank].keys()
        ]
        return computing + [(to, sender) for (sender, to), frames in self._links.items() if frames]

    def _wanted(self, rank: int) -> set[tuple[int, int]]:
        return {(want.sender, want.number) for want in self.world.clients[rank].wanted()}

    def _compute(self, rank: int) -> None:
        for wanted in sorted(self._wanted(rank)):
            frame = self._inboxes[rank].pop(wanted)
            self.world.clients[rank].apply(frame)
            self._check(rank, frame)
        for push in arrived(self.world.push(rank, self._done[rank])):
            self._links[rank, push.to].append(push.frame)
        self._done[rank] += 1

    def _arrive(self, to: int, frame: Frame) -> None:
        if to in self.world.clients:
            self._inboxes[to][frame.sender, frame.number] = frame
            return
        answers = arrived(self.world.servers[to].handle(frame))
        for answer in answers:
            self._links[to, answer.to].append(answer.frame)
        if answers:
            stage = frame.sender % self.world.topology.stages
            self._published[to, stage, answers[0].frame.number] = self._values(to, stage)

    def _check(self, rank: int, frame: Frame) -> None:
        """The replica is what the server had published then."""
        self.pulls += 1
        stage = rank % self.world.topology.stages
        replica = self.world.replicas[rank // self.world.topology.stages]
        published = self._published[frame.sender, stage, frame.number]
        assert_same({name: replica[name] for name in published}, published)

    def _values(self, owner: int, stage: int) -> dict[str, Tensor]:
        server = self.world.servers[owner]
        held = server.tensors()
        return {name: held.get(name + SUFFIX, held[name]).clone() for name in server.weights(stage)}


# A world takes a tenth of a second: a fifth of the examples that the profile asks for.
@settings(max_examples=settings.default.max_examples // 5 if settings.default else 20)
@given(
    trainers=st.integers(1, 3),
    servers=st.integers(1, 3),
    stages=st.integers(1, 2),
    policy=st.sampled_from(POLICIES),
    pull=st.sampled_from(DTYPES),
    pull_sparsity=st.sampled_from([None, 1e-9, 0.9]),
    optimizer=st.sampled_from(SPARSE),
    choices=st.randoms(use_true_random=False),
)
def test_whatever_the_arrivals_replicas_are_what_was_published_and_bits_are_the_same(
    trainers: int,
    servers: int,
    stages: int,
    policy: SyncPolicy,
    pull: Dtype | None,
    pull_sparsity: float | None,
    optimizer: Optimizer,
    choices: Random,
):
    def world() -> World:
        return World(
            trainers,
            policy,
            optimizer=optimizer,
            servers=servers,
            stages=stages,
            pull=pull,
            pull_sparsity=pull_sparsity,
            make=sparsifier(0.9, dtype=pull, drain="flush"),
            gradients=gappy_gradients_of,
        )

    scrambled, orderly = Scrambled(world(), choices), world()
    scrambled.run(6)
    orderly.run(0, 6)
    units = len({(one.stage, one.server) for one in orderly.tensors})
    assert scrambled.pulls == (5 - policy.staleness) * trainers * units
    assert_same(scrambled.world.held(), orderly.held())


@pytest.mark.parametrize("optimizer", SPARSE, ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", HALF_ULP)
def test_a_rounded_copy_stays_near_the_weights(dtype: Dtype, optimizer: Optimizer):
    world = World(
        2,
        Lockstep(),
        optimizer=optimizer,
        pull=dtype,
        make=sparsifier(0.9),
        gradients=gappy_gradients_of,
    )
    largest_step, distances = 0.0, []
    before = world.held()
    for step in range(100):
        world.run(step, step + 1)
        held = world.held()
        steps = [float((held[name] - before[name]).abs().max()) for name in SHAPES]
        largest_step = max(largest_step, *steps)
        distances.append(
            max(float((held[name] - held[name + SUFFIX]).abs().max()) for name in SHAPES)
        )
        before = held
    # A difference told is an old one plus a step, and rounding leaves half an ulp of it.
    half_ulp = HALF_ULP[dtype]
    weights = max(float(held[name].abs().max()) for name in SHAPES)
    assert 0 < max(distances) <= largest_step * half_ulp / (1 - half_ulp) + weights * 2.0**-23


def elements(section: Section) -> set[int]:
    return set(sparse_of(section).indices_K.tolist())


def test_what_any_trainer_sent_is_told_and_nothing_else():
    world = World(3, Lockstep(), stages=2, make=sparsifier(0.95), gradients=gappy_gradients_of)
    shared = 0
    for step in range(10):
        pushed: defaultdict[int, list[set[int]]] = defaultdict(list)
        for rank in world.clients:
            world.pull(rank)
        for rank in world.clients:
            (push,) = world.push(rank, step)
            world.arrive([push])
            for section in travel(push).sections:
                pushed[section.tensor].append(elements(section))
        told = {
            section.tensor: elements(section)
            for one in world.mail
            for section in one.frame.sections[:-1]
        }
        assert told == {tensor: set.union(*sets) for tensor, sets in pushed.items()}
        shared += sum(
            len(one & other)
            for sets in pushed.values()
            for one, other in itertools.combinations(sets, 2)
        )
    assert shared > 0, "no element came from two trainers"


def broken(section: Section) -> Section:
    """Its first index lies beyond the tensor, in whatever encoding."""
    return section._replace(encoding=Encoding.INDEX32, payload=b"\xff" * 8)


def replaced(frame: Frame, place: int) -> Frame:
    sections = list(frame.sections)
    sections[place] = broken(sections[place])
    return replace(frame, sections=tuple(sections))


def test_a_broken_section_names_who_sent_it_and_when():
    world = World(2, Lockstep(), make=sparsifier(0.9), gradients=gappy_gradients_of)
    world.run(0, 3)
    pushes: list[Outgoing] = []
    for rank in world.clients:
        world.pull(rank)
        pushes += world.push(rank, 3)
    server = world.servers[2]
    with pytest.raises(
        DlrmError, match=r"push 3 of worker-1.0 \(rank 1\): tensor 1: no INDEX32 section"
    ):
        server.handle(replaced(travel(pushes[1]), 1))


def test_a_broken_answer_names_who_sent_it_and_which_version():
    world = World(2, Lockstep(), make=sparsifier(0.9), gradients=gappy_gradients_of)
    world.run(0, 3)
    answer = next(one for one in world.mail if one.to == 1 and one.frame.number == 3)
    with pytest.raises(
        DlrmError, match=r"worker-1.0 \(rank 1\): PARAMETERS 3 of rank 2: tensor 0: no INDEX32"
    ):
        world.clients[1].apply(replaced(answer.frame, 0))
