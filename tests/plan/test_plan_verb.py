"""`plan` from a run's costs to a table and a file, and what it refuses."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from made_runs import BEGIN, make_run
from planned import config, dense

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.plan.calibration import read
from dlrm_hybrid.plan.costs import compute_seconds
from dlrm_hybrid.plan.fit import fitted
from dlrm_hybrid.plan.machines import command, ddp_seconds, kinds, worlds_on
from dlrm_hybrid.plan.prediction import Costs, most_like, predict, remarks
from dlrm_hybrid.plan.worlds import Planned, as_configured, compared
from dlrm_hybrid.run.assembly.build import topology
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.traffic import Phase, Traffic

STEPS, SPEED = 100, 3_000.0
SPANS = {
    "worker": {Span.COMPUTE: 3e-3, Span.ENCODE: 5e-4, Span.DECODE: 4e-4, Span.APPLY: 2e-4},
    "tables": {Span.EMBEDDING: 5e-4, Span.APPLY: 1.5e-3},
    "server": {Span.DECODE: 8e-4, Span.APPLY: 2e-3, Span.ENCODE: 6e-4},
}
BESIDE = {Span.SEND: 4e-4, Span.REST: 3e-4, Span.READ: 1e-4}
FEW_TENSORS = ("+experiment=dp_levels", "model.bottom=[13,16]", "model.top=[8,1]")
NEEDS_SERVERS = (*FEW_TENSORS, "pull.precision=float16")
SERVED = ("embedding=served", "parallel.table_servers=1")

Plan = Callable[..., dict]


def made(folder: Path, *overrides: str, status: str = "complete") -> Path:
    """A run of these costs for a step."""
    topology = dense(*overrides).topology
    seconds = STEPS * 128 * topology.trainers / SPEED
    started = {"attempt": 0, "rank": 1, "role": "worker-0.1", "pid": 1, "steps_total": STEPS}
    progress = {
        **dict.fromkeys(("samples", "rows", "timed_rows"), STEPS * 256),
        **dict.fromkeys(("loss", "accuracy", "lr"), 0.5),
        **dict.fromkeys(("sent_bytes", "dense_equivalent_bytes", "sent_rows")),
        "samples_per_step": 256,
        "timed_seconds": seconds,
        "timed_cpu_seconds": seconds / 2,
        "seconds_by_span": dict.fromkeys(Span, 0.0),
    }
    events = [
        Event(Kind.STARTED, 0, BEGIN, {**started, "samples_per_step": 256, "train_rows": 6_000}),
        Event(Kind.PROGRESS, STEPS, BEGIN + 1, progress),
    ]
    for rank in range(topology.size):
        role = topology.name(rank)
        spans = dict.fromkeys(Span, 0.0) | BESIDE | SPANS[role.partition("-")[0]]
        if rank in topology.interaction_group:
            spans[Span.EMBEDDING] = 2e-3
        main = sum(spans.values())
        tally = {"messages": 4 * STEPS, "bytes": STEPS * 100_000, "dense_equivalent_bytes": 0}
        by_phase = {phase: {} for phase in Phase} | {Phase.TRAIN: dict.fromkeys(Traffic, tally)}
        said = {
            "rank": rank,
            "role": role,
            "timed_steps": STEPS,
            "cpu_series": [],
            "seconds": dict.fromkeys(Phase, 0.0) | {Phase.TRAIN: seconds},
            "cpu_seconds": dict.fromkeys(Phase, 0.0) | {Phase.TRAIN: STEPS * (main + 3e-3)},
            "thread_cpu_seconds": dict.fromkeys(Phase, 0.0) | {Phase.TRAIN: STEPS * main},
            "peak_rss_bytes": 400_000_000,
            "seconds_by_span": {one: STEPS * value for one, value in spans.items()},
            "versions": {"elements": 100, "told": 100} if rank == topology.size - 1 else None,
            **dict.fromkeys(("staleness", "interface")),
            **dict.fromkeys(("traffic", "received"), by_phase),
        }
        events.append(Event(Kind.RANK, STEPS, BEGIN + 2, said))
    make_run(folder, ["parallel=hybrid", *overrides], events, status)
    return folder


@pytest.fixture
def plan(small_rows: list[str], tmp_path: Path) -> Plan:
    """What is written of worlds."""

    def planned(*overrides: str) -> dict:
        output = tmp_path / "plan.json"
        words = ("parallel=hybrid", *small_rows, "train.batch_size=128", "plan.count_steps=10")
        assert run(["dlrm_hybrid", "plan", *words, *overrides, f"plan.output={output}"]) == 0
        return json.loads(output.read_text())

    return planned


SMALL = ("model=dlrm_small",)


def test_computing_costs_what_all_runs_with_the_same_batches_say(tmp_path: Path) -> None:
    own = Costs.of(read(made(tmp_path / "run")), dense())
    config = own.calibration.config
    slower = replace(own, units=replace(own.units, multiply=3 * own.units.multiply, send=1.0))
    found = most_like([own, slower], config).units
    assert found == replace(own.units, multiply=pytest.approx(2 * own.units.multiply))
    of_others = replace(config, train=replace(config.train, batch_size=512))
    other = replace(slower, calibration=replace(own.calibration, config=of_others))
    assert most_like([own, other], config).units == own.units


def test_the_run_that_costs_were_taken_from_is_met(tmp_path: Path) -> None:
    calibration, world = read(made(tmp_path / "run")), dense()
    costs = Costs.of(calibration, world)
    found = predict(as_configured(calibration.config), world, costs, 6_000)
    assert found.samples_per_second == pytest.approx(SPEED, rel=0.02)
    computing = sum(compute_seconds(costs.units, world, stage) for stage in range(3))
    assert 0.2 * 9e-3 < computing < 9e-3  # the rest is that of cold caches
    assert costs.units.wake > 0
    assert costs.units.carry > 30e-6


def test_coefficients_are_found_again_and_never_negative() -> None:
    rows = [(1.0, 5.0), (2.0, 1.0), (7.0, 2.0)]
    measured = [3 * a + 0.5 * b for a, b in rows]
    assert fitted(rows, measured) == pytest.approx((3.0, 0.5))
    assert fitted([(1.0, 1.0), (2.0, 3.0)], [1.0, 1.5]) == pytest.approx((0.75, 0.0), rel=0.2)
    assert fitted([(0.0, 0.0)], [1.0]) == [0.0, 0.0]


def test_worlds_are_printed_written_and_drawn(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, picture = made(tmp_path / "run", *SMALL), tmp_path / "plan.svg"
    lists = ("plan.trainers=[1,2,64]", "plan.rates=[10mbit,1gbit]", f"plan.picture={picture}")
    written = plan(f"plan.calibration={folder}", *lists)
    shown = capsys.readouterr().out
    assert "one process on one machine: " in shown
    assert "fastest on 10mbit: " in shown
    assert picture.stat().st_size > 0
    names = ["1 × 3 + 1", "2 × 3 + 1", "64 × 3 + 1"]
    assert [one["name"] for one in written["worlds"]] == names * 2
    slow, fast = written["worlds"][1], written["worlds"][4]
    assert slow["samples_per_second"] < fast["samples_per_second"]
    assert slow["bottleneck"]["name"].startswith("link of ")
    assert slow["what_if"]["rate × 2"] > 1.2
    by_class = slow["network"]["by_class"]
    assert slow["network"]["bytes_per_sample"] == pytest.approx(sum(by_class.values()))
    assert set(slow["memory_bytes"]) == set(slow["thread_use"])
    assert written["one_process_samples_per_second"] > 0


@pytest.mark.parametrize(
    ("status", "overrides", "planned", "fault"),
    [
        (None, (), (), "is no run folder"),
        ("failed", (), (), "only a complete run says its costs"),
        ("complete", (), ("model=dlrm_small",), "model.bottom"),
        ("complete", ("precision=bfloat16",), (), "precision"),
        ("complete", (), ("plan.rates=[fast]",), "plan.rates[0] = 'fast': must be a rate"),
        ("complete", (), ("plan.machines=2",), "plan.machines = 2: how fast are the links?"),
        ("complete", (), ("plan.machines=1",), "plan.machines = 1: must be "),
        ("complete", (), ("plan.machines=[2,9]",), "plan.machines[1] = 9: must be "),
        ("complete", (), ("parallel.machines=2",), "parallel.machines = 2: how fast are the li"),
        ("complete", (), ("plan.trainers=[2,0]",), "plan.trainers[1] = 0"),
        ("complete", (), ("plan.picture=a.txt",), "plan.picture = a.txt: must end in .png"),
        (
            *("complete", (), ("plan.machines=2", "plan.servers=[2]", "plan.rates=[1gbit]")),
            "plan.machines = 2: decides numbers of trainers and servers",
        ),
        (
            *("complete", (), ("plan.machines=7", "plan.rates=[1gbit]", *NEEDS_SERVERS)),
            "plan.machines = 7: parallel.machines = 7: each gets a server, parallel.servers = 7:",
        ),
        (
            *("complete", (), ("plan.machines=2", "parallel.trainers=6", "plan.rates=[1gbit]")),
            "parallel.trainers=6: plan.machines decides numbers of trainers and servers",
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
    argv = ["dlrm_hybrid", "plan", "parallel=hybrid", f"plan.calibration={folder}", *planned]
    assert run(argv) == 2
    assert fault in capsys.readouterr().err


def test_worlds_without_servers_are_compared_with_others_whatever_these_pull() -> None:
    values = values_of(["+experiment=dp_levels", "plan.servers=[0,1]"])
    worlds = [planned.config for planned in compared(validate(values), values)]
    pulls = [(world.parallel.servers, world.pull.precision) for world in worlds]
    assert pulls == [(0, "float32"), (1, "levels")]


def test_latency_alone_is_of_links_without_a_rate(plan: Plan, tmp_path: Path) -> None:
    folder = made(tmp_path / "run", *SMALL)
    near, far = plan(f"plan.calibration={folder}", "plan.latencies=[0ms,20ms]")["worlds"]
    # Six ways through three stages and back, and two to the server.
    assert 256 / far["samples_per_second"] - 256 / near["samples_per_second"] > 0.1


def test_runs_say_of_each_other_what_they_do_not_know(tmp_path: Path) -> None:
    folders = [made(tmp_path / "dct", "gradient=dct"), made(tmp_path / "served", *SERVED)]
    dct, tables = costs = [
        Costs.of(read(one), dense(*words))
        for one, words in zip(folders, [("gradient=dct",), SERVED], strict=True)
    ]
    wanted = config(*SERVED, "gradient=dct")
    both = most_like(costs, wanted)
    assert both.calibration is dct.calibration
    assert both.units.encode_gradient == dct.units.encode_gradient
    assert both.units.serve == tables.units.serve != dct.units.serve
    assert not remarks(costs, wanted)
    assert "gradient=topk (it had dct)" in remarks(costs, config("gradient=topk"))[0]


@pytest.mark.parametrize("machines", [(2,), pytest.param((2, 4), marks=pytest.mark.slow)], ids=str)
def test_the_best_world_on_some_machines_is_named_with_the_command_that_starts_it(
    machines: tuple[int, ...], plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = f"plan.calibration={made(tmp_path / 'run', *SMALL, 'gradient=dct')}"
    written = plan(given, f"plan.machines={[*machines]}", "plan.rates=[1mbit,10gbit]")
    shown = capsys.readouterr().out
    choices = written["machines"]
    assert [(one["machines"], one["rate"]) for one in choices] == list(
        product(machines, ("1mbit", "10gbit"))
    )
    best = {one["name"] for one in choices[::2]}
    assert all(name.startswith("dp_levels: ") for name in best), "fewest bytes on slow links"
    for one in choices:
        number = one["machines"]
        rivals = [
            world["samples_per_second"]
            for world in written["worlds"]
            if (world["rate"], world["machines"]) == (one["rate"], number)
        ]
        assert len(rivals) == 3 * 2 * 2, "experiments, trainers on a machine, servers or none"
        assert one["samples_per_second"] == max(rivals)
        assert rivals == sorted(rivals, reverse=True)
        assert f"torchrun --nnodes={number} " in one["command"]
        assert f"parallel.machines={number}" in one["command"] and "plan." not in one["command"]
        assert f"{number} machines on {one['rate']}: {one['name']}, " in shown
    slow, fast = choices[:2]
    assert slow["samples_per_second"] > 2 * slow["ddp_samples_per_second"]
    assert fast["ddp_samples_per_second"] > 50 * slow["ddp_samples_per_second"]


def test_an_experiment_of_the_command_line_is_the_only_one(plan: Plan, tmp_path: Path) -> None:
    given = f"plan.calibration={made(tmp_path / 'run', *SMALL)}"
    written = plan("+experiment=data_parallel", given, "plan.machines=2", "plan.rates=[1gbit]")
    assert {one["name"].partition(":")[0] for one in written["worlds"]} == {"data_parallel"}
    (choice,) = written["machines"]
    assert "+experiment=data_parallel " in choice["command"]


def test_one_process_is_as_fast_as_measured_with_batches_of_the_same_size(
    plan: Plan, tmp_path: Path
) -> None:
    folders = made(tmp_path / "run", *SMALL), made(tmp_path / "alone", "parallel=single", *SMALL)
    given = f"plan.calibration=[{folders[0]},{folders[1]}]"
    same, larger = (plan(given, f"train.batch_size={rows}") for rows in (128, 1024))
    measured = read(folders[1]).samples_per_second
    assert same["one_process_samples_per_second"] == measured
    assert larger["one_process_samples_per_second"] > 2 * measured, "its parts, of larger products"


def commands(*overrides: str) -> list[str]:
    """The commands for all worlds on two machines."""
    values = values_of(overrides)
    request = Request(validate(values), values, Path(), overrides)
    return [command(world) for world in worlds_on(kinds(request), 2)]


def test_a_command_that_emulates_machines_has_the_links_of_its_world() -> None:
    words = (
        "parallel=hybrid",
        "+experiment=dp_levels",
        "network=emulated",
        "parallel.cuts=[top.2]",
    )
    links = ("network.rate=1gbit", "plan.rates=[10mbit]", "plan.latencies=[20ms]")
    for line in commands("plan.machines=2", *words, *links):
        typed = shlex.split(line)
        assert typed[-2:] == ["network.rate=10mbit", "network.latency=20ms"]
        assert line.count("network.rate=") == 1 and "'parallel.cuts=[top.2]'" in line


@pytest.mark.parametrize("experiment", ["mine", "dp_levels", "dp_bfloat16"])
def test_a_command_starts_its_world_whatever_an_experiment_says_of_its_size(
    experiment: str, tmp_path: Path
) -> None:
    """Experiments of a user's own may set numbers of trainers and servers."""
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /parallel: hybrid\n"
    text += "parallel: {trainers: 6, servers: 1}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    lines = commands(
        f"conf={tmp_path}", f"+experiment={experiment}", "plan.machines=2", "plan.rates=[1gbit]"
    )
    for (servers, each), line in zip(product((2, 0), (1, 2)), lines, strict=True):
        words = shlex.split(line)
        typed = [one for one in words[words.index("train") + 1 :] if not one.startswith("hydra.")]
        world = topology(validate(values_of(typed)))
        assert f"--nproc-per-node={world.size // 2}" in words
        assert (world.trainers, world.servers) == (2 * each, servers)


