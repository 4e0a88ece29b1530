"""Trainers without a network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dlrm_hybrid.compress.gradient.collective import Sections, encode_together
from dlrm_hybrid.compress.gradient.compressor import Compressor, Encoding
from dlrm_hybrid.compress.gradient.layout import Spec
from dlrm_hybrid.wire.section import Section


@dataclass(frozen=True)
class Group:
    """The compressors of all trainers of a stage, in trainer order."""

    compressors: Sequence[Compressor]

    def encode(
        self, gradients_T: Sequence[Mapping[str, Tensor]], step: int
    ) -> list[dict[str, Section]]:
        """What every trainer pushes at a step."""
        encodings = [
            one.encode(gradients, step)
            for one, gradients in zip(self.compressors, gradients_T, strict=True)
        ]
        count = elements(self.compressors[0].layout.specs)
        return [sent.sections() for sent in encode_together(encodings, step, count)]


def encoded(compressor: Compressor, gradients: Mapping[str, Tensor], step: int) -> dict:
    """What the only trainer pushes; it agrees with itself if it must."""
    return Group([compressor]).encode([gradients], step)[0]


def elements(specs: Sequence[Spec]) -> int:
    return sum(spec.count for spec in specs)


def first_round(encoding: Encoding) -> Sections:
    """What a trainer contributes to the first round of a step."""
    return next(encoding).value


def ended(encoding: Encoding, agreed: Sections) -> dict[str, Section]:
    """What is sent after the last round of a step, of which this is the result."""
    try:
        encoding.send(agreed)
    except StopIteration as end:
        return end.value.sections()
    raise AssertionError("there was another round")
