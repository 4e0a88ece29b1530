"""Ranks that compress on a device have the same bits as on the CPU, and as one here, one there."""

import pytest
import torch
from device_ranks import METHODS, STEPS, TASKS, WAYS
from task_ranks import results

METHOD_AND_WAY = pytest.mark.parametrize(
    ("method", "way"), [(method, way) for method in METHODS for way in WAYS[1:]]
)


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "two"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What one rank or two have found, by method and way."""
    made = results(TASKS, tmp_path_factory.mktemp("ranks"), request.param)
    return [one["every_way"] for one in made]


@METHOD_AND_WAY
def test_means_are_those_of_the_cpu(found: list[dict], method: str, way: str) -> None:
    expected = found[0][method]["host"]["means"]
    assert len(expected) == STEPS and any(one is None for means in expected for one in means)
    for rank in found:
        for means, others in zip(expected, rank[method][way]["means"], strict=True):
            for mean, other in zip(means, others, strict=True):
                assert (mean is None) is (other is None)
                assert mean is None or torch.equal(mean, other)


@METHOD_AND_WAY
def test_what_is_kept_and_what_fails_is_the_same(found: list[dict], method: str, way: str) -> None:
    for rank in found:
        host, there = rank[method]["host"], rank[method][way]
        assert len(host["failures"]) == len(found) - 1 and there["failures"] == host["failures"]
        assert there["state"].keys() == host["state"].keys()
        for name, one in host["state"].items():
            assert torch.equal(one.nan_to_num(-1), there["state"][name].nan_to_num(-1)), name


@pytest.mark.parametrize("method", METHODS)
def test_the_same_bytes_travel_over_gloo(found: list[dict], method: str) -> None:
    for rank in found:
        assert rank[method]["device"]["sent"] == rank[method]["host"]["sent"]
        assert rank[method]["mixed"]["sent"] == rank[method]["host"]["sent"]


@pytest.mark.parametrize("way", ["direct", "direct two"])
@pytest.mark.parametrize(("method", "value_bytes"), [("dct", 4), ("half", 2)])
def test_values_travel_between_devices_in_their_precision(
    found: list[dict], method: str, way: str, value_bytes: int
) -> None:
    for rank in found:
        gathered = rank[method][way]["gathered"]
        assert (len(found) > 1) is (gathered["int32"] > 0)
        assert 4 * gathered["uint8"] == value_bytes * gathered["int32"]


@METHOD_AND_WAY
def test_a_step_waits_once_for_all_devices(found: list[dict], method: str, way: str) -> None:
    """Once more where the host hands on values, or ranks tell counts of two devices.

    To agree takes waits of its own: for what a rank proposes, and of DEFT's leader for the norms.
    Levels are found on the host, which then has what it hands on.
    Where k elements of all are listed torch waits for their number besides.
    """
    is_apart = len(found) > 1 and way in ("device", "mixed")
    for number, rank in enumerate(found):
        leads = number == 0  # the last step
        agreeing = {"cltk": 1 + leads, "leader": 1 + leads, "deft": 2 + leads, "union": 2}
        expected = agreeing.get(method, 1 + (way == "direct two" and len(found) > 1))
        expected = 2 if method == "levels" else expected + is_apart
        is_host = way == "mixed" and number == 0
        assert rank[method][way]["waits"] == (0 if is_host else expected)
