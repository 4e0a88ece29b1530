"""Dense weights where they are updated, with their optimizer: on a server or in a lone worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Float32s, Int32s
from dlrm_hybrid.kernels.scatter import gather, put
from dlrm_hybrid.model.optimizer import LrSchedule, Optimizer, init_state
from dlrm_hybrid.types import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning rates of dense weights.

    Attributes:
        optimizer: moves a weight by its mean gradient.
        schedule: learning rate of every push number.
    """

    optimizer: Optimizer
    schedule: LrSchedule


@final
class MasterWeights:
    """Weights by name, updated in place, and the optimizer state of each."""

    def __init__(self, weights: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        self.weights = {name: weight.detach() for name, weight in weights.items()}
        self._config = config
        self._state = init_state(config.optimizer, self.weights)

    def apply_gradient(self, name: str, gradient: Tensor, number: int) -> None:
        """Move one weight by the gradient of the mean loss, at the rate of this push number."""
        config = self._config
        lr = config.schedule.lr(number)
        config.optimizer.apply(self.weights[name], gradient, self._state[name], lr)

    def apply_gradients(self, gradients: Mapping[str, Tensor], number: int) -> None:
        """Move every weight by its gradient of the mean loss, at the rate of this push number."""
        lr = self._config.schedule.lr(number)
        for name, weight in self.weights.items():
            self._config.optimizer.apply(weight, gradients[name], self._state[name], lr)

    def apply_sparse(
        self, name: str, index_K: Int32s, gradient_K: Float32s, number: int
    ) -> Float32s:
        """Move K elements of a flat weight as `apply_gradient` does; returns their new values.

        Args:
            name: name of the weight.
            index_K: indices, each once.
            gradient_K: float32.
            number: push number, which sets the learning rate.

        All other elements keep their values and states, so the optimizer must not move all.
        """
        config = self._config
        weight, state = self.weights[name], self._state[name]
        weight_K = _at(weight, index_K)
        state_K = {slot: _at(state[slot], index_K) for slot in config.optimizer.state_names}
        config.optimizer.apply(
            torch.from_numpy(weight_K),
            torch.from_numpy(gradient_K),
            {**state, **{slot: torch.from_numpy(array_K) for slot, array_K in state_K.items()}},
            config.schedule.lr(number),
        )
        put(index_K, weight_K, weight.view(-1).numpy())
        for slot, array_K in state_K.items():
            put(index_K, array_K, state[slot].view(-1).numpy())
        return weight_K

    @property
    def moves_all(self) -> bool:
        """Whether elements with zero gradient move too."""
        return self._config.optimizer.moves_all

    def tensors(self) -> dict[str, Tensor]:
        """Views of all weights, and of the optimizer state as `<name>.<slot>`."""
        slots = {
            f"{name}.{slot}": tensor
            for name, state in self._state.items()
            for slot, tensor in state.items()
        }
        return {**self.weights, **slots}


def copy_into(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Overwrite `tensors` with the values of the same names; other values are left alone.

    Raises:
        DataError: a value is missing or has another shape.
    """
    for name, tensor in tensors.items():
        value = values.get(name)
        if value is None or value.shape != tensor.shape:
            shape = "missing" if value is None else f"{list(value.shape)}"
            raise DataError(f"{name}: {shape}, it must be {list(tensor.shape)}")
        tensor.copy_(value)


def _at(tensor: Tensor, index_K: Int32s) -> Float32s:
    out_K = np.empty(index_K.size, np.float32)
    gather(index_K, tensor.view(-1).numpy(), out_K)
    return out_K
