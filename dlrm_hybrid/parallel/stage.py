"""One pipeline stage: forward and backward between its boundaries, and its batches in flight.

The tensor that enters a stage becomes a leaf; the one that leaves it is detached; backward starts
from the received gradient and ends in the leaf. The pooled rows of the tables are leaves too, one
for each micro-batch, so the tables are looked up once and learn once for a batch.

Shapes: B rows of the trainer's batch, b rows of a micro-batch, I integer features, F tables,
D embedding dimension, N input width of the stage, M output width, L labels if there are several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.model.dlrm import StageModel
from dlrm_hybrid.model.embeddings import with_means
from dlrm_hybrid.model.placement import HOST, Placement
from dlrm_hybrid.model.spec import microbatch_rows
from dlrm_hybrid.types import BatchNumber, DlrmError

# MKL rounds products differently where an operand's address is not a multiple of this.
ALIGNMENT_BYTES = 16
STATE = ("dense", "ids", "offsets", "averaged", "id_weights", "label", "weight", "pooled")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """A trainer's batch, or the parts of it that a stage reads.

    Attributes:
        rows: B.
        dense_BI: float32; the first stage needs it.
        bags: ids of the tables; the stage with the interaction needs them.
        label_B: float32, 0 or 1, of several labels (B, L); the last stage needs it to train.
        coming: `bags` of the next batches, as far as the tables look ahead.
        weight_B: float32, factors of the rows' losses in the last stage; None for 1 each.
    """

    rows: int
    dense_BI: Tensor | None
    bags: Bags[Tensor] | None
    label_B: Tensor | None
    coming: Sequence[Bags[Tensor]] = ()
    weight_B: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageResult:
    """Results of one batch in one stage: gradients, loss and counts.

    Attributes:
        gradients: gradients of the mean of the (weighted) losses of the trainer's rows, by
            parameter, float32.
        pooled_gradient_BFD: gradient of sums of rows; None at a stage without the interaction.
        loss_sum: (weighted) binary cross-entropy, summed over the rows, and over several labels
            with their weights; 0 except in the last stage.
        correct: rows on the right side of one half, by the first label; 0 except in the last stage.
        rows: B; 0 except in the last stage.
    """

    gradients: Mapping[str, Tensor]
    pooled_gradient_BFD: Tensor | None
    loss_sum: float
    correct: int
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """A micro-batch between forward and backward; `left` is None once weights have changed."""

    entered_bN: Tensor
    pooled_bFD: Tensor | None
    left: Tensor | None


@dataclass(slots=True, kw_only=True, eq=False)
class _Batch:
    """A batch in flight: its results so far, by micro-batch."""

    inputs: Inputs
    pooled_BFD: Tensor | None
    rows: int
    graphs: dict[int, _Graph] = field(default_factory=dict[int, _Graph])
    gradients: list[Tensor] = field(default_factory=list[Tensor])
    pooled_gradients: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    logits: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    losses: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def of(self, batch: Tensor | None, microbatch: int) -> Tensor:
        assert batch is not None
        return batch[microbatch * self.rows : (microbatch + 1) * self.rows]


@final
class Stage:
    """A stage of the model with its batches in flight, whose ops may come in any order.

    Gradients of a batch are summed in the order of its backward calls.

    Args:
        model: the stage's layers.
        microbatches: number per batch.
        weight_decay: factor of half the squared norm of the weights in the loss whose gradients are
            taken; the reported loss is without it.
        trainer: its index and the number of trainers, which number the rows.
        placement: where the model is and computes; its inputs are on the host, and so are the
            pooled gradients and sums of a result.
        loss_weights: factor of the loss of each of several labels; empty for one label.
        tables: where the tables are: on the host, or beside the model, and then pooled rows and
            their gradients too.
    """

    def __init__(
        self,
        model: StageModel,
        microbatches: int,
        weight_decay: float = 0.0,
        trainer: tuple[int, int] = (0, 1),
        placement: Placement = HOST,
        loss_weights: Sequence[float] = (),
        tables: Placement = HOST,
    ) -> None:
        self.model = model
        self.microbatches = microbatches
        self.placement, self.tables = placement, tables
        self._weight_decay = weight_decay
        self._trainer = trainer
        self._loss_weights = loss_weights
        self._weight_L = placement.up(torch.tensor(loss_weights)) if loss_weights else None
        self._weights = model.dense_parameters()
        self._batches: dict[BatchNumber, _Batch] = {}

    def empty(self) -> Stage:
        """Make a stage of the same model with no batch in flight, for another thread."""
        arguments = self.model, self.microbatches, self._weight_decay, self._trainer, self.placement
        return Stage(*arguments, self._loss_weights, self.tables)

    def begin(self, batch: BatchNumber, inputs: Inputs, pooled_BFD: Tensor | None = None) -> None:
        """Take a batch into flight.

        Args:
            batch: its number.
            inputs: its rows.
            pooled_BFD: pooled rows, if they have been looked up.

        Raises:
            ConfigError: the batch does not divide into micro-batches.
        """
        rows = microbatch_rows(inputs.rows, self.microbatches)
        self._batches[batch] = _Batch(
            inputs=_placed(inputs, self.placement),
            pooled_BFD=None if pooled_BFD is None else self.placement.up(pooled_BFD),
            rows=rows,
        )

    def __contains__(self, batch: BatchNumber) -> bool:
        """Whether a batch is in flight."""
        return batch in self._batches

    def bags(self, batch: BatchNumber) -> Bags[Tensor]:
        """The ids that a batch in flight looks up."""
        bags = self._batches[batch].inputs.bags
        assert bags is not None
        return bags

    def take_rows(self, batch: BatchNumber, pooled_BFD: Tensor) -> None:
        """Set the sums of rows of a batch in flight, before its first forward."""
        flying = self._batches[batch]
        flying.pooled_BFD = self.up_rows(pooled_BFD, flying.inputs.bags)

    def up_rows(self, pooled_BFD: Tensor, bags: Bags[Tensor] | None) -> Tensor:
        """Sums of rows from the tables as pooled rows, where the model is."""
        pooled_BFD = with_means(pooled_BFD, bags)
        return pooled_BFD if self.tables.is_apart else self.placement.up(pooled_BFD)

    def rows(self, batch: BatchNumber) -> int:
        """Rows b per micro-batch of a batch in flight."""
        return self._batches[batch].rows

    def looked_up(self) -> list[BatchNumber]:
        """The batches in flight whose pooled rows are here, in order."""
        return sorted(k for k, batch in self._batches.items() if batch.pooled_BFD is not None)

    def state_dict(self) -> dict[str, Tensor]:
        """Views of all batches in flight, between two ticks.

        Raises:
            DlrmError: a batch still has results of forward, or is between the backwards of its
                micro-batches; such state is not saved.
        """
        state: dict[str, Tensor] = {}
        for batch, flying in self._batches.items():
            if flying.gradients or any(graph.left is not None for graph in flying.graphs.values()):
                raise DlrmError(
                    f"stage {self.model.part.index}: batch {batch} is in the middle of backward"
                )
            inputs = flying.inputs
            means = () if inputs.bags is None else inputs.bags.averaged
            named = {
                "rows": torch.tensor(inputs.rows),
                "dense": inputs.dense_BI,
                "ids": None if inputs.bags is None else inputs.bags.values,
                "offsets": None if inputs.bags is None else inputs.bags.offsets,
                "averaged": torch.tensor(means) if means else None,
                "id_weights": None if inputs.bags is None else inputs.bags.weights,
                "label": inputs.label_B,
                "weight": inputs.weight_B,
                "pooled": flying.pooled_BFD,
                **{f"entered.{number}": g.entered_bN for number, g in flying.graphs.items()},
            }
            state |= {f"{batch}.{name}": t.detach() for name, t in named.items() if t is not None}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all batches in flight by those that `state_dict` returned."""
        self._batches.clear()
        for batch in sorted({int(name.split(".")[0]) for name in state}):
            rows = int(state[f"{batch}.rows"])
            dense, ids, offsets, averaged, id_weights, label, weight, pooled = (
                state.get(f"{batch}.{name}") for name in STATE
            )
            tables = 0 if offsets is None else (len(offsets) - 1) // rows
            means = () if averaged is None else tuple(map(int, averaged))
            bags = None if ids is None else Bags(ids, offsets, tables, means, id_weights)
            inputs = Inputs(rows=rows, dense_BI=dense, bags=bags, label_B=label, weight_B=weight)
            self.begin(BatchNumber(batch), inputs, pooled)
            graphs = self._batches[BatchNumber(batch)].graphs
            for microbatch in range(self.microbatches):
                entered_bN = state.get(f"{batch}.entered.{microbatch}")
                if entered_bN is not None:
                    graphs[microbatch] = _Graph(self.placement.up(entered_bN), None, None)

    def forward(
        self, batch: BatchNumber, microbatch: int, received_bN: Tensor | None
    ) -> Tensor | None:
        """Compute the activations (b, M) for the next stage, detached; None in the last stage.

        Args:
            batch: a batch in flight.
            microbatch: its number in the batch.
            received_bN: input from the stage before; None in the first.
        """
        entered_bN = None if received_bN is None else self.placement.up(received_bN)
        return self._forward(batch, microbatch, entered_bN)

    def _forward(
        self, batch: BatchNumber, microbatch: int, entered_bN: Tensor | None
    ) -> Tensor | None:
        """`forward` of an input that is where the stage is; it becomes a leaf of the graph."""
        part, flying = self.model.part, self._batches[batch]
        if part.is_first:
            entered_bN = aligned(flying.of(flying.inputs.dense_BI, microbatch))
        else:
            assert entered_bN is not None
            entered_bN.requires_grad_()
        pooled_bFD = None
        if part.has_interaction:
            pooled_bFD = flying.of(flying.pooled_BFD, microbatch).detach().requires_grad_()
        trainer, trainers = self._trainer
        before = (batch * trainers + trainer) * flying.inputs.rows + microbatch * flying.rows
        rows = range(before, before + flying.rows)
        left: Tensor = self.model(entered_bN, pooled_bFD, rows)
        if part.is_last:
            logit_b = left.squeeze(1)
            label_b = flying.of(flying.inputs.label_B, microbatch)
            weight_B = flying.inputs.weight_B
            weight_b = None if weight_B is None else flying.of(weight_B, microbatch)
            left = self._loss(logit_b, label_b, weight_b)
            flying.logits[microbatch] = logit_b.detach()
            flying.losses[microbatch] = left.detach()
        flying.graphs[microbatch] = _Graph(entered_bN, pooled_bFD, left)
        return None if part.is_last else left.detach()

    def _loss(self, logit_b: Tensor, label_b: Tensor, weight_b: Tensor | None) -> Tensor:
        """The mean over rows of their losses: Σ w·l / b, where l is Σ λ·l of several labels."""
        if self._weight_L is None:
            return functional.binary_cross_entropy_with_logits(logit_b, label_b, weight_b)
        weight_bL = self._weight_L.expand_as(logit_b)
        if weight_b is not None:
            weight_bL = weight_bL * weight_b.unsqueeze(1)
        loss = functional.binary_cross_entropy_with_logits
        return loss(logit_b, label_b, weight_bL, reduction="sum") / len(logit_b)

    def drop_graphs(self) -> None:
        """Drop the autograd graphs of batches in flight, whose weights are about to change.

        Inputs are kept: backward recomputes forward, with the weights of that time.
        """
        for flying in self._batches.values():
            for microbatch, graph in flying.graphs.items():
                flying.graphs[microbatch] = replace(graph, left=None)

    def backward(
        self, batch: BatchNumber, microbatch: int, received_bM: Tensor | None
    ) -> Tensor | None:
        """Compute the gradient (b, N) for the stage before; None in the first stage.

        Args:
            batch: a batch in flight.
            microbatch: its number in the batch; its forward has been done.
            received_bM: gradient of the stage's output; None in the last stage.
        """
        part, flying = self.model.part, self._batches[batch]
        graph = flying.graphs.pop(microbatch)
        if graph.left is None:
            self._forward(batch, microbatch, graph.entered_bN)
            graph = flying.graphs.pop(microbatch)
        assert graph.left is not None
        if part.is_last:
            received_bM = torch.full_like(graph.left, 1 / self.microbatches)
        elif received_bM is not None:
            received_bM = self.placement.up(received_bM)
        leaves: list[Tensor] = list(self._weights.values())
        if graph.pooled_bFD is not None:
            leaves.append(graph.pooled_bFD)
        if not part.is_first:
            leaves.append(graph.entered_bN)
        # Not through `weight.grad`: two threads may share the weights.
        gradients = list(torch.autograd.grad(graph.left, leaves, received_bM))
        entered_gradient_bN = None if part.is_first else gradients.pop()
        if graph.pooled_bFD is not None:
            flying.pooled_gradients[microbatch] = gradients.pop()
        if flying.gradients:
            for total, gradient in zip(flying.gradients, gradients, strict=True):
                total += gradient
        else:
            flying.gradients = gradients
        return entered_gradient_bN

    def finish(self, batch: BatchNumber) -> StageResult:
        """Remove a batch after the backward of its last micro-batch; returns its results."""
        flying = self._batches.pop(batch)
        assert not flying.graphs
        gradients = dict(zip(self._weights, flying.gradients, strict=True))
        if self._weight_decay:
            for name, gradient in gradients.items():
                gradient.add_(self._weights[name].detach(), alpha=self._weight_decay)
        pooled = [gradient for _, gradient in sorted(flying.pooled_gradients.items())]
        pooled = [torch.cat(pooled)] if len(pooled) > 1 else pooled
        correct = [
            count_correct(logit_b, flying.of(flying.inputs.label_B, microbatch))
            for microbatch, logit_b in flying.logits.items()
        ]
        numbers = len(correct)
        stays = pooled if self.tables.is_apart else []
        goes = [*flying.losses.values(), *correct, *([] if stays else pooled)]
        left = [*self.placement.down(goes), *stays]
        return StageResult(
            gradients=gradients,
            pooled_gradient_BFD=with_means(left[-1], flying.inputs.bags) if pooled else None,
            loss_sum=sum(float(loss) * flying.rows for loss in left[:numbers]),
            correct=sum(map(int, left[numbers : 2 * numbers])),
            rows=flying.inputs.rows if self.model.part.is_last else 0,
        )


