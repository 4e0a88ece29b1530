"""Computes `summary.json` from the events of a run; pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dlrm_hybrid.telemetry import compression
from dlrm_hybrid.telemetry.compression import ratio
from dlrm_hybrid.telemetry.events import PHASES, Event, Kind, part_of
from dlrm_hybrid.telemetry.histogram import ByTrainer, Histogram, merged_by_trainer
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.traffic import Phase, Traffic
from dlrm_hybrid.types import ScoredPart

SUMMARY_FILE = "summary.json"  # in the run folder
FAILURE_COUNTS = ("lost_trainers", "left_trainers", "redone_batches")
COMPLETE, UNFINISHED = "complete", "unfinished"  # the statuses that code tests for
TAIL = 10  # train.loss is the mean over the last tenth of the steps
NANOSECONDS_PER_MILLISECOND = 1e6
WORKER = re.compile(r"worker(?:-(\d{1,9})\.(\d{1,9}))?")  # groups: trainer and stage
SERVERS, TABLE_SERVERS = "servers", "table servers"
SCORES = {
    "loss": "log_loss",
    **{name: name for name in ("accuracy", "auc", "normalized_entropy", "base_rate")},
    "calibration": "calibration",
}
INTERFACES_UNMEASURED: Mapping[str, Any] = dict.fromkeys(
    (
        *("utilization", "utilization_by_rank", "utilization_mean_direction"),
        *("rate_bits_per_second", "interface_bytes"),
    )
)
NETWORK_UNMEASURED: Mapping[str, Any] = {
    "bytes_total": None,
    "bytes_per_sample": None,
    "counted_bytes_per_sample": None,
    "dense_equivalent_bytes": None,
    "pull_density": None,
    **INTERFACES_UNMEASURED,
    "by_class": {},
    "by_phase": {phase: {"bytes": None} for phase in PHASES},
}

RankValues = Mapping[str, Any]
"""The values of a `rank` event."""


def summarise(events: Iterable[Event], status: str, cores: int) -> dict[str, Any]:
    """Summarise one run; what was not measured is None.

    `seconds`, `samples_per_second`, `cpu` and `network` cover training steps without warm-up;
    `network` and `cpu` only attempts that came to their end, `roles` the last of these. The
    staleness in `sync` is of the same attempts as `network`, but with warm-up. `train.loss` and
    `train.accuracy` are means over the last tenth of the steps. `validation` is there only if its
    rows were scored.
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
    validation = _scores(record, ScoredPart.VALIDATION)
    return {
        "status": status,
        "steps": steps,
        "steps_planned": starts[-1].values["steps_total"] if starts else None,
        "steps_saved": max(saved, default=None),
        "first_step": starts[0].step if starts else None,
        "samples": samples,
        "seconds": seconds or None,
        "samples_per_second": rows / seconds if seconds else None,
        "wall_seconds": sum(part[-1].time_seconds - part[0].time_seconds for part in attempts),
        "train": _train_scores(points),
        **({} if validation["loss"] is None else {"validation": validation}),
        "test": _scores(record, ScoredPart.TEST),
        "network": {**_network(ranks, _counted_rows(attempts)), **_unknown_peers(ranks)},
        "sync": _sync(ranks, _batches(record), _failure_counts(record)),
        "step_milliseconds": _steps(ranks),
        "distinct_ids_per_batch": _ids(ranks),
        "cpu": _cpu(ranks, cores),
        "roles": _roles(ranks),
        "compression": {
            "gradient_density": compression.density(compressed, compression.GRADIENT),
            "activation_density": compression.density(compressed, compression.ACTIVATION),
        },
        "arithmetic_changes": [
            {"step": start.step, "changed": start.values["changed_arithmetic"]}
            for start in starts
            if start.values.get("changed_arithmetic")
        ],
        "restarts": max((start.values["attempt"] for start in starts), default=0),
    }


def role_of(name: str) -> str:
    """Role of a rank by its name: `stage 1` for worker-3.1; servers of a kind are one role."""
    kind, _, position = name.partition("-")
    if kind == "server":
        return SERVERS
    if kind == "tables":
        return TABLE_SERVERS
    return f"stage {position.partition('.')[2]}" if "." in position else "worker"


