"""Applies a method to the parameters of a model, in any torch training loop.

Shapes: N elements of T tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.device.feedback import DeviceFeedback, can_move
from dlrm_hybrid.compress.device.sums import current
from dlrm_hybrid.compress.gradient.collective import encode_together
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.context import Builder, StageContext, module_of
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.host import CPU
from dlrm_hybrid.compress.library.averaging import (
    Averaging,
    average_on_device,
    averaging_of,
    used_by_any,
)
from dlrm_hybrid.compress.library.exchange import Exchange, Traffic
from dlrm_hybrid.compress.library.packets import fingerprint_of
from dlrm_hybrid.compress.library.parameters import (
    Gradients,
    Parameters,
    copies,
    homes_of,
    is_plain,
    require_finite,
    require_gradients,
    require_state,
    tensors_of,
)
from dlrm_hybrid.compress.report import SentReport
from dlrm_hybrid.wire.packet import encode_packet


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings that some methods need from the trainer, besides gradients.

    Attributes:
        seed: of all random choices; must be the same on all trainers.
        lr: function from step (counted from 0) to learning rate; for `residual="update"`.
        last_layer: name of the module that TernGrad sends in float32; None for that of the last
            parameter, "" for no module.
        trainer: index of this trainer, for `encode`; elsewhere it is the rank in a process group.
        trainers: number of trainers, likewise.
    """

    seed: int = 0
    lr: Callable[[int], float] | None = None
    last_layer: str | None = None
    trainer: int = 0
    trainers: int = 1

    def check(self, method: Builder) -> None:
        """Raise ValueError if the method needs an option that is missing; names it."""
        if method.uses_lr and self.lr is None:
            raise ValueError("residual = 'update': needs lr=, the learning rate by step")

    def check_layer(self, names: Sequence[str]) -> None:
        """Raise ValueError if there is no such last layer among the parameters."""
        layer = self.last_layer
        if layer and layer not in {module_of(name) for name in names}:
            raise ValueError(f"last_layer = {layer!r}: none of the parameters is in this module")

    def last_module(self, names: Sequence[str]) -> str | None:
        """Name of the module that TernGrad sends in float32; None for none."""
        return module_of(names[-1]) if self.last_layer is None else self.last_layer or None


