"""What keys of several sections mean together; each rule yields one line for each fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dlrm_hybrid.comm.netem.units import bits_per_second, seconds
from dlrm_hybrid.compress.activation.methods import METHODS
from dlrm_hybrid.config.gradient import gradient_rules
from dlrm_hybrid.config.schema import Config

NUM_DENSE = 13

Rule = Callable[[Config], Iterator[str]]


def raw_files(config: Config) -> tuple[str, ...]:
    """`data.raw` as a list, whether one file or several were given."""
    raw = config.data.raw
    if raw is None:
        return ()
    return (raw,) if isinstance(raw, str) else raw


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.name == "synthetic":
        for key in ("rows", "seed"):
            if getattr(data, key) is None:
                yield f"data.{key} = null: data=synthetic needs a number"
        if data.raw is not None:
            yield f"data.raw = {data.raw!r}: data=synthetic has no raw file; use data=criteo_kaggle"
    else:
        for key in ("rows", "seed"):
            if getattr(data, key) is not None:
                yield f"data.{key} = {getattr(data, key)}: only applies to data=synthetic"
        if data.prepared is None:
            yield "data.prepared = null: data=criteo_kaggle needs a folder"
    files = len(raw_files(config))
    if data.day_split == "files" and files != data.days:
        yield (
            f"data.day_split = 'files': data.raw must list data.days = {data.days} files, "
            f"but lists {files}"
        )


def _model(config: Config) -> Iterator[str]:
    model = config.model
    if model.bottom[0] != NUM_DENSE:
        yield f"model.bottom[0] = {model.bottom[0]}: must be {NUM_DENSE}, the integer features"
    if model.bottom[-1] != model.embedding_dim:
        yield (
            f"model.bottom[{len(model.bottom) - 1}] = {model.bottom[-1]}: must equal "
            f"model.embedding_dim = {model.embedding_dim}, both feed the dot interaction"
        )
    if model.top[-1] != 1:
        yield f"model.top[{len(model.top) - 1}] = {model.top[-1]}: must be 1, the logit"


def _optimizer(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    for key, owner in (("momentum", "momentum"), ("eps", "adagrad")):
        value = getattr(optimizer, key)
        if optimizer.name == owner and value is None:
            yield f"optimizer.{key} = null: optimizer={owner} needs a number"
        if optimizer.name != owner and value is not None:
            yield f"optimizer.{key} = {value}: only applies to optimizer={owner}"
    if optimizer.schedule == "warmup_decay":
        if optimizer.decay_steps and optimizer.decay_start_step < optimizer.warmup_steps:
            yield (
                f"optimizer.decay_start_step = {optimizer.decay_start_step}: must not be less "
                f"than optimizer.warmup_steps = {optimizer.warmup_steps}"
            )
        return
    for key in ("warmup_steps", "decay_start_step", "decay_steps"):
        if getattr(optimizer, key):
            yield (
                f"optimizer.{key} = {getattr(optimizer, key)}: "
                f"only applies to optimizer.schedule=warmup_decay, not {optimizer.schedule}"
            )


def layer_cuts(config: Config) -> tuple[str, ...]:
    """The names of all layers that a cut may follow, in the order of the forward pass."""
    bottom = (f"bottom.{layer}" for layer in range(1, len(config.model.bottom)))
    top = (f"top.{layer}" for layer in range(1, len(config.model.top)))
    return (*bottom, *top)


def _parallel(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if parallel.name == "single":
        if parallel.trainers != 1:
            yield f"parallel.trainers = {parallel.trainers}: only applies to parallel=hybrid"
        if parallel.cuts:
            yield f"parallel.cuts = [{', '.join(parallel.cuts)}]: only applies to parallel=hybrid"
        if parallel.servers:
            yield f"parallel.servers = {parallel.servers}: only applies to parallel=hybrid"
        return
    if parallel.trainers > 1 and parallel.servers == 0:
        yield (
            f"parallel.servers = 0: parallel.trainers = {parallel.trainers} need at least one "
            "server; only a single trainer works without"
        )
    known = layer_cuts(config)
    unknown = [cut for cut in parallel.cuts if cut not in known]
    if unknown:
        yield (
            f"parallel.cuts = [{', '.join(parallel.cuts)}]: no layer {', '.join(unknown)} to cut "
            f"after; choose from {', '.join(known)}"
        )
    elif list(parallel.cuts) != sorted(set(parallel.cuts), key=known.index):
        yield (
            f"parallel.cuts = [{', '.join(parallel.cuts)}]: name each cut once, in the order of "
            "the layers"
        )
    tensors = 2 * (len(config.model.bottom) - 1 + len(config.model.top))
    if parallel.servers > tensors:
        yield (
            f"parallel.servers = {parallel.servers}: the model has only {tensors} dense tensors "
            "to own"
        )


def _pipeline(config: Config) -> Iterator[str]:
    microbatches, batch = config.schedule.microbatches, config.train.batch_size
    if batch % microbatches:
        yield (f"schedule.microbatches = {microbatches}: must divide train.batch_size = {batch}")
    if config.parallel.name == "single" and microbatches > 1:
        yield f"schedule.microbatches = {microbatches}: only applies to parallel=hybrid"
    staleness = config.sync.staleness
    if config.sync.name == "sync" and staleness:
        yield f"sync.staleness = {staleness}: only applies to sync=bounded"
    if config.sync.name == "bounded" and not staleness:
        yield "sync.staleness = 0: sync=bounded needs 1 or more; for 0 use sync=sync"
    if config.sync.name == "bounded" and config.parallel.servers == 0:
        yield "sync = bounded: needs parallel.servers of 1 or more"


def _tables(config: Config) -> Iterator[str]:
    embedding, parallel = config.embedding, config.parallel
    if embedding.sharding != "table_wise":
        given = f"embedding.sharding = {embedding.sharding!r}"
        if parallel.trainers == 1:
            yield f"{given}: needs parallel.trainers of 2 or more"
        elif parallel.world == "in_process":
            yield f"{given}: parallel.world=in_process has one set of tables"
    # One trainer of parallel=hybrid sends nothing, in whatever way.
    for key, default in (("comm_precision", "float32"), ("deduplicate", False)):
        value = getattr(embedding, key)
        if parallel.name == "single" and value != default:
            yield f"embedding.{key} = {value!r}: only applies to parallel=hybrid"
    if embedding.deduplicate and embedding.sharding != "table_wise":
        yield (
            "embedding.deduplicate = True: needs embedding.sharding=table_wise, "
            f"not {embedding.sharding}"
        )
    if embedding.sharding == "column_wise" and embedding.optimizer == "rowwise_adagrad":
        yield (
            "embedding.sharding = 'column_wise': embedding.optimizer=rowwise_adagrad keeps one "
            "accumulator per full row"
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
        return
    for key in ("ranks_per_host", "latency"):
        if getattr(network, key) is not None:
            yield f"network.{key} = {getattr(network, key)}: only applies to network=emulated"
    if network.bind is not None and network.keys is None:
        yield f"network.bind = {network.bind!r}: needs network.keys, a file of CURVE keys"


def _unreadable(text: str, parse: Callable[[str], float]) -> str | None:
    try:
        parse(text)
    except ValueError as error:
        return str(error)
    return None


def _emulated(config: Config) -> Iterator[str]:
    network, parallel = config.network, config.parallel
    if network.bind is not None:
        yield f"network.bind = {network.bind!r}: only applies to network=host"
    for key in ("rate", "ranks_per_host"):
        if getattr(network, key) is None:
            yield f"network.{key} = null: network=emulated needs a value"
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
    ranks = parallel.trainers * (len(parallel.cuts) + 1) + parallel.servers
    if network.ranks_per_host is not None and network.ranks_per_host >= ranks:
        yield (
            f"network.ranks_per_host = {network.ranks_per_host}: network=emulated needs 2 hosts "
            f"or more, and there are {ranks} ranks"
        )


def sparsity_per_cut(config: Config) -> tuple[float, ...]:
    """`activation.sparsity` of every cut, whether one number or a list was given."""
    sparsity = config.activation.sparsity
    return sparsity if isinstance(sparsity, tuple) else (sparsity,) * len(config.parallel.cuts)


def _pull(config: Config) -> Iterator[str]:
    """Faults of `pull`."""
    if config.pull.precision != "float32" and not config.parallel.servers:
        yield f"pull.precision = {config.pull.precision!r}: needs parallel.servers of 1 or more"


def _no_cuts(config: Config) -> str:
    if config.parallel.name == "single":
        return "compresses what stages exchange, and parallel=single has none; add parallel=hybrid"
    return "compresses what stages exchange; needs parallel.cuts, e.g. parallel.cuts=[bottom.2]"


def _activation(config: Config) -> Iterator[str]:
    """What keys of `activation` mean together, and with `parallel.cuts`."""
    keys, cuts = config.activation, config.parallel.cuts
    method = METHODS.get(keys.name)
    if keys.name == "dct" and keys.allow_rice is None:
        yield "activation.allow_rice = null: activation=dct needs true or false"
    if keys.name != "dct" and keys.allow_rice is not None:
        yield f"activation.allow_rice = {keys.allow_rice}: only applies to activation=dct"
    if method is None and keys.sparsity != 0:
        yield f"activation.sparsity = {keys.sparsity}: only applies to activation=dct"
    if keys.precision not in (("float32",) if method is None else method.precisions):
        yield (f"activation.precision = {keys.precision!r}: activation={keys.name} sends float32")
    if keys.observe is not None and method is not None:
        yield f"activation.observe = {keys.observe}: only applies to activation=none"
    elif keys.observe is not None and not cuts:
        yield f"activation.observe = {keys.observe}: needs parallel.cuts"
    if method is not None and not cuts:
        yield f"activation = {keys.name!r}: {_no_cuts(config)}"
    elif (
        method is not None and isinstance(keys.sparsity, tuple) and len(keys.sparsity) != len(cuts)
    ):
        yield (
            f"activation.sparsity = {list(keys.sparsity)}: one number, or one for each of "
            f"parallel.cuts = [{', '.join(cuts)}]"
        )


RULES: tuple[Rule, ...] = (
    *(_data, _model, _optimizer, _parallel, _pipeline, _tables, _network),
    *(gradient_rules, _pull, _activation),
)
