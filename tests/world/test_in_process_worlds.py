"""Worlds that a program drives, held against the command `train`."""

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from patience import HANG_SECONDS
from small_disk import needs_mount, small_disk
from world_rows import (
    BATCH,
    assert_same_tensors,
    global_batches,
    losses,
    small_spec,
    test_batches,
    tuples_of,
)
from world_runs import Trained, summary, tensors

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.train.in_process import InProcessEngine
from dlrm_hybrid.types import ConfigError, DataError, DivergedError, DlrmError, ResourceError
from dlrm_hybrid.world.batches import KEYS
from dlrm_hybrid.world.in_process import InProcess
from dlrm_hybrid.world.world import World

STEPS = 20
HYBRID = ("parallel=hybrid", "parallel.world=in_process")


def assert_weights(world: World, folder: Path, step: int) -> None:
    """The world has learned what a run has, to the bit."""
    expected, found = tensors(folder, step), world.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.tobytes() == found[name].numpy().tobytes(), name


LAYOUTS = [
    (1, [], 0, {}),
    (2, ["bottom.2", "top.2"], 2, {"gradient": "dct", "activation": "dct"}),
    (
        2,
        ["bottom.2"],
        1,
        {
            **{"sync": "bounded", "schedule": "gpipe", "schedule.microbatches": 2},
            **{"embedding": "served", "parallel.table_servers": 2},
        },
    ),
]


