"""Means are those of what compressors make, however it travels; and few bytes do."""

import pytest
import torch
from averaging_ranks import METHODS, RANKS, STEPS, TASKS
from task_ranks import results


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What three ranks have found, by task."""
    return results(TASKS, tmp_path_factory.mktemp("three"), RANKS)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What two ranks have found, by task."""
    return results(TASKS, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("ranks", ["two", "three"])
def test_means_are_those_of_what_was_made(ranks: str, request: pytest.FixtureRequest) -> None:
    for one in request.getfixturevalue(ranks):
        for method, steps in zip(METHODS, one["means"], strict=True):
            assert len(steps) == STEPS
            for given, expected in steps:
                for mean, other in zip(given, expected, strict=True):
                    # To reduce them is to add in another order.
                    torch.testing.assert_close(mean, other, rtol=1e-6, atol=1e-7, msg=repr(method))


@pytest.mark.parametrize("ranks", ["two", "three"])
def test_all_have_the_same_bits(ranks: str, request: pytest.FixtureRequest) -> None:
    first, *others = request.getfixturevalue(ranks)
    for other in others:
        for steps, their_steps in zip(first["means"], other["means"], strict=True):
            for (given, _), (theirs, _) in zip(steps, their_steps, strict=True):
                assert all(torch.equal(one, two) for one, two in zip(given, theirs, strict=True))


def test_positions_that_all_know_do_not_travel(two: list[dict], three: list[dict]) -> None:
    """800 elements of 40,000: values, and what leaders and unions take."""
    values = 800 * 4
    for one in two:
        assert values < one["traffic"]["CltK"] < values + 700 < one["traffic"]["TopK"]
        assert values / 2 < one["traffic"]["CltK half"] < values / 2 + 700
    for one in three:  # 2/3 there and 2/3 back, for any number of trainers
        assert 4 / 3 * values < one["traffic"]["CltK"] < 4 / 3 * values + 1000
        assert values < one["traffic"]["CltK half"] < values + 1000
        assert one["traffic"]["Deft"] < 0.7 * one["traffic"]["TopK"]


def test_levels_take_less_than_sixty_percent_of_half_precision(two: list[dict]) -> None:
    for one in two:
        assert one["traffic"]["levels"] < 0.6 * one["traffic"]["half"]
