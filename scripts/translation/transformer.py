"""A Transformer that can be cut inside its feed-forward networks, behind their ReLUs.

It is a list of blocks, each a function of a `State`. A layer is two of them: `Widen` ends with the
ReLU of the feed-forward network, `Narrow` begins behind it. A stage is a part of the list. A cut is
crossed by the activations of the ReLU, which `SparseBoundary` sparsifies, and unchanged by the
residual stream around the feed-forward network and, in the decoder, by the encoder's output.

Shapes: B sentences, S words of a source, T of a target, D width, F width of feed-forward networks,
H heads, V words known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from grammar import BEGIN, END, PAD
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from dlrm_hybrid.compress import SparseBoundary
from dlrm_hybrid.rng import fold

MAX_LENGTH = 64  # words of a sentence


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the network.

    Attributes:
        source_words: known of the source language.
        target_words: known of the target language.
        layers: of the encoder, and of the decoder.
        width: D.
        inner_width: F.
        heads: H.
    """

    source_words: int
    target_words: int
    layers: int = 6
    width: int = 64
    inner_width: int = 256
    heads: int = 4


class Batch(NamedTuple):
    """Sentences, filled up with PAD; int64.

    Attributes:
        source_BS: words of the source.
        target_BT: of the target, from BEGIN to END.
    """

    source_BS: Tensor
    target_BT: Tensor


class State(NamedTuple):
    """What blocks hand on; empty tensors where there is nothing yet, or no more.

    Attributes:
        x_BTD: the residual stream; at last logits (B, T, V).
        z_BTF: behind the ReLU of a feed-forward network whose second half is to come.
        memory_BSD: output of the encoder.
    """

    x_BTD: Tensor
    z_BTF: Tensor
    memory_BSD: Tensor


class Attention(nn.Module):
    """Attention of several heads, with the normalisation before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm = nn.LayerNorm(shape.width)
        self.query = nn.Linear(shape.width, shape.width)
        self.key_value = nn.Linear(shape.width, 2 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    @override
    def forward(self, x_BTD: Tensor, memory_BSD: Tensor | None, mask: Tensor) -> Tensor:
        """What is read: from `memory_BSD`, or without it from x_BTD itself, where `mask` is."""
        x_BTD = self.norm(x_BTD)
        query = self._by_head(self.query(x_BTD))
        key, value = self.key_value(x_BTD if memory_BSD is None else memory_BSD).chunk(2, -1)
        read = functional.scaled_dot_product_attention(
            query, self._by_head(key), self._by_head(value), mask
        )
        out: Tensor = self.out(read.transpose(1, 2).flatten(2))
        return out

    def _by_head(self, x_BTD: Tensor) -> Tensor:
        rows, words, width = x_BTD.shape
        return x_BTD.reshape(rows, words, self.heads, width // self.heads).transpose(1, 2)


class Widen(nn.Module):
    """The first block of a layer: attention, then half a feed-forward network, to its ReLU."""

    def __init__(self, shape: Shape, *, decodes: bool) -> None:
        super().__init__()
        self.own = Attention(shape)
        self.other = Attention(shape) if decodes else None
        self.norm = nn.LayerNorm(shape.width)
        self.widen = nn.Linear(shape.width, shape.inner_width)

    @override
    def forward(self, state: State, batch: Batch) -> State:
        x_BTD, _, memory_BSD = state
        known_B11S = (batch.source_BS != PAD)[:, None, None, :]
        if self.other is None:
            x_BTD = x_BTD + self.own(x_BTD, None, known_B11S)
        else:
            length = x_BTD.shape[1]
            before_TT = torch.ones(length, length, dtype=torch.bool).tril()
            x_BTD = x_BTD + self.own(x_BTD, None, before_TT)
            x_BTD = x_BTD + self.other(x_BTD, memory_BSD, known_B11S)
        return State(x_BTD, self.widen(self.norm(x_BTD)).relu(), memory_BSD)


class Narrow(nn.Module):
    """The second block of a layer: from the ReLU of its feed-forward network to its end."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.narrow = nn.Linear(shape.inner_width, shape.width)

    @override
    def forward(self, state: State, batch: Batch) -> State:
        x_BTD = state.x_BTD + self.narrow(state.z_BTF)
        return State(x_BTD, _nothing(x_BTD), state.memory_BSD)


