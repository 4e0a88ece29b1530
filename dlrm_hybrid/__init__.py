"""Hybrid-parallel training of DLRM that counts, and saves, every byte on the network."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Imported on first use: torch and all that the trainer needs take a second. Types: __init__.pyi.
_NAMES = {
    "Features": "dlrm_hybrid.model.own",
    "ModelSpec": "dlrm_hybrid.model.spec",
    "OwnModel": "dlrm_hybrid.model.own",
    "Predictor": "dlrm_hybrid.predict.predictor",
    "World": "dlrm_hybrid.world.world",
}
__all__ = sorted(_NAMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dlrm_hybrid.limits import lacks_trainer

    if sentence := lacks_trainer(f"dlrm_hybrid.{name}"):
        raise ImportError(sentence)
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    from dlrm_hybrid.limits import lacks_trainer

    # Tools that walk a module's names get each of them, and would raise ImportError.
    return sorted({*globals(), *(() if lacks_trainer(__name__) else _NAMES)})
