"""Payload of PUSH and PARAMETERS frames: the tensors of a server and stage, in order.

A PARAMETERS frame may end with a digest, which shows whether a replica equals the copy its server
publishes. A PULL carries nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import final

import xxhash
from torch import Tensor

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.compress.host import host_array
from dlrm_hybrid.compress.update import Update, decode
from dlrm_hybrid.parallel.topology import DenseTensor
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.gradient_levels import UpdateReceiver
from dlrm_hybrid.wire.section import Dtype, Encoding, Section, SectionError

DIGEST_TENSOR = 2**16 - 1  # `tensor` of the section with the digest of all others


def flat_views(tensors: Mapping[str, Tensor]) -> dict[str, Float32s]:
    """Flat views of the tensors' memory.

    Raises:
        ValueError: a tensor is not contiguous float32 in the CPU's memory.
    """
    return {name: host_array(tensor.view(-1), "weight", name) for name, tensor in tensors.items()}


@final
class BucketReader:
    """Decodes one sender's updates of a bucket; it must see all of them, in the order sent.

    Args:
        bucket: its tensors.
    """

    def __init__(self, bucket: Sequence[DenseTensor]) -> None:
        self._bucket = bucket
        self._receiver: UpdateReceiver | None = None

    def decode(self, sections: Sequence[Section], what: str) -> Update:
        """The update that `sections` hold, coded together or one by one.

        Raises:
            DlrmError: not those of the bucket, or malformed; the message begins with `what`.
        """
        check_tensors(sections, self._bucket, what)
        if not _are_coded(sections):
            return decode(sections, what)
        if self._receiver is None:
            self._receiver = UpdateReceiver([tensor.shape for tensor in self._bucket])
        try:
            return self._receiver.decode(sections[0])
        except SectionError as error:
            raise DlrmError(f"{what}: {error}") from error


def check_tensors(sections: Sequence[Section], bucket: Sequence[DenseTensor], what: str) -> None:
    """Refuse sections that are not those of the bucket, in its order.

    Raises:
        DlrmError: the message begins with `what`.
    """
    sizes = [(section.tensor, section.count) for section in sections]
    expected = [(tensor.id, tensor.count) for tensor in bucket]
    if _are_coded(sections):
        expected = [(bucket[0].id, sum(tensor.count for tensor in bucket))]
    if sizes != expected:
        raise DlrmError(f"{what}: holds tensors and sizes {sizes}, expected {expected}")


def _are_coded(sections: Sequence[Section]) -> bool:
    """Whether one section holds all tensors."""
    return len(sections) == 1 and sections[0].encoding is Encoding.CODED


def digest_of(arrays: Iterable[Float32s]) -> int:
    """xxh3-64 of contiguous arrays, concatenated."""
    state = xxhash.xxh3_64()
    for array in arrays:
        state.update(array.data)
    return state.intdigest()


def digest_section(digest: int) -> Section:
    """The section that carries a digest."""
    payload = digest.to_bytes(8, "little")
    return Section(DIGEST_TENSOR, Encoding.DENSE, Dtype.INT64, 1, payload)


def split_digest(sections: Sequence[Section]) -> tuple[Sequence[Section], int | None]:
    """The sections of tensors, and the digest if there is one; it comes last."""
    if sections and sections[-1].tensor == DIGEST_TENSOR:
        return sections[:-1], int.from_bytes(sections[-1].payload, "little")
    return sections, None


def bucket_bytes(bucket: Iterable[DenseTensor]) -> int:
    """Size of a bucket as float32."""
    return sum(tensor.num_bytes for tensor in bucket)
