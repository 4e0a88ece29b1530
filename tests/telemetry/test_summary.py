from dataclasses import asdict, replace

import made_runs
import pytest
from made_runs import counted, progress

from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.summary import summarise
from dlrm_hybrid.telemetry.traffic import Phase, Versions


def started(step: int, time_seconds: float, attempt: int = 0, role: str = "worker-0.0") -> Event:
    values = {"attempt": attempt, "rank": 0, "role": role, "samples_per_step": 10}
    values["steps_total"] = 30
    return Event(Kind.STARTED, step, time_seconds, values)


def point(step: int, time_seconds: float, loss: float, rows: int = 100) -> Event:
    timed = {"timed_rows": rows - 20, "timed_seconds": 2.0, "timed_cpu_seconds": 1.5}
    values = {**timed, "seconds_by_span": dict.fromkeys(Span, 0.25), "accuracy": 1 - loss}
    return progress(step, loss, time_seconds, samples=step * 10, rows=rows, **values)


def told(rank: int, role: str, pushed_bytes: int) -> Event:
    """What a rank of a world says at its end, after a CPU second of training for each number."""
    event = made_runs.told(rank, role, pushed_bytes)
    event.values["timed_steps"], event.values["seconds"][Phase.TRAIN] = 8, 2.0
    return replace(event, time_seconds=212.0)


SCORES = {
    "log_loss": 0.5,
    "accuracy": 0.75,
    "auc": None,
    "normalized_entropy": 0.9,
    "base_rate": 0.25,
    "calibration": 1.0,
    "seconds": 4.0,
}


def test_a_run_of_two_attempts() -> None:
    record = [
        started(0, 100.0),
        point(10, 110.0, 0.9),
        started(10, 200.0, attempt=1),
        point(20, 210.0, 0.6),
        point(22, 212.0, 0.2, rows=20),
        Event(Kind.EVALUATED, 22, 216.0, SCORES),
        Event(Kind.SAVED, 22, 217.0, {"seconds": 0.5}),
        Event(Kind.FINISHED, 22, 217.5, {}),
    ]
    summary = summarise(record, "complete", cores=2)
    assert (summary["status"], summary["steps"], summary["samples"]) == ("complete", 22, 220)
    assert summary["restarts"] == 1
    assert summary["seconds"] == 6.0
    assert summary["samples_per_second"] == pytest.approx(160 / 6)
    assert summary["wall_seconds"] == 10.0 + 17.5
    # The last tenth of 22 steps begins after step 19.8.
    assert summary["train"]["loss"] == pytest.approx((100 * 0.6 + 20 * 0.2) / 120)
    assert summary["test"] == {
        "loss": 0.5,
        "accuracy": 0.75,
        "auc": None,
        "normalized_entropy": 0.9,
        "base_rate": 0.25,
        "calibration": 1.0,
    }
    assert summary["cpu"] == {"utilization": 0.75, "seconds": 4.5}
    assert summary["roles"]["0"]["seconds_by_span"] == dict.fromkeys(Span, 0.75)
    assert summary["roles"]["0"]["seconds_by_phase"] == {
        "train": 6.0,
        "evaluate": 4.0,
        "checkpoint": 0.5,
    }


def test_bytes_and_processor_time_are_held_against_the_attempt_that_tells_them() -> None:
    ranks = [told(0, "worker-0.0", 800), told(1, "server-0", 800)]
    killed, whole = [started(0, 100.0), point(10, 110.0, 0.9)], [started(10, 200.0, attempt=1)]
    summary = summarise([*killed, *whole, point(20, 210.0, 0.6), *ranks], "complete", cores=8)
    assert summary["network"]["bytes_per_sample"] == 1600 / 80  # of 10 steps 2 are not timed
    assert summary["cpu"]["utilization"] == (1.0 + 2.0) / (2.0 * 2)
    assert summary["samples_per_second"] == 160 / 4


def test_versions_of_all_servers_make_one_density() -> None:
    ranks = [told(rank, f"server-{rank}", 8) for rank in (0, 1, 2)]
    ranks[1].values["versions"] = asdict(Versions(300, 100))
    ranks[2].values["versions"] = asdict(Versions(100, 100))
    summary = summarise([started(0, 1.0), point(10, 2.0, 0.5), *ranks], "complete", cores=2)
    assert summary["network"]["pull_density"] == 0.5
    summary = summarise([started(0, 1.0), point(10, 2.0, 0.5), ranks[0]], "complete", cores=2)
    assert summary["network"]["pull_density"] is None


