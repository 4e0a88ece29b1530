"""Tables of reports and sweeps: scores, traffic, time and CPU of runs, and how runs differ."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from dlrm_hybrid.config.identity import flat, same_results, without_seeds
from dlrm_hybrid.config.keys import effect_of, head_of, keys_of
from dlrm_hybrid.record import Effect
from dlrm_hybrid.report.labels import labels, short, varying
from dlrm_hybrid.report.measures import (
    BYTES,
    CPU_USE,
    SWEEP,
    Measure,
    Summary,
    digits,
    figures,
    integer,
    means,
    nonzero,
    percent,
    rows_of,
    texts,
)
from dlrm_hybrid.report.runs import Run, is_run, read_run
from dlrm_hybrid.report.table import MISSING, Table, cell
from dlrm_hybrid.telemetry.compression import ratio
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.summary import COMPLETE, UNFINISHED, role_of, role_order
from dlrm_hybrid.types import ExitCode

if TYPE_CHECKING:
    from dlrm_hybrid.config.compose import Job

REFUSED = "refused"
FAILED = "failed"
STOPPED: dict[int, str] = {
    ExitCode.FAILED: FAILED,
    ExitCode.PREEMPTED: "preempted",
    ExitCode.INTERRUPTED: "interrupted",
}  # status of a job without a summary
MEGABYTE = 1e6
ALL = "all"
STEP_FIGURES = ("mean", "p50", "p95", "p99", "max")
MAX_BARS = 16  # with more roles in all, each run has one bar, the mean of its roles
GROWTH = ("rows", "reused", "appended", "evicted", "unknown")
SCORES = {
    "loss": "log-loss",
    "normalized_entropy": "NE",
    "auc": "AUC",
    "gauc": "GAUC",
    "calibration": "calibration",
}
MOST_COLUMNS = 8  # of a run's table of new categories
SPANS = [span.value for span in Span if span is not Span.WAIT] + [Span.WAIT.value]


def comparison(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Quality, bytes, utilisation and speed; columns that no run has measured are left out."""
    shown = texts(figures([run.summary for run in runs]).dropna(axis="columns", how="all"))
    shown.insert(0, "run", labels)
    shown.insert(1, "status", [run.status for run in runs])
    return Table.of(shown, "llr")


def over_seeds(runs: Sequence[Run]) -> Table | None:
    """Mean ± deviation of complete runs that differ only in their seeds; None without such runs."""
    configs = [flat(run.config) for run in runs]
    seeds = [tuple(map(values.get, keys_of(Effect.SEED))) for values in configs]
    each = {  # one run for each choice of seeds
        (without_seeds(run.config), *choice): run
        for run, choice in zip(runs, seeds, strict=True)
        if run.status == COMPLETE
    }
    several: dict[str, list[Run]] = {}
    for (key, *_), run in each.items():
        several.setdefault(key, []).append(run)
    several = {key: group for key, group in several.items() if len(group) > 1}
    if not several:
        return None
    firsts = [group[0] for group in several.values()]
    names = labels([replace(run, overrides=_seedless(run.overrides)) for run in firsts])
    groups = [name for name, group in zip(names, several.values(), strict=True) for _ in group]
    data = figures([run.summary for group in several.values() for run in group])
    return _means(groups, rows_of(data))


def sweep_means(frame: pd.DataFrame) -> Table | None:
    """Mean ± deviation over seeds for the rows of `sweep_frame`; None without such rows."""
    columns = [str(column) for column in frame.columns]
    varied = columns[1 : columns.index("status")]
    names = short([key for key in varied if key not in keys_of(Effect.SEED)])
    if len(names) == len(varied):
        return None
    rows = [row for row in rows_of(frame) if row["status"] == COMPLETE]
    groups = [" ".join(f"{name}={row[key]}" for key, name in names.items()) for row in rows]
    return _means([group or "all" for group in groups], rows)


def _means(groups: Sequence[str], rows: Sequence[Mapping[Any, Any]]) -> Table | None:
    shown = means(groups, rows)
    return Table(tuple(shown[0]), [tuple(row.values()) for row in shown]) if shown else None


def _seedless(overrides: Sequence[str]) -> tuple[str, ...]:
    return tuple(text for text in overrides if head_of(text) not in keys_of(Effect.SEED))


def bytes_by_class(summary: Summary) -> dict[str, float]:
    """Bytes per sample of each class of traffic; empty if nothing was counted."""
    network = summary["network"]
    per_sample, total = network["bytes_per_sample"], network["bytes_total"]
    if not per_sample or not total:
        return {}
    samples = total / per_sample
    return {
        name.replace("_", " "): tally["bytes"] / samples
        for name, tally in network["by_class"].items()
    }


