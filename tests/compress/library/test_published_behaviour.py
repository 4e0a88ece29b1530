"""What packets decode to is what papers and public implementations do, by numbers found by hand."""

import math

import numpy as np
import pytest
import torch

from dlrm_hybrid.compress import Dgc, Sidco, TernGrad, TopK, decode


def sent(method, *gradients: list[float]) -> list[list[float]]:
    """What is decoded, step by step, of a model of one tensor."""
    named = [("x", torch.nn.Parameter(torch.zeros(len(gradients[0]))))]
    compressor = method.for_parameters(named, last_layer="")
    found = []
    for step, gradient in enumerate(gradients):
        out = torch.zeros(len(gradient))
        decode(compressor.encode([torch.tensor(gradient)], step)).add_to([out])
        found.append(out.tolist())
    return found


def test_topk_keeps_what_it_does_not_send() -> None:
    """k = 2 of 8; the second step adds ones to [1, 0, 2, 0.5, 0, -1, 0, 0.25]."""
    first = [1, -4, 2, 0.5, 3, -1, 0, 0.25]
    assert sent(TopK(density=0.25), first, [1.0] * 8) == [
        [0, -4, 0, 0, 3, 0, 0, 0],
        [2, 0, 3, 0, 0, 0, 0, 0],
    ]


def test_topk_sends_the_first_of_equals() -> None:
    assert sent(TopK(density=0.5), [1.0, -1.0, 1.0, 1.0]) == [[1, -1, 0, 0]]


def test_dgc_accumulates_velocities_and_clears_those_of_what_it_sends() -> None:
    """Velocity u = u / 2 + g, sum v = v + u; k = 1 of 4, the whole tensor is the sample.

    After step 1: u = v = [0, 2, 1, -3]. Step 2: u = [1, 2, 1.5, -0.5], v = [1, 4, 2.5, -3.5]. Step
    3: u = [0.5, 0, 0.75, -0.25], v = [1.5, 0, 3.25, -3.75].
    """
    method = Dgc(density=0.25, momentum=0.5, part=1.0, warmup_steps=0)
    assert sent(method, [4.0, 2, 1, -3], [1.0] * 4, [0.0] * 4) == [
        [4, 0, 0, 0],
        [0, 4, 0, 0],
        [0, 0, 0, -3.75],
    ]


def test_dgc_with_nesterov_looks_ahead() -> None:
    """u = (u + g) / 2, v = v + u + g.

    Step 2: u = [0.5, 1, 0.75, -0.25], v = [1.5, 5, 3.25, -3.75].
    """
    method = Dgc(density=0.25, momentum=0.5, nesterov=True, part=1.0, warmup_steps=0)
    assert sent(method, [4.0, 2, 1, -3], [1.0] * 4) == [[6, 0, 0, 0], [0, 5, 0, 0]]


def test_dgc_without_masking_sends_the_momentum_of_what_it_has_sent() -> None:
    """u is not cleared: step 2 has u = [3, 2, 1.5, -0.5], v = [3, 4, 2.5, -0.5]."""
    method = Dgc(density=0.5, momentum=0.5, masking=False, part=1.0, warmup_steps=0)
    first, second = sent(method, [4.0, 2, 1, -3], [1.0] * 4)
    assert first == [4, 0, 0, -3]
    assert second == [3, 4, 0, 0]


HEAVY = [0.5, -0.5, 1, 1, -1, 2, 4, -6]


def test_sidco_fits_an_exponential_to_magnitudes() -> None:
    """Their mean is 2: the threshold 2 ln 4 = 2.77 for a quarter, 2 ln 2 = 1.39 for a half."""
    (quarter,) = sent(Sidco(density=0.25, adaptation=1), HEAVY * 4)
    (half,) = sent(Sidco(density=0.5, adaptation=1), HEAVY * 4)
    assert quarter == [0, 0, 0, 0, 0, 0, 4, -6] * 4
    assert half == [0, 0, 0, 0, 0, 2, 4, -6] * 4


def test_sidco_fits_what_is_not_zero() -> None:
    """A quarter of all is a half of what is not zero."""
    (found,) = sent(Sidco(density=0.25, adaptation=1), (HEAVY + [0.0] * 8) * 4)
    assert found == ([0, 0, 0, 0, 0, 2, 4, -6] + [0] * 8) * 4


def test_sidco_fits_the_tail_anew_in_a_second_stage() -> None:
    """1/16 in two stages of 1/4. The mean is 2, the first threshold 2 ln 4 = 2.77.

    Above it are twelve 4 and four 12, by 3.23 on average: 2.77 + 3.23 ln 4 = 7.25.
    """
    values = [0.5] * 32 + [1.0] * 16 + [4.0] * 12 + [12.0] * 4
    (found,) = sent(Sidco(density=0.0625, adaptation=2), values)
    assert found == [0] * 60 + [12] * 4


def test_terngrad_draws_with_the_part_of_the_largest() -> None:
    """What is as large as the scale always fires, zeros never."""
    method = TernGrad(clip=None, sharing=False, smallest=1)
    gradient = [2.0, -2, 0, 2, -2, 0, 0, 2]
    assert sent(method, gradient, gradient) == [gradient, gradient]


@pytest.mark.parametrize("clip", [1.0, None])
def test_terngrad_is_right_on_average_of_what_is_clipped(clip: float | None) -> None:
    """Clipped at 1 standard deviation, √3, [3, -1, -1, -1] is [√3, -1, -1, -1].

    The scale s is rounded up by a part of at most 2^-11. The variance of a draw is s |g| - g², at
    most 2: that of the mean of 3 × 400 draws 1/600.
    """
    draws = sent(TernGrad(clip=clip, sharing=False, smallest=1), *([[3.0, -1, -1, -1]] * 400))
    found = np.array(draws)
    scale = 3.0 if clip is None else math.sqrt(3)
    assert scale <= found[0, 0] < scale * (1 + 2**-11) + 1e-6
    assert (found[:, 0] == found[0, 0]).all()
    assert {*np.unique(found[:, 1:])} == {-found[0, 0], 0}
    assert abs(found[:, 1:].mean() + 1) < 4 * math.sqrt(1 / 600)
