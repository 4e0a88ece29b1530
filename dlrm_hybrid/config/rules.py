"""Rules for keys of several sections together; each yields one line for each fault."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from dlrm_hybrid.comm.netem.plan import bits_per_second, seconds
from dlrm_hybrid.compress.activation.methods import GradientTopK
from dlrm_hybrid.config.choices import Emulated
from dlrm_hybrid.config.keys import sections, shown
from dlrm_hybrid.config.model import (
    batch_norm_rules,
    data_rules,
    dense_tensors,
    dropout_rules,
    interaction_rules,
    is_known,
    is_late,
    layer_names,
    own_model_rules,
    pipeline,
)
from dlrm_hybrid.config.schema import Config, OwnModelConfig
from dlrm_hybrid.data.schemas.reading import builtin
from dlrm_hybrid.parallel.schedule import fault_of

Rule = Callable[[Config], Iterator[str]]


# A job of the sweep is one job of SLURM, and its script comes from here.
OF_THE_SWEEP = ("--array", "--wrap", "--parsable", "--output", "--open-mode", "--test-only")
WAITING = "needs schedule=sequential, gpipe or one_f_one_b"  # schedules with nothing in flight


def _beside(config: Config) -> Iterator[str]:
    """Faults of keys that have an effect only beside another value, which is not there."""
    for section, base in sections().items():
        record: Any = getattr(config, section if section != "import" else "import_")
        for field in fields(record):
            only: str = field.metadata.get("only", "")
            default = getattr(base, field.name, None) if field.default is None else field.default
            value = getattr(record, field.name)
            if only and value != default and (fault := _unmet(config, only)):
                yield f"{section}.{field.name} = {shown(value)}: {fault}"


def _unmet(config: Config, only: str) -> str | None:
    """The reason why a key has no effect beside the values that there are; None if it has one."""
    key, _, values = only.partition("=")
    value = _at(config, key if "." in key else f"{key}.name")
    if not values:
        needs = f"needs {key}{' of 1 or more' if isinstance(value, int) else ''}"
        return None if value else needs
    if str(value) in values.split("|"):
        return None
    chosen = "null" if value is None else value
    return f"only applies to {key}={values.replace('|', ' or ')}, not {chosen}"


def _at(config: Config, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def _model(config: Config) -> Iterator[str]:
    model = config.model
    if isinstance(model, OwnModelConfig):
        yield from own_model_rules(config)
        return
    width = builtin("criteo_kaggle").num_dense
    if config.data.name != "table" and model.bottom[:1] != (width,):
        head = f"[0] = {model.bottom[0]}" if model.bottom else " = []"
        yield f"model.bottom{head}: must be {width}, the integer features"
    if len(model.bottom) == 1:
        yield f"model.bottom = {shown(model.bottom)}: needs an input and a layer, or nothing at all"
    elif model.bottom and model.bottom[-1] != model.embedding_dim:
        yield (
            f"model.bottom[{len(model.bottom) - 1}] = {model.bottom[-1]}: must equal "
            f"model.embedding_dim = {model.embedding_dim}, both feed the interaction"
        )
    if model.top[-1] != 1:
        yield (
            f"model.top[{len(model.top) - 1}] = {model.top[-1]}: must be 1, the logit; of several "
            "labels (data.schema) each has one"
        )


def layer_cuts(config: Config) -> tuple[str, ...] | None:
    """All layers that a cut may follow, in the order of the forward pass; None if unknown."""
    if not is_known(config.model) or any(own_model_rules(config)):
        return None
    return layer_names(config.model)[:-1]


def _parallel(config: Config) -> Iterator[str]:
    parallel, machines = config.parallel, f"parallel.machines = {config.parallel.machines}"
    if parallel.name == "single":
        return
    if parallel.machines is not None and parallel.world == "in_process":
        yield f"{machines}: parallel.world=in_process is one process on one machine"
    elif parallel.machines is not None and parallel.machines > parallel.trainers:
        yield f"{machines}: parallel.trainers = {parallel.trainers} leave machines without a rank"
    if (layers := layer_cuts(config)) is None:
        return
    head = f"parallel.cuts = {shown(parallel.cuts)}"
    unknown = [cut for cut in parallel.cuts if cut not in layers]
    if unknown:
        missing, choices = ", ".join(unknown), ", ".join(layers)
        choose = f"choose from {choices}" if layers else "this model has none; needs []"
        yield f"{head}: no layer {missing} to cut after; {choose}"
    elif list(parallel.cuts) != sorted(set(parallel.cuts), key=layers.index):
        yield f"{head}: name each cut once, in the order of the layers"
    tensors = dense_tensors(config.model)
    if tensors is not None and parallel.servers > tensors:
        is_each = parallel.servers == parallel.machines
        why = f"{machines}: each gets a server, " if is_each else ""
        yield (
            f"{why}parallel.servers = {parallel.servers}: the model has only {tensors} dense "
            "tensors to own"
        )


def _own_sync(config: Config) -> Iterator[str]:
    if ":" not in (name := config.sync.name):
        return
    try:
        shares = config.sync.policy(config.parallel).shares_versions
    except Exception as error:
        yield f"sync = {name!r}: raised {type(error).__name__}: {error}"
        return
    if not shares:
        yield (
            f"sync = {name!r}: its workers have versions of their own, and trainers that make the "
            "same steps share them; needs a policy with shares_versions"
        )


def _sync(config: Config) -> Iterator[str]:
    yield from _own_sync(config)
    if config.sync.name != "sync" and config.parallel.servers == 0:
        yield f"sync = {config.sync.name}: needs parallel.servers of 1 or more"
    if config.sync.name == "sync" and config.parallel.elastic and not config.parallel.servers:
        yield "parallel.elastic = true: needs parallel.servers of 1 or more"
    elif config.parallel.elastic and config.sync.name not in ("sync", "async"):
        yield f"parallel.elastic = true: needs sync=sync or async, not {config.sync.name}"
    elif server_leads(config):
        yield from _led_by_server(config)


def server_leads(config: Config) -> bool:
    """Whether server 0 gives out batches: trainers do not wait for others, or not for lost ones."""
    return config.sync.name == "async" or config.parallel.elastic


def _led_by_server(config: Config) -> Iterator[str]:
    """Faults of settings that hold trainers together, or need to know whose push is applied."""
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
        yield "parallel.elastic = true: parallel.world=in_process has no processes to lose"
    if parallel.elastic and config.sync.record:
        yield (
            "parallel.elastic = true: a run that goes on without a trainer cannot be played back; "
            "needs sync.record=false"
        )
    if config.sync.record and parallel.world != "processes":
        yield "sync.record = true: parallel.world=in_process has an order of its own"
    if config.sync.replay is not None and parallel.world != "in_process":
        yield (
            f"sync.replay = {config.sync.replay!r}: the recorded order is played back by "
            f"parallel.world=in_process, not {parallel.world}"
        )
    if parallel.threads > 1:
        yield from _threads(config)


def _device(config: Config) -> Iterator[str]:
    if config.device != "cpu" and config.parallel.threads > 1:
        yield (
            f"device = {config.device!r}: threads of a worker share one replica, on the CPU; "
            "needs parallel.threads=1"
        )
    if config.device == "cpu" and config.tf32:
        yield "tf32 = true: CPUs multiply float32 as it is; needs device=cuda"
    if config.embedding.device == "cpu":
        return
    head = "embedding.device = 'cuda'"
    if config.device == "cpu":
        yield f"{head}: tables are where the dense layers are; needs device=cuda"
    if config.parallel.trainers > 1:
        yield (
            f"{head}: trainers that share tables exchange rows on the CPU; needs "
            "parallel.trainers=1"
        )


def _threads(config: Config) -> Iterator[str]:
    head = f"parallel.threads = {config.parallel.threads}"
    if config.parallel.world != "processes":
        yield f"{head}: parallel.world=in_process lets workers take turns in one thread"
    if config.sync.in_flight > 1:
        yield f"{head}: others compute while one waits already; needs sync.in_flight=1"
    if config.sync.ahead is not None and config.sync.ahead < 4 * config.parallel.threads:
        yield (
            f"{head}: leases are a quarter of sync.ahead = {config.sync.ahead}, less than a batch "
            f"for each thread; needs {4 * config.parallel.threads} or more"
        )
    if config.sync.record:
        yield (
            f"{head}: threads read weights while answers change them, which no order of messages "
            "tells; needs sync.record=false"
        )
    if config.embedding.name != "served":
        yield f"{head}: threads cannot share tables of their own; needs embedding=served"
    if config.embedding.staleness:
        yield (
            f"{head}: while one thread waits for rows others compute; needs embedding.staleness=0"
        )
    if config.embedding.cache_rows:
        yield f"{head}: threads have no common cache of rows; needs embedding.cache_rows=0"
    if config.embedding.levels:
        yield f"{head}: threads remember no rows together; needs embedding.levels=false"
    if isinstance(config.activation, GradientTopK):
        yield f"{head}: activation={config.activation.name} has one residual for each row"


def _tables(config: Config) -> Iterator[str]:
    served = config.embedding.name == "served"
    yield from _served_tables(config) if served else _fused_tables(config)
    if config.embedding.levels:
        yield from _row_levels(config)


def _row_levels(config: Config) -> Iterator[str]:
    """Faults of settings with which rows cannot be sent as levels."""
    head = "embedding.levels = true"
    needs = {
        "embedding.deduplicate=true": "levels are of distinct rows",
        "embedding.comm_precision=float32": "evaluations send rows as they are",
    }
    for needed, why in needs.items():
        key, _, value = needed.partition("=")
        if (actual := shown(_at(config, key)).strip("'")) != value:
            yield f"{head}: {why}; needs {needed}, not {actual}"
    if is_late(config):
        yield (
            f"{head}: schedule={config.schedule.name} looks up batches in flight again when it "
            f"resumes; {WAITING}"
        )


def _served_tables(config: Config) -> Iterator[str]:
    if config.parallel.name == "single":
        yield "embedding = 'served': parallel=single has no servers; add parallel=hybrid"
    elif config.parallel.table_servers == 0:
        yield "parallel.table_servers = 0: embedding=served needs 1 or more"
    rows, batches = config.embedding.cache_rows, config.embedding.cache_batches
    if rows and not batches:
        yield f"embedding.cache_rows = {rows}: needs embedding.cache_batches of 1 or more"
    elif batches and not rows:
        yield f"embedding.cache_batches = {batches}: needs embedding.cache_rows of 1 or more"


def _fused_tables(config: Config) -> Iterator[str]:
    embedding, parallel = config.embedding, config.parallel
    if embedding.sharding != "table_wise":
        head = f"embedding.sharding = {embedding.sharding!r}"
        if parallel.trainers == 1:
            yield f"{head}: needs parallel.trainers of 2 or more"
        elif parallel.world == "in_process":
            yield f"{head}: parallel.world=in_process has one set of tables"
    if embedding.deduplicate and embedding.sharding != "table_wise":
        yield (
            "embedding.deduplicate = true: needs embedding.sharding=table_wise, "
            f"not {embedding.sharding}"
        )
    if embedding.sharding == "column_wise" and embedding.optimizer.startswith("rowwise"):
        yield (
            f"embedding.sharding = 'column_wise': embedding.optimizer={embedding.optimizer} keeps "
            "one accumulator per full row"
        )
    dims = {"embedding_dim": config.model.embedding_dim}
    if config.model.table_dims is not None:
        dims = {f"table_dims[{table}]": dim for table, dim in enumerate(config.model.table_dims)}
    whole = [key for key, dim in dims.items() if dim < 8 or dim % 4]
    if embedding.sharding == "column_wise" and whole:
        yield (
            f"embedding.sharding = 'column_wise': model.{whole[0]} = {dims[whole[0]]} cannot be "
            "cut: FBGEMM needs columns in multiples of 4"
        )


def _network(config: Config) -> Iterator[str]:
    network, plan = config.network, config.plan
    for key, parse, texts in (
        ("network.rate", bits_per_second, (network.rate,)),
        ("network.latency", seconds, (network.latency,)),
        ("plan.rates", bits_per_second, plan.rates or ()),
        ("plan.latencies", seconds, plan.latencies or ()),
    ):
        for text in filter(None, texts):
            try:
                parse(text)
            except ValueError as error:
                yield f"{key} = {text!r}: {error}"
    if isinstance(network, Emulated):
        yield from _emulated(config, network)
    elif network.bind is not None and network.keys is None:
        yield f"network.bind = {network.bind!r}: needs network.keys, a file of CURVE keys"


def _emulated(config: Config, network: Emulated) -> Iterator[str]:
    parallel = config.parallel
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
    if network.rate is None:
        yield "network.rate = null: network=emulated needs a rate"
    workers = parallel.trainers * (len(parallel.cuts) + 1)
    if workers + parallel.servers + parallel.table_servers == 1:
        yield "parallel.trainers = 1: alone it sends nothing over the links of network=emulated"


def _no_cuts(config: Config) -> str:
    if config.parallel.name == "single":
        return "compresses what stages exchange, and parallel=single has none; add parallel=hybrid"
    layers = layer_cuts(config) or ()
    example = f", e.g. parallel.cuts=[{layers[len(layers) > 1]}]" if layers else ""
    return f"compresses what stages exchange; needs parallel.cuts{example}"


def _activation(config: Config) -> Iterator[str]:
    keys, cuts = config.activation, config.parallel.cuts
    if keys.sends_levels and config.parallel.threads > 1:
        yield (
            f"activation.bits = {shown(keys.bits)}: threads of one worker (parallel.threads = "
            f"{config.parallel.threads}) send in no order, and tables come with what they code"
        )
    if keys.name != "none" and not cuts:
        yield f"activation = {keys.name!r}: {_no_cuts(config)}"
    elif keys.name != "none":
        for name, numbers in (("sparsity", keys.sparsity), ("bits", keys.bits)):
            if isinstance(numbers, tuple) and len(numbers) != len(cuts):
                yield (
                    f"activation.{name} = {shown(numbers)}: one number, or one for each of "
                    f"parallel.cuts = {shown(cuts)}"
                )


def schedule_rules(config: Config) -> Iterator[str]:
    """Faults of `schedule`, and of the learning rate of stale gradients."""
    microbatches, batch = config.schedule.microbatches, config.train.batch_size
    if batch % microbatches:
        yield f"schedule.microbatches = {microbatches}: must divide train.batch_size = {batch}"
    if config.schedule.name == "dsp":
        yield from _numbers(config)
    yield from (wrong := [*_own_schedule(config)])
    if not wrong and is_late(config):
        yield from _pipeline(config)
    warmup = config.optimizer.staleness_warmup_steps
    has_stale = is_late(config) and any(config.schedule.staleness)
    if warmup is not None and not has_stale and config.sync.name == "sync":
        yield (
            f"optimizer.staleness_warmup_steps = {warmup}: no gradient is stale; needs "
            "schedule=dsp with a schedule.staleness above 0, sync=bounded or sync=async"
        )


def _own_schedule(config: Config) -> Iterator[str]:
    if ":" not in (name := config.schedule.name):
        return
    try:
        fault = fault_of(pipeline(config))
    except Exception as error:
        fault = f"raised {type(error).__name__}: {error}"
    if fault is not None:
        yield f"schedule = {name!r}: {fault}"


def _pipeline(config: Config) -> Iterator[str]:
    """Faults of settings with which no several batches of a trainer can be in flight."""
    head = f"schedule = {config.schedule.name!r}"
    if not config.parallel.cuts and config.schedule.name == "dsp":
        needed = "parallel=hybrid" if config.parallel.name == "single" else "parallel.cuts"
        yield f"{head}: needs {needed}: a lone stage has no neighbour to run ahead of"
    mode = "sync=async" if config.sync.name == "async" else "parallel.elastic=true"
    if config.sync.name == "async" or config.parallel.elastic:
        yield (
            f"{head}: with {mode} trainers are given batches one by one, and come to "
            "rest without any in flight; needs sync=sync or bounded, and parallel.elastic=false"
        )
    if config.embedding.name == "served":
        yield (
            f"{head}: embedding=served updates a batch before the next one is looked up; "
            "needs embedding=fused"
        )


def _numbers(config: Config) -> Iterator[str]:
    """Faults of delays and staleness: lengths, last numbers, and the delays left for gradients."""
    delays, staleness = config.schedule.delays, config.schedule.staleness
    stages, is_whole = len(config.parallel.cuts) + 1, True
    for key, numbers in (("schedule.delays", delays), ("schedule.staleness", staleness)):
        if stages == 1:  # other rules refuse it
            is_whole = False
        elif len(numbers) != stages:
            is_whole = False
            yield (
                f"{key} = {shown(numbers)}: needs {stages} numbers, one for each stage of "
                f"parallel.cuts = {shown(config.parallel.cuts)}"
            )
        elif numbers[-1]:
            is_whole = False
            yield f"{key} = {shown(numbers)}: must end with 0: the last stage waits for no other"
    if not is_whole:
        return
    for stage in range(stages - 1):
        least = staleness[stage + 1] + delays[stage]
        if staleness[stage] < least:
            yield (
                f"schedule.staleness = {shown(staleness)}: staleness[{stage}] = {staleness[stage]} "
                f"must be at least staleness[{stage + 1}] + delays[{stage}] = {least}, with "
                f"schedule.delays = {shown(delays)}: what is left is the delay of gradients from "
                f"stage {stage + 1} to stage {stage}"
            )


def optimizer_rules(config: Config) -> Iterator[str]:
    """Faults of `optimizer`: keys that do not go with others."""
    optimizer, gradient = config.optimizer, config.gradient
    if optimizer.decoupled_weight_decay and gradient.is_sparse:
        yield (
            "optimizer.decoupled_weight_decay = true: moves every weight in every update, and "
            f"gradient={gradient.name} sends some; needs false: the decay is then a part of the "
            "gradients it sends"
        )
    start, warmup = optimizer.decay_start_step, optimizer.warmup_steps
    if optimizer.schedule != "warmup_decay":
        return
    if not warmup and not optimizer.decay_steps:
        yield (
            "optimizer.schedule = 'warmup_decay': neither warms up nor decays; needs "
            "optimizer.warmup_steps or optimizer.decay_steps of 1 or more"
        )
    if optimizer.decay_steps and start < warmup:
        yield (
            f"optimizer.decay_start_step = {start}: must not be less than "
            f"optimizer.warmup_steps = {warmup}"
        )


def stopping_rules(config: Config) -> Iterator[str]:
    """Faults of `train.patience`, and of rates that fall where scores get no better."""
    train, falls = config.train, config.optimizer.schedule == "plateau"
    readers = "train.patience and optimizer.schedule=plateau"
    if train.patience is None and not falls:
        if train.min_delta:
            yield f"train.min_delta = {train.min_delta}: only applies to {readers}"
        if train.monitor != "log_loss" and not config.checkpoint.keep_best:
            yield (
                f"train.monitor = {train.monitor!r}: only applies to {readers}, and to "
                "checkpoint.keep_best"
            )
    if train.patience is not None:
        yield from _stopped_by_scores(config, f"train.patience = {train.patience}")
    if falls:
        yield from _stopped_by_scores(config, "optimizer.schedule = 'plateau'")


def _stopped_by_scores(config: Config, head: str) -> Iterator[str]:
    if not config.train.evaluate_every:
        yield f"{head}: counts evaluations; needs train.evaluate_every=epoch, or of 1 or more"
    if config.sync.name == "async" or config.parallel.elastic:
        yield (
            f"{head}: trainers that do not wait for others have no step in common; needs "
            "sync=sync or bounded, and parallel.elastic=false"
        )
    if is_late(config):
        yield (
            f"{head}: schedule={config.schedule.name} has batches in flight where evaluations "
            f"decide; {WAITING}"
        )


def gradient_rules(config: Config) -> Iterator[str]:
    """Faults of settings that a gradient method does not go with."""
    gradient, optimizer = config.gradient, config.optimizer.name
    if optimizer not in (gradient.optimizers or (optimizer,)):
        yield (
            f"gradient = {gradient.name!r}: needs optimizer={' or '.join(gradient.optimizers)}, "
            f"not {optimizer}"
        )
    has_servers, is_alone = config.parallel.servers > 0, config.parallel.trainers == 1
    if not gradient.sends_all and not has_servers and is_alone:
        add = (
            "add parallel=hybrid" if config.parallel.name == "single" else "set parallel.servers=1"
        )
        yield f"gradient = {gradient.name!r}: needs a parameter server to send to; {add}"
    alone = f" or gradient.{gradient.alone}" if gradient.alone else ""
    if gradient.rounds() and not has_servers and not is_alone:
        yield (
            f"gradient = {gradient.name!r}: its trainers agree through a server; needs "
            f"parallel.servers of 1 or more{alone}"
        )
    if gradient.rounds() and not (config.sync.name == "sync" and not config.parallel.elastic):
        needs, actual = "sync=sync", f", not {config.sync.name}"
        if config.sync.name == "sync":
            needs, actual = "parallel.elastic=false", ""
        yield (
            f"gradient = {gradient.name!r}: its trainers synchronize in every step; needs "
            f"{needs}{alone}{actual}"
        )
    for key, reason in gradient.faults_among(config.parallel.trainers):
        yield f"gradient.{key} = {shown(getattr(gradient, key))}: {reason}"
    yield from _published(config)


def _published(config: Config) -> Iterator[str]:
    """Faults of the residuals of updates, and of pulls."""
    if config.gradient.uses_lr and config.optimizer.name != "sgd":
        yield (
            f"gradient.residual = 'update': needs optimizer=sgd; optimizer={config.optimizer.name} "
            "must see gradients, not updates"
        )
    if config.gradient.publishes_means and config.pull.precision != "float32":
        yield (
            f"pull.precision = {config.pull.precision!r}: gradient.pull=levels does not round "
            "weights; needs gradient.pull=weights"
        )
    if config.gradient.publishes_means and config.pull.sparsity is not None:
        yield (
            f"pull.sparsity = {config.pull.sparsity}: gradient.pull=levels moves every weight of "
            "every replica; needs gradient.pull=weights"
        )


def sweep_rules(config: Config) -> Iterator[str]:
    """Faults of how jobs are run, here or by SLURM."""
    sweep = config.sweep
    if sweep.submit is not None and sweep.jobs > 1:
        yield (
            f"sweep.jobs = {sweep.jobs}: only applies to jobs on this machine; SLURM decides how "
            "many run at one time"
        )
    machines = config.parallel.machines
    if sweep.submit is not None and machines is not None and config.network.name != "emulated":
        yield (
            f"parallel.machines = {machines}: a job of sweep.submit is one command on one machine; "
            "needs null, or network=emulated"
        )
    for option in sweep.sbatch:
        if option.partition("=")[0] in OF_THE_SWEEP:
            yield f"sweep.sbatch = [{option}]: the sweep sets this itself for each job"


RULES: tuple[Rule, ...] = (
    *(_beside, data_rules, _model, interaction_rules, batch_norm_rules, dropout_rules),
    *(optimizer_rules, _parallel, stopping_rules, schedule_rules, _sync, _tables, _network),
    *(gradient_rules, _activation, sweep_rules, _device),
)
