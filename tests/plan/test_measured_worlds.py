"""Predictions of 24 worlds beside what was measured of them; see docs/results/plan.md.

What they send was counted in one process, their costs follow from a run that is none of them.
"""

from functools import cache
from itertools import combinations
from statistics import median

import pytest
from planned import Measured, measured_worlds

APART = 1.2  # of two speeds: nearer ones were not told apart by a run of each
MEASURED = measured_worlds()


@cache
def predicted() -> dict[str, float]:
    return {one.name + one.links: one.predicted() for one in MEASURED}


def test_speeds_are_as_near_as_the_page_says() -> None:
    speeds = predicted()
    errors = [abs(speeds[one.name + one.links] / one.samples_per_second - 1) for one in MEASURED]
    assert len(errors) == 24
    assert median(errors) <= 0.07
    assert max(errors) <= 0.20


@pytest.mark.parametrize("links", sorted({one.links for one in MEASURED}))
def test_of_two_worlds_on_the_same_links_the_faster_is_predicted_faster(links: str) -> None:
    alike = [one for one in MEASURED if one.links == links]
    pairs = list(combinations(sorted(alike, key=lambda one: one.samples_per_second), 2))
    apart = [(a, b) for a, b in pairs if b.samples_per_second > APART * a.samples_per_second]
    speeds = predicted()
    wrong = [
        (slow.name, fast.name)
        for slow, fast in apart
        if speeds[slow.name + links] >= speeds[fast.name + links]
    ]
    assert apart
    assert not wrong


@pytest.mark.parametrize(
    "world", [one for one in MEASURED if "async" not in one.name], ids=lambda one: one.name
)
def test_what_was_counted_is_what_was_sent(world: Measured) -> None:
    config = world.layout.config
    rows = config.train.batch_size * config.parallel.trainers
    counted = sum(world.layout.bytes_by_class().values()) / rows
    assert counted == pytest.approx(world.bytes_per_sample, rel=0.02)
