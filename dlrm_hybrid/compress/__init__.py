"""Compressors of gradients and activations, for this trainer and for any other of torch.

The public names, loaded when they are first used::

    from dlrm_hybrid.compress import Dct, decode

    compressor = Dct(density=0.01).for_parameters(model.named_parameters())
    packet = compressor.encode(gradients, step)
    decode(packet).add_to(gradients)

    ddp.register_comm_hook(Dct(density=0.01).ddp_state(ddp), ddp_hook)

docs/library.md says more.
"""

from __future__ import annotations

from importlib import import_module
from itertools import chain
from typing import Any

# Loaded when they are asked for; what they are stands in __init__.pyi.
_HOMES = {
    "gradient.compressor": ("Compressor",),
    "gradient.context": ("StageContext",),
    "library.boundary": ("BoundaryReport", "SparseBoundary"),
    "library.compressor": ("ParameterCompressor",),
    "library.ddp": ("DdpState", "ddp_hook"),
    "library.exchange": ("Traffic",),
    "library.packets": ("Decoded", "decode"),
}
_METHODS = "dlrm_hybrid.compress.gradient.methods"


def __getattr__(name: str) -> Any:
    for file, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    base = import_module(_METHODS)
    records = {cls.__name__: cls for cls in (base.GradientMethod, *base.methods().values())}
    if name == "__all__":
        return sorted({*records, *chain(*_HOMES.values())})
    if name not in records:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return records[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
