"""What is set for `schedule=dsp` and cannot be is refused by its keys."""

import pytest

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.identity import in_flight, other_flights
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.types import ConfigError

STALE = ("parallel=hybrid", "schedule=dsp")
WARM = "optimizer.staleness_warmup_steps=100"


@pytest.mark.parametrize(
    "overrides",
    [
        STALE,
        (*STALE, "sync=bounded", WARM),
        (*STALE, "parallel.trainers=1", "parallel.servers=0", "gradient=none"),
        (*STALE, "parallel.cuts=[top.1]", "schedule.delays=[0,0]", "schedule.staleness=[0,0]"),
        (*STALE, "schedule.delays=[3,3,0]", "schedule.staleness=[10,5,0]", WARM),
        ("parallel=hybrid", "sync=bounded", WARM),
    ],
)
def test_what_can_be_is_accepted(overrides: tuple[str, ...]) -> None:
    validate(values_of(list(overrides)))


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (
            ("parallel=hybrid", "schedule.delays=[1,0]"),
            "schedule.delays=[1,0]: only applies to s",
        ),
        (
            (*STALE, "schedule.staleness=null"),
            "schedule.staleness = null: must be a list, each a whole num",
        ),
        (
            (*STALE, "schedule.delays=[1,0]"),
            "schedule.delays = [1, 0]: needs 3 numbers, one for each stage of parallel.cuts = [bo",
        ),
        ((*STALE, "schedule.delays=[1,1,1]"), "schedule.delays = [1, 1, 1]: must end with 0"),
        ((*STALE, "schedule.staleness=[4,2,1]"), "schedule.staleness = [4, 2, 1]: must end with 0"),
        (
            (*STALE, "schedule.staleness=[4,4,0]"),
            "schedule.staleness = [4, 4, 0]: staleness[0] = 4 must be at least staleness[1] + "
            "delays[0] = 5, with schedule.delays = [1, 1, 0]",
        ),
        (
            (*STALE, "schedule.delays=[2,2,0]", "schedule.staleness=[4,1,0]"),
            "schedule.staleness = [4, 1, 0]: staleness[1] = 1 must be at least staleness[2] + "
            "delays[1] = 2, with schedule.delays = [2, 2, 0]",
        ),
        ((*STALE, "schedule.delays=[-1,1,0]"), "schedule.delays[0] = -1: "),
        ((*STALE, "schedule.microbatches=4"), "schedule.microbatches=4: only applies to schedule="),
        (("schedule=dsp",), "schedule = 'dsp': needs parallel=hybrid: a lone stage"),
        ((*STALE, "parallel.cuts=[]"), "schedule = 'dsp': needs parallel.cuts: a lone stage"),
        (
            (*STALE, "schedule.delays=[0,0,0]", "schedule.staleness=[0,0,0]", WARM),
            "optimizer.staleness_warmup_steps = 100: no gradient is stale",
        ),
        ((*STALE, "sync=async"), "schedule = 'dsp': with sync=async trainers are given batches"),
        (
            (*STALE, "parallel.elastic=true"),
            "schedule = 'dsp': with parallel.elastic=true trainers are given batches one by one",
        ),
        (
            (*STALE, "embedding=served", "parallel.table_servers=1"),
            "schedule = 'dsp': embedding=served updates a batch before the next one is looked up",
        ),
        (("parallel=hybrid", WARM), "optimizer.staleness_warmup_steps = 100: no gradient is stale"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(overrides: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(values_of(list(overrides)))
    assert fault in str(refused.value)


def test_only_a_run_with_the_same_stages_goes_on_with_batches_in_flight() -> None:
    values = values_of(list(STALE))
    facts = {"config": values, "progress": {"step": 9, "emptied": 4}}
    assert in_flight(facts) and not other_flights(facts, values)
    assert not in_flight({**facts, "progress": {"step": 9, "emptied": 9}})
    assert not in_flight({**facts, "config": values_of(["parallel=hybrid"])})
    zeros = values_of([*STALE, "schedule.delays=[0,0,0]", "schedule.staleness=[0,0,0]"])
    assert not in_flight({**facts, "config": zeros})
    for override in ("parallel.trainers=1", "schedule.delays=[0,1,0]", "activation=dct"):
        key = override.partition("=")[0]
        lines = other_flights(facts, values_of([*STALE, override]))
        assert [line for line in lines if line.startswith(key)], override
    assert not other_flights(facts, values_of([*STALE, "parallel.servers=3", "optimizer.lr=0.3"]))
