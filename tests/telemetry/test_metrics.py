from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_hybrid.telemetry import metrics
from dlrm_hybrid.telemetry.metrics import BinaryMetrics, LabelMetrics, metrics_of
from dlrm_hybrid.types import DataError, DivergedError


def oracle() -> ModuleType:
    """Imported when it is asked: each process that collects tests would wait for it."""
    return import_module("sklearn.metrics")


def score(logits, labels, max_bins=metrics.MAX_BINS):
    total = BinaryMetrics(max_bins)
    total.add(np.asarray(logits, np.float32), np.asarray(labels, np.float32))
    return total.scores()


def draw(rows, spread, seed, mean=-1.05, tail=0.0):
    """Logits around `mean` and labels that follow them, with an AUC of about 0.7."""
    generator = np.random.default_rng(seed)
    hidden = generator.normal(size=rows) + tail * generator.standard_t(2, size=rows)
    labels = generator.random(rows) < 0.5 + 0.5 * np.tanh(0.4 * hidden - 0.6)
    return (mean + spread * hidden).astype(np.float32), labels.astype(np.float32)


def assert_like_oracle(found, logits, labels, auc_error):
    wide = logits.astype(np.float64)
    losses = np.logaddexp(0, np.where(labels == 1, -wide, wide))  # scikit-learn clips at 1e-16
    rate = labels.mean()
    assert found.rows == len(labels)
    assert found.base_rate == pytest.approx(rate, rel=1e-6)
    assert found.log_loss == pytest.approx(losses.mean(), rel=1e-12)
    predicted = np.exp(-np.logaddexp(0, -wide)).mean()
    assert found.calibration == pytest.approx(predicted / rate, rel=1e-6)
    assert found.accuracy == pytest.approx(oracle().accuracy_score(labels, wide > 0), abs=1e-12)
    assert found.auc == pytest.approx(oracle().roc_auc_score(labels, logits), abs=auc_error)
    base_loss = oracle().log_loss(labels, np.full(len(labels), rate, np.float64))
    assert found.normalized_entropy == pytest.approx(found.log_loss / base_loss, rel=1e-6)


@pytest.mark.parametrize(
    ("spread", "mean", "tail"),
    [
        (0.0017, -1.05, 0),  # all within 0.01: early training
        (1e-6, -1.05, 0),  # a few adjacent floats
        (0.0017, -4, 0),
        (1e-4, 0, 0),
        (0.8, -1.05, 0),
        (1, 0, 3),
        (20, 0, 0),
    ],
)
def test_scores_equal_scikit_learn_on_many_rows(spread, mean, tail):
    logits, labels = draw(150_000, spread, seed=1, mean=mean, tail=tail)
    assert_like_oracle(score(logits, labels), logits, labels, auc_error=1e-12)


@pytest.mark.parametrize(("spread", "tail"), [(0.0017, 0), (0.8, 0), (1, 3), (20, 0)])
def test_more_different_logits_than_bins_keep_five_digits(spread, tail):
    logits, labels = draw(150_000, spread, seed=2, tail=tail)
    exact = oracle().roc_auc_score(labels, logits)
    assert len(np.unique(logits)) > 1 << 13
    coarse = score(logits, labels, max_bins=1 << 13).auc
    assert coarse == pytest.approx(exact, abs=5e-6)
    assert coarse != exact


rows = st.lists(
    st.tuples(st.floats(-90, 90, width=32) | st.sampled_from([-0.0, 0.0, 1.0]), st.booleans()),
    min_size=1,
    max_size=60,
)


@settings(deadline=None)
@given(rows)
def test_any_rows_score_as_scikit_learn_says(rows):
    logits = np.array([logit for logit, _ in rows], np.float32)
    labels = np.array([label for _, label in rows], np.float32)
    found = score(logits, labels)
    if len(set(labels)) == 2:
        wide = logits.astype(np.float64)
        assert found.auc == pytest.approx(oracle().roc_auc_score(labels, wide), abs=1e-12)
        loss = np.logaddexp(0, np.where(labels == 1, -wide, wide)).mean()
        assert found.log_loss == pytest.approx(loss, rel=1e-12)
    else:
        assert found.auc is None
        assert found.normalized_entropy is None
        assert (found.calibration is None) == (labels[0] == 0)
        assert found.base_rate == labels[0]
        assert np.isfinite(found.log_loss)


