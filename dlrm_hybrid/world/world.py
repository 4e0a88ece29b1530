"""Worlds of trainers, pipeline stages and servers that a program drives step by step.

with World.in_process(spec, trainers=2, cuts=["bottom.2"], gradient=Dct(density=0.01)) as world:
    for dense, ids, label in loader:
        metrics = world.step((dense, ids, label))
    print(world.evaluate(test_loader).auc)
"""

from __future__ import annotations

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

from dlrm_hybrid.checkpoint.folder import find
from dlrm_hybrid.compress.library.records import GradientMethod
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.telemetry.metrics import BinaryMetrics, BinaryScores
from dlrm_hybrid.types import DataError, ResourceError, RunFailedError
from dlrm_hybrid.world.body import Body, Floats, StepResult, check_weights_of, result_of
from dlrm_hybrid.world.in_process import InProcess
from dlrm_hybrid.world.life import Life
from dlrm_hybrid.world.processes import Processes
from dlrm_hybrid.world.rows.batches import Loader, is_one
from dlrm_hybrid.world.settings import Keys, Settings, named_keys, settings_of

Make = Callable[[Settings, Loader | None, Path, Path | None], Body]


@final
class World:
    """Trainers, pipeline stages and servers that train one DLRM; made by its class methods.

    It computes what the command `train` does with the same configuration and rows, bit for bit.
    """

    def __init__(self, settings: Settings, loader: Loader | None, make: Make) -> None:
        self._settings = settings
        self._loader = loader
        self._life = Life(lambda folder, source: make(settings, loader, folder, source))

    @classmethod
    def in_process(
        cls,
        spec: ModelSpec,
        loader: Loader | None = None,
        *,
        trainers: int | None = None,
        cuts: Sequence[str] | None = None,
        servers: int | None = None,
        gradient: GradientMethod | str | None = None,
        batch_size: int | None = None,
        config: Keys = (),
    ) -> World:
        """A world whose ranks are objects of this process: for notebooks, tests and studies.

        What is not given is as in conf/: two trainers of three stages, one server, batches of 128.

        Args:
            spec: the model; see `ModelSpec`.
            loader: `loader(trainer, trainers)` gives the batches of one trainer for one epoch;
                None where each step is handed its batches.
            trainers: data-parallel replicas.
            cuts: layers after which the model is split into stages: ["bottom.2", "top.2"].
            servers: parameter servers of the dense weights; 0 only with one trainer.
            gradient: how gradients are compressed: a record such as `Dct(density=0.01)`.
            batch_size: rows of each trainer's batch.
            config: any other keys of the configuration, {"optimizer.lr": 0.05}, or overrides as on
                a command line, ["+experiment=dct_levels", "embedding.lr=0.1"].

        Raises:
            ConfigError: with all faults, one line each, each naming its key and value.
        """
        named = named_keys(trainers, cuts, servers, batch_size)
        return cls(settings_of(spec, "in_process", named, gradient, config), loader, InProcess)

    @classmethod
    def processes(
        cls,
        spec: ModelSpec,
        loader: Loader | None = None,
        *,
        trainers: int | None = None,
        cuts: Sequence[str] | None = None,
        servers: int | None = None,
        gradient: GradientMethod | str | None = None,
        batch_size: int | None = None,
        config: Keys = (),
    ) -> World:
        """A world whose ranks are processes of this machine, which compute at the same time.

        Each worker makes the loader for itself and reads the batches of its trainer there; a
        program may also hand batches to `step`, which are then sent to the workers. A rank that is
        killed or fails ends the world with an error that names it.

        Args:
            spec: as of `in_process`; so are all that are not named here.
            loader: a function at the top of a module, or a `functools.partial` of one with plain
                values: ranks import it by its name. It must give the same batches each time.
            trainers: data-parallel replicas.
            cuts: layers after which the model is split into stages.
            servers: parameter servers of the dense weights.
            gradient: how gradients are compressed.
            batch_size: rows of each trainer's batch.
            config: any other keys of the configuration.

        Raises:
            ConfigError: see `in_process`; or no other process can import the loader.
            RunFailedError: a rank could not begin.
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
        named = [f"{count} {what}{'s' * (count > 1)}" for what, count in parts.items() if count]
        state = f"step {self.steps:,}" if self._life.over is None else f"over: {self._life.over}"
        return f"<World {parallel.world}: {', '.join(named)}; {state}>"

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self._settings.spec

    @property
    def config(self) -> Config:
        """The whole configuration."""
        return self._settings.config

    @property
    def steps(self) -> int:
        """Training steps done, those before a checkpoint that was loaded included."""
        return self._life.body.steps

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes that all ranks have sent in training steps, by class of traffic.

        They begin at 0 where a checkpoint is loaded; those of a world that is over cannot be read.
        In one process what trainers of `embedding=fused` send each other of tables is not counted.
        """
        return {traffic: counts["bytes"] for traffic, counts in self._counts().items()}

    @property
    def dense_bytes(self) -> dict[str, int]:
        """What the same messages would have taken as float32, by class of traffic."""
        name = "dense_equivalent_bytes"
        return {traffic: counts[name] for traffic, counts in self._counts().items()}

    def step(self, batches: Any = None) -> StepResult:
        """Learn from one batch of each trainer.

        Args:
            batches: one batch of `trainers * batch_size` rows, of which each trainer gets a part in
                order; or a list of one batch for each trainer. A batch is (dense, ids, label) as
                arrays of numpy or torch: float (rows, dense columns), int (rows, tables) or a
                KeyedJaggedTensor, 0 or 1 (rows,). None takes the next batch of each trainer's
                loader, and begins it anew after its end.

        Raises:
            DataError: a batch is wrong, or a loader has failed; no step was begun.
            DivergedError: the loss is not finite, which ends the world.
        """
        with self._life.turn():
            if batches is not None:
                columns, trainers = self._settings.columns, self.config.parallel.trainers
                return self._learn(columns.of_trainers(batches, trainers, self.steps))
            if not self._filled():
                self._end_epoch()
                if not self._filled():
                    raise DataError("loader: an epoch without a batch for each trainer")
            return self._learn(None)

    def epoch(self) -> Iterator[StepResult]:
        """Learn from the loaders until the first of them ends; gives what each step measured.

        Where another still had a batch that one is left out, which a warning says.
        After a `break` the next call goes on in the same pass.

        Raises:
            DataError, DivergedError: see `step`.
        """
        while True:
            with self._life.turn():
                if not self._filled():
                    self._end_epoch()
                    return
                result = self._learn(None)
            yield result

    def drain(self) -> StepResult:
        """Bring batches in flight to their end; with `schedule=dsp`, after the last step."""
        with self._life.going_on():
            return self._result(self._life.body.drain())

    def evaluate(self, batches: Iterable[Any]) -> BinaryScores:
        """Score the master weights.

        Args:
            batches: as those of `step`, of any number of rows.

        Raises:
            DataError: a batch is wrong, or none has a row.
        """
        metrics, is_empty = BinaryMetrics(), True
        for logit_B, label_B in self._scored(batches, labelled=True):
            metrics.add(logit_B, label_B)
            is_empty = False
        if is_empty:
            raise DataError("evaluate: no batch with a row to score")
        return metrics.scores()

    def predict(self, batches: Iterable[Any]) -> Floats:
        """Probabilities of label 1 of rows; batches as `evaluate` takes them, or without labels."""
        logits = [logit_B for logit_B, _ in self._scored(batches, labelled=False)]
        logit_R = np.concatenate(logits) if logits else np.empty(0, np.float32)
        return torch.from_numpy(logit_R).sigmoid().numpy()

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all weights, and of what optimizers remember of them, by name.

        `bottom.1.weight` (out, in), `top.2.bias`, `embedding.3.weight` (rows, dimension) …
        """
        with self._life.going_on():
            return self._life.body.tensors()

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint of all that is needed to go on; returns its folder.

        Args:
            folder: gets `checkpoints/step_00000100`, as a run folder of `train` has it.

        Raises:
            ResourceError: it cannot be written.
        """
        with self._life.going_on():
            saved = self._life.body.save()
        target = Path(folder) / "checkpoints" / saved.name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.move(saved, partial)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        except OSError as error:
            raise ResourceError(f"{target}: cannot be written: {error.strerror}") from error
        return target

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint; all ranks begin anew with it, and loaders with their epoch.

        Args:
            folder: a checkpoint, or a folder that holds some, of a world or of `train`; its newest.

        Raises:
            DataError: there is none, it is damaged, or of another model; says which key differs.
        """
        with self._life.turn():
            source = find(Path(folder)).absolute()
            check_weights_of(source, self._settings)  # before ranks are started with it
            self._life.begin_again(source)

    def close(self) -> None:
        """End all ranks; a second call does nothing."""
        self._life.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _learn(self, batches: Sequence[Batch] | None) -> StepResult:
        with self._life.going_on():
            return self._result(self._life.body.learn(batches))

    def _result(self, metrics: StepMetrics) -> StepResult:
        return result_of(metrics, self.steps, self.config)

    def _filled(self) -> bool:
        if self._loader is None:
            raise DataError("loader = None: hand the batches to `step`, or give the world a loader")
        try:
            return self._life.body.fill()
        except RunFailedError as error:
            self._life.fail(error)
            raise

    def _end_epoch(self) -> None:
        with self._life.going_on():
            left_out = self._life.body.end_epoch()
        if left_out:
            trainers = ", ".join(map(str, left_out))
            warnings.warn(
                f"loader: an epoch ended where others still had a batch (of trainers {trainers}), "
                "which nobody has learned from",
                stacklevel=3,
            )

    def _scored(self, batches: Iterable[Any], labelled: bool) -> Iterator[tuple[Floats, Floats]]:
        """Logits and labels of batches, in their order."""
        if is_one(batches):
            raise DataError("evaluation: this is one batch, must be several, such as [batch]")
        with self._life.going_on():
            self._life.body.begin_evaluation()
        columns = self._settings.columns
        # A wrong batch is found here, where all ranks wait.
        given = (
            columns.batch(one, f"evaluation, batch {number}", labelled=labelled)
            for number, one in enumerate(batches)
        )
        # Of a batch without rows no rank has anything to say.
        some = (batch for batch in given if len(batch.label_B))
        while group := list(islice(some, self.config.parallel.trainers)):
            with self._life.going_on():
                logits = self._life.body.predict(group)
            yield from ((one, batch.label_B) for one, batch in zip(logits, group, strict=True))

    def _counts(self) -> Mapping[str, Mapping[str, int]]:
        with self._life.going_on():
            return self._life.body.counts()
