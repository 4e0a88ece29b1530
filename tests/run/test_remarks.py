"""What is said before a run begins."""

import pytest

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.readiness import thread_remark


@pytest.mark.parametrize(
    ("overrides", "cores", "load", "part"),
    [
        (["threads=1"], 1, 9.0, None),
        (["threads=4"], 8, 0.5, None),
        (["threads=4"], 8, 6.0, "4 threads while others use 6.0 of them"),
        (["threads=4"], 2, 0.0, "4 threads on 2 cores"),
        (["threads=2", "parallel=hybrid"], 8, 0.0, "7 ranks of 2 threads on 8 cores"),
    ],
)
def test_threads_that_have_no_core_are_told(
    overrides: list[str], cores: int, load: float, part: str | None
) -> None:
    remark = thread_remark(validate(values_of(overrides)), cores, load)
    if part is None:
        assert remark is None
    else:
        assert remark is not None and part in remark
