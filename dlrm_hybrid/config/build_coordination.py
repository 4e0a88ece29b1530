"""From the configuration to methods whose trainers agree before they push; imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dlrm_hybrid.compress.gradient.cltk import CltK, CltKCoordination, CltKOptions
from dlrm_hybrid.compress.gradient.coordination import CoordinatedCompressor, Coordination
from dlrm_hybrid.config.build_compress import dtype
from dlrm_hybrid.config.gradient_holder import Holder
from dlrm_hybrid.config.schema import Config


def compressor(config: Config, holder: Holder) -> CoordinatedCompressor | None:
    """The trainer's side; None where each trainer decides alone."""
    make = COMPRESSORS.get(config.gradient.name)
    return None if make is None else make(config, holder)


def coordination(config: Config) -> Coordination | None:
    """The server's side; None where each trainer decides alone."""
    make = COORDINATIONS.get(config.gradient.name)
    return None if make is None else make(config)


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


COMPRESSORS: Mapping[str, Callable[[Config, Holder], CoordinatedCompressor]] = {"cltk": _cltk}
COORDINATIONS: Mapping[str, Callable[[Config], Coordination]] = {"cltk": _cltk_coordination}
