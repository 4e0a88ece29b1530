"""What is set for served tables and cannot be is refused by its key."""

import pytest

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.identity import config_hash, differences, evaluated
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.types import ConfigError

WORLD = ("parallel=hybrid",)
CACHED = ("embedding.cache_rows=9", "embedding.cache_batches=2")
SERVED = (*WORLD, "embedding=served", "parallel.table_servers=2")


def test_what_can_be_is_accepted() -> None:
    config = validate(values_of([*SERVED, "embedding.staleness=4"]))
    assert (config.embedding.name, config.embedding.staleness) == ("served", 4)
    assert config.parallel.table_servers == 2
    assert validate(values_of(list(WORLD))).embedding.name == "fused"


@pytest.mark.parametrize(("choice", "servers"), [("served", 1), ("fused", 0)])
def test_as_many_table_servers_as_the_choice_of_tables_needs(choice: str, servers: int) -> None:
    assert values_of([*WORLD, f"embedding={choice}"])["parallel"]["table_servers"] == servers


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (
            (*WORLD, "parallel.table_servers=1"),
            "parallel.table_servers = 1: only applies to embedd",
        ),
        (
            (*WORLD, "embedding.staleness=1"),
            "embedding.staleness=1: only applies to embedding=se",
        ),
        (
            (*WORLD, "embedding=served", "parallel.table_servers=0"),
            "parallel.table_servers = 0: embedding=served needs 1",
        ),
        (("embedding=served",), "embedding = 'served': parallel=single has no servers"),
        ((*SERVED, "embedding.sharding=row_wise"), "embedding.sharding=row_wise: only applies"),
        (
            (*SERVED, "embedding.deduplicate=false"),
            "embedding.deduplicate=false: only applies to embedding=fused",
        ),
        ((*SERVED, "embedding.staleness=-1"), "embedding.staleness = -1: "),
        (
            (*WORLD, "embedding.cache_rows=9"),
            "embedding.cache_rows=9: only applies to embedding=served",
        ),
        (
            (*SERVED, "embedding.cache_rows=9"),
            "embedding.cache_rows = 9: needs embedding.cache_batches of 1 or more",
        ),
        (
            (*SERVED, *CACHED, "sync=async", "parallel.threads=2"),
            "parallel.threads = 2: threads have no common cache of rows; needs embedding.cache_ro",
        ),
        (
            (*SERVED, "embedding.cache_batches=9"),
            "embedding.cache_batches = 9: needs embedding.cache_rows of 1 or more",
        ),
        (
            (*WORLD, "embedding.storage=mmap"),
            "embedding.storage=mmap: only applies to embedding=served",
        ),
        (
            (*SERVED, "embedding.folder=rows"),
            "embedding.folder = 'rows': only applies to embedding.storage=mmap, not memory",
        ),
        (("parallel.table_servers=1",), "parallel.table_servers=1: only applies to parallel=hyb"),
    ],
)
def test_what_cannot_be_is_refused(overrides: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate(values_of(list(overrides)))
    assert fault in str(raised.value)


def test_where_rows_lie_decides_no_weight() -> None:
    in_memory = values_of(list(SERVED))
    in_files = values_of([*SERVED, "embedding.storage=mmap", "embedding.folder=rows"])
    assert config_hash(in_memory) == config_hash(in_files)
    assert not differences(in_memory, in_files, new_run=False)
    scored, faults = evaluated(in_files, in_memory, ["embedding.storage", "embedding.folder"])
    assert not faults
    assert scored == in_memory
