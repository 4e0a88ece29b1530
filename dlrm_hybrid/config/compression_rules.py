"""What keys of compression mean together and with other sections; see `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from dlrm_hybrid.config.schema import Config


def sparsity_per_cut(config: Config) -> tuple[float, ...]:
    """`activation.sparsity` of every cut, whether one number or a list was given."""
    sparsity = config.activation.sparsity
    return sparsity if isinstance(sparsity, tuple) else (sparsity,) * len(config.parallel.cuts)


def pull_rules(config: Config) -> Iterator[str]:
    """Faults of `pull`."""
    if config.pull.precision != "float32" and not config.parallel.servers:
        yield f"pull.precision = {config.pull.precision!r}: needs parallel.servers of 1 or more"


def _of_whole_activations(config: Config) -> Iterator[str]:
    activation = config.activation
    if activation.sparsity != 0:
        yield f"activation.sparsity = {activation.sparsity}: only applies to activation=dct"
    if activation.precision != "float32":
        yield f"activation.precision = {activation.precision!r}: activation=none sends float32"
    if activation.observe is not None and not config.parallel.cuts:
        yield f"activation.observe = {activation.observe}: needs parallel.cuts"


def _no_cuts(config: Config) -> str:
    if config.parallel.name == "single":
        return "compresses what stages exchange, and parallel=single has none; add parallel=hybrid"
    return "compresses what stages exchange; needs parallel.cuts, e.g. parallel.cuts=[bottom.2]"


def activation_rules(config: Config) -> Iterator[str]:
    """Faults of `activation`."""
    activation, cuts = config.activation, config.parallel.cuts
    if activation.name == "dct" and activation.allow_rice is None:
        yield "activation.allow_rice = null: activation=dct needs true or false"
    if activation.name != "dct" and activation.allow_rice is not None:
        yield f"activation.allow_rice = {activation.allow_rice}: only applies to activation=dct"
    if activation.name == "none":
        yield from _of_whole_activations(config)
        return
    if activation.observe is not None:
        yield f"activation.observe = {activation.observe}: only applies to activation=none"
    if not cuts:
        yield f"activation = {activation.name!r}: {_no_cuts(config)}"
    elif isinstance(activation.sparsity, tuple) and len(activation.sparsity) != len(cuts):
        yield (
            f"activation.sparsity = {list(activation.sparsity)}: one number, or one for each of "
            f"parallel.cuts = [{', '.join(cuts)}]"
        )
    if activation.name in ("sketch", "gradient_topk") and activation.precision != "float32":
        yield (
            f"activation.precision = {activation.precision!r}: activation={activation.name} "
            "sends float32"
        )
