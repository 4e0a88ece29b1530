"""What keys of several sections mean together; each rule yields one line for each fault."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dlrm_hybrid.comm.netem.plan import bits_per_second, seconds
from dlrm_hybrid.compress.activation.methods import METHODS
from dlrm_hybrid.config.gradient import gradient_rules
from dlrm_hybrid.config.model import (
    CRITEO,
    OF_CRITEO,
    batch_norm_rules,
    data_rules,
    dense_tensors,
    dropout_rules,
    interaction_rules,
)
from dlrm_hybrid.config.schedule import STALE_KEYS, schedule_rules, shown
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.sections.sweeping import sweep_rules
from dlrm_hybrid.config.training import optimizer_rules, stopping_rules
from dlrm_hybrid.data.schemas.reading import builtin

Rule = Callable[[Config], Iterator[str]]


# Keys that one choice alone reads, and the value that they have beside every other choice.
ONLY: Mapping[str, Mapping[str, Any]] = {
    "data=synthetic": {"data.rows": None, "data.seed": None},
    "data=table": {"data.schema": None},
    "optimizer.schedule=warmup_decay": {
        f"optimizer.{key}": 0 for key in ("warmup_steps", "decay_start_step", "decay_steps")
    },
    "parallel=hybrid": {
        **{"parallel.trainers": 1, "parallel.cuts": (), "parallel.servers": 0},
        "parallel.table_servers": 0,
        # One trainer of parallel=hybrid sends nothing, in whatever way.
        **{"embedding.comm_precision": "float32", "embedding.deduplicate": False},
        "schedule.microbatches": 1,
    },
    "embedding=fused": {"embedding.sharding": "table_wise"},
    "embedding=served": {
        **{"embedding.staleness": 0, "embedding.cache_rows": 0, "embedding.cache_batches": 0},
        **{"embedding.storage": "memory", "parallel.table_servers": 0},
        "network.colocate_tables": False,
    },
    "embedding.storage=mmap": {"embedding.folder": None},
    "sync=bounded": {"sync.staleness": 0},
    "schedule=dsp": dict.fromkeys(STALE_KEYS),
    "sync=async": {
        "sync.lr_scale": None,
        **{"sync.in_flight": 1, "sync.ahead": None, "parallel.threads": 1},
        **{"sync.record": False, "sync.replay": None},
    },
    "network=emulated": {
        **{"network.ranks_per_host": None, "network.latency": None},
        "network.colocate_tables": False,
    },
    "network=host": {"network.bind": None},
    "activation=dct": {"activation.allow_rice": None, "activation.bits": None},
    "activation=none": {"activation.observe": None},
    "export.format=safetensors": {"export.names": "ours"},
}
# Keys that must not be null with a choice, and what they must be.
NEEDED: Mapping[str, Mapping[str, str]] = {
    "data=synthetic": {"data.rows": "a number", "data.seed": "a number", **OF_CRITEO},
    **{f"data={name}": OF_CRITEO for name in CRITEO},
    "sync=async": {"sync.lr_scale": "trainers or one"},
    "schedule=dsp": {key: "a number for each stage" for key in STALE_KEYS},
    "network=emulated": {"network.rate": "a rate", "network.ranks_per_host": "a number"},
    "activation=dct": {"activation.allow_rice": "true or false"},
}


def _choices(config: Config) -> Iterator[str]:
    """Keys that belong to one choice: set beside another, or null where they are needed."""
    for choice in dict.fromkeys((*ONLY, *NEEDED)):
        key, _, wanted = choice.partition("=")
        chosen = _at(config, key if "." in key else f"{key}.name")
        for name, elsewhere in ONLY.get(choice, {}).items():
            if chosen != wanted and (value := _at(config, name)) != elsewhere:
                yield f"{name} = {shown(value)}: only applies to {choice}, not {chosen}"
        for name, what in NEEDED.get(choice, {}).items():
            if chosen == wanted and _at(config, name) is None:
                yield f"{name} = null: {choice} needs {what}"


def _at(config: Config, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def _model(config: Config) -> Iterator[str]:
    model = config.model
    width = builtin("criteo_kaggle").num_dense
    if config.data.name != "table" and model.bottom[:1] != (width,):
        given = f"[0] = {model.bottom[0]}" if model.bottom else " = []"
        yield f"model.bottom{given}: must be {width}, the integer features"
    if len(model.bottom) == 1:
        yield f"model.bottom = {shown(model.bottom)}: needs an input and a layer, or nothing at all"
    elif model.bottom and model.bottom[-1] != model.embedding_dim:
        yield (
            f"model.bottom[{len(model.bottom) - 1}] = {model.bottom[-1]}: must equal "
            f"model.embedding_dim = {model.embedding_dim}, both feed the interaction"
        )
    if model.top[-1] != 1:
        yield f"model.top[{len(model.top) - 1}] = {model.top[-1]}: must be 1, the logit"


def layer_cuts(config: Config) -> tuple[str, ...]:
    """The names of all layers that a cut may follow, in the order of the forward pass."""
    bottom = (f"bottom.{layer}" for layer in range(1, len(config.model.bottom)))
    top = (f"top.{layer}" for layer in range(1, len(config.model.top)))
    return (*bottom, *top)


def _parallel(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if parallel.name == "single":
        return
    if parallel.trainers > 1 and parallel.servers == 0:
        yield (
            f"parallel.servers = 0: parallel.trainers = {parallel.trainers} need at least one "
            "server; only a single trainer works without"
        )
    known, given = layer_cuts(config), f"parallel.cuts = {shown(parallel.cuts)}"
    unknown = [cut for cut in parallel.cuts if cut not in known]
    if unknown:
        missing, choices = ", ".join(unknown), ", ".join(known)
        yield f"{given}: no layer {missing} to cut after; choose from {choices}"
    elif list(parallel.cuts) != sorted(set(parallel.cuts), key=known.index):
        yield f"{given}: name each cut once, in the order of the layers"
    tensors = dense_tensors(config.model)
    if parallel.servers > tensors:
        yield (
            f"parallel.servers = {parallel.servers}: the model has only {tensors} dense tensors "
            "to own"
        )


def _sync(config: Config) -> Iterator[str]:
    if config.sync.name == "bounded" and not config.sync.staleness:
        yield "sync.staleness = 0: sync=bounded needs 1 or more; for 0 use sync=sync"
    if config.sync.name != "sync" and config.parallel.servers == 0:
        yield f"sync = {config.sync.name}: needs parallel.servers of 1 or more"
    if config.sync.name == "sync" and config.parallel.elastic and not config.parallel.servers:
        yield "parallel.elastic = True: needs parallel.servers of 1 or more"
    elif config.parallel.elastic and config.sync.name == "bounded":
        yield "parallel.elastic = True: needs sync=sync or async, not bounded"
    elif server_leads(config):
        yield from _led(config)


def server_leads(config: Config) -> bool:
    """Whether server 0 gives out batches: trainers do not wait for others, or not for lost ones."""
    return config.sync.name == "async" or config.parallel.elastic


def _led(config: Config) -> Iterator[str]:
    """Faults of what must not hold trainers together, or does not know whose push it applies."""
    embedding, parallel = config.embedding.name, config.parallel
    mode = "sync=async" if config.sync.name == "async" else "parallel.elastic=true"
    if embedding != "served" and (parallel.trainers > 1 or parallel.elastic):
        alone = "a trainer that is lost would take its tables along"
        shared = "trainers that share tables wait for each other"
        why = shared if parallel.trainers > 1 else alone
        yield f"embedding = {embedding!r}: {why}; {mode} needs embedding=served"
    if config.optimizer.name == "momentum":
        yield (
            "optimizer = 'momentum': moves all weights with every push, so each answer would hold "
            f"all of them; {mode} needs sgd, adagrad or adam"
        )
    if config.pull.sparsity is not None:
        yield (
            f"pull.sparsity = {config.pull.sparsity}: all trainers must be sent the same, and with "
            f"{mode} each is sent its own"
        )
    if config.gradient.uses_lr:
        yield (
            f"gradient.residual = 'update': with {mode} servers know the learning rate, not "
            "trainers; needs gradient"
        )
    if parallel.elastic and parallel.world != "processes":
        yield "parallel.elastic = True: parallel.world=in_process has no processes to lose"
    if parallel.elastic and config.sync.record:
        yield (
            "parallel.elastic = True: a run that goes on without a trainer cannot be played back; "
            "needs sync.record=false"
        )
    if config.sync.record and parallel.world != "processes":
        yield "sync.record = True: parallel.world=in_process has an order of its own"
    if config.sync.replay is not None and parallel.world != "in_process":
        yield (
            f"sync.replay = {config.sync.replay!r}: the recorded order is played back by "
            f"parallel.world=in_process, not {parallel.world}"
        )
    if parallel.threads > 1:
        yield from _threads(config)


def _threads(config: Config) -> Iterator[str]:
    """Faults of what threads of one worker cannot share."""
    given = f"parallel.threads = {config.parallel.threads}"
    if config.parallel.world != "processes":
        yield f"{given}: parallel.world=in_process lets workers take turns in one thread"
    if config.sync.in_flight > 1:
        yield f"{given}: others compute while one waits already; needs sync.in_flight=1"
    if config.sync.ahead is not None and config.sync.ahead < 4 * config.parallel.threads:
        yield (
            f"{given}: leases are a quarter of sync.ahead = {config.sync.ahead}, less than a batch "
            f"for each thread; needs {4 * config.parallel.threads} or more"
        )
    if config.sync.record:
        yield (
            f"{given}: threads read weights while answers change them, which no order of messages "
            "tells; needs sync.record=false"
        )
    if config.embedding.name != "served":
        yield f"{given}: threads cannot share tables of their own; needs embedding=served"
    if config.embedding.staleness:
        yield (
            f"{given}: while one thread waits for rows others compute; needs embedding.staleness=0"
        )
    if config.embedding.cache_rows:
        yield f"{given}: threads have no common cache of rows; needs embedding.cache_rows=0"
    if METHODS.get(config.activation.name) is METHODS["gradient_topk"]:
        yield f"{given}: activation={config.activation.name} has one residual for each row"


def _tables(config: Config) -> Iterator[str]:
    served = config.embedding.name == "served"
    yield from _served_tables(config) if served else _fused_tables(config)
    if config.embedding.levels:
        yield from _row_levels(config)


def _row_levels(config: Config) -> Iterator[str]:
    """Faults of what cannot be sent as levels, or not yet."""
    embedding, given = config.embedding, "embedding.levels = True"
    wanted = {
        "embedding.name": ("fused", "table servers send rows and gradients as they are"),
        "embedding.deduplicate": (True, "levels are of distinct rows"),
        "embedding.comm_precision": ("float32", "evaluations send rows as they are"),
    }
    for key, (value, why) in wanted.items():
        if (found := _at(config, key)) != value:
            yield f"{given}: {why}; needs {key}={shown(value)}, not {shown(found)}"
    if embedding.name == "fused" and config.schedule.name == "dsp":
        yield f"{given}: schedule=dsp looks up batches in flight again when it resumes"


def _served_tables(config: Config) -> Iterator[str]:
    if config.parallel.name == "single":
        yield "embedding = 'served': parallel=single has no servers; add parallel=hybrid"
    elif config.parallel.table_servers == 0:
        yield "parallel.table_servers = 0: embedding=served needs 1 or more"
    if not config.embedding.deduplicate:
        yield (
            "embedding.deduplicate = False: embedding=served asks for each distinct id of a batch "
            "once; needs true"
        )
    rows, batches = config.embedding.cache_rows, config.embedding.cache_batches
    if rows and not batches:
        yield f"embedding.cache_rows = {rows}: needs embedding.cache_batches of 1 or more"
    elif batches and not rows:
        yield f"embedding.cache_batches = {batches}: needs embedding.cache_rows of 1 or more"


def _fused_tables(config: Config) -> Iterator[str]:
    embedding, parallel = config.embedding, config.parallel
    if embedding.sharding != "table_wise":
        given = f"embedding.sharding = {embedding.sharding!r}"
        if parallel.trainers == 1:
            yield f"{given}: needs parallel.trainers of 2 or more"
        elif parallel.world == "in_process":
            yield f"{given}: parallel.world=in_process has one set of tables"
    if embedding.deduplicate and embedding.sharding != "table_wise":
        yield (
            "embedding.deduplicate = True: needs embedding.sharding=table_wise, "
            f"not {embedding.sharding}"
        )
    if embedding.sharding == "column_wise" and embedding.optimizer.startswith("rowwise"):
        yield (
            f"embedding.sharding = 'column_wise': embedding.optimizer={embedding.optimizer} keeps "
            "one accumulator per full row"
        )
    dim = config.model.embedding_dim
    if embedding.sharding == "column_wise" and (dim < 8 or dim % 4):
        yield (
            f"embedding.sharding = 'column_wise': model.embedding_dim = {dim} cannot be cut: "
            "FBGEMM needs columns in multiples of 4"
        )


def _network(config: Config) -> Iterator[str]:
    """What the keys of `network` mean together, and with `parallel`."""
    network = config.network
    for key, parse in (("rate", bits_per_second), ("latency", seconds)):
        text: str | None = getattr(network, key)
        if text is not None and (fault := _unreadable(text, parse)):
            yield f"network.{key} = {text!r}: {fault}"
    if network.name == "emulated":
        yield from _emulated(config)
    elif network.bind is not None and network.keys is None:
        yield f"network.bind = {network.bind!r}: needs network.keys, a file of CURVE keys"


def _unreadable(text: str, parse: Callable[[str], float]) -> str | None:
    try:
        parse(text)
    except ValueError as error:
        return str(error)
    return None


def _emulated(config: Config) -> Iterator[str]:
    network, parallel = config.network, config.parallel
    for key, value, needed in (
        ("parallel", parallel.name, "hybrid"),
        ("parallel.world", parallel.world, "processes"),
    ):
        if value != needed:
            yield (
                f"{key} = {value}: sends nothing over the links of network=emulated; use "
                f"{key}={needed} or network=host"
            )
            return
    workers = parallel.trainers * (len(parallel.cuts) + 1)
    colocated = network.colocate_tables
    ranks = workers + parallel.servers + (0 if colocated else parallel.table_servers)
    if network.ranks_per_host is not None and network.ranks_per_host >= ranks:
        yield (
            f"network.ranks_per_host = {network.ranks_per_host}: network=emulated needs 2 hosts "
            f"or more, and there are {ranks} ranks{' beside colocated tables' * colocated}"
        )


def _pull(config: Config) -> Iterator[str]:
    """Faults of the section `pull`: what has no effect without servers."""
    pull = config.pull
    if config.parallel.servers:
        return
    if pull.precision != "float32":
        yield f"pull.precision = {pull.precision!r}: needs parallel.servers of 1 or more"
    if pull.sparsity is not None:
        yield (
            f"pull.sparsity = {pull.sparsity}: needs parallel.servers of 1 or more; a single "
            "trainer without servers updates its own weights and pulls nothing"
        )


def _no_cuts(config: Config) -> str:
    if config.parallel.name == "single":
        return "compresses what stages exchange, and parallel=single has none; add parallel=hybrid"
    return "compresses what stages exchange; needs parallel.cuts, e.g. parallel.cuts=[bottom.2]"


def _activation(config: Config) -> Iterator[str]:
    """What keys of `activation` mean together, and with `parallel.cuts`."""
    keys, cuts = config.activation, config.parallel.cuts
    method = METHODS.get(keys.name)
    if method is None and keys.sparsity != 0:
        yield f"activation.sparsity = {shown(keys.sparsity)}: only applies to activation=dct"
    if keys.precision not in (("float32",) if method is None else method.precisions):
        yield (f"activation.precision = {keys.precision!r}: activation={keys.name} sends float32")
    if keys.sends_levels and config.parallel.threads > 1:
        yield (
            f"activation.bits = {shown(keys.bits)}: threads of one worker (parallel.threads = "
            f"{config.parallel.threads}) send in no order, and tables come with what they code"
        )
    if keys.observe is not None and method is None and not cuts:
        yield f"activation.observe = {keys.observe}: needs parallel.cuts"
    if method is not None and not cuts:
        yield f"activation = {keys.name!r}: {_no_cuts(config)}"
    elif method is not None:
        for name, given in (("sparsity", keys.sparsity), ("bits", keys.bits)):
            if isinstance(given, tuple) and len(given) != len(cuts):
                yield (
                    f"activation.{name} = {shown(given)}: one number, or one for each of "
                    f"parallel.cuts = {shown(cuts)}"
                )


RULES: tuple[Rule, ...] = (
    *(_choices, data_rules, _model, interaction_rules, batch_norm_rules, dropout_rules),
    *(optimizer_rules, _parallel, stopping_rules, schedule_rules, _sync, _tables, _network),
    *(gradient_rules, _pull, _activation, sweep_rules),
)
