"""Every method in DDP and without it, on two ranks."""

import pickle

import ddp_ranks
import numpy as np
import pytest
from task_ranks import results

from dlrm_hybrid.compress import Dct, TopK

HEADER = 48  # bytes of gloo's header of a message
STEPS = 10


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks have found, by task."""
    return results(ddp_ranks.TASKS, tmp_path_factory.mktemp("ranks"))


def test_buckets_make_no_difference_and_neither_does_ddp(ranks: list[dict]) -> None:
    """Also replicas stay equal."""
    first, second = (one["each_method"] for one in ranks)
    start = ddp_ranks.weights(ddp_ranks.network())
    for method, ways, others in zip(ddp_ranks.METHODS, first, second, strict=True):
        assert ways[0] == ways[1] == ways[2], method
        assert ways == others, method
        assert ways[0] != start, method


def test_a_state_needs_no_model_to_train(ranks: list[dict]) -> None:
    for with_model, without in (one["nameless"] for one in ranks):
        assert with_model == without


def test_a_state_goes_on_where_it_was_saved(ranks: list[dict]) -> None:
    for methods in (one["resumed"] for one in ranks):
        for whole, *resumed in methods:
            assert len(resumed) == 3
            assert all(one == whole for one in resumed)


def test_wrappers_of_torch_compose(ranks: list[dict]) -> None:
    first, second = (one["wrapped"] for one in ranks)
    assert first == second
    for name, tolerance in (("bf16", 4e-3), ("fp16", 1e-3)):
        assert first[name] != first["plain"]
        for one, other in zip(first[name], first["plain"], strict=True):
            found, expected = np.frombuffer(one, np.float32), np.frombuffer(other, np.float32)
            np.testing.assert_allclose(found, expected, atol=tolerance)


def test_batches_that_are_not_synchronised_are_compressed_together(ranks: list[dict]) -> None:
    for equal in (one["unsynchronised"] for one in ranks):
        assert equal == [True] * len(equal)


def test_what_comes_for_an_unused_parameter_waits(ranks: list[dict]) -> None:
    for found in (one["unused"] for one in ranks):
        assert found["error"] < 1e-5
        assert found["owed"] > 0, "nothing had to wait: the test shows nothing"


def test_all_trainers_end_where_a_gradient_is_not_finite(ranks: list[dict]) -> None:
    well, ill = (one["not_finite"] for one in ranks)
    assert [one.partition(";")[0] for one in well] == [
        "trainer 1 could not compress its gradients"
    ] * 4
    assert all("is not finite" in one for one in ill) and len(ill) == 4


def test_a_step_that_failed_spoils_none_after_it(ranks: list[dict]) -> None:
    first, second = (one["after_a_failure"] for one in ranks)
    assert first == second
    assert all(finite for finite, _ in first)
    assert len(first) == len(ddp_ranks.METHODS) - 1


def test_what_fails_at_one_trainer_is_not_waited_for(ranks: list[dict]) -> None:
    well, ill = (one["failed_alone"] for one in ranks)
    assert [one.partition(";")[0] for one in well] == [
        "trainer 1 could not compress its gradients"
    ] * 5
    assert all("gradient of 0.weight is torch.sparse_coo" in one for one in ill[:3])
    assert all("of other parameters: 0.bias." in one for one in ill[3:])


def test_a_state_without_names_is_not_pickled_after_a_step(ranks: list[dict]) -> None:
    for found in (one["without_names"] for one in ranks):
        assert "give ddp_state the model" in found


def test_a_state_serves_one_model(ranks: list[dict]) -> None:
    for found in (one["two_models"] for one in ranks):
        assert found.endswith("a state serves one model")


def test_bytes_counted_are_those_on_the_sockets(ranks: list[dict]) -> None:
    """But for headers of gloo, as many whatever the size of the model."""
    for found in (one["counted"] for one in ranks):
        for method, ((small, small_wire), (large, large_wire)) in found.items():
            assert large > 3 * small, method
            for counted, on_wire in ((small, small_wire), (large, large_wire)):
                headers, rest = divmod(on_wire - counted, HEADER)
                assert not rest and 0 < headers < 30 * STEPS, (method, counted, on_wire)


def test_a_pickled_state_may_be_pickled_again_before_it_is_bound() -> None:
    state = TopK().ddp_state(ddp_ranks.network())
    state.load_state_dict({"method": repr(TopK()), "step": 3, "tensors": {}})
    for _ in range(2):
        state = pickle.loads(pickle.dumps(state))
    state.bind(ddp_ranks.network())
    assert state.state_dict()["step"] == 3


def test_a_state_without_names_is_not_saved() -> None:
    state = TopK().ddp_state()
    with pytest.raises(ValueError, match="give ddp_state the model"):
        state.state_dict()
    with pytest.raises(ValueError, match="give ddp_state the model"):
        Dct().ddp_state().load_state_dict({})


def test_a_rate_that_is_missing_is_said_before_the_first_step() -> None:
    with pytest.raises(ValueError, match="needs lr="):
        TopK(residual="update").ddp_state(ddp_ranks.network())
