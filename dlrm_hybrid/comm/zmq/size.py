"""The limit on messages, and advice on how to make longer ones shorter."""

from __future__ import annotations

from collections.abc import Mapping

from dlrm_hybrid.types import ConfigError
from dlrm_hybrid.wire.frame import Frame, Kind

MAX_MESSAGE_BYTES = 1 << 30
_DENSE = "fewer weights in one message: more parallel.servers or parallel.cuts"
_ROWS = "a smaller train.batch_size or evaluate.batch_size, or more parallel.table_servers"
_ACTIVATIONS = "a smaller train.batch_size or evaluate.batch_size, or more schedule.microbatches"
_SMALLER: Mapping[Kind, str] = {
    **dict.fromkeys((Kind.PUSH, Kind.PARAMETERS, Kind.CONTRIBUTION, Kind.RESULT), _DENSE),
    Kind.WEIGHTS: _DENSE,
    **dict.fromkeys((Kind.LOOKUP, Kind.ROWS, Kind.UPDATE), _ROWS),
    **dict.fromkeys((Kind.ACTIVATION, Kind.ACTIVATION_GRADIENT), _ACTIVATIONS),
}


def check_size(frame: Frame, to: int, num_bytes: int) -> None:
    """Refuse a message that its receiver would drop.

    Raises:
        ConfigError: it is too long; names message and limit, and advises.
    """
    if num_bytes > MAX_MESSAGE_BYTES:
        advice = _SMALLER.get(frame.kind)
        raise ConfigError(
            f"{frame.kind.name.lower()} {frame.number} of rank {frame.sender} to rank {to}: "
            f"{num_bytes:,} bytes, and a message has at most {MAX_MESSAGE_BYTES:,}"
            + (f"; needs {advice}" if advice else "")
        )
