"""The raw row of Criteo, the record it becomes, and a batch of records as the model reads it.

Raw: 40 fields between tabs, no header: label, 13 integers I1–I13, 26 categoricals C1–C26 of eight
hexadecimal digits; an empty field is a missing value.

Record, 40 words of 4 bytes, little-endian, row after row:

    word   0        1 … 13             14 … 39
           label    log(x + 1)         row numbers of the embedding tables
           float32  float32            int32

Shapes: B rows of a batch, I = 13 integer features, F = 26 categorical features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_DENSE = 13
NUM_CATEGORICAL = 26
NUM_COLUMNS = 1 + NUM_DENSE + NUM_CATEGORICAL

FIRST_DENSE_WORD = 1
FIRST_ID_WORD = 1 + NUM_DENSE
RECORD_WORDS = NUM_COLUMNS
RECORD_BYTES = 4 * RECORD_WORDS
BLOCK_ROWS = 1 << 13  # of a shard have a checksum of their own in the manifest

MISSING_KEY = 0  # as facebookresearch/dlrm: an empty categorical reads as hexadecimal 0
VOCABULARY_FOLDER = "vocabulary"


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows ready for the model; the arrays belong to the receiver.

    Attributes:
        dense_BI: float32, log(x + 1) of the integer features, negatives taken as 0.
        ids_FB: int64, feature-major and contiguous, row numbers of the embedding tables.
        label_B: float32, 0 or 1.
    """

    dense_BI: npt.NDArray[np.float32]
    ids_FB: npt.NDArray[np.int64]
    label_B: npt.NDArray[np.float32]
