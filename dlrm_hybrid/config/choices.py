"""The groups of a run that have several choices, a record for each: its keys and no other's.

What is set in a group's own class are the values of the choices that have no such key.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from typing_extensions import override

from dlrm_hybrid.bounds import (
    Bound,
    Count,
    Lag,
    Latency,
    LinkRate,
    Path,
    Paths,
    Positive,
    Seconds,
    Seed,
    Several,
)
from dlrm_hybrid.parallel.policies import Asynchronous, Lockstep, Rounds
from dlrm_hybrid.parallel.sync import SyncPolicy
from dlrm_hybrid.record import WEIGHTS, Choice, Effect, key

BlockRows = Annotated[int, Bound(ge=1, le=2**24)]
Days = Annotated[int, Bound(ge=2, le=1000)]
DaySplit = Literal["equal_rows", "files"]
Machines = Annotated[int, Bound(ge=2, le=4096)]
Modulus = Annotated[int, Bound(ge=0, lt=2**32)]
Pushes = Annotated[int, Bound(ge=1, le=64)]
Scale = Literal["trainers", "one"]
Servers = Annotated[int, Bound(ge=0, le=1024)]
Trainers = Annotated[int, Bound(ge=1, le=4096)]
World = Literal["processes", "in_process"]

ANY = Effect.EVALUATION
ROWS_FILES = Effect.NOTHING | Effect.EVALUATION
NEW, STATE = Effect.NEW_RUN, Effect.STATE


class _Data(Choice, effect=ANY):
    """Values of the choices of `data` that have no such key."""

    base: Path | None = None
    grow: bool = True
    follow: Path | None = None
    guess: Paths | None = None
    progressive: bool = False
    raw: Paths | None = None
    schema: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Data(_Data):
    """Where rows come from, what they mean and how they are read."""

    guess: Paths | None = key(
        None,
        "`prepare` writes a first schema for this file, or the first of several, to data.schema, "
        "to be edited",
        ROWS_FILES,
    )
    prepared: Path | None = key(
        None,
        "folder of prepared rows; null: one named after all that affects them, or the one that is "
        "there",
        ROWS_FILES | Effect.PATH,
    )
    on_bad_row: Literal["error", "skip", "quarantine"] = key(
        "error", "stop, drop the row, or write it to a quarantine file"
    )
    max_bad_rows: Count = key(
        1000, "skip and quarantine also stop beyond this many bad rows", ROWS_FILES
    )
    test_part: Literal["day", "first_half", "validation"] = key(
        "day",
        "rows to test on: the last day, or its first half as in facebookresearch/dlrm; "
        "validation: score only that part of a table",
        Effect.FREE | Effect.EVALUATION,
    )
    shuffle: bool = key(True, "visit training rows in a new order each epoch", WEIGHTS)
    shuffle_block_rows: BlockRows = key(65_536, "rows shuffled together in memory", WEIGHTS)
    shuffle_read_rows: BlockRows = key(1024, "consecutive rows per read", WEIGHTS)
    processes: Several | None = key(None, "threads of prepare; null is one per core", ROWS_FILES)
    block_bytes: Annotated[int, Bound(ge=65_536, le=2**30)] = key(
        8_388_608, "bytes of raw text parsed at a time", ROWS_FILES
    )


@dataclass(frozen=True, kw_only=True)
class Criteo(Data):
    """What all formats of Criteo's have. facebookresearch/dlrm uses: 7 days of equal rows,
    vocabulary all_days, min_count 0, max_ind_range 0, test_part first_half.
    """

    days: Days = key(7, "number of consecutive parts of the rows; the last one is the test part")
    day_split: DaySplit = key("equal_rows", "days of equally many rows, or one raw file per day")
    vocabulary: Literal["all_days", "train_days"] = key(
        "all_days",
        "days whose categories get ids; with train_days, categories seen only in the test part "
        "share id 0",
    )
    min_count: Count = key(0, "rarer categories share id 0; 0 keeps all")
    max_ind_range: Modulus = key(0, "take categories modulo this; 0 leaves them as they are")


@dataclass(frozen=True, kw_only=True)
class Synthetic(Criteo):
    """Synthetic rows with the marginals of Criteo Kaggle and labels sampled from a known teacher
    model; generated and prepared on first use.
    """

    name: ClassVar[str] = "synthetic"
    rows: Annotated[int, Bound(ge=1000, le=2**40)] = key(700_000, "rows to generate")
    seed: Seed = key(
        0, "seed for generating rows and their teacher model", Effect.SEED | Effect.EVALUATION
    )


@dataclass(frozen=True, kw_only=True)
class CriteoKaggle(Criteo):
    """Rows of Criteo's Display Advertising Challenge, or any in the same format."""

    name: ClassVar[str] = "criteo_kaggle"
    raw: Paths | None = key(
        None,
        "raw files, plain, .gz or .zst: train.txt; or several: [day_0.gz,day_1.gz]",
        ROWS_FILES | Effect.PATH,
    )


