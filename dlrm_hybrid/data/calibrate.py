"""Scale the planted teacher: its click rate, its log-loss and the share of each kind of effect.

Runs once, when a profile is made; what it finds is stored in integers.

Shapes: R rows, L logits.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.data import synthetic
from dlrm_hybrid.data.profile import LOGISTIC_STEPS_PER_UNIT, WEIGHT_ONE, Profile, Teacher

UNIT = 1 << 20  # of the fixed-point logit
ROWS = 400_000
SEED = 0

Floats = npt.NDArray[np.float64]


def logistic_table() -> tuple[int, ...]:
    """Weights of a click for logits from -8 to 8, in parts of 2**32."""
    steps = range(-8 * LOGISTIC_STEPS_PER_UNIT, 8 * LOGISTIC_STEPS_PER_UNIT)
    return tuple(
        round(WEIGHT_ONE / (1.0 + math.exp(-step / LOGISTIC_STEPS_PER_UNIT))) for step in steps
    )


def calibrated(profile: Profile, mixture: tuple[float, float, float], log_loss: float) -> Profile:
    """The profile with gains and bias that give its click rate and the wanted log-loss.

    Args:
        profile: its teacher's salt, head, pairs and logistic table stay.
        mixture: standard deviations of the dense, categorical and interaction parts, up to a
            common factor.
        log_loss: expected log-loss of the teacher itself, nats.
    """
    parts = [_part(profile, which) for which in range(3)]
    shape = [share / part.std() for share, part in zip(mixture, parts, strict=True)]
    p_L = np.array(profile.teacher.logistic, np.float64) / WEIGHT_ONE
    low, high = 0.0, 8.0
    teacher = profile.teacher
    for _ in range(40):
        factor = (low + high) / 2
        gains = [max(1, round(factor * scale * UNIT)) for scale in shape]
        centred_R = sum(gain * part for gain, part in zip(gains, parts, strict=True))
        bias = _bias(np.asarray(centred_R), profile.click_rate, p_L)
        teacher = replace(
            profile.teacher,
            bias=bias,
            dense_gain=gains[0],
            categorical_gain=gains[1],
            interaction_gain=gains[2],
        )
        if expected_log_loss(_p(np.asarray(centred_R) + bias, p_L)) > log_loss:
            low = factor
        else:
            high = factor
    return replace(profile, teacher=teacher)


def expected_log_loss(p_R: Floats) -> float:
    """Mean entropy of labels drawn with these probabilities, nats."""
    return float(-(p_R * np.log(p_R) + (1 - p_R) * np.log1p(-p_R)).mean())


def _part(profile: Profile, which: int) -> Floats:
    gains = [int(which == part) for part in range(3)]
    alone = replace(
        profile.teacher,
        bias=0,
        dense_gain=gains[0],
        categorical_gain=gains[1],
        interaction_gain=gains[2],
    )
    tables = synthetic.tables_of(replace(profile, teacher=alone))
    return synthetic.score(0, ROWS, synthetic.row_key(SEED), tables)[0].astype(np.float64)


def _p(logit_R: Floats, p_L: Floats) -> Floats:
    return p_L[synthetic.logistic_index(logit_R.astype(np.int64), len(p_L))]


def _bias(centred_R: Floats, click_rate: float, p_L: Floats) -> int:
    low, high = -32.0 * UNIT, 32.0 * UNIT
    for _ in range(32):
        bias = (low + high) / 2
        if _p(centred_R + bias, p_L).mean() > click_rate:
            high = bias
        else:
            low = bias
    return round(low)


def blank_teacher(salt: int, head_ranks: int, pairs: tuple[tuple[int, int], ...]) -> Teacher:
    """A teacher that is still to be scaled."""
    return Teacher(
        salt=salt,
        head_ranks=head_ranks,
        pairs=pairs,
        bias=0,
        dense_gain=0,
        categorical_gain=0,
        interaction_gain=0,
        logistic=logistic_table(),
    )
