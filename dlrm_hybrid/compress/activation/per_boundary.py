"""Another codec at each boundary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.activation.codec import ActivationCodec, Key, Saved, Sections
from dlrm_hybrid.compress.activation.report import BoundaryReport


@final
class PerBoundaryCodec(ActivationCodec):
    """Passes everything on to the codec of the boundary in the key."""

    def __init__(self, codecs: Mapping[int, ActivationCodec]) -> None:
        """A codec for every boundary of the worker, by number."""
        self._codecs = dict(codecs)

    @override
    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Saved]:
        return self._codecs[key.boundary].encode(x_BN, key)

    @override
    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Saved]:
        return self._codecs[key.boundary].decode(sections, shape, key)

    @override
    def encode_gradient(self, g_BN: Tensor, saved: Saved, key: Key) -> Sections:
        return self._codecs[key.boundary].encode_gradient(g_BN, saved, key)

    @override
    def decode_gradient(self, sections: Sections, saved: Saved, key: Key) -> Tensor:
        return self._codecs[key.boundary].decode_gradient(sections, saved, key)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {
            name: tensor
            for codec in self._codecs.values()
            for name, tensor in codec.tensors().items()
        }

    @override
    def report(self) -> dict[int, BoundaryReport]:
        reports: dict[int, BoundaryReport] = {}
        for codec in self._codecs.values():
            reports.update(codec.report())
        return reports
