import json
from pathlib import Path

import pytest

from dlrm_hybrid.telemetry.events import Event
from dlrm_hybrid.train.supervisor import Rank, run_ranks


def _run(folder: Path, entry: str, trainers: int, **given: object) -> list[dict]:
    seen: list[Event] = []
    members = list(range(1, 1 + 3 * trainers, 3))
    ranks = [
        Rank(
            index=rank,
            role="worker",
            argument=json.dumps(
                {"rank": rank, "members": members, "folder": str(folder / "group"), **given}
            ),
            log_folder=folder,
        )
        for rank in members
    ]
    outcome = run_ranks(ranks, f"embedding_ranks:{entry}", seen.append)
    logs = "".join((folder / f"worker-{rank}.log").read_text() for rank in members)
    assert outcome.message == "", logs
    assert logs == ""
    return sorted((one.values for one in seen), key=lambda values: values["trainer"])


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("trainers", [2, 3])
def test_table_wise_equals_one_table_bit_for_bit(tmp_path: Path, trainers: int, optimizer: str):
    told = _run(tmp_path, "equals_one_table", trainers, kind="table_wise", optimizer=optimizer)
    for one in told:
        assert one["forward"] == 0.0
        assert one["shards"] == told[0]["shards"]
    assert len(told[-1]["values"]) == (7 if optimizer == "sgd" else 14)
    for difference, moved in told[-1]["values"].values():
        assert difference == 0.0
        assert moved >= 1e-3


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("row_wise", "sgd"),
        ("row_wise", "adagrad"),
        ("row_wise", "rowwise_adagrad"),
        ("column_wise", "sgd"),
        ("column_wise", "adagrad"),
        ("auto", "sgd"),
    ],
)
@pytest.mark.parametrize("trainers", [2, 3])
def test_other_shardings_equal_one_table(tmp_path: Path, trainers: int, kind: str, optimizer: str):
    told = _run(tmp_path, "equals_one_table", trainers, kind=kind, optimizer=optimizer)
    for one in told:
        assert one["forward"] <= 1e-6
    for difference, moved in told[-1]["values"].values():
        assert difference <= 1e-6 * max(1.0, moved)
        assert moved >= 1e-3
    if kind != "auto":
        assert all(len(shards) > 1 for shards in told[0]["shards"].values())
