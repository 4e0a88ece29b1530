"""The joint meaning of keys of `data`, `model` and `embedding`, and values that follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from dlrm_hybrid.compress.gradient.methods import find
from dlrm_hybrid.config.choices import Criteo
from dlrm_hybrid.config.identity import FROM_ITSELF
from dlrm_hybrid.config.keys import shown
from dlrm_hybrid.config.outside import Unloaded
from dlrm_hybrid.config.schema import Config, Model, OwnModelConfig
from dlrm_hybrid.data.schemas.reading import Schema, builtin, named
from dlrm_hybrid.model.interaction import Cross, Dot, Fm
from dlrm_hybrid.model.own import INTERACTION, OwnModel
from dlrm_hybrid.model.spec import DataShape, ModelShape, ModelSpec, Partition, mlp_layers
from dlrm_hybrid.parallel.dense.pulls import Pulls
from dlrm_hybrid.parallel.schedule import Pipeline
from dlrm_hybrid.record import defaults_of
from dlrm_hybrid.types import ConfigError

SECTIONS: Mapping[str, type] = {"cross": Cross, "fm": Fm}
"""Sections of `model`, each read by the choice of `model.interaction` with its name."""

SECTIONS_OF_SIZE = ("parallel", "embedding", "gradient", "sync")
"""Sections on which the numbers of trainers and servers depend."""
MOST_PEERS, MOST_DENSE_PEERS = 4, 2
"""Most trainers that send each other their gradients unless a number of servers is said, and most
whose gradients are dense. Measured: docs/results/bytes.md."""

NO_SCHEMA = (
    "data.schema = null: name the schema of these columns, or let data.guess=FILE write a first one"
)


def without_unread(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values without the sections that the interaction does not read; faults of those set."""
    model = values.get("model")
    if not isinstance(model, Mapping):
        return values, []
    settings = dict(cast("Mapping[str, Any]", model))
    chosen, faults = settings.get("interaction"), list[str]()
    for section in SECTIONS:
        if section == chosen or section not in settings:
            continue
        unread = settings.pop(section)
        faults += [
            f"model.{section}{key} = {value!r}: only applies to model.interaction={section}, "
            f"not {chosen}"
            for key, value in changed(unread, defaults_of(SECTIONS[section]))
            if unread is not None
        ]
    return {**values, "model": settings}, faults


