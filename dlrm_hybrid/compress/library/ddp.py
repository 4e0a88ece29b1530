"""Communication hooks of torch's DistributedDataParallel, for every method.

DDP hands a hook its gradients in buckets, and rebuilds these after the first step. So nothing here
goes by buckets: the hook waits for the last one of a step, compresses all parameters together, and
then fulfils what it has promised for the others.
"""

# No postponed annotations: DDP compares those of a hook with its own types.
import gc
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from dlrm_hybrid.compress.library.parameters import copies, require_state, require_whole
from dlrm_hybrid.types import DivergedError

if TYPE_CHECKING:  # numba, which what compresses loads, takes half a second
    from dlrm_hybrid.compress.gradient.context import Builder
    from dlrm_hybrid.compress.library.compressor import Options, ParameterCompressor
    from dlrm_hybrid.compress.library.exchange import Traffic


class _Promise(NamedTuple):
    """A bucket of which DDP waits for the mean."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    buffer: Tensor
    future: Future[Tensor]


@final
class DdpState:
    """State of a DDP communication hook: what a method remembers of each parameter between steps.

    Made by `ddp_state` of a method. It can be pickled, without its process group. A copy attaches
    itself to the DDP module that it is registered with; call `bind` to attach it to another.

    Args:
        method: a record such as those of `dlrm_hybrid.compress`.
        model: the DDP module, which names the parameters; None if they need no names.
        process_group: of the trainers; None for the DDP module's, or for the default group.
        options: settings that some methods need from the trainer.

    Raises:
        ValueError: the method needs an option that is missing; names it.
    """

    def __init__(
        self,
        method: "Builder",
        model: Module | None,
        process_group: dist.ProcessGroup | None,
        options: "Options",
    ) -> None:
        options.check(method)
        self.method, self._options = method, options
        self._compressor: ParameterCompressor | None = None
        self._pending: Mapping[str, Any] | None = None
        self._has_names = False
        self.bind(model, process_group)
        self._require_last_layer()

    def bind(self, model: Module | None, process_group: dist.ProcessGroup | None = None) -> None:
        """Attach the state to a model; what it remembers is matched to parameters by name.

        Args:
            model: the DDP module; see `ddp_state` for a plain model or None.
            process_group: of the trainers; None for the DDP module's, or for the default group.

        Raises:
            ValueError: other ranks hold parts of a parameter, as in FSDP; names it.
        """
        if model is not None and not isinstance(model, Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"model: is a {type(model).__name__}; pass the DDP module, as in ddp_state(ddp)"
            )
        if self._compressor is not None:
            self._pending = self.state_dict()
        self._group: dist.ProcessGroup | None = process_group
        self._compressor = None
        self._finds_unused, self._names = True, dict[Tensor, str]()
        self._promises: list[_Promise] = []
        ignored: Collection[str] = ()
        for module in _wrappers(model):
            if isinstance(module, DistributedDataParallel):
                self._finds_unused = bool(module.find_unused_parameters)
                self._group = process_group or cast("dist.ProcessGroup", module.process_group)
            self._has_names = True
            self._names = {parameter: name for name, parameter in module.named_parameters()}
            ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        for parameter, name in self._names.items():
            if name not in ignored:
                require_whole(name, parameter)

    @property
    def traffic(self) -> "Traffic":
        """Bytes exchanged since the state was attached to its model."""
        from dlrm_hybrid.compress.library.exchange import Traffic

        return Traffic() if self._compressor is None else self._compressor.traffic

    @property
    def compressor(self) -> "ParameterCompressor | None":
        """The compressor of all parameters; None before the first step."""
        return self._compressor

    def state_dict(self) -> dict[str, Any]:
        """Everything this rank remembers, as plain values and tensors; save it on every rank.

        Raises:
            ValueError: no model was given, so parameters have no names.
        """
        if not self._has_names:
            raise ValueError("parameters have no names to be saved by: give ddp_state the model")
        if self._compressor is not None:
            return self._compressor.state_dict()
        if self._pending is not None:
            return {**self._pending, "tensors": copies(self._pending["tensors"])}
        return {"method": repr(self.method), "step": 0, "trainer": None, "tensors": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that the same rank saved, of the same method and model.

        Args:
            state: from `state_dict`.

        Raises:
            ValueError: it belongs to another method, rank or model, or no model was given.
        """
        if not self._has_names:
            raise ValueError("parameters have no names to be loaded by: give ddp_state the model")
        require_state(state, repr(self.method))
        if self._compressor is not None:
            self._compressor.load_state_dict(state)
        else:
            self._pending = {**state, "tensors": copies(state["tensors"])}

    def __getstate__(self) -> dict[str, Any]:
        pending = self._pending if self._compressor is None else self.state_dict()
        return {"method": self.method, "options": self._options, "held": pending}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.method, self._options, self._pending = state["method"], state["options"], state["held"]
        self._compressor, self._has_names = None, False
        self.bind(None)

    def _require_last_layer(self) -> None:
        if self.method.leaves_last_layer and not self._names and self._options.last_layer != "":
            raise ValueError(
                f"{type(self.method).__name__} leaves the last layer in float32: give ddp_state "
                'the model, and bind to it what was unpickled; or last_layer=""'
            )

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Take one bucket of gradients; the last bucket of a step completes the futures of all."""
        if bucket.index() == 0:
            self._promises = []  # of a step that an error has ended
        buffer = bucket.buffer()
        # DDP waits for work of a GPU only in futures that know of it.
        future = Future[Tensor](devices=[buffer.device] if buffer.is_cuda else None)
        self._promises.append(_Promise(bucket.parameters(), bucket.gradients(), buffer, future))
        if bucket.is_last():
            promises, self._promises = self._promises, []
            try:
                self._average(promises)
            except Exception as error:
                for promise in promises:
                    promise.buffer.zero_()
                _raise_after_backward(error)
            for promise in promises:
                promise.future.set_result(promise.buffer)
        return future

    def _average(self, promises: list[_Promise]) -> None:
        from dlrm_hybrid.compress.library.exchange import Exchange, Traffic

        gathers = self._finds_unused or not self.method.sends_all
        with Exchange(self._group, Traffic()).shares_failure() if gathers else nullcontext():
            if any(len(promise.parameters) != len(promise.gradients) for promise in promises):
                raise ValueError(
                    "DDP hands over gradients without their parameters, as of sparse ones "
                    "(sparse=True): only dense gradients are compressed"
                )
            pairs = (zip(p.parameters, p.gradients, strict=True) for p in promises)
            gradients = dict(chain.from_iterable(pairs))
            if self._compressor is None:
                self._compressor = self._new_compressor(gradients)
            parameters = self._compressor.parameters
            if len(parameters) != len(gradients) or any(p not in gradients for p in parameters):
                raise ValueError(
                    "parameters are not those of the first step: a state serves one model"
                )
        ordered = [gradients[p] for p in parameters]
        self._compressor.average(ordered, self._group, finds_unused=self._finds_unused)

    def _new_compressor(self, gradients: Mapping[Tensor, Tensor]) -> "ParameterCompressor":
        """Compresses parameters in the model's order; without a model, in the first step's."""
        from dlrm_hybrid.compress.library.compressor import ParameterCompressor

        if self._pending and not self._has_names:
            self.bind(_owner(self), self._group)
        self._require_last_layer()
        names = self._names or {parameter: f"{index}" for index, parameter in enumerate(gradients)}
        named = [(name, parameter) for parameter, name in names.items() if parameter in gradients]
        if len(named) < len(gradients):
            raise ValueError(f"{len(gradients) - len(named)} parameters are not those of the model")
        compressor = ParameterCompressor(self.method, named, self._options)
        if self._pending:
            if not self._names:
                raise ValueError(
                    "a state that was pickled is not registered with one DDP module: bind(ddp)"
                )
            compressor.load_state_dict(self._pending)
            self._pending = None
        return compressor


def _wrappers(model: Module | None) -> Iterator[Module]:
    """A model, then what DDP and torch.compile have wrapped; the last one names the parameters."""
    while model is not None:
        yield model
        inner = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
        model = cast("Module | None", getattr(model, inner, None))


def _owner(state: DdpState) -> DistributedDataParallel | None:
    """The DDP module with which a state is registered; None if there is none, or several are.

    A hook is handed gradients and no module, but the module keeps what was registered with it.
    """
    modules = [
        cast("DistributedDataParallel", item)
        for item in gc.get_objects()
        if DistributedDataParallel in type(item).__mro__  # without asking the object itself
    ]
    owners = [
        module
        for module in modules
        if any(registered is state for _, registered in getattr(module, "_comm_hooks", ()))
    ]
    return owners[0] if len(owners) == 1 else None


def _raise_after_backward(error: Exception) -> None:
    """Let a backward pass end before it fails: DDP begins none after one that has not ended."""

    def fail() -> None:
        raise error

    engine: Any = vars(Variable)["_execution_engine"]
    try:
        # DDP queues its own end once its hook has returned, and this must come after it.
        engine.queue_callback(lambda: engine.queue_callback(fail))
    except RuntimeError:  # in no backward pass: a rank that waits in DDP's join
        if not isinstance(error, DivergedError):
            raise error from None
        # It must go on waiting: the ranks that it waits for may go on with the next step.
        logging.getLogger("dlrm_hybrid").warning("in DDP's join: %s", error)


def ddp_hook(state: DdpState, bucket: GradBucket) -> Future[Tensor]:
    """DDP communication hook of every method.

    `ddp.register_comm_hook(method.ddp_state(ddp), ddp_hook)`

    Args:
        state: from `ddp_state` of a method.
        bucket: gradients, from DDP.

    Returns:
        A future of the mean, over all ranks, of the compressed gradients.
    """
    if not isinstance(state, DdpState):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"ddp_hook: the state is {state!r:.80}, must be of ddp_state: "
            "ddp.register_comm_hook(method.ddp_state(ddp), ddp_hook)"
        )
    return state.reduce(bucket)
