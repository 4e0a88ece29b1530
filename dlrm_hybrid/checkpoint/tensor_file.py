"""Files of tensors as safetensors has them, written without a copy of the bytes in memory.

The length of a header in 8 bytes, the header as JSON, the elements of all tensors one after the
other: github.com/huggingface/safetensors, "Format". What that library writes it copies before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from dlrm_hybrid.durable import Content, write

SUFFIX = ".safetensors"
DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Content:
    """Make a file of contiguous tensors, and make it durable.

    Raises:
        OSError: it cannot be written.
    """
    # Wide elements first: so all of them are aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    return write(path, _parts({name: tensors[name] for name in order}))


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        yield tensor.view(-1).view(torch.uint8).numpy().data
