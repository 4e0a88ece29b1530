"""With embedding.kernel=numba one process trains where TorchRec and FBGEMM cannot be imported."""

import subprocess
import sys

PROGRAM = """
import sys

sys.modules["torchrec"] = sys.modules["fbgemm_gpu"] = None  # importing them fails

import numpy as np

from dlrm_hybrid.world.world import World
from dlrm_hybrid.bags import Bags
from dlrm_hybrid.model.spec import ModelSpec

spec = ModelSpec(embedding_dim=8, bottom=(2, 8), top=(8, 1), table_rows=(5, 9))
keys = {"embedding.kernel": "numba", "optimizer": "adagrad", "embedding.optimizer": "adagrad"}
layout = {"trainers": 1, "cuts": [], "servers": 0, "batch_size": 4}
with World.in_process(spec, **layout, config=keys) as world:
    dense, label = np.eye(4, 2, dtype=np.float32), np.array([0, 1, 1, 0], np.float32)
    ids = np.array([[0, 1], [2, 3], [4, 5], [0, 8]])
    print(*(world.step((dense, ids, label)).loss for _ in range(20)))
"""


def test_one_process_trains_without_torchrec_and_fbgemm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    losses = [*map(float, done.stdout.split())]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.01
