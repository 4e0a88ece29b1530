"""Runs in pairs, one process and many; what has no counterpart is refused."""

import pytest
import worlds
from study_runs import study_run

from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.types import ConfigError


def a_run(method: str, world: str, seed: int = 0, status: str = "complete") -> Run:
    return study_run(method, seed=seed, world=world, summary={"status": status})


ONE, MANY = a_run("none", "in_process"), a_run("none", "processes")


def test_pairs_differ_in_their_world_alone() -> None:
    others = [a_run("terngrad", "processes", 1), a_run("terngrad", "in_process", 1)]
    failed = a_run("none", "processes", status="failed")
    assert worlds.pairs_of([MANY, *others, failed, ONE]) == [(ONE, MANY), (others[1], others[0])]


def test_runs_without_one_counterpart_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"none-.*-processes-0: no such run with .*=in_process"):
        worlds.pairs_of([MANY])
    with pytest.raises(ConfigError, match=r"another run is none with parallel.world=processes"):
        worlds.pairs_of([MANY, ONE, a_run("none", "processes")])
