"""The summary of every kind of run has every key of the design, and its figures agree."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from world_runs import Trained, summary

from dlrm_hybrid.data.profile import NUM_CATEGORICAL
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.traffic import Phase, Traffic

STEPS, BATCH = 12, 64
SHORT = (f"train.steps={STEPS}", "telemetry.every=4", "checkpoint.every=7")
IN_PROCESS = ("parallel=hybrid", "parallel.world=in_process")
PROCESSES = ("parallel=hybrid", "parallel.cuts=[bottom.2]", "gradient=dct")
TRAINERS = 2

STEP_FIGURES = ("mean", "p50", "p95", "p99", "max")
KEYS = {
    *("status", "steps", "samples", "seconds", "samples_per_second", "wall_seconds", "restarts"),
    *("steps_planned", "steps_saved", "first_step", "arithmetic_changes"),
    *("train.loss", "train.accuracy", "test.loss", "test.accuracy", "test.auc"),
    *("test.normalized_entropy", "test.base_rate", "test.calibration"),
    *("network.bytes_total", "network.bytes_per_sample", "network.dense_equivalent_bytes"),
    "network.counted_bytes_per_sample",
    *("network.utilization", "network.utilization_by_rank", "network.utilization_mean_direction"),
    *("network.pull_density", "network.rate_bits_per_second", "network.interface_bytes"),
    *("network.foreign_messages", "network.refused_connections", "network.latency"),
    *(f"network.by_phase.{phase}.bytes" for phase in ("train", "evaluate", "checkpoint")),
    *(f"step_milliseconds.{name}" for name in ("steps", *STEP_FIGURES)),
    "distinct_ids_per_batch.mean",
    *("cpu.utilization", "cpu.seconds", "sync", "best", "growth", "descends_from"),
    *("compression.gradient_density", "compression.activation_density"),
}
TRAINER_KEYS = {
    f"step_milliseconds.by_trainer.{trainer}.{name}"
    for trainer in range(TRAINERS)
    for name in ("steps", *STEP_FIGURES)
} | {f"distinct_ids_per_batch.by_trainer.{trainer}" for trainer in range(TRAINERS)}
NO_TRAINERS = {"step_milliseconds.by_trainer", "distinct_ids_per_batch.by_trainer"}
CLASS_KEYS = {
    f"network.by_class.{traffic}.{name}"
    for traffic in Traffic
    for name in ("bytes", "dense_equivalent_bytes", "messages")
}
# By what is waited for; only what took time has a key.
WAITS = "seconds_by_wait"
ROLE_KEYS = {
    *("role", "cpu_utilization", "cpu_seconds", "thread_cpu_seconds", "threads"),
    *("peak_rss_bytes", "bytes_sent", "bytes_received"),
    *("interface_bytes_sent", "interface_bytes_received"),
    *(f"seconds_by_span.{span}" for span in Span),
    *(f"seconds_by_phase.{phase}" for phase in Phase),
}
# Of synthetic rows only.
BEST = {"test.best_reachable.loss", "test.best_reachable.auc"}


def keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def roles_keys(size: int) -> set[str]:
    return {f"roles.{rank}.{key}" for rank in range(size) for key in ROLE_KEYS}


def assert_waits_are(told: Mapping[str, Any], reasons: Mapping[str, set[str]]) -> None:
    """Of each rank these take time, and together all its waiting."""
    for rank, role in told["roles"].items():
        waits = role.pop(WAITS)
        assert sum(waits.values()) == pytest.approx(role["seconds_by_span"]["wait"])
        assert reasons[rank] <= {name for name, seconds in waits.items() if seconds > 0}, waits


def assert_spans_add_up(told: Mapping[str, Any], leader: str) -> None:
    for role in told["roles"].values():
        trained = role["seconds_by_phase"]["train"]
        assert sum(role["seconds_by_span"].values()) == pytest.approx(trained, rel=0.01)
    phases = told["roles"][leader]["seconds_by_phase"]
    # Looking whether a checkpoint has been written goes on between steps.
    assert told["seconds"] * 0.99 <= phases["train"] + phases["checkpoint"]
    assert phases["train"] <= told["wall_seconds"]  # its last words included


def assert_the_main_thread_has_its_share(told: Mapping[str, Any]) -> None:
    """Of the CPU time of each rank; and it has torch in memory, but no more than a test may."""
    for role in told["roles"].values():
        assert 0 < role["thread_cpu_seconds"] <= role["cpu_seconds"] + 0.01
        assert role["threads"] == 1
        assert 10**8 < role["peak_rss_bytes"] < 2 * 10**9
    total = sum(role["cpu_seconds"] for role in told["roles"].values())
    assert total == pytest.approx(told["cpu"]["seconds"])


def assert_steps_add_up(told: Mapping[str, Any], clocks: int) -> None:
    """Those after the warm-up, to the time that was trained, by so many clocks."""
    steps = told["step_milliseconds"]
    assert steps["steps"] == clocks * (STEPS - WARMUP_STEPS)
    assert 0 < steps["p50"] <= steps["p95"] <= steps["p99"] <= steps["max"]
    assert NUM_CATEGORICAL < told["distinct_ids_per_batch"]["mean"] < NUM_CATEGORICAL * BATCH
    trained = 1e-3 * steps["mean"] * (STEPS - WARMUP_STEPS)
    assert trained <= told["wall_seconds"]
    assert trained >= 0.5 * told["seconds"]


@pytest.mark.parametrize("world", [(), IN_PROCESS])
def test_one_process_measures_all_but_a_network(world: tuple[str, ...], trained: Trained) -> None:
    folder = trained("run", *world, *SHORT)
    told = summary(folder)
    # Servers in one process never wait, but take what comes.
    assert_waits_are(told, {"0": {"push", "parameters"} if world else set()})
    # A world of one process sees its frames, but not what trainers exchange for the tables.
    seen = {key for key in CLASS_KEYS if ".embedding." not in key} if world else set[str]()
    assert set(keys(told)) == KEYS | BEST | roles_keys(1) | NO_TRAINERS | (
        seen or {"network.by_class"}
    )
    assert_steps_add_up(told, 1)
    assert_spans_add_up(told, "0")
    assert_the_main_thread_has_its_share(told)
    spans = told["roles"]["0"]["seconds_by_span"]
    assert min(spans[name] for name in ("compute", "embedding", "apply", "read", "rest")) > 0
    assert (spans["encode"] > 0) == bool(world)
    assert told["network"]["bytes_total"] is told["roles"]["0"]["bytes_sent"] is None


def test_processes_measure_everything_and_each_byte_twice(trained: Trained) -> None:
    folder = trained("run", *PROCESSES, *SHORT)
    told = summary(folder)
    roles, network = told["roles"], told["network"]
    first = {"parameters", "activation_gradient", "decision"}
    last = {"parameters", "activation", "collective", "decision"}
    assert_waits_are(
        told, {"0": first, "1": last - {"decision"}, "2": first, "3": last, "4": {"push"}}
    )
    assert set(keys(told)) == KEYS | BEST | CLASS_KEYS | TRAINER_KEYS | roles_keys(len(roles))
    assert_steps_add_up(told, TRAINERS)
    assert list(roles) == [str(rank) for rank in range(2 * TRAINERS + 1)]
    assert_spans_add_up(told, "1")
    assert_the_main_thread_has_its_share(told)
    does = {"0": "encode", "1": "embedding", "4": "apply"}
    for rank, span in does.items():
        assert roles[rank]["seconds_by_span"][span] > 0
    assert roles["4"]["seconds_by_span"]["compute"] == 0
    assert network["bytes_total"] == sum(one["bytes"] for one in network["by_class"].values())
    assert network["bytes_total"] == sum(role["bytes_sent"] for role in roles.values())
    samples = (STEPS - WARMUP_STEPS) * TRAINERS * BATCH
    assert network["bytes_per_sample"] == network["bytes_total"] / samples
    assert min(one["bytes"] for one in network["by_phase"].values()) > 0
    pushes = network["by_class"]["gradient_push"]["messages"]
    assert pushes == 2 * TRAINERS * (STEPS - WARMUP_STEPS)  # of each worker in each counted step
    for name in ("activation", "activation_gradient"):
        tally = network["by_class"][name]
        heads = tally["bytes"] - tally["dense_equivalent_bytes"]
        assert 0 < heads <= 300 * tally["messages"], name
    assert_sent_is_received(folder)


def test_orders_are_for_many_steps(trained: Trained) -> None:
    every = ("train.steps=45", "checkpoint.every=20", "train.evaluate_every=20")
    world = ("parallel=hybrid", "parallel.cuts=[bottom.2]", "train.batch_size=16")
    told = summary(trained("run", *world, *every))
    # Of the 40 steps that are counted: each of three workers gets orders to train at steps 10, 20,
    # 30 and 40, and one to end, and reports at 10, 20, 30, 40 and 45; four say goodbye.
    assert told["network"]["by_class"]["control"]["messages"] == 3 * (5 + 5) + 4


def assert_sent_is_received(folder: Path) -> None:
    """Of each class, over all ranks and phases; progress adds up to what training sent."""
    record = list(events.read(folder / "events.jsonl"))
    ranks = [event.values for event in record if event.kind is Kind.RANK]

    def total(way: str, traffic: Traffic, name: str, phases: tuple[Phase, ...]) -> int:
        return sum(rank[way][phase][traffic][name] for rank in ranks for phase in phases)

    for traffic in Traffic:
        for name in ("bytes", "messages"):
            sent = total("traffic", traffic, name, tuple(Phase))
            assert sent == total("received", traffic, name, tuple(Phase)) > 0, traffic
    learned = tuple(one for one in Phase if one in (Phase.WARMUP, Phase.TRAIN))
    for name, key in (("bytes", "sent_bytes"), ("dense_equivalent_bytes",) * 2):
        progress = sum(event.values[key] for event in record if event.kind is Kind.PROGRESS)
        sent = sum(total("traffic", traffic, name, learned) for traffic in Traffic)
        # The versions of the last step are answered after the last point.
        assert sent * (1 - 2 / STEPS) < progress <= sent, name