@dataclass(frozen=True, kw_only=True)
class Criteo1Tb(CriteoKaggle):
    """Rows of Criteo's 24 days of click logs, a file for each day, as MLPerf has used them."""

    name: ClassVar[str] = "criteo_1tb"
    days: Days = key(24, "number of raw files, one for each day")
    day_split: DaySplit = key("files", "one raw file per day")
    max_ind_range: Modulus = key(
        40_000_000, "take categories modulo this; 0 leaves them as they are"
    )


@dataclass(frozen=True, kw_only=True)
class Criteo1TbMultiHot(Criteo1Tb):
    """Rows of Criteo's 24 days of click logs with the bags of MLPerf's DLRM v2: each category
    stands for itself and others that follow from it.
    """

    name: ClassVar[str] = "criteo_1tb_multi_hot"


@dataclass(frozen=True, kw_only=True)
class Table(Data):
    """Rows of your own: files of CSV, Parquet or .npy, and a schema that says what their columns
    are.
    """

    name: ClassVar[str] = "table"
    raw: Paths | None = key(
        None,
        "files, folders or patterns: rows.csv.gz, or several: [a.parquet,b.parquet]",
        ROWS_FILES | Effect.PATH,
    )
    schema: Path | None = key(
        None,
        "YAML file that says what the columns are, or one of the package's: bars_criteo_x1; null "
        "takes that of prepared rows",
        Effect.FREE | Effect.EVALUATION | Effect.PATH,
    )
    base: Path | None = key(
        None,
        "run or checkpoint whose vocabularies and scales rows are prepared with; null takes that "
        "of checkpoint.resume for rows of other files",
        ROWS_FILES | Effect.PATH,
    )
    grow: bool = key(
        True,
        "categories that data.base lacks get rows behind its own; false leaves them unknown",
        Effect.FREE | Effect.EVALUATION,
    )
    progressive: bool = key(
        False,
        "score all rows before the first step, then learn all of them: the schema's split has no "
        "say",
        Effect.FREE | Effect.EVALUATION,
    )
    follow: Path | None = key(
        None,
        "folder whose files are learned one after the other, in order of name, as they appear; "
        "each is scored first (data.progressive)",
        ROWS_FILES | Effect.PATH,
    )
    follow_files: Positive | None = key(
        None, "end once so many files are learned; null goes on", ROWS_FILES, only="data.follow"
    )
    follow_idle_seconds: Annotated[float, Bound(ge=0)] | None = key(
        None,
        "end once no file has come for so long; 0 ends with the last that is there; null waits",
        ROWS_FILES,
        only="data.follow",
    )


class Parallel(Choice, effect=NEW):
    """How the model is partitioned over trainers, pipeline stages and servers."""

    machines: Machines | None = None
    trainers: Trainers = 1
    cuts: tuple[str, ...] = ()
    servers: Servers = 0
    table_servers: Servers = 0
    world: World
    elastic: bool = False
    threads: Several = 1


WORLD = "one process per rank, or all ranks in a single process"


@dataclass(frozen=True, kw_only=True)
class Single(Parallel):
    """One process: model, tables and optimizer together."""

    name: ClassVar[str] = "single"
    world: World = key("processes", WORLD, Effect.FREE)


@dataclass(frozen=True, kw_only=True)
class Hybrid(Parallel):
    """Trainers × pipeline stages, plus servers of the dense weights: 7 processes by default."""

    name: ClassVar[str] = "hybrid"
    machines: Machines | None = key(
        None,
        "trainers are spread over so many, servers beside them; null: one machine, or with "
        "network=emulated one for each rank",
        Effect.FREE,
    )
    trainers: Trainers = key(
        None,
        "data-parallel replicas; null: one for each of parallel.machines, or 2",
        STATE,
    )
    cuts: tuple[str, ...] = key(
        ("bottom.2", "top.2"),
        "split the model into pipeline stages after these layers",
        STATE,
    )
    servers: Servers = key(
        None,
        "parameter servers; 0: trainers send each other their gradients; null: one for each "
        "of parallel.machines, but none where up to 4 trainers without stages need none, or 1",
    )
    table_servers: Servers = key(
        None,
        "servers of the tables; null: one for each of parallel.machines, or 1",
        only="embedding=served",
    )
    world: World = key("processes", WORLD, Effect.FREE)
    elastic: bool = key(
        False, "sync=sync or async goes on when a trainer dies, and starts it again", Effect.FREE
    )
    threads: Several = key(1, "threads of each worker, which share its weights", only="sync=async")


