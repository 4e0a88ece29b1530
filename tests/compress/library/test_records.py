"""The records of the library: the configuration reads them, and what they refuse."""

import pickle
import re
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest

from dlrm_hybrid import compress
from dlrm_hybrid.compress import Dct, Dgc, GradientMethod, NoCompression, Sidco, TernGrad, TopK
from dlrm_hybrid.compress.gradient.methods import help_of, methods
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.world.settings import settings_of

ALL = pytest.mark.parametrize("record", methods().values(), ids=methods())


@ALL
def test_the_configuration_reads_the_record(record: type[GradientMethod]) -> None:
    sgd = [f"optimizer={one}" for one in record.optimizers]
    assert validate(values_of(["parallel=hybrid", *sgd, f"gradient={record.name}"])).gradient == (
        record()
    )


@ALL
def test_every_record_has_a_public_name_and_every_field_a_line_of_help(
    record: type[GradientMethod],
) -> None:
    assert getattr(compress, record.__name__) is record
    assert all(help_of(record).values())


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
    assert TopK(density=np.float32(0.5)).settings()["density"] == 0.5
    sparsities = tuple(np.array([0.5, 0.75]))
    assert repr(Dgc(warmup_sparsities=sparsities)) == repr(Dgc(warmup_sparsities=(0.5, 0.75)))
    with pytest.raises(ValueError, match=r"lifespan = 7\.0: must be a whole number"):
        Dct(lifespan=np.float64(7))


def test_a_record_is_a_gradient_method() -> None:
    assert isinstance(Dct(), GradientMethod)
    assert not isinstance("dct", GradientMethod)


@ALL
def test_records_are_values(record: type[GradientMethod]) -> None:
    assert pickle.loads(pickle.dumps(record())) == record()
    assert len({record(), record()}) == 1


@ALL
def test_a_world_takes_a_record(record: type[GradientMethod]) -> None:
    named = {"parallel.trainers": 2, "parallel.servers": 1, "parallel.cuts": ["bottom.2"]}
    spec = ModelSpec(embedding_dim=4, bottom=(4, 8, 4), top=(8, 1), table_rows=(9, 9))
    made = settings_of(spec, "in_process", named, record(), {})
    assert made.config.gradient == record()


def test_records_load_neither_torch_nor_numba() -> None:
    program = (
        "import sys; from dlrm_hybrid.compress import Dct; Dct(density=0.1).settings(); "
        "sys.exit(bool({'torch', 'numba', 'numpy', 'pydantic'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Dtc'"):
        _ = compress.Dtc
