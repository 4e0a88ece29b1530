"""From the configuration to the rows and their preparation; free of torch, for the supervisor."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from dlrm_hybrid.checkpoint.folder import RetentionPolicy
from dlrm_hybrid.checkpoint.folder import find as find_checkpoint
from dlrm_hybrid.comm.netem.plan import NetworkPlan, bits_per_second, seconds
from dlrm_hybrid.config.choices import Criteo, Emulated, Synthetic
from dlrm_hybrid.config.model import interaction_stage, spec_of
from dlrm_hybrid.config.model import pipeline as pipeline
from dlrm_hybrid.config.rules import server_leads
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text
from dlrm_hybrid.data.folder import PrepareOptions
from dlrm_hybrid.data.manifest import MANIFEST_FILE, Manifest, Semantics
from dlrm_hybrid.data.manifest import read as read_manifest
from dlrm_hybrid.data.preprocessing import PREPROCESSING_FOLDER, Preprocessing, read_kept
from dlrm_hybrid.data.profile import Profile, builtin, raw_name
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.schemas import reading as schemas
from dlrm_hybrid.data.sources.paths import find
from dlrm_hybrid.model.spec import DataShape, ModelShape
from dlrm_hybrid.parallel.sync import SyncPolicy
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.types import ConfigError, DataError

RAW_FOLDER = Path("data/raw")
PREPARED_FOLDER = Path("data/prepared")
PROFILE = "criteo_kaggle"
MOST_STEM = 40  # most characters of a raw file's name in a folder's name


def semantics(config: Config) -> Semantics:
    """The options that decide the meaning of rows."""
    data = config.data
    criteo = data if isinstance(data, Criteo) else None  # the schema of a table says it
    return Semantics(
        schema=schema(config),
        days=criteo and criteo.days,
        day_split=criteo and criteo.day_split,
        vocabulary=criteo and criteo.vocabulary,
        min_count=None if criteo is None else criteo.min_count,
        max_ind_range=None if criteo is None else criteo.max_ind_range,
        on_bad_row=data.on_bad_row,
    )


def schema(config: Config) -> Schema:
    """The schema of the rows: the configuration's, or else that of the rows themselves.

    Raises:
        ConfigError: the schema has faults.
        DataError: neither the configuration nor the rows have one.
    """
    data = config.data
    if data.name != "table":
        return schemas.builtin("criteo_kaggle" if data.name == "synthetic" else data.name)
    full = _table_schema(config)
    return full.without_split if data.progressive else full


def _table_schema(config: Config) -> Schema:
    data = config.data
    if data.schema is not None:
        return schemas.named(data.schema)
    there = data.prepared is not None and (Path(data.prepared) / MANIFEST_FILE).is_file()
    if not there and (earlier := base(config)):
        return earlier.schema
    return read_manifest(prepared_folder(config)).schema


def base(config: Config) -> Preprocessing | None:
    """The preprocessing of the run or checkpoint that `data.base` names; None for null.

    Raises:
        DataError: there is none, or it is damaged.
    """
    if config.data.base is None:
        return None
    path = Path(config.data.base)
    try:
        return read_kept(path if (path / PREPROCESSING_FOLDER).is_dir() else find_checkpoint(path))
    except DataError as error:
        raise DataError(f"data.base = {path}: {error}") from None


def prepare_options(config: Config, advice: str) -> PrepareOptions:
    """Options of `prepare` on this machine.

    Args:
        config: configuration of the command.
        advice: remedy for a folder made from something else, for an error message.
    """
    data = config.data
    # A folder named after all that decides its rows is the program's own, so it may replace it.
    has_own_name = data.name == "synthetic" and data.prepared is None
    return PrepareOptions(
        semantics=semantics(config),
        max_bad_rows=data.max_bad_rows,
        processes=data.processes or len(os.sched_getaffinity(0)),
        block_bytes=data.block_bytes,
        overwrite=config.prepare.overwrite or has_own_name,
        advice=advice,
        base=base(config),
        grows=data.grow,
    )


def many_processes(config: Config) -> bool:
    """Whether ranks are separate processes, connected over the network."""
    return config.parallel.name == "hybrid" and config.parallel.world == "processes"


def emulation(config: Config) -> NetworkPlan | None:
    """The network to emulate for this machine's ranks; None if they use the machine's own."""
    network = config.network
    if not isinstance(network, Emulated) or network.rate is None:
        return None
    return NetworkPlan(
        hosts=config.parallel.machines or topology(config).size,
        rate_bits_per_second=bits_per_second(network.rate),
        latency_seconds=None if network.latency is None else seconds(network.latency) or None,
    )


def link_rate(config: Config) -> int | None:
    """Rate of the links between ranks in bits per second, if configured."""
    rate = config.network.rate
    return None if rate is None else bits_per_second(rate)


def host(config: Config, rank: int) -> int:
    """The host of an emulated network that a rank is on: its machine, or one of its own."""
    machines = config.parallel.machines
    return rank if machines is None else topology(config).machine(rank, machines)


def placement(config: Config, machines: int) -> list[list[int]]:
    """The ranks on each of `machines` machines, in order."""
    world = topology(config)
    placed: list[list[int]] = [[] for _ in range(machines)]
    for rank in range(world.size):
        placed[world.machine(rank, machines)].append(rank)
    return placed


def rank_names(config: Config) -> list[str]:
    """Names of the processes of a run; a world of one process has one."""
    if not many_processes(config):
        return ["worker-0"]
    return [topology(config).name(rank) for rank in range(topology(config).size)]


def topology(config: Config) -> Topology:
    """Ranks and roles of a world."""
    return Topology(
        trainers=config.parallel.trainers,
        stages=len(config.parallel.cuts) + 1,
        servers=config.parallel.servers,
        interaction_stage=interaction_stage(config),
        table_servers=config.parallel.table_servers,
    )


def mates(config: Config, rank: int) -> frozenset[int]:
    """The ranks lost with this one while others go on, itself included: those of its trainer."""
    world = topology(config)
    if not config.parallel.elastic or rank >= world.num_workers:
        return frozenset()
    first = rank - rank % world.stages
    return frozenset(range(first, first + world.stages))


def shape_of(config: Config, rows: Manifest) -> ModelShape:
    """The shape of the model of these rows; raises ConfigError as `spec_of`."""
    schema = rows.schema
    data = DataShape(
        table_rows=schema.by_table(rows.table_rows),
        frozen=schema.frozen,
        loss_weights=tuple(schema.loss_weights.values()),
        table_of_column=schema.table_of_column,
    )
    return spec_of(config.model, data)


def policy(config: Config) -> SyncPolicy:
    """The sync policy of the dense weights."""
    return config.sync.policy(config.parallel)


def leader(config: Config) -> int:
    """The rank that decides for all and keeps the record.

    Server 0 leads if trainers do not wait for each other, or for a lost one.
    """
    world = topology(config)
    return world.server(0) if server_leads(config) else world.interaction_group[0]


def profile() -> Profile:
    """The profile of synthetic rows."""
    return builtin(PROFILE)


def raw_paths(config: Config) -> tuple[Path, ...]:
    """The raw files: named, matched by a pattern or in a folder; none for synthetic rows.

    Raises:
        ConfigError: there is no such file, or one is named twice.
    """
    return find(config.data.raw, "data.raw")


def prepared_folder(config: Config) -> Path:
    """The folder of shards; unless configured, its name depends on all that decides its contents.

    So rows of other files, another schema or other options never take its place. Without raw
    files, or without a schema, it is the fitting one among those in `data/prepared`.

    Raises:
        ConfigError: several fit.
    """
    data = config.data
    if data.prepared is not None:
        return Path(data.prepared)
    if data.name == "synthetic":
        options = repr((*semantics(config).options.values(),))
        return PREPARED_FOLDER / f"{Path(synthetic_name(config)).stem}-{_digest(options)}"
    raw, earlier = raw_paths(config), base(config)
    if not raw or (data.name == "table" and data.schema is None and earlier is None):
        return _one_prepared(config, [path.name for path in raw])
    what = semantics(config)
    files = [os.path.relpath(path) for path in raw]
    stem = raw[0].name.partition(".")[0][:MOST_STEM]
    more = [] if earlier is None else [earlier.manifest.meaning_xxh3, data.grow]
    more += what.schema.beside_repr
    decided = repr((*what.options.values(), what.schema, files, *more))
    return PREPARED_FOLDER / f"{data.name}-{stem}-{_digest(decided)}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()


def _one_prepared(config: Config, raw_names: Sequence[str]) -> Path:
    """The one folder that fits the configuration; a missing one if none does."""
    data = config.data
    expected = None if data.name == "table" and data.schema is None else semantics(config)
    there: list[Path] = []
    fitting: list[Path] = []
    for folder in (PREPARED_FOLDER / data.name, *sorted(PREPARED_FOLDER.glob(f"{data.name}-*"))):
        try:
            manifest = read_manifest(folder)
        except DataError:
            continue
        there.append(folder)
        names = [source.stamp.name for source in manifest.sources]
        same = expected is None or not manifest.semantics.differences(expected)
        fitting += [folder] if same and (not raw_names or names == raw_names) else []
    if len(fitting) > 1:
        several = ", ".join(map(str, fitting))
        fault = f"data.prepared = null: {several} fit; name one of them, or the files with data.raw"
        raise ConfigError(faults_text([fault]))
    if fitting:
        return fitting[0]
    # Whoever opens a folder that does not fit reports the differences.
    return there[0] if len(there) == 1 and not raw_names else PREPARED_FOLDER / data.name


def synthetic_name(config: Config) -> str:
    """Name of the raw file of synthetic rows, by all that decides its bytes."""
    assert isinstance(config.data, Synthetic), config.data
    return raw_name(config.data.rows, config.data.seed, profile())


def retention(config: Config) -> RetentionPolicy:
    """Rule for the checkpoints kept."""
    return RetentionPolicy(newest=config.checkpoint.keep, best=config.checkpoint.keep_best)
