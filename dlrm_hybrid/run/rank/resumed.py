"""What a run takes over of the dense weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dlrm_hybrid.checkpoint import reader as checkpoint
from dlrm_hybrid.config.identity import same_versions
from dlrm_hybrid.parallel.dense.mirror import SUFFIX


def dense_values(
    folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Weights, what optimizers remember of them, and the versions that workers have, by name.

    Where other keys say which versions there are, all of them begin anew, as the weights.

    Args:
        folder: of the checkpoint.
        saved: the values it was made with.
        now: the values of this run.
    """
    if same_versions(saved, now):
        return checkpoint.read_all(folder, ("dense", "versions"))
    weights = checkpoint.read_all(folder, ("dense",))
    ends = [f".behind{number}" for number in range(1, now["sync"]["staleness"] + 1)]
    if now["pull"]["precision"] != "float32":
        ends.append(SUFFIX)
    return weights | {f"{name}{end}": weight for name, weight in weights.items() for end in ends}
