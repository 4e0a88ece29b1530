"""From the configuration to methods whose trainers agree before they push; imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dlrm_hybrid.compress.gradient.cltk import CltK, CltKCoordination, CltKOptions
from dlrm_hybrid.compress.gradient.coordination import CoordinatedCompressor, Coordination
from dlrm_hybrid.compress.gradient.deft import Deft, DeftCoordination, DeftOptions
from dlrm_hybrid.compress.gradient.terngrad import (
    TernGrad,
    TernGradCoordination,
    TernGradOptions,
)
from dlrm_hybrid.compress.gradient.union import UnionCoordination, UnionIndex
from dlrm_hybrid.config import build_gradient
from dlrm_hybrid.config.build_compress import dtype
from dlrm_hybrid.config.gradient_holder import Holder
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.wire.section import Encoding

CODES = {"bits": Encoding.TERNARY, "trits": Encoding.TRITS}


def compressor(config: Config, holder: Holder) -> CoordinatedCompressor | None:
    """The trainer's side; None where each trainer decides alone."""
    options = config.gradient
    if options.aggregation == "union":
        return UnionIndex(build_gradient.gradients(config, holder), dtype(options.precision))
    make = COMPRESSORS.get(config.gradient.name)
    return None if make is None else make(config, holder)


def coordination(config: Config) -> Coordination | None:
    """The server's side; None where each trainer decides alone."""
    if config.gradient.aggregation == "union":
        return UnionCoordination()
    make = COORDINATIONS.get(config.gradient.name)
    return None if make is None else make(config)


def tells_levels(config: Config) -> bool:
    """Whether servers tell means of ternary gradients, from which replicas learn."""
    terngrad = config.gradient.terngrad
    return terngrad is not None and terngrad.pull == "levels"


def _cltk(config: Config, holder: Holder) -> CoordinatedCompressor:
    options = config.gradient
    assert options.cltk is not None
    return CltK(
        holder.specs,
        CltKOptions(
            sparsity=options.sparsity,
            dtype=dtype(options.precision),
            low_pass=options.cltk.low_pass,
            trainer=holder.trainer,
            trainers=config.parallel.trainers,
        ),
    )


def _cltk_coordination(config: Config) -> Coordination:
    return CltKCoordination()


def _deft(config: Config, holder: Holder) -> CoordinatedCompressor:
    options = config.gradient
    assert options.deft is not None
    return Deft(
        holder.specs,
        DeftOptions(
            sparsity=options.sparsity,
            dtype=dtype(options.precision),
            is_exact=options.deft.budget == "exact",
            trainer=holder.trainer,
            trainers=config.parallel.trainers,
        ),
    )


def _deft_coordination(config: Config) -> Coordination:
    return DeftCoordination()


def _terngrad(config: Config, holder: Holder) -> CoordinatedCompressor:
    options = config.gradient.terngrad
    assert options is not None
    last = f"top.{len(config.model.top)}"
    return TernGrad(
        holder.specs,
        TernGradOptions(
            clip=options.clip,
            shares=options.sharing,
            encoding=CODES[options.encoding],
            smallest=options.smallest,
            exempt=frozenset((f"{last}.weight", f"{last}.bias")),
            seed=config.train.seed,
            trainer=holder.trainer,
        ),
    )


def _terngrad_coordination(config: Config) -> Coordination | None:
    assert config.gradient.terngrad is not None
    return TernGradCoordination() if config.gradient.terngrad.sharing else None


COMPRESSORS: Mapping[str, Callable[[Config, Holder], CoordinatedCompressor]] = {
    "cltk": _cltk,
    "deft": _deft,
    "terngrad": _terngrad,
}
COORDINATIONS: Mapping[str, Callable[[Config], Coordination | None]] = {
    "cltk": _cltk_coordination,
    "deft": _deft_coordination,
    "terngrad": _terngrad_coordination,
}