class Read(nn.Module):
    """Vectors of words and of their positions: of the source, or of the target but its last word.

    Before the target's, the encoder's output becomes the memory.
    """

    def __init__(self, shape: Shape, *, decodes: bool) -> None:
        super().__init__()
        words = shape.target_words if decodes else shape.source_words
        self.norm = nn.LayerNorm(shape.width) if decodes else None
        self.words = nn.Embedding(words, shape.width, padding_idx=PAD)
        self.positions = nn.Embedding(MAX_LENGTH, shape.width)

    @override
    def forward(self, state: State, batch: Batch) -> State:
        words = batch.source_BS if self.norm is None else batch.target_BT[:, :-1]
        x_BTD = self.words(words) + self.positions.weight[: words.shape[1]]
        memory_BSD = _nothing(x_BTD) if self.norm is None else self.norm(state.x_BTD)
        return State(x_BTD, _nothing(x_BTD), memory_BSD)


class Predict(nn.Module):
    """Logits of the next word, from what the decoder's last layer gives."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.out = nn.Linear(shape.width, shape.target_words)

    @override
    def forward(self, state: State, batch: Batch) -> State:
        return state._replace(x_BTD=self.out(self.norm(state.x_BTD)))


def network(shape: Shape, seed: int) -> list[nn.Module]:
    """All blocks of a Transformer, their weights drawn."""
    torch.manual_seed(fold(seed, "weights"))
    blocks: list[nn.Module] = []
    for decodes in (False, True):
        blocks.append(Read(shape, decodes=decodes))
        for _ in range(shape.layers):
            blocks += [Widen(shape, decodes=decodes), Narrow(shape)]
    return [*blocks, Predict(shape)]


def cut_behind(shape: Shape, layer: int, *, decodes: bool) -> int:
    """Blocks before a cut behind the ReLU of this layer, counted from 1."""
    return 2 * layer + decodes * (1 + 2 * shape.layers)


class Stage(nn.Module):
    """Some blocks one after the other, and what is thinned out between them.

    Args:
        blocks: of a network.
        first: number of the first of them in the network.
        boundaries: by the number of blocks of the network before it; of the activations of a
            feed-forward network, and between layers of the residual stream.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        first: int,
        boundaries: Mapping[int, SparseBoundary],
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.thin = nn.ModuleList(boundaries.values())
        self.boundaries = dict(boundaries)
        self.first = first

    @override
    def forward(self, state: State, batch: Batch) -> State:
        """Apply the blocks."""
        for number, block in enumerate(self.blocks, self.first):
            state = block(state, batch)
            boundary = self.boundaries.get(number + 1)
            if boundary is not None and state.z_BTF.numel():
                state = state._replace(z_BTF=boundary(state.z_BTF))
            elif boundary is not None:
                state = state._replace(x_BTD=boundary(state.x_BTD))
        return state

    def part(self, first: int, last: int) -> Stage:
        """The blocks from `first` up to `last` of the network, the same objects.

        What is thinned out between them is, not what is at either end.
        """
        blocks = list(self.blocks)[first - self.first : last - self.first]
        inside = {cut: one for cut, one in self.boundaries.items() if first < cut < last}
        return Stage(blocks, first, inside).train(self.training)


def start() -> State:
    """What the first block is given."""
    return State(torch.empty(0), torch.empty(0), torch.empty(0))


def loss_of(state: State, batch: Batch) -> Tensor:
    """The mean log-loss of the next word, in nats."""
    wanted = batch.target_BT[:, 1:]
    return functional.cross_entropy(state.x_BTD.flatten(0, 1), wanted.flatten(), ignore_index=PAD)


@torch.no_grad()
def translate(whole: Stage, source_BS: Tensor) -> list[list[int]]:
    """The likeliest next word, again and again, until END or MAX_LENGTH.

    Args:
        whole: all stages of a network in one, in evaluation.
        source_BS: words of the source.
    """
    half = len(whole.blocks) // 2
    encoder, decoder = whole.part(0, half), whole.part(half, len(whole.blocks))
    target_BT = torch.full((len(source_BS), 1), BEGIN)
    state = encoder(start(), Batch(source_BS, target_BT))
    while target_BT.shape[1] < MAX_LENGTH and not (target_BT == END).any(1).all():
        # A last word that `Read` leaves out, as it does in training.
        batch = Batch(source_BS, functional.pad(target_BT, (0, 1), value=PAD))
        likeliest_B1 = decoder(state, batch).x_BTD[:, -1:].argmax(-1)
        target_BT = torch.cat([target_BT, likeliest_B1], 1)
    return cast(list[list[int]], target_BT.tolist())


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0)
