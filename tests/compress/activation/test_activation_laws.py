"""What holds for every codec of activations, and what is special about those that send all."""

from itertools import product

import pytest
import torch
from activation_journey import KEY, gaussian, round_trip, travel
from activation_rows import CODECS, CodecRow
from plain_torch import in_plain_torch

from dlrm_hybrid.compress.activation.codec import DenseCodec, Key, Sections
from dlrm_hybrid.compress.activation.controls import GradientTopKCodec
from dlrm_hybrid.compress.activation.dct import ThresholdCodec
from dlrm_hybrid.parallel.compression import Compression
from dlrm_hybrid.types import DivergedError, DlrmError
from dlrm_hybrid.wire.section import Dtype, Encoding, Section

LINEAR = {name: row for name, row in CODECS.items() if row.linear}
HOST_ONLY = {name: row for name, row in CODECS.items() if not row.make(2, 2).selects_anywhere}
SHAPES = [(1, 1), (1, 16), (5, 1), (3, 70), (8, 256), (2, 300)]

every_codec = pytest.mark.parametrize("row", CODECS.values(), ids=CODECS.keys())


@every_codec
def test_both_ends_get_tensors_of_their_own(row: CodecRow) -> None:
    for (rows, width), offset in product(SHAPES, (0, 4, 20)):
        x_BN, g_BN = gaussian(rows, width, 1), gaussian(rows, width, 2)
        x_before_BN, g_before_BN = x_BN.clone(), g_BN.clone()
        trip = round_trip(row.make(rows, width), x_BN, g_BN, offset=offset)
        assert torch.equal(x_BN, x_before_BN)
        assert torch.equal(g_BN, g_before_BN)
        for tensor in (trip.received_BN, trip.returned_BN):
            assert (tensor.shape, tensor.dtype) == (x_BN.shape, torch.float32)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 64 == 0
            tensor.add_(1)  # writable


@pytest.mark.parametrize("row", LINEAR.values(), ids=LINEAR.keys())
def test_backward_is_the_transpose_of_forward(row: CodecRow) -> None:
    for rows, width in SHAPES:
        x_BN, g_BN = gaussian(rows, width, 3), gaussian(rows, width, 4)
        trip = round_trip(row.make(rows, width), x_BN, g_BN)
        forth = (trip.received_BN.double() * g_BN).sum()
        back = (x_BN.double() * trip.returned_BN).sum()
        sizes = (trip.received_BN.double() * g_BN).abs(), (x_BN * trip.returned_BN).abs()
        terms = sum(one.sum() for one in sizes)
        assert abs(forth - back) <= row.relative_error * terms, (rows, width)


def test_plain_torch_keeps_the_same_elements() -> None:
    x_BN, g_BN = gaussian(4, 64, 5), gaussian(4, 64, 6)
    codec = CODECS["threshold_75"].make(4, 64)
    one = round_trip(codec, x_BN, g_BN)
    with in_plain_torch():
        other = round_trip(codec, x_BN, g_BN)
    assert torch.equal(one.received_BN, other.received_BN)
    assert one[2:] == other[2:]


@pytest.mark.parametrize("row", HOST_ONLY.values(), ids=HOST_ONLY.keys())
def test_activations_on_another_device_are_refused_by_name(row: CodecRow) -> None:
    x_BN, codec = torch.empty(4, 64, device="meta"), row.make(4, 64)
    with pytest.raises(ValueError, match="^activation .* is on meta"):
        codec.encode(x_BN, KEY)
    received_BN, g_BN = gaussian(4, 64, 5), torch.empty(4, 64, device="meta")
    sections, _ = codec.encode(received_BN, KEY)
    _, saved = codec.decode(sections, received_BN.shape, KEY)
    with pytest.raises(ValueError, match="^gradient of activations .* is on meta"):
        codec.encode_gradient(g_BN, saved, KEY)


@every_codec
def test_equal_codecs_send_equal_bytes(row: CodecRow) -> None:
    x_BN, g_BN = gaussian(4, 64, 5), gaussian(4, 64, 6)
    one, other = row.make(4, 64), row.make(4, 64)
    alone = round_trip(one, x_BN, g_BN)
    together = round_trip(other, x_BN, g_BN, receiver=row.make(4, 64))
    assert torch.equal(alone.received_BN, together.received_BN)
    assert torch.equal(alone.returned_BN, together.returned_BN)
    assert alone[2:] == together[2:]


