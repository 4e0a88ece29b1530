"""Complete runs as studies read them."""

from pathlib import Path
from typing import Any

from dlrm_hybrid.report.runs import Run


def study_run(
    method: str,
    *,
    sparsity: float = 0.0,
    seed: int = 0,
    trainers: int = 2,
    world: str = "in_process",
    threshold: str | None = None,
    summary: dict[str, Any] | None = None,
) -> Run:
    """A run of 100 measured samples in which CPUs worked for 2 ms; `summary` replaces parts."""
    told = {
        "status": "complete",
        "test": {"loss": 0.5},
        "samples_per_second": 50.0,
        "seconds": 2.0,
        "cpu": {"seconds": 0.002},
        "compression": {"gradient_density": None},
        "network": {"by_class": {}, "pull_density": None},
    }
    return Run(
        folder=Path(f"{method}-{sparsity}-{trainers}-{world}-{seed}"),
        config={
            "gradient": {"name": method, "sparsity": sparsity, "threshold": threshold},
            "parallel": {"trainers": trainers, "world": world},
            "train": {"seed": seed},
        },
        overrides=(),
        environment={},
        summary=told | (summary or {}),
        events=(),
    )
