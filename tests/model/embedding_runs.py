"""Starts the trainers of the sharded embeddings' tests and collects what they tell."""

import json
from pathlib import Path

from dlrm_hybrid.run.supervisor import Rank, run_ranks
from dlrm_hybrid.telemetry.events import Event


def run(
    folder: Path,
    entry: str,
    trainers: int,
    silent: int = 0,
    module: str = "embedding_ranks",
    **given: object,
) -> list[dict]:
    """What trainers tell, all but the last `silent`; they must not fail and print nothing."""
    seen: list[Event] = []
    members = list(range(1, 1 + 3 * trainers, 3))
    given = {"optimizer": "sgd", "members": members, "folder": str(folder / entry), **given}
    ranks = [
        Rank(
            index=rank,
            name=f"worker-{rank}",
            argument=json.dumps({"rank": rank, **given}),
            log_folder=folder / entry,
        )
        for rank in members
    ]
    outcome = run_ranks(ranks, f"{module}:{entry}", seen.append)
    logs = "".join((folder / entry / f"worker-{rank}.log").read_text() for rank in members)
    assert outcome.message == "", logs
    assert logs == ""
    told = [one.values for one in seen]
    assert {one["trainer"] for one in told} == set(range(trainers - silent))
    return sorted(told, key=lambda values: values["trainer"])
