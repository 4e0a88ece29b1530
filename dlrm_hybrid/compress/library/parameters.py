"""Parameters and gradients that can be compressed, and the errors for those that cannot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dlrm_hybrid.compress.host import CPU, not_finite
from dlrm_hybrid.wire.section import MAX_COUNT

_FSDP = "_fsdp_wrapped_module"  # in the names of what FSDP's first version has wrapped

Gradients = Sequence[Tensor] | Mapping[str, Tensor]


@final
class Parameters:
    """The parameters of a model that are trained, by their names.

    Raises:
        ValueError: a name or a parameter is there twice, none needs a gradient, one cannot be
            compressed, they are too many, or these are no pairs of names and tensors.

    Attributes:
        names: of the parameters that need gradients.
        tensors: these parameters.
    """

    def __init__(self, named: Iterable[object]) -> None:
        pairs = [*_pairs(named)]
        trained = [(name, p) for name, p in pairs if p.requires_grad]
        self.names = [name for name, _ in trained]
        self.tensors = [p for _, p in trained]
        self._frozen = [(name, p) for name, p in pairs if not p.requires_grad]
        if not trained:
            raise ValueError("named_parameters: there is none that needs a gradient")
        if len({*self.names}) != len(trained):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(
                f"named_parameters: must be of different names; {twice} is there twice"
            )
        name_of: dict[Tensor, str] = {}
        for name, p in trained:
            require_whole(name, p)
            if p.is_complex():
                raise ValueError(f"{name} is {p.dtype}: only real numbers are compressed")
            if p in name_of:
                raise ValueError(
                    f"named_parameters: {name_of[p]} and {name} are one parameter, which would "
                    "be reduced twice; model.named_parameters() names each once"
                )
            name_of[p] = name
        elements = sum(p.numel() for p in self.tensors)
        if elements > MAX_COUNT:
            raise ValueError(
                f"named_parameters: {elements:,} elements, at most {MAX_COUNT:,} have a position; "
                "give several compressors a part each"
            )

    def require_frozen(self) -> None:
        """Raise ValueError if a parameter that needed no gradient does now; names it."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"{name} needed no gradient when this compressor was made, and now does: make "
                    "a new one, for this one would leave it different on every rank"
                )


def require_whole(name: str, parameter: Tensor) -> None:
    """Raise ValueError if other ranks have the rest of a parameter; names it."""
    if _FSDP in name or is_traceable_wrapper_subclass(parameter):
        kind = "a part of FSDP's" if _FSDP in name else f"a {type(parameter).__name__}"
        raise ValueError(
            f"{name} is {kind}: FSDP and tensor parallelism spread parameters over ranks; "
            "compression is for plain tensors, as in DDP"
        )


def is_plain(tensor: Tensor, home: torch.device = CPU) -> bool:
    """Whether kernels can read and write it: contiguous float32 on their device."""
    is_float32 = tensor.dtype is torch.float32
    return tensor.device == home and is_float32 and tensor.is_contiguous()


def tensors_of(gradients: Gradients) -> list[Tensor]:
    """The tensors in their order."""
    return [*(gradients.values() if isinstance(gradients, Mapping) else gradients)]


def homes_of(parameters: Sequence[Tensor]) -> list[torch.device]:
    """The GPUs of the parameters; none if some are elsewhere."""
    homes = [p.device for p in parameters]
    return homes if all(home.type == "cuda" for home in homes) else []


def require_gradients(names: Sequence[str], counts: Sequence[int], grads: Sequence[object]) -> None:
    """Raise ValueError if gradients cannot be compressed as tensors of so many elements."""
    if len(grads) != len(names):
        raise ValueError(f"{len(grads)} gradients of {len(names)} parameters")
    for name, count, gradient in zip(names, counts, grads, strict=True):
        fault = _fault(gradient)
        if not fault and isinstance(gradient, Tensor) and gradient.numel() != count:
            fault = f"of {gradient.numel()} elements: must be of {count}, as its parameter is"
        if fault:
            raise ValueError(f"the gradient of {name} is {fault}")


def require_state(state: Mapping[str, Any], method: str) -> None:
    """Raise ValueError if this is no state of a compressor of this method; says why."""
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"the state is {_shown(state)}: it is not of state_dict()")
    missing = sorted({"method", "step", "tensors"} - {*state})
    if missing:
        raise ValueError(f"the state has no {', '.join(missing)}: it is not of state_dict()")
    if state["method"] != method:
        raise ValueError(f"the state is of {state['method']!s:.200}, and this is {method}")
    for key in ("step", "trainer"):
        count = state.get(key)
        if not (type(count) is int and count >= 0) and not (key == "trainer" and count is None):
            raise ValueError(f"the state's {key} is {_shown(count)}: must be a whole number")
    tensors = state["tensors"]
    if not isinstance(tensors, Mapping):
        raise ValueError(f"the state's tensors are {_shown(tensors)}: must be tensors by name")
    for name, tensor in cast("Mapping[object, object]", tensors).items():
        if fault := _unfit(tensor):
            raise ValueError(f"the state's tensor {_shown(name)} is {fault}")


def _unfit(value: object) -> str:
    """Why a value cannot be a residual, threshold or momentum; empty if it can be."""
    fault = _fault(value)
    if fault or not isinstance(value, Tensor):
        return fault
    if value.is_meta:
        return "on the device meta, without values"
    return "" if value.isfinite().all() else "not finite"


def _shown(value: object) -> str:
    """A value of the caller's in a message; a tensor or model would fill the screen."""
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors of a state."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def require_finite(gradients: Mapping[str, Tensor], step: int) -> None:
    """Raise DivergedError if a gradient is not finite, before it spoils a residual for good."""
    for name, gradient in gradients.items():
        # A sum is one pass that allocates nothing; of finite numbers it can overflow.
        if not math.isfinite(float(gradient.sum())) and not bool(gradient.isfinite().all()):
            raise not_finite(step, name, "the learning rate")


def _pairs(named: Iterable[object]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(named, Module) or not isinstance(named, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"named_parameters: is a {type(named).__name__}; pass its named_parameters(), as in "
            "for_parameters(model.named_parameters())"
        )
    for pair in named:
        match pair:
            case (str(name), Tensor() as parameter):
                yield name, parameter
            case _:
                raise ValueError(
                    "named_parameters: must be pairs of a name and a tensor, as "
                    f"model.named_parameters() gives them, not of {type(pair).__name__}"
                )


def _fault(value: object) -> str:
    """Why kernels cannot compute with a value; empty if they can."""
    if not isinstance(value, Tensor):
        return f"{type(value).__name__}: must be a tensor"
    if value.layout is not torch.strided:
        return f"{value.layout}: must be dense"
    if value.is_complex():
        return f"{value.dtype}: must be of real numbers"
    return ""
