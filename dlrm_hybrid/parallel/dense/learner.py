"""A worker's replica that follows means of gradients with an optimizer of its own."""

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
    """Whether a pull is for `Learner.follow`."""
    return any(section.encoding is Encoding.LEVELS for section in sections)


@final
class Learner:
    """The optimizer of one worker's replica.

    Args:
        replica: by name, contiguous; updated in place.
        optimizer: as that of the servers.
    """

    def __init__(self, replica: Mapping[str, Tensor], optimizer: OptimizerConfig) -> None:
        self._master = MasterWeights(replica, optimizer)

    def follow(
        self, bucket: Sequence[DenseTensor], sections: Sequence[Section], number: int, what: str
    ) -> None:
        """Apply the means of a push, and overwrite what is published as weights.

        Args:
            bucket: the tensors that the sections are of.
            sections: LEVELS, or DENSE of float32.
            number: of the push whose gradients the means are of.
            what: message of an error begins with it.

        Raises:
            DlrmError: a section is none of these, or broken.
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
        """Go on from the `tensors` of servers; raises DataError if a value is missing."""
        copy_into(self._master.tensors(), values)
