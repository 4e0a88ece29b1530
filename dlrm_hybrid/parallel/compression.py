"""The compressors of one worker: their state and their counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import final

from torch import Tensor

from dlrm_hybrid.compress.activation.codec import ActivationCodec
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.dense.master import copy_into
from dlrm_hybrid.parallel.tables.base import Tables
from dlrm_hybrid.telemetry.compression import ACTIVATION, GRADIENT, counted
from dlrm_hybrid.types import Group


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The compressors of one worker.

    Attributes:
        trainer: number of the worker's trainer.
        gradients: compressor of pushes; None where there is no server.
        activations: codec per boundary number.
        tables: embedding tables, at the stage of the interaction.
        turn: held by the thread that compresses gradients or reads counters.
    """

    trainer: int
    gradients: Compressor | None
    activations: Mapping[int, ActivationCodec]
    tables: Tables | None = None
    turn: Lock = field(default_factory=Lock, repr=False)

    def pieces(self) -> list[Piece]:
        """Views of the state that a checkpoint must hold, by names unique to this worker."""
        return full_pieces(self._tensors(), Group.COMPRESSOR)

    def _tensors(self) -> dict[str, Tensor]:
        state = {
            f"boundary.{boundary}.{name}": tensor
            for boundary, codec in self.activations.items()
            for name, tensor in codec.tensors().items()
        }
        if self.gradients is not None:
            state |= self.gradients.tensors()
        return {f"trainer.{self.trainer}.{name}": tensor for name, tensor in state.items()}

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Resume from `pieces`, if a checkpoint has any; raises DataError if one does not fit."""
        tensors = self._tensors()
        if not tensors.keys().isdisjoint(values):
            copy_into(tensors, values)

    def counts(self) -> dict[str, dict[str, float]]:
        """Compression counters since the last call, as `telemetry.compression` lays them out."""
        activations = {
            f"{ACTIVATION}{boundary}": codec.report()
            for boundary, codec in self.activations.items()
        }
        with self.turn:
            gradients = self.gradients.report() if self.gradients is not None else {}
        reports = activations | {f"{GRADIENT}{name}": report for name, report in gradients.items()}
        looked_up: Mapping[str, tuple[int, int]] = {}
        if self.tables is not None:
            looked_up = self.tables.counts()
        rows = {
            name: counted(elements, sent, 0.0, 0)
            for name, (elements, sent) in looked_up.items()
            if elements
        }
        return rows | {
            name: counted(report.elements, report.sent, report.threshold_sum, report.thresholds)
            for name, report in reports.items()
            if report is not None
        }
