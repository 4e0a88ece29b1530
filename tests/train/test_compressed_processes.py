"""Compressed worlds of processes are those of one process, to the last bit of what they keep."""

import pytest
from patience import PATIENT
from saved_tensors import saved_groups
from world_runs import (
    Train,
    assert_compiled_ahead,
    assert_moved,
    assert_same_state,
    checkpoint,
    curve,
    summary,
)

WORLD = (PATIENT, "train.batch_size=16")
HYBRID, LEVELS = ("+experiment=dct_hybrid",), ("+experiment=dct_levels",)
SPARSE_PULLS = ("pull.sparsity=0.95", "gradient.sparsity=0.9")
LATE = (
    *(*HYBRID, "sync=bounded", "sync.staleness=2", "parallel.servers=2"),
    *("activation.sparsity=[0.5,0.9]", "schedule=one_f_one_b", "schedule.microbatches=4"),
)
OTHER = (
    *(*HYBRID, "activation=gradient_topk"),
    *("activation.precision=float32", "activation.sparsity=0.75"),
    *("gradient.renewal=fixed", "gradient.staggered=true", "gradient.lifespan=20"),
    *("gradient.drain=flush", "gradient.drain_every=30", "gradient.residual=update"),
    *("pull.precision=float16", "gradient.precision=float16", "parallel.trainers=3"),
)


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        pytest.param(30, LATE, id="late-short"),
        pytest.param(30, (*LEVELS, "activation.bits=[8,4]"), id="levels-short"),
        pytest.param(
            *(120, (*LATE, "activation.bits=[null,3]")), id="late-levels", marks=pytest.mark.slow
        ),
        pytest.param(30, (*LATE, *SPARSE_PULLS), id="sparse-pulls-short"),
        pytest.param(200, HYBRID, id="hybrid", marks=pytest.mark.slow),
        pytest.param(200, LATE, id="late", marks=pytest.mark.slow),
        pytest.param(120, OTHER, id="other", marks=pytest.mark.slow),
        pytest.param(
            *(120, (*HYBRID, "pull.precision=float32", *SPARSE_PULLS)),
            **{"id": "pulls", "marks": pytest.mark.slow},
        ),
    ],
)
def test_processes_keep_what_one_process_keeps(
    steps: int, options: tuple[str, ...], train: Train
) -> None:
    half = steps // 2
    every = ("telemetry.every=10", f"checkpoint.every={half}", f"train.evaluate_every={half}")
    layout = (*WORLD, *options, *every, f"train.steps={steps}", "train.epochs=2")
    code, processes = train("processes", *layout)
    assert code == 0
    code, in_process = train("in-process", *layout, "parallel.world=in_process")
    assert code == 0
    assert_same_state(processes, in_process, half)
    assert_same_state(processes, in_process, steps)
    assert set(saved_groups(checkpoint(processes, steps))) == {
        *("dense", "embeddings", "versions", "compressor"),
        *(["levels"] if LEVELS[0] in options else []),
    }
    assert_moved(processes, half, steps)
    assert_compiled_ahead(processes)
    assert curve(processes) == curve(in_process)
    for part in ("test", "compression"):
        assert summary(processes)[part] == summary(in_process)[part]
    expected = summary(processes)["network"]["by_class"]
    counted = summary(in_process)["network"]["by_class"]
    assert set(expected) - set(counted) == {"embedding"}, "trainers share tables in one process"
    assert summary(in_process)["network"]["bytes_total"] is None
    for traffic in ("gradient_push", "parameter_pull", "activation", "activation_gradient"):
        assert counted[traffic] == expected[traffic], traffic
        assert counted[traffic]["bytes"] > 0