def test_worlds_without_servers_are_tried_where_trainers_need_none() -> None:
    words = ("+experiment=dp_levels", "plan.machines=2", "plan.rates=[1gbit]")
    for more in ("gradient.aggregation=union", "pull.precision=float16"):
        assert not any("parallel.servers=0" in line for line in commands(*words, more))


@pytest.mark.parametrize(
    ("rows", "alone", "rate", "measured"),
    [
        (128, 15_600, "10mbit", 228),
        (128, 15_600, "100mbit", 2_134),
        (128, 15_600, "1gbit", 8_315),
        (2048, 26_600, "10mbit", 1_126),
        (2048, 26_600, "100mbit", 8_954),
        (2048, 26_600, "1gbit", 27_860),
    ],
)
def test_plain_data_parallelism_is_as_fast_as_it_was_measured(
    rows: int, alone: float, rate: str, measured: float
) -> None:
    """`scripts/benchmarks/practitioner.py speed` on a Xeon, two trainers, all in bfloat16."""
    words = ("+experiment=dp_levels", "network=emulated", "parallel.machines=2")
    world = dense(*words, f"train.batch_size={rows}")
    hosts = Planned(world.config, rate).hosts(2)
    seconds = ddp_seconds(world, hosts, rows / alone)
    assert 2 * rows / seconds == pytest.approx(measured, rel=0.1)


def test_rows_that_are_not_there_are_not_made_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    data = ("parallel=hybrid", "data=criteo_kaggle", "data.raw=none.txt")
    assert run(["dlrm_hybrid", "plan", *data, f"plan.calibration={folder}"]) != 0
    assert "none.txt" in capsys.readouterr().err
