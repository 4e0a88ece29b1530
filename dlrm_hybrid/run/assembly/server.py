"""From the configuration to the servers of a world."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.model.tensors import draw_dense
from dlrm_hybrid.parallel.collectives.server import CollectiveServer
from dlrm_hybrid.parallel.dense.bucket import BucketOptions
from dlrm_hybrid.parallel.dense.server import Handle, ParameterServer, ServerOptions
from dlrm_hybrid.run.assembly import activations, gradient, world
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
    policy = world.policy(config)
    options = ServerOptions(
        policy=policy,
        bucket=BucketOptions(
            optimizer=world.optimizer_config(config, layout),
            history=policy.history,
            pull=activations.dtype(config.pull.precision),
            publishes_means=gradient.publishes_means(config),
        ),
        check_every=config.sync.check_every,
        attempt=layout.attempt,
    )
    return ParameterServer(layout.topology, index, layout.tensors, values, options, clock)


def collectives(config: Config, layout: Layout, index: int) -> Handle | None:
    """What takes contributions on a server; None where the method has no rounds."""
    ops = gradient.rounds(config)
    if not ops:
        return None
    return CollectiveServer(layout.topology, index, layout.tensors, ops, layout.attempt).handle