@every_codec
def test_what_lasts_is_what_checkpoints_hold(row: CodecRow) -> None:
    x_BN = gaussian(4, 64, 7)
    codec, resumed, fresh = (row.make(4, 64) for _ in range(3))
    round_trip(codec, x_BN, gaussian(4, 64, 8))
    assert bool(codec.tensors()) == row.stateful
    for name, tensor in resumed.tensors().items():
        tensor.copy_(codec.tensors()[name])
    returned = [
        round_trip(one, x_BN, gaussian(4, 64, 9)).returned_BN for one in (codec, resumed, fresh)
    ]
    assert torch.equal(returned[0], returned[1])
    assert torch.equal(returned[0], returned[2]) != row.stateful


@every_codec
def test_a_report_covers_what_came_since_the_last(row: CodecRow) -> None:
    codec = row.make(4, 64)
    assert codec.report() is None
    for count in (1, 3):
        for _ in range(count):
            round_trip(codec, gaussian(4, 64, 10), gaussian(4, 64, 11))
        if (report := codec.report()) is not None:
            assert report.elements == count * 4 * 64
            assert 0 < report.sent <= report.elements
    assert codec.report() is None


WRONG: list[Sections] = [
    (),
    (Section(0, Encoding.DENSE, Dtype.FLOAT32, 7, bytes(28)),),
    (Section(0, Encoding.DENSE, Dtype.INT32, 6, bytes(24)),),
    (Section(0, Encoding.DENSE, Dtype.FLOAT32, 6, bytes(24)),) * 2,
]


@every_codec
def test_other_sections_than_expected_are_refused(row: CodecRow) -> None:
    named = r"batch 7, boundary 1, micro-batch 2: .*, expected .* elements"
    for sections in WRONG:
        codec = row.make(2, 3)
        x_BN = gaussian(2, 3, 12)
        forward, saved = codec.encode(x_BN, KEY)
        codec.decode(travel(forward, 0), x_BN.shape, KEY)
        with pytest.raises(DlrmError, match=named):
            codec.decode(sections, x_BN.shape, KEY)
        with pytest.raises(DlrmError, match=named):
            codec.decode_gradient(sections, x_BN.shape, saved, KEY)


@pytest.mark.parametrize("sparsity", [0.0, 0.75, 0.9])
def test_all_crosses_and_the_thresholds_are_those_of_the_threshold_codec(sparsity: float) -> None:
    x_BN, g_BN = gaussian(8, 70, 1).relu(), gaussian(8, 70, 2)
    observed = DenseCodec(observe=sparsity)
    threshold = ThresholdCodec(sparsity=sparsity, dtype=Dtype.FLOAT32, allow_rice=False)
    trip, dense = round_trip(observed, x_BN, g_BN), round_trip(DenseCodec(), x_BN, g_BN)
    assert torch.equal(trip.received_BN, dense.received_BN)
    assert torch.equal(trip.returned_BN, dense.returned_BN)
    assert trip[2:] == dense[2:]
    threshold.encode(x_BN, KEY)
    seen, used = observed.report(), threshold.report()
    assert seen is not None and used is not None
    assert seen.threshold == used.threshold
    assert (seen.sent, seen.elements) == (x_BN.numel(), used.elements)


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
    (residual,) = worker.pieces()
    assert residual.name == "trainer.4.boundary.5.microbatch.0.residual"
    assert torch.count_nonzero(residual.view) == 36


def test_all_that_crosses_is_the_same_bit_for_bit_from_its_own_memory() -> None:
    x_BN = torch.tensor([[0.0, -0.0, torch.inf], [1e-45, -1.5, torch.nan]])
    trip = round_trip(DenseCodec(), x_BN, x_BN)
    for got_BN in (trip.received_BN, trip.returned_BN):
        assert torch.equal(got_BN.view(torch.int32), x_BN.view(torch.int32))
    assert trip.forward_bytes == trip.backward_bytes == 4 * 6
    ((section,), _) = DenseCodec().encode(x_BN, KEY)
    x_BN.fill_(1)
    assert bytes(section.payload) == b"\x00\x00\x80\x3f" * 6


CHECKING = ("observed", "threshold_75", "threshold_90_bfloat16", "threshold_90_float16")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", CHECKING)
def test_an_activation_that_is_not_finite_ends_the_run(name: str, bad: float) -> None:
    x_BN = gaussian(3, 20, 10)
    x_BN[1, 19] = bad
    with pytest.raises(DivergedError, match="batch 7, boundary 1, micro-batch 2: an activation"):
        CODECS[name].make(3, 20).encode(x_BN, KEY)
