"""From the events of a run to `summary.json`: pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dlrm_hybrid.telemetry import compression
from dlrm_hybrid.telemetry.distributions.staleness import from_json, merged, values_of
from dlrm_hybrid.telemetry.events import PHASES, Event, Kind, part_of
from dlrm_hybrid.telemetry.ranks import (
    RankValues,
    all_bytes,
    ratio,
    world_cpu,
    world_ids,
    world_roles,
    world_steps,
)
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.traffic import Phase, Traffic
from dlrm_hybrid.types import ScoredPart

SUMMARY_FILE = "summary.json"  # in the run folder
LOSSES = ("lost_trainers", "left_trainers", "redone_batches")
COMPLETE, UNFINISHED = "complete", "unfinished"  # of all statuses, those that code asks for
TAIL = 10  # train.loss is the mean over the last tenth of the steps
INTERFACES_UNMEASURED: Mapping[str, Any] = {
    "utilization": None,
    "utilization_by_rank": None,
    "utilization_mean_direction": None,
    "rate_bits_per_second": None,
    "interface_bytes": None,
}
NETWORK_UNMEASURED: dict[str, Any] = {
    "bytes_total": None,
    "bytes_per_sample": None,
    "counted_bytes_per_sample": None,
    "dense_equivalent_bytes": None,
    "pull_density": None,
    **INTERFACES_UNMEASURED,
    "by_class": {},
    "by_phase": {phase: {"bytes": None} for phase in PHASES},
}


def summarise(events: Iterable[Event], status: str, cores: int) -> dict[str, Any]:
    """The summary of one run; whatever was not measured is None.

    `seconds`, `samples_per_second`, `cpu` and `network` cover training steps only, without the
    first ones of each attempt; of `network`, `cpu` and `roles` only the attempts that came to their
    end. So does the staleness in `sync`, but with the first steps. `train.loss` and
    `train.accuracy` are means over the last tenth of the steps. `validation` is there only where
    its rows were scored.

    Args:
        events: all, in order.
        status: complete, failed, diverged, preempted or interrupted.
        cores: of the machine, for the utilisation of the whole run.
    """
    record = list(events)
    points = [event for event in record if event.kind is Kind.PROGRESS]
    reported = [event.values for event in record if event.kind is Kind.RANK]
    ranks = reported or _leader(record, points)
    compressed = [event.values["of"] for event in record if event.kind is Kind.COMPRESSION]
    attempts = _attempts(record)
    rows, seconds, _ = _timed(points)
    steps, samples = _reached(record)
    starts = [event for event in record if event.kind is Kind.STARTED]
    saved = [event.step for event in record if event.kind is Kind.SAVED]
    return {
        "status": status,
        "steps": steps,
        "steps_planned": starts[-1].values.get("steps_total") if starts else None,
        "steps_saved": max(saved, default=None),
        "first_step": starts[0].step if starts else None,
        "samples": samples,
        "seconds": seconds or None,
        "samples_per_second": rows / seconds if seconds else None,
        "wall_seconds": sum(part[-1].time_seconds - part[0].time_seconds for part in attempts),
        "train": _train_scores(points),
        **_validation(record),
        "test": _scores(record, ScoredPart.TEST),
        "network": {**world_network(ranks, _counted_rows(attempts)), **world_unknown_peers(ranks)},
        "sync": world_sync(ranks, _batches(record), _losses(record)),
        "step_milliseconds": world_steps(ranks),
        "distinct_ids_per_batch": world_ids(ranks),
        "cpu": world_cpu(ranks, cores),
        "roles": world_roles(ranks),
        "compression": {
            "gradient_density": compression.density(compressed, compression.GRADIENT),
            "activation_density": compression.density(compressed, compression.ACTIVATION),
        },
        "arithmetic_changes": [
            {"step": one.step, "changed": one.values["changed_arithmetic"]}
            for one in starts
            if one.values.get("changed_arithmetic")
        ],
        "restarts": max((one.values["attempt"] for one in starts), default=0),
    }


def _losses(record: Sequence[Event]) -> Mapping[str, int]:
    """Trainers that the last attempt lost and went on without, and batches given out again."""
    finished = [event.values for event in record if event.kind is Kind.FINISHED]
    return {name: value for one in finished[-1:] for name, value in one.items() if name in LOSSES}


def _reached(record: Iterable[Event]) -> tuple[int, int]:
    """Steps and samples at the end of the last attempt, as far as its events know."""
    step = samples = samples_per_step = 0
    for event in record:
        if event.kind is Kind.STARTED:
            step, samples_per_step = event.step, event.values.get("samples_per_step", 0)
            samples = event.values.get("samples", step * samples_per_step)
        elif event.kind is not Kind.RANK and event.step > step:
            samples += (event.step - step) * samples_per_step
            samples, step = event.values.get("samples", samples), event.step
    return step, samples


def _timed(points: Sequence[Event]) -> tuple[int, float, float]:
    """Rows, seconds and CPU seconds of training steps, warm-up left out."""
    return (
        sum(point.values["timed_rows"] for point in points),
        sum(point.values["timed_seconds"] for point in points),
        sum(point.values["timed_cpu_seconds"] for point in points),
    )


def _attempts(record: Sequence[Event]) -> list[list[Event]]:
    """The events of each start of the run."""
    parts: list[list[Event]] = []
    for event in record:
        if event.kind is Kind.STARTED or not parts:
            parts.append([])
        parts[-1].append(event)
    return parts


def _counted_rows(attempts: Iterable[Sequence[Event]]) -> int:
    """Rows trained on while ranks counted traffic: in attempts that finished.

    The leader counts steps of the run. A worker may count batches, more or fewer of them where
    trainers do not wait for each other. Older events do not name the leader; all count alike there.
    """
    rows = 0
    for attempt in attempts:
        steps = {
            (one.values["rank"], one.values["role"]): one.values["timed_steps"]
            for one in attempt
            if one.kind is Kind.RANK
        }
        # What a damaged record begins with may be another event.
        begun: Mapping[str, Any] = attempt[0].values if attempt[0].kind is Kind.STARTED else {}
        leader = begun.get("rank"), begun.get("role")
        counted = steps.get(leader, max(steps.values(), default=0))
        rows += counted * begun.get("samples_per_step", 0)
    return rows


def _batches(record: Iterable[Event]) -> Sequence[int]:
    """What each trainer has learned from, as far as events know; empty of other runs than async."""
    known = [found for event in record if (found := event.values.get("batches"))]
    return known[-1] if known else ()


def _train_scores(points: Sequence[Event]) -> dict[str, float | None]:
    if not points:
        return {"loss": None, "accuracy": None}
    first_step = points[-1].step * (TAIL - 1) / TAIL
    tail = [point for point in points if point.step > first_step]
    rows = sum(point.values["rows"] for point in tail)
    return {
        name: sum(point.values[name] * point.values["rows"] for point in tail) / (rows or 1)
        for name in ("loss", "accuracy")
    }


def _validation(record: Sequence[Event]) -> dict[str, Any]:
    """Scores on the part to validate, where there is one."""
    scores = _scores(record, ScoredPart.VALIDATION)
    return {} if scores["loss"] is None else {"validation": scores}


def _scores(record: Sequence[Event], part: ScoredPart) -> dict[str, Any]:
    """Of the last evaluation of a part; all None without one."""
    names = {
        "loss": "log_loss",
        "accuracy": "accuracy",
        "auc": "auc",
        "normalized_entropy": "normalized_entropy",
        "base_rate": "base_rate",
        "calibration": "calibration",
    }
    evaluated = [event for event in record if event.kind is Kind.EVALUATED]
    scores = [event.values for event in evaluated if part_of(event) is part]
    return {name: scores[-1].get(source) if scores else None for name, source in names.items()}


def _leader(record: Sequence[Event], points: Sequence[Event]) -> list[RankValues]:
    """Where no rank has reported: what the events say of the rank that wrote them."""
    started = [event.values for event in record if event.kind is Kind.STARTED]
    if not started:
        return []
    _, seconds, cpu_seconds = _timed(points)
    evaluating, saving = (
        sum(event.values["seconds"] for event in record if event.kind is kind)
        for kind in (Kind.EVALUATED, Kind.SAVED)
    )
    return [
        {
            "rank": started[-1]["rank"],
            "role": started[-1]["role"],
            "traffic": None,
            "received": None,
            "seconds": {"train": seconds, "evaluate": evaluating, "checkpoint": saving},
            "cpu_seconds": {"train": cpu_seconds},
            "seconds_by_span": {
                span: sum(point.values["seconds_by_span"].get(span, 0.0) for point in points)
                for span in Span
            },
        }
    ]


def world_network(ranks: Sequence[RankValues], rows: int) -> dict[str, Any]:
    """What was sent while training, every message counted once, by its sender.

    None where nothing is sent, or no rank has reported. A class that is not counted is missing;
    sums over all classes are None then.

    Args:
        ranks: their reports.
        rows: trained on in that time.
    """
    ranks = [rank for rank in ranks if rank["traffic"] is not None]
    if not ranks:
        return NETWORK_UNMEASURED
    by_class = {
        traffic.value: {
            name: sum(rank["traffic"][Phase.TRAIN][traffic.value][name] for rank in ranks)
            for name in ("bytes", "dense_equivalent_bytes", "messages")
        }
        for traffic in Traffic
        if all(traffic.value in rank["traffic"][Phase.TRAIN] for rank in ranks)
    }
    pull_density = _pull_density(ranks)
    total = sum(tally["bytes"] for tally in by_class.values())
    per_sample = total / rows if rows else None
    if len(by_class) < len(Traffic):
        return {
            **NETWORK_UNMEASURED,
            "counted_bytes_per_sample": per_sample if by_class else None,
            "by_class": by_class,
            "pull_density": pull_density,
        }
    return {
        **world_interfaces(ranks),
        "bytes_total": total,
        "bytes_per_sample": per_sample,
        "counted_bytes_per_sample": per_sample,
        "dense_equivalent_bytes": sum(
            tally["dense_equivalent_bytes"] for tally in by_class.values()
        ),
        "pull_density": pull_density,
        "by_class": by_class,
        "by_phase": {
            phase: {"bytes": sum(all_bytes(rank["traffic"], phase) or 0 for rank in ranks)}
            for phase in PHASES
        },
    }


def world_sync(
    ranks: Sequence[RankValues], batches: Sequence[int], losses: Mapping[str, int]
) -> dict[str, Any] | None:
    """How stale pushes were, and who learned how much; None where trainers wait for each other.

    Args:
        ranks: their reports.
        batches: that each trainer has learned from.
        losses: of the attempt that came to its end, if one did.
    """
    told = [from_json(counts) for rank in ranks if (counts := rank.get("staleness"))]
    if not told and not batches:
        return None
    staleness = values_of(merged(told))
    return {
        "pushes": staleness.pop("pushes") or None,
        "staleness": staleness,
        "batches_by_trainer": {str(trainer): count for trainer, count in enumerate(batches)},
        **{name: losses.get(name) for name in LOSSES},
    }


def world_unknown_peers(ranks: Sequence[RankValues]) -> dict[str, int | None]:
    """What was rejected from outside the run; None where no rank listens."""
    counts = [reported for rank in ranks if (reported := rank.get("strangers")) is not None]
    return {
        name: sum(reported[name] for reported in counts) if counts else None
        for name in ("foreign_messages", "refused_connections")
    }


def _pull_density(ranks: Sequence[RankValues]) -> float | None:
    """Share of the weights that a pull sends; of all versions, those of warm-up too."""
    versions: list[RankValues] = [rank["versions"] for rank in ranks if rank.get("versions")]
    published, elements = (sum(one[key] for one in versions) for key in ("told", "elements"))
    return ratio(published, elements)


def world_interfaces(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The part of `network` in the summary that is about links; None where nothing was measured.

    The use of a link is the mean, over windows of 100 ms, of its busier direction's share of the
    rate. `utilization` is that of the busiest link, `utilization_mean_direction` the same link's
    with both directions averaged. `interface_bytes` is what left all interfaces: with headers,
    acknowledgements, and what was sent twice.

    Args:
        ranks: their reports, of all attempts.
    """
    reported = [(rank["rank"], one) for rank in ranks if (one := rank.get("interface")) is not None]
    if not reported:
        return dict(INTERFACES_UNMEASURED)
    owners: dict[str, int] = {}  # of several ranks with one interface the first speaks for it
    for rank, one in reported:
        owners[one["address"]] = min(rank, owners.get(one["address"], rank))
    by_rank: dict[int, list[RankValues]] = {}
    for rank, one in sorted(reported, key=lambda pair: pair[0]):
        by_rank.setdefault(rank, []).append(one)
    rates = [one["rate_bits_per_second"] for _, one in reported]
    shares = {
        rank: share
        for rank, several in by_rank.items()
        if all(rates)
        and (share := _line_share(several, lambda one: one["busier_bytes"])) is not None
    }
    busiest = max(shares, key=lambda rank: shares[rank], default=None)
    return {
        "utilization": None if busiest is None else shares[busiest],
        "utilization_by_rank": {str(rank): share for rank, share in shares.items()} or None,
        "utilization_mean_direction": None
        if busiest is None
        else _line_share(
            by_rank[busiest], lambda one: (one["received_bytes"] + one["sent_bytes"]) / 2
        ),
        "rate_bits_per_second": rates[-1],
        "interface_bytes": sum(
            one["sent_bytes"] for rank, one in reported if owners[one["address"]] == rank
        ),
    }


def _line_share(
    several: Sequence[RankValues], num_bytes: Callable[[RankValues], float]
) -> float | None:
    """The time that bytes of one rank's attempts take on its link, as a share of training."""
    line_seconds = sum(8 * num_bytes(one) / one["rate_bits_per_second"] for one in several)
    return ratio(line_seconds, sum(one["seconds"] for one in several))
