"""The worlds of the benchmark of threads learn from the same number of samples."""

from collections.abc import Callable
from pathlib import Path

import pytest
import threads

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.report.runs import read_run


@pytest.mark.parametrize("name", threads.WORLDS)
def test_worlds_learn_from_as_many_samples(name: str) -> None:
    config = validate(values_of((*threads.RUN, *threads.of_world(name, 128, 25_600))))
    trainers = config.parallel.trainers
    assert trainers * config.train.batch_size * (config.train.steps or 0) == 25_600
    assert (trainers, config.parallel.threads) == threads.WORLDS[name]


@pytest.mark.slow
def test_a_run_becomes_a_row(train: Callable[..., tuple[int, Path]]) -> None:
    words = (*threads.RUN, *threads.of_world("2 threads", 16, 1600), "data.rows=7000")
    code, folder = train("run", *words)
    assert code == 0
    run = read_run(folder)
    row = threads.row(16, "2 threads", {(16, "2 threads"): [run], (16, "1 thread"): [run]})
    assert row["to 1 thread"] == "1.00"
    assert threads.cpu(run) > 0
