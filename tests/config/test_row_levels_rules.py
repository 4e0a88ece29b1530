"""What embedding.levels needs, and what runs before it did."""

import pytest

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.identity import differences, same_levels
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.types import ConfigError

LEVELS = ("parallel=hybrid", "embedding.deduplicate=true", "embedding.levels=true")
KEYS = ("levels", "row_error", "gradient_error", "copies_rows")


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (
            (*LEVELS, "embedding.deduplicate=false"),
            "embedding.levels = True: levels are of distinct rows; needs "
            "embedding.deduplicate=True, not False",
        ),
        (
            (*LEVELS, "embedding.comm_precision=bfloat16"),
            "needs embedding.comm_precision='float32', not 'bfloat16'",
        ),
        (
            (*LEVELS, "embedding=served", "parallel.table_servers=1"),
            "embedding.levels=true: only applies to embedding=fused",
        ),
        (
            (*LEVELS, "schedule=dsp", "schedule.delays=[0,0,0]", "schedule.staleness=[0,0,0]"),
            "embedding.levels = True: schedule=dsp looks up batches in flight again",
        ),
        ((*LEVELS, "embedding.copies_rows=0"), "embedding.copies_rows = 0: must be"),
        ((*LEVELS, "embedding.row_error=0"), "embedding.row_error = 0: must be"),
    ],
)
def test_what_cannot_be_is_refused(overrides: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate(values_of(list(overrides)))
    assert fault in str(raised.value)


def test_only_a_new_run_may_send_otherwise_and_then_remembers_nothing() -> None:
    values = values_of(list(LEVELS))
    for change in ("embedding.levels=false", "embedding.row_error=0.1", "embedding.copies_rows=9"):
        other = values_of([*LEVELS, change])
        assert differences(values, other, new_run=False)
        assert not differences(values, other, new_run=True)
        assert not same_levels(values, other)
    assert same_levels(values, values_of([*LEVELS, "optimizer.lr=0.01"]))