def cpu_seconds_by_role(summary: Summary) -> dict[str, float]:
    """CPU seconds of training steps by role; the workers of a stage are one role."""
    spent: Counter[str] = Counter()
    for role in summary["roles"].values():
        use, phases = role["cpu_utilization"], role.get("seconds_by_phase")
        if use is not None and phases is not None:
            spent[role_of(role["role"])] += use * phases["train"]
    return {role: spent[role] for role in sorted(spent, key=role_order)}


def by_run(
    runs: Sequence[Run], labels: Sequence[str], figures: Callable[[Summary], Mapping[str, float]]
) -> pd.DataFrame:
    """A row of figures for each run by label, and a column for each name that any run has."""
    return pd.DataFrame([figures(run.summary) for run in runs], index=list(labels), dtype=float)


def _texts(runs: Sequence[Run], measure: Measure) -> list[str]:
    return [cell(measure.pick(run.summary), measure.show) for run in runs]


def traffic(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """Bytes per sample by class of traffic; None if no run has counted bytes."""
    return _table("bytes/sample", by_run(runs, labels, bytes_by_class), "all", _texts(runs, BYTES))


def roles(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """CPU seconds by role; None if no run has measured them."""
    spent = by_run(runs, labels, cpu_seconds_by_role)
    return _table("CPU s", spent, CPU_USE.title, _texts(runs, CPU_USE))


def staleness(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """Staleness of pushes of runs whose trainers do not wait for each other; None without any."""
    columns = ("run", "pushes", "mean", "p50", "p95", "max", "means of trainers", "their batches")
    rows = [
        (label, *_staleness(run.summary["sync"]))
        for label, run in zip(labels, runs, strict=True)
        if run.summary["sync"] is not None
    ]
    return Table(columns, rows) if rows else None


def growth(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """Counts of new and old categories in runs whose rows go on from others'; None without any."""
    rows = [
        (label, column, *(integer(number) for number in counts))
        for label, run in zip(labels, runs, strict=True)
        for column, counts in _most_new(run.summary)
    ]
    return Table(("run", "column", *GROWTH), rows, "llr") if rows else None


def progressive(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """Scores of rows before they were learned (`data.progressive`); None without such runs."""
    scores = {
        (label, _file_names(run.config["data"]["raw"])): run.summary["test"]
        for label, run in zip(labels, runs, strict=True)
        if run.config["data"].get("progressive")
    }
    return _scores(("run", "file"), scores)


def _file_names(raw: str | Sequence[str] | None) -> str:
    paths = [raw] if isinstance(raw, str) else raw or ()
    return ", ".join(Path(path).name for path in paths) or MISSING


def label_scores(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """Scores of each of several labels on the test part; None without such runs."""
    scores = {
        (run_label, label): of_label
        for run_label, run in zip(labels, runs, strict=True)
        for label, of_label in run.summary["test"].get("labels", {}).items()
    }
    return _scores(("run", "label"), scores)


def _scores(heads: Sequence[str], scores: Mapping[tuple[str, str], Summary]) -> Table | None:
    """A row of `SCORES` for each pair of heads; None without any, GAUC only if one has it."""
    names = [n for n in SCORES if n != "gauc" or any(n in x for x in scores.values())]
    rows = [(*row, *(cell(x.get(name)) for name in names)) for row, x in scores.items()]
    return Table((*heads, *(SCORES[name] for name in names)), rows, "ll") if rows else None


def _most_new(summary: Summary) -> list[tuple[str, list[int]]]:
    """The columns with most new categories, each with the counts of `GROWTH`."""
    counts: Mapping[str, Mapping[str, int]] = summary.get("growth") or {}
    columns = sorted(counts, key=lambda name: -counts[name]["appended"])[:MOST_COLUMNS]
    return [(name, [counts[name].get(count, 0) for count in GROWTH]) for name in columns]


def _staleness(sync: Summary) -> list[str]:
    stats = sync["staleness"]
    means = [trainer["mean"] for trainer in stats["by_trainer"].values()]
    return [
        _span_of([sync["pushes"]], integer),
        _span_of([stats["mean"]], digits),
        *(_span_of([stats[name]], integer) for name in ("p50", "p95", "max")),
        _span_of(means, digits),
        _span_of(sync["batches_by_trainer"].values(), integer),
    ]


def ranks(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """CPU time and memory of each role, or of each run if roles are too many; None without any."""
    grouped = [_reported(run.summary) for run in runs]
    if sum(map(len, grouped)) > MAX_BARS:
        grouped = [
            {ALL: [rank for several in by_role.values() for rank in several]} if by_role else {}
            for by_role in grouped
        ]
    is_alone = len(runs) == 1
    rows = [
        (role if is_alone else f"{label} · {role}", *_rank_cells(by_role[role]))
        for label, by_role in zip(labels, grouped, strict=True)
        for role in sorted(by_role, key=role_order)
    ]
    columns = ("role", "ranks", "CPU s", "in threads that learn", "peak MB of a rank")
    return Table(columns, rows) if rows else None


def steps(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """Milliseconds of the steps of each run; None if no rank has reported."""
    rows = [
        (label, *_step_cells(run.summary))
        for label, run in zip(labels, runs, strict=True)
        if run.summary["step_milliseconds"]["steps"]
    ]
    figures = (f"{name}, ms" for name in STEP_FIGURES)
    columns = ("run", "steps", *figures, "p95 of trainers", "ids a batch")
    return Table(columns, rows) if rows else None


def _step_cells(summary: Summary) -> list[str]:
    stats = summary["step_milliseconds"]
    slow = [trainer["p95"] for trainer in stats["by_trainer"].values()]
    return [
        _span_of([stats["steps"]], integer),
        *(_span_of([stats[name]], digits) for name in STEP_FIGURES),
        _span_of(slow, digits),
        _span_of([summary["distinct_ids_per_batch"]["mean"]], integer),
    ]


def _reported(summary: Summary) -> dict[str, list[Summary]]:
    """The ranks that have reported their memory, by role."""
    by_role: dict[str, list[Summary]] = {}
    for rank in summary["roles"].values():
        if rank.get("peak_rss_bytes") is not None:
            by_role.setdefault(role_of(rank["role"]), []).append(rank)
    return by_role


def _rank_cells(group: Sequence[Summary]) -> tuple[str, ...]:
    cpu_seconds, learning = (
        sum(rank.get(key) or 0.0 for rank in group) for key in ("cpu_seconds", "thread_cpu_seconds")
    )
    share = ratio(learning, cpu_seconds)
    peak_bytes = max(rank["peak_rss_bytes"] for rank in group)
    return (
        integer(len(group)),
        digits(cpu_seconds),
        cell(share, percent),
        digits(peak_bytes / MEGABYTE),
    )


def _span_of(values: Iterable[float | None], show: Callable[[float], str]) -> str:
    numbers = [value for value in values if value is not None]
    ends = dict.fromkeys(show(x) for x in (min(numbers), max(numbers))) if numbers else [MISSING]
    return " to ".join(ends)


def differences(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """Configuration keys whose values differ between runs; None if there are none."""
    configs = [flat(run.config) for run in runs]
    keys = {key for values in configs for key in values if Effect.ANOTHER not in effect_of(key)}
    keys.discard("skip_completed")
    rows = [
        (key, *(_text(values[key]) if key in values else MISSING for values in configs))
        for key in sorted(keys, key=_reading_order)
    ]
    different = [row for row in rows if len(set(row[1:])) > 1]
    return Table(("key", *labels), different, align="l") if different else None


def origins(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Folder, start, commit, restarts and overrides of each run."""
    columns = ("run", "folder", "started", "commit", "restarts", "overrides")
    return Table(
        columns,
        tuple(
            (
                label,
                str(run.folder),
                str(run.environment.get("when", MISSING)),
                str(run.environment.get("git_sha") or MISSING),
                cell(run.summary["restarts"], integer),
                shlex.join(run.overrides) or MISSING,
            )
            for label, run in zip(labels, runs, strict=True)
        ),
        align="l",
    )


def _reading_order(key: str) -> tuple[str, bool, str]:
    """Sort key of keys: section by section, the key that names the choice first."""
    section, _, name = key.rpartition(".")
    return section, name != "name", name


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def microseconds_by_role(summary: Summary) -> pd.DataFrame:
    """Wall time per sample of all trainers by span, a row for each role; empty if not measured.

    Values are means over the ranks of a role, and its spans add up to the time of the run: shares
    of the attempt that `roles` is about, times the seconds per sample of all.
    """
    return _by_role(summary, "seconds_by_span").reindex(columns=SPANS)


def _by_role(summary: Summary, key: str) -> pd.DataFrame:
    """Means over the ranks of each role, in µs per sample; roles without any have no row."""
    speed = summary["samples_per_second"] or 0.0
    ranks: dict[str, list[Mapping[str, float]]] = {}
    for rank in summary["roles"].values():
        spans: Mapping[str, float] = rank["seconds_by_span"] or {}
        if samples := speed * sum(spans.values()):
            times: Mapping[str, float] = rank.get(key) or {}
            of_sample = {name: 1e6 * seconds / samples for name, seconds in times.items()}
            ranks.setdefault(role_of(rank["role"]), []).append(of_sample)
    names = sorted({name for several in ranks.values() for times in several for name in times})
    means = {
        role: [sum(times.get(name, 0.0) for times in several) / len(several) for name in names]
        for role, several in ranks.items()
        if any(several)
    }
    roles = sorted(means, key=role_order)
    return pd.DataFrame([means[role] for role in roles], roles, names, dtype=float)


def span_bars(runs: Sequence[Run], labels: Sequence[str]) -> pd.DataFrame:
    """Time by span of each role of each run, or the mean of each run's roles if these are many."""
    times = _frame_of_runs(runs, labels, microseconds_by_role)
    return pd.concat([pd.DataFrame(columns=SPANS, dtype=float), times])


def _frame_of_runs(
    runs: Sequence[Run], labels: Sequence[str], by_role: Callable[[Summary], pd.DataFrame]
) -> pd.DataFrame:
    frames = {
        label: spent
        for label, run in zip(labels, runs, strict=True)
        if len(spent := by_role(run.summary))
    }
    if sum(map(len, frames.values())) > MAX_BARS:
        return pd.DataFrame({label: spent.mean() for label, spent in frames.items()}).T
    if len(runs) > 1:
        frames = {key: spent.set_axis(f"{key} · " + spent.index) for key, spent in frames.items()}
    return pd.concat([pd.DataFrame(dtype=float), *frames.values()])


def spans(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """The table of `span_bars`, without spans that take no time; None if it is empty."""
    spent = span_bars(runs, labels)
    sums = spent.sum(axis="columns").map(digits)
    return _table("µs per sample", nonzero(spent), "all", list(sums))


def waits(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """Waits of each role by reason; None if no rank has measured them."""
    spent = _frame_of_runs(runs, labels, partial(_by_role, key="seconds_by_wait"))
    sums: dict[str, float] = {str(name): total for name, total in spent.sum().items()}
    names = sorted(sums, key=lambda name: -sums[name])
    shown = spent.where(spent > 0).reindex(columns=names)
    shown.columns = [name.replace("_", " ") for name in names]
    totals = spent.sum(axis="columns").map(digits)
    return _table("µs per sample", shown, "all", list(totals))


def _table(head: str, data: pd.DataFrame, last_head: str, last: Sequence[str]) -> Table | None:
    """A row for each label: its figures, then a cell of `last`; None without figures."""
    if data.empty:
        return None
    cells = data.map(lambda value: MISSING if pd.isna(value) else digits(value))
    cells.insert(0, head, list(data.index))
    return Table.of(cells.assign(**{last_head: list(last)}), "lr")


def sweep_frame(jobs: Sequence[tuple[Job, int]]) -> pd.DataFrame:
    """A row for each job, given with its exit code: folder's name, varying keys, status, scores.

    Raises:
        DataError: a file in a run folder is damaged.
    """
    runs = [_own_run(job) for job, _ in jobs]
    heads = pd.DataFrame(
        {
            "job": [job.folder.name for job, _ in jobs],
            **varying([job.overrides for job, _ in jobs]),
            "status": [_status(run, code) for run, (_, code) in zip(runs, jobs, strict=True)],
        }
    )
    data = figures([None if run is None else run.summary for run in runs])
    return heads.join(data.filter([measure.key for measure in SWEEP]))


def sweep_table(frame: pd.DataFrame) -> Table:
    """Format the rows of `sweep_frame`."""
    figured = frame.filter([measure.key for measure in SWEEP]).columns
    heads = frame.drop(columns=figured).fillna(MISSING)
    columns = ["job", *short(list(map(str, heads.columns[1:-1]))).values(), "status"]
    shown = heads.set_axis(columns, axis="columns").join(texts(frame))
    return Table.of(shown, "l" * len(columns) + "r")


def _own_run(job: Job) -> Run | None:
    """The run of a job; None if its folder has none, or another one from before."""
    if not is_run(job.folder):
        return None
    run = read_run(job.folder)
    return run if same_results(run.config, job.values) else None


def _status(run: Run | None, exit_code: int) -> str:
    if run is None:
        return STOPPED.get(exit_code, REFUSED)
    if run.status == UNFINISHED and exit_code != ExitCode.DONE:
        return STOPPED.get(exit_code, FAILED)
    return run.status
