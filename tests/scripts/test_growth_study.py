"""Bytes over the number of trainers: what is counted, what is scaled, what is missing."""

from dataclasses import replace

import growth
import pytest
from study_runs import study_run

from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.types import ConfigError


def world_run(name: str, trainers: int, world: str, precision: str = "float32", **sent: int) -> Run:
    """100 samples; `sent` are bytes by class."""
    counted = {one: {"bytes": num_bytes} for one, num_bytes in sent.items()}
    run = study_run(
        name, trainers=trainers, world=world, summary={"network": {"by_class": counted}}
    )
    more = {
        "name": name,
        "embedding": {"comm_precision": precision},
        "train": {"batch_size": 128, "seed": 0},
    }
    return replace(run, config={**run.config, **more})


def test_embeddings_come_from_processes_and_are_scaled() -> None:
    runs = [
        world_run("plain", 2, "in_process", gradient_push=3_000, parameter_pull=2_000),
        world_run("plain", 4, "in_process", gradient_push=3_000, parameter_pull=2_000),
        world_run("small", 4, "in_process", "bfloat16", gradient_push=100, activation=150),
        world_run("measured", 1, "processes", embedding=0),
        world_run("measured", 2, "processes", embedding=1_000, gradient_push=7),
        world_run("measured", 3, "processes", "bfloat16", embedding=400),
        world_run("measured", 7, "processes", "bfloat16", embedding=4_000),
    ]
    broken_off = {"status": "unfinished", "samples_per_second": None}
    runs.append(replace(runs[0], summary={**runs[0].summary, **broken_off}))
    found = growth.sent_by_world(runs)
    assert list(found) == ["plain", "small"]
    assert found["plain"][2]["embedding"] == pytest.approx(10.0)
    assert found["plain"][4]["embedding"] == pytest.approx(15.0)
    assert found["small"][4]["embedding"] == pytest.approx(4.0 * 9 / 8)
    assert found["plain"][4]["all"] == pytest.approx(30 + 20 + 15)
    table = growth.table(found)
    assert table.columns == ("bytes per sample", "", "T = 2", "T = 4")
    assert table.rows[4] == ("plain", "all", "60.0", "65.0")
    assert table.rows[7] == ("small", "activations, both ways", "–", "1.5")
    assert table.rows[-1] == ("small", "times less", "–", f"{65 / 7:.1f}")


def test_a_run_of_processes_with_the_same_tables_is_needed() -> None:
    runs = [
        world_run("small", 4, "in_process", "bfloat16", gradient_push=100),
        world_run("measured", 2, "processes", embedding=1_000),
    ]
    with pytest.raises(ConfigError, match="small-.*: in one process no embedding traffic"):
        growth.sent_by_world(runs)
    with pytest.raises(ConfigError, match="none of these runs"):
        growth.sent_by_world(runs[1:])