def role_order(role: str) -> tuple[int, str]:
    """Sort key for roles: stage after stage, then the servers."""
    return {SERVERS: 1, TABLE_SERVERS: 2}.get(role, 0), role


def staleness_figures(by_trainer: ByTrainer) -> dict[str, Any]:
    """Figures of the staleness of all pushes, and under `by_trainer` of each trainer's."""

    def figures(missed: Histogram) -> dict[str, Any]:
        return {"pushes": missed.count, **missed.figures(50, 95)}

    by_number = {str(trainer): figures(missed) for trainer, missed in by_trainer.items()}
    return {**figures(Histogram.merged(by_trainer.values())), "by_trainer": by_number}


def _failure_counts(record: Sequence[Event]) -> Mapping[str, int]:
    finished = [event.values for event in record if event.kind is Kind.FINISHED]
    return {
        name: value
        for last in finished[-1:]
        for name, value in last.items()
        if name in FAILURE_COUNTS
    }


def _reached(record: Iterable[Event]) -> tuple[int, int]:
    """Steps and samples at the end of the last attempt, as far as events tell."""
    step = samples = samples_per_step = 0
    for event in record:
        if event.kind is Kind.STARTED:
            step, samples_per_step = event.step, event.values["samples_per_step"]
            samples = event.values.get("samples", step * samples_per_step)
        elif event.kind is not Kind.RANK and event.step > step:
            samples += (event.step - step) * samples_per_step
            samples, step = event.values.get("samples", samples), event.step
    return step, samples


def _timed(points: Sequence[Event]) -> tuple[int, float, float]:
    """Rows, seconds and CPU seconds of training steps after warm-up."""
    rows, seconds, cpu_seconds = (
        sum(point.values[name] for point in points)
        for name in ("timed_rows", "timed_seconds", "timed_cpu_seconds")
    )
    return rows, seconds, cpu_seconds


def _attempts(record: Sequence[Event]) -> list[list[Event]]:
    parts: list[list[Event]] = []
    for event in record:
        if event.kind is Kind.STARTED or not parts:
            parts.append([])
        parts[-1].append(event)
    return parts


def _counted_rows(attempts: Iterable[Sequence[Event]]) -> int:
    """Rows trained on while ranks counted traffic, in attempts that came to their end.

    Steps are the leader's: a worker's are its batches, of which trainers that do not wait for each
    other have different numbers.
    """
    rows = 0
    for begun, *rest in attempts:
        steps = {
            (event.values["rank"], event.values["role"]): event.values["timed_steps"]
            for event in rest
            if event.kind is Kind.RANK
        }
        if steps:
            leader = begun.values["rank"], begun.values["role"]
            rows += steps.get(leader, 0) * begun.values["samples_per_step"]
    return rows


def _batches(record: Iterable[Event]) -> Sequence[int]:
    """Batches each trainer has learned from, as far as events tell; empty unless async."""
    counts = [batches for event in record if (batches := event.values.get("batches"))]
    return counts[-1] if counts else ()


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


def _scores(record: Sequence[Event], part: ScoredPart) -> dict[str, Any]:
    """Scores of the last evaluation of a part; all None without one, GAUC only if there is one.

    Of several labels, those of each are in `labels`.
    """
    evaluated = [event for event in record if event.kind is Kind.EVALUATED]
    scores = [event.values for event in evaluated if part_of(event) is part]
    last: Mapping[str, Any] = scores[-1] if scores else {}
    named = _named_scores(last)
    if "labels" in last:
        named["labels"] = {name: _named_scores(values) for name, values in last["labels"].items()}
    return named


def _named_scores(values: Mapping[str, Any]) -> dict[str, Any]:
    named = {name: values.get(source) for name, source in SCORES.items()}
    return named | ({"gauc": values["gauc"]} if "gauc" in values else {})


def _leader(record: Sequence[Event], points: Sequence[Event]) -> list[RankValues]:
    """Values of the rank that wrote the events, derived from them if no rank has reported."""
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


