"""Each boundary of a worker has its own codec."""

import torch
from activation_journey import gaussian, round_trip

from dlrm_hybrid.compress.activation.codec import Key
from dlrm_hybrid.compress.activation.controls import GradientTopKCodec
from dlrm_hybrid.compress.activation.dct import ThresholdCodec
from dlrm_hybrid.parallel.compression import Compression
from dlrm_hybrid.wire.section import Dtype


def test_each_boundary_is_reported_and_saved_under_its_number() -> None:
    codecs = {
        2: ThresholdCodec(sparsity=0.75, dtype=Dtype.FLOAT32, allow_rice=False),
        3: ThresholdCodec(sparsity=0.5, dtype=Dtype.FLOAT32, allow_rice=False),
        5: GradientTopKCodec(sparsity=0.9, dtype=Dtype.FLOAT32, shape=(2, 20), microbatches=1),
    }
    worker = Compression(trainer=4, gradients=None, activations=codecs)
    x_BN = gaussian(2, 20, 1)
    kept = {2: (10, 10), 3: (20, 20), 5: (40, 4)}
    for boundary, counts in kept.items():
        trip = round_trip(codecs[boundary], x_BN, x_BN, Key(0, boundary, 0))
        assert (int((trip.received_BN != 0).sum()), int((trip.returned_BN != 0).sum())) == counts
    sent = {name: counts["sent"] for name, counts in worker.counts().items()}
    assert sent == {"activation.2": 10, "activation.3": 20, "activation.5": 4}
    ((name, residual_BN),) = worker.tensors().items()
    assert name == "trainer.4.boundary.5.microbatch.0.residual"
    assert torch.count_nonzero(residual_BN) == 36
