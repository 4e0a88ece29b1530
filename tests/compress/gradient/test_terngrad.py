"""TernGrad against its algorithm in plain numpy.

Shapes: N elements of a tensor, T trainers.
"""

import math
from typing import Literal

import numpy as np
import pytest
import torch
from agreeing import Group, encoded
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.gradient.collective import Op, reduce
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.context import StageContext
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.gradient.methods.terngrad import TernGrad
from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.section import Encoding, Section, SectionError
from dlrm_hybrid.wire.ternary import scale_of, ternary_of

SPECS = (
    Spec(0, "wide.weight", (40, 25)),
    Spec(1, "wide.bias", (40,)),
    Spec(2, "last.weight", (1, 300)),
    Spec(3, "last.bias", (1,)),
)
TERNARY = SPECS[0]


def compressor(
    trainer: int = 0,
    *,
    clip: float | None = 2.5,
    shares: bool = True,
    encoding: Literal["bits", "trits"] = "bits",
    seed: int = 3,
) -> Compressor:
    record = TernGrad(clip=clip, sharing=shares, encoding=encoding)
    context = StageContext(
        layout=Layout(SPECS),
        trainer=trainer,
        trainers=4,
        model_elements=0,
        last_layer="last",
        lr=lambda step: 1.0,
        seed=seed,
    )
    return record.build(context)


def group(trainers: int) -> Group:
    return Group([compressor(trainer) for trainer in range(trainers)])


def gradients_of(trainer: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(trainer)
    return {
        spec.name: torch.from_numpy(rng.standard_t(3, spec.shape).astype(np.float32))
        for spec in SPECS
    }


def clipped(gradient: Tensor, clip: float = 2.5) -> NDArray[np.float32]:
    flat_N = gradient.numpy().reshape(-1)
    limit = clip * flat_N.astype(np.float64).std()
    return np.clip(flat_N, -limit, limit).astype(np.float32)


def test_all_trainers_use_the_largest_scale_of_clipped_gradients() -> None:
    gradients_T = [gradients_of(trainer) for trainer in range(3)]
    sizes = [np.abs(clipped(one[TERNARY.name])).max() for one in gradients_T]
    assert len(set(sizes)) == 3
    pushed = group(3).encode(gradients_T, 0)
    scales = {scale_of(sections[TERNARY.name]) for sections in pushed}
    assert len(scales) == 1
    (scale,) = scales
    assert max(sizes) <= scale <= max(sizes) * (1 + 2**-11)
    assert np.float32(scale).view(np.uint32) & 0xFFF == 0


def test_small_tensors_and_the_last_layer_stay_whole() -> None:
    gradients_T = [gradients_of(trainer) for trainer in range(2)]
    for gradients, sections in zip(gradients_T, group(2).encode(gradients_T, 0), strict=True):
        assert list(sections) == [spec.name for spec in SPECS]
        assert sections[TERNARY.name].encoding is Encoding.TERNARY
        for spec in SPECS[1:]:
            expected_N = gradients[spec.name].numpy().reshape(-1)
            np.testing.assert_array_equal(array_of(sections[spec.name]), expected_N)


def codes(one: Compressor, step: int, gradients: dict[str, Tensor]) -> bytes:
    return bytes(encoded(one, gradients, step)[TERNARY.name].payload)


def test_draws_hang_on_seed_step_and_trainer_alone() -> None:
    gradients = gradients_of(0)
    used = compressor()
    for step in range(3):
        codes(used, step, gradients)
    assert codes(used, 7, gradients) == codes(compressor(), 7, gradients)
    others = [
        codes(compressor(), 8, gradients),
        codes(compressor(1), 7, gradients),
        codes(compressor(seed=4), 7, gradients),
    ]
    assert len({codes(used, 7, gradients), *others}) == 4
    assert used.tensors() == {}


def test_without_sharing_everyone_has_a_scale_and_nothing_to_say() -> None:
    gradients_T = [gradients_of(trainer) for trainer in range(3)]
    scales: set[float] = set()
    for trainer, gradients in enumerate(gradients_T):
        one = compressor(trainer, shares=False)
        assert one.rounds == ()
        scales.add(scale_of(encoded(one, gradients, 0)[TERNARY.name]))
    assert len(scales) == 3


@pytest.mark.parametrize("encoding", ["bits", "trits"])
def test_equal_elements_are_not_clipped_away(encoding: Literal["bits", "trits"]) -> None:
    gradients = gradients_of(0) | {TERNARY.name: torch.full(TERNARY.shape, -0.75)}
    section = encoded(compressor(shares=False, encoding=encoding), gradients, 0)[TERNARY.name]
    np.testing.assert_array_equal(ternary_of(section), np.full(TERNARY.count, -0.75, np.float32))


def scales(*values: float) -> tuple[Section, ...]:
    return (dense(0, np.array(values, np.float32)),)


@pytest.mark.parametrize(
    "broken", [(), scales(1.0) * 2, scales(math.nan), scales(-1.0), (dense(0, np.ones(1)),)]
)
def test_what_are_no_scales_is_refused(broken: tuple[Section, ...]) -> None:
    with pytest.raises(SectionError):
        reduce(Op.MAX, [scales(1.0), broken], 0, 0)
    encoding = compressor().encode(gradients_of(0), 0)
    next(encoding)
    with pytest.raises(SectionError):
        encoding.send(broken)


def test_scales_must_serve_all_tensors_of_all_trainers() -> None:
    with pytest.raises(SectionError, match="2 scales, and 1 of another trainer"):
        reduce(Op.MAX, [scales(1.0), scales(1.0, 2.0)], 0, 0)
    for wrong in (scales(1e-3), scales(100.0, 100.0)):
        encoding = compressor().encode(gradients_of(0), 0)
        next(encoding)
        with pytest.raises(SectionError, match="do not serve 1 tensors"):
            encoding.send(wrong)
