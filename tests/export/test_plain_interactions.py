"""Models with other interactions out of standard operators, and under TorchRec's names."""

from dataclasses import replace

import pytest
import torch
from dlrm_net import torchrec_rows, torchrec_tables
from reference_step import Dlrm
from torch import Tensor
from torchrec.models.dlrm import DLRM_DCN

from dlrm_hybrid.export.names import names_of, to_ours, to_theirs
from dlrm_hybrid.export.plain import PlainDlrm
from dlrm_hybrid.model.interaction import Cross, Dot, Fm, Interaction
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.tables import Fused
from dlrm_hybrid.types import ConfigError

SPEC = ModelSpec(embedding_dim=4, bottom=(3, 8, 4), top=(6, 5, 1), table_rows=(7, 8, 9))
CROSS, MACHINE = Cross(layers=2, rank=3), Fm(deep=(8, 5))
PARALLEL = Cross(layers=2, rank=None, deep=(8, 5))
ROWS = 64


def _model(chosen: Interaction) -> tuple[Dlrm, dict[str, Tensor]]:
    options = Fused()
    model = Dlrm(replace(SPEC, interaction=chosen), options, Precision.FLOAT32, seed=3)
    dense = {name: one.detach() for name, one in model.dense_parameters().items()}
    return model, {**model.embeddings.weights(), **dense}


def _rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    ids_FB = torch.stack([torch.randint(rows, (ROWS,)) for rows in SPEC.table_rows])
    return torch.rand(ROWS, SPEC.bottom[0]), ids_FB


def _logits(model: Dlrm, dense_BI: Tensor, ids_FB: Tensor) -> Tensor:
    tables = model.embeddings.weights().values()
    rows = [table[ids_B] for table, ids_B in zip(tables, ids_FB, strict=True)]
    with torch.no_grad():
        return model.logits(dense_BI, torch.stack(rows, 1))


@pytest.mark.parametrize("chosen", [Dot(), CROSS, PARALLEL, MACHINE])
def test_standard_operators_give_the_same_logits(chosen: Interaction) -> None:
    model, tensors = _model(chosen)
    dense_BI, ids_FB = _rows()
    logit_B, score_B = PlainDlrm(model.spec, tensors)(dense=dense_BI, ids=ids_FB.t())
    expected_B = _logits(model, dense_BI, ids_FB)
    assert expected_B.std() > 1e-2
    torch.testing.assert_close(logit_B, expected_B, rtol=0, atol=1e-6)
    torch.testing.assert_close(score_B, expected_B.sigmoid(), rtol=0, atol=1e-6)


def test_cross_layers_fit_into_torchrecs_model() -> None:
    model, tensors = _model(CROSS)
    tables = torchrec_tables(SPEC.table_rows, SPEC.embedding_dim)
    other = DLRM_DCN(tables, SPEC.bottom[0], [*SPEC.bottom[1:]], [*SPEC.top], 2, 3)
    theirs = to_theirs("torchrec", model.spec, tensors)
    other.load_state_dict(theirs)  # strict: TorchRec's own names, all of them
    dense_BI, ids_FB = _rows()
    with torch.no_grad():
        found_B = other(dense_BI, torchrec_rows(ids_FB)).squeeze(1)
    expected_B = _logits(model, dense_BI, ids_FB)
    torch.testing.assert_close(found_B, expected_B, rtol=0, atol=1e-6)
    back = to_ours("torchrec", model.spec, tensors, theirs)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("naming", "chosen"),
    [("dlrm", CROSS), ("dlrm", MACHINE), ("torchrec", MACHINE), ("torchrec", PARALLEL)],
)
def test_names_of_models_that_others_lack_are_refused(naming, chosen: Interaction) -> None:
    with pytest.raises(
        ConfigError, match=rf"'{naming}' \(export\.names, import\.names\): has no model with .*ours"
    ):
        names_of(naming, replace(SPEC, interaction=chosen), [])