class Sync(Choice, effect=STATE):
    """How old the weights may be that a step is computed with."""

    staleness: Lag = 0
    check_every: Positive = 100
    lr_scale: Scale = "one"
    in_flight: Pushes = 1
    ahead: Positive | None = None
    record: bool = False
    replay: Path | None = None

    @abstractmethod
    def policy(self, parallel: Parallel) -> SyncPolicy:
        """Make the rules by which the workers of a world push, and its servers make versions."""


CHECK_EVERY = "steps between checks of the trainers' weights against the servers', or each other's"


@dataclass(frozen=True, kw_only=True)
class SyncLockstep(Sync):
    """Lock-step: each step uses the weights of the previous one."""

    name: ClassVar[str] = "sync"
    check_every: Positive = key(100, CHECK_EVERY, Effect.FREE)

    @override
    def policy(self, parallel: Parallel) -> SyncPolicy:
        return Rounds(parallel.trainers) if parallel.elastic else Lockstep()


@dataclass(frozen=True, kw_only=True)
class SyncBounded(Sync):
    """Bounded staleness: steps use weights that are `staleness` steps old; push and pull overlap
    compute.
    """

    name: ClassVar[str] = "bounded"
    staleness: Several = key(1, "age, in steps, of the weights that a step uses")
    check_every: Positive = key(100, CHECK_EVERY, Effect.FREE)

    @override
    def policy(self, parallel: Parallel) -> SyncPolicy:
        return Lockstep(self.staleness)


@dataclass(frozen=True, kw_only=True)
class SyncAsynchronous(Sync):
    """Asynchronous: servers apply each push when it comes, and answer it at once;
    docs/asynchronous.md.
    """

    name: ClassVar[str] = "async"
    check_every: Positive = key(
        100, "versions between checks of a trainer's weights against its server's", Effect.FREE
    )
    lr_scale: Scale = key(
        "trainers",
        "rates of a push: optimizer.lr and embedding.lr / (trainers × threads); `one`: undivided",
    )
    in_flight: Pushes = key(1, "pushes of a trainer that wait for an answer while it computes on")
    ahead: Positive | None = key(
        None, "batches by which a trainer may be ahead of the slowest; null: any"
    )
    record: bool = key(
        False, "log the order in which servers take messages, for sync.replay", Effect.NOTHING
    )
    replay: Path | None = key(
        None,
        "run folder whose recorded order parallel.world=in_process plays back",
        STATE | Effect.PATH,
    )

    @override
    def policy(self, parallel: Parallel) -> SyncPolicy:
        return Asynchronous(parallel.trainers, self.in_flight, parallel.threads)


class Network(Choice, effect=Effect.FREE):
    """Where ranks listen and how long they wait for each other."""

    rate: LinkRate | None
    latency: Latency | None = None
    bind: Path | None = None
    keys: Path | None
    patience_seconds: Seconds


PATIENCE = "a rank unresponsive for this long is considered lost"


@dataclass(frozen=True, kw_only=True)
class Host(Network):
    """Ranks communicate over the host's own network interfaces."""

    name: ClassVar[str] = "host"
    rate: LinkRate | None = key(
        None, "link rate, used only to report utilization; null takes the interface's"
    )
    bind: Path | None = key(None, "address to listen on besides loopback; needs network.keys")
    keys: Path | None = key(
        None, "file of CURVE keys, made by doctor.action=keys", Effect.FREE | Effect.PATH
    )
    patience_seconds: Seconds = key(60.0, PATIENCE)


@dataclass(frozen=True, kw_only=True)
class Emulated(Network):
    """Ranks of this machine communicate over rate-limited links between network namespaces: needs
    Linux, root or user namespaces, and iproute2. The machine's own interfaces are left alone.
    """

    name: ClassVar[str] = "emulated"
    rate: LinkRate | None = key("100mbit", "rate of each link, each way: 1mbit … 2.5gbit … 100gbit")
    latency: Latency | None = key(
        None, "one-way delay between hosts: 250us, 20ms … 10s; a round trip takes twice that"
    )
    keys: Path | None = key(None, "file of CURVE keys; optional here", Effect.FREE | Effect.PATH)
    patience_seconds: Seconds = key(60.0, PATIENCE)
