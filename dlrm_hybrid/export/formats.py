"""Writes a plain model in each format, and reads such files back to score rows.

Shapes: B rows of a batch, L labels.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.checkpoint.writer import write_tensors
from dlrm_hybrid.config.commands import Format, Naming
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.export.names import shapes_of, to_ours, to_theirs
from dlrm_hybrid.export.plain import INT8_KINDS, PlainDlrm, quantised
from dlrm_hybrid.model.layers.keep_largest import KeepLargest
from dlrm_hybrid.model.own import OwnModel
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.saved.inputs import NO_LISTS, ListInputs, inputs_of, list_name, weights_name
from dlrm_hybrid.types import ConfigError, ResourceError

OUTPUTS = ("logit", "score")
OPSET = 18
# Above this the tensors of ONNX are in a file of their own: protocol buffers end at 2 GiB.
MOST_ONNX_BYTES = 1 << 30

Scorer = Callable[[Batch], tuple[Float32s, Float32s]]
"""Scores a batch: returns logits and probabilities, each (B,), or (B, L) of several labels."""


def require(format: Format) -> None:
    """Raise ResourceError if a format needs packages that are not installed."""
    for package in ("onnx", "onnxscript", "onnxruntime") if format == "onnx" else ():
        try:
            import_module(package)
        except ImportError:
            raise ResourceError(
                f"export.format = onnx: needs {package}, which is not installed: "
                "pip install 'dlrm-hybrid[export]'"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A model's file in an exported folder.

    Attributes:
        naming: names of the tensors in a safetensors file.
        int8: whether its tables are `quantised`.
        masks: masks of activations, by the layer that they follow.
    """

    format: Format
    naming: Naming
    spec: ModelShape
    int8: bool
    lists: ListInputs = NO_LISTS
    masks: Mapping[str, KeepLargest] = field(default_factory=dict[str, KeepLargest])

    @property
    def file(self) -> str:
        """Name of the file."""
        return f"model.{self.format}"

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the model with float32 tensors, named as in a checkpoint; raises OSError."""
        path = folder / self.file
        state = quantised(self.spec, tensors) if self.int8 else tensors
        if self.format == "safetensors":
            foreign = to_theirs(self.naming, self.spec, state)
            write_tensors(path, {name: tensor.contiguous() for name, tensor in foreign.items()})
            return
        program = self._program(state)
        if self.format == "pt2":
            program.example_inputs = None  # else a pickle, the only one in the file
            with _silent():
                torch.export.save(program, path)
            return
        with _silent():
            inputs = ["dense"] * bool(self.spec.num_dense) + ["ids"]
            inputs += [*map(list_name, self.lists.columns), *map(weights_name, self.lists.weighted)]
            model: Any = torch.onnx.export(
                program,
                input_names=inputs,
                output_names=OUTPUTS,
                opset_version=OPSET,
                verbose=False,
            )
            num_bytes = sum(tensor.nbytes for tensor in state.values())
            model.save(path, external_data=num_bytes > MOST_ONNX_BYTES)

    def scorer(self, folder: Path) -> Scorer:
        """Read the file back with the library that its users would use."""
        path = folder / self.file
        if self.format == "onnx":
            return _onnx_scorer(path, self.lists)
        if self.format == "pt2":
            return _torch_scorer(torch.export.load(path).module(), self.lists)
        names = list(shapes_of(self.spec))
        if self.int8:
            names += (f"{table}.{kind}" for table in self.spec.table_names for kind in INT8_KINDS)
        theirs: dict[str, Tensor] = cast(Any, safetensors.torch).load_file(path)
        tensors = to_ours(self.naming, self.spec, names, theirs)
        return _torch_scorer(self._plain(tensors), self.lists)

    def expected(self, tensors: Mapping[str, Tensor]) -> Scorer:
        """The scorer that a file of these tensors must agree with."""
        state = quantised(self.spec, tensors) if self.int8 else tensors
        return _torch_scorer(self._plain(state), self.lists)

    def _plain(self, tensors: Mapping[str, Tensor]) -> PlainDlrm:
        return PlainDlrm(self.spec, tensors, self.lists, self.masks)

    def _program(self, tensors: Mapping[str, Tensor]) -> Any:
        model = self._plain(tensors)
        lists, dynamic = self.lists, torch.export.Dim.DYNAMIC
        singles = len(self.spec.columns) - len(lists.columns)
        examples: dict[str, Any] = {}
        if self.spec.num_dense:
            examples["dense"] = torch.zeros(2, self.spec.num_dense)
        examples["ids"] = torch.zeros(2, singles, dtype=torch.int64)
        sizes: dict[str, Any] = {name: {0: dynamic} for name in examples}
        if lists.columns:
            examples["lists"] = [torch.zeros(2, 3, dtype=torch.int64) for _ in lists.columns]
            sizes["lists"] = [{0: dynamic, 1: dynamic} for _ in lists.columns]
        if lists.weighted:
            examples["weights"] = [torch.zeros(2, 3) for _ in lists.weighted]
            sizes["weights"] = [{0: dynamic, 1: dynamic} for _ in lists.weighted]
        try:
            return torch.export.export(model, (), kwargs=examples, dynamic_shapes=sizes)
        except Exception as error:
            if not isinstance(self.spec, OwnModel):
                raise
            raise ConfigError(
                f"export.format = {self.format}: torch.export cannot write "
                f"{self.spec.path} as a graph: {type(error).__name__}: "
                f"{next(iter(str(error).splitlines()), '')}; needs export.format=safetensors"
            ) from error


def _torch_scorer(module: Any, lists: ListInputs) -> Scorer:
    def score(batch: Batch) -> tuple[Float32s, Float32s]:
        inputs = inputs_of(batch.dense_BI, batch.bags, lists).items()
        arguments: dict[str, Any] = {name: torch.from_numpy(array) for name, array in inputs}
        if lists.columns:
            arguments["lists"] = [arguments.pop(list_name(table)) for table in lists.columns]
        if lists.weighted:
            arguments["weights"] = [arguments.pop(weights_name(table)) for table in lists.weighted]
        with torch.no_grad():
            outputs: tuple[Tensor, Tensor] = module(**arguments)
        return outputs[0].numpy(), outputs[1].numpy()

    return score


def _onnx_scorer(path: Path, lists: ListInputs) -> Scorer:
    runtime = import_module("onnxruntime")
    options: Any = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session: Any = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def score(batch: Batch) -> tuple[Float32s, Float32s]:
        inputs = inputs_of(batch.dense_BI, batch.bags, lists)
        logit_B, score_B = session.run(list(OUTPUTS), inputs)
        return logit_B, score_B

    return score


@contextmanager
def _silent() -> Generator[None, None, None]:
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
