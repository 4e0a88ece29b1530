"""Worlds whose trainers agree before they push."""

import pytest
from patience import PATIENT
from world_runs import Train, assert_moved, assert_same_state, curve, summary

from dlrm_hybrid.compress.gradient.methods import methods
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.assembly.compress import rounds

WORLD = (
    *("parallel=hybrid", "parallel.cuts=[bottom.2]", "parallel.servers=2"),
    *("train.batch_size=16", PATIENT),
    "sync.check_every=1",  # every replica is compared with what the server published
)
SPARSE = "gradient.sparsity=0.9"
METHODS = {
    "cltk": (SPARSE,),
    "deft": (SPARSE, "parallel.trainers=3"),
    "dgc": (SPARSE, "gradient.aggregation=leader", "gradient.correction.warmup_steps=2"),
    "dct": (SPARSE, "gradient.aggregation=union", "gradient.precision=bfloat16"),
    "terngrad": ("gradient.terngrad.smallest=30", "gradient.terngrad.encoding=trits"),
}


def test_every_method_is_here() -> None:
    choices = {name: values_of(["parallel=hybrid", f"gradient={name}"]) for name in methods()}
    coordinated = {name for name, values in choices.items() if rounds(validate(values))}
    assert set(METHODS) == {*coordinated, "dct", "dgc"}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_processes_agree_as_one_process_does(method: str, train: Train) -> None:
    choice = (f"gradient={method}", *METHODS[method])
    options = (*WORLD, *choice, "train.steps=20", "checkpoint.every=10")
    code, in_process = train("in-process", *options, "parallel.world=in_process")
    assert code == 0
    assert_moved(in_process, 10, 20)
    code, processes = train("processes", *options)
    assert code == 0
    for step in (10, 20):
        assert_same_state(processes, in_process, step)
    assert curve(processes) == curve(in_process)
    for part in ("test", "compression"):
        assert summary(processes)[part] == summary(in_process)[part]


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_agrees_as_the_unbroken_one(method: str, train: Train) -> None:
    choice = (f"gradient={method}", *METHODS[method])
    options = (*WORLD, *choice, "parallel.world=in_process", "checkpoint.every=7")
    code, unbroken = train("unbroken", *options, "train.steps=14")
    assert code == 0
    resume = f"checkpoint.resume={unbroken / 'checkpoints' / 'step_00000007'}"
    code, resumed = train("resumed", *options, "train.steps=14", resume)
    assert code == 0
    assert_same_state(resumed, unbroken, 14)
    assert_moved(unbroken, 7, 14)


WEIGHTS = "gradient.terngrad.pull=weights"
ABLATIONS = (("gradient.terngrad.sharing=false", WEIGHTS), ("gradient.terngrad.clip=null",))


def test_without_clipping_or_sharing_other_things_are_learned(train: Train) -> None:
    options = (*WORLD, "gradient=terngrad", *METHODS["terngrad"], "parallel.world=in_process")
    losses: set[float] = set()
    for name, ablation in enumerate(((), *ABLATIONS)):
        code, folder = train(str(name), *options, "train.steps=20", *ablation)
        assert code == 0
        losses.add(summary(folder)["test"]["loss"])
    assert len(losses) == 3


LATE = ("gradient.terngrad.sharing=false", WEIGHTS, "sync=bounded", "sync.staleness=2")


def test_trainers_with_scales_of_their_own_may_run_ahead(train: Train) -> None:
    options = (*WORLD, "gradient=terngrad", *METHODS["terngrad"], "parallel.world=in_process")
    losses: set[float] = set()
    for name, late in (("sync", LATE[:2]), ("late", LATE)):
        code, folder = train(name, *options, "train.steps=20", *late)
        assert code == 0
        losses.add(summary(folder)["test"]["loss"])
    assert len(losses) == 2


@pytest.mark.slow
def test_processes_run_ahead_as_one_process_does(train: Train) -> None:
    options = (*WORLD, "gradient=terngrad", *METHODS["terngrad"], *LATE, "train.steps=20")
    code, in_process = train("in-process", *options, "parallel.world=in_process")
    assert code == 0
    code, processes = train("processes", *options)
    assert code == 0
    assert_same_state(processes, in_process, 20)


@pytest.mark.parametrize("optimizer", ["momentum", "adagrad"])
def test_replicas_that_learn_are_those_that_are_told_weights(optimizer: str, train: Train) -> None:
    options = (*WORLD, "gradient=terngrad", *METHODS["terngrad"], "parallel.world=in_process")
    length = ("train.steps=12", "checkpoint.every=6", f"optimizer={optimizer}", "optimizer.lr=0.02")
    code, learned = train("learned", *options, *length)
    assert code == 0
    code, told = train("told", *options, *length, WEIGHTS)
    assert code == 0
    assert_same_state(learned, told, 12)
    assert_moved(learned, 6, 12)
