"""What goes wrong or is unusual on two ranks ends with a word, and the next step can go on."""

import edge_ranks
import pytest
from task_ranks import results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks have found, by task."""
    return results(edge_ranks.TASKS, tmp_path_factory.mktemp("edges"))


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
        assert weights != edge_ranks.ddp_ranks.weights(edge_ranks.network())
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
