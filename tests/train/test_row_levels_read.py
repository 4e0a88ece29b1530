"""What a rank reads of the state in a checkpoint: its own, and what holders of tables need."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_hybrid.model.tensors import full_pieces
from dlrm_hybrid.run.rank.facts import Source
from dlrm_hybrid.types import Group

TRAINERS, TABLES = range(3), range(12)
KINDS = ("slots", "copies", "residuals", "row_squares")
SAVED = {
    Group.COMPRESSOR: [f"trainer.{trainer}.top.1.weight.residual" for trainer in TRAINERS],
    Group.LOOKUPS: [
        *(f"lookups.{trainer}.rows" for trainer in TRAINERS),
        *(f"lookups.{trainer}.ahead.{server}.0.keys" for trainer in TRAINERS for server in (0, 1)),
    ],
    Group.LEVELS: [
        *(f"levels.{trainer}.steps" for trainer in TRAINERS),
        *(f"levels.{trainer}.{n}.{kind}" for trainer in TRAINERS for n in TABLES for kind in KINDS),
    ],
    Group.FLIGHT: ["flight.0.stage.5.rows"],
}


class Saved:
    """A checkpoint with these names."""

    def names(self, *groups: Group) -> list[str]:
        return [name for group in groups for name in SAVED[group]]

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: torch.zeros(1) for name in names}


@pytest.mark.parametrize(
    ("tables", "others"), [(["embedding.2.weight", "embedding.11.sum"], (1, 10)), ([], ())]
)
def test_a_rank_reads_its_own_and_what_holders_know_of_others(
    tables: list[str], others: tuple[int, ...]
) -> None:
    saved: Any = Saved()
    own = {name for group in SAVED.values() for name in group if name.split(".")[1] == "1"}
    pieces = full_pieces(dict.fromkeys(own, torch.zeros(1)))
    pieces += full_pieces(dict.fromkeys(tables, torch.zeros(1)), Group.EMBEDDINGS)
    known = {f"levels.{t}.{n}.{what}" for t in (0, 2) for n in others for what in KINDS[:2]}
    known |= {"levels.0.steps", "levels.2.steps"}
    source = Source(checkpoint=saved, facts={}, kept=frozenset(Group))
    assert source.state([1], pieces).keys() == own | known | {*SAVED[Group.FLIGHT]}
    ends = {f".{n}.{what}" for n in others for what in KINDS[:2]} | {".steps"}
    of_server = source.of_table_server(1, others, trainers=3)
    read = {x for x in SAVED[Group.LEVELS] if x.endswith(tuple(ends))}
    assert of_server.keys() == read | {f"lookups.{trainer}.ahead.1.0.keys" for trainer in TRAINERS}
    for group, names in SAVED.items():
        source = Source(checkpoint=saved, facts={}, kept=frozenset({group}))
        assert source.state([1], pieces).keys() <= {*names}
