"""Sums by class, and what was added between two looks."""

import pytest

from dlrm_hybrid.telemetry.traffic import Phase, Tally, Traffic, TrafficCounter, minus


def test_names_are_those_of_the_summary() -> None:
    assert [str(one) for one in Traffic] == [
        "gradient_push",
        "parameter_pull",
        "activation",
        "activation_gradient",
        "embedding",
        "control",
    ]
    assert [str(one) for one in Phase] == ["train", "evaluate", "checkpoint"]


def test_messages_are_summed_by_class() -> None:
    counter = TrafficCounter()
    counter.add(Traffic.EMBEDDING, 100, 400)
    counter.add(Traffic.EMBEDDING, 1, 2)
    counter.add(Traffic.CONTROL, 7, 0)
    assert counter.snapshot() == {
        **dict.fromkeys(Traffic, Tally()),
        Traffic.EMBEDDING: Tally(2, 101, 402),
        Traffic.CONTROL: Tally(1, 7, 0),
    }


def test_a_snapshot_stays_and_a_difference_is_what_came_after() -> None:
    counter = TrafficCounter()
    counter.add(Traffic.ACTIVATION, 10, 20)
    before = counter.snapshot()
    counter.add(Traffic.ACTIVATION, 1, 3)
    counter.add(Traffic.GRADIENT_PUSH, 5, 6)
    assert before[Traffic.ACTIVATION] == Tally(1, 10, 20)
    later = minus(counter.snapshot(), before)
    assert later == {
        **dict.fromkeys(Traffic, Tally()),
        Traffic.ACTIVATION: Tally(1, 1, 3),
        Traffic.GRADIENT_PUSH: Tally(1, 5, 6),
    }
    with pytest.raises(TypeError):
        later[Traffic.CONTROL] = Tally()  # pyright: ignore[reportIndexIssue]