@settings(deadline=None)
@given(rows, st.integers(1, 40), st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_neither_order_nor_parts_change_the_auc(rows, max_bins, cut, seed):
    logits = np.array([logit for logit, _ in rows], np.float32)
    labels = np.array([label for _, label in rows], np.float32)
    metrics = BinaryMetrics(max_bins)
    order = np.random.default_rng(seed).permutation(len(rows))
    for part in (order[:cut], order[cut:]):
        metrics.add(logits[part], labels[part])
    found, whole = metrics.scores(), score(logits, labels, max_bins)
    assert found.auc == whole.auc
    assert found.accuracy == whole.accuracy
    assert found.log_loss == pytest.approx(whole.log_loss, rel=1e-12)


@pytest.mark.parametrize("max_bins", [metrics.MAX_BINS, 1 << 13])
def test_weighted_scores_equal_scikit_learn(max_bins, monkeypatch):
    monkeypatch.setattr(metrics, "PENDING_ROWS", 1 << 14)
    logits, labels = draw(50_000, 0.8, seed=4)
    generator = np.random.default_rng(5)
    weights = (generator.exponential(size=50_000) * (generator.random(50_000) < 0.9)).astype(
        np.float32
    )
    total = BinaryMetrics(max_bins)
    for start in range(0, 50_000, 1700):
        some = slice(start, start + 1700)
        total.add(logits[some], labels[some], weights[some])
    found, wide = total.scores(), logits.astype(np.float64)
    losses = np.logaddexp(0, np.where(labels == 1, -wide, wide))
    rate = np.average(labels, weights=weights.astype(np.float64))
    predicted = np.average(1 / (1 + np.exp(-wide)), weights=weights)
    right = oracle().accuracy_score(labels, wide > 0, sample_weight=weights)
    auc = oracle().roc_auc_score(labels, wide, sample_weight=weights)
    assert found.rows == 50_000
    assert found.base_rate == pytest.approx(rate, rel=1e-9)
    assert found.log_loss == pytest.approx(np.average(losses, weights=weights), rel=1e-9)
    assert found.calibration == pytest.approx(predicted / rate, rel=1e-9)
    assert found.accuracy == pytest.approx(right, rel=1e-9)
    assert found.auc == pytest.approx(auc, abs=1e-9 if max_bins > 1 << 13 else 5e-6)
    base_loss = oracle().log_loss(labels, np.full(50_000, rate), sample_weight=weights)
    assert found.normalized_entropy == pytest.approx(found.log_loss / base_loss, rel=1e-6)
    assert found.log_loss != pytest.approx(losses.mean(), rel=1e-3)


@settings(deadline=None)
@given(rows, st.data())
def test_a_weight_is_a_number_of_copies(rows, data):
    copies = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    logits, labels = (np.array(column, np.float32) for column in zip(*rows, strict=True))
    total = BinaryMetrics()
    total.add(logits, labels, np.array(copies, np.float32))
    if not any(copies):
        with pytest.raises(DataError, match=f"{len(rows)} rows to score, none with a weight above"):
            total.scores()
        return
    found = total.scores()
    copied = score(np.repeat(logits, copies), np.repeat(labels, copies))
    for name in ("accuracy", "auc", "base_rate"):
        assert getattr(found, name) == getattr(copied, name), name
    for name in ("log_loss", "calibration", "normalized_entropy"):
        one, other = getattr(found, name), getattr(copied, name)
        assert one == other or one == pytest.approx(other, rel=1e-12), name


def test_rows_without_weights_among_others_have_the_weight_one():
    logits, labels = draw(600, 0.8, seed=6)
    total, expected = BinaryMetrics(), BinaryMetrics()
    total.add(logits[:200], labels[:200])
    total.add(logits[200:400], labels[200:400], np.full(200, 2, np.float32))
    total.add(logits[400:], labels[400:])
    expected.add(logits, labels, np.repeat(np.array([1, 2, 1], np.float32), 200))
    assert total.scores() == expected.scores()


@pytest.mark.parametrize("is_weighted", [False, True])
def test_gauc_is_the_mean_auc_of_the_groups_by_their_rows(is_weighted):
    logits, labels = draw(5_000, 0.8, seed=7)
    logits = np.round(logits, 1)  # ties
    generator = np.random.default_rng(8)
    groups = (generator.zipf(1.3, 5_000) % 1000).astype(np.int64) * 2**50
    weights = generator.exponential(size=5_000).astype(np.float32) if is_weighted else None
    total = BinaryMetrics()
    for start in range(0, 5_000, 1700):
        some = slice(start, start + 1700)
        weight = None if weights is None else weights[some]
        total.add(logits[some], labels[some], weight, groups[some])
    aucs, sizes = [], []
    for group in set(groups.tolist()) - {0}:
        own = groups == group
        if len(set(labels[own])) == 2:
            weight = None if weights is None else weights[own].astype(np.float64)
            aucs.append(oracle().roc_auc_score(labels[own], logits[own], sample_weight=weight))
            sizes.append(own.sum() if weight is None else weight.sum())
    found = total.scores()
    assert len(aucs) > 100 and (groups == 0).any()
    assert found.gauc == pytest.approx(np.average(aucs, weights=sizes), abs=1e-10)
    assert found.values["gauc"] == found.gauc
    assert abs(found.gauc - found.auc) > 1e-4
    plain = BinaryMetrics()
    plain.add(logits, labels, weights)
    assert "gauc" not in plain.scores().values
    assert {**plain.scores().values, "gauc": found.gauc} == found.values


@pytest.mark.parametrize("groups", [[1, 1, 2, 2], [0, 0, 0, 0], [0, 1, 1, 2]])
def test_without_a_group_of_both_labels_there_is_no_gauc(groups):
    total = BinaryMetrics()
    logits, labels = np.arange(4, dtype=np.float32), np.array([1, 1, 0, 0], np.float32)
    labels = labels if groups[1] != 1 or groups[0] == 1 else np.array([1, 0, 0, 1], np.float32)
    total.add(logits, labels, None, np.array(groups, np.int64))
    assert total.scores().gauc is None
    assert total.scores().auc is not None


@pytest.mark.parametrize("batch_size", [1000, 4096, 70_001, 140_000])
def test_batch_size_does_not_change_a_bit(batch_size, monkeypatch):
    monkeypatch.setattr(metrics, "PENDING_ROWS", 1 << 16)
    logits, labels = draw(100_000, 0.8, seed=3)
    total = BinaryMetrics()
    for start in range(0, len(logits), batch_size):
        stop = start + batch_size
        total.add(logits[start:stop], labels[start:stop])
        if start == 0:
            total.scores()
    assert total.scores() == score(logits, labels)


def test_arrays_are_copied():
    logits, labels = np.ones(4, np.float32), np.array([0, 1, 0, 1], np.float32)
    total = BinaryMetrics()
    total.add(logits, labels)
    before = total.scores()
    logits[:] = -1
    labels[:] = 1
    assert total.scores() == before


@pytest.mark.parametrize("logit", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_ends_the_scoring(logit):
    with pytest.raises(DivergedError, match=f"not finite: logit {logit}"):
        score([0.0, logit], [0, 1])


def test_no_rows_have_no_scores():
    with pytest.raises(ValueError, match="no rows"):
        BinaryMetrics().scores()


def test_scores_of_several_labels_equal_scikit_learn_on_each():
    generator, rows = np.random.default_rng(7), 5000
    drawn = [draw(rows, spread, seed) for seed, spread in enumerate((0.8, 2.0, 0.1))]
    logits, labels = (np.stack(one, 1) for one in zip(*drawn, strict=True))
    weights = generator.exponential(size=rows).astype(np.float32)
    groups = generator.integers(0, 40, rows)
    factors = {"clicked": 1.0, "bought": 0.25, "liked": 3.0}
    total = metrics_of(factors)
    for start in range(0, rows, 700):
        some = slice(start, start + 700)
        total.add(logits[some], labels[some], weights[some], groups[some])
    found, loss = total.scores(), 0.0
    assert isinstance(total, LabelMetrics) and [*found.labels] == [*factors]
    for place, (name, factor) in enumerate(factors.items()):
        label, logit = labels[:, place], logits[:, place].astype(np.float64)
        chance = 1 / (1 + np.exp(-logit))
        log_loss = oracle().log_loss(label, chance, sample_weight=weights)
        auc = oracle().roc_auc_score(label, logit, sample_weight=weights)
        one = found.labels[name]
        assert one.log_loss == pytest.approx(log_loss, rel=1e-6)
        assert one.auc == pytest.approx(auc, abs=1e-6)
        assert one.accuracy == pytest.approx(
            oracle().accuracy_score(label, logit > 0, sample_weight=weights), abs=1e-6
        )
        alone = BinaryMetrics()
        alone.add(logits[:, place], label, weights, groups)
        assert alone.scores() == one and one.gauc is not None
        loss += factor * log_loss
    assert found.log_loss == pytest.approx(loss, rel=1e-6)
    first = found.labels["clicked"]
    assert (found.auc, found.gauc, found.accuracy) == (first.auc, first.gauc, first.accuracy)
    assert found.values["labels"]["liked"] == found.labels["liked"].values
    assert "labels" not in first.values and isinstance(metrics_of({}), BinaryMetrics)