def changed(section: Any, default: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The values that differ from the defaults of a section, by key below it."""
    if not isinstance(section, Mapping):
        return [("", section)]
    values = cast("Mapping[str, Any]", section)
    return [(f".{k}", v) for k, v in values.items() if (k, v) not in default.items()]


def with_input_width(
    values: Mapping[str, Any], has_model: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """The configuration with the width of the dense input where `model.bottom` has null for it.

    Null for all of `model.bottom` is the empty list, no bottom MLP.

    Returns:
        the values, and faults: those of the schema, or of a model that does not fit it.
    """
    if (sections := _sections(values, "data", "model")) is None:
        return dict(values), []
    rows, shape = sections
    if ":" in str(shape.get("name")):
        return _with_columns(values, rows, shape, has_model)
    bottom = shape.get("bottom", [])
    if bottom is None:
        return {**values, "model": {**shape, "bottom": []}}, []
    if not isinstance(bottom, list) or not bottom or bottom[0] is not None:
        return dict(values), []
    width, _, faults = _columns(rows)
    if has_model and not width and not faults:
        schema = rows.get("schema")
        faults = [
            f"{NO_SCHEMA}; model.bottom[0] = null is the number of dense ones"
            if schema is None
            else f"model.bottom[0] = null: {schema} has no dense columns; needs model.bottom=[]"
        ]
    rest = cast("list[Any]", bottom)[1:]
    return {**values, "model": {**shape, "bottom": [width or 1, *rest]}}, faults


def _with_columns(
    values: Mapping[str, Any], rows: Mapping[str, Any], model: Mapping[str, Any], has_model: bool
) -> tuple[dict[str, Any], list[str]]:
    """As `with_input_width`, for a model of the user's own."""
    unknown = [key for key in ("dense", "tables") if key in model and model[key] is None]
    if not has_model or not unknown:
        return dict(values), []
    dense, tables, faults = _columns(rows)
    if not tables and not faults:
        faults = [f"{NO_SCHEMA}; model.{unknown[0]} = null is their number"]
    counts = {"dense": dense, "tables": tables or None}
    filled = {**model, **{name: counts[name] for name in unknown}}
    return {**values, "model": filled}, faults


def with_table_dims(
    values: Mapping[str, Any], schema: Schema | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The configuration with the widths of tables that columns of the schema have of their own.

    Args:
        schema: that of the rows; None: that of `data.schema`, if it names one.

    Returns:
        the values, and faults: a model whose tables have one width.
    """
    if (sections := _sections(values, "data", "model")) is None:
        return dict(values), []
    rows, shape = sections
    dim, named = shape.get("embedding_dim"), schema or _schema(rows)[0]
    columns = () if named is None else named.categorical
    places = [i for i, column in enumerate(columns) if column.embedding_dim not in (None, dim)]
    if named is None or not places or shape.get("table_dims") is not None:
        return dict(values), []
    if ":" in str(shape.get("name")):
        column = columns[places[0]]
        key = f"categorical[{places[0]}].embedding_dim"
        return dict(values), [
            f"{key} = {column.embedding_dim}: a model of your own takes rows of one "
            f"width; column {column.name!r} needs null, or model.embedding_dim = {dim}"
        ]
    dims = [column.embedding_dim or dim for column in named.by_table(columns)]
    return {**values, "model": {**shape, "table_dims": dims}}, []


def with_world_size(values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with numbers where `parallel` has null: one for each machine, or few.

    On few machines trainers without stages need no servers, which cost CPU time and bytes there.
    """
    if (sections := _sections(values, *SECTIONS_OF_SIZE)) is None:
        return dict(values)
    world, tables, *_ = sections
    number = world.get("machines")
    machines = number if isinstance(number, int) and number > 1 else None
    tables_each = int(tables.get("name") == "served")
    follow = {
        "trainers": machines or 2,
        "servers": 0 if machines and _does_without_servers(values, machines) else machines or 1,
        "table_servers": (machines or 1) * tables_each,
    }
    filled = {key: number for key, number in follow.items() if world.get(key, 0) is None}
    return {**values, "parallel": {**world, **filled}}


def _does_without_servers(values: Mapping[str, Any], machines: int) -> bool:
    """Whether trainers on few machines may send their gradients to each other."""
    world, gradient, sync = (values[name] for name in ("parallel", "gradient", "sync"))
    if world.get("cuts") or world.get("elastic") or sync.get("name") != "sync":
        return False
    if changed(values.get("pull", {}), defaults_of(Pulls)):  # pulls need a server
        return False
    trainers = world.get("trainers")
    number = trainers if isinstance(trainers, int) else machines
    if not 1 < number <= MOST_PEERS or (method := find(str(gradient.get("name")))) is None:
        return False
    settings = {key: value for key, value in gradient.items() if key != "name"}
    try:
        agrees = bool(method(**settings).rounds())  # which its trainers do through a server
    except Exception:
        return False  # its faults are told when it is made
    return not agrees and (method.is_sparse or number <= MOST_DENSE_PEERS)


def _sections(values: Mapping[str, Any], *names: str) -> list[Mapping[str, Any]] | None:
    """The sections of these names; None if one is missing, or no section."""
    sections: list[Any] = [values.get(name) for name in names]
    return sections if all(isinstance(section, Mapping) for section in sections) else None


def _columns(data: Mapping[str, Any]) -> tuple[int, int, list[str]]:
    """Dense and categorical columns of the rows, 0 if unknown; and faults of their schema."""
    if _is_guessed(data):
        return 1, 1, []
    schema, faults = _schema(data)
    return (0, 0, faults) if schema is None else (schema.num_dense, len(schema.categorical), [])


def _is_guessed(data: Mapping[str, Any]) -> bool:
    return data.get("name") == "table" and data.get("guess") is not None


def _schema(data: Mapping[str, Any]) -> tuple[Schema | None, list[str]]:
    """The schema of the rows, None if none is named; and its faults."""
    name = data.get("schema") if data.get("name") == "table" else "criteo_kaggle"
    if not isinstance(name, str) or _is_guessed(data):
        return None, []
    try:
        return (builtin(name) if name == "criteo_kaggle" else named(name)), []
    except ConfigError as error:
        return None, str(error).splitlines()


def interaction_rules(config: Config) -> Iterator[str]:
    """Faults of `model.interaction`: settings that it lacks, or does not read."""
    chosen = config.model.interaction
    for section in SECTIONS:
        is_there = getattr(config.model, section) is not None
        if section == chosen and not is_there:
            yield f"model.{section} = null: model.interaction={chosen} needs its keys"
        if section != chosen and is_there:
            yield f"model.{section}: only applies to model.interaction={section}, not {chosen}"


def dropout_rules(config: Config) -> Iterator[str]:
    """Faults of `model.bottom_dropout`: a share of nothing."""
    model = config.model
    if model.bottom_dropout and not model.bottom[1:-1]:
        yield (
            f"model.bottom_dropout = {model.bottom_dropout}: model.bottom = "
            f"{shown(model.bottom)} has no hidden layer to drop from; needs null"
        )


def is_known(model: Model) -> bool:
    """Whether a model's parts are known; those of the user's own only where it is loaded."""
    if not isinstance(model, OwnModelConfig):
        return True
    return not isinstance(model, Unloaded) and model.tables is not None


def spec_of(model: Model, data: DataShape) -> ModelShape:
    """The shape of a model for such rows.

    Raises:
        ConfigError: its widths do not fit together; or it is the user's own, and not loaded.
    """
    if isinstance(model, Unloaded):
        model.refuse()
    if isinstance(model, OwnModelConfig):
        return OwnModel(
            module=model.module,
            num_dense=model.dense or 0,
            embedding_dim=model.embedding_dim,
            settings=model.own_settings,
            **data.of_rows,
        )
    return ModelSpec(
        embedding_dim=model.embedding_dim,
        bottom=model.bottom,
        top=(*model.top[:-1], data.labels),
        interaction=model.cross or model.fm or Dot(),
        dropout=model.dropout,
        bottom_dropout=model.bottom_dropout,
        batch_norm=model.batch_norm,
        table_dims=model.table_dims or (),
        **data.of_rows,
    )


def _alone(model: Model) -> ModelShape:
    """The shape of a model with tables of one row, as many as it says; raises as `spec_of`."""
    says = model.tables if isinstance(model, OwnModelConfig) else len(model.table_dims or ())
    return spec_of(model, DataShape(table_rows=(1,) * (says or 2)))


def layer_names(model: Model) -> tuple[str, ...]:
    """Names of all layers, or of all parts, in the order of the forward pass."""
    if isinstance(model, OwnModelConfig):
        return _alone(model).layer_names
    return mlp_layers(model.bottom, model.top)


def interaction_stage(config: Config) -> int:
    """The stage with the tables: in a DLRM it follows the last layer of the bottom MLP."""
    if not (cuts := config.parallel.cuts):  # then a user's own model need not be made
        return 0
    names = layer_names(config.model)
    first = INTERACTION if INTERACTION in names else "top.1"
    return sum(cut in cuts for cut in names[: names.index(first)])


def own_model_rules(config: Config) -> Iterator[str]:
    """Faults of a model of the user's own: what it is, and what only a DLRM has."""
    model = config.model
    if not isinstance(model, OwnModelConfig):
        return
    if config.precision != "float32":
        yield (
            f"precision = {config.precision!r}: a model of your own computes in what its parts "
            "say, and takes and gives float32; needs float32"
        )
    if not is_known(model):
        return
    try:
        partition = Partition.of(_alone(model), config.parallel.cuts)
    except ConfigError as error:  # cuts that there are not have a rule of their own
        if not str(error).startswith("parallel.cuts"):
            yield str(error)
        return
    for part in partition.stages:
        if not part.parameter_names:
            yield (
                f"parallel.cuts = {shown(config.parallel.cuts)}: {', '.join(part.layer_names)} "
                "would be a stage without parameters; leave out a cut"
            )


def pipeline(config: Config) -> Pipeline:
    """The ops of all stages in a step."""
    stages = len(config.parallel.cuts) + 1
    return Pipeline.of(config.schedule, stages, config.schedule.microbatches)


def is_late(config: Config) -> bool:
    """Whether batches are in flight between two steps."""
    name = config.schedule.name
    return name == "dsp" or (":" in name and pipeline(config).most_in_flight > 0)


def dense_tensors(model: Model) -> int | None:
    """Number of a model's dense parameters; None for a model that other rules refuse."""
    try:
        return len(_alone(model).dense_shapes())
    except ConfigError:
        return None


def batch_norm_rules(config: Config) -> Iterator[str]:
    """Faults of worlds in which a trainer's batch has not one mean and variance, counted once."""
    if not config.model.batch_norm:
        return
    head, parallel = "model.batch_norm=true", config.parallel
    model = config.model
    deep = [x.deep for x in (model.fm, model.cross) if x is not None]
    if not any((model.bottom[1:-1], model.top[:-1], *deep)):
        yield "model.batch_norm = true: this model has no hidden layer to normalise"
    if config.train.batch_size < 2:
        yield f"train.batch_size = 1: one row has no variance; {head} needs 2 or more"
    if config.schedule.microbatches > 1:
        yield (
            f"schedule.microbatches = {config.schedule.microbatches}: statistics would be those of "
            f"a micro-batch, not of a trainer's batch; {head} needs 1"
        )
    if is_late(config):
        yield (
            f"schedule = {config.schedule.name!r}: backward computes forward again, with other "
            f"weights, and would count a batch twice; {head} needs sequential, gpipe or "
            "one_f_one_b"
        )
    if config.sync.name == "async":
        yield (
            "sync = 'async': trainers do not meet to bring their statistics together; "
            f"{head} needs sync=sync or bounded"
        )
    if parallel.elastic:
        yield (
            "parallel.elastic = true: a trainer that is lost takes its statistics along; "
            f"{head} needs false"
        )


def raw_files(config: Config) -> tuple[str, ...]:
    """`data.raw` as a list, of one file or several."""
    raw = config.data.raw
    if raw is None:
        return ()
    return (raw,) if isinstance(raw, str) else raw


def data_rules(config: Config) -> Iterator[str]:
    """Faults of `data`: not as many files as days, and what rows that come later do not go with."""
    data, files = config.data, len(raw_files(config))
    if isinstance(data, Criteo) and data.day_split == "files" and files != data.days:
        yield (
            f"data.day_split = 'files': data.raw must list data.days = {data.days} files, "
            f"but lists {files}"
        )
    if data.follow is not None:
        yield from _follow_rules(config, files)
    if data.follow is not None or data.progressive:
        yield from _progressive_rules(config)


def _follow_rules(config: Config, files: int) -> Iterator[str]:
    data, head = config.data, f"data.follow = {config.data.follow}"
    if files:
        yield f"{head}: names the files, so data.raw must be null"
    if data.prepared is not None:
        yield f"{head}: each file has prepared rows of its own, so data.prepared must be null"
    if (data.schema, data.base) == (None, None) and config.checkpoint.resume in FROM_ITSELF:
        yield NO_SCHEMA


def _progressive_rules(config: Config) -> Iterator[str]:
    train, scored = config.train, "rows are scored once, before they are learned (data.progressive)"
    if train.evaluate_every:
        yield f"train.evaluate_every = {train.evaluate_every}: {scored}"
    if train.patience is not None:
        yield f"train.patience = {train.patience}: {scored}"
    if config.optimizer.schedule == "plateau":
        yield f"optimizer.schedule = plateau: {scored}"
    if config.data.test_part != "day":
        yield f"data.test_part = {config.data.test_part}: all {scored}"
