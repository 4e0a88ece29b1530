"""`plan` from a run's costs to a table and a file, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import BEGIN, make_run
from planned import UNITS, config

from dlrm_hybrid.cli import terminal
from dlrm_hybrid.cli.main import run
from dlrm_hybrid.plan.calibration import read
from dlrm_hybrid.plan.costs import compute_seconds, fitted
from dlrm_hybrid.plan.fit import units_of
from dlrm_hybrid.plan.frames import bytes_by_class, frames
from dlrm_hybrid.plan.layout import layout
from dlrm_hybrid.plan.prediction import Costs, most_like
from dlrm_hybrid.plan.simulation.world import simulate
from dlrm_hybrid.plan.worlds import as_configured
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.traffic import Phase, Traffic

STEPS = 100
ROWS = 512_000
HYBRID = ("parallel=hybrid", "data.rows=600000")
SPANS = {
    "worker-0": {Span.COMPUTE: 3e-3, Span.ENCODE: 5e-4, Span.DECODE: 4e-4, Span.APPLY: 2e-4},
    "tables-0": {Span.EMBEDDING: 5e-4, Span.APPLY: 1.5e-3},
    "server-0": {Span.DECODE: 8e-4, Span.APPLY: 2e-3, Span.ENCODE: 6e-4},
}
BESIDE = {Span.SEND: 4e-4, Span.REST: 3e-4, Span.READ: 1e-4}


def made(folder: Path, *overrides: str, speed: float = 4_000.0, status: str = "complete") -> Path:
    """A run of these costs for a step."""
    world = layout(config(*HYBRID, *overrides), ROWS)
    trainers, size = world.topology.trainers, world.topology.size
    sizes = bytes_by_class(world, frames(world))
    seconds = STEPS * 128 * trainers / speed
    started = {"attempt": 0, "rank": 1, "role": "worker-0.1", "pid": 1, "steps_total": STEPS}
    events = [
        Event(Kind.STARTED, 0, BEGIN, {**started, "samples_per_step": 256, "train_rows": ROWS}),
        Event(
            Kind.PROGRESS,
            STEPS,
            BEGIN + 1,
            {
                **dict.fromkeys(("samples", "rows", "timed_rows"), STEPS * 256),
                **dict.fromkeys(("loss", "accuracy", "lr"), 0.5),
                **dict.fromkeys(("sent_bytes", "dense_equivalent_bytes", "sent_rows")),
                "samples_per_step": 256,
                "timed_seconds": seconds,
                "timed_cpu_seconds": seconds / 2,
                "seconds_by_span": dict.fromkeys(Span, 0.0),
            },
        ),
    ]
    for rank in range(size):
        role = world.topology.name(rank)
        spans = dict.fromkeys(Span, 0.0) | BESIDE | SPANS[f"{role.partition('-')[0]}-0"]
        if rank in world.topology.interaction_group:
            spans[Span.EMBEDDING] = 2e-3
        cpu = sum(spans.values()) + 3e-3  # of threads of the network
        tallies = {
            one: {
                "messages": 4 * STEPS,
                "bytes": round(sizes.get(one, 0) * STEPS / size),
                "dense_equivalent_bytes": 0,
            }
            for one in Traffic
        }
        by_phase = {phase: tallies if phase is Phase.TRAIN else {} for phase in Phase}
        events.append(
            Event(
                Kind.RANK,
                STEPS,
                BEGIN + 2,
                {
                    "rank": rank,
                    "role": role,
                    "timed_steps": STEPS,
                    "cpu_series": [],
                    "seconds": dict.fromkeys(Phase, 0.0) | {Phase.TRAIN: seconds},
                    "cpu_seconds": dict.fromkeys(Phase, 0.0) | {Phase.TRAIN: STEPS * cpu},
                    "seconds_by_span": {one: STEPS * value for one, value in spans.items()},
                    "versions": {"elements": 100, "told": 100} if rank == size - 1 else None,
                    "staleness": None,
                    "interface": None,
                    "traffic": by_phase,
                    "received": by_phase,
                },
            )
        )
    make_run(folder, [*HYBRID, *overrides], events, status)
    return folder


def test_the_run_that_costs_were_taken_from_is_met(tmp_path: Path) -> None:
    calibration = read(made(tmp_path / "run"))
    units = units_of(calibration)
    hosts = as_configured(calibration.world.config).hosts(calibration.cores)
    found = simulate(calibration.world, units, hosts)
    assert found.samples_per_second == pytest.approx(4_000, rel=0.02)
    for stage in range(3):
        taken = compute_seconds(units, calibration.world, stage)
        # Less what the network's threads took, and what cold caches did.
        assert 0.6 * 3e-3 < taken < 3e-3
    assert units.messages.wake > 0


def test_coefficients_are_found_again_and_never_negative() -> None:
    rows = [(1.0, 5.0), (2.0, 1.0), (7.0, 2.0)]
    measured = [3 * a + 0.5 * b for a, b in rows]
    assert fitted(rows, measured) == pytest.approx((3.0, 0.5))
    assert fitted([(1.0, 1.0), (2.0, 3.0)], [1.0, 1.5]) == pytest.approx((0.75, 0.0), rel=0.2)
    assert fitted([(0.0, 0.0)], [1.0]) == (0.0, 0.0)


def test_worlds_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, output = made(tmp_path / "run"), tmp_path / "plan.json"
    argv = ["plan", *HYBRID, f"plan.calibration={folder}", "plan.trainers=[1,2]"]
    argv += ["plan.rates=[10mbit,1gbit]", f"plan.output={output}"]
    assert run(["dlrm_hybrid", *argv]) == 0
    told = capsys.readouterr().out
    assert "one process on one machine: " in told
    written = json.loads(output.read_text())
    assert [one["name"] for one in written["worlds"]] == ["1 × 3 + 1", "2 × 3 + 1"] * 2
    slow, fast = written["worlds"][1], written["worlds"][3]
    assert slow["samples_per_second"] < fast["samples_per_second"]
    assert slow["bottleneck"]["name"] == "link of server-0"
    assert slow["what_if"]["rate × 2"] > 1.5
    assert slow["network"]["bytes_per_sample"] == pytest.approx(37_617, rel=0.01)
    assert set(slow["memory_bytes"]) == set(slow["thread_use"])
    assert written["one_process_samples_per_second"] > 0


@pytest.mark.parametrize(
    ("status", "overrides", "planned", "fault"),
    [
        (None, (), (), "is no run folder"),
        ("failed", (), (), "only a complete run says its costs"),
        ("complete", (), ("model=dlrm_small",), "model.bottom"),
        ("complete", ("precision=bfloat16",), (), "precision"),
        ("complete", (), ("plan.rates=[fast]",), "plan.rates = fast: must be a rate"),
        ("complete", (), ("plan.hosts=each",), "plan.hosts = each: how fast are the links?"),
        ("complete", (), ("plan.trainers=[2,0]",), "plan.trainers[1] = 0"),
        ("complete", (), ("plan.count_steps=20", "plan.search=4"), "plan.count_steps = 20: would"),
        ("complete", (), ("plan.count_steps=20", "plan.trainers=[64]"), "a world of 193 ranks is"),
        (
            "complete",
            (),
            ("plan.picture=a.txt",),
            "plan.picture = a.txt: must end in .png",
        ),
    ],
)
def test_what_says_too_little_is_refused(
    status: str | None,
    overrides: tuple[str, ...],
    planned: tuple[str, ...],
    fault: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    if status is not None:
        made(folder, *overrides, status=status)
    argv = ["dlrm_hybrid", "plan", *HYBRID, f"plan.calibration={folder}", *planned]
    assert run(argv) == 2
    assert fault in capsys.readouterr().err


def test_planning_does_not_import_torch() -> None:
    program = "import sys, dlrm_hybrid.cli.verbs.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_units_of_tests_are_complete() -> None:
    assert UNITS.factor(layout(config(), ROWS), Span.COMPUTE, 0) == 1.0


def planned(tmp_path: Path, *overrides: str) -> dict:
    """What is written of worlds."""
    output = tmp_path / "plan.json"
    assert run(["dlrm_hybrid", "plan", *HYBRID, *overrides, f"plan.output={output}"]) == 0
    return json.loads(output.read_text())


def test_latency_alone_is_of_links_without_a_rate(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    latencies = "plan.latencies=[0ms,20ms]"
    near, far = planned(tmp_path, f"plan.calibration={folder}", latencies)["worlds"]
    # Six ways through three stages and back, and two to the server.
    assert 256 / far["samples_per_second"] - 256 / near["samples_per_second"] > 0.1


def test_runs_say_of_each_other_what_they_do_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = ("embedding=served", "parallel.table_servers=1")
    runs = [made(tmp_path / "dct", "gradient=dct"), made(tmp_path / "served", *served)]
    costs = [Costs.of(read(one)) for one in runs]
    dct, tables = costs
    both = most_like(costs, config(*HYBRID, *served, "gradient=dct"))
    assert both.calibration is dct.calibration
    assert both.units.encode_gradient == dct.units.encode_gradient
    assert both.units.serve == tables.units.serve != dct.units.serve
    assert not both.remarks(config(*HYBRID, *served, "gradient=dct"))
    assert "gradient=topk (it had dct)" in both.remarks(config(*HYBRID, "gradient=topk"))[0]
    given = f"plan.calibration=[{','.join(map(str, runs))}]"
    planned(tmp_path, given, "gradient=dct", *served)
    assert "extrapolated" not in capsys.readouterr().out


def test_a_search_tries_one_stage_whatever_goes_through_cuts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "PLAIN_LINE_SECONDS", 0.0)
    activation = ("activation=dct", "activation.precision=bfloat16")
    folder = made(tmp_path / "run", *activation)
    found = planned(tmp_path, *activation, f"plan.calibration={folder}", "plan.search=4")
    assert {1, 2} <= {one["stages"] for one in found["worlds"]}
    told = capsys.readouterr().out
    assert "possible worlds 100%" in told
    assert "predict 100%" in told


def test_rows_that_are_not_prepared_are_not_made_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    data = ("parallel=hybrid", "data=criteo_kaggle", "data.raw=none.txt")
    argv = ["dlrm_hybrid", "plan", *data, f"plan.calibration={folder}", "plan.output=plan.json"]
    assert run(argv) == 0
    assert "nobody knows how many rows it has" in capsys.readouterr().out
    assert json.loads(Path("plan.json").read_text())["worlds"][0]["seconds"] is None
