"""A replica that applies published mean gradients with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from dlrm_hybrid.parallel.dense.master import MasterWeights, OptimizerConfig, copy_into
from dlrm_hybrid.parallel.topology import DenseTensor
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import array_of
from dlrm_hybrid.wire.section import Encoding, Section, SectionError
from dlrm_hybrid.wire.ternary import mean_of


def holds_means(sections: Sequence[Section]) -> bool:
    """Whether sections hold mean gradients, for `Learner.follow`."""
    return any(section.encoding is Encoding.LEVELS for section in sections)


@final
class Learner:
    """The optimizer of one worker's replica.

    Args:
        replica: by name, contiguous; updated in place.
        optimizer: same as that of the servers.
    """

    def __init__(self, replica: Mapping[str, Tensor], optimizer: OptimizerConfig) -> None:
        self._master = MasterWeights(replica, optimizer)

    def follow(
        self, bucket: Sequence[DenseTensor], sections: Sequence[Section], number: int, what: str
    ) -> None:
        """Apply the mean gradients of a push; overwrite tensors that come as weights.

        Args:
            bucket: tensors of the sections, in their order.
            sections: LEVELS, or DENSE of float32.
            number: push number, which sets the learning rate.
            what: beginning of an error message.

        Raises:
            DlrmError: a section has another encoding or is malformed.
        """
        for tensor, section in zip(bucket, sections, strict=True):
            try:
                if section.encoding is not Encoding.LEVELS:
                    weight = torch.from_numpy(array_of(section).copy()).view(tensor.shape)
                    self._master.weights[tensor.name].copy_(weight)
                    continue
                mean = torch.from_numpy(mean_of(section)).view(tensor.shape)
            except (SectionError, ValueError) as error:
                raise DlrmError(f"{what}: {error}") from error
            self._master.apply_gradient(tensor.name, mean, number)

    def restart(self, values: Mapping[str, Tensor]) -> None:
        """Resume from the servers' `tensors`; raises DataError if a value is missing."""
        copy_into(self._master.tensors(), values)
