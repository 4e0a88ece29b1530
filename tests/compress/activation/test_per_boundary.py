"""Each boundary has its own codec."""

import torch
from activation_journey import gaussian, round_trip

from dlrm_hybrid.compress.activation.codec import Key, PerBoundaryCodec
from dlrm_hybrid.compress.activation.dct import ThresholdCodec
from dlrm_hybrid.compress.activation.gradient_topk import GradientTopKCodec
from dlrm_hybrid.wire.section import Dtype


def test_the_key_chooses_the_codec() -> None:
    codec = PerBoundaryCodec(
        {
            2: ThresholdCodec(sparsity=0.75, dtype=Dtype.FLOAT32, allow_rice=False),
            3: ThresholdCodec(sparsity=0.5, dtype=Dtype.FLOAT32, allow_rice=False),
            5: GradientTopKCodec(
                sparsity=0.9, dtype=Dtype.FLOAT32, widths={5: 20}, rows=2, microbatches=1
            ),
        }
    )
    x_BN = gaussian(2, 20, 1)
    kept = {2: (10, 10), 3: (20, 20), 5: (40, 4)}
    for boundary, counts in kept.items():
        trip = round_trip(codec, x_BN, x_BN, Key(0, boundary, 0))
        assert (int((trip.received_BN != 0).sum()), int((trip.returned_BN != 0).sum())) == counts
    reports = codec.report()
    assert {boundary: report.kept for boundary, report in reports.items()} == {2: 10, 3: 20, 5: 4}
    assert list(codec.tensors()) == ["boundary.5.microbatch.0.residual"]
    assert torch.count_nonzero(codec.tensors()["boundary.5.microbatch.0.residual"]) == 36
