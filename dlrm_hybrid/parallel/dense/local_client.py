"""The weights of a world without servers: the only trainer's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.parallel.dense.client import Client
from dlrm_hybrid.parallel.dense.master import MasterWeights, OptimizerConfig, copy_into
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import Version


@final
class LocalClient(Client):
    """The only trainer of a world without servers: its own weights are the masters.

    Args:
        weights: this stage's parameters by name, updated in place.
        optimizer: with its learning rates.
        clock: measures updates of weights.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], optimizer: OptimizerConfig, clock: SpanClock
    ) -> None:
        self._master = MasterWeights(weights, optimizer)
        self._applying = clock.within(Span.APPLY)
        self._pushed = 0

    @override
    def pull(self) -> Program[None]:
        """Do nothing: nobody else updates the weights."""
        yield from ()

    @override
    def push(self, gradients: Mapping[str, Tensor]) -> Program[None]:
        """Update the weights at once."""
        yield from ()
        with self._applying:
            self._master.apply_gradients(gradients, self._pushed)
        self._pushed += 1

    @override
    def settled(self) -> Version:
        return Version(self._pushed)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The masters by name."""
        return self._master.weights

    def tensors(self) -> dict[str, Tensor]:
        """Views of all that a checkpoint must hold, named as a server's."""
        return self._master.tensors()

    @override
    def restart(self, pushed: int, values: Mapping[str, Tensor]) -> None:
        self._pushed = pushed
        copy_into(self._master.tensors(), values)
