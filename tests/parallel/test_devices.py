"""Whoever sends or serves weights names a tensor of another device."""

import pytest
import torch

from dlrm_hybrid.model.optimizer import Constant, Sgd
from dlrm_hybrid.parallel.dense.bucket import Bucket, ServerOptions
from dlrm_hybrid.parallel.dense.master import OptimizerConfig
from dlrm_hybrid.parallel.dense.sections import flat_views
from dlrm_hybrid.parallel.messages import message
from dlrm_hybrid.parallel.policies import Lockstep
from dlrm_hybrid.parallel.topology import lay_out
from dlrm_hybrid.wire.frame import Kind

NAME = "top.0.weight"
ELSEWHERE = {NAME: torch.zeros(3, 2, device="meta")}
NAMED = rf"{NAME} is on meta, .* pass its \.cpu\(\)"


def test_replicas_servers_and_messages_refuse_tensors_of_another_device() -> None:
    with pytest.raises(ValueError, match=NAMED):
        flat_views(ELSEWHERE)
    with pytest.raises(ValueError, match=NAMED):
        message(Kind.WEIGHTS, 0, 0, 0, {}, ELSEWHERE)
    tensors = lay_out({NAME: (3, 2)}, {NAME: 0}, 1)
    optimizer = OptimizerConfig(optimizer=Sgd(), schedule=Constant(base_lr=0.1))
    options = ServerOptions(policy=Lockstep(), optimizers=[optimizer], check_every=1, attempt=0)
    with pytest.raises(ValueError, match=NAMED):
        Bucket(tensors, ELSEWHERE, options, ())
