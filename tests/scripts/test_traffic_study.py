from pathlib import Path

import pytest
import traffic
from made_runs import make_run, plain_events, told, world_events

from dlrm_hybrid.report.runs import Run, read_run
from dlrm_hybrid.types import ConfigError

LABELS = ["first", "second", "third"]


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """The second pushes a tenth of the first's bytes, the third nothing."""
    pushed = (12_800, 1_280, 0)
    for number, num_bytes in enumerate(pushed):
        *record, _, _, _ = world_events()
        make_run(tmp_path / str(number), [], [*record, told(0, "worker-0.0", num_bytes)])
    return [read_run(tmp_path / str(number)) for number in range(3)]


def test_runs_stand_beside_their_ratio_to_the_first(runs: list[Run]) -> None:
    table = traffic.against_first(runs[:2], LABELS[:2])
    assert table.columns == ("bytes per sample", "first", "second", "first / second")
    assert table.rows[0] == ("gradient push", "10.0", "1.0", "10.0")
    assert table.rows[-1] == ("all", "10.0", "1.0", "10.0")
    assert table.rows[1][3] == "–", "nothing by nothing"


def test_short_bars_are_drawn_twice(runs: list[Run]) -> None:
    assert len(traffic.figure(runs[:2], LABELS[:2]).axes) == 2
    assert len(traffic.figure(runs[:1], LABELS[:1]).axes) == 1


def test_a_run_that_counted_nothing_is_named(runs: list[Run], tmp_path: Path) -> None:
    make_run(tmp_path / "plain", [], plain_events())
    with pytest.raises(ConfigError, match="plain: no bytes were counted"):
        traffic.against_first([runs[0], read_run(tmp_path / "plain")], LABELS[:2])
