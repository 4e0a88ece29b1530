"""What a worker asks of the world it lives in, while it makes a step.

A worker's step is a generator: it yields an effect and gets the result. A process of its own
carries the effect out at once; the in-process world runs the steps of all workers in turns and
answers them from its queues and its one set of tables. Both run the same numeric code.

Shapes: B batch, F tables, D embedding dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dlrm_hybrid.wire.frame import Kind


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for one frame; the result is the frame.

    Attributes:
        kind: of the frame.
        sender: rank it comes from.
        step: it belongs to; for parameters the version they make.
        boundary: between stages `boundary` and `boundary + 1`, 0 where there is none.
        microbatch: 0 where there is none.
    """

    kind: Kind
    sender: int
    step: int
    boundary: int
    microbatch: int


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """Look up rows of the tables; the result is pooled_BFD, float32 and detached.

    Attributes:
        ids_FB: int64, of this trainer's batch.
        lr: learning rate of the tables in this step: FBGEMM wants it before the lookup. 0 where
            nothing will learn.
    """

    ids_FB: Tensor
    lr: float


@dataclass(frozen=True, slots=True, eq=False)
class LearnEmbeddings:
    """Update the tables looked up last, at the rate of that lookup; no result.

    Attributes:
        gradient_BFD: of the mean loss of this trainer's own batch; the world divides it by the
            number of trainers.
    """

    gradient_BFD: Tensor


Effect = Receive | Lookup | LearnEmbeddings
