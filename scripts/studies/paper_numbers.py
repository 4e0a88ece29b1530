"""What the DCT paper reports of DLRM on Criteo Kaggle (Gupta et al., KDD 2021, five tables)."""

from __future__ import annotations

from typing import NamedTuple, final


class Scores(NamedTuple):
    """Losses in nats, accuracies in percent, of the end of one run."""

    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float


@final
class Point(NamedTuple):
    """One row of a table: what was dropped, and over how many model-parallel workers."""

    sparsity: float
    workers: int


BASELINE = Scores(0.4477, 79.23, 0.4538, 78.78)

TABLES: dict[int, dict[Point, Scores]] = {
    1: {
        Point(0.75, 2): Scores(0.4473, 79.29, 0.4532, 78.81),
        Point(0.90, 2): Scores(0.4472, 79.28, 0.4530, 78.81),
        Point(0.95, 2): Scores(0.4473, 79.24, 0.4534, 78.80),
        Point(0.98, 2): Scores(0.4505, 79.07, 0.4562, 78.61),
        Point(0.75, 3): Scores(0.4482, 79.19, 0.4536, 78.79),
        Point(0.90, 3): Scores(0.4479, 79.24, 0.4537, 78.78),
        Point(0.95, 3): Scores(0.4495, 79.18, 0.4546, 78.72),
    },
    2: {
        Point(0.75, 1): Scores(0.4478, 79.23, 0.4534, 78.81),
        Point(0.90, 1): Scores(0.4478, 79.22, 0.4536, 78.79),
        Point(0.95, 1): Scores(0.4479, 79.25, 0.4538, 78.79),
        Point(0.98, 1): Scores(0.4478, 79.23, 0.4537, 78.80),
        Point(0.995, 1): Scores(0.4482, 79.20, 0.4547, 78.75),
    },
    3: {
        Point(0.75, 3): Scores(0.4480, 79.23, 0.4535, 78.81),
        Point(0.90, 3): Scores(0.4481, 79.26, 0.4537, 78.78),
        Point(0.95, 3): Scores(0.4492, 79.19, 0.4548, 78.70),
    },
    6: {
        Point(0.50, 2): Scores(0.4569, 78.72, 0.4618, 78.37),
        Point(0.75, 2): Scores(0.4610, 78.53, 0.4656, 78.12),
        Point(0.90, 2): Scores(0.4685, 77.95, 0.4721, 77.78),
    },
    7: {
        Point(0.50, 2): Scores(0.4495, 79.07, 0.4561, 78.62),
        Point(0.75, 2): Scores(0.4516, 78.95, 0.4588, 78.48),
        Point(0.90, 2): Scores(0.4701, 77.76, 0.4789, 77.13),
    },
}
TITLES = {
    1: "DCT-MP: activations and their gradients",
    2: "DCT-DP: gradients of the weights",
    3: "DCT-MP and DCT-DP together",
    6: "Control: Gaussian sketches of activations",
    7: "Control: top-k of activation gradients with error feedback",
}
