"""Which keys of `model` go together."""

import pytest

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.model import dense_tensors
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.assembly.build import model_spec
from dlrm_hybrid.types import ConfigError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "model.cross.rank=9",
            "model.cross.rank = 9: only applies to model.interaction=cross, not dot",
        ),
        (
            "model=dcnv2 model.fm.deep=[3]",
            "model.fm.deep = [3]: only applies to model.interaction=fm, not cross",
        ),
        ("model=dcnv2 model.cross=null", "model.cross = null: model.interaction=cross needs its"),
        ("model=dcnv2 model.cross.rank=0", "model.cross.rank = 0: must be"),
        ("model=dcnv2 model.cross.layers=65", "model.cross.layers = 65: must be"),
        ("model=deepfm model.fm.deep=[]", "model.fm.deep = []: must"),
        ("model=deepfm model.fm.deep=[4,0]", "model.fm.deep[1] = 0: must be"),
        (
            "model.interaction=bilinear",
            "model.interaction = 'bilinear': must be 'dot' or 'cross' or",
        ),
        (
            "model.bottom=[13,16] model.bottom_dropout=0.1",
            "model.bottom_dropout = 0.1: model.bottom = [13, 16] has no hidden layer",
        ),
        ("model.dropout=1.0", "model.dropout = 1.0: must be a number at least 0 and at most 0.99"),
        ("model.bottom=[]", "model.bottom = []: must be 13, the integer features"),
        ("model.bottom=null", "model.bottom = []: must be 13, the integer features"),
        ("model=dcnv2 model.embedding_dim=8", "model.embedding_dim = 8, both feed the interaction"),
        (
            "model=deepfm parallel=hybrid parallel.cuts=[top.1]",
            "parallel.cuts = [top.1]: no layer top.1 to cut after; choose from bottom.1, bottom.2",
        ),
        (
            "model=deepfm parallel=hybrid parallel.cuts=[bottom.1] parallel.servers=13",
            "parallel.servers = 13: the model has only 12 dense tensors to own",
        ),
        (
            "model.batch_norm=true train.batch_size=1",
            "train.batch_size = 1: one row has no variance; model.batch_norm=true needs 2 or more",
        ),
        (
            "model.batch_norm=true parallel=hybrid parallel.cuts=[top.1] schedule=gpipe "
            "schedule.microbatches=4",
            "schedule.microbatches = 4: statistics would be those of a micro-batch",
        ),
        (
            "model.batch_norm=true parallel=hybrid parallel.cuts=[top.1] schedule=dsp",
            "schedule = 'dsp': backward computes forward again, with other weights, and would",
        ),
        (
            "model.batch_norm=true parallel=hybrid sync=async embedding=served "
            "parallel.table_servers=1",
            "sync = 'async': trainers do not meet to bring their statistics together",
        ),
        (
            "model.batch_norm=true parallel=hybrid parallel.elastic=true embedding=served "
            "parallel.table_servers=1",
            "parallel.elastic = True: a trainer that is lost takes its statistics along",
        ),
        (
            "model.batch_norm=true model.bottom=[13,16] model.top=[1]",
            "model.batch_norm = True: this model has no hidden layer to normalise",
        ),
        ("model.batch_norm=1", "model.batch_norm = 1: must be true or false"),
    ],
)
def test_faults_name_their_keys(overrides: str, message: str):
    with pytest.raises(ConfigError) as raised:
        values_of(overrides.split())
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [
        *(["model=dlrm_paper"], ["model=dlrm_small"], ["model=dcnv2"], ["model=deepfm"]),
        ["model=dcnv2", "model.cross.rank=null", "model.cross.deep=[9,8]"],
    ],
)
@pytest.mark.parametrize("norm", ["true", "false"])
def test_the_tensors_of_a_model_are_counted_without_building_it(overrides: list[str], norm: str):
    config = validate(values_of([*overrides, f"model.batch_norm={norm}"]))
    assert dense_tensors(config.model) == len(model_spec(config, (9,) * 26).dense_shapes())


def test_an_interaction_alone_takes_settings_of_its_own():
    model = values_of(["model.interaction=cross", "model.cross.rank=7"])["model"]
    assert model["cross"]["rank"] == 7 and "fm" not in model
    assert model["cross"]["layers"] >= 1
