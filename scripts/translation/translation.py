"""Trains small Transformers that translate, with DCT-MP: table 4 of the DCT paper in small.

    python scripts/translation/translation.py FOLDER
    python scripts/translation/table4.py FOLDER --output translation.png

Gupta et al., KDD 2021, section 3.2: a Transformer of six encoder and six decoder layers, cut behind
the ReLU of the feed-forward network of the fifth encoder layer (2 workers), also of the fifth
decoder layer (3), and also of the third of both (5). The task is drawn from a grammar
(`grammar.py`); a training takes about 75 seconds of one core. Those in FOLDER are not repeated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from grammar import PAD, Grammar, Pair, Vocabulary, bleu
from torch import Tensor, nn
from transformer import Batch, Shape, Stage, cut_behind, loss_of, network, start, translate

from dlrm_hybrid.compress import SparseBoundary
from dlrm_hybrid.disk import replace_text
from dlrm_hybrid.rng import fold

WORKERS: Mapping[int, Sequence[tuple[int, bool]]] = {
    1: (),
    2: ((5, False),),
    3: ((5, False), (5, True)),
    5: ((3, False), (5, False), (3, True), (5, True)),
}
"""The layers behind whose ReLU is a cut, by the number of workers, and whether they decode."""
SPARSITIES, BEYOND, SEEDS = (0.9, 0.95), 0.98, (0, 1, 2)
USUAL, BETWEEN, NUDGED = "", "between", "nudged"
NUDGE = 1e-6
BETWEEN_SPARSITIES = (0.5, 0.75, 0.9)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training.

    Attributes:
        workers: that the network would be cut for; 1 is the baseline.
        sparsity: of what crosses the cuts.
        variant: BETWEEN has cuts behind the layers, where the residual stream alone crosses; NUDGED
            begins with vectors of source words larger by a millionth, which shows what chance does.
        seed: of weights, dropout and the order of sentences.
        sentences: to train with.
        steps: of training.
        batch: sentences of a step.
        lr: Adam's rate at its highest, after a tenth of the steps; it ends at 0.
        width: of the network.
        inner_width: of its feed-forward networks.
    """

    workers: int
    sparsity: float
    seed: int
    sentences: int = 20_000
    steps: int = 2_200
    batch: int = 32
    lr: float = 6e-3
    width: int = 32
    inner_width: int = 128
    variant: str = USUAL

    @property
    def name(self) -> str:
        """Of its file."""
        what = self.variant and f"_{self.variant}"
        return f"{self.workers}_workers_{self.sparsity:g}_seed_{self.seed}{what}.json"


@dataclass(frozen=True)
class Task:
    """Sentences, as words and as numbers."""

    train: Sequence[Pair]
    test: Sequence[Pair]
    source: Vocabulary
    target: Vocabulary

    def batch(self, pairs: Sequence[Pair]) -> Batch:
        """Filled up to the longest."""
        return Batch(
            _filled([self.source.ids(pair.source) for pair in pairs]),
            _filled([self.target.ids(pair.target) for pair in pairs]),
        )


def task(sentences: int, tests: int = 1000) -> Task:
    """The same sentences for every training."""
    grammar = Grammar(0)
    pairs = [grammar.pair() for _ in range(sentences + tests)]
    source = Vocabulary(pair.source for pair in pairs)
    target = Vocabulary(pair.target for pair in pairs)
    return Task(pairs[:sentences], pairs[sentences:], source, target)


def batches(pairs: Sequence[Pair], size: int, seed: int) -> Iterator[list[Pair]]:
    """Batches without end, of sentences of like length; every epoch in another order."""
    epoch = 0
    while True:
        draws = np.random.default_rng(fold(seed, "order", epoch))
        order: list[int] = draws.permutation(len(pairs)).tolist()
        pool = 16 * size
        lots: list[list[int]] = []
        for first in range(0, len(order), pool):
            near = sorted(order[first : first + pool], key=lambda one: len(pairs[one].target))
            lots += [near[at : at + size] for at in range(0, len(near), size)]
        drawn: list[int] = draws.permutation(len(lots)).tolist()
        for lot in drawn:
            yield [pairs[one] for one in lots[lot]]
        epoch += 1


