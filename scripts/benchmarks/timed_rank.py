"""Train, and say where the CPU time of every rank of the world goes.

    python scripts/benchmarks/timed_rank.py train +experiment=baseline hydra.run.dir=FOLDER

Each rank wraps the functions of `SPANS` in a clock of its main thread: the time of one that is
called within another counts for the inner one only; what is encoding and what is not is that of
`telemetry.spans`. Other threads are read from the kernel.
FOLDER/log/<role>.spans.json holds CPU seconds, of training steps without the first ones.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import suppress
from importlib import import_module
from inspect import isgeneratorfunction
from pathlib import Path
from typing import Any

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.run import training
from dlrm_hybrid.run.rank.process import Report
from dlrm_hybrid.run.rank.world import world_rank
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.train.signals import StopRequest

DENSE = "dlrm_hybrid.compress.activation.dense"
DCT = "dlrm_hybrid.compress.activation.dct"
# Label, module, and function or Class.method as that module knows it.
SPANS = (
    ("read rows", "dlrm_hybrid.data.loader", "Loader.read"),
    ("tables: look up and exchange", "dlrm_hybrid.parallel.tables.shared", "OwnTables.lookup"),
    ("tables: exchange and learn", "dlrm_hybrid.parallel.tables.shared", "OwnTables.learn"),
    ("forward", "dlrm_hybrid.parallel.stage", "StageStep.forward"),
    ("backward", "dlrm_hybrid.parallel.stage", "StageStep.backward"),
    ("backward", "dlrm_hybrid.parallel.stage", "StageStep.finish"),
    ("gradients: encode", "dlrm_hybrid.compress.gradient.compressor", "Dense.encode"),
    ("gradients: encode", "dlrm_hybrid.compress.gradient.error_feedback", "ErrorFeedback.encode"),
    ("gradients: hand over", "dlrm_hybrid.parallel.dense.client", "ServerClient.push"),
    ("weights: decode", "dlrm_hybrid.parallel.dense.client", "changes_of"),
    ("weights: apply", "dlrm_hybrid.parallel.dense.client", "ServerClient.apply"),
    ("weights: apply", "dlrm_hybrid.parallel.dense.client", "ServerClient.wants"),
    ("send: frame and checksum", "dlrm_hybrid.comm.metered", "MeteredChannel.send"),
    ("wait and receive", "dlrm_hybrid.comm.metered", "MeteredChannel.receive"),
    ("receive: frame and checksum", "dlrm_hybrid.comm.zmq.roster", "decode"),
    ("activations: encode", DENSE, "DenseCodec.encode"),
    ("activations: decode", DENSE, "DenseCodec.decode"),
    ("activations: encode", DENSE, "DenseCodec.encode_gradient"),
    ("activations: decode", DENSE, "DenseCodec.decode_gradient"),
    ("activations: encode", DCT, "ThresholdCodec.encode"),
    ("activations: decode", DCT, "ThresholdCodec.decode"),
    (
        "activations: encode",
        "dlrm_hybrid.compress.activation.dct",
        "ThresholdCodec.encode_gradient",
    ),
    (
        "activations: decode",
        "dlrm_hybrid.compress.activation.dct",
        "ThresholdCodec.decode_gradient",
    ),
    ("gradients: decode", "dlrm_hybrid.parallel.dense.server", "ParameterServer._gradients"),
    ("mean of the trainers", "dlrm_hybrid.parallel.dense.aggregate", "Aggregate.mean"),
    ("optimizer", "dlrm_hybrid.parallel.dense.master", "Master.learn"),
    ("optimizer", "dlrm_hybrid.parallel.dense.master", "Master.learn_at"),
    ("weights: encode", "dlrm_hybrid.parallel.dense.mirror", "Published.tell"),
    ("weights: encode", "dlrm_hybrid.parallel.dense.mirror", "Published.tell_all"),
    ("send: frame and checksum", "dlrm_hybrid.parallel.dense.server", "ParameterServer._tell"),
    ("agree", "dlrm_hybrid.train.worker_rank", "WorkerRank.meet"),
)
THE_REST = "the rest of Python"
TASKS = Path("/proc/self/task")


class Clock:
    """CPU seconds of the main thread by what it does."""

    def __init__(self) -> None:
        self.counting = False
        self.seconds: dict[str, float] = defaultdict(float)
        self._doing = [THE_REST]
        self._since = time.thread_time()

    def begin(self, label: str) -> None:
        """What comes now is `label`."""
        self.book()
        self._doing.append(label)

    def end(self) -> None:
        """Back to what was done before."""
        self.book()
        self._doing.pop()

    def book(self) -> None:
        """Count the time until now."""
        now = time.thread_time()
        if self.counting:
            self.seconds[self._doing[-1]] += now - self._since
        self._since = now


def timed_rank(argument: str, report: Report, stop: StopRequest) -> None:
    """Be a rank of a world, with clocks."""
    task: dict[str, Any] = json.loads(argument)
    clock = Clock()
    for label, module, name in SPANS:
        _wrap(clock, label, module, name)
    threads = _count_training_only(clock)
    world_rank(argument, report, stop)
    spans = {**clock.seconds, **threads}
    folder = Path(task["run_folder"])
    path = folder / "log" / f"{_role(folder, task['rank'])}.spans.json"
    path.write_text(json.dumps(spans, indent=1), encoding="utf-8")


def _role(folder: Path, rank: int) -> str:
    parallel = json.loads((folder / "config.json").read_text(encoding="utf-8"))["parallel"]
    topology = Topology(
        trainers=parallel["trainers"],
        stages=len(parallel["cuts"]) + 1,
        servers=parallel["servers"],
        interaction_stage=0,
    )
    return topology.name(rank)


def _wrap(clock: Clock, label: str, module: str, name: str) -> None:
    """Put a clock around a function where its callers find it."""
    owner: Any = import_module(module)
    *classes, attribute = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    function: Callable[..., Any] = getattr(owner, attribute)

    def timed(*arguments: Any, **named: Any) -> Any:
        clock.begin(label)
        try:
            return function(*arguments, **named)
        finally:
            clock.end()

    def timed_in_parts(*arguments: Any, **named: Any) -> Generator[Any, Any, Any]:
        program, value = function(*arguments, **named), None
        while True:
            clock.begin(label)
            try:
                wanted = program.send(value)
            except StopIteration as end:
                return end.value
            finally:
                clock.end()
            value = yield wanted

    setattr(owner, attribute, timed_in_parts if isgeneratorfunction(function) else timed)


def _count_training_only(clock: Clock) -> dict[str, float]:
    """Let the clock run in training steps; the result grows by what other threads spend in them."""
    threads: dict[str, float] = defaultdict(float)
    switch = RankMeter.switch
    since: dict[str, float] = {}

    def switch_clock(self: RankMeter, phase: Phase) -> None:
        switch(self, phase)
        counts = phase is Phase.TRAIN
        if counts == clock.counting:
            return
        clock.book()
        clock.counting = counts
        now = _thread_seconds()
        if counts:
            since.clear()
            since.update(now)
            return
        for name, seconds in now.items():
            threads[name] += seconds - since.get(name, 0.0)

    RankMeter.switch = switch_clock
    return threads


def _thread_seconds() -> dict[str, float]:
    """CPU seconds of all threads but the main one, by name."""
    seconds: dict[str, float] = defaultdict(float)
    main = str(os.getpid())
    for task in TASKS.iterdir():
        if task.name == main:
            continue
        # One that wrote a checkpoint may end while it is looked at.
        with suppress(FileNotFoundError, ProcessLookupError):
            nanoseconds = int((task / "schedstat").read_text(encoding="ascii").split()[0])
            name = (task / "comm").read_text(encoding="utf-8").strip()
            seconds[f"thread {name}"] += nanoseconds / 1e9
    return seconds


def main() -> int:
    """Run the verb of the command line with ranks that are timed."""
    training.WORLD_RANK = "timed_rank:timed_rank"
    return run(sys.argv)


if __name__ == "__main__":
    sys.exit(main())
