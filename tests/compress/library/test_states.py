"""What compressors remember is right after steps that failed and states that were loaded."""

import pytest
import state_ranks
import torch
from task_ranks import results
from torch import nn

from dlrm_hybrid.compress import SparseBoundary, TernGrad, TopK, decode


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks have found, by task."""
    return results(state_ranks.TASKS, tmp_path_factory.mktemp("states"))


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
