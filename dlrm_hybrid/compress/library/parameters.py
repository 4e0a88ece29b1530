"""Parameters and gradients that can be compressed, and what is said of others."""

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
    """Those of a model that are trained, by their names.

    Raises:
        ValueError: a name or a parameter is there twice, none needs a gradient, one cannot be
            compressed, they are too many, or these are no pairs of names and tensors.

    Attributes:
        names: of those that need gradients.
        tensors: the same.
    """

    def __init__(self, given: Iterable[object]) -> None:
        pairs = [*_pairs(given)]
        trained = [(name, one) for name, one in pairs if one.requires_grad]
        self.names = [name for name, _ in trained]
        self.tensors = [one for _, one in trained]
        self._frozen = [(name, one) for name, one in pairs if not one.requires_grad]
        if not trained:
            raise ValueError("named_parameters: there is none that needs a gradient")
        if len({*self.names}) != len(trained):
            twice = next(one for one in self.names if self.names.count(one) > 1)
            raise ValueError(
                f"named_parameters: must be of different names; {twice} is there twice"
            )
        seen: dict[Tensor, str] = {}
        for name, one in trained:
            require_whole(name, one)
            if one.is_complex():
                raise ValueError(f"{name} is {one.dtype}: only real numbers are compressed")
            if one in seen:
                raise ValueError(
                    f"named_parameters: {seen[one]} and {name} are one parameter, which would "
                    "be reduced twice; model.named_parameters() names each once"
                )
            seen[one] = name
        elements = sum(one.numel() for one in self.tensors)
        if elements > MAX_COUNT:
            raise ValueError(
                f"named_parameters: {elements:,} elements, at most {MAX_COUNT:,} have a position; "
                "give several compressors a part each"
            )

    def require_frozen(self) -> None:
        """Raise ValueError if one that needed no gradient does now; names it."""
        for name, one in self._frozen:
            if one.requires_grad:
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


def home_of(parameters: Sequence[Tensor]) -> torch.device | None:
    """The GPU that has all parameters, if they are float32; else None."""
    homes = {one.device for one in parameters}
    is_float32 = all(one.dtype is torch.float32 for one in parameters)
    home = next(iter(homes))
    return home if len(homes) == 1 and home.type == "cuda" and is_float32 else None


def require_gradients(names: Sequence[str], counts: Sequence[int], given: Sequence[object]) -> None:
    """Raise ValueError if these cannot be compressed as tensors of so many elements."""
    if len(given) != len(names):
        raise ValueError(f"{len(given)} gradients of {len(names)} parameters")
    for name, count, one in zip(names, counts, given, strict=True):
        fault = _fault(one)
        if not fault and isinstance(one, Tensor) and one.numel() != count:
            fault = f"of {one.numel()} elements: must be of {count}, as its parameter is"
        if fault:
            raise ValueError(f"the gradient of {name} is {fault}")


def require_state(state: Mapping[str, Any], method: str) -> None:
    """Raise ValueError if it is no state of a compressor, or of another method's; names why."""
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
    for name, one in cast("Mapping[object, object]", tensors).items():
        if fault := _unfit(one):
            raise ValueError(f"the state's tensor {_shown(name)} is {fault}")


def _unfit(given: object) -> str:
    """Why this cannot be a residual, threshold or momentum; empty if it can be."""
    fault = _fault(given)
    if fault or not isinstance(given, Tensor):
        return fault
    if given.is_meta:
        return "on the device meta, without values"
    return "" if given.isfinite().all() else "not finite"


def _shown(value: object) -> str:
    """A value of the caller's in a message; a tensor or model would fill the screen."""
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a state that nobody else has."""
    return {name: one.clone() for name, one in tensors.items()}


def require_finite(gradients: Mapping[str, Tensor], step: int) -> None:
    """Raise DivergedError before one joins a residual, which would never be finite again."""
    for name, one in gradients.items():
        # A sum is one pass that allocates nothing; of finite numbers it can overflow.
        if not math.isfinite(float(one.sum())) and not bool(one.isfinite().all()):
            raise not_finite(step, name, "the learning rate")


def _pairs(given: Iterable[object]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(given, Module) or not isinstance(given, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"named_parameters: is a {type(given).__name__}; pass its named_parameters(), as in "
            "for_parameters(model.named_parameters())"
        )
    for one in given:
        match one:
            case (str(name), Tensor() as parameter):
                yield name, parameter
            case _:
                raise ValueError(
                    "named_parameters: must be pairs of a name and a tensor, as "
                    f"model.named_parameters() gives them, not of {type(one).__name__}"
                )


def _fault(given: object) -> str:
    """Why kernels cannot compute with it; empty if they can."""
    if not isinstance(given, Tensor):
        return f"{type(given).__name__}: must be a tensor"
    if given.layout is not torch.strided:
        return f"{given.layout}: must be dense"
    if given.is_complex():
        return f"{given.dtype}: must be of real numbers"
    return ""
