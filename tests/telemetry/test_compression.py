"""Counts of what compression let through and of traffic, however they are gathered."""

import copy
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.telemetry.compression import (
    ACTIVATION,
    GRADIENT,
    Counts,
    counted,
    density,
    merged,
    values_of,
)
from dlrm_hybrid.telemetry.traffic import Phase, Tally, Traffic, TrafficCounter

NAMES = st.sampled_from(["gradient.top.1.weight", "gradient.top.1.bias", "activation.0"])
ELEMENTS = st.integers(1, 10**9)
# Of few bits: their sums are exact, as those of a run's thresholds are.
THRESHOLDS = st.floats(2**-20, 2**10, width=16)
ONE = st.builds(
    lambda elements, share, threshold_sum, thresholds: counted(
        elements, int(share * elements), threshold_sum if thresholds else 0.0, thresholds
    ),
    ELEMENTS,
    st.floats(0, 1),
    THRESHOLDS,
    st.integers(0, 1000),
)
SEVERAL = st.lists(st.dictionaries(NAMES, ONE), max_size=6)


@given(SEVERAL, st.integers(0, 6))
def test_sums_are_the_same_however_they_are_gathered(several: list[Counts], place: int) -> None:
    before = copy.deepcopy(several)
    together = merged(several)
    assert merged([merged(several[:place]), merged(several[place:])]) == together
    assert merged(reversed(several)) == together
    assert merged([{}, *several]) == together
    assert several == before
    for name, sums in together.items():
        for key, value in sums.items():
            assert value == sum(counts[name][key] for counts in several if name in counts)
    assert together.keys() == {name for counts in several for name in counts}


@given(SEVERAL)
def test_an_event_says_ratios_of_the_sums(several: list[Counts]) -> None:
    sums = merged(several)
    said = values_of(sums)
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert said.keys() == sums.keys()
    for name, one in said.items():
        assert one["density"] == sums[name]["sent"] / sums[name]["elements"]
        if sums[name]["thresholds"]:
            assert one["threshold"] == sums[name]["threshold_sum"] / sums[name]["thresholds"]
        else:
            assert one["threshold"] is None


def test_nothing_sent_of_nothing_has_no_density() -> None:
    assert values_of({"activation.0": counted(0, 0, 0.0, 0)})["activation.0"] == {
        "elements": 0,
        "sent": 0,
        "density": None,
        "threshold": None,
    }


@given(SEVERAL)
def test_a_density_weighs_every_element_alike(several: Sequence[Counts]) -> None:
    said = [values_of(counts) for counts in several]
    for prefix in (GRADIENT, ACTIVATION):
        chosen = [
            one for counts in several for name, one in counts.items() if name.startswith(prefix)
        ]
        elements = sum(one["elements"] for one in chosen)
        sent = sum(one["sent"] for one in chosen)
        assert density(said, prefix) == (sent / elements if elements else None)


def test_a_run_without_compression_has_no_density() -> None:
    assert density([], GRADIENT) is None
    assert density([values_of({"activation.1": counted(8, 2, 0.5, 1)})], GRADIENT) is None
    assert density([values_of({"activation.1": counted(8, 2, 0.5, 1)})], ACTIVATION) == 0.25


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
