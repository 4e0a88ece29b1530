"""Trainers that agree without a network, and one that agrees with itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Spec, TensorReport
from dlrm_hybrid.compress.gradient.coordination import CoordinatedCompressor, Coordination
from dlrm_hybrid.wire.section import Section


@dataclass(frozen=True)
class Group:
    """The compressors of all trainers of a stage, in trainer order."""

    compressors: Sequence[CoordinatedCompressor]
    coordination: Coordination

    def agree(self, gradients_T: Sequence[Mapping[str, Tensor]], step: int) -> None:
        """All rounds of a step."""
        count = sum(spec.count for spec in self.compressors[0].specs)
        for number in range(self.coordination.rounds):
            proposals = [
                one.propose(number, gradients, step)
                for one, gradients in zip(self.compressors, gradients_T, strict=True)
            ]
            agreed = self.coordination.combine(number, step, proposals, count)
            for one in self.compressors:
                one.agree(number, agreed)

    def encode(
        self, gradients_T: Sequence[Mapping[str, Tensor]], step: int
    ) -> list[dict[str, Section]]:
        """What every trainer pushes at a step."""
        self.agree(gradients_T, step)
        return [
            one.encode(gradients, step)
            for one, gradients in zip(self.compressors, gradients_T, strict=True)
        ]


@dataclass(frozen=True)
class Alone:
    """The only trainer of a method that agrees, as a compressor that does not."""

    compressor: CoordinatedCompressor
    coordination: Coordination

    @property
    def specs(self) -> Sequence[Spec]:
        return self.compressor.specs

    def encode(self, gradients: Mapping[str, Tensor], step: int) -> dict[str, Section]:
        return Group([self.compressor], self.coordination).encode([gradients], step)[0]

    def tensors(self) -> dict[str, Tensor]:
        return self.compressor.tensors()

    def report(self) -> dict[str, TensorReport]:
        return self.compressor.report()
