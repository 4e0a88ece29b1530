"""The records of the library: the defaults of conf/, and what they refuse."""

import pickle
import re
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest

from dlrm_hybrid import compress
from dlrm_hybrid.compress.gradient.methods import GradientKeys, methods, rules
from dlrm_hybrid.compress.library import records
from dlrm_hybrid.compress.library.records import (
    Dct,
    Dgc,
    GradientMethod,
    NoCompression,
    Sidco,
    TernGrad,
    TopK,
)
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.world.settings import settings_of

RECORDS: dict[str, type[GradientMethod]] = {
    one.name: one
    for one in vars(records).values()
    if isinstance(one, type)
    and GradientMethod in one.__mro__
    and isinstance(vars(one).get("name"), str)
}


def of_conf(*overrides: str) -> GradientKeys:
    return validate(values_of(["parallel=hybrid", *overrides])).gradient


def same(record: GradientMethod, keys: GradientKeys) -> bool:
    """Whether both say the same; the configuration has null for sections that nobody reads."""
    return vars(record.keys()) == {
        key: value
        for key, value in vars(keys).items()
        if value is not None or key in GradientKeys.__dataclass_fields__
    }


def test_every_method_has_its_record_and_its_public_name() -> None:
    assert RECORDS.keys() == methods().keys()
    assert {one.__name__ for one in RECORDS.values()} <= {*dir(compress)}


@pytest.mark.parametrize("name", methods())
def test_defaults_are_those_of_the_configuration(name: str) -> None:
    assert same(RECORDS[name](), of_conf(f"gradient={name}"))


@pytest.mark.parametrize("rule", rules())
def test_a_rule_of_another_method_has_its_own_defaults(rule: str) -> None:
    assert same(Dct(threshold=rule), of_conf("gradient=dct", f"gradient.threshold={rule}"))


def test_a_density_is_the_decimal_complement_of_a_sparsity() -> None:
    for density, sparsity in ((0.01, 0.99), (0.001, 0.999), (0.3, 0.7), (0.1, 0.9), (1.0, 0.0)):
        assert TopK(density=density).settings()["sparsity"] == sparsity


def test_terngrad_asks_for_weights_where_sums_have_no_levels() -> None:
    assert TernGrad().settings()["terngrad"]["pull"] == "levels"
    assert TernGrad(sharing=False).settings()["terngrad"]["pull"] == "weights"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dct(density=0), "Dct: density = 0: must be a number above 0 and at most 1"),
        (lambda: Dct(density=1.5), "Dct: density = 1.5: must be a number above 0 and at most 1"),
        (lambda: Dct(density=float("nan")), "density = nan: must be a number above 0"),
        (lambda: Dct(density="0.1"), "density = '0.1': must be a number above 0 and at most 1"),
        (lambda: Dct(lifespan=True), "lifespan = True: must be a whole number at least 1"),
        (lambda: Dct(scope="layer"), "scope = 'layer': must be 'tensor' or 'stage'"),
        (lambda: TopK(threshold="sidco"), "TopK: threshold = 'sidco': must be 'histogram' or"),
        (lambda: TopK(lifespan=2), "gradient=topk selects anew every step"),
        (lambda: TernGrad(clip=0), "clip = 0: must be a number above 0 and at most 3.40282e+38"),
        (lambda: Sidco(adaptation=33), "must be 'best' or 'literal' or 'flip' or a whole number"),
        (lambda: Dgc(warmup_sparsities=[0.5]), "must be a tuple, each a number at least 0"),
        (lambda: Dgc(warmup_sparsities=(0.5, 0.2)), "must increase"),
        (lambda: Dgc(threshold="sidco", part=0.5), "part = 0.5: has no effect with threshold ="),
        (lambda: TernGrad(pull="levels", sharing=False), "have no common levels"),
    ],
)
def test_what_a_record_cannot_be(make, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dct(sparsity=0.99), "Dct has no setting 'sparsity'; it has the fraction that is"),
        (lambda: Dgc(sparsity=np.float32(0.75)), "that is sent, density=0.25"),
        (lambda: TopK(sparsity="most"), "that is sent, density=1 - sparsity"),
        (lambda: TernGrad(sparsity=0.9), "TernGrad has no setting 'sparsity'; it has clip, shar"),
        (lambda: Dct(densty=0.1), "Dct has no setting 'densty'; did you mean density?"),
        (lambda: Dct(0.01), "Dct takes its settings by name: Dct(density=0.01)"),
        (lambda: NoCompression(density=0.01), "NoCompression has no settings"),
    ],
)
def test_a_setting_that_a_record_does_not_have(make, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("module", ["dlrm_hybrid", "dlrm_hybrid.compress"])
def test_a_star_brings_the_public_names(module: str) -> None:
    brought: dict[str, object] = {}
    exec(f"from {module} import *", brought)
    assert brought.keys() - {"__builtins__"} == {*import_module(module).__all__}
    assert len(brought) > 4


def test_numbers_of_numpy_become_those_of_python() -> None:
    record = Dct(density=np.float64(0.05), lifespan=np.int64(7))
    assert repr(record) == repr(Dct(density=0.05, lifespan=7))
    assert TopK(density=np.float32(0.5)).settings()["sparsity"] == 0.5
    sparsities = tuple(np.array([0.5, 0.75]))
    assert repr(Dgc(warmup_sparsities=sparsities)) == repr(Dgc(warmup_sparsities=(0.5, 0.75)))
    with pytest.raises(ValueError, match=r"lifespan = 7\.0: must be a whole number"):
        Dct(lifespan=np.float64(7))


def test_a_record_is_a_gradient_method() -> None:
    assert isinstance(Dct(), GradientMethod)
    assert not isinstance("dct", GradientMethod)


@pytest.mark.parametrize("name", methods())
def test_records_are_values(name: str) -> None:
    record = RECORDS[name]()
    assert pickle.loads(pickle.dumps(record)) == record
    assert len({record, RECORDS[name]()}) == 1


@pytest.mark.parametrize("name", methods())
def test_a_world_takes_a_record(name: str) -> None:
    record = RECORDS[name]()
    named = {"parallel.trainers": 2, "parallel.servers": 1, "parallel.cuts": ["bottom.2"]}
    spec = ModelSpec(embedding_dim=4, bottom=(4, 8, 4), top=(8, 1), table_rows=(9, 9))
    made = settings_of(spec, "in_process", named, record, {})
    assert same(record, made.config.gradient)


def test_records_load_neither_torch_nor_numba() -> None:
    program = (
        "import sys; from dlrm_hybrid.compress import Dct; Dct(density=0.1).settings(); "
        "sys.exit(bool({'torch', 'numba', 'numpy', 'pydantic'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Dtc'"):
        _ = compress.Dtc
