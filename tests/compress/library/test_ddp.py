"""Every method in DDP and without it on ranks of gloo: means, states, failures and bytes."""

import pickle

import averaging_ranks
import ddp_ranks
import edge_ranks
import numpy as np
import pytest
import state_ranks
import torch
from task_ranks import results
from torch import nn

from dlrm_hybrid.compress import Dct, SparseBoundary, TernGrad, TopK, decode

HEADER = 48  # bytes of gloo's header of a message
STEPS = 10


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks have found, by task."""
    rooms = (ddp_ranks, edge_ranks, state_ranks, averaging_ranks)
    tasks = [task for room in rooms for task in room.TASKS]
    return results(tasks, tmp_path_factory.mktemp("ranks"))


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


def test_ddp_goes_on_after_a_step_that_failed(ranks: list[dict]) -> None:
    """It begins no pass after one that has not ended."""
    well, ill = (one["ddp_after_a_failure"] for one in ranks)
    for bad, (said, left, weights), (others_said, others_left, others) in zip(
        (0, 1, 3, 0, 1, 3), well, ill, strict=True
    ):
        assert [bool(one) for one in said] == [step == bad for step in range(5)]
        assert "trainer 1 could not compress" in said[bad]
        assert "is not finite" in others_said[bad]
        assert not any(left) and not any(others_left), "the optimizer may step"
        assert weights == others


def test_ddp_of_some_ranks_reduces_among_these(ranks: list[dict]) -> None:
    for sent, own in (one["alone"] for one in ranks):
        assert own and sent == 0


def test_a_model_that_is_compiled_is_the_same_model(ranks: list[dict]) -> None:
    for plain, *compiled in (one["compiled"] for one in ranks):
        names, sent, losses, weights = plain
        assert names[0] == "0.bias.discarded" and sent > 0 and losses[-1] < losses[0]
        assert weights != ddp_ranks.weights(ddp_ranks.network())
        *in_ddp, without = compiled
        assert in_ddp == [plain] * 3
        assert without[0] == names and without[2:] == (losses, weights)


def test_parameters_spread_over_ranks_are_refused(ranks: list[dict]) -> None:
    for said in (one["sharded"] for one in ranks):
        assert len(said) == 4
        assert all(
            "FSDP and tensor parallelism spread parameters over ranks" in one for one in said
        )


def test_sparse_gradients_are_refused_by_all(ranks: list[dict]) -> None:
    for said in (one["sparse"] for one in ranks):
        assert "only dense gradients are compressed" in said


def test_trainers_at_different_steps_say_so(ranks: list[dict]) -> None:
    for said in (one["loaded_alone"] for one in ranks):
        assert [one.partition(":")[0] for one in said] == ["trainers are at steps 0, 3"] * 3


def test_a_rank_without_batches_joins(ranks: list[dict]) -> None:
    """It goes on waiting where the other's step fails: that one may make the next step."""
    (weights, said), (others, told) = (one["joined"] for one in ranks)
    assert weights == others
    assert "is not finite" in said
    assert "trainer 0 could not compress" in told, "its hook is called in no backward pass"


def test_all_ranks_divide_even_those_that_have_ended(ranks: list[dict]) -> None:
    for by_all, by_those_left in (one["divided"] for one in ranks):
        assert by_all == by_those_left


def test_what_a_failed_step_did_not_send_is_sent_later(ranks: list[dict]) -> None:
    """Of the trainers whose gradients were good; the other's join nothing."""
    for errors in (one["kept"] for one in ranks):
        assert len(errors) == len(edge_ranks.KEEPING)
        assert max(errors) < 1e-6, errors


def test_other_parameters_on_another_rank_are_refused_by_all(ranks: list[dict]) -> None:
    for one in ranks:
        for said in one["differing"]:
            assert len(said) == 2
            assert all("trainers compress different parameters" in text for text in said)


def test_what_reached_nobody_is_sent_later(ranks: list[dict]) -> None:
    for errors in (one["undelivered"] for one in ranks):
        assert len(errors) == len(state_ranks.KEEPING)
        assert max(errors) < 1e-6, errors


def test_a_rank_that_has_no_tables_is_sent_some(ranks: list[dict]) -> None:
    for loaded, regrouped in (one["one_of_two_is_new"] for one in ranks):
        for unbroken, again in (loaded, regrouped):
            assert unbroken == again


def test_what_is_owed_is_in_a_state_once(ranks: list[dict]) -> None:
    for unbroken, resumed, once, twice in (one["owed"] for one in ranks):
        assert unbroken.any()
        assert torch.equal(unbroken, resumed)
        assert torch.equal(once, twice)


