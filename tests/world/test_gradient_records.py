"""Methods of `dlrm_hybrid.compress` as the argument of a world."""

from typing import Any

import pytest

from dlrm_hybrid import compress
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.types import ConfigError
from dlrm_hybrid.world.settings import settings_of

SPEC = ModelSpec(embedding_dim=4, bottom=(3, 8, 4), top=(4, 1), table_rows=(9, 9))
NAMED = {"parallel.trainers": 2, "parallel.cuts": [], "parallel.servers": 1}


def section(record: Any) -> dict[str, Any]:
    found = settings_of(SPEC, "in_process", NAMED, record, {}).values["gradient"]
    return {key: value for key, value in found.items() if value is not None}


def test_what_a_record_says_reaches_the_configuration() -> None:
    found = section(compress.Dct(density=0.05, threshold="sidco", scope="stage", lifespan=7))
    assert (found["name"], found["density"], found["scope"]) == ("dct", 0.05, "stage")
    assert (found["threshold"], found["lifespan"]) == ("sidco", 7)
    found = section(compress.Dgc(density=0.01, momentum=0.5, warmup_sparsities=(0.5, 0.75)))
    assert found["momentum"] == 0.5
    assert found["warmup_sparsities"] == [0.5, 0.75]


@pytest.mark.parametrize("wrong", [compress.Dct, 3, {"name": "dct"}])
def test_what_is_no_method_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="must be a method such as Dct"):
        section(wrong)