def _cpu(ranks: Sequence[RankValues], cores: int) -> dict[str, float | None]:
    """CPU seconds of all ranks while training, and their share of the available CPU time."""
    cpu_seconds = sum(rank["cpu_seconds"][Phase.TRAIN] for rank in ranks)
    processes = len({rank["rank"] for rank in ranks})
    seconds = sum(rank["seconds"][Phase.TRAIN] for rank in ranks) / (processes or 1)
    return {
        "utilization": ratio(cpu_seconds, seconds * min(processes, cores)),
        "seconds": cpu_seconds or None,
    }


def _roles(ranks: Sequence[RankValues]) -> dict[str, Any]:
    return {
        str(rank["rank"]): {
            "role": rank["role"],
            "cpu_utilization": ratio(
                rank["cpu_seconds"][Phase.TRAIN], rank["seconds"][Phase.TRAIN]
            ),
            "cpu_seconds": rank["cpu_seconds"][Phase.TRAIN],
            "thread_cpu_seconds": rank.get("thread_cpu_seconds", {}).get(Phase.TRAIN),
            "threads": rank.get("threads"),
            "peak_rss_bytes": rank.get("peak_rss_bytes"),
            "bytes_sent": _all_bytes(rank["traffic"], Phase.TRAIN),
            "bytes_received": _all_bytes(rank["received"], Phase.TRAIN),
            **{
                f"interface_bytes_{way}": (rank.get("interface") or {}).get(f"{way}_bytes")
                for way in ("sent", "received")
            },
            "seconds_by_span": dict(rank["seconds_by_span"]),
            "seconds_by_wait": rank.get("seconds_by_wait"),
            "seconds_by_phase": dict(rank["seconds"]),
        }
        for rank in sorted(ranks, key=lambda rank: rank["rank"])
    }


def _of_workers(ranks: Sequence[RankValues], key: str) -> list[tuple[int, int, Histogram]]:
    """Stage, trainer and histogram under a key, of each worker; -1, -1 for the only process."""
    return [
        (int(stage), int(trainer), Histogram.from_json(counts))
        for rank in ranks
        if (worker := WORKER.fullmatch(rank["role"])) and (counts := rank.get(key))
        for trainer, stage in [worker.groups(default="-1")]
    ]


def _steps(ranks: Sequence[RankValues]) -> dict[str, Any]:
    """Milliseconds of steps, measured by each trainer's last stage or the only process."""

    def figures(times: Histogram) -> dict[str, Any]:
        values = times.figures(50, 95, 99).items()
        shown = {
            name: None if value is None else value / NANOSECONDS_PER_MILLISECOND
            for name, value in values
        }
        return {"steps": times.count or None, **shown}

    counted = _of_workers(ranks, "step_nanoseconds")
    last = max((stage for stage, *_ in counted), default=-1)
    by_trainer = merged_by_trainer({who: times} for stage, who, times in counted if stage == last)
    return {
        **figures(Histogram.merged(by_trainer.values())),
        "by_trainer": {str(who): figures(times) for who, times in by_trainer.items() if who >= 0},
    }


def _ids(ranks: Sequence[RankValues]) -> dict[str, Any]:
    """Mean number of distinct ids in a trainer's sampled batches."""
    counted = _of_workers(ranks, "distinct_ids")
    by_trainer = merged_by_trainer({trainer: ids} for _, trainer, ids in counted)
    return {
        "mean": Histogram.merged(by_trainer.values()).mean,
        "by_trainer": {str(who): ids.mean for who, ids in by_trainer.items() if who >= 0},
    }


def _sync(
    ranks: Sequence[RankValues], batches: Sequence[int], losses: Mapping[str, int]
) -> dict[str, Any] | None:
    """Staleness of pushes and batches of each trainer; None if trainers wait for each other."""
    reported = [counts for rank in ranks if (counts := rank.get("staleness"))]
    if not reported and not batches:
        return None
    staleness = staleness_figures(
        merged_by_trainer(
            {int(trainer): Histogram.from_json(missed) for trainer, missed in counts.items()}
            for counts in reported
        )
    )
    return {
        "pushes": staleness.pop("pushes") or None,
        "staleness": staleness,
        "batches_by_trainer": {str(trainer): count for trainer, count in enumerate(batches)},
        **{name: losses.get(name) for name in FAILURE_COUNTS},
    }