def test_the_leader_says_how_many_rows_bytes_were_sent_for() -> None:
    """A worker that waits for no other counts its own batches."""
    ranks = [told(0, "worker-0.0", 800), told(1, "worker-1.0", 800), told(2, "server-0", 800)]
    for rank, steps in enumerate((13, 3, 8)):
        ranks[rank].values["timed_steps"] = steps
    begun = started(0, 1.0)
    begun.values.update(rank=2, role="server-0")
    summary = summarise([begun, point(10, 2.0, 0.5), *ranks], "complete", cores=2)
    assert summary["network"]["bytes_per_sample"] == 2400 / 80
    summary = summarise([begun, point(10, 2.0, 0.5)], "failed", cores=2)
    assert summary["roles"]["2"]["role"] == "server-0"


def test_staleness_is_of_all_servers_in_all_attempts() -> None:
    ranks = [told(rank, f"server-{rank}", 8) for rank in (0, 1, 2)]
    ranks[1].values["staleness"] = {"0": counted(1).to_json(), "1": counted(3).to_json()}
    ranks[2].values["staleness"] = {"0": counted(2, 6).to_json()}
    first, second = point(10, 2.0, 0.5), point(10, 4.0, 0.4)
    first.values["batches"], second.values["batches"] = [9, 11], [12, 8]
    again = started(0, 3.0, attempt=1)
    again.values["batches"] = []
    end = Event(
        Kind.FINISHED, 10, 5.0, {"lost_trainers": 1, "left_trainers": 2, "redone_batches": 7}
    )
    record = [started(0, 1.0), first, ranks[1], again, second, end, ranks[0], ranks[2]]
    assert summarise(record, "complete", cores=2)["sync"] == {
        "pushes": 4,
        "staleness": {
            **{"mean": 3.0, "p50": 2, "p95": 6, "max": 6},
            "by_trainer": {
                "0": {"pushes": 3, "mean": 3.0, "p50": 2, "p95": 6, "max": 6},
                "1": {"pushes": 1, "mean": 3.0, "p50": 3, "p95": 3, "max": 3},
            },
        },
        "batches_by_trainer": {"0": 12, "1": 8},
        "lost_trainers": 1,
        "left_trainers": 2,
        "redone_batches": 7,
    }
    sync = summarise(record[:2], "failed", cores=2)["sync"]
    assert sync is not None and sync["batches_by_trainer"] == {"0": 9, "1": 11}
    assert sync["pushes"] is sync["staleness"]["mean"] is sync["lost_trainers"] is None
    lockstep = [started(0, 1.0), point(10, 2.0, 0.5), ranks[0]]
    assert summarise(lockstep, "complete", cores=2)["sync"] is None


def test_steps_are_those_of_the_last_attempt() -> None:
    saved = Event(Kind.SAVED, 12, 215.0, {"seconds": 0.5})
    stopped = Event(Kind.STOPPED, 13, 216.0, {"samples": 130})
    names = ("first_step", "steps", "samples", "steps_saved")
    record = [started(0, 1.0), point(10, 2.0, 0.5)]
    for more, expected in (
        ([], (0, 10, 100, None)),
        ([saved], (0, 12, 120, 12)),
        ([saved, stopped], (0, 13, 130, 12)),
        ([saved, started(8, 3.0, attempt=1)], (0, 8, 80, 12)),
    ):
        summary = summarise([*record, *more], "failed", cores=2)
        assert tuple(summary[name] for name in names) == expected
        assert summary["steps_planned"] == 30


def test_a_run_that_did_nothing_claims_nothing() -> None:
    summary = summarise([], "failed", cores=2)
    assert (summary["status"], summary["steps"], summary["samples"]) == ("failed", 0, 0)
    for key in ("seconds", "samples_per_second"):
        assert summary[key] is None
    assert summary["train"] == {"loss": None, "accuracy": None}
    assert set(summary["test"].values()) == {None}


def test_steps_are_timed_by_the_last_stage_of_each_trainer() -> None:
    """Of all attempts and incarnations that came to their end."""
    ranks: list[Event] = []
    for role, seconds in {
        "worker-0.0": [9.0],
        "worker-0.1": [1.0, 1.0, 2.0],
        "worker-10.1": [4.0],
        "worker-2.1": [8.0],
        "server-0": [7.0],
    }.items():
        times = counted(*(round(1e9 * one) for one in seconds)).to_json()
        event = told(len(ranks), role, 0)
        ranks.append(replace(event, values={**event.values, "step_nanoseconds": times}))
    again = ranks[1]
    found = summarise([started(0, 1.0), *ranks, again], "complete", cores=2)["step_milliseconds"]
    assert found.pop("by_trainer").keys() == {"0", "2", "10"}
    assert found["steps"] == 8
    assert found["mean"] == pytest.approx(2_500)
    assert found["max"] == 8_000
    alone = replace(again, values={**again.values, "role": "worker"})
    found = summarise([started(0, 1.0), alone], "complete", cores=2)["step_milliseconds"]
    assert (found["steps"], found["by_trainer"]) == (3, {})
    unfinished = summarise([started(0, 1.0), point(10, 2.0, 0.5)], "failed", cores=2)
    assert unfinished["step_milliseconds"]["p50"] is None
