"""The frames of a step of a planned world: how many bytes each has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from dlrm_hybrid.compress.activation.methods import METHODS as ACTIVATION_METHODS
from dlrm_hybrid.compress.gradient.methods.deft import Deft
from dlrm_hybrid.compress.gradient.methods.terngrad import TernGrad
from dlrm_hybrid.parallel.topology import DenseTensor
from dlrm_hybrid.plan.layout import Layout
from dlrm_hybrid.plan.sizes import (
    FRAME_BYTES,
    ROW_LEVELS_BYTES,
    VALUE_BYTES,
    activation_bytes,
    activation_gradient_bytes,
    dense_bytes,
    frame_bytes,
    id_set_bytes,
    levels_bytes,
    sparse_bytes,
    union,
)
from dlrm_hybrid.telemetry.traffic import Traffic

ID_BYTES = 4
COUNT_BYTES = 4
EXCHANGE_HEADER_BYTES = 8  # length of the ids, rows of the batch; of lists most ids of a table, too
LENGTH_BYTES = 4  # of a bag, or of a message
# Messages between trainers have room for one that is a little longer; measured over 500 steps.
ROOM_OF_IDS = 1.05
ROOM_OF_LEVELS = 1.13
TERNARY_HEAD_BYTES, LEVELS_HEAD_BYTES = 4, 8
CODES_PER_BYTE = {"bits": 4, "trits": 5}


@dataclass(frozen=True, slots=True)
class Round:
    """A round in which the trainers of a stage agree before they push.

    Attributes:
        leader_bytes: contribution of the trainer whose turn it is.
        other_bytes: of each other trainer.
        result_bytes: what each trainer is sent.
    """

    leader_bytes: float
    other_bytes: float
    result_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """Bytes of each frame of a step; of embeddings on average.

    Attributes:
        push: by stage and server.
        version: the same, what one trainer is sent.
        rounds: by stage, in their order.
        activation: of a micro-batch, by boundary.
        gradient: the same, backward.
        exchange: between two trainers that share tables, in the order of the collectives of a
            step; the last one follows backward.
        lookup: what a trainer asks each table server.
        rows: what it is answered.
        update: what it sends it.
    """

    push: Mapping[tuple[int, int], float]
    version: Mapping[tuple[int, int], float]
    rounds: Mapping[int, tuple[Round, ...]]
    activation: tuple[float, ...]
    gradient: tuple[float, ...]
    exchange: tuple[float, ...] = ()
    lookup: float = 0.0
    rows: float = 0.0
    update: float = 0.0


def frames(world: Layout) -> Frames:
    """All frames of a step."""
    topology, embedding = world.topology, world.config.embedding
    buckets = sorted({(one.stage, one.server) for one in world.tensors if topology.servers})
    served = _served(world) if embedding.name == "served" else (0.0, 0.0, 0.0)
    shared = embedding.name == "fused" and topology.trainers > 1
    return Frames(
        push={key: _push(world, world.bucket(*key)) for key in buckets},
        version={key: _version(world, world.bucket(*key)) for key in buckets},
        rounds={
            stage: _rounds(world, stage) if topology.servers else ()
            for stage in range(topology.stages)
        },
        activation=tuple(_activation(world, cut) for cut in range(topology.stages - 1)),
        gradient=tuple(_activation_gradient(world, cut) for cut in range(topology.stages - 1)),
        exchange=_exchange(world) if shared else (),
        lookup=served[0],
        rows=served[1],
        update=served[2],
    )


def bytes_by_class(world: Layout, sizes: Frames) -> dict[Traffic, float]:
    """Sent by all ranks in a step of every trainer, each message counted once."""
    trainers, microbatches = world.topology.trainers, world.config.schedule.microbatches
    pushed = sum(sizes.push.values()) * trainers
    for rounds in sizes.rounds.values():
        for one in rounds:
            pushed += one.leader_bytes + (trainers - 1) * one.other_bytes
            pushed += trainers * one.result_bytes
    exchanged = sum(sizes.exchange) * trainers * (trainers - 1)
    asked = sizes.lookup + sizes.rows + sizes.update
    return {
        Traffic.GRADIENT_PUSH: pushed,
        Traffic.PARAMETER_PULL: sum(sizes.version.values()) * trainers,
        Traffic.ACTIVATION: sum(sizes.activation) * microbatches * trainers,
        Traffic.ACTIVATION_GRADIENT: sum(sizes.gradient) * microbatches * trainers,
        Traffic.EMBEDDING: exchanged + asked * trainers * world.topology.table_servers,
    }


def gradient_density(world: Layout, tensor: DenseTensor) -> float:
    """Share of the elements of a tensor that one trainer chooses."""
    wanted = max(getattr(world.config.gradient, "density", 1.0), 1 / tensor.count)
    return min(1.0, world.densities.gradient.get(tensor.name, wanted))


def pull_density(world: Layout, tensor: DenseTensor) -> float:
    """Share of the elements of a tensor that a version changes for a trainer."""
    config, own = world.config, gradient_density(world, tensor)
    if config.pull.left_out is not None:
        return max(1 - config.pull.left_out, 1 / tensor.count)
    if not config.gradient.is_sparse or config.optimizer.name == "momentum":
        return 1.0
    if _agree(world) or config.gradient.name == "randomk":
        return own
    return union(own, world.densities.distinct_trainers(world.topology.trainers))


def _agree(world: Layout) -> bool:
    """Whether all trainers send what all, or one of them, have chosen."""
    gradient = world.config.gradient
    if world.topology.trainers == 1:
        return False
    return "leader" in gradient.rounds()


def _push(world: Layout, bucket: list[DenseTensor]) -> float:
    gradient = world.config.gradient
    if isinstance(gradient, TernGrad):
        return frame_bytes(_ternary(world, gradient, one) for one in bucket)
    if not gradient.is_sparse:
        return frame_bytes(dense_bytes(one.count, "float32") for one in bucket)
    shared = gradient.rounds() == ("union",)
    precision = getattr(gradient, "precision", "float32")
    densities = [
        pull_density(world, one) if shared else gradient_density(world, one) for one in bucket
    ]
    return _update(bucket, densities, precision) * world.densities.push


def _version(world: Layout, bucket: list[DenseTensor]) -> float:
    config = world.config
    ternary = config.gradient
    if isinstance(ternary, TernGrad) and ternary.publishes_means:
        return frame_bytes(
            LEVELS_HEAD_BYTES + ceil(one.count * _level_bits(world.topology.trainers) / 8)
            if _is_ternary(world, ternary, one)
            else dense_bytes(one.count, "float32")
            for one in bucket
        )
    densities = [pull_density(world, one) for one in bucket]
    sent = _update(bucket, densities, config.pull.precision)
    return sent if min(densities) == 1 else sent * world.densities.version


def _update(bucket: list[DenseTensor], densities: list[float], precision: str) -> float:
    """Of a frame with some elements of each tensor."""
    kept = [density * one.count for one, density in zip(bucket, densities, strict=True)]
    pairs = zip(bucket, kept, strict=True)
    if precision == "levels":
        return frame_bytes([sum(levels_bytes(one.count, part) for one, part in pairs)])
    return frame_bytes(sparse_bytes(one.count, part, precision) for one, part in pairs)


def _level_bits(trainers: int) -> int:
    return math.ceil(math.log2(2 * trainers + 1))


def _is_ternary(world: Layout, settings: TernGrad, tensor: DenseTensor) -> bool:
    last = f"top.{len(world.config.model.top)}."
    return tensor.count >= settings.smallest and not tensor.name.startswith(last)


def _ternary(world: Layout, settings: TernGrad, tensor: DenseTensor) -> float:
    if not _is_ternary(world, settings, tensor):
        return dense_bytes(tensor.count, "float32")
    return TERNARY_HEAD_BYTES + ceil(tensor.count / CODES_PER_BYTE[settings.encoding])


def _rounds(world: Layout, stage: int) -> tuple[Round, ...]:
    """Of one stage; see `compress.gradient.collective`."""
    config, trainers = world.config, world.topology.trainers
    gradient = config.gradient
    tensors = [one for one in world.tensors if one.stage == stage]
    count = sum(one.count for one in tensors)
    chosen = sum(gradient_density(world, one) * one.count for one in tensors)
    rounds: list[Round] = []
    for op in gradient.rounds():
        if op == "max":
            assert isinstance(gradient, TernGrad)
            scales = frame_bytes(
                [COUNT_BYTES * sum(_is_ternary(world, gradient, one) for one in tensors)]
            )
            rounds.append(Round(scales, scales, scales))
        elif op == "leader" and isinstance(gradient, Deft):
            parts = sum(trainers if one.count * trainers > count else 1 for one in tensors)
            lists = 2 if gradient.budget == "exact" else 1
            plan = frame_bytes([COUNT_BYTES * parts] * lists)
            rounds.append(Round(plan, FRAME_BYTES, plan))
        elif op == "leader":
            led = frame_bytes([id_set_bytes([chosen], [count], count)])
            rounds.append(Round(led, FRAME_BYTES, led))
        else:
            own, united = chosen / trainers, chosen
            if not isinstance(gradient, Deft):
                own = chosen
                united = sum(pull_density(world, one) * one.count for one in tensors)
            mine, all_ = (frame_bytes([id_set_bytes([k], [count], count)]) for k in (own, united))
            rounds.append(Round(mine, mine, all_))
    return tuple(rounds)


def _activation(world: Layout, cut: int) -> float:
    """Of a micro-batch through a cut, forward."""
    keys, shape = world.config.activation, _boundary_shape(world, cut)
    count = shape[0] * shape[1]
    if keys.name == "dct":
        kept = _kept_of_row(world, cut, shape[1]) * shape[0]
        if (bits := keys.bits_at(cut)) is not None:
            return frame_bytes([activation_bytes(count, kept, bits)])
        rice = bool(keys.allow_rice)
        return frame_bytes([sparse_bytes(count, kept, keys.precision, shape[1], rice=rice)])
    if keys.name == "sketch":
        columns = max(1, round(shape[1] * (1 - keys.sparsity_at(cut))))
        return frame_bytes([4.0 * shape[0] * columns])
    return frame_bytes([dense_bytes(count, "float32")])


def _activation_gradient(world: Layout, cut: int) -> float:
    """Of a micro-batch through a cut, backward."""
    keys, shape = world.config.activation, _boundary_shape(world, cut)
    if keys.name not in ACTIVATION_METHODS or keys.name == "sketch":
        return frame_bytes([dense_bytes(shape[0] * shape[1], "float32")])
    kept = _kept_of_row(world, cut, shape[1]) * shape[0]
    if (bits := keys.bits_at(cut)) is not None:
        return frame_bytes([activation_gradient_bytes(kept, bits)])
    if keys.name == "dct":
        return frame_bytes([kept * VALUE_BYTES[keys.precision]])
    return frame_bytes([sparse_bytes(shape[0] * shape[1], kept, keys.precision)])


def _boundary_shape(world: Layout, cut: int) -> tuple[int, int]:
    config = world.config
    rows = config.train.batch_size // config.schedule.microbatches
    return rows, world.partition.stages[cut].output_width


def _kept_of_row(world: Layout, cut: int, width: int) -> float:
    measured = world.densities.activation.get(cut)
    if measured is not None:
        return measured * width
    return max(1, round(width * (1 - world.config.activation.sparsity_at(cut))))


def _exchange(world: Layout) -> tuple[float, ...]:
    """Between two trainers that share the tables, on average over all pairs."""
    keys, trainers = world.config.embedding, world.topology.trainers
    values = world.spec.embedding_dim * VALUE_BYTES[keys.comm_precision]
    tables = len(world.ids.rows)
    share = 1.0 if keys.sharding == "row_wise" else 1 / trainers
    if keys.deduplicate:
        distinct = sum(world.ids.distinct) * share
        ids = id_set_bytes(world.ids.distinct, world.ids.rows, _most_ids(world))
        header = EXCHANGE_HEADER_BYTES + (0 if world.ids.per_row is None else ID_BYTES)
        asked = header + ids * share * ROOM_OF_IDS
        if keys.levels:
            values = ROW_LEVELS_BYTES * ROOM_OF_LEVELS
            return asked, LENGTH_BYTES + distinct * values, LENGTH_BYTES + distinct * values
        return asked, distinct * values, distinct * values
    looked_up = world.config.train.batch_size * tables * share
    rows = looked_up * values, looked_up * values
    if world.ids.per_row is None:
        return looked_up * ID_BYTES, *rows
    ids = world.config.train.batch_size * world.ids.per_row * share
    return looked_up * LENGTH_BYTES, ids * ID_BYTES, *rows


def _served(world: Layout) -> tuple[float, float, float]:
    """Between a trainer and one table server, which owns every S-th row."""
    servers, keys = world.topology.table_servers, world.config.embedding
    rows = [ceil(one / servers) for one in world.ids.rows]
    distinct = [one / servers for one in world.ids.distinct]
    ids = id_set_bytes(distinct, rows, _most_ids(world))
    values = sum(distinct) * world.spec.embedding_dim * VALUE_BYTES[keys.comm_precision]
    return frame_bytes([16, ids]), frame_bytes([values]), frame_bytes([16, ids, values])


def _most_ids(world: Layout) -> int:
    """Of a batch in any table, repeated ones counted."""
    return round(world.config.train.batch_size * world.ids.most_per_row)
