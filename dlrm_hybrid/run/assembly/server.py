"""From the configuration to the servers of a world."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.model.tensors import draw_dense
from dlrm_hybrid.parallel.collectives.reduce import CollectiveServer
from dlrm_hybrid.parallel.dense.options import ServerOptions
from dlrm_hybrid.parallel.dense.server import ParameterServer
from dlrm_hybrid.parallel.dense.service import Handle
from dlrm_hybrid.run.assembly import activations as build_compress
from dlrm_hybrid.run.assembly import gradient as build_gradient
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.run.assembly.world import Layout
from dlrm_hybrid.telemetry.spans import SpanClock


def server(config: Config, layout: Layout, index: int, clock: SpanClock) -> ParameterServer:
    """A server with the initial values of what it owns."""
    values: dict[str, Tensor] = {
        tensor.name: torch.empty(tensor.shape)
        for tensor in layout.tensors
        if tensor.server == index
    }
    draw_dense(values, config.train.seed)
    options = ServerOptions(
        policy=build_world.policy(config),
        check_every=config.sync.check_every,
        attempt=layout.attempt,
        pull=build_compress.dtype(config.pull.precision),
        tells_levels=build_gradient.tells_levels(config),
    )
    return ParameterServer(
        layout.topology,
        index,
        layout.tensors,
        values,
        build_world.learning(config, layout),
        options,
        clock,
    )


def handle(config: Config, layout: Layout, index: int, server: ParameterServer) -> Handle:
    """What becomes of pushes to a server, and of contributions to rounds."""
    ops = build_gradient.rounds(config)
    if not ops:
        return server.handle
    collectives = CollectiveServer(
        layout.topology, index, layout.tensors, ops, layout.attempt, server.handle
    )
    return collectives.handle
