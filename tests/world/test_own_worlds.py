"""Worlds of a model of the program's own, with compressed boundaries; and orders of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from outside_model import DeepFm
from outside_world import failing, weight_norms
from torch import nn
from world_rows import BATCH, global_batches

from dlrm_hybrid import OwnModel, World
from dlrm_hybrid.compress import Dct
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.types import ConfigError, RunFailedError

COMPRESSED: dict[str, Any] = {"activation": "dct", "activation.sparsity": 0.5}


def world_of(kind: str, shards: Shards, module: type[nn.Module] = DeepFm, **more: Any) -> World:
    spec = OwnModel(
        module=module,
        table_rows=shards.table_rows,
        num_dense=13,
        embedding_dim=4,
        settings={"top": [16, 8]} if module is DeepFm else {},
    )
    make = World.processes if kind == "processes" else World.in_process
    given = {"trainers": 2, "cuts": ["bottom2", "top1"], "batch_size": BATCH, **more}
    return make(spec, gradient=Dct(density=0.1), config=COMPRESSED, **given)


def test_processes_are_one_process(shards: Shards, tmp_path: Path) -> None:
    batches = global_batches(shards, 8)
    with world_of("in_process", shards) as one, world_of("processes", shards) as several:
        losses = [(one.step(batch).loss, several.step(batch).loss) for batch in batches]
        assert all(first == second for first, second in losses)
        expected, found = one.state_dict(), several.state_dict()
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, found[name]), name
        assert one.predict(batches[:2]).tobytes() == several.predict(batches[:2]).tobytes()
        assert 0 < several.bytes["activation"] < 0.7 * several.dense_bytes["activation"]
        saved = several.save(tmp_path)
        one.load(saved)
        assert one.step(batches[0]).loss == several.step(batches[0]).loss
        asked = several.ask(weight_norms, power=1.0)
        assert asked == one.ask(weight_norms, power=1.0)
        assert [len(of_stage) for of_stage in asked] == [8, 10, 4] * 2
        assert one.ask(lambda worker: worker.rank) == [*range(6)]
        with pytest.raises(ConfigError, match="order test_own_worlds:.*<lambda>: ranks cannot imp"):
            several.ask(lambda worker: worker.rank)
        with pytest.raises(RunFailedError, match="ValueError: no such weights"):
            several.ask(failing)


def test_a_class_inside_a_function_is_refused(shards: Shards) -> None:
    class Inside(nn.Module): ...

    with pytest.raises(ConfigError, match="<locals>.Inside': cannot be imported; needs a class of"):
        world_of("in_process", shards, Inside)


def test_a_class_of_the_program_itself_is_refused_for_processes(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("__main__.DeepFm", DeepFm, raising=False)
    monkeypatch.setattr(DeepFm, "__module__", "__main__")
    with pytest.raises(ConfigError, match="model = '__main__:DeepFm': ranks are processes and"):
        world_of("processes", shards)
