"""Types and bounds of what only one threshold rule or one method of gradients reads.

Their values are in conf/gradient/base/sections.yaml.
"""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from dlrm_hybrid.config.bounds import STRICT, Part, Rate


@dataclass(config=STRICT, frozen=True, kw_only=True)
class HardConfig:
    """One magnitude for all tensors and steps; null is 1 / (2 √k), k elements of the model."""

    magnitude: Rate | None


@dataclass(config=STRICT, frozen=True, kw_only=True)
class CltkConfig:
    """The low-pass filter of ScaleCom; 1 is plain error feedback."""

    low_pass: Part
