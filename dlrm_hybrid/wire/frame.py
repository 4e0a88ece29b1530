"""One message between two ranks: what it is about, and the tensors it carries."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """What a frame is for."""

    HELLO = 1
    ACTIVATION = 2
    ACTIVATION_GRADIENT = 3
    PUSH = 4
    PARAMETERS = 5
    CONTROL = 6


class Encoding(IntEnum):
    """How the elements of a section lie in its payload."""

    DENSE = 1


class Dtype(IntEnum):
    """Type of the elements of a section."""

    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    INT32 = 4
    INT64 = 5
    UINT8 = 6


@dataclass(frozen=True, slots=True)
class Section:
    """One tensor of a frame.

    Attributes:
        tensor: its number, position of its name in `ModelSpec.dense_shapes()`.
        encoding: how the payload is to be read.
        dtype: of the elements.
        count: elements of the tensor.
        payload: the encoded elements.
    """

    tensor: int
    encoding: Encoding
    dtype: Dtype
    count: int
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message.

    Attributes:
        kind: what it is for.
        sender: rank it comes from.
        attempt: how often the run has been restarted; frames of another attempt are refused.
        step: it belongs to; for parameters the version they make.
        boundary: between stages `boundary` and `boundary + 1`, 0 where there is none.
        microbatch: 0 where there is none.
        sections: the tensors.
    """

    kind: Kind
    sender: int
    attempt: int
    step: int
    boundary: int
    microbatch: int
    sections: tuple[Section, ...]
