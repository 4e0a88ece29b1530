"""Attacks on weights and checkpoints: rates that are too high."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch

from .base import SMALL, Attack, expect, program

PAPER = (*SMALL, "model=dlrm_paper", "checkpoint.every=7", "hydra.run.dir=run")
WORLD = ("parallel=hybrid", "parallel.world=in_process")
RATES = ("10", "1e2", "1e3", "1e4", "1e5")


def _diverges(*overrides: str) -> Callable[[Path], str]:
    """Train for 109 steps at a rate that no model survives."""

    def attack(folder: Path) -> str:
        ended = program(["train", *PAPER, *overrides], folder)
        root = folder / "run"
        expect(ended.code in (0, 4), f"exit code {ended.code}: {ended.errors}")
        status = json.loads((root / "summary.json").read_text())["status"]
        expect(status == ("complete" if ended.code == 0 else "diverged"), status)
        expect(ended.code == 0 or "may be too high" in ended.errors, ended.errors)
        _expect_finite(list(root.glob("checkpoints/*/*.safetensors")))
        return ended.errors.strip() or "every checkpoint is finite"

    return attack


def _expect_finite(files: Sequence[Path]) -> None:
    for file in files:
        tensors = cast(dict[str, torch.Tensor], cast(Any, safetensors.torch).load_file(file))
        for name, tensor in tensors.items():
            is_unset = name.endswith(".threshold")  # NaN until one is found
            expect(is_unset or bool(torch.isfinite(tensor).all()), f"{file}: {name}")


def _rates() -> list[Attack]:
    rows: dict[str, tuple[str, ...]] = {
        f"lr-{rate}-seed-{seed}-{precision}": (
            *(f"optimizer.lr={rate}", f"train.seed={seed}", f"precision={precision}"),
        )
        for rate in RATES
        for seed in range(3)
        for precision in ("float32", "bfloat16")
    }
    rows["embedding-lr-1e38"] = ("embedding.lr=1e38",)
    rows["hybrid-embedding-lr-1e38"] = (*WORLD, "embedding.lr=1e38")
    rows["hybrid-lr-1e3"] = (*WORLD, "optimizer.lr=1e3")
    rows["dct-lr-1e3"] = (*WORLD, "+experiment=dct_hybrid", "optimizer.lr=1e3")
    rows["world-lr-1e3"] = ("parallel=hybrid", "optimizer.lr=1e3")
    expected = "exit 4 with step and key, or finite; no checkpoint holds NaN"
    return [Attack(name, expected, _diverges(*overrides)) for name, overrides in rows.items()]


ATTACKS = (*_rates(),)