def rate(plan: Plan, step: int) -> float:
    """Rises for a tenth of the steps, then falls to 0."""
    rise = max(1, plan.steps // 10)
    return plan.lr * min((step + 1) / rise, (plan.steps - step) / (plan.steps - rise))


def shape_of(plan: Plan, given: Task) -> Shape:
    """Sizes of the network."""
    return Shape(
        source_words=len(given.source),
        target_words=len(given.target),
        width=plan.width,
        inner_width=plan.inner_width,
    )


def build(plan: Plan, given: Task) -> Stage:
    """The whole network, thinned out where the plan has cuts."""
    shape = shape_of(plan, given)
    blocks = network(shape, plan.seed)
    if plan.variant == NUDGED:
        with torch.no_grad():
            next(blocks[0].parameters()).mul_(1 + NUDGE)
    boundaries: dict[int, SparseBoundary] = {}
    # The baseline keeps all but zeros, which changes nothing: they are counted.
    for layer, decodes in WORKERS[plan.workers] or WORKERS[max(WORKERS)]:
        cut = cut_behind(shape, layer, decodes=decodes) + (plan.variant == BETWEEN)
        boundaries[cut] = SparseBoundary(1 - plan.sparsity)
    return Stage(blocks, 0, boundaries)


def learn(whole: Stage, plan: Plan, given: Task) -> list[float]:
    """Train; gives the loss of every step."""
    optimizer = optimizer_of(whole)
    losses: list[float] = []
    for step, pairs in enumerate(islice(batches(given.train, plan.batch, plan.seed), plan.steps)):
        batch = given.batch(pairs)
        loss = loss_of(whole(start(), batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate(plan, step)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def optimizer_of(stage: nn.Module) -> torch.optim.Optimizer:
    """Adam, whose rate `rate` says."""
    return torch.optim.Adam(stage.parameters(), betas=(0.9, 0.98))


def train(plan: Plan, given: Task) -> dict[str, object]:
    """Train, and say how well it translates."""
    began = time.process_time()
    whole = build(plan, given)
    losses = learn(whole, plan, given)
    reports = [one.report() for one in whole.boundaries.values()]
    trained = time.process_time() - began
    scores = scored(whole.eval(), given)
    for boundary in whole.boundaries.values():
        boundary.evaluate_masked = False
    return {
        **asdict(plan),
        "losses": losses,
        **scores,
        "unmasked": scored(whole, given) if plan.workers > 1 else scores,
        "boundaries": [asdict(report) for report in reports],
        "training_cpu_seconds": trained,
        "cpu_seconds": time.process_time() - began,
    }


@torch.no_grad()
def scored(whole: Stage, given: Task) -> dict[str, float]:
    """Losses and BLEU."""
    translations = translated(whole, given, given.test)
    return {
        "train_loss": evaluated(whole, given, given.train[: len(given.test)]),
        "test_loss": evaluated(whole, given, given.test),
        "bleu": bleu(translations, [pair.target for pair in given.test]),
    }


def evaluated(whole: Stage, given: Task, pairs: Sequence[Pair]) -> float:
    """Mean log-loss of a word, in nats."""
    total = words = 0.0
    for first in range(0, len(pairs), 250):
        batch = given.batch(pairs[first : first + 250])
        count = int((batch.target_BT[:, 1:] != PAD).sum())
        total += count * float(loss_of(whole(start(), batch), batch))
        words += count
    return total / words


def translated(whole: Stage, given: Task, pairs: Sequence[Pair]) -> list[list[str]]:
    """The translations of sentences, in their order."""
    order = sorted(range(len(pairs)), key=lambda one: len(pairs[one].source))
    found: dict[int, list[str]] = {}
    for first in range(0, len(order), 250):
        lot = order[first : first + 250]
        ids = translate(whole, given.batch([pairs[one] for one in lot]).source_BS)
        found |= {one: given.target.words(row) for one, row in zip(lot, ids, strict=True)}
    return [found[one] for one in range(len(pairs))]


def _filled(rows: Sequence[Sequence[int]]) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])


def plans() -> list[Plan]:
    """All trainings: those of the paper's table seed by seed, then what goes beyond it."""
    table = [(1, 0.0), *((workers, sparsity) for sparsity in SPARSITIES for workers in (2, 3, 5))]
    found = [
        Plan(workers=workers, sparsity=sparsity, seed=seed)
        for seed in SEEDS
        for workers, sparsity in table
    ]
    found += [Plan(workers=1, sparsity=0.0, seed=seed, variant=NUDGED) for seed in SEEDS]
    found += [Plan(workers=max(WORKERS), sparsity=BEYOND, seed=seed) for seed in SEEDS]
    found += [
        Plan(workers=2, sparsity=sparsity, seed=SEEDS[0], variant=BETWEEN)
        for sparsity in BETWEEN_SPARSITIES
    ]
    found += [
        Plan(workers=workers, sparsity=BEYOND, seed=seed) for seed in SEEDS for workers in (2, 3)
    ]
    return found


def train_all(folder: Path, limit: int) -> None:
    """Do the trainings that the folder lacks, at most `limit` of them."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [plan for plan in plans() if not (folder / plan.name).exists()][:limit]
    for plan in missing:
        found = train(plan, task(plan.sentences))
        replace_text(folder / plan.name, json.dumps(found, indent=1))
        print(f"{plan.name}: test loss {found['test_loss']:.4f}, BLEU {found['bleu']:.2f}")


def main() -> None:
    """Do what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the results, a file for each training")
    parser.add_argument("--limit", type=int, default=len(plans()), help="trainings at most")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    train_all(asked.folder, asked.limit)


if __name__ == "__main__":
    main()
