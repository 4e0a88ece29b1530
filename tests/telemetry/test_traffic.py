"""Sums by class, and what was added between two looks."""

import pytest

from dlrm_hybrid.telemetry.traffic import Phase, Tally, Traffic, TrafficCounter


def test_names_are_those_of_the_summary() -> None:
    assert [str(one) for one in Traffic] == [
        "gradient_push",
        "parameter_pull",
        "activation",
        "activation_gradient",
        "embedding",
        "control",
    ]
    assert [str(one) for one in Phase] == ["warmup", "train", "evaluate", "checkpoint"]


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


def test_a_snapshot_stays_as_it_was() -> None:
    counter = TrafficCounter()
    counter.add(Traffic.ACTIVATION, 10, 20)
    before = counter.snapshot()
    counter.add(Traffic.ACTIVATION, 1, 3)
    assert before[Traffic.ACTIVATION] == Tally(1, 10, 20)
    assert counter.snapshot()[Traffic.ACTIVATION] == Tally(2, 11, 23)
    with pytest.raises(TypeError):
        before[Traffic.CONTROL] = Tally()  # pyright: ignore[reportIndexIssue]
