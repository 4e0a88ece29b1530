"""A replica that learns as its servers do, from the means that they tell instead of weights.

Both apply one optimizer to the same bits, so they stay equal (W. Wen et al., TernGrad, NIPS 2017,
parameter localisation). What does not become ternary is told as weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from dlrm_hybrid.parallel.dense.master import Learning, Master, copy_into
from dlrm_hybrid.parallel.topology import DenseTensor
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import array_of
from dlrm_hybrid.wire.levels import mean_of
from dlrm_hybrid.wire.section import Encoding, Section, SectionError


def holds_means(sections: Sequence[Section]) -> bool:
    """Whether a pull is for `Learner.follow`."""
    return any(section.encoding is Encoding.LEVELS for section in sections)


@final
class Learner:
    """The optimizer of one worker's replica.

    Args:
        replica: by name, contiguous; learned in place.
        learning: as that of the servers.
    """

    def __init__(self, replica: Mapping[str, Tensor], learning: Learning) -> None:
        self._master = Master(replica, learning)

    def follow(
        self, unit: Sequence[DenseTensor], sections: Sequence[Section], step: int, what: str
    ) -> None:
        """Learn from the means of `step`, and overwrite what is told as weights.

        Args:
            unit: the tensors that the sections are of.
            sections: LEVELS, or DENSE of float32.
            step: whose gradients the means are of.
            what: message of an error begins with it.

        Raises:
            DlrmError: a section is none of these, or broken.
        """
        for tensor, section in zip(unit, sections, strict=True):
            try:
                if section.encoding is not Encoding.LEVELS:
                    weight = torch.from_numpy(array_of(section).copy()).view(tensor.shape)
                    self._master.weights[tensor.name].copy_(weight)
                    continue
                mean = torch.from_numpy(mean_of(section)).view(tensor.shape)
            except (SectionError, ValueError) as error:
                raise DlrmError(f"{what}: {error}") from error
            self._master.learn(tensor.name, mean, step)

    def restart(self, values: Mapping[str, Tensor]) -> None:
        """Go on from the `tensors` of servers; raises DataError if a value is missing."""
        copy_into(self._master.tensors(), values)
