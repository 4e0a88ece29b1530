"""When residuals are drained."""

from math import sqrt

from dlrm_hybrid.compress.gradient.error_feedback import Drain
from dlrm_hybrid.compress.gradient.methods.thresholded import DrainMode


def due(mode: DrainMode, every: int, trainer: int, name: str, seed: int = 7) -> list[int]:
    drain = Drain(mode=mode, every=every, seed=seed, trainer=trainer)
    return [step for step in range(4000) if drain.is_due(name, step)]


def test_the_number_of_drains_is_binomial() -> None:
    counts = [len(due("discard", 10, 0, f"layer.{place}")) for place in range(8)]
    deviation = sqrt(4000 * 0.1 * 0.9)
    assert all(abs(count - 400) < 4 * deviation for count in counts)
    mean_square = sum((count - 400) ** 2 for count in counts) / 8
    assert 0.2 < mean_square / deviation**2 < 3


def test_trainers_tensors_and_seeds_draw_apart_and_modes_alike() -> None:
    base = due("discard", 10, 0, "a")
    assert due("flush", 10, 0, "a") == base
    others = [
        due("discard", 10, 1, "a"),
        due("discard", 10, 0, "b"),
        due("discard", 10, 0, "a", seed=8),
    ]
    # Independent draws meet at 1 step in 100.
    assert all(len(set(base) & set(other)) < 80 for other in others)


def test_no_drain_and_a_drain_at_every_step() -> None:
    assert due("none", 1, 0, "a") == []
    assert due("discard", 1, 0, "a") == list(range(4000))