def test_steps_without_compression_are_counted(ranks: list[dict]) -> None:
    for steps in (one["dense"] for one in ranks):
        assert steps == (3, 5)


def test_a_state_of_the_beginning_leads_back_to_it(ranks: list[dict]) -> None:
    for once, again in (one["rolled_back"] for one in ranks):
        assert once == again


def test_a_state_shares_no_memory() -> None:
    net = nn.Linear(8, 4)
    compressor = TopK(density=0.1).for_parameters(net.named_parameters())
    compressor.encode([torch.ones_like(one) for one in net.parameters()], 0)
    given = compressor.state_dict()
    state = TopK(density=0.1).ddp_state(net)
    state.load_state_dict(given)
    given["tensors"]["weight.residual"].zero_()
    assert state.state_dict()["tensors"]["weight.residual"].any()
    state.state_dict()["tensors"]["weight.residual"].zero_()
    assert state.state_dict()["tensors"]["weight.residual"].any()


def test_what_is_owed_has_the_shape_of_its_parameter() -> None:
    net = nn.Linear(8, 4)
    compressor = TopK(density=0.1).for_parameters(net.named_parameters())
    compressor.encode([torch.ones_like(one) for one in net.parameters()], 0)
    state = compressor.state_dict()
    state["tensors"]["bias.owed"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"of other parameters: bias\.owed"):
        compressor.load_state_dict(state)


@pytest.mark.parametrize("net", [nn.Linear(30, 20), nn.LSTM(5, 20)], ids=["linear", "lstm"])
def test_every_parameter_of_the_last_layer_stays_float32(net: nn.Module) -> None:
    compressor = TernGrad(smallest=1, sharing=False).for_parameters(net.named_parameters())
    gradients = [torch.randn_like(one) for one in net.parameters()]
    sums = [torch.zeros_like(one) for one in gradients]
    decode(compressor.encode(gradients, 0)).add_to(sums)
    assert all(torch.equal(one, own) for one, own in zip(sums, gradients, strict=True))


def test_a_boundary_counts_on_any_device() -> None:
    boundary = SparseBoundary(0.5)
    boundary(torch.ones(2, 8))
    boundary(torch.ones(2, 8, device="meta"))
    assert boundary._totals is not None and boundary._totals.device.type == "meta"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What three ranks have found, by task."""
    return results(averaging_ranks.TASKS, tmp_path_factory.mktemp("three"), averaging_ranks.RANKS)


@pytest.mark.parametrize("world", ["ranks", "three"])
def test_means_are_those_of_what_was_made(world: str, request: pytest.FixtureRequest) -> None:
    for one in request.getfixturevalue(world):
        for method, steps in zip(averaging_ranks.METHODS, one["means"], strict=True):
            assert len(steps) == averaging_ranks.STEPS
            for given, expected in steps:
                for mean, other in zip(given, expected, strict=True):
                    # To reduce them is to add in another order.
                    torch.testing.assert_close(mean, other, rtol=1e-6, atol=1e-7, msg=repr(method))


@pytest.mark.parametrize("world", ["ranks", "three"])
def test_all_have_the_same_bits(world: str, request: pytest.FixtureRequest) -> None:
    first, *others = request.getfixturevalue(world)
    for other in others:
        for steps, their_steps in zip(first["means"], other["means"], strict=True):
            for (given, _), (theirs, _) in zip(steps, their_steps, strict=True):
                assert all(torch.equal(one, two) for one, two in zip(given, theirs, strict=True))


def test_positions_that_all_know_do_not_travel(ranks: list[dict], three: list[dict]) -> None:
    """800 elements of 40,000: values, and what leaders and unions take."""
    values = 800 * 4
    for one in ranks:
        assert values < one["traffic"]["CltK"] < values + 700 < one["traffic"]["TopK"]
        assert values / 2 < one["traffic"]["CltK half"] < values / 2 + 700
    for one in three:  # 2/3 there and 2/3 back, for any number of trainers
        assert 4 / 3 * values < one["traffic"]["CltK"] < 4 / 3 * values + 1000
        assert values < one["traffic"]["CltK half"] < values + 1000
        assert one["traffic"]["Deft"] < 0.7 * one["traffic"]["TopK"]


def test_levels_take_less_than_sixty_percent_of_half_precision(ranks: list[dict]) -> None:
    for one in ranks:
        assert one["traffic"]["levels"] < 0.6 * one["traffic"]["half"]
