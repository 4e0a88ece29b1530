"""Training with compression as a textbook has it: one process, one autograd graph, dense tensors.

Shapes: B rows of a batch, N width of a boundary, D embedding dimension, F tables.
"""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.loader import START, Batch
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.model.dlrm import StageModel
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.spec import Partition
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import model as build_model


def kept(count: int, sparsity: float) -> int:
    """Elements of `count` that a sparsity leaves."""
    return max(1, count - int(count * sparsity + 1e-9))


def largest(tensor: Tensor, keep: int) -> Tensor:
    """A mask of the `keep` largest magnitudes along the last dimension, equal ones included."""
    sizes = tensor.detach().abs()
    return (sizes >= sizes.topk(keep).values[..., -1:]) & (sizes > 0)


class Reference:
    """The model of a finished run, with its initial values, learns from the same batches.

    Args:
        folder: of the run; its configuration says what is kept at cuts and of gradients.
    """

    def __init__(self, folder: Path) -> None:
        config = validate(json.loads((folder / "config.json").read_text()))
        shards = open_shards(Path(config.data.prepared or ""), build.semantics(config))
        spec = build.shape_of(config, shards.manifest)
        self._config, cuts = config, config.parallel.cuts
        self._stages = [
            StageModel(spec, part, Precision.FLOAT32, config.train.seed)
            for part in Partition.of(spec, cuts).stages
        ]
        masks = config.activation.sparsity
        self._masks = masks if isinstance(masks, tuple) else (masks,) * len(cuts)
        self._tables = build_model.embeddings(config, spec)
        trainers = range(config.parallel.trainers)
        self._loaders = [build_model.loader(config, shards, trainer) for trainer in trainers]
        self._weights = {
            name: weight
            for stage in self._stages
            for name, weight in stage.dense_parameters().items()
        }
        self._residuals = [
            {name: torch.zeros_like(weight) for name, weight in self._weights.items()}
            for _ in trainers
        ]

    def train(self, steps: int) -> dict[str, Tensor]:
        """All weights after so many steps."""
        at = START
        for _ in range(steps):
            reads = [loader.read(at) for loader in self._loaders]
            at = reads[0][1]
            self._step([batch for batch, _ in reads])
        dense = {name: weight.detach() for name, weight in self._weights.items()}
        return {**dense, **self._tables.weights()}

    def _step(self, batches: list[Batch]) -> None:
        lr, trainers = self._config.optimizer.lr, len(batches)
        self._tables.set_lr(lr)
        ids_FB = np.concatenate([batch.bags.values for batch in batches], axis=1)
        pooled_BFD = self._tables(Bags(torch.from_numpy(ids_FB)))
        parts = pooled_BFD.detach().split(len(batches[0].label_B))
        sent, of_tables = [], []
        for trainer, (batch, part_BFD) in enumerate(zip(batches, parts, strict=True)):
            part_BFD = part_BFD.clone().requires_grad_()
            self._backward(batch, part_BFD)
            sent.append(self._sent(trainer))
            of_tables.append(part_BFD.grad / trainers)
        pooled_BFD.backward(torch.cat(of_tables))
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.add_(sum(one[name] for one in sent) / trainers, alpha=-lr)

    def _backward(self, batch: Batch, pooled_BFD: Tensor) -> None:
        """Gradients of a trainer's mean loss, micro-batch by micro-batch, on all weights."""
        count = self._config.schedule.microbatches
        columns = (torch.from_numpy(batch.dense_BI), pooled_BFD, torch.from_numpy(batch.label_B))
        for x_BN, rows_BFD, label_B in zip(*(one.chunk(count) for one in columns), strict=True):
            for stage, sparsity in zip(self._stages, (*self._masks, 0.0), strict=True):
                x_BN = stage(x_BN, rows_BFD if stage.part.has_interaction else None)
                if not stage.part.is_last and sparsity:
                    x_BN = x_BN * largest(x_BN, kept(x_BN.shape[1], sparsity))
            loss = functional.binary_cross_entropy_with_logits(x_BN.squeeze(1), label_B)
            (loss / count).backward()

    def _sent(self, trainer: int) -> dict[str, Tensor]:
        """What a trainer pushes: the largest of gradient plus residual; the rest it keeps."""
        sent: dict[str, Tensor] = {}
        sparsity = 1 - getattr(self._config.gradient, "density", 1.0)  # `none` has no density
        for name, weight in self._weights.items():
            residual = self._residuals[trainer][name]
            residual += weight.grad
            flat_N = residual.view(-1)
            mask_N = largest(flat_N, kept(len(flat_N), sparsity))
            sent[name] = torch.where(mask_N, flat_N, 0.0).view(weight.shape)
            residual -= sent[name]
            weight.grad = None
        return sent
