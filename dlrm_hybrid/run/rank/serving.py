"""What the servers of a run do in processes of their own, from start to goodbye."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dlrm_hybrid.checkpoint import folder as checkpoint_folder
from dlrm_hybrid.checkpoint.reader import open_checkpoint
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.parallel.dense.server import Handle, serve
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.run.rank.facts import dense_values
from dlrm_hybrid.run.rank.job import Job
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.train.server_rank import ServerRank
from dlrm_hybrid.train.table_server_rank import TableServerRank
from dlrm_hybrid.types import Version
from dlrm_hybrid.wire.frame import Frame
from dlrm_hybrid.wire.frame import Kind as FrameKind

# A server may have nothing to do while workers evaluate; the loss of one is noticed otherwise.
IDLE_SECONDS = 86_400.0


def serve_dense(job: Job, index: int, channel: MeteredChannel, meter: RankMeter) -> None:
    """Be the server with this index until all workers have left."""
    server = build_world.server(job.config, job.layout, index, job.clock)
    meter.versions = server.versions
    start = 0
    if job.task.resume_from is not None:
        folder = checkpoint_folder.find(Path(job.task.resume_from))
        facts = job.facts(folder)
        start = facts["step"]
        dense = dense_values(open_checkpoint(folder), facts["config"], job.values)
        for outgoing in server.restart(start, dense):
            channel.send(*outgoing)
    answering = ServerRank(
        server=server,
        collect=build_world.collectives(job.config, job.layout, index),
        rank=job.task.rank,
        attempt=job.task.attempt,
        meter=meter,
        start=start,
        writer=job.writer,
    )
    meter.step = _answer(job, channel, answering.handlers())


def serve_tables(job: Job, index: int, channel: MeteredChannel, meter: RankMeter) -> None:
    """Be the table server with this index until all workers have left."""
    server = build_world.table_server(job.config, job.layout, index, job.storage, job.clock)
    start = 0
    if job.task.resume_from is not None:
        folder = checkpoint_folder.find(Path(job.task.resume_from))
        start = job.facts(folder)["step"]
        open_checkpoint(folder).fill(server.pieces())
        server.restart(Version(start))
    answering = TableServerRank(
        server=server,
        rank=job.task.rank,
        attempt=job.task.attempt,
        meter=meter,
        start=start,
        staleness=job.config.embedding.staleness,
        writer=job.writer,
    )
    meter.step = _answer(job, channel, answering.handlers())


def _answer(job: Job, channel: MeteredChannel, handlers: Mapping[FrameKind, Handle]) -> int:
    """Answer until all workers have left; the ticks they have done."""
    timed = {kind: job.clock.timed(Span.APPLY, handle) for kind, handle in handlers.items()}
    return serve(channel, timed, range(job.layout.topology.num_workers), IDLE_SECONDS)


def leave_servers(job: Job, channel: MeteredChannel, step: int) -> None:
    """Tell all servers that this worker sends no more, after so many ticks."""
    rank, attempt = job.task.rank, job.task.attempt
    goodbye = Frame(kind=FrameKind.GOODBYE, sender=rank, attempt=attempt, number=step)
    for server in job.layout.topology.all_servers:
        channel.send(server, goodbye, 0)
