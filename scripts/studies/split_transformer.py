"""Trains the Transformer of `translation.py` cut into processes, with DCT-MP at the cuts.

    python scripts/studies/split_transformer.py --workers 5 --sparsity 0.9

Each worker is a process with a part of the network and an optimizer of its own; frames are sent
over ZeroMQ on the loopback. One batch is in the network at a time. First the whole network is
trained in this process with `SparseBoundary` at the same cuts; the losses of every step and all
weights must be equal to the bit, else the exit code is 1. Prints the bytes of a step by purpose.

At a cut behind the ReLU of a feed-forward network not only its activations are sent: the residual
stream goes around it, and from the decoder's cuts on also the encoder's output. Both are sent
whole, in both directions. Every worker reads the sentences itself.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformer import Batch, Shape, Stage, State, loss_of, start
from translation import Plan, Task, batches, build, learn, optimizer_of, rate, shape_of, task

from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.comm.rendezvous import share_folder
from dlrm_hybrid.comm.zmq.channel import ZmqOptions, open_zmq_channel
from dlrm_hybrid.compress.activation.codec import Key, Mask, dense_tensor
from dlrm_hybrid.compress.activation.dct import ThresholdCodec
from dlrm_hybrid.process import die_with_parent
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.traffic import Counters
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.frame import Frame, Kind
from dlrm_hybrid.wire.section import Dtype, Section

PATIENCE_SECONDS = 120.0
SENTENCES = 2_000
CROSSING = ("activations", "residual stream", "encoder's output")
"""What the sections of a frame are, in their order; the last one from the decoder's cuts on."""
DIRECTIONS = {Kind.ACTIVATION: "forward", Kind.ACTIVATION_GRADIENT: "backward"}


@dataclass
class Result:
    """What a worker, or the network in one process, has to tell.

    Attributes:
        weights: a hash of those of each block, in their order.
        losses: of every step; of the last worker only.
        frame_bytes: of all frames sent, with their heads.
        sent: bytes of their sections, by direction and by what they are.
        dense: what the sections hold as plain float32, likewise.
    """

    weights: list[str] = field(default_factory=list[str])
    losses: list[float] = field(default_factory=list[float])
    frame_bytes: int = 0
    sent: Counter[tuple[Kind, str]] = field(default_factory=Counter[tuple[Kind, str]])
    dense: Counter[tuple[Kind, str]] = field(default_factory=Counter[tuple[Kind, str]])


def hashes(stage: Stage) -> list[str]:
    """One for the weights of each block."""
    found: list[str] = []
    for block in stage.blocks:
        digest = hashlib.sha256()
        for weight in block.parameters():
            digest.update(weight.detach().numpy().tobytes())
        found.append(digest.hexdigest())
    return found


def together(plan: Plan, given: Task) -> Result:
    """Train in this process, with `SparseBoundary`."""
    whole = build(plan, given)
    result = Result(losses=learn(whole, plan, given))
    result.weights = hashes(whole)
    for boundary in whole.boundaries.values():
        report = boundary.report()
        result.sent[Kind.ACTIVATION, CROSSING[0]] += report.forward_bytes
        result.sent[Kind.ACTIVATION_GRADIENT, CROSSING[0]] += report.backward_bytes
    return result


