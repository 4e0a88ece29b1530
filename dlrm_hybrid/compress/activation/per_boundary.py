"""Another codec at each boundary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from dlrm_hybrid.compress.activation.codec import ActivationCodec, Key, Saved, Sections
from dlrm_hybrid.compress.activation.report import BoundaryReport


@final
class PerBoundaryCodec:
    """Passes everything on to the codec of the boundary in the key."""

    def __init__(self, codecs: Mapping[int, ActivationCodec]) -> None:
        """A codec for every boundary of the worker, by number."""
        self._codecs = dict(codecs)

    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Saved]:
        """As that of the boundary."""
        return self._codecs[key.boundary].encode(x_BN, key)

    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Saved]:
        """As that of the boundary."""
        return self._codecs[key.boundary].decode(sections, shape, key)

    def encode_gradient(self, g_BN: Tensor, saved: Saved, key: Key) -> Sections:
        """As that of the boundary."""
        return self._codecs[key.boundary].encode_gradient(g_BN, saved, key)

    def decode_gradient(self, sections: Sections, saved: Saved, key: Key) -> Tensor:
        """As that of the boundary."""
        return self._codecs[key.boundary].decode_gradient(sections, saved, key)

    def tensors(self) -> dict[str, Tensor]:
        """Those of all; the names of each begin with its boundary."""
        return {
            name: tensor
            for codec in self._codecs.values()
            for name, tensor in codec.tensors().items()
        }

    def report(self) -> dict[int, BoundaryReport]:
        """Those of all."""
        reports: dict[int, BoundaryReport] = {}
        for codec in self._codecs.values():
            reports.update(codec.report())
        return reports
