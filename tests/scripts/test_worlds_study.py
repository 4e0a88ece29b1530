"""Runs in pairs, one process and many; what has no counterpart is refused."""

from pathlib import Path

import pytest
import worlds

from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.types import ConfigError


def a_run(method: str, world: str, seed: int = 0, status: str = "complete") -> Run:
    gradient = {"name": method, "sparsity": 0.0, "threshold": None}
    return Run(
        folder=Path(f"{method}-{world}-{seed}"),
        config={
            "gradient": gradient,
            "parallel": {"world": world},
            "train": {"seed": seed},
        },
        overrides=(),
        environment={},
        summary={"status": status},
        events=(),
    )


ONE, MANY = a_run("none", "in_process"), a_run("none", "processes")


def test_pairs_differ_in_their_world_alone() -> None:
    others = [a_run("terngrad", "processes", 1), a_run("terngrad", "in_process", 1)]
    failed = a_run("none", "processes", status="failed")
    assert worlds.pairs([MANY, *others, failed, ONE]) == [(ONE, MANY), (others[1], others[0])]


def test_runs_without_one_counterpart_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"none-processes-0: no such run with .*=in_process"):
        worlds.pairs([MANY])
    with pytest.raises(ConfigError, match=r"another run is none with parallel.world=processes"):
        worlds.pairs([MANY, ONE, a_run("none", "processes")])
