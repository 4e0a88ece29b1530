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
from typing import Any

# Loaded when they are asked for; what they are stands in __init__.pyi.
_LIBRARY = "dlrm_hybrid.compress.library"
_HOMES = {
    "boundary": ("BoundaryReport", "SparseBoundary"),
    "compressor": ("ParameterCompressor",),
    "ddp": ("DdpState", "ddp_hook"),
    "exchange": ("Traffic",),
    "packets": ("Decoded", "decode"),
    "records": (
        *("CltK", "Dct", "Deft", "Dgc", "Gaussian", "GradientMethod", "Hard", "NoCompression"),
        *("RandomK", "RedSync", "Sidco", "TernGrad", "TopK"),
    ),
}
_NAMES = {name: f"{_LIBRARY}.{file}" for file, names in _HOMES.items() for name in names}

__all__ = sorted(_NAMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