class End:
    """A worker's end of a cut: sends and receives states and their gradients, as frames.

    Args:
        channel: of this worker.
        rank: this worker.
        other: the worker at the other end.
        sparsity: of activations.
        result: counts what is sent.
    """

    def __init__(
        self, channel: MeteredChannel, rank: int, other: int, sparsity: float, result: Result
    ) -> None:
        self._channel, self._rank, self._other = channel, rank, other
        self._codec = ThresholdCodec(sparsity=sparsity, dtype=Dtype.FLOAT32, allow_rice=False)
        self._boundary = min(rank, other)
        self._result = result
        self._mask: Mask = None
        self._sent = self._received = start()

    def send(self, state: State, step: int) -> None:
        """Forward: activations thinned out, the rest whole."""
        key = Key(step, self._boundary, 0)
        sections, self._mask = self._codec.encode(_rows(state.z_BTF), key)
        self._send(Kind.ACTIVATION, sections[0], state, key)
        self._sent = state

    def receive(self, like: State, step: int) -> State:
        """What the worker before has sent; of it gradients will be taken."""
        key = Key(step, self._boundary, 0)
        first, rest = self._receive(Kind.ACTIVATION, key)
        z_RF, self._mask = self._codec.decode((first,), _rows(like.z_BTF).shape, key)
        self._received = _state(z_RF.view_as(like.z_BTF), rest, like, key)
        for one in self._received:
            one.requires_grad_()
        return self._received

    def send_gradient(self, step: int) -> None:
        """Backward: the gradients of what was received, at the elements that came."""
        key = Key(step, self._boundary, 0)
        gradients = State(*(one if one.grad is None else one.grad for one in self._received))
        section = self._codec.encode_gradient(_rows(gradients.z_BTF), self._mask, key)[0]
        self._send(Kind.ACTIVATION_GRADIENT, section, gradients, key)

    def receive_gradient(self, step: int) -> State:
        """The gradients of what was sent."""
        key, like = Key(step, self._boundary, 0), self._sent
        first, rest = self._receive(Kind.ACTIVATION_GRADIENT, key)
        z_RF = self._codec.decode_gradient((first,), _rows(like.z_BTF).shape, self._mask, key)
        return _state(z_RF.view_as(like.z_BTF), rest, like, key)

    def _send(self, kind: Kind, first: Section, state: State, key: Key) -> None:
        whole = [one for one in (state.x_BTD, state.memory_BSD) if one.numel()]
        rest = [dense(0, one.detach().numpy()) for one in whole]
        sections = (first, *rest)
        tensors = state.z_BTF, *whole
        frame = Frame(kind=kind, sender=self._rank, attempt=0, number=key.batch, sections=sections)
        self._channel.send(self._other, frame, 4 * sum(one.numel() for one in tensors))
        for name, section, one in zip(CROSSING, sections, tensors, strict=False):
            self._result.sent[kind, name] += len(section.payload)
            self._result.dense[kind, name] += 4 * one.numel()

    def _receive(self, kind: Kind, key: Key) -> tuple[Section, Sequence[Section]]:
        frame = self._channel.receive(PATIENCE_SECONDS)
        # One batch is in the network, so no other frame can come.
        assert (frame.kind, frame.sender, frame.number) == (kind, self._other, key.batch)
        return frame.sections[0], frame.sections[1:]


def crossing(cut: int, batch: Batch, shape: Shape) -> State:
    """Tensors of the shapes of what crosses a cut."""
    rows, (length, words) = (
        batch.source_BS.shape[0],
        (batch.source_BS.shape[1], batch.target_BT.shape[1]),
    )
    decodes = cut > 1 + 2 * shape.layers
    own = words - 1 if decodes else length
    return State(
        torch.empty(rows, own, shape.width),
        torch.empty(rows, own, shape.inner_width),
        torch.empty(rows, length, shape.width) if decodes else torch.empty(0),
    )


def work(rank: int, plan: Plan, folder: Path, parent: Connection) -> None:
    """Be one worker; tells the parent its result."""
    process = multiprocessing.parent_process()
    assert process is not None and process.pid is not None
    die_with_parent(process.pid)
    torch.set_num_threads(1)
    given, result = task(plan.sentences), Result()
    whole = build(plan, given)
    cuts = [0, *sorted(whole.boundaries), len(whole.blocks)]
    stage = whole.part(cuts[rank], cuts[rank + 1])
    counters = Counters()
    options = ZmqOptions(
        address="127.0.0.1",
        keys=None,
        enclosed=False,
        start_seconds=PATIENCE_SECONDS,
        close_seconds=PATIENCE_SECONDS,
        silence_seconds=PATIENCE_SECONDS,
    )
    inner = open_zmq_channel(share_folder(folder), rank, plan.workers, 0, options, print)
    channel = MeteredChannel(inner, counters, SpanClock())
    before = End(channel, rank, rank - 1, plan.sparsity, result) if rank else None
    after = End(channel, rank, rank + 1, plan.sparsity, result) if rank + 1 < plan.workers else None
    optimizer = optimizer_of(stage)
    for step, pairs in enumerate(islice(batches(given.train, plan.batch, plan.seed), plan.steps)):
        batch = given.batch(pairs)
        like = crossing(cuts[rank], batch, shape_of(plan, given))
        state = stage(start() if before is None else before.receive(like, step), batch)
        optimizer.zero_grad()
        if after is None:
            loss = loss_of(state, batch)
            loss.backward()
            result.losses.append(float(loss.detach()))
        else:
            after.send(state, step)
            backward(state, after.receive_gradient(step))
        if before is not None:
            before.send_gradient(step)
        optimizer.param_groups[0]["lr"] = rate(plan, step)
        optimizer.step()
    result.weights = hashes(stage)
    result.frame_bytes = sum(one.num_bytes for one in counters.sent.snapshot().values())
    parent.send(result)
    channel.close()