@pytest.mark.parametrize(("trainers", "cuts", "servers", "keys"), LAYOUTS)
def test_a_world_is_a_run_of_train(
    trainers: int, cuts: list[str], servers: int, keys: dict, shards: Shards, trained: Trained
) -> None:
    layout = [
        f"parallel.trainers={trainers}",
        f"parallel.cuts=[{','.join(cuts)}]",
        f"parallel.servers={servers}",
        *(f"{key}={value}" for key, value in keys.items()),
    ]
    options = ("telemetry.every=1", f"train.steps={STEPS}", "checkpoint.every=10")
    folder = trained("run", *HYBRID, *options, *layout)
    world = World.in_process(
        small_spec(shards),
        trainers=trainers,
        cuts=cuts,
        servers=servers,
        batch_size=BATCH,
        config=keys,
    )
    with world:
        before = world.state_dict()
        found = [
            world.step(list(batches)).loss
            for batches in zip(
                *(tuples_of(shards, one, trainers, STEPS) for one in range(trainers)), strict=True
            )
        ]
        assert found == losses(folder)
        assert_weights(world, folder, STEPS)
        after = world.state_dict()
        for name in ("bottom.1.weight", "top.1.weight", "embedding.3.weight"):
            assert (after[name] - before[name]).abs().max() > 1e-4, name
        scores, expected = world.evaluate(test_batches(shards)), summary(folder)["test"]
        assert scores.log_loss == expected["loss"]
        assert scores.auc == expected["auc"]
        world.load(folder / "checkpoints" / f"step_{STEPS // 2:08d}")
        handed = (tuples_of(shards, one, trainers, STEPS) for one in range(trainers))
        for batches in [*zip(*handed, strict=True)][STEPS // 2 :]:
            world.step(list(batches))
        assert_same_tensors(world.state_dict(), after)


@contextmanager
def default(choose: Any, value: Any, after: Any) -> Iterator[None]:
    """A default of torch, inside."""
    choose(value)
    try:
        yield
    finally:
        choose(after)


def small_world(shards: Shards, **options: Any) -> World:
    """Two trainers of two stages and a server, compressed."""
    return World.in_process(
        small_spec(shards),
        **{"trainers": 2, "cuts": ["bottom.2"], "servers": 1, "batch_size": BATCH, **options},
    )


def test_a_batch_of_all_trainers_is_split_in_order(shards: Shards) -> None:
    with small_world(shards) as one, small_world(shards) as other:
        for dense, ids, label in global_batches(shards, 3):
            tensors = (torch.from_numpy(dense), torch.from_numpy(ids), torch.from_numpy(label))
            halves = [tuple(array[:BATCH] for array in tensors)]
            halves.append(tuple(array[BATCH:] for array in tensors))
            assert one.step(tensors) == other.step(halves)
        assert one.steps == 3
        assert one.bytes == other.bytes
        assert one.bytes["gradient_push"] > 0
        # A frame's head on each of 3 steps × 2 trainers × 2 stages.
        assert 0 < one.bytes["gradient_push"] - one.dense_bytes["gradient_push"] < 12 * 200


def test_a_loader_serves_all_epochs(shards: Shards) -> None:
    def load(trainer: int, trainers: int) -> Iterator[tuple]:
        return tuples_of(shards, trainer, trainers, 3)

    with small_world(shards) as one, small_world(shards, loader=load) as other:
        batches = global_batches(shards, 3)
        handed = [one.step(batch) for batch in (*batches, *batches, batches[0])]
        taken = [*other.epoch(), *other.epoch(), other.step()]
        assert taken == handed


def test_uneven_loaders_end_with_the_first_and_say_so(shards: Shards) -> None:
    def load(trainer: int, trainers: int) -> Iterator[tuple]:
        return tuples_of(shards, trainer, trainers, 2 + trainer)

    with small_world(shards, loader=load) as world:
        with pytest.warns(UserWarning, match="trainers 1"):
            assert len(list(world.epoch())) == 2
        assert world.step().step == 3


def test_a_world_goes_on_from_what_it_saved(shards: Shards, tmp_path: Path) -> None:
    batches = global_batches(shards, 10)
    options = {"gradient": "dct", "config": {"gradient.density": 0.1, "optimizer": "adagrad"}}
    with small_world(shards, **options) as world:
        for batch in batches[:5]:
            world.step(batch)
        saved = world.save(tmp_path)
        assert saved == tmp_path / "checkpoints" / "step_00000005"
        expected = [world.step(batch) for batch in batches[5:]]
        end = world.state_dict()
        world.load(tmp_path)
        assert world.steps == 5
        assert [world.step(batch) for batch in batches[5:]] == expected
        assert_same_tensors(world.state_dict(), end)
    with small_world(shards, **options) as other:
        other.load(saved)
        assert [other.step(batch) for batch in batches[5:]] == expected
        with pytest.raises(DataError, match="model.embedding_dim"):
            spec = replace(small_spec(shards), embedding_dim=8, bottom=(13, 32, 16, 8))
            with World.in_process(spec, **{**options, "cuts": ["bottom.2"]}) as wide:
                wide.load(saved)


def test_commands_say_that_only_the_program_knows_the_columns_of_its_batches(
    shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_world(shards) as world:
        saved = world.save(tmp_path)
    (tmp_path / "rows.csv").write_text("a\n1\n")
    for verb, more in {
        "evaluate": [],
        "export": [f"export.output={tmp_path / 'out'}"],
        "predict": [
            f"predict.rows={tmp_path / 'rows.csv'}",
            f"predict.output={tmp_path / 's.csv'}",
        ],
    }.items():
        assert run(["dlrm_hybrid", verb, f"{verb}.checkpoint={tmp_path}", *more]) == 3
        told = f"{saved}: was saved by a program that hands its own batches over (World.save)"
        assert told in capsys.readouterr().err


def test_batches_in_flight_are_drained_and_saved(shards: Shards, tmp_path: Path) -> None:
    stale = {"schedule": "dsp", "schedule.delays": [1, 0], "schedule.staleness": [2, 0]}
    batches = global_batches(shards, 8)
    with small_world(shards, config=stale) as world:
        rows = [world.step(batch).rows for batch in batches[:4]]
        assert rows[0] == 0
        assert rows[-1] == 2 * BATCH
        world.save(tmp_path)
        rest = [world.step(batch) for batch in batches[4:]]
        last = world.drain()
        assert sum(rows) + sum(one.rows for one in rest) + last.rows == 8 * 2 * BATCH
        world.load(tmp_path)
        assert [world.step(batch) for batch in batches[4:]] == rest
        assert world.drain() == last


def test_predictions_are_those_of_the_scores(shards: Shards) -> None:
    with small_world(shards) as world:
        world.step(global_batches(shards, 1)[0])
        p_R = world.predict(test_batches(shards, 100))
        label_R = np.concatenate([one.label_B for one in test_batches(shards)])
        scores = world.evaluate(test_batches(shards, 300))
        assert len(p_R) == scores.rows
        assert scores.accuracy == ((p_R > 0.5) == label_R).mean()


def learned(shards: Shards, folder: Path) -> list[Any]:
    """What a world gives for all that it does."""
    batch, other = global_batches(shards, 2)
    with small_world(shards) as world:
        found = [world.step(batch), world.evaluate([other]), world.save(folder).name]
        world.load(folder)
        return [*found, world.step(other), world.predict([other]).tobytes(), world.state_dict()]


def modes() -> tuple[Any, ...]:
    kinds = torch.get_default_dtype(), torch.get_default_device()
    return (*kinds, torch.is_grad_enabled(), torch.get_num_threads())


def test_the_modes_of_the_program_change_nothing(shards: Shards, tmp_path: Path) -> None:
    expected, threads = learned(shards, tmp_path / "plain"), torch.get_num_threads()
    for number, mode in enumerate(
        (
            torch.no_grad,
            torch.inference_mode,
            partial(torch.autocast, "cpu", torch.bfloat16),
            partial(default, torch.set_default_dtype, torch.float64, torch.float32),
            partial(default, torch.set_default_device, "meta", None),
            partial(default, torch.set_num_threads, threads + 1, threads),
        )
    ):
        with mode():
            found = learned(shards, tmp_path / str(number))
            before = modes()
        assert found[:-1] == expected[:-1], mode
        assert_same_tensors(found[-1], expected[-1])
        with mode():
            assert modes() == before


def test_a_step_is_not_mixed_with_half_precision_on_a_gpu(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU autocast can be set for one all the same."""
    mixed: list[bool] = []
    learn = InProcessEngine.learn

    def watched(*arguments: Any) -> Any:
        mixed.append(torch.is_autocast_enabled("cuda"))
        return learn(*arguments)

    monkeypatch.setattr(InProcessEngine, "learn", watched)
    with (
        small_world(shards) as world,
        default(partial(torch.set_autocast_enabled, "cuda"), True, False),
    ):
        world.step(next(iter(global_batches(shards, 1))))
    assert mixed == [False]


def test_an_epoch_that_was_left_goes_on(shards: Shards) -> None:
    def load(trainer: int, trainers: int) -> Iterator[tuple]:
        return tuples_of(shards, trainer, trainers, 3)

    with small_world(shards, loader=load) as one, small_world(shards, loader=load) as other:
        first = next(iter(one.epoch()))
        assert [first, *one.epoch()] == list(other.epoch())


def test_ctrl_c_while_the_old_ranks_end_leaves_loaders_at_their_first_epoch(
    shards: Shards, tmp_path: Path, monkeypatch: Any
) -> None:
    batches = list(tuples_of(shards, 0, 1, 3))
    with small_world(shards, trainers=1, loader=lambda *_: batches) as world:
        world.step()
        folder = world.save(tmp_path)
        world.step()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(InProcess, "close", lambda _: signal.raise_signal(signal.SIGINT))
            world.load(folder)
        assert world.steps == 1
        loss = world.step().loss
        world.load(folder)
        assert world.step(batches[0]).loss == loss


def test_bytes_begin_again_with_a_checkpoint(shards: Shards, tmp_path: Path) -> None:
    batch = global_batches(shards, 1)[0]
    with small_world(shards) as world:
        world.step(batch)
        sent = world.bytes
        world.load(world.save(tmp_path))
        assert set(world.bytes.values()) <= {0}
        world.step(batch)
        assert world.bytes == sent
    with pytest.raises(DlrmError, match="cannot go on: it has been closed"):
        assert world.bytes


def test_a_loss_that_is_not_finite_ends_the_world(shards: Shards) -> None:
    dense, ids, label = global_batches(shards, 1)[0]
    with small_world(shards, config={"optimizer.lr": 1e18}) as world:
        with pytest.raises(DivergedError, match="optimizer.lr"):
            for _ in range(5):
                world.step((dense, ids, label))
        with pytest.raises(DlrmError, match="cut off by DivergedError"):
            world.step((dense, ids, label))


@pytest.mark.parametrize("make", [World.in_process, World.processes])
def test_tables_larger_than_the_machine_are_refused(make: Any, shards: Shards) -> None:
    spec = replace(small_spec(shards), table_rows=(2**40,) * len(shards.table_rows))
    with pytest.raises(ResourceError, match="embedding tables of .* rows need .* GB"):
        make(spec)


def test_all_faults_of_the_arguments_are_named(shards: Shards) -> None:
    with pytest.raises(ConfigError) as caught:
        small_world(
            shards,
            trainers=0,
            cuts=["bottom.9"],
            gradient="dcct",
            config={"optimizer.lr": -1, "train.sed": 3},
        )
    for text in ("parallel.trainers = 0", "bottom.9", "dcct", "optimizer.lr = -1", "train.sed"):
        assert text in str(caught.value)


@pytest.mark.parametrize("wrong", ["train.seed=1", ["train.seed=1", 5], 3])
def test_what_is_no_mapping_or_list_of_overrides_is_refused(wrong: Any, shards: Shards) -> None:
    with pytest.raises(ConfigError, match="1 fault\n  config = .*must be a mapping or a list"):
        small_world(shards, config=wrong)


def test_numbers_of_numpy_are_numbers(shards: Shards) -> None:
    numbers = {"optimizer.lr": np.float32(0.5), "telemetry.tensorboard": np.bool_(False)}
    size = np.array([BATCH])[0]
    with small_world(shards, trainers=np.int64(2), batch_size=size, config=numbers) as world:
        assert world.config.parallel.trainers == 2
        assert world.config.optimizer.lr == 0.5
        assert world.config.telemetry.tensorboard is False
        assert world.step(global_batches(shards, 1)[0]).rows == 2 * BATCH


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (["embedding=served", "parallel.table_servers=1", "sync=async"], "sync = 'async'"),
        (["optimizer.schedule=linear"], "needs train.steps"),
        (["parallel.elastic=true", "embedding=served", "parallel.table_servers=1"], "elastic"),
        (["train.patience=3", "train.evaluate_every=5"], "train.patience"),
        (["checkpoint.resume=elsewhere"], "by its method `load`"),
    ],
)
def test_what_only_a_command_can_do_is_refused(keys: list[str], text: str, shards: Shards) -> None:
    with pytest.raises(ConfigError, match=text):
        small_world(shards, config=keys)


def test_closing_waits_for_what_another_thread_does(shards: Shards) -> None:
    batches, said = global_batches(shards, 4), list[str]()
    world, begun = small_world(shards), threading.Event()

    def train() -> None:
        try:
            while True:
                for batch in batches:
                    world.step(batch)
                    begun.set()
        except DlrmError as error:
            said.append(str(error))

    thread = threading.Thread(target=train)
    thread.start()
    assert begun.wait(HANG_SECONDS)
    world.close()
    thread.join(HANG_SECONDS)
    assert said == ["this world cannot go on: it has been closed"]


def test_worlds_of_several_threads_leave_the_types_of_the_program(shards: Shards) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with small_world(shards) as one, small_world(shards) as other:
            batches = global_batches(shards, 20)
            threads = [
                threading.Thread(target=lambda world=world: [*map(world.step, batches)])
                for world in (one, other)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert one.steps == other.steps == 20
            assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@needs_mount
def test_a_full_disk_ends_no_world(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = global_batches(shards, 1)[0]
    with small_disk(tmp_path / "full", 64) as full:
        with small_world(shards) as world:
            with pytest.raises(ResourceError, match="full.*cannot be written"):
                world.save(full)
            assert not [*full.rglob(".*.partial")]
            assert world.step(batch).step == 1
        monkeypatch.setattr(tempfile, "tempdir", str(full))
        with small_world(shards) as world:
            with pytest.raises(ResourceError, match="full/.* No space left on device .TMPDIR.$"):
                world.save(tmp_path / "elsewhere")
            assert world.step(batch).step == 1


def test_a_wrong_batch_begins_no_step(shards: Shards) -> None:
    (dense, ids, label), good = global_batches(shards, 2)
    with small_world(shards) as world, small_world(shards) as other:
        wrong = ids.copy()
        wrong[70, 3] = shards.table_rows[3]
        for batch, text in (
            ((dense, wrong, label), f"id {shards.table_rows[3]} of row 70 in embedding.4"),
            ((dense[:100], ids[:100], label[:100]), "100 rows, must be 128"),
            ((np.full_like(dense, np.nan), ids, label), "dense column 0 of row 0 is nan"),
            ([(dense, ids, label)], "1 batches, must be one for each of 2 trainers"),
            ({"dense": dense, "ids": ids}, "a batch is"),
        ):
            with pytest.raises(DataError, match=text):
                world.step(batch)
        assert world.steps == 0
        assert world.step(good) == other.step(good)


@pytest.mark.parametrize("kind", [tuple, list, lambda one: dict(zip(KEYS, one, strict=True))])
def test_what_scores_batches_says_that_one_is_none(kind: Any, shards: Shards) -> None:
    batch = kind(global_batches(shards, 1)[0])
    with small_world(shards) as world:
        for call in (world.evaluate, world.predict):
            with pytest.raises(DataError, match=r"one batch, must be several, such as \[batch\]"):
                call(batch)
        assert world.evaluate([batch, batch, batch]).rows == 3 * 128


def test_a_loader_that_fails_is_named_and_no_step_begins(shards: Shards, tmp_path: Path) -> None:
    def load(trainer: int, trainers: int) -> Iterator[tuple]:
        yield from tuples_of(shards, trainer, trainers, 1)
        if trainer:
            raise ValueError("the disk is gone")
        yield from tuples_of(shards, trainer, trainers, 1)

    with small_world(shards, loader=load) as world:
        world.step()
        with pytest.raises(DataError, match="trainer 1, epoch 1, batch 1.*disk is gone") as caught:
            world.step()
        assert isinstance(caught.value.__cause__, ValueError)
        assert world.steps == 1
        assert world.save(tmp_path).is_dir()


def test_ctrl_c_in_a_loader_ends_no_epoch(shards: Shards) -> None:
    def load(trainer: int, trainers: int) -> Iterator[tuple]:
        for number, batch in enumerate(tuples_of(shards, trainer, trainers, 3)):
            if trainer and number == 1:
                signal.raise_signal(signal.SIGINT)
            yield batch

    with small_world(shards, loader=load) as world:
        found: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            found.extend(one.step for one in world.epoch())
        found.extend(one.step for one in world.epoch())
        assert found == [1, 2, 3]


def test_ctrl_c_that_ends_the_processes_of_a_loader_is_one(shards: Shards) -> None:
    def load(trainer: int, trainers: int) -> Iterator[tuple]:
        yield from tuples_of(shards, trainer, trainers, 1)
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("DataLoader worker exited unexpectedly")

    with small_world(shards, trainers=1, servers=0, loader=load) as world:
        world.step()
        with pytest.raises(KeyboardInterrupt) as caught:
            world.step()
        assert "exited unexpectedly" in str(caught.value.__context__)
        assert world.step().step == 2


def test_a_wrong_batch_of_a_loader_counts(shards: Shards) -> None:
    def load(trainer: int, trainers: int) -> Iterator[tuple]:
        one, two, three = tuples_of(shards, trainer, trainers, 3)
        yield from (one, tuple(array[:5] for array in two), three)
        raise ValueError("the disk is gone")

    with small_world(shards, loader=load) as world:
        world.step()
        with pytest.raises(DataError, match="epoch 1, batch 1: 5 rows"):
            world.step()
        world.step()
        with pytest.raises(DataError, match="epoch 1, batch 3: the loader failed"):
            world.step()


def test_a_world_that_was_cut_off_says_so(shards: Shards, monkeypatch: Any) -> None:
    with small_world(shards) as world:
        batch = global_batches(shards, 1)[0]

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(InProcessEngine, "learn", interrupted)
            world.step(batch)
        with pytest.raises(DlrmError, match="cannot go on: it was cut off by KeyboardInterrupt"):
            world.step(batch)
    with pytest.raises(DlrmError, match="cannot go on"):
        world.evaluate([batch])
