"""The densities that a run tells are those of the frames that its workers sent."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from world_runs import Train, curve, summary

from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.parallel.dense.sections import split_digest
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.run.rank.main import train_rank
from dlrm_hybrid.run.request import TrainTask
from dlrm_hybrid.telemetry.compression import ACTIVATION, GRADIENT
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.wire.frame import EVALUATION, Frame, Kind
from dlrm_hybrid.wire.section import Encoding, Section
from dlrm_hybrid.wire.sparse import rows_of, sparse_of

STEPS = 30
PULL = "pull"
WIDTH = 16  # of both boundaries
WORLD = (
    *("+experiment=dct_hybrid", "parallel.world=in_process", "train.batch_size=16"),
    *(f"train.steps={STEPS}", "telemetry.every=7", "checkpoint.every=11"),
)
DRAINED = ("gradient.precision=float16", "gradient.drain=flush", "gradient.drain_every=9")
FEEDBACK = ("activation=gradient_topk", "gradient.density=0.5")


def carried(section: Section) -> int:
    """Numbers in a section."""
    if section.encoding is Encoding.ROWS:
        return len(rows_of(section, (section.count // WIDTH, WIDTH))[0])
    return len(sparse_of(section).indices_K)


class Watched:
    """Elements and numbers of the frames that all ranks sent in training, by name.

    Args:
        config: of the run.
        cut: kind of the frames that are compressed between stages.
    """

    def __init__(self, config: Config, cut: Kind) -> None:
        shards = open_shards(Path(config.data.prepared or ""), build.semantics(config))
        spec = build.shape_of(config, shards.manifest)
        layout = build_world.layout(config, spec, STEPS, attempt=0)
        self._names = {tensor.id: tensor.name for tensor in layout.tensors}
        self._cut = cut
        self.elements, self.sent = Counter[str](), Counter[str]()

    def count(self, frame: Frame) -> None:
        kinds = (self._cut, Kind.PUSH, Kind.PARAMETERS)
        if frame.kind not in kinds or frame.microbatch == EVALUATION:
            return
        for section in split_digest(frame.sections)[0]:
            name = f"{ACTIVATION}{frame.boundary}"
            if frame.kind is Kind.PUSH:
                name = f"{GRADIENT}{self._names[section.tensor]}"
            elif frame.kind is Kind.PARAMETERS:
                name = PULL
            self.elements[name] += section.count
            self.sent[name] += carried(section)

    def density(self, prefix: str) -> float:
        sent, elements = (
            sum(counts[name] for name in counts if name.startswith(prefix))
            for counts in (self.sent, self.elements)
        )
        return sent / elements


def train_here(folder: Path, values: dict) -> None:
    """The rank of an in-process world as part of this process, where its frames can be seen."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    task = TrainTask(
        run_folder=str(folder),
        prepared=values["data"]["prepared"],
        resume_from=None,
        rank=0,
        attempt=0,
        rendezvous="",
    )
    train_rank(json.dumps(asdict(task)), lambda event: None, StopRequest())


@pytest.mark.parametrize(
    ("options", "cut"),
    [
        (("pull.sparsity=0.95",), Kind.ACTIVATION),
        pytest.param(FEEDBACK, Kind.ACTIVATION_GRADIENT, marks=pytest.mark.slow),
        pytest.param(DRAINED, Kind.ACTIVATION, marks=pytest.mark.slow),
    ],
)
def test_densities_are_those_of_the_frames(
    options: tuple[str, ...],
    cut: Kind,
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, folder = train("run", *WORLD, *options)
    assert code == 0
    values = json.loads((folder / "config.json").read_text())
    watched = Watched(validate(values), cut)
    send = MeteredChannel.send

    def count_and_send(channel: MeteredChannel, to: int, frame: Frame, *rest: int) -> None:
        watched.count(frame)
        send(channel, to, frame, *rest)

    monkeypatch.setattr(MeteredChannel, "send", count_and_send)
    train_here(tmp_path / "again", values)
    assert curve(tmp_path / "again") == curve(folder)
    elements, sent = Counter[str](), Counter[str]()
    for _, told in curve(folder):
        for name, one in told.get("of", {}).items():
            elements[name] += one["elements"]
            sent[name] += one["sent"]
    pull_density = watched.density(PULL)
    assert summary(folder)["network"]["pull_density"] == pull_density < 1
    del watched.elements[PULL], watched.sent[PULL]
    assert (elements, sent) == (watched.elements, watched.sent)
    assert summary(folder)["compression"] == {
        "gradient_density": watched.density(GRADIENT),
        "activation_density": watched.density(ACTIVATION),
    }