def backward(state: State, gradients: State) -> None:
    """Gradients of what was sent, of all that it was made from."""
    pairs = [(one, by) for one, by in zip(state, gradients, strict=True) if one.requires_grad]
    torch.autograd.backward([one for one, _ in pairs], [by for _, by in pairs])


def apart(plan: Plan) -> list[Result]:
    """Train in one process for each worker."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(plan.workers)]
    with TemporaryDirectory(prefix="dlrm_hybrid-split-") as folder:
        started = [
            context.Process(target=work, args=(rank, plan, Path(folder), pipes[rank][1]))
            for rank in range(plan.workers)
        ]
        for process in started:
            process.start()
        try:
            return [_answer(ours) for ours, _ in pipes]
        finally:
            for process in started:
                process.join(PATIENCE_SECONDS)
                process.kill()


def _answer(connection: Connection) -> Result:
    if not connection.poll(10 * PATIENCE_SECONDS):
        raise SystemExit("a worker does not answer")
    return connection.recv()


def table(results: Sequence[Result], steps: int) -> Table:
    """Bytes of a step by direction and by what they are, all cuts together."""
    sent, dense = Counter[tuple[Kind, str]](), Counter[tuple[Kind, str]]()
    for result in results:
        sent += result.sent
        dense += result.dense
    rows = [
        [
            name,
            kind.name.lower().replace("_", " "),
            *_cells(sent[kind, name], dense[kind, name], steps),
        ]
        for name in CROSSING
        for kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT)
        if dense[kind, name]
    ]
    frames = sum(result.frame_bytes for result in results)
    rows.append(["all, with frames' heads", "both", *_cells(frames, dense.total(), steps)])
    return Table(["what", "direction", "bytes a step", "as float32", "times fewer"], rows, "llr")


def _cells(sent: int, dense: int, steps: int) -> list[str]:
    return [f"{sent / steps:,.0f}", f"{dense / steps:,.0f}", f"{dense / sent:.2f}"]


def differences(whole: Result, parts: Sequence[Result]) -> list[str]:
    """What is not the same in one process and in several; nothing where all is."""
    weights = [one for part in parts for one in part.weights]
    blocks = _unequal(whole.weights, weights)
    steps = _unequal(whole.losses, parts[-1].losses)
    found: list[str] = []
    if blocks:
        found.append(f"weights of blocks {blocks}")
    if steps:
        found.append(f"losses from step {steps[0]} on")
    for kind in DIRECTIONS:
        key = kind, CROSSING[0]
        travelled = sum(part.sent[key] for part in parts)
        if travelled != whole.sent[key]:
            found.append(f"bytes of {kind.name}: {travelled} travelled, {whole.sent[key]} counted")
    return found


def _rows(z_BTF: Tensor) -> Tensor:
    return z_BTF.detach().flatten(0, 1).contiguous()


def _state(z_BTF: Tensor, rest: Sequence[Section], like: State, key: Key) -> State:
    waiting = iter(rest)
    x_BTD, memory_BSD = (
        dense_tensor((next(waiting),), one.shape, key) if one.numel() else one
        for one in (like.x_BTD, like.memory_BSD)
    )
    return State(x_BTD, z_BTF, memory_BSD)


def _unequal(ours: Sequence[object], theirs: Sequence[object]) -> list[int]:
    pairs = zip(ours, theirs, strict=True)
    return [number for number, (one, other) in enumerate(pairs) if one != other]


def main() -> None:
    """Train in one process and in several, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, choices=(2, 3, 5), default=5)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--steps", type=int, default=100)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(
        workers=asked.workers,
        sparsity=asked.sparsity,
        seed=0,
        sentences=SENTENCES,
        steps=asked.steps,
    )
    whole, parts = together(plan, task(plan.sentences)), apart(plan)
    print(table(parts, plan.steps).markdown())
    found = differences(whole, parts)
    print(f"loss {whole.losses[0]:.4f}, after {plan.steps} steps {whole.losses[-1]:.4f}")
    print("; ".join(found) or "losses, weights and counted bytes are equal in one process")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
