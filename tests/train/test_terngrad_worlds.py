"""Worlds of TernGrad: with scales of their own, late, and with replicas that learn."""

from world_runs import Trained, summary

WORLD = (
    *("parallel=hybrid", "parallel.cuts=[bottom.2]", "parallel.servers=2"),
    *("train.batch_size=16", "parallel.world=in_process", "sync.check_every=1"),
    *("gradient=terngrad", "gradient.smallest=30", "gradient.encoding=trits"),
)
WEIGHTS = "gradient.pull=weights"
OWN_SCALES = ("gradient.sharing=false", WEIGHTS)


def test_without_clipping_or_sharing_or_in_time_other_things_are_learned(trained: Trained) -> None:
    losses: set[float] = set()
    late = (*OWN_SCALES, "sync=bounded", "sync.staleness=2")
    options = ((), OWN_SCALES, ("gradient.clip=null",), late)
    for number, ablation in enumerate(options):
        folder = trained(str(number), *WORLD, "train.steps=8", *ablation)
        losses.add(summary(folder)["test"]["loss"])
    assert len(losses) == 4
