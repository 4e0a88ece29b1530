"""What a rank reads of a checkpoint about rows that were sent as levels."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.rank.facts import Source

TRAINERS, TABLES = range(3), range(12)
NAMES = [
    *(f"levels.{trainer}.steps" for trainer in TRAINERS),
    *(
        f"levels.{trainer}.{table}.{what}"
        for trainer in TRAINERS
        for table in TABLES
        for what in ("slots", "copies", "residuals", "row_squares")
    ),
]


class Saved:
    """A checkpoint with these names."""

    folder = Path("saved")

    def names(self, *groups: str) -> list[str]:
        assert groups == ("levels",)
        return NAMES

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: torch.zeros(1) for name in names}


@pytest.mark.parametrize(
    ("trainers", "held", "others"),
    [
        ([1], ["embedding.2", "embedding.11.sum"], (1, 10)),
        ([1], [], ()),
        ([], ["embedding.1"], None),
    ],
)
def test_a_rank_reads_its_own_and_what_holders_know_of_others(
    trainers: list[int], held: list[str], others: tuple[int, ...] | None
) -> None:
    values = values_of([])
    saved: Any = Saved()
    facts = {"config": values}
    source = Source(checkpoint=saved, facts=facts, config=validate(values), values=values)
    found = source.row_levels(trainers, held)
    if others is None:
        assert found == {}
        return
    own = {name for name in NAMES if name.startswith("levels.1.")}
    known = {
        f"levels.{trainer}.{table}.{what}"
        for trainer in (0, 2)
        for table in others
        for what in ("slots", "copies")
    }
    assert found.keys() == own | known | {"levels.0.steps", "levels.2.steps"}