def predict_stage(
    stage: Stage, inputs: Inputs, received_BN: Tensor | None, pooled_BFD: Tensor | None
) -> Tensor:
    """The stage's output (B, M), without a graph; in the last stage logits, on the host.

    These are (B,), or (B, L) of several labels.
    """
    entered_BN = inputs.dense_BI if received_BN is None else received_BN
    assert entered_BN is not None
    up, model = stage.placement.up, stage.model
    with torch.no_grad():
        pooled_BFD = None if pooled_BFD is None else stage.up_rows(pooled_BFD, inputs.bags)
        left_BM: Tensor = model(aligned(up(entered_BN)), pooled_BFD)
    return stage.placement.down([left_BM.squeeze(1)])[0] if model.part.is_last else left_BM


def _placed(inputs: Inputs, placement: Placement) -> Inputs:
    """The batch with its dense features, labels and weights where a stage computes."""
    if not placement.is_apart:
        return inputs
    names = ("dense_BI", "label_B", "weight_B")
    tensors = {name: getattr(inputs, name) for name in names}
    return replace(inputs, **{k: placement.up(v) for k, v in tensors.items() if v is not None})


def aligned(tensor: Tensor) -> Tensor:
    """Copy a tensor unless its address makes products round the same in every run."""
    is_apart = tensor.is_cpu and tensor.data_ptr() % ALIGNMENT_BYTES
    return tensor.clone() if is_apart else tensor


def count_correct(logit_B: Tensor, label_B: Tensor) -> Tensor:
    """Number of rows whose predicted click, at a probability above one half, matches the label.

    Of several labels, (B, L), the first one's.
    """
    right = (logit_B > 0) == (label_B > 0.5)
    return torch.count_nonzero(right if right.dim() == 1 else right[:, 0])