@final
class ParameterCompressor:
    """Compresses the gradients of a model's parameters and keeps what is not sent for later steps.

    Made by `for_parameters` of a method.

    Args:
        method: a record such as those of `dlrm_hybrid.compress`.
        named_parameters: from `model.named_parameters()`; those that need no gradient are left out.
        options: settings that some methods need from the trainer.

    Raises:
        ValueError: a name or a parameter occurs twice, none needs a gradient, one cannot be
            compressed, these are not pairs of names and tensors, or the method needs an option that
            is missing; names it.

    Attributes:
        method: the method.
        parameters: that are compressed; lists of gradients have the same order.
        traffic: bytes exchanged with other trainers.
    """

    def __init__(
        self,
        method: Builder,
        named_parameters: Iterable[tuple[str, Tensor]],
        options: Options,
    ) -> None:
        options.check(method)
        self._named = Parameters(named_parameters)
        if not 0 <= options.trainer < options.trainers:
            raise ValueError(f"trainer = {options.trainer}: must be below {options.trainers}")
        self.method, self._options = method, options
        self.parameters = self._named.tensors
        pairs = enumerate(zip(self._named.names, self.parameters, strict=True))
        self._layout = Layout([Spec(index, name, tuple(p.shape)) for index, (name, p) in pairs])
        options.check_layer(self._named.names)
        self._fingerprint = fingerprint_of([(spec.name, spec.shape) for spec in self._layout.specs])
        self._place: tuple[int, int] | None = None
        self._compressor: Compressor | None = None
        self._averaging: Averaging | None = None
        self._pending: Mapping[str, Any] | None = None
        self._deferred: dict[int, Tensor] = {}  # decoded for tensors that no trainer then used
        self._reduced = 0
        self.traffic = Traffic()

    @property
    def names(self) -> list[str]:
        """The names of the parameters, in their order."""
        return self._named.names

    def encode(self, gradients: Gradients, step: int) -> bytes:
        """Compress gradients to a packet for `decode`; the rest stays here for the next steps.

        Args:
            gradients: of all parameters, by name or in their order; of any dtype and device.
            step: counted from 0.

        Raises:
            DivergedError: a gradient is not finite; the residuals are unchanged.
            ValueError: the method needs coordination between trainers, see `reduce_gradients`; or
                the gradients do not match the parameters.
        """
        compressor = self._at(self._options.trainer, self._options.trainers)
        if compressor.rounds:
            raise ValueError(
                f"{self.method!r}: trainers agree in every step; use reduce_gradients or ddp_state"
            )
        staged = self._staged(gradients, compressor)
        if not isinstance(compressor, DeviceFeedback):
            require_finite(staged, step)
        (sent,) = encode_together([compressor.encode(staged, step)], step, self._layout.size)
        return encode_packet(self._fingerprint, [*sent.sections().values()])

    def reduce_gradients(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Replace every parameter's `.grad` by the mean of all trainers' compressed gradients.

        All trainers of the group call it between `backward` and the optimizer step. A missing
        gradient counts as zeros; a parameter that has none on any trainer keeps none.

        Args:
            process_group: of the trainers; None for the default group.

        Raises:
            DivergedError: a gradient is not finite, here or on another trainer. Training can
                continue: the finite gradients of this step stay in the residuals.
            ValueError: a gradient is sparse; other trainers then raise DivergedError. Or trainers
                are at different steps, or have different parameters.

        After an error all gradients are zeros, of which momentum or weight decay still make a step.
        """
        grads = [parameter.grad for parameter in self.parameters]
        pairs = zip(self.parameters, grads, strict=True)
        gradients = [torch.zeros_like(p) if grad is None else grad for p, grad in pairs]
        try:
            used = self.average(gradients, process_group, finds_unused=True)
        except BaseException:
            for gradient in gradients:
                gradient.zero_()
            raise
        for parameter, gradient, is_used in zip(self.parameters, gradients, used, strict=True):
            if is_used:
                parameter.grad = gradient

    def average(
        self,
        gradients: Sequence[Tensor],
        process_group: dist.ProcessGroup | None,
        *,
        finds_unused: bool,
    ) -> list[bool]:
        """Replace gradients, in place, by the mean of all trainers' compressed gradients.

        Args:
            gradients: of all parameters, in their order.
            process_group: as in `reduce_gradients`.
            finds_unused: a parameter whose gradient is zero on all trainers counts as unused: its
                update is held back until it is used.

        Returns:
            For each tensor, whether it was replaced.
        """
        exchange = Exchange(process_group, self.traffic, self._reduced, self._fingerprint)
        is_dense = self.method.sends_all
        # DDP hands over dense gradients, so that nothing fails where nothing is gathered.
        gathers = finds_unused or not is_dense
        with exchange.shares_failure() if gathers else nullcontext():
            compressor = self._at(exchange.rank, exchange.size)
            staged = self._staged(gradients, compressor)
        values = [*staged.values()]
        pairs = zip(gradients, values, strict=True)
        copied = [(target, x) for target, x in pairs if target.data_ptr() != x.data_ptr()]
        if isinstance(compressor, DeviceFeedback):
            with current(compressor.homes[0]):
                args = (exchange, compressor, self._averages(compressor), values, self._reduced)
                used_T = average_on_device(*args, finds_unused=finds_unused)
        else:
            used_T = self._average_on_host(exchange, compressor, staged, finds_unused=finds_unused)
        self._defer_unused(values, used_T)
        for target, value in copied:
            target.copy_(value)
        self._count(exchange.size)
        return used_T.tolist()

    def _average_on_host(
        self,
        exchange: Exchange,
        compressor: Compressor,
        staged: Mapping[str, Tensor],
        *,
        finds_unused: bool,
    ) -> NDArray[np.bool_]:
        """Overwrite tensors on the CPU by the mean; returns which of them any trainer has used."""
        values = [*staged.values()]
        is_dense = self.method.sends_all
        if not is_dense:
            with exchange.shares_failure():
                require_finite(staged, self._reduced)
        used_T = np.array([not finds_unused or bool(value.any()) for value in values])
        head = np.packbits(used_T).tobytes() if finds_unused else b""
        if is_dense:
            heads = exchange.gather(head) if head else []
            exchange.mean_(values)
            return used_by_any(used_T, heads)
        encoding = compressor.encode(staged, self._reduced)
        sent = exchange.drive(encoding, self._reduced, self._layout.size)
        try:
            gathered = self._averages(compressor).gather(exchange, sent, head)
            gathered.mean_(values)
        except BaseException:  # whatever it is, nobody has used what was sent
            compressor.take_back(sent)
            raise
        return used_by_any(used_T, gathered.heads)

    def _averages(self, compressor: Compressor) -> Averaging:
        if self._averaging is None:
            self._averaging = averaging_of(compressor, self._fingerprint)
        return self._averaging

    def _count(self, trainers: int) -> None:
        self._reduced += 1
        self.traffic.steps += 1
        self.traffic.dense += 8 * self._layout.size * (trainers - 1) / trainers

    def state_dict(self) -> dict[str, Any]:
        """Everything this trainer's compressor remembers; save it on every trainer."""
        if self._pending is not None:
            return {**self._pending, "tensors": copies(self._pending["tensors"])}
        tensors = {} if self._compressor is None else self._compressor.tensors()
        deferred = {f"{self.names[index]}.owed": tensor for index, tensor in self._deferred.items()}
        return {
            "method": repr(self.method),
            "step": self._reduced,
            "trainer": None if self._place is None else self._place[0],
            "tensors": copies({**tensors, **deferred}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that the same trainer saved, of the same method and parameters.

        Args:
            state: from `state_dict`.

        Raises:
            ValueError: it belongs to another method, trainer or other parameters; names what
                differs. Some of this may only be noticed in the first step.
        """
        require_state(state, repr(self.method))
        if self._averaging is not None:
            self._averaging.restart()
        if not state["step"] and not state["tensors"]:  # it had done nothing
            self._compressor = self._place = self._pending = None
            self._deferred = {}
        elif self._compressor is None or self._place is None:
            self._pending = {**state, "tensors": copies(state["tensors"])}
        else:
            self._restore(self._compressor, state, self._place[0])
        self._reduced = state["step"]

    def report(self) -> dict[str, SentReport]:
        """How many elements of each parameter were sent since the last call, by name."""
        return {} if self._compressor is None else self._compressor.report()

    def _at(self, trainer: int, trainers: int) -> Compressor:
        if self._compressor is not None and self._place is not None:
            if self._place != (trainer, trainers):
                raise ValueError(
                    f"compresses as trainer {self._place[0]} of {self._place[1]} since its first "
                    f"step, not as {trainer} of {trainers}"
                )
            return self._compressor
        layout, options = self._layout, self._options
        context = StageContext(
            layout=layout,
            trainer=trainer,
            trainers=trainers,
            model_elements=layout.size,
            last_layer=options.last_module(self.names),
            lr=options.lr or (lambda step: 1.0),
            seed=options.seed,
        )
        compressor = self.method.build(context)
        homes = homes_of(self.parameters)
        if homes and can_move(compressor):
            compressor = DeviceFeedback(compressor, homes)
        elif homes:
            logging.getLogger("dlrm_hybrid").warning(
                f"{self.method!r} computes on the CPU: all gradients go there and back in each step"
            )
        if self._pending is not None:
            self._restore(compressor, self._pending, trainer)
        self._place, self._compressor, self._pending = (trainer, trainers), compressor, None
        return compressor

    def _homes(self, compressor: Compressor) -> Sequence[torch.device]:
        return compressor.homes or [CPU] * len(self.parameters)

    def _restore(self, compressor: Compressor, state: Mapping[str, Any], trainer: int) -> None:
        if state.get("trainer") not in (None, trainer):
            raise ValueError(
                f"the state is of trainer {state['trainer']}, and this is trainer {trainer}: "
                "what each has not sent is in its own"
            )
        views, saved = compressor.tensors(), dict(state["tensors"])
        homes = self._homes(compressor)
        deferred = {
            index: saved.pop(f"{name}.owed").to(homes[index], copy=True)
            for index, name in enumerate(self.names)
            if f"{name}.owed" in saved
        }
        differing = sorted(views.keys() ^ saved.keys())
        differing += [
            name for name in views.keys() & saved.keys() if views[name].shape != saved[name].shape
        ]
        differing += [
            f"{self.names[index]}.owed"
            for index, tensor in deferred.items()
            if tensor.shape != self.parameters[index].shape
        ]
        if differing:
            raise ValueError(f"the state is of other parameters: {', '.join(differing[:3])}")
        for name, view in views.items():
            view.copy_(saved[name])
        self._deferred = deferred

    def _staged(self, gradients: Gradients, compressor: Compressor) -> dict[str, Tensor]:
        """The gradients by name, as float32 where it reads them; copies only if needed."""
        if isinstance(gradients, Mapping):
            missing = [name for name in self.names if name not in gradients]
            if missing:
                raise ValueError(f"no gradient of {', '.join(missing[:3])}")
            gradients = [gradients[name] for name in self.names]
        tensors = tensors_of(gradients)
        require_gradients(self.names, self._layout.counts, tensors)
        self._named.require_frozen()
        grads = [tensor.detach() for tensor in tensors]
        staged = [
            g if is_plain(g, home) else g.to(home, torch.float32).contiguous()
            for g, home in zip(grads, self._homes(compressor), strict=True)
        ]
        return dict(zip(self.names, staged, strict=True))

    def _defer_unused(self, gradients: Sequence[Tensor], used_T: NDArray[np.bool_]) -> None:
        """Set aside the means of tensors that nobody used; add those of tensors used again."""
        for index in np.flatnonzero(~used_T).tolist():
            if gradients[index].any():
                deferred = self._deferred.setdefault(index, torch.zeros_like(gradients[index]))
                deferred.add_(gradients[index])
                gradients[index].zero_()
        for index in [*self._deferred]:
            if used_T[index]:
                gradients[index].add_(self._deferred.pop(index))
