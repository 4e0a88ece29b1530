"""The benchmark of hooks measures a contestant in processes of its own."""

import hooks
import pytest


@pytest.mark.slow
def test_a_sparse_hook_sends_less_than_ddp() -> None:
    dense, sparse = (hooks.measured(name, width=64, steps=3) for name in (hooks.PLAIN, "TopK"))
    assert dense["elements"] == sparse["elements"] == 4 * (64 * 64 + 64) + 65
    # A ring of two sends every float32 once; a hundredth of them takes about 6 bytes each.
    assert dense["sent"] > 4 * dense["elements"]
    assert 0 < sparse["sent"] < dense["sent"] / 10
    assert sparse["seconds"] > 0 and sparse["peak"] > 2**20
