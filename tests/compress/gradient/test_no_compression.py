"""Without compression the section is the gradient."""

import numpy as np
import torch
from agreeing import encoded

from dlrm_hybrid.compress.gradient.compressor import Compressor, Dense
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.report import SentReport
from dlrm_hybrid.wire.dense import array_of

SPECS = (Spec(3, "a.weight", (2, 3)), Spec(5, "a.bias", (2,)))


def test_sections_view_the_gradients() -> None:
    compressor: Compressor = Dense(Layout(SPECS))
    gradients = {spec.name: torch.randn(spec.shape) for spec in SPECS}
    sections = encoded(compressor, {**gradients, "b.weight": torch.zeros(4)}, 0)
    assert [(name, one.tensor) for name, one in sections.items()] == [
        ("a.weight", 3),
        ("a.bias", 5),
    ]
    for name, section in sections.items():
        sent = array_of(section)
        assert np.shares_memory(sent, gradients[name].numpy())
        assert sent.tolist() == gradients[name].view(-1).tolist()
    assert compressor.tensors() == {}


def test_all_that_was_sent_is_reported_once() -> None:
    compressor = Dense(Layout(SPECS))
    for step in range(3):
        encoded(compressor, {spec.name: torch.zeros(spec.shape) for spec in SPECS}, step)
    assert compressor.report()["a.weight"] == SentReport(elements=18, sent=18)
    assert compressor.report()["a.bias"].elements == 0
