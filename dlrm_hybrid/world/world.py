"""Worlds of trainers, pipeline stages and servers that a program drives step by step.

with World.in_process(spec, trainers=2, cuts=["bottom.2"], gradient=Dct(density=0.01)) as world:
    for dense, ids, label in loader:
        metrics = world.step((dense, ids, label))
    print(world.evaluate(test_loader).auc)
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.checkpoint.folder import find
from dlrm_hybrid.compress.gradient.methods import GradientMethod
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.outside import is_path, path_of
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.telemetry.metrics import BinaryScores, metrics_of
from dlrm_hybrid.train.engine import ignore
from dlrm_hybrid.types import ConfigError, DataError, DivergedError, ResourceError
from dlrm_hybrid.world.backend import Backend, OwnOrder, StepResult, check_weights_of
from dlrm_hybrid.world.batches import Loader, is_one
from dlrm_hybrid.world.in_process import InProcess
from dlrm_hybrid.world.loaders import Loaders
from dlrm_hybrid.world.processes import Processes
from dlrm_hybrid.world.session import Session
from dlrm_hybrid.world.settings import Keys, Settings, named_keys, settings_of

Make = Callable[[Settings, Path, Path | None], Backend]


@final
class World:
    """Trainers, pipeline stages and servers that train one model, driven by your program.

    Create one by `World.in_process` or `World.processes`. Results equal those of the command
    `train` with the same configuration and rows, bit for bit.
    """

    def __init__(self, settings: Settings, loader: Loader | None, make: Make) -> None:
        self._settings = settings
        self._loader = loader
        self._loaders = self._first_epoch()
        self._session = Session(lambda folder, source: make(settings, folder, source))

    @classmethod
    def in_process(
        cls,
        spec: ModelShape,
        loader: Loader | None = None,
        *,
        trainers: int | None = None,
        cuts: Sequence[str] | None = None,
        servers: int | None = None,
        gradient: GradientMethod | str | None = None,
        batch_size: int | None = None,
        config: Keys = (),
    ) -> World:
        """Create a world whose ranks are objects of this process: for notebooks, tests and studies.

        Defaults are those of conf/: two trainers of three stages, one server, batches of 128 rows.

        Args:
            spec: the model: a DLRM, or a module of your own.
            loader: function `loader(trainer, trainers)` that returns the batches of one trainer for
                one epoch; None if every call of `step` passes its batches.
            trainers: number of data-parallel replicas.
            cuts: layers after which the model is split into stages, as ["bottom.2", "top.2"].
            servers: number of parameter servers of the dense weights; 0 for none.
            gradient: compression of gradients, a record such as `Dct(density=0.01)` or a name.
            batch_size: rows of each trainer's batch.
            config: any other keys of the configuration, as {"optimizer.lr": 0.05}, or overrides as
                on the command line, ["+experiment=dct_levels", "embedding.lr=0.1"].

        Raises:
            ConfigError: lists all errors, one per line, each with its key and value.
        """
        named = named_keys(trainers, cuts, servers, batch_size)
        return cls(settings_of(spec, "in_process", named, gradient, config), loader, InProcess)

    @classmethod
    def processes(
        cls,
        spec: ModelShape,
        loader: Loader | None = None,
        *,
        trainers: int | None = None,
        cuts: Sequence[str] | None = None,
        servers: int | None = None,
        gradient: GradientMethod | str | None = None,
        batch_size: int | None = None,
        config: Keys = (),
    ) -> World:
        """Create a world whose ranks are processes of this machine, which compute in parallel.

        Batches are sent to the workers. If a rank fails or is killed, the world ends; the error
        names it.

        Args:
            spec: the model: a DLRM, or a module of your own.
            loader: as for `in_process`; the next batches are read while workers compute.
            trainers: number of data-parallel replicas.
            cuts: layers after which the model is split into stages.
            servers: number of parameter servers of the dense weights.
            gradient: compression of gradients.
            batch_size: rows of each trainer's batch.
            config: any other keys of the configuration, or overrides.

        Raises:
            ConfigError: see `in_process`.
            RunFailedError: a rank could not start.
        """
        named = named_keys(trainers, cuts, servers, batch_size)
        return cls(settings_of(spec, "processes", named, gradient, config), loader, Processes)

    def __repr__(self) -> str:
        parallel = self.config.parallel
        parts = {
            "trainer": parallel.trainers,
            "stage": len(parallel.cuts) + 1,
            "server": parallel.servers,
            "table server": parallel.table_servers,
        }
        counts = [f"{count} {what}{'s' * (count > 1)}" for what, count in parts.items() if count]
        state = (
            f"step {self.steps:,}" if self._session.over is None else f"over: {self._session.over}"
        )
        return f"<World {parallel.world}: {', '.join(counts)}; {state}>"

    @property
    def spec(self) -> ModelShape:
        """The shape of the model that is trained: tables and layers."""
        return self._settings.spec

    @property
    def config(self) -> Config:
        """The configuration of the world, with defaults for all keys that were not given."""
        return self._settings.config

    @property
    def steps(self) -> int:
        """Training steps done, including those before a checkpoint that was loaded."""
        return self._session.backend.steps

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes sent by all ranks in training steps, by traffic class.

        Starts again at 0 when a checkpoint is loaded, and cannot be read after the world has ended.
        In one process, traffic between trainers for the tables of `embedding=fused` is not counted.
        """
        return {traffic: counts["bytes"] for traffic, counts in self._counts().items()}

    @property
    def dense_bytes(self) -> dict[str, int]:
        """Size of the same messages in float32, by traffic class."""
        name = "dense_equivalent_bytes"
        return {traffic: counts[name] for traffic, counts in self._counts().items()}

    def step(self, batches: Any = None) -> StepResult:
        """Train on one batch per trainer.

        Args:
            batches: one batch of `trainers * batch_size` rows, which is split among the trainers in
                order, or a list with one batch per trainer. A batch is (dense, ids, label), NumPy
                arrays or torch tensors: float (rows, dense columns); int (rows, tables) or a
                KeyedJaggedTensor; 0 or 1 (rows,), of several labels (rows, labels). None takes the
                next batch of each trainer's loader, and starts the loader again when it is
                exhausted.

        Raises:
            DataError: a batch is malformed, or a loader failed; the step was not begun.
            DivergedError: the loss is not finite; the world has ended.
        """
        with self._session.turn():
            if batches is not None:
                columns, trainers = self._settings.columns, self.config.parallel.trainers
                return self._learn(columns.of_trainers(batches, trainers, self.steps), ignore)
            taken = self._source.take()
            if taken is None:
                self._end_epoch()
                taken = self._source.take()
            if taken is None:
                raise DataError("loader: an epoch without a batch for each trainer")
            return self._learn(taken, self._source.read_ahead)

    def epoch(self) -> Iterator[StepResult]:
        """Train until the first trainer's loader is exhausted; yields the result of each step.

        Batches that other loaders still had are dropped, with a warning. After a `break`, the next
        call continues the same epoch.

        Raises:
            DataError, DivergedError: see `step`.
        """
        while True:
            with self._session.turn():
                taken = self._source.take()
                if taken is None:
                    self._end_epoch()
                    return
                result = self._learn(taken, self._source.read_ahead)
            yield result

    def drain(self) -> StepResult:
        """Finish the batches in flight; with `schedule=dsp`, after the last step."""
        with self._session.going_on():
            return self._result(self._session.backend.drain())

    def evaluate(self, batches: Iterable[Any]) -> BinaryScores:
        """Score the servers' weights; several labels are `label.1`, `label.2` … of `labels`.

        Args:
            batches: as in `step`, each with any number of rows.

        Raises:
            DataError: a batch is malformed, or there are no rows.
        """
        weights = enumerate(self.spec.loss_weights, 1)
        metrics, is_empty = metrics_of({f"label.{place}": x for place, x in weights}), True
        for logit_B, batch in self._scored(batches, labelled=True):
            metrics.add(logit_B, *batch.outcomes)
            is_empty = False
        if is_empty:
            raise DataError("evaluate: no batch with a row to score")
        return metrics.scores()

    def predict(self, batches: Iterable[Any]) -> Float32s:
        """Probabilities that labels are 1; batches as for `evaluate`, labels optional.

        They are (rows,), or (rows, labels) of a model with `loss_weights`.
        """
        logits = [logit_B for logit_B, _ in self._scored(batches, labelled=False)]
        logit_R = np.concatenate(logits) if logits else np.empty(0, np.float32)
        return torch.from_numpy(logit_R).sigmoid().numpy()

    def ask(self, order: OwnOrder, **values: Any) -> list[Any]:
        """Have every worker carry out an order of your own, between two steps.

        Args:
            order: a function of a module. It is given the worker, `dlrm_hybrid.parallel.worker`,
                and `values`, and returns numbers, texts, lists of these, or None.
            values: for the order, likewise.

        Returns:
            What each worker has answered, by rank: trainer after trainer, stage after stage.

        Raises:
            ConfigError: processes cannot import the function.
            RunFailedError: it raised in one of them.
        """
        path = path_of(order)
        is_apart = self.config.parallel.world == "processes"
        if is_apart and (not is_path(path) or path.startswith("__main__:")):
            raise ConfigError(f"order {path}: ranks cannot import it; needs a function of a module")
        with self._session.going_on():
            return self._session.backend.ask(order, values)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all weights and optimizer state, by name.

        `bottom.1.weight` (out, in), `top.2.bias`, `embedding.3.weight` (rows, dimension) …
        """
        with self._session.going_on():
            return self._session.backend.tensors()

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint to continue from, residuals included; returns its folder.

        Args:
            folder: gets `checkpoints/step_00000100`, like a run folder of `train`.

        Raises:
            ResourceError: it cannot be written.
        """
        with self._session.going_on(harmless=ResourceError):
            saved = self._session.backend.save()
        target = Path(folder) / "checkpoints" / saved.name
        partial = target.with_name(f".{target.name}.partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            shutil.move(saved, partial)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            why = error.strerror or error  # shutil raises errors without strerror
            raise ResourceError(f"{target}: cannot be written: {why}") from error
        return target

    def load(self, folder: str | Path) -> None:
        """Restart all ranks from a checkpoint; loaders start with their first epoch.

        Args:
            folder: a checkpoint of a world or of `train`, or a folder of some: the newest is taken.

        Raises:
            DataError: there is none, it is damaged, or of another model; names what differs.
        """
        with self._session.turn():
            source = find(Path(folder)).absolute()
            check_weights_of(source, self._settings)  # before ranks are started with it
            before = self._session.backend
            try:
                self._session.begin_again(source)
            finally:  # the new ranks may be there when Ctrl-C is seen
                if self._session.backend is not before:
                    self._loaders = self._first_epoch()

    def close(self) -> None:
        """End all ranks; a second call does nothing."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _learn(self, batches: Sequence[Batch], meanwhile: Callable[[], None]) -> StepResult:
        with self._session.going_on():
            return self._result(self._session.backend.learn(batches, meanwhile))

    def _result(self, metrics: StepMetrics) -> StepResult:
        """The result of a step's metrics; raises DivergedError if the loss is not finite."""
        step, rows, loss_sum = self.steps, metrics.rows, metrics.loss_sum
        if not math.isfinite(loss_sum):
            raise DivergedError(
                f"step {step}: the loss is {loss_sum}; optimizer.lr = {self.config.optimizer.lr} "
                "or embedding.lr may be too high"
            )
        if not rows:
            return StepResult(step, 0, None, None)
        return StepResult(step, rows, loss_sum / rows, metrics.correct / rows)

    def _first_epoch(self) -> Loaders | None:
        if self._loader is None:
            return None
        return Loaders(self._loader, self._settings.columns, self.config.parallel.trainers)

    @property
    def _source(self) -> Loaders:
        if self._loaders is None:
            raise DataError("loader = None: hand the batches to `step`, or give the world a loader")
        return self._loaders

    def _end_epoch(self) -> None:
        left_out = self._source.end_epoch()
        if left_out:
            trainers = ", ".join(map(str, left_out))
            warnings.warn(
                f"loader: an epoch ended where others still had a batch (of trainers {trainers}), "
                "which nobody has learned from",
                stacklevel=3,
            )

    def _scored(self, batches: Iterable[Any], labelled: bool) -> Iterator[tuple[Float32s, Batch]]:
        """Batches with their logits, in order."""
        if is_one(batches):
            raise DataError("evaluation: this is one batch, must be several, such as [batch]")
        with self._session.going_on():
            self._session.backend.begin_evaluation()
        columns = self._settings.columns
        # A malformed batch is found here, while all ranks wait.
        checked = (
            columns.batch(data, f"evaluation, batch {number}", labelled=labelled)
            for number, data in enumerate(batches)
        )
        # A batch without rows has no logits.
        some = (batch for batch in checked if len(batch.label_B))
        while group := list(islice(some, self.config.parallel.trainers)):
            with self._session.going_on():
                logits = self._session.backend.predict(group)
            yield from zip(logits, group, strict=True)

    def _counts(self) -> Mapping[str, Mapping[str, int]]:
        with self._session.going_on():
            return self._session.backend.counts()