def _network(ranks: Sequence[RankValues], rows: int) -> Mapping[str, Any]:
    """Traffic while training, every message counted once, by its sender.

    Values are None if nothing is sent or no rank has reported. A class that is not counted is
    missing, and sums over all classes are None then.
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
    total = sum(tally["bytes"] for tally in by_class.values())
    figures = {
        "counted_bytes_per_sample": ratio(total, rows) if by_class else None,
        "by_class": by_class,
        "pull_density": _pull_density(ranks),
    }
    if len(by_class) < len(Traffic):
        return {**NETWORK_UNMEASURED, **figures}
    dense = sum(tally["dense_equivalent_bytes"] for tally in by_class.values())
    return {
        **figures,
        **interface_figures(ranks),
        "bytes_total": total,
        "bytes_per_sample": ratio(total, rows),
        "dense_equivalent_bytes": dense,
        "by_phase": {
            phase: {"bytes": sum(_all_bytes(rank["traffic"], phase) or 0 for rank in ranks)}
            for phase in PHASES
        },
    }


def _all_bytes(tallies: RankValues | None, phase: str) -> int | None:
    """Bytes of all classes in one direction; None if not every class is counted."""
    if tallies is None or len(tallies[phase]) < len(Traffic):
        return None
    return sum(tally["bytes"] for tally in tallies[phase].values())


def _unknown_peers(ranks: Sequence[RankValues]) -> dict[str, int | None]:
    """Messages and connections rejected from outside the run; None if no rank listens."""
    counts = [reported for rank in ranks if (reported := rank.get("strangers")) is not None]
    return {
        name: sum(reported[name] for reported in counts) if counts else None
        for name in ("foreign_messages", "refused_connections")
    }


def _pull_density(ranks: Sequence[RankValues]) -> float | None:
    """Share of the weights that pulls send, over all versions including warm-up."""
    versions: list[RankValues] = [rank["versions"] for rank in ranks if rank.get("versions")]
    published, elements = (sum(sums[key] for sums in versions) for key in ("told", "elements"))
    return ratio(published, elements)


def interface_figures(ranks: Sequence[RankValues]) -> dict[str, Any]:
    """Figures of links for `network` in the summary; None if nothing was measured.

    The use of a link is the mean, over windows of 100 ms, of its busier direction's share of the
    rate. `utilization` is that of the busiest link, `utilization_mean_direction` the same link's
    with both directions averaged. `interface_bytes` left all interfaces, with headers,
    acknowledgements and retransmissions.
    """
    reported = [(rank["rank"], link) for rank in ranks if (link := rank.get("interface"))]
    if not reported:
        return dict(INTERFACES_UNMEASURED)
    owners: dict[str, int] = {}  # of ranks that share an interface, the first counts its bytes
    by_rank: dict[int, list[RankValues]] = {}
    for rank, link in sorted(reported, key=lambda pair: pair[0]):
        owners.setdefault(link["address"], rank)
        by_rank.setdefault(rank, []).append(link)
    is_known = all(link["rate_bits_per_second"] for _, link in reported)
    shares = {
        rank: share
        for rank, links in by_rank.items()
        if is_known and (share := _line_share(links, lambda link: link["busier_bytes"])) is not None
    }
    busiest = max(shares, key=lambda rank: shares[rank], default=None)
    mean_direction = None
    if busiest is not None:
        mean_direction = _line_share(
            by_rank[busiest], lambda link: (link["received_bytes"] + link["sent_bytes"]) / 2
        )
    return {
        "utilization": None if busiest is None else shares[busiest],
        "utilization_by_rank": {str(rank): share for rank, share in shares.items()} or None,
        "utilization_mean_direction": mean_direction,
        "rate_bits_per_second": reported[-1][1]["rate_bits_per_second"],
        "interface_bytes": sum(
            link["sent_bytes"] for rank, link in reported if owners[link["address"]] == rank
        ),
    }


def _line_share(
    links: Sequence[RankValues], num_bytes: Callable[[RankValues], float]
) -> float | None:
    """Time that the bytes of one rank's attempts take on its link, as a share of training."""
    line_seconds = sum(8 * num_bytes(link) / link["rate_bits_per_second"] for link in links)
    return ratio(line_seconds, sum(link["seconds"] for link in links))
